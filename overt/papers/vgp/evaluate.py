"""Attending Self-Attention: evaluate captions, the attention of words, and downstream tasks.

Every attention metric is computed in every layer and head; tables show their mean, and beside it
the one head that grounds best on validation.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from overt.attention import AttentionMap
from overt.data.batch import Batch
from overt.data.scenes.caption_pairs import MatchingCaption
from overt.experiments.evaluate import (
    gallery_fields,
    mean_with_interval,
    portions,
    region_boxes,
    region_weights_on_grid,
)
from overt.experiments.experiment import Evaluation, MetricValue
from overt.metrics.grounding import (
    block_mass,
    box_accuracy,
    classification_report,
    grounding_accuracy,
    grounding_mass,
    pointing_at_boxes,
)
from overt.metrics.metric import MetricInfo
from overt.nn.vlbert.downstream import target_boxes
from overt.nn.vlbert.model import VLBert, VLBertOutput
from overt.nn.vlbert.phrases import PhraseSpans
from overt.papers.vgp.in_memory import TextsInMemory
from overt.papers.vgp.supervision import FindLinks
from overt.train.distributed import Processes
from overt.viz.gallery_sample import GallerySample

T = TypeVar("T")

PORTION = 128
SHOWN = 8  # gallery samples per group
GROUNDING_METRICS: dict[str, Callable[..., Tensor]] = {
    "grounding_accuracy": grounding_accuracy,
    "grounding_mass": grounding_mass,
    "reach": block_mass,
    "pointing": pointing_at_boxes,
}
IDENTIFIED = MetricInfo("identification", "share", True, 0.0, 1.0)
RELATED = MetricInfo("paraphrase", "share", True, 0.0, 1.0)
ANSWERED = MetricInfo("answers", "share", True, 0.0, 1.0)


# --- captions


@dataclass
class CaptionResults:
    """Predictions and attention metrics on the pairs of captions of one split.

    `grounding` has one value per sample, layer and head. `pictures` has the image of each sample;
    samples of one image are not independent.
    """

    ids: list[str] = field(default_factory=list)
    predicted: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    related: list[Tensor] = field(default_factory=list)
    relations: list[Tensor] = field(default_factory=list)
    pairs: list[str] = field(default_factory=list)
    grounding: dict[str, list[Tensor]] = field(default_factory=dict)
    pictures: list[str] = field(default_factory=list)

    def add(self, net: VLBert, batch: Batch, links: FindLinks) -> VLBertOutput:
        """Add one batch."""
        output: VLBertOutput = net(batch)
        assert output.trace is not None and batch.labels is not None and batch.target is not None
        self.ids += batch.ids
        self.predicted += output.prediction.argmax(dim=-1).tolist()
        self.labels += batch.labels.tolist()
        found = links(batch.ids)
        if len(found.relation):
            first, second = (PhraseSpans(found.sample, one) for one in (found.first, found.second))
            self.related.append(net.relate(output, first, second).argmax(dim=-1).cpu())
            self.relations.append(found.relation.cpu())
            self.pairs += [batch.ids[row] for row in found.sample.tolist()]
        block = output.trace.block("text", "regions")
        for name, one in GROUNDING_METRICS.items():
            self.grounding.setdefault(name, []).append(one(block, batch.target).cpu())
        return output

    def extend(self, part: Mapping[str, Any]) -> None:
        """Add the fields of other results; `pictures` are those of the whole split already."""
        for name in ("ids", "predicted", "labels", "related", "relations", "pairs"):
            getattr(self, name).extend(part[name])
        for name, values in part["grounding"].items():
            self.grounding.setdefault(name, []).extend(values)

    def by_head(self, name: str) -> Float[Tensor, "n l h"]:
        """Return a metric of every sample, layer and head."""
        return torch.cat(self.grounding[name])


def collect_results(net: VLBert, texts: TextsInMemory, links: FindLinks) -> CaptionResults:
    """Run the network on all pairs of captions; several processes share the batches."""

    def collect(batch: Batch) -> dict[str, Any]:
        part = CaptionResults()
        part.add(net, batch, links)
        return vars(part)

    found = CaptionResults(pictures=_image_names(texts))
    for part in _map_batches(collect, net, texts):
        found.extend(part)
    return found


def _map_batches(function: Callable[[Batch], T], net: nn.Module, texts: TextsInMemory) -> list[T]:
    """Apply a function to all batches, each in one process."""

    @torch.no_grad()
    def apply(indices: range) -> T:
        return function(texts.batch(indices))

    ranks = Processes.current(next(net.parameters()).device)
    return ranks.map(apply, portions(len(texts), PORTION))


def validation_metrics(net: VLBert, texts: TextsInMemory, links: FindLinks) -> dict[str, float]:
    """Compute the metrics that are logged during training."""
    found = collect_results(net, texts, links)
    right = np.equal(found.predicted, found.labels)
    return {
        "identification": float(right.mean()),
        "grounding": float(found.by_head("grounding_accuracy").nanmean()),
    }


def evaluate_captions(
    test: CaptionResults, held: CaptionResults, relations: int, split: str
) -> Evaluation:
    """Return the metrics of pairs of captions; the best head is selected on `held`."""
    right = np.equal(test.predicted, test.labels).astype(np.float32)
    shown = test.pictures or test.ids
    ours = {"identification": mean_with_interval(IDENTIFIED, right, split, shown)}
    samples: dict[str, np.ndarray] = {
        "id": np.array(test.ids),
        "group": np.array([_label_name(label) for label in test.labels]),
        "prediction": np.array([_label_name(one) for one in test.predicted]),
        "truth": np.array([_label_name(one) for one in test.labels]),
        "identification": right,
    }
    groups: dict[str, dict[str, dict[str, float]]] = {
        "identification": _by_group(right, samples["group"], 1 / len(MatchingCaption))
    }
    # `argmax` takes NaN for the largest value.
    best = int(held.by_head("grounding_accuracy").nanmean(dim=0).nan_to_num(-1).argmax())
    for name, one in GROUNDING_METRICS.items():
        values = test.by_head(name)
        declared: MetricInfo = one.info  # type: ignore[attr-defined]
        parts = {
            name: values.mean(dim=(1, 2)),
            f"{name}_last": values[:, -1].mean(dim=1),
            f"{name}_best": values.flatten(1)[:, best],
        }
        for key, each in parts.items():
            samples[key] = each.numpy()
            ours[key] = mean_with_interval(declared, each, split, shown)
        groups[name] = _head_means(values)
    elsewhere: dict[str, np.ndarray] = {}
    if test.relations:
        predicted, truth = torch.cat(test.related), torch.cat(test.relations)
        correct = (predicted == truth).float()
        of = dict(zip(test.ids, shown, strict=True))
        ours["paraphrase"] = mean_with_interval(
            RELATED, correct, split, [of[name] for name in test.pairs]
        )
        counted = classification_report(predicted, truth, relations)
        f1 = counted.macro_f1
        ours["paraphrase_f1"] = MetricValue(f1, "share", "higher", split, len(correct))
        elsewhere = {"paraphrase": correct.numpy(), "paraphrase.id": np.array(test.pairs)}
        groups["paraphrase_f1"] = {
            f"class {at}": {"value": value, "n": counted.count[at]}
            for at, value in enumerate(counted.f1)
            if value == value
        }
    return Evaluation(ours, samples, groups, elsewhere=elsewhere)


def _label_name(label: int) -> str:
    return MatchingCaption(label).name.lower()


def _by_group(values: np.ndarray, groups: np.ndarray, chance: float) -> dict[str, dict[str, float]]:
    return {
        name: {"value": float(some.mean()), "n": len(some), "chance": chance}
        for name in sorted(set(groups.tolist()))
        if len(some := values[groups == name])
    }


def _head_means(values: Float[Tensor, "n l h"]) -> dict[str, dict[str, float]]:
    """Return the mean of every layer and head by name, and its number of samples."""
    mean, count = values.nanmean(dim=0), (~values.isnan()).sum(dim=0)
    return {
        f"layer {l + 1} head {h + 1}": {"value": float(mean[l, h]), "n": int(count[l, h])}
        for l in range(values.shape[1])
        for h in range(values.shape[2])
        if count[l, h]
    }


# --- downstream tasks


def evaluate_expressions(
    net: VLBert, sets: Mapping[str, TextsInMemory]
) -> tuple[dict[str, MetricValue], dict[str, Any]]:
    """Return the accuracy at IoU 0.5 for each kind of candidates, and one value per expression."""
    ours: dict[str, MetricValue] = {}
    each: dict[str, Any] = {}
    for kind, texts in sets.items():
        name = f"located_{kind}"
        values = torch.cat(_map_batches(partial(_box_accuracy, net), net, texts))
        ours[name] = mean_with_interval(box_accuracy.info, values, texts.split, _image_names(texts))
        each |= {name: values.numpy(), f"{name}.id": np.array(texts.ids)}
    return ours, each


def _box_accuracy(net: VLBert, batch: Batch) -> Tensor:
    assert batch.boxes is not None
    logits = net(batch).prediction
    return box_accuracy(logits, batch.boxes, target_boxes(batch), batch.region_mask).cpu().float()


def evaluate_questions(
    net: VLBert, texts: TextsInMemory
) -> tuple[dict[str, MetricValue], dict[str, Any]]:
    """Return the accuracy on questions, and one value per question."""

    def is_right(batch: Batch) -> Tensor:
        return (net(batch).prediction.argmax(dim=-1) == batch.labels).float().cpu()

    values = torch.cat(_map_batches(is_right, net, texts))
    each = {"answers": values.numpy(), "answers.id": np.array(texts.ids)}
    return {"answers": mean_with_interval(ANSWERED, values, texts.split, _image_names(texts))}, each


def _image_names(texts: TextsInMemory) -> list[str]:
    """Return the image of each sample."""
    return [str(at) for at in texts.picture.tolist()]


def add_values(
    found: Evaluation, more: Iterable[tuple[dict[str, MetricValue], dict[str, Any]]]
) -> Evaluation:
    """Add the metrics of downstream tasks to an evaluation."""
    ours, elsewhere = dict(found.ours), dict(found.elsewhere)
    for values, each in more:
        ours |= values
        elsewhere |= each
    return replace(found, ours=ours, elsewhere=elsewhere)


# --- gallery


def gallery(net: VLBert, batch: Batch) -> list[GallerySample]:
    """Return the first samples of every class, with their words and images."""
    with torch.no_grad():
        output: VLBertOutput = net(batch)
    assert output.trace is not None and batch.labels is not None and batch.target is not None
    sure = output.prediction.float().softmax(dim=-1)
    block = output.trace.block("text", "regions")
    scores = {
        name: one(block, batch.target).mean(dim=(1, 2)) for name, one in GROUNDING_METRICS.items()
    }
    shown: dict[str, int] = {}
    found = []
    for row, label in enumerate(batch.labels.tolist()):
        group = _label_name(label)
        shown[group] = shown.get(group, 0) + 1
        if shown[group] > SHOWN:
            continue
        known = {name: float(one[row]) for name, one in scores.items() if one[row] == one[row]}
        found.append(
            GallerySample(
                id=batch.ids[row],
                group=group,
                prediction=_label_name(int(sure[row].argmax())),
                truth=group,
                confidence=float(sure[row].amax()),
                scores=known,
                **gallery_fields(batch, output, row),
                **_word_maps(batch, block, row),
            )
        )
    return found


def _word_maps(batch: Batch, block: AttentionMap, row: int) -> dict[str, Any]:
    """Return the attention of each word over the regions, mean of layers and heads, and the target.

    The map of the whole is the mean over the words that refer to a region.
    """
    if batch.images is None or batch.boxes is None or batch.token_mask is None:
        return {}
    assert batch.target is not None
    there = batch.token_mask[row]
    weights = block.weights[row].mean(dim=(0, 1))[there]
    wanted = batch.target.weights[row].mean(dim=(0, 1))[there]
    has_region = wanted.sum(dim=-1) > 0
    found: dict[str, Any] = {
        "word_cells": region_weights_on_grid(batch, row, weights),
        "boxes": region_boxes(batch, row),
    }
    if bool(has_region.any()):
        found["cells"] = region_weights_on_grid(
            batch, row, weights[has_region].mean(dim=0, keepdim=True)
        )[0]
        truth = region_weights_on_grid(batch, row, wanted.amax(dim=0, keepdim=True))[0]
        found["truth_cells"] = (truth > 0).astype(np.float32)
    return found
