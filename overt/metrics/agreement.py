"""Agreement of two maps, over the keys visible in both.

`sim`, `kl` and `js` compare distributions and are not defined where a weight is negative.
Correlations compare order or height and take weights of any sign.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from overt.attention import AttentionMap
from overt.metrics.metric import (
    SampleScores,
    declare_metric,
    mask_undefined,
    paired_rows,
    to_distribution,
)
from overt.metrics.ranks import average_ranks, kendall_tau


@declare_metric("Spearman", "correlation", higher_is_better=True, low=-1.0, high=1.0)
def spearman(attention: AttentionMap, truth: AttentionMap) -> SampleScores:
    """Compute Spearman's rank correlation of two maps.

    Ties share their average rank. Not defined where either map is constant: it has no ranks.

    Args:
        attention: A map with one row per sample.
        truth: The map to compare with, over the same keys.

    Returns:
        One correlation per sample.

    Example:
        >>> from overt import words
        >>> attention = AttentionMap.from_cells(torch.tensor([[0.1, 0.2, 0.3, 0.4]]), words(4))
        >>> truth = AttentionMap.from_cells(torch.tensor([[1, 2, 4, 3]]), words(4))
        >>> spearman(attention, truth)  # 1 - 6 (1 + 1) / (4 (16 - 1))
        tensor([0.8000])
    """
    ours, theirs, seen = paired_rows(attention, truth)
    # Pearson's correlation of average ranks; the formula without ties, 1 - 6 d^2 / (n^3 - n), is
    # wrong here
    return correlation(average_ranks(ours, seen), average_ranks(theirs, seen), seen)


@declare_metric("Kendall", "correlation", higher_is_better=True, low=-1.0, high=1.0)
def kendall(attention: AttentionMap, truth: AttentionMap) -> SampleScores:
    """Compute Kendall's tau-b of two maps: concordant less discordant pairs, adjusted for ties.

    See `overt.metrics.ranks.kendall_tau`. Not defined where either map is constant.

    Args:
        attention: A map with one row per sample.
        truth: The map to compare with, over the same keys.

    Returns:
        One correlation per sample.

    Example:
        >>> from overt import words
        >>> attention = AttentionMap.from_cells(torch.tensor([[0.1, 0.2, 0.3, 0.4]]), words(4))
        >>> truth = AttentionMap.from_cells(torch.tensor([[1, 2, 4, 3]]), words(4))
        >>> kendall(attention, truth)  # five concordant pairs, one discordant: (5 - 1) / 6
        tensor([0.6667])
    """
    ours, theirs, seen = paired_rows(attention, truth)
    tau = kendall_tau(ours, theirs, seen)
    return mask_undefined(tau, ~tau.isnan())


@declare_metric("CC", "correlation", higher_is_better=True, low=-1.0, high=1.0)
def cc(attention: AttentionMap, truth: AttentionMap) -> SampleScores:
    """Compute Pearson's correlation of the weights of two maps (CC of saliency benchmarks).

    Not defined where either map is constant.

    Args:
        attention: A map with one row per sample.
        truth: The map to compare with, over the same keys.

    Returns:
        One correlation per sample.

    Example:
        >>> from overt import words
        >>> attention = AttentionMap.from_cells(torch.tensor([[0.1, 0.2, 0.3, 0.4]]), words(4))
        >>> truth = AttentionMap.from_cells(torch.tensor([[0, 0, 1, 1]]), words(4))
        >>> cc(attention, truth)  # 2 / sqrt(5)
        tensor([0.8944])
    """
    ours, theirs, seen = paired_rows(attention, truth)
    return correlation(ours, theirs, seen)


@declare_metric("SIM", "share", higher_is_better=True, low=0.0, high=1.0)
def sim(attention: AttentionMap, truth: AttentionMap) -> SampleScores:
    """Compute the overlap of two distributions, `sum_k min(a, t)`.

    It is 1 less `total_variation`. Not defined where either map is empty or has a negative weight.

    Args:
        attention: A map with one row per sample.
        truth: The map to compare with, over the same keys.

    Returns:
        One overlap per sample, 1 for equal maps.

    Example:
        >>> from overt import words
        >>> attention = AttentionMap.from_cells(torch.tensor([[0.5, 0.5, 0.0, 0.0]]), words(4))
        >>> truth = AttentionMap.from_cells(torch.tensor([[1, 1, 1, 1]]), words(4))
        >>> sim(attention, truth)  # half of the truth is on the attended words
        tensor([0.5000])
    """
    ours, theirs = _distributions(attention, truth)
    common = torch.minimum(ours, theirs).sum(dim=-1)
    return mask_undefined(common.clamp_max(1), _both_defined(ours, theirs))


def correlation(
    first: Float[Tensor, "b k"], second: Float[Tensor, "b k"], seen: Bool[Tensor, "b k"]
) -> SampleScores:
    """Compute Pearson's correlation of each row over its visible keys; NaN if a row is constant."""
    count = seen.sum(dim=-1, keepdim=True).clamp_min(1)
    # float64, and centred before the products: sums of squares of small weights would cancel
    centred = []
    for values in (first.double(), second.double()):
        mean = (values * seen).sum(dim=-1, keepdim=True) / count
        centred.append((values - mean) * seen)
    ours, theirs = centred
    scale = ours.norm(dim=-1) * theirs.norm(dim=-1)
    # a constant row has a norm of rounding errors, not of 0, after its mean is subtracted
    varied = torch.stack([_varies(first, seen), _varies(second, seen)]).all(dim=0)
    together = (ours * theirs).sum(dim=-1) / torch.where(scale > 0, scale, 1)
    return mask_undefined(together.clamp(-1, 1), varied & (scale > 0))


