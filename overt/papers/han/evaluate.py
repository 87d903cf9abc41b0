"""Bootstrapping Hard Attention: accuracy by question type, selected cells, and cost."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from overt import metrics
from overt.attention import AttentionMap
from overt.data.batch import Batch
from overt.experiments.evaluate import (
    Evaluator,
    PerItemMetrics,
    add_metrics,
    group_means,
    mean_with_interval,
)
from overt.experiments.experiment import Evaluation, MetricValue
from overt.metrics.answer_accuracy import wups
from overt.metrics.metric import MetricInfo
from overt.nn import AttentionModel, Output, StackedAttention
from overt.nn.hard_attention.attention import linear_flops
from overt.papers.han.networks import HAN

CELLS = MetricInfo("cells kept", "cells", None, low=0.0)
SHARE = MetricInfo("share kept", "share", None, low=0.0, high=1.0)
FLOPS = MetricInfo("operations", "operations", False, low=0.0)
COVERED = MetricInfo("truth covered", "share", True, low=0.0, high=1.0)
BEYOND_CHANCE = MetricInfo("truth covered beyond chance", "share", True, low=-1.0, high=1.0)
STRICTNESS = {"wups_90": 0.9, "wups_0": 0.0}  # similarity above which an answer gets full credit

WordSimilarity = Callable[[str, str], float]


class LastHop:
    """A model reduced to the map of its last hop, which decides."""

    def __init__(self, model: AttentionModel) -> None:
        self.model = model

    def encode(self, batch: Batch) -> Any:
        """Return the features of the model."""
        return self.model.encode(batch)

    def decide(self, features: Any, mask: Mapping[str, Tensor] | None = None) -> Output:
        """Return the output with the last layer of each map."""
        output = self.model.decide(features, mask)
        return replace(output, attention=tuple(one.layer(-1) for one in output.attention))

    def __call__(self, batch: Batch) -> Output:
        """Return the output for a batch."""
        return self.decide(self.encode(batch))


def validation_accuracy(
    evaluator: Evaluator, model: AttentionModel, device: torch.device
) -> dict[str, float]:
    """Compute the accuracy of all questions and of every question type."""

    def score(batch: Batch) -> PerItemMetrics:
        right = answer_scores(model(batch), batch).cpu()
        found = {"accuracy": right}
        kinds = np.array(batch.groups or ("all",) * len(batch))
        for kind in sorted(set(kinds.tolist())):
            found[f"accuracy_{slug(kind)}"] = right[torch.from_numpy(kinds == kind)]
        return {name: (metrics.accuracy.info, each) for name, each in found.items()}

    parts = evaluator.collect(score, model, device)
    found = {name: float(each.nanmean()) for name, (_, each) in parts.items()}
    # With one question type, its accuracy is that of all questions.
    return found if len(found) > 2 else {"accuracy": found["accuracy"]}


def answer_scores(output: Output, batch: Batch) -> Tensor:
    """Return the score of each answer: the annotators' scores if there are any, else 1 or 0.

    A question whose answer is not a class counts as wrong, as in published results.
    """
    if batch.answers is not None:
        return metrics.soft_accuracy(output.prediction, batch.answers)
    assert batch.labels is not None
    return metrics.accuracy(output.prediction, batch.labels)


def evaluate_model(
    evaluator: Evaluator,
    model: AttentionModel,
    device: torch.device,
    similarity: WordSimilarity | None = None,
) -> Evaluation:
    """Evaluate a model, with cells kept, operations, and the ground truth covered by the cells.

    With `similarity`, the similarity of two words, answers are also scored by meaning: `wups_90`
    and `wups_0`, where the dataset has reference answers as text.
    """
    split = str(evaluator.data.split)

    def more_metrics(batch: Batch) -> PerItemMetrics:
        return _batch_metrics(model, batch, evaluator, similarity)

    found, more = evaluator.evaluate_with(LastHop(model), device, more_metrics)
    # The evaluator compares labels; where annotators disagree, their scores replace that accuracy.
    scores = more.pop("accuracy")
    found = _replace_accuracy(found, scores[0], scores[1].numpy(), evaluator)
    found = add_metrics(found, more, split)
    return add_question_types(found, split)


def _batch_metrics(
    model: AttentionModel, batch: Batch, evaluator: Evaluator, similarity: WordSimilarity | None
) -> PerItemMetrics:
    output = model(batch)
    found: PerItemMetrics = {"accuracy": (metrics.accuracy.info, answer_scores(output, batch))}
    attention = output.attention_to("image")
    cells = attention.weights.shape[-1]
    kept, flops = cells_and_flops(model, output, attention)
    found["cells_kept"] = CELLS, kept
    found["share_kept"] = SHARE, kept / cells
    found["flops"] = FLOPS, flops
    if similarity is not None and batch.references is not None:
        # An answer of DAQUAR may be a list, separated by commas.
        answers = [evaluator.classes[answer].split(", ") for answer in output.prediction.argmax(-1)]
        for name, threshold in STRICTNESS.items():
            scores = wups(answers, batch.references, similarity, threshold)
            found[name] = wups.info, scores
    truth = batch.target
    # The map of hard attention is binary: this is the share of the truth inside the selected cells,
    # compared with as many random cells.
    if truth is not None and isinstance(model, HAN):
        covered = metrics.mass_inside(truth, attention)
        found["covered"] = COVERED, covered
        found["beyond_chance"] = BEYOND_CHANCE, covered - kept / cells
    return found


def cells_and_flops(model: Any, output: Output, attention: AttentionMap) -> tuple[Tensor, Tensor]:
    """Return the cells an answer uses, and the operations from the encoded question to the answer.

    Layers that run on every cell before the question are not counted for any model.
    """
    if isinstance(model, HAN):
        return output.extras["cells_kept"].float(), output.extras["flops"].float()
    rows, cells = len(attention), attention.weights.shape[-1]
    every = torch.full((rows,), float(cells), device=output.prediction.device)
    assert isinstance(model, StackedAttention)
    return every, torch.full_like(every, stacked_flops(model, cells))


def stacked_flops(model: StackedAttention, cells: int) -> float:
    """Count the matrix-product operations of stacked attention after `of_cell`."""
    joint, hidden = model.sizes.joint, model.sizes.hidden
    # Two operations per multiply-add. A hop projects the question once, and each cell is projected,
    # scored and summed.
    hop = 2 * joint * hidden + cells * (2 * joint * hidden + 2 * hidden + 2 * joint)
    fixed = linear_flops(model.of_question) + linear_flops(model.decision)
    return float(fixed + len(model.hops) * hop)


def _replace_accuracy(
    found: Evaluation, meaning: MetricInfo, right: np.ndarray, evaluator: Evaluator
) -> Evaluation:
    """Replace the accuracy of an evaluation by `answer_scores`."""
    samples = {**found.samples, "accuracy": right.astype(np.float32)}
    value = mean_with_interval(meaning, right, str(evaluator.data.split), found.samples["cluster"])
    ours = {**found.ours, "accuracy": value}
    each = group_means(right, found.samples["group"], evaluator.chance)
    rows = {name: row for row, name in enumerate(samples["id"].tolist())}
    gallery = [
        replace(one, scores={**one.scores, "accuracy": float(right[rows[one.id]])})
        for one in found.gallery
    ]
    groups = {**found.groups, "accuracy": each}
    return replace(found, ours=ours, samples=samples, groups=groups, gallery=gallery)


def add_question_types(found: Evaluation, split: str) -> Evaluation:
    """Add accuracy, cells kept and ground truth covered per question type."""
    kinds = found.samples["group"]
    names = sorted(set(kinds.tolist()))
    # a map that keeps all cells has no ranks, so no sample has a rank correlation
    ours: dict[str, MetricValue] = {name: one for name, one in found.ours.items() if one.n}
    samples, groups = dict(found.samples), dict(found.groups)
    if len(names) > 1:
        for kind in names:
            each = np.where(kinds == kind, found.samples["accuracy"], np.float32(np.nan))
            key = f"accuracy_{slug(kind)}"
            samples[key] = each
            ours[key] = mean_with_interval(
                metrics.accuracy.info, each, split, found.samples["cluster"]
            )
    groups["share_kept"] = group_means(samples["share_kept"], kinds)
    if "covered" in samples:  # randomly selected cells would cover this share
        # Chance is computed from the same samples: those with ground truth.
        known = np.where(np.isnan(samples["covered"]), np.nan, samples["share_kept"])
        chance = group_means(known, kinds)
        groups["covered"] = group_means(
            samples["covered"], kinds, lambda kind: chance[kind]["value"]
        )
    return replace(found, ours=ours, samples=samples, groups=groups)


def slug(kind: str) -> str:
    """Return a question type as part of a metric name: `yes/no` is `yes_no`."""
    return "_".join("".join(one if one.isalnum() else " " for one in kind.lower()).split())
