"""Evaluate a trained model: accuracy, attention metrics, and deletion of attended cells."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn

from overt import metrics
from overt.attention import AttentionMap
from overt.data.batch import Batch
from overt.data.dataset import Dataset
from overt.errors import UserError
from overt.experiments.experiment import Evaluation, MetricValue, direction_word
from overt.geometry import PixelGeometry
from overt.metrics.metric import MetricInfo
from overt.metrics.scorecard.evaluate import image_clusters
from overt.nn import AttentionModel, Output
from overt.train.distributed import Processes
from overt.train.shards import is_sharded
from overt.viz.gallery_sample import GallerySample

GALLERY_PER_GROUP = 3
GALLERY_SIZE = 24  # at least, if there are that many samples
REGION_GRID = (16, 16)  # cells of the gallery map of region features
CONTRAST_SEED = 20

OutputMetric = Callable[[Output, Batch], Tensor]  # one number per sample, NaN where undefined
# values per item, with the definition of the metric
PerItemMetrics = dict[str, tuple[MetricInfo, Tensor]]

DELETION = MetricInfo("deletion", "probability", True, -1.0, 1.0)
FLIPS = MetricInfo("flips", "share", True, -1.0, 1.0)


@dataclass(frozen=True)
class Evaluator:
    """Evaluates classifiers on a dataset.

    Several processes share the batches of an evaluation, and all of them must call it: each batch
    is evaluated in one process, and every process returns the results of all. They equal those of
    one process, since a result depends on its batch only.

    Args:
        data: The split to evaluate on.
        classes: Names of the classes.
        chance: Returns the chance accuracy of a group of samples.
        held_out: A group that training left out; its metrics are also reported separately.
        batch_size: Items per batch.
        metrics: Further metrics by name, functions `(output, batch) -> one number per sample`;
            declared with `metrics.metric.declare_metric`, they have a unit and a better direction.

    Example:
        >>> from overt.data import PhrasePairs
        >>> evaluator = Evaluator(PhrasePairs("test", seed=0, count=4), classes=("no", "yes"))
        >>> sum(len(batch) for batch in evaluator.batches(torch.device("cpu")))
        4
    """

    data: Dataset
    classes: Sequence[str]
    chance: Callable[[str], float] | None = None
    held_out: str | None = None
    batch_size: int = 64
    metrics: Mapping[str, OutputMetric] = field(default_factory=dict)

    def accuracy(self, model: AttentionModel, device: torch.device) -> float:
        """Return the accuracy, for validation during training."""

        def score(batch: Batch) -> PerItemMetrics:
            right = metrics.accuracy(model(batch).prediction, labels_of(batch))
            return {"accuracy": (metrics.accuracy.info, right)}

        return float(self.collect(score, model, device)["accuracy"][1].nanmean())

    def batches(self, device: torch.device) -> Iterator[Batch]:
        """Yield all items in order; an empty dataset raises `UserError`."""
        for indices in self._portions():
            yield self.data.batch(indices).to(device)

    def first_batches(self, count: int, device: torch.device) -> Iterator[Batch]:
        """Yield the first `count` items, or all if there are fewer."""
        for indices in portions(min(count, len(self.data)), self.batch_size):
            yield self.data.batch(indices).to(device)

    def evaluate(self, model: AttentionModel, device: torch.device) -> Evaluation:
        """Compute every metric that the model and the data allow, per sample and as means."""
        found, _ = self.evaluate_with(model, device, lambda batch: {})
        return found

    def evaluate_with(
        self,
        model: AttentionModel,
        device: torch.device,
        more: Callable[[Batch], PerItemMetrics],
    ) -> tuple[Evaluation, PerItemMetrics]:
        """Evaluate a model, and compute `more` from each batch without reading the images again.

        Args:
            model: The model.
            device: Its device.
            more: Further metrics of a batch.

        Returns:
            The evaluation, and the further metrics of all samples.
        """
        rule = _GalleryRule()

        def score(indices: range) -> dict[str, Any]:
            batch = self.data.batch(indices).to(device)
            part = _EvaluationState(self, rule)
            part.add(model, batch)
            part.more.append(more(batch))
            return part.to_plain()

        whole = _EvaluationState(self, _GalleryRule())
        for part in _sharing_processes(model, device).map(score, self._portions()):
            whole.append(part)
        return whole.evaluation(), concatenate_metrics(whole.more)

    def collect(
        self, score: Callable[[Batch], PerItemMetrics], model: object, device: torch.device
    ) -> PerItemMetrics:
        """Compute metrics of all samples, batch by batch.

        Args:
            score: Returns metrics of a batch.
            model: The model that `score` runs.
            device: Its device.

        Returns:
            The metrics of all samples, on the CPU.
        """

        def score_portion(indices: range) -> dict[str, Any]:
            return _metrics_to_plain(score(self.data.batch(indices).to(device)))

        parts = _sharing_processes(model, device).map(score_portion, self._portions())
        return concatenate_metrics(_metrics_from_plain(part) for part in parts)

    def _portions(self) -> list[range]:
        if not len(self.data):
            where = f"{self.data.name}, {self.data.split}"
            raise UserError(f"cannot evaluate on an empty dataset: {where} has no items")
        return portions(len(self.data), self.batch_size)


def portions(count: int, size: int) -> list[range]:
    """Return the indices of successive batches; the last one may be smaller."""
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


def _sharing_processes(model: object, device: torch.device) -> Processes:
    """Return the processes that share an evaluation.

    If parameters are sharded, all processes must run every batch: each gathers them together.
    """
    if isinstance(model, nn.Module) and any(is_sharded(one) for one in model.parameters()):
        return Processes(0, 1, device)
    return Processes.current(device)


def _metrics_to_plain(found: PerItemMetrics) -> dict[str, Any]:
    """Return metrics as values that can be sent to other processes."""
    return {name: (vars(info), one.detach().float().cpu()) for name, (info, one) in found.items()}


def _metrics_from_plain(plain: Mapping[str, Any]) -> PerItemMetrics:
    return {name: (MetricInfo(**info), values) for name, (info, values) in plain.items()}


def labels_of(batch: Batch) -> Int[Tensor, " b"]:
    """Return the labels of a batch; a batch without labels raises `UserError`."""
    if batch.labels is None:
        raise UserError(
            f"sample {batch.ids[0]} has no label: a classifier needs batches with `labels`, one "
            "class index per sample"
        )
    return batch.labels


@dataclass
class _GalleryRule:
    """Take the first samples of all and the first few of every group.

    The rule only counts samples that it took. Of a part of the samples it takes at least those that
    it takes of all, so several processes can collect candidates.
    """

    taken: int = 0
    of_group: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def takes(self, group: str) -> bool:
        if self.of_group[group] >= GALLERY_PER_GROUP and self.taken >= GALLERY_SIZE:
            return False
        self.taken += 1
        self.of_group[group] += 1
        return True


@dataclass
class _EvaluationState:
    """Metrics, texts and gallery of the samples evaluated so far."""

    evaluator: Evaluator
    rule: _GalleryRule
    numbers: dict[str, list[np.ndarray]] = field(default_factory=lambda: defaultdict(list))
    measures: dict[str, MetricInfo] = field(default_factory=dict)
    texts: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    gallery: list[GallerySample] = field(default_factory=list)
    more: list[PerItemMetrics] = field(default_factory=list)

    def to_plain(self) -> dict[str, Any]:
        """Return the results as values that can be sent to other processes."""
        return {
            "numbers": dict(self.numbers),
            "measures": {name: vars(one) for name, one in self.measures.items()},
            "texts": dict(self.texts),
            "gallery": [_sample_to_plain(one) for one in self.gallery],
            "more": [_metrics_to_plain(one) for one in self.more],
        }

    def append(self, plain: Mapping[str, Any]) -> None:
        """Append the results of the next batches, from `to_plain`."""
        for name, parts in plain["numbers"].items():
            self.numbers[name] += parts
        for name, one in plain["measures"].items():
            self.measures[name] = MetricInfo(**one)
        for name, texts in plain["texts"].items():
            self.texts[name] += texts
        candidates = [_sample_from_plain(one) for one in plain["gallery"]]
        self.gallery += [one for one in candidates if self.rule.takes(one.group)]
        self.more += [_metrics_from_plain(one) for one in plain["more"]]

    def add(self, model: AttentionModel, batch: Batch) -> None:
        features = model.encode(batch)
        output = model.decide(features)
        chosen = output.prediction.argmax(dim=-1)
        groups = batch.groups or ("all",) * len(batch)
        labels = labels_of(batch)
        self.texts["id"] += batch.ids
        self.texts["cluster"] += image_clusters(batch)  # samples of one image are not independent
        self.texts["group"] += groups
        self.texts["prediction"] += [self.evaluator.classes[i] for i in chosen.tolist()]
        known = labels.tolist()  # negative: no label
        self.texts["truth"] += [self.evaluator.classes[i] if i >= 0 else "" for i in known]
        rows = {"accuracy": self.compute(metrics.accuracy, output.prediction, labels)}
        sure = output.prediction.float().softmax(dim=-1).amax(dim=-1)
        self.numbers["confidence"].append(sure.cpu().numpy())
        rows |= self.add_own_metrics(output, batch)
        looked = _main_map(batch, output)
        if looked is not None:
            rows |= self.add_attention_metrics(looked.over_heads(), batch, model, features)
        self.add_to_gallery(batch, output, rows, sure)

    def add_attention_metrics(
        self, attention: AttentionMap, batch: Batch, model: AttentionModel, features: Any
    ) -> dict[str, Tensor]:
        """Compare a map with the target, if there is one, and delete its cells."""
        rows = {}
        name = attention.keys.spans[0].name
        truth = batch.target
        same = truth is not None and truth.keys.spans[0].name == name
        if truth is not None and same:
            rows["pointing"] = self.compute(metrics.pointing_game, attention, truth)
            rows["mass_inside"] = self.compute(metrics.mass_inside, attention, truth)
            rows["rank_correlation"] = self.compute(
                metrics.spearman, attention, truth, name="rank_correlation"
            )

        def decide(keep: Tensor) -> Tensor:
            return model.decide(features, {name: keep}).prediction

        # The same seed for every model: all are compared with the same random cells.
        generator = torch.Generator().manual_seed(CONTRAST_SEED)
        removed = metrics.contrast_removal(decide, attention, None, generator, draws=2)
        rows["deletion"] = self.record("deletion", DELETION, removed.beyond_random)
        beyond = removed.attended.flips - removed.random.flips
        rows["flips"] = self.record("flips", FLIPS, beyond)
        rows["entropy"] = self.compute(metrics.entropy, attention)
        return rows

    def add_own_metrics(self, output: Output, batch: Batch) -> dict[str, Tensor]:
        """Compute the metrics of the caller."""
        rows = {}
        for name, function in self.evaluator.metrics.items():
            values = function(output, batch)
            if not isinstance(values, Tensor) or values.shape != (len(batch),):
                got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
                raise UserError(
                    f"metric {name} must return one number per sample, a tensor of shape "
                    f"({len(batch)},), got {got}"
                )
            declared = getattr(function, "info", MetricInfo(name, "", None))
            rows[name] = self.record(name, declared, values)
        return rows

    def compute(self, function: Callable[..., Tensor], *values: Any, name: str = "") -> Tensor:
        declared: MetricInfo = function.info  # type: ignore[attr-defined]
        # The name of a metric becomes a key: "pointing game" is `pointing`.
        key = name or declared.name.replace(" ", "_").removesuffix("_game")
        return self.record(key, declared, function(*values))

    def record(self, name: str, declared: MetricInfo, values: Tensor) -> Tensor:
        self.measures[name] = declared
        self.numbers[name].append(values.detach().float().cpu().numpy())
        return values

    def add_to_gallery(
        self, batch: Batch, output: Output, rows: Mapping[str, Tensor], sure: Tensor
    ) -> None:
        """Add the samples that the rule takes to the gallery."""
        # The texts include this batch already.
        first = len(self.texts["id"]) - len(batch)
        for row in range(len(batch)):
            group = self.texts["group"][first + row]
            if not self.rule.takes(group):
                continue
            scores = {name: float(values[row]) for name, values in rows.items()}
            # NaN: not defined for this sample.
            known = {name: value for name, value in scores.items() if value == value}
            self.gallery.append(
                GallerySample(
                    id=batch.ids[row],
                    group=group,
                    prediction=self.texts["prediction"][first + row],
                    truth=self.texts["truth"][first + row],
                    confidence=float(sure[row]),
                    scores=known,
                    **gallery_fields(batch, output, row),
                )
            )

    def evaluation(self) -> Evaluation:
        arrays = {name: np.concatenate(parts) for name, parts in self.numbers.items()}
        groups = np.array(self.texts["group"])
        split, held_out = str(self.evaluator.data.split), self.evaluator.held_out
        shared = np.array(self.texts["cluster"])
        ours = {
            name: mean_with_interval(declared, arrays[name], split, shared)
            for name, declared in self.measures.items()
        }
        if held_out is not None:
            for name in ("accuracy", "pointing", "mass_inside"):
                if name in ours:
                    at = groups == held_out
                    found = mean_with_interval(
                        self.measures[name], arrays[name][at], split, shared[at]
                    )
                    ours[f"{name}_held_out"] = found
        names = {name: np.array(values) for name, values in self.texts.items()}
        return Evaluation(
            ours=ours,
            samples={**names, **arrays},
            groups=self.by_group(arrays, groups),
            gallery=self.gallery,
        )

    def by_group(
        self, arrays: Mapping[str, np.ndarray], groups: np.ndarray
    ) -> dict[str, dict[str, dict[str, float]]]:
        chances = {"accuracy": self.evaluator.chance}
        found = {
            name: group_means(arrays[name], groups, chances.get(name))
            for name in ("accuracy", "pointing", "mass_inside")
            if name in arrays
        }
        return {name: cells for name, cells in found.items() if cells}


def _main_map(batch: Batch, output: Output) -> AttentionMap | None:
    """Return the map to evaluate: over the image if there is one, else over the text."""
    wanted = "text" if batch.images is None and batch.features is None else "image"
    for one in output.attention:
        if one.keys.spans[0].name == wanted:
            return one
    return None


# --- metrics that a recipe adds to those of the evaluator


def group_means(
    values: np.ndarray, groups: np.ndarray, chance: Callable[[str], float] | None = None
) -> dict[str, dict[str, float]]:
    """Return the mean of each group in alphabetical order; NaN and empty groups are left out."""
    found: dict[str, dict[str, float]] = {}
    for group in sorted(set(groups.tolist())):
        each = values[groups == group]
        each = each[~np.isnan(each)]
        if len(each):
            found[group] = {"value": float(each.mean(dtype=np.float64)), "n": len(each)}
            if chance is not None:
                found[group]["chance"] = chance(group)
    return found


def mean_with_interval(
    declared: MetricInfo,
    values: np.ndarray | Tensor,
    split: str,
    clusters: np.ndarray | Sequence[str] | None = None,
) -> MetricValue:
    """Summarize a metric: its mean over the items with a confidence interval.

    `clusters` name what items share, such as their image: the interval is over clusters.
    """
    each = torch.as_tensor(values).double()
    named = None if clusters is None else [str(name) for name in clusters]
    # Values of 0 and 1 are a proportion, which has another interval.
    right_or_wrong = bool(((each == 0) | (each == 1) | each.isnan()).all())
    # A metric that can be below 0 is a difference, even if its values happen to be 0 and 1.
    around = metrics.confidence_interval(
        each, share=declared.low == 0 and right_or_wrong, clusters=named
    )
    return MetricValue(
        value=around.mean,
        unit=declared.unit,
        direction=direction_word(declared.higher_is_better),
        split=split,
        n=around.count,
        low=finite_or_none(around.low),
        high=finite_or_none(around.high),
        version=declared.version,
    )


def finite_or_none(end: float) -> float | None:
    """Return a finite number, or None in place of NaN and infinity."""
    return end if math.isfinite(end) else None


def concatenate_metrics(batches: Iterable[PerItemMetrics]) -> PerItemMetrics:
    """Concatenate the per-item metrics of successive batches."""
    parts: dict[str, list[Tensor]] = defaultdict(list)
    meanings: dict[str, MetricInfo] = {}
    for batch in batches:
        for name, (declared, values) in batch.items():
            meanings[name] = declared
            parts[name].append(values.detach().float().cpu())
    return {name: (meanings[name], torch.cat(found)) for name, found in parts.items()}


def add_metrics(found: Evaluation, more: PerItemMetrics, split: str) -> Evaluation:
    """Add per-item metrics of the first test items to an evaluation.

    The other items get NaN in `samples`. A metric that is NaN for all items is left out.
    """
    ours, samples = dict(found.ours), dict(found.samples)
    for name, (declared, values) in more.items():
        each = values.detach().float().cpu().numpy()
        if np.isnan(each).all():
            continue
        shared = samples.get("cluster")
        ours[name] = mean_with_interval(
            declared, each, split, None if shared is None else shared[: len(each)]
        )
        samples[name] = np.full(len(found.samples["id"]), np.nan, dtype=np.float32)
        samples[name][: len(each)] = each
    return replace(found, ours=ours, samples=samples)


def add_family_charts(found: Evaluation, families: Sequence[str]) -> Evaluation:
    """Show each family of metrics as one chart in the report.

    The family `jaccard` has the metrics `jaccard_<member>`. A single metric is not a family, and a
    metric with a chart of its own is left out.
    """
    groups = dict(found.groups)
    for family in families:
        members = {
            name.removeprefix(f"{family}_"): {"value": one.value, "n": one.n}
            for name, one in found.ours.items()
            if name.startswith(f"{family}_") and name not in found.groups
        }
        if len(members) > 1:
            before = groups.get(family, {})
            groups[family] = {**(before if len(before) > 1 else {}), **members}
    return replace(found, groups=groups)


def add_calibration_error(found: Evaluation, bins: int = 15, draws: int = 1000) -> Evaluation:
    """Add the expected calibration error of the predictions, `ece`, to an evaluation.

    It is computed as in `metrics.reliability_diagram`, with bins of equal width. The interval is a
    percentile bootstrap over samples: the error is not a mean, so Student's t does not apply. It is
    biased upwards for few samples, and more so for resamples, so the interval may lie above the
    value.
    """
    sure = torch.from_numpy(found.samples["confidence"]).double()
    right = torch.from_numpy(found.samples["accuracy"]).double()
    known = ~right.isnan()
    gaps = (sure - right)[known]
    # Inner edges only: the first and the last bin are open.
    place = torch.bucketize(sure[known], torch.arange(1, bins, dtype=torch.float64) / bins)
    count = len(gaps)
    if not count:
        return found

    def error(rows: Tensor) -> float:
        # A bin contributes n_b / n * |confidence - accuracy|: with sums of gaps, n_b cancels.
        each = torch.bincount(place[rows], weights=gaps[rows], minlength=bins)
        return float(each.abs().sum()) / count

    generator = torch.Generator().manual_seed(CONTRAST_SEED)
    again = [error(torch.randint(count, (count,), generator=generator)) for _ in range(draws)]
    ends = np.quantile(again, [0.025, 0.975]).tolist()
    low, high = ends if count > 1 else (None, None)  # resamples of one sample do not vary
    split = found.ours["accuracy"].split
    ece = MetricValue(error(torch.arange(count)), "share", "lower", split, count, low, high)
    return replace(found, ours={**found.ours, "ece": ece})


# --- the gallery


def _sample_to_plain(sample: GallerySample) -> dict[str, Any]:
    """Return a sample as values that can be sent to other processes."""
    geometry = None if sample.geometry is None else vars(sample.geometry)
    return {**vars(sample), "geometry": geometry}


def _sample_from_plain(plain: Mapping[str, Any]) -> GallerySample:
    geometry = plain["geometry"]
    whole = None if geometry is None else PixelGeometry(**geometry)
    return GallerySample(**{**plain, "geometry": whole})


def gallery_fields(batch: Batch, output: Output, row: int) -> dict[str, Any]:
    """Return the image and the text of a sample, with the maps over both."""
    return {**_image_fields(batch, output, row), **_text_fields(batch, output, row)}


def _image_fields(batch: Batch, output: Output, row: int) -> dict[str, Any]:
    """Return the image of a sample, with the map over its cells and the target."""
    if batch.images is None:
        return {}
    image = int(batch.image_index[row])
    pixels = batch.images[image].permute(1, 2, 0).cpu().numpy().astype(np.uint8)
    found: dict[str, Any] = {
        "image": pixels,
        "geometry": _displayed_geometry(batch, image, pixels.shape[:2]),
    }
    for one in output.attention:
        span = one.keys.spans[0]
        if span.name == "image":
            weights = one.over_heads().weights[row].flatten()
            found["cells"] = weights.reshape(span.shape).float().cpu().numpy()
            if batch.target is not None and batch.target.keys.spans[0].name == "image":
                truth = batch.target.weights[row].flatten()
                if truth.sum() > 0:
                    found["truth_cells"] = truth.reshape(span.shape).cpu().numpy()
    return found


def region_weights_on_grid(batch: Batch, row: int, weights: Tensor) -> np.ndarray:
    """Draw weights of regions (columns) on a grid over the photo, one grid per row.

    The weight of a region is spread evenly over its box.
    """
    geometry = batch.sample_geometry
    assert geometry is not None and batch.boxes is not None
    boxes = batch.boxes[row : row + 1].cpu()
    cover = geometry.to("cpu")[row].cover_any_boxes(boxes, REGION_GRID)[0]
    # A padded box covers no cell.
    share = cover / cover.sum(dim=-1, keepdim=True).clamp_min(1e-9)
    weights = weights.detach().float().cpu()
    return (weights @ share.to(weights)).reshape(-1, *REGION_GRID).numpy()


def region_boxes(batch: Batch, row: int) -> np.ndarray | None:
    """Return the boxes of the regions of a sample, or None."""
    if batch.boxes is None:
        return None
    there = (
        batch.boxes[row] if batch.region_mask is None else batch.boxes[row][batch.region_mask[row]]
    )
    return there.float().cpu().numpy()


def _displayed_geometry(batch: Batch, image: int, size: tuple[int, int]) -> PixelGeometry | None:
    """Return the geometry of an image; a resized photo is shown as the model received it."""
    if batch.geometry is None:
        return None
    geometry = batch.geometry[image].to("cpu")
    same = tuple(geometry.size[0].tolist()) == size
    return geometry if same else PixelGeometry.identity(1, size)


def _text_fields(batch: Batch, output: Output, row: int) -> dict[str, Any]:
    """Return the text of a sample, with the weights of its words."""
    if batch.text is None or batch.token_mask is None:
        return {}
    there = batch.token_mask[row].cpu()
    found: dict[str, Any] = {
        "text": batch.text.texts[row],
        "spans": batch.text.spans[row].cpu()[there].numpy(),
    }
    for one in output.attention:
        if one.keys.spans[0].name == "text":
            weights = one.over_heads().weights[row].flatten().cpu()
            found["word_weights"] = weights[there].float().numpy()
    return found
