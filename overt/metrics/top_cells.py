"""Select cells of a map: the largest, those that hold most of its mass, or as many random ones.

Ties are broken at random: otherwise a constant map would always select the first cells.
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from overt.attention import AttentionMap
from overt.metrics.argument_checks import check_count, check_share
from overt.metrics.metric import single_row, to_distribution
from overt.metrics.rng import sample_uniform

Choose = Callable[[AttentionMap, torch.Generator], Bool[Tensor, "b k"]]


def top_cells(
    attention: AttentionMap, generator: torch.Generator, count: int
) -> Bool[Tensor, "b k"]:
    """Select the `count` cells with the largest weights; never a cell without weight.

    Args:
        attention: A map with one row per sample.
        generator: Breaks ties.
        count: Cells per sample.

    Returns:
        The mask of selected cells.
    """
    count = check_count("count", count)
    weights, seen = single_row(attention)
    order = argsort_descending(
        weights.masked_fill(~seen, -torch.inf), random_order(seen, generator)
    )
    return first_cells(order, count) & seen & (weights > 0)


def mass_cells(
    attention: AttentionMap, generator: torch.Generator, share: float = 0.5
) -> Bool[Tensor, "b k"]:
    """Select the fewest cells that together hold `share` of the attention.

    Args:
        attention: A map with one row per sample.
        generator: Breaks ties.
        share: The share of attention to hold.

    Returns:
        The mask of selected cells; empty for a row with a negative weight.
    """
    share = check_share(share, zero=False)
    weights, seen = single_row(attention)
    each = to_distribution(weights, attention.kind)
    seen = seen & ~each.isnan()
    each = each.nan_to_num(0)
    order = argsort_descending(each, random_order(each, generator))
    ordered = each.gather(-1, order)
    before = ordered.cumsum(dim=-1) - ordered
    needed = before < share - 1e-6  # rounding must not select one more
    return torch.zeros_like(seen).scatter(-1, order, needed) & seen & (weights > 0)


def random_cells(
    cells: Bool[Tensor, "b k"], seen: Bool[Tensor, "b k"], generator: torch.Generator
) -> Bool[Tensor, "b k"]:
    """Select as many random visible cells per sample as `cells` has."""
    return same_count_cells(cells, seen, random_order(cells, generator))


def random_order(like: Tensor, generator: torch.Generator) -> Int[Tensor, "b k"]:
    """Draw a random order of the places of each row."""
    noise = sample_uniform(like.shape, generator)
    return noise.argsort(dim=-1, descending=True).to(like.device)


def argsort_descending(
    scores: Float[Tensor, "b k"] | Bool[Tensor, "b k"], mixed: Int[Tensor, "b k"]
) -> Int[Tensor, "b k"]:
    """Sort places by descending score, ties in the order of `mixed`."""
    return mixed.gather(-1, scores.gather(-1, mixed).argsort(dim=-1, descending=True, stable=True))


def same_count_cells(
    cells: Bool[Tensor, "b k"], seen: Bool[Tensor, "b k"], mixed: Int[Tensor, "b k"]
) -> Bool[Tensor, "b k"]:
    """Select as many visible cells per sample as `cells` has, the first in the order of `mixed`."""
    return first_cells(argsort_descending(seen, mixed), cells.sum(dim=-1, keepdim=True)) & seen


def first_cells(order: Int[Tensor, "b k"], count: int | Int[Tensor, "b 1"]) -> Bool[Tensor, "b k"]:
    """Convert the first `count` places of an order to a mask."""
    place = torch.arange(order.shape[1], device=order.device).expand_as(order)
    return torch.zeros_like(order, dtype=torch.bool).scatter(-1, order, place < count)


def rank_keys(attention: AttentionMap, generator: torch.Generator) -> Int[Tensor, "b k"]:
    """Sort keys from the most to the least attended; hidden keys come last, ties are random."""
    weights, seen = single_row(attention)
    return argsort_descending(weights.masked_fill(~seen, -torch.inf), random_order(seen, generator))


def top_share(
    attention: AttentionMap, generator: torch.Generator, share: float
) -> Bool[Tensor, "b k"]:
    """Select the most attended `share` of the visible keys, rounded, and at least one.

    Args:
        attention: A map with one row per sample.
        generator: Breaks ties.
        share: The share of keys to select.

    Returns:
        The mask of selected keys.
    """
    share = check_share(share)
    _, seen = single_row(attention)
    count = (share * seen.sum(dim=-1, keepdim=True)).round().long().clamp_min(1)
    return first_cells(rank_keys(attention, generator), count) & seen
