"""Ranks, discordant pairs and areas under curves, for many rows at once.

On a CPU rows are sorted by NumPy, which is several times faster there than PyTorch; on a GPU by
PyTorch. Nothing is random, and nothing depends on how ties happen to be sorted.
"""

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

_BLOCK = 8  # pairs this close are compared directly, which is faster than sorting them


def average_ranks(values: Float[Tensor, "b k"], seen: Bool[Tensor, "b k"]) -> Float[Tensor, "b k"]:
    """Rank the visible values of each row, from 1; ties share the mean of their ranks.

    >>> seen = torch.tensor([[True, False, True, True]])
    >>> average_ranks(torch.tensor([[0.5, 9.0, 0.1, 0.5]]), seen)
    tensor([[2.5000, 0.0000, 1.0000, 2.5000]], dtype=torch.float64)
    """
    if not values.numel():
        return values.double()
    values = values.detach().double().masked_fill(~seen, torch.inf)
    order = _argsort(values)
    sizes, starts = _tie_groups(values.gather(-1, order))
    mean = starts % values.shape[1] + (sizes + 1).double() / 2
    shared = mean.repeat_interleave(sizes).reshape(values.shape)
    return torch.zeros_like(values).scatter(-1, order, shared).masked_fill(~seen, 0)


def count_pairs(
    first: Float[Tensor, "b k"], second: Float[Tensor, "b k"], seen: Bool[Tensor, "b k"]
) -> tuple[Int[Tensor, " b"], Int[Tensor, " b"], Int[Tensor, " b"], Int[Tensor, " b"]]:
    """Count pairs of visible values per row: discordant, tied in first, in second, and in both.

    Knight's algorithm ("A Computer Method for Calculating Kendall's Tau", JASA 1966): rows are
    sorted by the first values, ties by the second; inversions of the second are then discordant
    pairs.
    """
    wide = 2 * first.shape[1] + 2
    ours, theirs = (
        (2 * average_ranks(side, seen)).long().masked_fill(~seen, wide - 1)
        for side in (first, second)
    )
    both = _sort(ours * wide + theirs)
    hidden = (~seen).sum(dim=-1)
    unseen = hidden * (hidden - 1) // 2  # hidden keys tie only with each other
    tied = [_count_ties(row) - unseen for row in (both // wide, _sort(theirs), both)]
    return inversions(both % wide), tied[0], tied[1], tied[2]


def kendall_tau(
    first: Float[Tensor, "b k"], second: Float[Tensor, "b k"], seen: Bool[Tensor, "b k"]
) -> Float[Tensor, " b"]:
    """Compute Kendall's tau-b of the visible values per row; NaN where a side is constant.

    `(P - Q) / sqrt((n0 - n1) (n0 - n2))` of n0 pairs, P of them concordant and Q discordant, of
    which n1 tie in the first and n2 in the second (Kendall 1945).
    """
    discordant, tied, also_tied, both_tied = count_pairs(first, second, seen)
    count = seen.sum(dim=-1)
    every = count * (count - 1) // 2
    # P - Q = (pairs without a tie) - 2 Q; pairs that tie in both were subtracted twice
    more = every - tied - also_tied + both_tied - 2 * discordant
    scale = ((every - tied).double() * (every - also_tied).double()).sqrt()
    # the clamp removes rounding only: tau-b is within [-1, 1]
    return torch.where(scale > 0, (more / scale).clamp(-1, 1), torch.nan)


def roc_auc(
    scores: Float[Tensor, "b k"],
    positive: Float[Tensor, "b k"],
    negative: Float[Tensor, "b k"],
) -> Float[Tensor, " b"]:
    """Compute the area under the ROC curve: how often a positive entry scores above a negative one.

    Ties count by half. Entries count by their weights as positive and as negative, and may be both.
    NaN without a positive or without a negative entry.
    """
    order = _argsort(scores.detach().double())
    sizes, starts = _tie_groups(scores.double().gather(-1, order))
    below = torch.nn.functional.pad(negative.double().gather(-1, order).cumsum(dim=-1), (1, 0))
    start = (starts % scores.shape[1]).repeat_interleave(sizes).reshape(scores.shape)
    end = start + sizes.repeat_interleave(sizes).reshape(scores.shape)
    lower = (below.gather(-1, start) + below.gather(-1, end)) / 2
    area = (positive.double().gather(-1, order) * lower).sum(dim=-1)
    return area / (positive.double().sum(dim=-1) * negative.double().sum(dim=-1))


def pr_auc(
    scores: Float[Tensor, "b k"], truth: Bool[Tensor, "b k"], seen: Bool[Tensor, "b k"]
) -> Float[Tensor, " b"]:
    """Compute the area under the precision-recall curve, with linear interpolation.

    Points are at each distinct score, and at recall 0 with precision 1. NaN without a true entry.
    """
    gained, precision, opening, row = _precision_steps(scores, truth, seen)
    previous = precision.roll(1).masked_fill(opening, 1)
    area = torch.zeros(len(scores), dtype=torch.float64, device=scores.device)
    area = area.scatter_add(0, row, gained * (precision + previous) / 2)
    return area / (truth & seen).sum(dim=-1)


def average_precision(
    scores: Float[Tensor, "b k"], truth: Bool[Tensor, "b k"], seen: Bool[Tensor, "b k"]
) -> Float[Tensor, " b"]:
    """Compute average precision: the step-wise area under the precision-recall curve."""
    gained, precision, _, row = _precision_steps(scores, truth, seen)
    area = torch.zeros(len(scores), dtype=torch.float64, device=scores.device)
    return area.scatter_add(0, row, gained * precision) / (truth & seen).sum(dim=-1)


def _precision_steps(
    scores: Float[Tensor, "b k"], truth: Bool[Tensor, "b k"], seen: Bool[Tensor, "b k"]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Walk down the distinct scores of each row.

    Returns, per distinct score: true entries gained there, the precision so far, whether it is the
    first of its row, and the row.
    """
    k = scores.shape[1]
    falling = -scores.detach().double().masked_fill(~seen, -torch.inf)
    order = _argsort(falling)
    sizes, starts = _tie_groups(falling.gather(-1, order))
    ends = starts + sizes - 1
    found = (truth & seen).double().gather(-1, order).cumsum(dim=-1).flatten()[ends]
    opening = starts % k == 0
    gained = found - found.roll(1).masked_fill(opening, 0)
    return gained, found / (ends % k + 1), opening, starts // k


def inversions(values: Int[Tensor, "b k"]) -> Int[Tensor, " b"]:
    """Count the pairs of each row that are in the wrong order; ties do not count.

    Sorted halves are merged as in merge sort: every entry of the left half that comes after an
    entry of the right half is inverted with it. All rows and all halves of one size are merged
    together.

    >>> inversions(torch.tensor([[1, 2, 3], [3, 1, 1], [3, 2, 1]]))
    tensor([0, 2, 3])
    """
    b, k = values.shape
    if not b:  # -1 of a reshape would be ambiguous
        return torch.zeros(0, dtype=torch.long, device=values.device)
    width = _BLOCK
    while width < k:
        width *= 2
    last = int(values.max()) + 1 if values.numel() else 0
    rest = torch.nn.functional.pad(values.int(), (0, width - k), value=last)
    blocks = rest.reshape(b, -1, _BLOCK)
    found = torch.zeros(b, dtype=torch.long, device=values.device)
    for apart in range(1, min(_BLOCK, k)):
        found += (blocks[..., :-apart] > blocks[..., apart:]).sum(dim=(1, 2))
    half = _BLOCK
    while half < width:
        right = torch.arange(2 * half, device=values.device) >= half
        marked = _sort(2 * rest.reshape(-1, 2 * half) + right.int())  # left ones first of equals
        place = torch.arange(2 * half, device=values.device)
        places = ((marked & 1) * place).sum(dim=-1).reshape(b, -1)
        found += (half * half + half * (half - 1) // 2 - places).sum(dim=-1)
        rest, half = marked >> 1, 2 * half
    return found


def _count_ties(ordered: Int[Tensor, "b k"]) -> Int[Tensor, " b"]:
    """Count the tied pairs of each sorted row."""
    if not ordered.numel():
        return torch.zeros(len(ordered), dtype=torch.long, device=ordered.device)
    sizes, starts = _tie_groups(ordered)
    row = starts // ordered.shape[1]
    none = torch.zeros(len(ordered), dtype=torch.long, device=ordered.device)
    return none.scatter_add(0, row, sizes * (sizes - 1) // 2)


def _tie_groups(ordered: Tensor) -> tuple[Int[Tensor, " g"], Int[Tensor, " g"]]:
    """Return the sizes of groups of ties in sorted rows, and their starts in the flattened rows."""
    new = torch.ones_like(ordered, dtype=torch.bool)
    new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    starts = new.flatten().nonzero()[:, 0]
    end = torch.tensor([new.numel()], device=starts.device)
    return torch.diff(starts, append=end), starts


def _argsort(values: Float[Tensor, "b k"]) -> Int[Tensor, "b k"]:
    if values.device.type == "cpu":
        return torch.from_numpy(np.argsort(values.numpy(), axis=1))
    return values.argsort(dim=-1)


def _sort(values: Int[Tensor, "n m"]) -> Int[Tensor, "n m"]:
    if values.device.type == "cpu":
        return torch.from_numpy(np.sort(values.numpy(), axis=1))
    return values.sort(dim=-1).values
