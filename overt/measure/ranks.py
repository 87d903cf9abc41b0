"""Ranks and discordant pairs of many rows at once: what rank correlations are made of.

On a CPU rows are sorted by numpy, which is several times as fast there as torch; on a GPU by torch.
Nothing is drawn at random and nothing depends on how equals happen to be sorted.
"""

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

_BLOCK = 8  # pairs within so many neighbours are compared one by one, which beats sorting them


def average_ranks(values: Float[Tensor, "b k"], seen: Bool[Tensor, "b k"]) -> Float[Tensor, "b k"]:
    """The rank of each visible value in its row, from 1; equal values share the mean of theirs.

    >>> seen = torch.tensor([[True, False, True, True]])
    >>> average_ranks(torch.tensor([[0.5, 9.0, 0.1, 0.5]]), seen)
    tensor([[2.5000, 0.0000, 1.0000, 2.5000]], dtype=torch.float64)
    """
    if not values.numel():
        return values.double()
    values = values.detach().double().masked_fill(~seen, torch.inf)
    order = _order(values)
    sizes, starts = _groups(values.gather(-1, order))
    mean = starts % values.shape[1] + (sizes + 1).double() / 2
    shared = mean.repeat_interleave(sizes).reshape(values.shape)
    return torch.zeros_like(values).scatter(-1, order, shared).masked_fill(~seen, 0)


def pairs(
    first: Float[Tensor, "b k"], second: Float[Tensor, "b k"], seen: Bool[Tensor, "b k"]
) -> tuple[Int[Tensor, " b"], Int[Tensor, " b"], Int[Tensor, " b"], Int[Tensor, " b"]]:
    """Pairs of visible values a row: discordant, tied in the first, in the second, and in both.

    Knight's way ("A Computer Method for Calculating Kendall's Tau", JASA 1966): rows are sorted by
    the first, equals by the second, and what is then out of order in the second is discordant.
    """
    wide = 2 * first.shape[1] + 2
    ours, theirs = (
        (2 * average_ranks(side, seen)).long().masked_fill(~seen, wide - 1)
        for side in (first, second)
    )
    both = _sort(ours * wide + theirs)
    hidden = (~seen).sum(dim=-1)
    unseen = hidden * (hidden - 1) // 2  # hidden keys tie with each other alone
    tied = [_tied(row) - unseen for row in (both // wide, _sort(theirs), both)]
    return inversions(both % wide), tied[0], tied[1], tied[2]


def roc_area(
    scores: Float[Tensor, "b k"],
    positive: Float[Tensor, "b k"],
    negative: Float[Tensor, "b k"],
) -> Float[Tensor, " b"]:
    """How often a positive entry scores above a negative one; equal scores count by half.

    Entries count by their weights as positive and as negative, and may be both. NaN where there is
    none of either.
    """
    order = _order(scores.detach().double())
    sizes, starts = _groups(scores.double().gather(-1, order))
    below = torch.nn.functional.pad(negative.double().gather(-1, order).cumsum(dim=-1), (1, 0))
    start = (starts % scores.shape[1]).repeat_interleave(sizes).reshape(scores.shape)
    end = start + sizes.repeat_interleave(sizes).reshape(scores.shape)
    lower = (below.gather(-1, start) + below.gather(-1, end)) / 2
    area = (positive.double().gather(-1, order) * lower).sum(dim=-1)
    return area / (positive.double().sum(dim=-1) * negative.double().sum(dim=-1))


def precision_area(
    scores: Float[Tensor, "b k"], truth: Bool[Tensor, "b k"], seen: Bool[Tensor, "b k"]
) -> Float[Tensor, " b"]:
    """The area under the curve of precision over recall, points joined by straight lines.

    Points are at each distinct score, and at recall 0 with precision 1. NaN without a truth.
    """
    gained, precision, opening, row = _falling(scores, truth, seen)
    previous = precision.roll(1).masked_fill(opening, 1)
    area = torch.zeros(len(scores), dtype=torch.float64, device=scores.device)
    area = area.scatter_add(0, row, gained * (precision + previous) / 2)
    return area / (truth & seen).sum(dim=-1)


def average_precision(
    scores: Float[Tensor, "b k"], truth: Bool[Tensor, "b k"], seen: Bool[Tensor, "b k"]
) -> Float[Tensor, " b"]:
    """The mean precision at which the truth is found, by steps at each distinct score."""
    gained, precision, _, row = _falling(scores, truth, seen)
    area = torch.zeros(len(scores), dtype=torch.float64, device=scores.device)
    return area.scatter_add(0, row, gained * precision) / (truth & seen).sum(dim=-1)


def _falling(
    scores: Float[Tensor, "b k"], truth: Bool[Tensor, "b k"], seen: Bool[Tensor, "b k"]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """At each distinct score, from the highest: what is found there of the truth, the precision so
    far, whether it is the first of its row, and the row."""
    k = scores.shape[1]
    falling = -scores.detach().double().masked_fill(~seen, -torch.inf)
    order = _order(falling)
    sizes, starts = _groups(falling.gather(-1, order))
    ends = starts + sizes - 1
    found = (truth & seen).double().gather(-1, order).cumsum(dim=-1).flatten()[ends]
    opening = starts % k == 0
    gained = found - found.roll(1).masked_fill(opening, 0)
    return gained, found / (ends % k + 1), opening, starts // k


def inversions(values: Int[Tensor, "b k"]) -> Int[Tensor, " b"]:
    """How many pairs of each row stand in the wrong order; equals do not.

    Sorted halves are merged, as in merge sort: whatever of the left half comes behind an entry of
    the right half is out of order with it. All rows and all halves of one size go together.

    >>> inversions(torch.tensor([[1, 2, 3], [3, 1, 1], [3, 2, 1]]))
    tensor([0, 2, 3])
    """
    b, k = values.shape
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


def _tied(ordered: Int[Tensor, "b k"]) -> Int[Tensor, " b"]:
    """How many pairs of a sorted row are equal."""
    if not ordered.numel():
        return torch.zeros(len(ordered), dtype=torch.long, device=ordered.device)
    sizes, starts = _groups(ordered)
    row = starts // ordered.shape[1]
    none = torch.zeros(len(ordered), dtype=torch.long, device=ordered.device)
    return none.scatter_add(0, row, sizes * (sizes - 1) // 2)


def _groups(ordered: Tensor) -> tuple[Int[Tensor, " g"], Int[Tensor, " g"]]:
    """How many equals stand together in sorted rows, and where each group starts, rows on end."""
    new = torch.ones_like(ordered, dtype=torch.bool)
    new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    starts = new.flatten().nonzero()[:, 0]
    end = torch.tensor([new.numel()], device=starts.device)
    return torch.diff(starts, append=end), starts


def _order(values: Float[Tensor, "b k"]) -> Int[Tensor, "b k"]:
    if values.device.type == "cpu":
        return torch.from_numpy(np.argsort(values.numpy(), axis=1))
    return values.argsort(dim=-1)


def _sort(values: Int[Tensor, "n m"]) -> Int[Tensor, "n m"]:
    if values.device.type == "cpu":
        return torch.from_numpy(np.sort(values.numpy(), axis=1))
    return values.sort(dim=-1).values
