"""Judge a trained model on a data set: answers, attention, and what is left when it is removed."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from overt import measure
from overt.attention import AttentionMap
from overt.data.batch import Batch
from overt.data.source import Source
from overt.errors import BadInput
from overt.geometry import PixelGeometry
from overt.measure.measured import Measure
from overt.measure.scorecards.scoring import clusters_of
from overt.models import Model, Output
from overt.recipes.experiment import Evaluation, Value, direction
from overt.show.sample import Sample

SHOWN_A_GROUP = 3
SHOWN = 24  # at least, where there are so many
REGIONS = (16, 16)  # the grid on which regions are drawn
CONTRAST_SEED = 20

DELETION = Measure("deletion", "probability", True, -1.0, 1.0)
FLIPS = Measure("flips", "share", True, -1.0, 1.0)


@dataclass(frozen=True)
class Judge:
    """What a model is judged on, and by which names its answers are called.

    `chance` gives the share of right answers that can be had without looking, a group of samples.
    `held_out` names a group that training never saw: it is reported apart as well.
    """

    data: Source
    classes: Sequence[str]
    chance: Callable[[str], float] | None = None
    held_out: str | None = None
    portion: int = 64

    def accuracy(self, model: Model, device: torch.device) -> float:
        """The share of right answers, for validation while training."""
        right = [
            measure.accuracy(model(batch).prediction, labels_of(batch))
            for batch in self.batches(device)
        ]
        return float(torch.cat(right).nanmean())

    def batches(self, device: torch.device) -> Iterator[Batch]:
        """All items in order, a portion at a time; there has to be one."""
        if not len(self.data):
            where = f"{self.data.name}, {self.data.split}"
            raise BadInput(f"there is nothing to judge a model on: {where} is empty")
        yield from self.first(len(self.data), device)

    def first(self, count: int, device: torch.device) -> Iterator[Batch]:
        """The first `count` items, or as many as there are, a portion at a time."""
        most = min(count, len(self.data))
        for start in range(0, most, self.portion):
            yield self.data.batch(range(start, min(start + self.portion, most))).to(device)

    def evaluate(
        self,
        model: Model,
        device: torch.device,
        beside: Callable[[Batch], object] = lambda batch: None,
    ) -> Evaluation:
        """Every measure that the model and the data allow: one number a sample, and the means.

        `beside` sees every batch as well: reading photos again may take longer than a network does.
        """
        found = _Found(self)
        for batch in self.batches(device):
            found.add(model, batch)
            beside(batch)
        return found.evaluation()


def labels_of(batch: Batch) -> Int[Tensor, " b"]:
    """The classes of a batch, which has to have them."""
    if batch.labels is None:
        raise BadInput(
            f"sample {batch.ids[0]} has no class: a classifier needs batches with labels, a whole "
            "number a sample"
        )
    return batch.labels


@dataclass
class _Found:
    """What has been measured so far."""

    judge: Judge
    numbers: dict[str, list[np.ndarray]] = field(default_factory=lambda: defaultdict(list))
    measures: dict[str, Measure] = field(default_factory=dict)
    texts: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    gallery: list[Sample] = field(default_factory=list)
    shown: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, model: Model, batch: Batch) -> None:
        features = model.encode(batch)
        output = model.decide(features)
        chosen = output.prediction.argmax(dim=-1)
        groups = batch.groups or ("all",) * len(batch)
        labels = labels_of(batch)
        self.texts["id"] += batch.ids
        self.texts["cluster"] += clusters_of(batch)  # samples of one image are not independent
        self.texts["group"] += groups
        self.texts["prediction"] += [self.judge.classes[i] for i in chosen.tolist()]
        known = labels.tolist()  # a negative label stands for none
        self.texts["truth"] += [self.judge.classes[i] if i >= 0 else "" for i in known]
        rows = {"accuracy": self.note(measure.accuracy, output.prediction, labels)}
        sure = output.prediction.float().softmax(dim=-1).amax(dim=-1)
        self.numbers["confidence"].append(sure.cpu().numpy())
        looked = _main_map(batch, output)
        if looked is not None:
            rows |= self.look(looked.over_heads(), batch, model, features)
        self.show(batch, output, rows, sure)

    def look(
        self, attention: AttentionMap, batch: Batch, model: Model, features: Any
    ) -> dict[str, Tensor]:
        """Measures of a map: against the truth where it is known, and by removing its cells."""
        rows = {}
        name = attention.keys.spans[0].name
        truth = batch.target
        same = truth is not None and truth.keys.spans[0].name == name
        if truth is not None and same:
            rows["pointing"] = self.note(measure.pointing_game, attention, truth)
            rows["mass_inside"] = self.note(measure.mass_inside, attention, truth)
            rows["rank_correlation"] = self.note(
                measure.spearman, attention, truth, name="rank_correlation"
            )

        def decide(keep: Tensor) -> Tensor:
            return model.decide(features, {name: keep}).prediction

        generator = torch.Generator().manual_seed(CONTRAST_SEED)
        removed = measure.contrast(decide, attention, None, generator, draws=2)
        rows["deletion"] = self.keep("deletion", DELETION, removed.beyond_random)
        beyond = removed.attended.flips - removed.random.flips
        rows["flips"] = self.keep("flips", FLIPS, beyond)
        rows["entropy"] = self.note(measure.entropy, attention)
        return rows

    def note(self, function: Callable[..., Tensor], *values: Any, name: str = "") -> Tensor:
        declared: Measure = function.measure  # type: ignore[attr-defined]
        key = name or declared.name.replace(" ", "_").removesuffix("_game")
        return self.keep(key, declared, function(*values))

    def keep(self, name: str, declared: Measure, values: Tensor) -> Tensor:
        self.measures[name] = declared
        self.numbers[name].append(values.detach().float().cpu().numpy())
        return values

    def show(self, batch: Batch, output: Output, rows: Mapping[str, Tensor], sure: Tensor) -> None:
        """Keep the first samples of all, and the first few of every group, for the gallery."""
        first = len(self.texts["id"]) - len(batch)
        for row in range(len(batch)):
            group = self.texts["group"][first + row]
            if self.shown[group] >= SHOWN_A_GROUP and len(self.gallery) >= SHOWN:
                continue
            self.shown[group] += 1
            scores = {name: float(values[row]) for name, values in rows.items()}
            known = {name: value for name, value in scores.items() if value == value}
            self.gallery.append(
                Sample(
                    id=batch.ids[row],
                    group=group,
                    prediction=self.texts["prediction"][first + row],
                    truth=self.texts["truth"][first + row],
                    confidence=float(sure[row]),
                    scores=known,
                    **drawn(batch, output, row),
                )
            )

    def evaluation(self) -> Evaluation:
        arrays = {name: np.concatenate(parts) for name, parts in self.numbers.items()}
        groups = np.array(self.texts["group"])
        split, held_out = str(self.judge.data.split), self.judge.held_out
        ours = {
            name: valued(declared, arrays[name], split) for name, declared in self.measures.items()
        }
        if held_out is not None:
            for name in ("accuracy", "pointing", "mass_inside"):
                if name in ours:
                    unseen = arrays[name][groups == held_out]
                    ours[f"{name}_held_out"] = valued(self.measures[name], unseen, split)
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
        found: dict[str, dict[str, dict[str, float]]] = {}
        for name in ("accuracy", "pointing", "mass_inside"):
            if name not in arrays:
                continue
            for group in sorted(set(groups.tolist())):
                values = arrays[name][groups == group]
                values = values[~np.isnan(values)]
                if not len(values):
                    continue
                cell = {"value": float(values.mean(dtype=np.float64)), "n": len(values)}
                if name == "accuracy" and self.judge.chance is not None:
                    cell["chance"] = self.judge.chance(group)
                found.setdefault(name, {})[group] = cell
        return found


def _main_map(batch: Batch, output: Output) -> AttentionMap | None:
    """The map that is judged: over the image where there is one, else over the text."""
    wanted = "text" if batch.images is None and batch.features is None else "image"
    for one in output.attention:
        if one.keys.spans[0].name == wanted:
            return one
    return None


# --- numbers that a recipe adds to those of the judge


def valued(declared: Measure, values: np.ndarray | Tensor, split: str) -> Value:
    """The mean of one number an item with its interval, and what the measure says of it."""
    around = measure.bootstrap(torch.as_tensor(values))
    return Value(
        value=around.mean,
        unit=declared.unit,
        direction=direction(declared.higher_is_better),
        split=split,
        n=around.count,
        low=around.low,
        high=around.high,
    )


Noted = dict[str, tuple[Measure, Tensor]]  # one number an item, and what it means


def noted(portions: Iterable[Noted]) -> Noted:
    """What was noted of one portion after the other, as one."""
    parts: dict[str, list[Tensor]] = defaultdict(list)
    meanings: dict[str, Measure] = {}
    for portion in portions:
        for name, (declared, values) in portion.items():
            meanings[name] = declared
            parts[name].append(values.detach().float().cpu())
    return {name: (meanings[name], torch.cat(found)) for name, found in parts.items()}


def also(found: Evaluation, more: Noted, split: str) -> Evaluation:
    """An evaluation with more numbers, one for each of the first items of the test.

    In the samples an item that was not asked has NaN. What is defined for no item is left out.
    """
    ours, samples = dict(found.ours), dict(found.samples)
    for name, (declared, values) in more.items():
        each = values.detach().float().cpu().numpy()
        if np.isnan(each).all():
            continue
        ours[name] = valued(declared, each, split)
        samples[name] = np.full(len(found.samples["id"]), np.nan, dtype=np.float32)
        samples[name][: len(each)] = each
    return replace(found, ours=ours, samples=samples)


def charted(found: Evaluation, families: Sequence[str]) -> Evaluation:
    """An evaluation whose families of measures are charts of their own on its page.

    Of the family `jaccard` these are `jaccard_<what>`, by what: maps, strengths, data sets. One
    measure alone is no family, and one that has a chart of its own belongs to none.
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


