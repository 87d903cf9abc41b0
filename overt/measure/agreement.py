"""How alike are two maps? Only keys that both may see are compared.

`sim`, `kl` and `js` read weights as shares of a whole, and are not defined where one is below 0;
correlations ask for order or height, and take weights of any sign.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from overt.attention import AttentionMap
from overt.measure.measured import Measured, defined, measured, rows, shares
from overt.measure.ranks import average_ranks, pairs


@measured("Spearman", "correlation", higher_is_better=True, low=-1.0, high=1.0)
def spearman(attention: AttentionMap, truth: AttentionMap) -> Measured:
    """Rank correlation over the visible keys, ties sharing their average rank.

    Not defined where either map is constant: it ranks nothing.
    """
    ours, theirs, seen = rows(attention, truth)
    return correlation(average_ranks(ours, seen), average_ranks(theirs, seen), seen)


@measured("Kendall", "correlation", higher_is_better=True, low=-1.0, high=1.0)
def kendall(attention: AttentionMap, truth: AttentionMap) -> Measured:
    """Tau-b over the visible keys: how many more pairs are ordered alike than not, ties apart.

    `(P - Q) / sqrt((n0 - n1) (n0 - n2))` of n0 pairs, of which n1 tie in the map and n2 in the
    truth (Kendall 1945). Not defined where either map is constant: it orders nothing.
    """
    ours, theirs, seen = rows(attention, truth)
    discordant, tied, also_tied, both_tied = pairs(ours, theirs, seen)
    count = seen.sum(dim=-1)
    every = count * (count - 1) // 2
    more = every - tied - also_tied + both_tied - 2 * discordant
    scale = ((every - tied).double() * (every - also_tied).double()).sqrt()
    return defined((more / torch.where(scale > 0, scale, 1)).clamp(-1, 1), scale > 0)


@measured("CC", "correlation", higher_is_better=True, low=-1.0, high=1.0)
def cc(attention: AttentionMap, truth: AttentionMap) -> Measured:
    """Pearson's correlation of the weights over the visible keys, as saliency is judged by.

    Not defined where either map is constant.
    """
    ours, theirs, seen = rows(attention, truth)
    return correlation(ours, theirs, seen)


@measured("SIM", "share", higher_is_better=True, low=0.0, high=1.0)
def sim(attention: AttentionMap, truth: AttentionMap) -> Measured:
    """`sum_k min(a, t)`: what two distributions have in common. One less it is `moved`.

    Not defined where either map is empty or has a weight below 0.
    """
    ours, theirs = _distributions(attention, truth)
    common = torch.minimum(ours, theirs).sum(dim=-1)
    return defined(common.clamp_max(1), _both(ours, theirs))


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

    Infinite where the attention has no weight on a cell of the truth; `js` is always finite. Not
    defined where either map is empty or has a weight below 0.
    """
    ours, theirs = _distributions(attention, truth)
    return defined(_relative(theirs, ours), _both(ours, theirs))


@measured("JS", "nats", higher_is_better=False, low=0.0, high=0.6931472)
def js(attention: AttentionMap, truth: AttentionMap) -> Measured:
    """Jensen-Shannon divergence: the cost of taking the mean of both for each; at most ln 2.

    Not defined where either map is empty or has a weight below 0.
    """
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
