"""Do words look at the regions they speak of, in which layer and head, and how much at any region?

Maps are blocks from words to regions, or back, with the rows of the truth: `seen.block("text",
"regions")` of a watched model, `attention.block(...)` of a map. Numbers are one a sample, layer and
head, the mean over the sample's grounded rows; NaN for a sample that has none.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from overt.attention import AttentionMap, Kind
from overt.geometry import RegionGeometry
from overt.measure.measured import Measured, below_zero, defined, measured

Grounded = Float[Tensor, "b l h"]  # NaN where a sample has no grounded row


@measured("grounding mass", "share", higher_is_better=True, low=0.0, high=1.0)
def grounding_mass(attention: AttentionMap, truth: AttentionMap) -> Grounded:
    """The share of what a row gives to the block's keys that falls on those of the truth.

    Renormalised over the block, as the direct loss is. `reach` says how much there was to share.
    Rows with a weight below 0 do not count: they have no shares.
    """
    weights, inside, rows = _lined(attention, truth)
    total = weights.sum(dim=-1)
    shares = (weights * inside).sum(dim=-1) / torch.where(total > 0, total, 1)
    return _over_rows(shares, rows, (total > 0) & ~below_zero(weights))


@measured("grounding accuracy", "share", higher_is_better=True, low=0.0, high=1.0)
def grounding_accuracy(attention: AttentionMap, truth: AttentionMap) -> Grounded:
    """The share of rows whose largest weight is on a key of the truth; ties count by their share.

    What a uniform map scores is what a random key would.
    """
    weights, inside, rows = _lined(attention, truth)
    top = _top(weights, attention.visible[:, None, None])
    hits = (top & inside).sum(dim=-1) / top.sum(dim=-1).clamp_min(1)
    return _over_rows(hits.to(weights.dtype), rows, weights.sum(dim=-1) > 0)


@measured("reach", "share", higher_is_better=None, low=0.0, high=1.0)
def reach(attention: AttentionMap, truth: AttentionMap) -> Grounded:
    """How much of its attention a grounded row gives to the block at all, before renormalising.

    The direct loss has no gradient on it: grounding can be perfect beside a sink that takes 99.9 %.
    Rows with a weight below 0 do not count.
    """
    if attention.kind is Kind.PROBABILITY:
        raise ValueError(
            "these rows were renormalised and sum to one, so how far they reach is lost: measure "
            "seen.block(...) or attention.block(...), not log_block or between"
        )
    weights, _, rows = _lined(attention, truth)
    return _over_rows(weights.sum(dim=-1), rows, ~below_zero(weights))


@measured("pointing at boxes", "share", higher_is_better=True, low=0.0, high=1.0)
def pointing_at_boxes(attention: AttentionMap, truth: AttentionMap) -> Grounded:
    """The pointing game of phrase grounding: is the middle of the top region in a true box?

    More forgiving than `grounding_accuracy`, which asks for the region itself. Boxes are those of
    the truth's keys; ties count by their share.
    """
    boxes = _boxes(truth)
    weights, inside, rows = _lined(attention, truth)
    middle = (boxes[:, :, :2] + boxes[:, :, 2:]) / 2
    hit = (middle[:, :, None] >= boxes[:, None, :, :2]) & (
        middle[:, :, None] <= boxes[:, None, :, 2:]
    )
    within = hit.all(dim=-1).to(weights.dtype)  # b, region, box
    right = torch.einsum("blhqn,bmn->blhqm", inside.to(weights.dtype), within) > 0
    top = _top(weights, attention.visible[:, None, None])
    hits = (top & right).sum(dim=-1) / top.sum(dim=-1).clamp_min(1)
    return _over_rows(hits.to(weights.dtype), rows, weights.sum(dim=-1) > 0)


@measured("located", "share", higher_is_better=True, low=0.0, high=1.0)
def located(
    logits: Float[Tensor, "b m"],
    boxes: Float[Tensor, "b m 4"],
    meant: Float[Tensor, "b 4"],
    present: Bool[Tensor, "b m"] | None = None,
    overlap: float = 0.5,
) -> Measured:
    """1 where the box with the largest logit overlaps the one that is meant: IoU of 0.5 or more.

    Accuracy of referring-expression comprehension. With true boxes for candidates it is accuracy
    of the choice; with detected ones it also asks that a good box was proposed. Not defined where a
    sample has no candidate, or one with a logit that is NaN.
    """
    there = torch.ones_like(logits, dtype=torch.bool) if present is None else present
    best = logits.masked_fill(~there, -torch.inf).argmax(dim=-1)
    chosen = boxes.gather(1, best[:, None, None].expand(-1, 1, 4))
    found = RegionGeometry(meant[:, None]).overlap(chosen)[:, 0, 0]
    known = ~(logits.isnan() & there).any(dim=-1)
    return defined((found >= overlap).double(), there.any(dim=-1) & known)


def by_layer_and_head(
    measure: Callable[[AttentionMap, AttentionMap], Tensor],
    pairs: list[tuple[AttentionMap, AttentionMap]],
) -> Float[Tensor, "l h"]:
    """The mean of a measure over the samples of several batches that have a number."""
    return torch.cat([measure(*one).detach().cpu() for one in pairs]).nanmean(dim=0)


# --- classes of paraphrases


@dataclass(frozen=True)
class PerClass:
    """How well each class is told: what is said of it is right, and all of it is found."""

    precision: tuple[float, ...]
    recall: tuple[float, ...]
    f1: tuple[float, ...]
    count: tuple[int, ...]  # samples of each class
    accuracy: float

    @property
    def macro_f1(self) -> float:
        """The plain mean of F1 over the classes that occur, or were said."""
        known = [one for one in self.f1 if one == one]
        return sum(known) / len(known) if known else float("nan")


def per_class(predicted: Int[Tensor, " b"], labels: Int[Tensor, " b"], classes: int) -> PerClass:
    """Accuracy, and precision, recall and F1 of each class; labels below 0 do not count.

    A class that neither occurs nor is said has NaN; one that is only said, or never, has 0.
    """
    kept = labels >= 0
    predicted, labels = predicted[kept], labels[kept]
    if len(labels) and int(torch.stack([predicted, labels]).max()) >= classes:
        raise ValueError(f"a class beyond the {classes} there are was said or given")
    table = torch.bincount(labels * classes + predicted, minlength=classes**2)
    table = table.view(classes, classes).double()  # true class, class said
    right, said, given = table.diagonal(), table.sum(dim=0), table.sum(dim=1)
    some = said + given > 0
    f1 = 2 * right / torch.where(some, said + given, torch.nan)
    return PerClass(
        precision=_told(right / torch.where(said > 0, said, torch.nan), some),
        recall=_told(right / torch.where(given > 0, given, torch.nan), some),
        f1=tuple(f1.tolist()),
        count=tuple(int(n) for n in given.tolist()),
        accuracy=float(right.sum() / table.sum()) if len(labels) else float("nan"),
    )


def _told(values: Float[Tensor, " c"], some: Bool[Tensor, " c"]) -> tuple[float, ...]:
    return tuple(torch.where(some, values.nan_to_num(0.0), torch.nan).tolist())


# --- rows


def _lined(
    attention: AttentionMap, truth: AttentionMap
) -> tuple[Float[Tensor, "b l h q k"], Bool[Tensor, "b l h q k"], Bool[Tensor, "b l h q"]]:
    """Weights, which keys are in the truth, and which rows are grounded."""
    ours, theirs = attention.values.shape, truth.values.shape
    if any(theirs[axis] != ours[axis] for axis in (0, 3, 4)):
        raise ValueError(
            f"a truth of {theirs[0]} samples, {theirs[3]} rows and {theirs[4]} keys for attention "
            f"of {ours[0]}, {ours[3]} and {ours[4]}: take the same rows of both"
        )
    if attention.kind is Kind.SIGNED:
        raise ValueError("signed weights have no shares; take their positive part first")
    visible = attention.visible[:, None, None]
    weights = attention.weights.detach().double() * visible
    inside = ((truth.weights > 0) & truth.visible[:, None, None]).expand(ours) & visible
    return weights, inside, inside.any(dim=-1)


def _top(weights: Float[Tensor, "b l h q k"], visible: Tensor) -> Bool[Tensor, "b l h q k"]:
    largest = weights.masked_fill(~visible, -torch.inf).amax(dim=-1, keepdim=True)
    return (weights == largest) & visible


def _over_rows(
    values: Float[Tensor, "b l h q"], rows: Bool[Tensor, "b l h q"], some: Bool[Tensor, "b l h q"]
) -> Grounded:
    """The mean over the rows that are grounded and have any weight."""
    counted = rows & some
    total = torch.where(counted, values, 0).sum(dim=-1)
    count = counted.sum(dim=-1)
    return torch.where(count > 0, total / count.clamp_min(1), torch.nan).float()


def _boxes(truth: AttentionMap) -> Float[Tensor, "b m 4"]:
    for span in truth.keys.spans:
        if isinstance(span.geometry, RegionGeometry) and len(span) == len(truth.keys):
            return span.geometry.boxes
    raise ValueError("the keys of this truth have no boxes, so nothing can be pointed at")
