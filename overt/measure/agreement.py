"""How alike are two maps? Only keys that both may see are compared."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from overt.attention import AttentionMap
from overt.measure.measured import Measured, defined, measured, rows, shares


def average_ranks(values: Float[Tensor, "b k"], seen: Bool[Tensor, "b k"]) -> Float[Tensor, "b k"]:
    """The rank of each visible value in its row, from 1; equal values share the mean of theirs.

    >>> seen = torch.tensor([[True, False, True, True]])
    >>> average_ranks(torch.tensor([[0.5, 9.0, 0.1, 0.5]]), seen)
    tensor([[2.5000, 0.0000, 1.0000, 2.5000]], dtype=torch.float64)
    """
    ordered, order = values.double().masked_fill(~seen, torch.inf).sort(dim=-1)
    starts = torch.ones_like(ordered, dtype=torch.bool)
    starts[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    group = starts.cumsum(dim=-1) - 1
    place = torch.arange(1, values.shape[1] + 1, device=values.device).to(ordered)
    places = place.expand_as(ordered)
    total = torch.zeros_like(ordered).scatter_add(-1, group, places)
    count = torch.zeros_like(ordered).scatter_add(-1, group, torch.ones_like(ordered))
    shared = (total / count.clamp_min(1)).gather(-1, group)
    return torch.zeros_like(ordered).scatter(-1, order, shared).masked_fill(~seen, 0)


@measured("Spearman", "correlation", higher_is_better=True, low=-1.0, high=1.0)
def spearman(attention: AttentionMap, truth: AttentionMap) -> Measured:
    """Rank correlation over the visible keys, ties sharing their average rank.

    Not defined where either map is constant: it ranks nothing.
    """
    ours, theirs, seen = rows(attention, truth)
    return correlation(average_ranks(ours, seen), average_ranks(theirs, seen), seen)


def correlation(
    first: Float[Tensor, "b k"], second: Float[Tensor, "b k"], seen: Bool[Tensor, "b k"]
) -> Measured:
    """Pearson's correlation of each row over its visible keys; NaN where one side is constant."""
    count = seen.sum(dim=-1, keepdim=True).clamp_min(1)
    centred = []
    for values in (first.double(), second.double()):
        mean = (values * seen).sum(dim=-1, keepdim=True) / count
        centred.append((values - mean) * seen)
    ours, theirs = centred
    scale = ours.norm(dim=-1) * theirs.norm(dim=-1)
    varied = torch.stack([_varies(first, seen), _varies(second, seen)]).all(dim=0)
    together = (ours * theirs).sum(dim=-1) / torch.where(scale > 0, scale, 1)
    return defined(together.clamp(-1, 1), varied & (scale > 0))


def _varies(values: Float[Tensor, "b k"], seen: Bool[Tensor, "b k"]) -> Bool[Tensor, " b"]:
    highest = values.masked_fill(~seen, -torch.inf).amax(dim=-1)
    return highest > values.masked_fill(~seen, torch.inf).amin(dim=-1)


@measured("KL", "nats", higher_is_better=False, low=0.0)
def kl(attention: AttentionMap, truth: AttentionMap) -> Measured:
    """`sum_k t log(t / a)`: what it costs to take the attention for the truth.

    Infinite where the attention has no weight on a cell of the truth; `js` is always finite.
    """
    ours, theirs = _distributions(attention, truth)
    return defined(_relative(theirs, ours), _both(ours, theirs))


@measured("JS", "nats", higher_is_better=False, low=0.0, high=0.6931472)
def js(attention: AttentionMap, truth: AttentionMap) -> Measured:
    """Jensen-Shannon divergence: the cost of taking the mean of both for each; at most ln 2."""
    ours, theirs = _distributions(attention, truth)
    middle = (ours + theirs) / 2
    mean = (_relative(ours, middle) + _relative(theirs, middle)) / 2
    return defined(mean, _both(ours, theirs))


def _distributions(
    attention: AttentionMap, truth: AttentionMap
) -> tuple[Float[Tensor, "b k"], Float[Tensor, "b k"]]:
    ours, theirs, _ = rows(attention, truth)
    return shares(ours, attention.kind), shares(theirs, truth.kind)


def _relative(first: Float[Tensor, "b k"], second: Float[Tensor, "b k"]) -> Float[Tensor, " b"]:
    """`sum_k p log(p / q)`, where a cell without p costs nothing."""
    cost = torch.where(first > 0, first * (first / second).log(), 0)
    return cost.sum(dim=-1).clamp_min(0)  # rounding alone can make it negative


def _both(ours: Float[Tensor, "b k"], theirs: Float[Tensor, "b k"]) -> Bool[Tensor, " b"]:
    return ~(ours.isnan().any(dim=-1) | theirs.isnan().any(dim=-1))
