"""Grounded supervision: what a network says of captions, where its words look, and what it can do.

Every number of attention is taken in every layer and head; what stands in a table is their mean,
and beside it the one head that grounds best on validation.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from overt import measure
from overt.attention import AttentionMap
from overt.data.batch import Batch
from overt.data.scenes.pairs import Describes
from overt.measure.grounding import (
    grounding_accuracy,
    grounding_mass,
    per_class,
    pointing_at_boxes,
    reach,
)
from overt.measure.measured import Measure
from overt.models.vlbert.downstream import meant
from overt.models.vlbert.model import Understood, VLBert
from overt.models.vlbert.phrases import Phrases
from overt.recipes.evaluation import drawn, on_photo, regions_of, valued
from overt.recipes.experiment import Evaluation, Value
from overt.recipes.vgp.held import HeldTexts
from overt.recipes.vgp.teaching import Links
from overt.show.sample import Sample

PORTION = 128
SHOWN = 8  # samples a group, for the gallery
LOOKED: dict[str, Callable[..., Tensor]] = {
    "grounding_accuracy": grounding_accuracy,
    "grounding_mass": grounding_mass,
    "reach": reach,
    "pointing": pointing_at_boxes,
}
IDENTIFIED = Measure("identification", "share", True, 0.0, 1.0)
RELATED = Measure("paraphrase", "share", True, 0.0, 1.0)
ANSWERED = Measure("answers", "share", True, 0.0, 1.0)


def portions(texts: HeldTexts, portion: int = PORTION) -> Iterator[Batch]:
    """All samples in order, some at a time."""
    for start in range(0, len(texts), portion):
        yield texts.batch(range(start, min(start + portion, len(texts))))


# --- captions


@dataclass
class Described:
    """What was said of the pairs of captions of one part, and where words looked.

    `looked` has one number a sample, layer and head.
    """

    ids: list[str] = field(default_factory=list)
    predicted: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    related: list[Tensor] = field(default_factory=list)
    relations: list[Tensor] = field(default_factory=list)
    pairs: list[str] = field(default_factory=list)
    looked: dict[str, list[Tensor]] = field(default_factory=dict)

    def add(self, net: VLBert, batch: Batch, links: Links) -> Understood:
        """One portion more."""
        output: Understood = net(batch)
        assert output.seen is not None and batch.labels is not None and batch.target is not None
        self.ids += batch.ids
        self.predicted += output.prediction.argmax(dim=-1).tolist()
        self.labels += batch.labels.tolist()
        found = links(batch.ids)
        if len(found.relation):
            first, second = (Phrases(found.sample, one) for one in (found.first, found.second))
            self.related.append(net.relate(output, first, second).argmax(dim=-1).cpu())
            self.relations.append(found.relation.cpu())
            self.pairs += [batch.ids[row] for row in found.sample.tolist()]
        block = output.seen.block("text", "regions")
        for name, one in LOOKED.items():
            self.looked.setdefault(name, []).append(one(block, batch.target).cpu())
        return output

    def by_head(self, name: str) -> Float[Tensor, "n l h"]:
        """A measure of every sample, layer and head."""
        return torch.cat(self.looked[name])


def described(net: VLBert, texts: HeldTexts, links: Links) -> Described:
    """All that is asked of pairs of captions."""
    found = Described()
    with torch.no_grad():
        for batch in portions(texts):
            found.add(net, batch, links)
    return found


def validated(net: VLBert, texts: HeldTexts, links: Links) -> dict[str, float]:
    """The numbers that are written down while the network learns."""
    found = described(net, texts, links)
    right = np.equal(found.predicted, found.labels)
    return {
        "identification": float(right.mean()),
        "grounding": float(found.by_head("grounding_accuracy").nanmean()),
    }


def evaluated(test: Described, held: Described, relations: int, split: str) -> Evaluation:
    """The numbers of pairs of captions; the best head is the one that is best in `held`."""
    right = np.equal(test.predicted, test.labels).astype(np.float32)
    ours = {"identification": valued(IDENTIFIED, right, split)}
    samples: dict[str, np.ndarray] = {
        "id": np.array(test.ids),
        "group": np.array([_kind(label) for label in test.labels]),
        "prediction": np.array([_kind(one) for one in test.predicted]),
        "truth": np.array([_kind(one) for one in test.labels]),
        "identification": right,
    }
    groups: dict[str, dict[str, dict[str, float]]] = {
        "identification": _by_group(right, samples["group"], 1 / len(Describes))
    }
    best = int(held.by_head("grounding_accuracy").nanmean(dim=0).nan_to_num(-1).argmax())
    for name, one in LOOKED.items():
        values = test.by_head(name)
        declared: Measure = one.measure  # type: ignore[attr-defined]
        parts = {
            name: values.mean(dim=(1, 2)),
            f"{name}_last": values[:, -1].mean(dim=1),
            f"{name}_best": values.flatten(1)[:, best],
        }
        for key, each in parts.items():
            samples[key] = each.numpy()
            ours[key] = valued(declared, each, split)
        groups[name] = _heads(values)
    elsewhere: dict[str, np.ndarray] = {}
    if test.relations:
        said, truth = torch.cat(test.related), torch.cat(test.relations)
        told = (said == truth).float()
        ours["paraphrase"] = valued(RELATED, told, split)
        counted = per_class(said, truth, relations)
        f1 = counted.macro_f1
        ours["paraphrase_f1"] = Value(f1, "share", "higher", split, len(told))
        elsewhere = {"paraphrase": told.numpy(), "paraphrase.id": np.array(test.pairs)}
        groups["paraphrase_f1"] = {
            f"class {at}": {"value": value, "n": counted.count[at]}
            for at, value in enumerate(counted.f1)
            if value == value
        }
    return Evaluation(ours, samples, groups, elsewhere=elsewhere)


def _kind(label: int) -> str:
    return Describes(label).name.lower()


def _by_group(values: np.ndarray, groups: np.ndarray, chance: float) -> dict[str, dict[str, float]]:
    return {
        name: {"value": float(some.mean()), "n": len(some), "chance": chance}
        for name in sorted(set(groups.tolist()))
        if len(some := values[groups == name])
    }


def _heads(values: Float[Tensor, "n l h"]) -> dict[str, dict[str, float]]:
    """The mean of every layer and head, by name, and over how many samples."""
    mean, count = values.nanmean(dim=0), (~values.isnan()).sum(dim=0)
    return {
        f"layer {l + 1} head {h + 1}": {"value": float(mean[l, h]), "n": int(count[l, h])}
        for l in range(values.shape[1])
        for h in range(values.shape[2])
        if count[l, h]
    }


# --- what comes afterwards


def located(net: VLBert, sets: Mapping[str, HeldTexts]) -> tuple[dict[str, Value], dict[str, Any]]:
    """Accuracy at an overlap of 0.5 for each kind of candidates, and one number an expression."""
    ours: dict[str, Value] = {}
    each: dict[str, Any] = {}
    for kind, texts in sets.items():
        found = []
        with torch.no_grad():
            for batch in portions(texts):
                assert batch.boxes is not None
                logits = net(batch).prediction
                found.append(measure.located(logits, batch.boxes, meant(batch), batch.region_mask))
        name = f"located_{kind}"
        values = torch.cat([one.cpu().float() for one in found])
        ours[name] = valued(measure.located.measure, values, texts.split)
        each |= {name: values.numpy(), f"{name}.id": np.array(texts.ids)}
    return ours, each


def answered(net: VLBert, texts: HeldTexts) -> tuple[dict[str, Value], dict[str, Any]]:
    """The share of questions that are answered rightly, and one number a question."""
    with torch.no_grad():
        right = [
            (net(batch).prediction.argmax(dim=-1) == batch.labels).float().cpu()
            for batch in portions(texts)
        ]
    values = torch.cat(right)
    each = {"answers": values.numpy(), "answers.id": np.array(texts.ids)}
    return {"answers": valued(ANSWERED, values, texts.split)}, each


def also(found: Evaluation, more: Iterable[tuple[dict[str, Value], dict[str, Any]]]) -> Evaluation:
    """An evaluation with the numbers of other tasks."""
    ours, elsewhere = dict(found.ours), dict(found.elsewhere)
    for values, each in more:
        ours |= values
        elsewhere |= each
    return replace(found, ours=ours, elsewhere=elsewhere)


# --- what the gallery shows


def gallery(net: VLBert, batch: Batch) -> list[Sample]:
    """The first few samples of every kind, with their words and pictures."""
    with torch.no_grad():
        output: Understood = net(batch)
    assert output.seen is not None and batch.labels is not None and batch.target is not None
    sure = output.prediction.float().softmax(dim=-1)
    block = output.seen.block("text", "regions")
    scores = {name: one(block, batch.target).mean(dim=(1, 2)) for name, one in LOOKED.items()}
    shown: dict[str, int] = {}
    found = []
    for row, label in enumerate(batch.labels.tolist()):
        group = _kind(label)
        shown[group] = shown.get(group, 0) + 1
        if shown[group] > SHOWN:
            continue
        known = {name: float(one[row]) for name, one in scores.items() if one[row] == one[row]}
        found.append(
            Sample(
                id=batch.ids[row],
                group=group,
                prediction=_kind(int(sure[row].argmax())),
                truth=group,
                confidence=float(sure[row].amax()),
                scores=known,
                **drawn(batch, output, row),
                **_looking(batch, block, row),
            )
        )
    return found


def _looking(batch: Batch, block: AttentionMap, row: int) -> dict[str, Any]:
    """Where each word looks among the regions, the mean of all layers and heads, and what is meant.

    The map of the whole is the mean of the words that speak of a region.
    """
    if batch.images is None or batch.boxes is None or batch.token_mask is None:
        return {}
    assert batch.target is not None
    there = batch.token_mask[row]
    weights = block.weights[row].mean(dim=(0, 1))[there]
    wanted = batch.target.weights[row].mean(dim=(0, 1))[there]
    speaks = wanted.sum(dim=-1) > 0
    found: dict[str, Any] = {
        "word_cells": on_photo(batch, row, weights),
        "boxes": regions_of(batch, row),
    }
    if bool(speaks.any()):
        found["cells"] = on_photo(batch, row, weights[speaks].mean(dim=0, keepdim=True))[0]
        truth = on_photo(batch, row, wanted.amax(dim=0, keepdim=True))[0]
        found["truth_cells"] = (truth > 0).astype(np.float32)
    return found