def calibrated(found: Evaluation, bins: int = 15, draws: int = 1000) -> Evaluation:
    """An evaluation with the expected calibration error of its answers, `ece`.

    It is that of `measure.reliability` with bins of equal width, from the confidence and the
    accuracy of every sample; the interval is a bootstrap over samples. The error of few samples is
    biased upwards, and so is that of samples drawn anew, so the interval may lie above the value.
    """
    sure = torch.from_numpy(found.samples["confidence"]).double()
    right = torch.from_numpy(found.samples["accuracy"]).double()
    known = ~right.isnan()
    gaps = (sure - right)[known]
    place = torch.bucketize(sure[known], torch.arange(1, bins, dtype=torch.float64) / bins)
    count = len(gaps)
    if not count:
        return found

    def error(rows: Tensor) -> float:
        each = torch.bincount(place[rows], weights=gaps[rows], minlength=bins)
        return float(each.abs().sum()) / count

    generator = torch.Generator().manual_seed(CONTRAST_SEED)
    again = [error(torch.randint(count, (count,), generator=generator)) for _ in range(draws)]
    low, high = np.quantile(again, [0.025, 0.975]).tolist()
    split = found.ours["accuracy"].split
    ece = Value(error(torch.arange(count)), "share", "lower", split, count, low, high)
    return replace(found, ours={**found.ours, "ece": ece})


