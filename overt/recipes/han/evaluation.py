"""How a network of hard attention is judged: by kind of question, by its cells, by its cost."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from overt import measure
from overt.attention import AttentionMap
from overt.data.batch import Batch
from overt.measure.measured import Measure
from overt.models import HAN, Model, Output, StackedAttention
from overt.models.hard.attention import linear_flops
from overt.recipes.evaluation import Judge, Noted, also, noted, valued
from overt.recipes.experiment import Evaluation, Value

CELLS = Measure("cells kept", "cells", None, low=0.0)
SHARE = Measure("share kept", "share", None, low=0.0, high=1.0)
FLOPS = Measure("operations", "operations", False, low=0.0)
FOUND = Measure("truth covered", "share", True, low=0.0, high=1.0)
GAINED = Measure("truth covered beyond chance", "share", True, low=-1.0, high=1.0)
STRICTNESS = {"wups_90": 0.9, "wups_0": 0.0}  # from which similarity on an answer counts in full

Alike = Callable[[str, str], float]


class LastHop:
    """A network as it is judged: by the last of its hops, which decides."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def encode(self, batch: Batch) -> Any:
        """The features of the network."""
        return self.model.encode(batch)

    def decide(self, features: Any, mask: Mapping[str, Tensor] | None = None) -> Output:
        """The output with one layer of each map."""
        output = self.model.decide(features, mask)
        return replace(output, attention=tuple(one.layer(-1) for one in output.attention))

    def __call__(self, batch: Batch) -> Output:
        """The output for a batch."""
        return self.decide(self.encode(batch))


def validated(batches: Iterable[Batch], model: Model) -> dict[str, float]:
    """Accuracy for validation while training, of all questions and of every kind of them."""
    parts: dict[str, list[Tensor]] = defaultdict(list)
    for batch in batches:
        right = answered(model(batch), batch).cpu()
        parts["accuracy"].append(right)
        kinds = np.array(batch.groups or ("all",) * len(batch))
        for kind in sorted(set(kinds.tolist())):
            parts[f"accuracy_{slug(kind)}"].append(right[torch.from_numpy(kinds == kind)])
    found = {name: float(torch.cat(each).nanmean()) for name, each in parts.items()}
    return found if len(found) > 2 else {"accuracy": found["accuracy"]}


def answered(output: Output, batch: Batch) -> Tensor:
    """What each answer is worth: by people's scores where there are such, else 1 or 0.

    A question whose answer is no class is then wrong, as in published results, and not left out.
    """
    if batch.answers is not None:
        return measure.soft_accuracy(output.prediction, batch.answers)
    assert batch.labels is not None
    return measure.accuracy(output.prediction, batch.labels)


def evaluated(
    judge: Judge, model: Model, device: torch.device, alike: Alike | None = None
) -> Evaluation:
    """Every number of the judge, with cells kept, operations, and what the cells have found.

    With `alike`, the similarity of two words, answers are also scored by meaning: `wups_90` and
    `wups_0`, where the data has the true answers in words.
    """
    split, portions = str(judge.data.split), list[Noted]()

    def beside(batch: Batch) -> None:
        portions.append(_noted(model, batch, judge, alike))

    found = judge.evaluate(LastHop(model), device, beside)
    more = noted(portions)
    scores = more.pop("accuracy")
    found = _scored(found, scores[0], scores[1].numpy(), judge)
    found = also(found, more, split)
    return by_kind(found, split)


def _noted(model: Model, batch: Batch, judge: Judge, alike: Alike | None) -> Noted:
    output = model(batch)
    found: Noted = {"accuracy": (measure.accuracy.measure, answered(output, batch))}
    looked = output.looking_at("image")
    cells = looked.weights.shape[-1]
    kept, flops = costs(model, output, looked)
    found["cells_kept"] = CELLS, kept
    found["share_kept"] = SHARE, kept / cells
    found["flops"] = FLOPS, flops
    if alike is not None and batch.references is not None:
        said = [judge.classes[answer].split(", ") for answer in output.prediction.argmax(-1)]
        for name, threshold in STRICTNESS.items():
            worth = measure.wups(said, batch.references, alike, threshold)
            found[name] = measure.wups.measure, worth
    truth = batch.target
    if truth is not None and isinstance(model, HAN):
        covered = measure.mass_inside(truth, looked)
        found["covered"] = FOUND, covered
        found["beyond_chance"] = GAINED, covered - kept / cells
    return found


