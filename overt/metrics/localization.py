"""Localization: does attention fall on the true region?

The true region rarely ends at the border of a cell. Each cell counts by the share of it that the
truth covers (`covered_share`), which equals the score on pixels if every cell is drawn as a block
of equal weight. With `above`, a cell counts fully if its share is larger than that number, and
otherwise not at all: 0.5 counts cells covered by more than half, 0 counts every cell that the truth
touches, as version 1 of these metrics did.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from overt.attention import AttentionMap, Kind
from overt.metrics.metric import (
    SampleScores,
    declare_metric,
    mask_undefined,
    paired_rows,
    single_row,
    to_distribution,
)
from overt.metrics.segmentation import TIE, binarize_otsu

THRESHOLDS = tuple(tenth / 10 for tenth in range(1, 10))
VERSION = 2  # 1 counted every touched cell as inside, and gave a constant map an Otsu Jaccard of 0


def covered_share(truth: AttentionMap) -> Float[Tensor, "b k"]:
    """Return the share of each key that the truth covers, from 0 to 1.

    It is the `coverage` of the truth if that is stored and still proportional to the weights.
    Amounts, such as a 0/1 mask, are shares themselves, divided by the largest of a row if that is
    above 1. A distribution without `coverage` has lost the absolute shares: weights are then
    relative to the largest, which is exact where at least one key is fully covered.
    """
    weights, seen = single_row(truth)
    weights = torch.where(weights.isfinite(), weights, 0).clamp_min(0)
    largest = weights.amax(dim=-1, keepdim=True)
    if truth.kind is Kind.AMOUNT:
        largest = largest.clamp_min(1)
    found = weights / torch.where(largest > 0, largest, 1)
    if truth.coverage is not None:
        kept = truth.coverage[:, 0].to(weights).masked_fill(~seen, 0).clamp(0, 1)
        found = torch.where(_proportional(weights, kept)[:, None], kept, found)
    return found


def _proportional(one: Float[Tensor, "b k"], other: Float[Tensor, "b k"]) -> Bool[Tensor, " b"]:
    """Return which rows are equal up to their scale; rows with replaced weights are not."""
    sums = [each.sum(dim=-1, keepdim=True) for each in (one, other)]
    scaled = [each / torch.where(s > 0, s, 1) for each, s in zip((one, other), sums, strict=True)]
    return ((scaled[0] - scaled[1]).abs() <= 1e-5).all(dim=-1)


def support_mask(truth: AttentionMap, above: float = 0.0) -> Bool[Tensor, "b k"]:
    """Mark the cells of which the truth covers more than `above`; by default all it touches."""
    _, seen = single_row(truth)
    return (covered_share(truth) > above) & seen


def _inside(
    truth: AttentionMap, seen: Bool[Tensor, "b k"], above: float | None
) -> Float[Tensor, "b k"]:
    """Return how much each key counts as inside: its covered share, or 0 or 1 by a threshold."""
    found = covered_share(truth).masked_fill(~seen, 0)
    return found if above is None else (found > above).double()


def _above(weights: Float[Tensor, "b k"], at: float) -> Bool[Tensor, "b k"]:
    # never below 0: of signed weights only positive ones count as attended
    return weights > (at * weights.amax(dim=-1, keepdim=True)).clamp_min(0)


@declare_metric("pointing game", "share", higher_is_better=True, low=0.0, high=1.0, version=VERSION)
def pointing_game(
    attention: AttentionMap, truth: AttentionMap, above: float | None = None
) -> SampleScores:
    """Compute the pointing game: the covered share of the cell with the largest weight.

    Cells that tie for the largest weight, up to rounding, count by their mean, so that a uniform
    map scores the expectation of a random cell.

    Args:
        attention: A map with one row per sample.
        truth: The true region.
        above: Count cells fully or not at all; see the module.

    Returns:
        One score per sample; NaN without a truth, or where the map has no weight.

    Example:
        >>> from overt import grid
        >>> weights = torch.tensor([[0.7, 0.3, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]])
        >>> attention = AttentionMap.from_cells(weights, grid(2, 2))
        >>> truth = AttentionMap.from_cells(torch.tensor([[1, 0, 0, 0], [1, 0, 0, 0]]), grid(2, 2))
        >>> pointing_game(attention, truth)  # a hit; a constant map hits by chance, one of four
        tensor([1.0000, 0.2500])
    """
    ours, _, seen = paired_rows(attention, truth)
    inside = _inside(truth, seen, above)
    largest = ours.masked_fill(~seen, -torch.inf).amax(dim=-1, keepdim=True)
    near = torch.where(largest.isfinite(), largest - TIE * largest.abs(), largest)
    top = (ours >= near) & seen
    hits = (top * inside).sum(dim=-1) / top.sum(dim=-1).clamp_min(1)
    return mask_undefined(hits, (inside > 0).any(dim=-1) & (ours != 0).any(dim=-1))


@declare_metric("mass inside", "share", higher_is_better=True, low=0.0, high=1.0, version=VERSION)
def mass_inside(
    attention: AttentionMap, truth: AttentionMap, above: float | None = None
) -> SampleScores:
    """Compute the share of the attention inside the true region.

    Args:
        attention: A map with one row per sample.
        truth: The true region.
        above: Count cells fully or not at all; see the module.

    Returns:
        One share per sample; NaN without a truth, or where the attention has no weight or a
            negative one.

    Example:
        >>> from overt import grid
        >>> attention = AttentionMap.from_cells(torch.tensor([[0.5, 0.25, 0.25, 0.0]]), grid(2, 2))
        >>> truth = AttentionMap.from_cells(torch.tensor([[1, 1, 0, 0]]), grid(2, 2))  # upper half
        >>> mass_inside(attention, truth)
        tensor([0.7500])
    """
    ours, _, seen = paired_rows(attention, truth)
    inside = _inside(truth, seen, above)
    mass = (to_distribution(ours, attention.kind) * inside).sum(dim=-1)
    return mask_undefined(mass, (inside > 0).any(dim=-1) & (ours > 0).any(dim=-1) & ~mass.isnan())


# --- overlap of a thresholded map


@declare_metric("IoU", "share", higher_is_better=True, low=0.0, high=1.0, version=VERSION)
def iou(
    attention: AttentionMap, truth: AttentionMap, at: float = 0.5, above: float | None = None
) -> SampleScores:
    """Compute the IoU of the true region and the cells above a share of the largest weight.

    The score depends on the threshold: report it, or use `mean_iou`. Border cells count by their
    covered share in both areas.

    Args:
        attention: A map with one row per sample.
        truth: The true region.
        at: The threshold, as a share of the largest weight.
        above: Count border cells fully or not at all; see the module.

    Returns:
        One IoU per sample; NaN without a truth.
    """
    ours, _, seen = paired_rows(attention, truth)
    inside = _inside(truth, seen, above)
    there = (inside > 0).any(dim=-1) & (ours != 0).any(dim=-1)
    return mask_undefined(_overlap(_above(ours, at) & seen, inside), there)


@declare_metric("mean IoU", "share", higher_is_better=True, low=0.0, high=1.0, version=VERSION)
def mean_iou(
    attention: AttentionMap,
    truth: AttentionMap,
    thresholds: Sequence[float] = THRESHOLDS,
    above: float | None = None,
) -> SampleScores:
    """Compute the mean IoU over thresholds, by default from 0.1 to 0.9.

    Args:
        attention: A map with one row per sample.
        truth: The true region.
        thresholds: The thresholds of `iou`.
        above: Count border cells fully or not at all; see the module.

    Returns:
        One mean per sample.

    Raises:
        ValueError: There is no threshold.

    Example:
        >>> from overt import grid
        >>> attention = AttentionMap.from_cells(torch.tensor([[0.5, 0.25, 0.25, 0.0]]), grid(2, 2))
        >>> truth = AttentionMap.from_cells(torch.tensor([[1, 1, 0, 0]]), grid(2, 2))
        >>> mean_iou(attention, truth)  # 2/3 at the thresholds up to 0.4, 1/2 at the five above
        tensor([0.5741])
    """
    if not thresholds:
        raise ValueError("mean_iou needs at least 1 threshold, got 0")
    each = torch.stack([iou(attention, truth, at, above) for at in thresholds])
    return each.double().mean(dim=0).float()


@declare_metric("Otsu Jaccard", "share", higher_is_better=True, low=0.0, high=1.0, version=VERSION)
def otsu_jaccard(
    attention: AttentionMap, truth: AttentionMap, above: float | None = None
) -> SampleScores:
    """Compute the Jaccard index (IoU) of the true region and the cells above Otsu's threshold.

    The threshold is that of the visible keys. A map that is constant up to rounding has no
    threshold and marks every key, so that a uniform map scores the share that the truth covers.
    Border cells count by their covered share. On pixels, with levels combined, this is
    `jaccard(binarize_otsu(...), mask)`.

    Args:
        attention: A map with one row per sample.
        truth: The true region.
        above: Count border cells fully or not at all; see the module.

    Returns:
        One index per sample; NaN without a truth.

    Example:
        >>> from overt import grid
        >>> attention = AttentionMap.from_cells(torch.tensor([[0.45, 0.35, 0.1, 0.1]]), grid(2, 2))
        >>> truth = AttentionMap.from_cells(torch.tensor([[1, 1, 1, 0]]), grid(2, 2))
        >>> otsu_jaccard(attention, truth)  # the first two cells are above the threshold: 2 of 3
        tensor([0.6667])
    """
    ours, _, seen = paired_rows(attention, truth)
    inside = _inside(truth, seen, above)
    there = (inside > 0).any(dim=-1) & (ours != 0).any(dim=-1) & ours.isfinite().all(dim=-1)
    return mask_undefined(_overlap(_otsu_region(ours, seen), inside), there)


def _otsu_region(ours: Float[Tensor, "b k"], seen: Bool[Tensor, "b k"]) -> Bool[Tensor, "b k"]:
    cut = torch.zeros_like(seen)
    whole = seen.all(dim=-1) & ours.isfinite().all(dim=-1)
    if whole.any():
        cut[whole] = binarize_otsu(ours[whole][:, None])[:, 0]
    some = ~seen.all(dim=-1) & seen.any(dim=-1) & ours.isfinite().all(dim=-1)
    for at in some.nonzero().flatten().tolist():
        cut[at, seen[at]] = binarize_otsu(ours[at, seen[at]][None, None])[0, 0]
    return cut


@declare_metric(
    "cut out", "share", higher_is_better=True, low=0.0, high=1.0, version=VERSION, key="cut_out"
)
def localization_accuracy(
    attention: AttentionMap,
    truth: AttentionMap,
    at: float = 0.5,
    overlap: float = 0.5,
    above: float | None = None,
) -> SampleScores:
    """Compute whether the IoU with the true region reaches a threshold: 1 or 0 per sample.

    In scorecards it is called `cut_out`.

    Args:
        attention: A map with one row per sample.
        truth: The true region.
        at: The threshold of `iou`, as a share of the largest weight.
        overlap: The least IoU of a hit.
        above: Count border cells fully or not at all; see the module.

    Returns:
        One score per sample; NaN without a truth.
    """
    found = iou(attention, truth, at, above)
    return mask_undefined((found >= overlap).double(), ~found.isnan())


def _overlap(found: Bool[Tensor, "b k"], inside: Float[Tensor, "b k"]) -> Float[Tensor, " b"]:
    """Compute intersection over union where a key counts by its covered share."""
    both = (found * inside).sum(dim=-1)
    either = found.sum(dim=-1) + inside.sum(dim=-1) - both
    return both / torch.where(either > 0, either, 1)
