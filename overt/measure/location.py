"""Does attention fall where the truth is?"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from overt.attention import AttentionMap
from overt.measure.measured import Measured, defined, measured, row, rows, shares
from overt.measure.segmentation import binarised, jaccard

THRESHOLDS = tuple(tenth / 10 for tenth in range(1, 10))


def support(truth: AttentionMap, above: float = 0.0) -> Bool[Tensor, "b k"]:
    """The cells that belong to the truth: those with more than `above` times its largest weight."""
    weights, seen = row(truth)
    return _above(weights, above) & seen


def _above(weights: Float[Tensor, "b k"], above: float) -> Bool[Tensor, "b k"]:
    return weights > (above * weights.amax(dim=-1, keepdim=True)).clamp_min(0)


@measured("pointing game", "share", higher_is_better=True, low=0.0, high=1.0)
def pointing_game(attention: AttentionMap, truth: AttentionMap, above: float = 0.0) -> Measured:
    """1 where the cell with the largest weight belongs to the truth, else 0.

    Cells that tie for the largest weight count by the share of them that is in the truth, so that
    a uniform map scores what a random cell would. `above` is as in `support`.
    """
    ours, theirs, seen = rows(attention, truth)
    inside = _above(theirs, above)
    largest = ours.masked_fill(~seen, -torch.inf).amax(dim=-1, keepdim=True)
    top = (ours == largest) & seen
    hits = (top & inside).sum(dim=-1) / top.sum(dim=-1).clamp_min(1)
    return defined(hits, inside.any(dim=-1) & (ours != 0).any(dim=-1))


@measured("mass inside", "share", higher_is_better=True, low=0.0, high=1.0)
def mass_inside(attention: AttentionMap, truth: AttentionMap, above: float = 0.0) -> Measured:
    """The share of the attention that falls on cells of the truth; `above` is as in `support`.

    Not defined where the attention has a weight below 0: it has no shares.
    """
    ours, theirs, _ = rows(attention, truth)
    inside = _above(theirs, above)
    mass = (shares(ours, attention.kind) * inside).sum(dim=-1)
    return defined(mass, inside.any(dim=-1) & (ours > 0).any(dim=-1) & ~mass.isnan())


# --- a region cut out of the map


@measured("IoU", "share", higher_is_better=True, low=0.0, high=1.0)
def iou(
    attention: AttentionMap, truth: AttentionMap, at: float = 0.5, above: float = 0.0
) -> Measured:
    """What the region above `at` times the largest weight shares with the truth, over both.

    The threshold makes the number: state it, or take `mean_iou`. `above` is as in `support`.
    """
    ours, theirs, seen = rows(attention, truth)
    inside = _above(theirs, above)
    there = inside.any(dim=-1) & (ours != 0).any(dim=-1)
    return defined(_overlap(_above(ours, at) & seen, inside), there)


@measured("mean IoU", "share", higher_is_better=True, low=0.0, high=1.0)
def mean_iou(
    attention: AttentionMap,
    truth: AttentionMap,
    thresholds: Sequence[float] = THRESHOLDS,
    above: float = 0.0,
) -> Measured:
    """`iou` as a mean over thresholds, from 0.1 to 0.9 unless told otherwise."""
    if not thresholds:
        raise ValueError("there is no threshold to cut the map at")
    each = torch.stack([iou(attention, truth, at, above) for at in thresholds])
    return each.double().mean(dim=0).float()


@measured("Otsu Jaccard", "share", higher_is_better=True, low=0.0, high=1.0)
def otsu_jaccard(attention: AttentionMap, truth: AttentionMap, above: float = 0.0) -> Measured:
    """What the region above Otsu's threshold shares with the truth, over both, key by key.

    The threshold is of the visible keys alone. On pixels, with levels combined, this is
    `jaccard(binarised(...), mask)`. A constant map marks nothing.
    """
    ours, theirs, seen = rows(attention, truth)
    inside = _above(theirs, above)
    cut = torch.zeros_like(seen)
    whole = seen.all(dim=-1)
    if whole.any():
        cut[whole] = binarised(ours[whole][:, None])[:, 0]
    for at in (~whole & seen.any(dim=-1)).nonzero().flatten().tolist():
        cut[at, seen[at]] = binarised(ours[at, seen[at]][None, None])[0, 0]
    return defined(jaccard(cut[:, None], inside[:, None]), (ours != 0).any(dim=-1))


@measured("cut out", "share", higher_is_better=True, low=0.0, high=1.0)
def cut_out(
    attention: AttentionMap,
    truth: AttentionMap,
    at: float = 0.5,
    overlap: float = 0.5,
    above: float = 0.0,
) -> Measured:
    """1 where the region above `at` times the largest weight has an IoU of `overlap`, else 0."""
    found = iou(attention, truth, at, above)
    return defined((found >= overlap).double(), ~found.isnan())


def _overlap(found: Bool[Tensor, "b k"], inside: Bool[Tensor, "b k"]) -> Float[Tensor, " b"]:
    either = (found | inside).sum(dim=-1).clamp_min(1)
    return (found & inside).sum(dim=-1).double() / either