def costs(model: Any, output: Output, looked: AttentionMap) -> tuple[Tensor, Tensor]:
    """The cells that an answer is made of, and the operations from a read question to it.

    Layers that run on every cell before a question is known are counted for nobody.
    """
    if isinstance(model, HAN):
        return output.extras["cells_kept"].float(), output.extras["flops"].float()
    rows, cells = len(looked), looked.weights.shape[-1]
    every = torch.full((rows,), float(cells), device=output.prediction.device)
    assert isinstance(model, StackedAttention)
    return every, torch.full_like(every, stacked_flops(model, cells))


def stacked_flops(model: StackedAttention, cells: int) -> float:
    """The operations of matrix products of stacked attention on so many cells, after `of_cell`."""
    joint, hidden = model.sizes.joint, model.sizes.hidden
    hop = 2 * joint * hidden + cells * (2 * joint * hidden + 2 * hidden + 2 * joint)
    fixed = linear_flops(model.of_question) + linear_flops(model.decision)
    return float(fixed + len(model.hops) * hop)


def _scored(found: Evaluation, meaning: Measure, right: np.ndarray, judge: Judge) -> Evaluation:
    """The evaluation with answers scored as `answered` does."""
    samples = {**found.samples, "accuracy": right.astype(np.float32)}
    ours = {**found.ours, "accuracy": valued(meaning, right, str(judge.data.split))}
    each: dict[str, dict[str, float]] = {}
    kinds = found.samples["group"]
    for kind in sorted(set(kinds.tolist())):
        values = right[kinds == kind]
        values = values[~np.isnan(values)]
        if len(values):
            each[kind] = {"value": float(values.mean(dtype=np.float64)), "n": len(values)}
            if judge.chance is not None:
                each[kind]["chance"] = judge.chance(kind)
    rows = {name: row for row, name in enumerate(samples["id"].tolist())}
    gallery = [
        replace(one, scores={**one.scores, "accuracy": float(right[rows[one.id]])})
        for one in found.gallery
    ]
    groups = {**found.groups, "accuracy": each}
    return replace(found, ours=ours, samples=samples, groups=groups, gallery=gallery)


def by_kind(found: Evaluation, split: str) -> Evaluation:
    """The evaluation with accuracy, cells kept and truth covered by kind of question."""
    kinds = found.samples["group"]
    names = sorted(set(kinds.tolist()))
    # a map that keeps all cells has no ranks, and no sample then has their correlation
    ours: dict[str, Value] = {name: one for name, one in found.ours.items() if one.n}
    samples, groups = dict(found.samples), dict(found.groups)
    if len(names) > 1:
        for kind in names:
            each = np.where(kinds == kind, found.samples["accuracy"], np.float32(np.nan))
            key = f"accuracy_{slug(kind)}"
            samples[key], ours[key] = each, valued(measure.accuracy.measure, each, split)
    groups["share_kept"] = dict(_means(samples["share_kept"], kinds, names))
    if "covered" in samples:  # as many cells at random would cover their share
        known = np.where(np.isnan(samples["covered"]), np.nan, samples["share_kept"])
        chance = dict(_means(known, kinds, names))
        groups["covered"] = {
            kind: {**one, "chance": chance[kind]["value"]}
            for kind, one in _means(samples["covered"], kinds, names)
        }
    return replace(found, ours=ours, samples=samples, groups=groups)


def _means(
    values: np.ndarray, kinds: np.ndarray, names: list[str]
) -> Iterator[tuple[str, Mapping[str, float]]]:
    for kind in names:
        each = values[kinds == kind]
        each = each[~np.isnan(each)]
        if len(each):
            yield kind, {"value": float(each.mean(dtype=np.float64)), "n": len(each)}


def slug(kind: str) -> str:
    """A kind of question as a part of a measure's name: `yes/no` is `yes_no`."""
    return "_".join("".join(one if one.isalnum() else " " for one in kind.lower()).split())