def _varies(values: Float[Tensor, "b k"], seen: Bool[Tensor, "b k"]) -> Bool[Tensor, " b"]:
    highest = values.masked_fill(~seen, -torch.inf).amax(dim=-1)
    return highest > values.masked_fill(~seen, torch.inf).amin(dim=-1)


@declare_metric("KL", "nats", higher_is_better=False, low=0.0)
def kl(attention: AttentionMap, truth: AttentionMap) -> SampleScores:
    """Compute the Kullback-Leibler divergence of the attention from the truth.

    `sum_k t log(t / a)`: infinite where the attention has no weight on a cell of the truth; `js` is
    always finite. Not defined where either map is empty or has a negative weight.

    Args:
        attention: A map with one row per sample.
        truth: The map to compare with, over the same keys.

    Returns:
        One divergence per sample, in nats.

    Example:
        >>> from overt import words
        >>> even = AttentionMap.from_cells(torch.tensor([[1, 1, 1, 1]]), words(4))
        >>> first = AttentionMap.from_cells(torch.tensor([[1, 0, 0, 0]]), words(4))
        >>> kl(even, first), kl(first, even)  # log 4, and infinite: three words have no attention
        (tensor([1.3863]), tensor([inf]))
    """
    ours, theirs = _distributions(attention, truth)
    return mask_undefined(_kl(theirs, ours), _both_defined(ours, theirs))


@declare_metric("JS", "nats", higher_is_better=False, low=0.0, high=0.6931472)
def js(attention: AttentionMap, truth: AttentionMap) -> SampleScores:
    """Compute the Jensen-Shannon divergence of two maps, at most ln 2.

    Not defined where either map is empty or has a negative weight.

    Args:
        attention: A map with one row per sample.
        truth: The map to compare with, over the same keys.

    Returns:
        One divergence per sample, in nats.

    Example:
        >>> from overt import words
        >>> attention = AttentionMap.from_cells(torch.tensor([[1, 0], [1, 1]]), words(2))
        >>> truth = AttentionMap.from_cells(torch.tensor([[0, 1], [1, 1]]), words(2))
        >>> js(attention, truth)  # ln 2 for disjoint maps, 0 for equal ones
        tensor([0.6931, 0.0000])
    """
    ours, theirs = _distributions(attention, truth)
    # the middle is positive wherever either map is, so both divergences are finite
    middle = (ours + theirs) / 2
    mean = (_kl(ours, middle) + _kl(theirs, middle)) / 2
    return mask_undefined(mean, _both_defined(ours, theirs))


def _distributions(
    attention: AttentionMap, truth: AttentionMap
) -> tuple[Float[Tensor, "b k"], Float[Tensor, "b k"]]:
    ours, theirs, _ = paired_rows(attention, truth)
    return to_distribution(ours, attention.kind), to_distribution(theirs, truth.kind)


def _kl(first: Float[Tensor, "b k"], second: Float[Tensor, "b k"]) -> Float[Tensor, " b"]:
    """Compute `sum_k p log(p / q)`; a cell without p adds nothing."""
    # no second `where` around the logarithm: metrics need no gradient
    cost = torch.where(first > 0, first * (first / second).log(), 0)
    return cost.sum(dim=-1).clamp_min(0)  # rounding alone can make it negative


def _both_defined(ours: Float[Tensor, "b k"], theirs: Float[Tensor, "b k"]) -> Bool[Tensor, " b"]:
    return ~(ours.isnan().any(dim=-1) | theirs.isnan().any(dim=-1))
