"""Which cells does a map mean? The largest, those that hold most of it, or as many random ones.

Equals are taken in a random order: taken as they stand, a flat map would speak for a corner.
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from overt.attention import AttentionMap
from overt.measure.drawing import uniform_numbers
from overt.measure.measured import row, shares

Choose = Callable[[AttentionMap, torch.Generator], Bool[Tensor, "b k"]]


def top_cells(
    attention: AttentionMap, generator: torch.Generator, count: int
) -> Bool[Tensor, "b k"]:
    """The `count` cells with the largest weights, random ones of equals; never one without."""
    weights, seen = row(attention)
    order = descending(weights.masked_fill(~seen, -torch.inf), shuffle(seen, generator))
    return first(order, count) & seen & (weights > 0)


def mass_cells(
    attention: AttentionMap, generator: torch.Generator, share: float = 0.5
) -> Bool[Tensor, "b k"]:
    """The fewest cells that hold `share` of the attention between them, random ones of equals.

    None of a row with a weight below 0, which has no shares.
    """
    weights, seen = row(attention)
    each = shares(weights, attention.kind)
    seen = seen & ~each.isnan()
    each = each.nan_to_num(0)
    order = descending(each, shuffle(each, generator))
    ordered = each.gather(-1, order)
    before = ordered.cumsum(dim=-1) - ordered
    needed = before < share - 1e-6  # rounding shall not ask for one more
    return torch.zeros_like(seen).scatter(-1, order, needed) & seen & (weights > 0)


def random_cells(
    cells: Bool[Tensor, "b k"], seen: Bool[Tensor, "b k"], generator: torch.Generator
) -> Bool[Tensor, "b k"]:
    """As many random cells as `cells` has in each sample, among those that may be seen."""
    return as_many(cells, seen, shuffle(cells, generator))


def shuffle(like: Tensor, generator: torch.Generator) -> Int[Tensor, "b k"]:
    """The places of each row in a random order."""
    noise = uniform_numbers(like.shape, generator)
    return noise.argsort(dim=-1, descending=True).to(like.device)


def descending(
    scores: Float[Tensor, "b k"] | Bool[Tensor, "b k"], mixed: Int[Tensor, "b k"]
) -> Int[Tensor, "b k"]:
    """The places of the scores from the largest to the least, equals in the order of `mixed`."""
    return mixed.gather(-1, scores.gather(-1, mixed).argsort(dim=-1, descending=True, stable=True))


def as_many(
    cells: Bool[Tensor, "b k"], seen: Bool[Tensor, "b k"], mixed: Int[Tensor, "b k"]
) -> Bool[Tensor, "b k"]:
    """As many visible cells as `cells` has in each sample, the first in the order of `mixed`."""
    return first(descending(seen, mixed), cells.sum(dim=-1, keepdim=True)) & seen


def first(order: Int[Tensor, "b k"], count: int | Int[Tensor, "b 1"]) -> Bool[Tensor, "b k"]:
    """The first `count` places of an order, as cells."""
    place = torch.arange(order.shape[1], device=order.device).expand_as(order)
    return torch.zeros_like(order, dtype=torch.bool).scatter(-1, order, place < count)


def ranked(attention: AttentionMap, generator: torch.Generator) -> Int[Tensor, "b k"]:
    """The places of the keys from the most attended to the least; hidden ones come last."""
    weights, seen = row(attention)
    return descending(weights.masked_fill(~seen, -torch.inf), shuffle(seen, generator))


def top_share(
    attention: AttentionMap, generator: torch.Generator, share: float
) -> Bool[Tensor, "b k"]:
    """The most attended `share` of the keys that may be seen, rounded, and one key at least."""
    if not 0 <= share <= 1:
        raise ValueError(f"a share is from 0 to 1, not {share}")
    _, seen = row(attention)
    count = (share * seen.sum(dim=-1, keepdim=True)).round().long().clamp_min(1)
    return first(ranked(attention, generator), count) & seen