# --- what the gallery shows


def drawn(batch: Batch, output: Output, row: int) -> dict[str, Any]:
    """What of a sample can be shown: its image and its text, with the maps over both."""
    return {**_picture(batch, output, row), **_sentence(batch, output, row)}


def _picture(batch: Batch, output: Output, row: int) -> dict[str, Any]:
    """The image of a sample, with the map over its cells and the truth."""
    if batch.images is None:
        return {}
    image = int(batch.image_index[row])
    pixels = batch.images[image].permute(1, 2, 0).cpu().numpy().astype(np.uint8)
    found: dict[str, Any] = {"image": pixels, "geometry": _shown(batch, image, pixels.shape[:2])}
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


def on_photo(batch: Batch, row: int, weights: Tensor) -> np.ndarray:
    """Weights of regions (columns) on a grid over the photo, a picture for each row of them.

    What a region has is spread evenly over its box.
    """
    geometry = batch.sample_geometry
    assert geometry is not None and batch.boxes is not None
    boxes = batch.boxes[row : row + 1].cpu()
    cover = geometry.to("cpu")[row].cover_boxes(boxes, REGIONS)[0]
    share = cover / cover.sum(dim=-1, keepdim=True).clamp_min(1e-9)
    weights = weights.detach().float().cpu()
    return (weights @ share.to(weights)).reshape(-1, *REGIONS).numpy()


def regions_of(batch: Batch, row: int) -> np.ndarray | None:
    """The boxes of the regions that a sample has, or None."""
    if batch.boxes is None:
        return None
    there = (
        batch.boxes[row] if batch.region_mask is None else batch.boxes[row][batch.region_mask[row]]
    )
    return there.float().cpu().numpy()


def _shown(batch: Batch, image: int, size: tuple[int, int]) -> PixelGeometry | None:
    """Where the pixels of an image stand; a photo that was resized is shown as the model saw it."""
    if batch.geometry is None:
        return None
    geometry = batch.geometry[image].to("cpu")
    same = tuple(geometry.size[0].tolist()) == size
    return geometry if same else PixelGeometry.identity(1, size)


def _sentence(batch: Batch, output: Output, row: int) -> dict[str, Any]:
    """The text of a sample, with the weights of its words."""
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
