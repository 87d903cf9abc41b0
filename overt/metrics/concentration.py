"""Concentration of a map, without a target: entropy, sparsity, sinks, redundancy of heads.

All of them read weights as a distribution; a row with a negative weight has no score.
"""

import math

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from overt.attention import AttentionMap, Kind
from overt.metrics.metric import (
    SampleScores,
    declare_metric,
    invalid_distribution,
    mask_undefined,
    single_row,
    to_distribution,
)


@declare_metric("entropy", "nats", higher_is_better=None, low=0.0)
def entropy(attention: AttentionMap) -> SampleScores:
    """Compute the Shannon entropy of a map: 0 for one cell, log n for n equal cells.

    `-sum_k a log a` over the visible keys. A row that does not sum to one is normalized first. Not
    defined where a weight is negative.

    Args:
        attention: A map with one row per sample.

    Returns:
        One entropy per sample, in nats.

    Example:
        >>> from overt import words
        >>> cells = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
        >>> attention = AttentionMap.from_cells(cells, words(4))
        >>> entropy(attention)  # log 4, and 0
        tensor([1.3863, -0.0000])
    """
    weights, _ = single_row(attention)
    each = to_distribution(weights, attention.kind)
    # 0 log 0 = 0
    terms = torch.where(each > 0, each * torch.where(each > 0, each, 1).log(), 0)
    return mask_undefined(-terms.sum(dim=-1), _has_distribution(each)).clamp_min(0)


@declare_metric("effective support", "cells", higher_is_better=None, low=1.0)
def effective_support(attention: AttentionMap) -> SampleScores:
    """Compute the effective number of attended cells, `1 / sum_k a^2`.

    Not defined where a weight is negative.

    Args:
        attention: A map with one row per sample.

    Returns:
        One number of cells per sample.
    """
    weights, _ = single_row(attention)
    each = to_distribution(weights, attention.kind)
    return mask_undefined(1 / each.square().sum(dim=-1), _has_distribution(each)).clamp_min(1)


@declare_metric("Gini", "share", higher_is_better=None, low=0.0, high=1.0)
def gini(attention: AttentionMap) -> SampleScores:
    """Compute the Gini index of a map: 0 for equal weights, 1 - 1/n for one of n keys.

    Of the usual sparsity measures, the only one that satisfies all six axioms of Hurley and Rickard
    2009. Not defined where a weight is negative.

    Args:
        attention: A map with one row per sample.

    Returns:
        One index per sample.

    Example:
        >>> from overt import words
        >>> cells = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
        >>> attention = AttentionMap.from_cells(cells, words(4))
        >>> gini(attention)  # 0 for equal weights, 1 - 1/4 for one of four keys
        tensor([0.0000, 0.7500])
    """
    weights, seen = single_row(attention)
    each = to_distribution(weights, attention.kind)
    count = seen.sum(dim=-1, keepdim=True)
    # hidden keys have no weight and are sorted first; ranks start after them
    ordered = each.masked_fill(~seen, -1).sort(dim=-1).values.clamp_min(0)
    hidden = seen.shape[-1] - count
    rank = torch.arange(1, seen.shape[-1] + 1, device=seen.device) - hidden
    # sum_i (2 i - n - 1) a_i / (n sum a) of sorted weights, which sum to one
    unequal = ((2 * rank - count - 1) * ordered).sum(dim=-1) / count[:, 0].clamp_min(1)
    return mask_undefined(unequal.clamp(0, 1), _has_distribution(each))


@declare_metric("Hoyer", "share", higher_is_better=None, low=0.0, high=1.0)
def hoyer(attention: AttentionMap) -> SampleScores:
    """Compute Hoyer's sparsity of a map: 0 for equal weights, 1 for all weight on one key.

    `(sqrt n - |a|_1 / |a|_2) / (sqrt n - 1)` (Hoyer 2004, eq. 2). Not defined where only one key is
    visible, or a weight is negative.

    Args:
        attention: A map with one row per sample.

    Returns:
        One sparsity per sample.
    """
    weights, seen = single_row(attention)
    each = to_distribution(weights, attention.kind)
    root = seen.sum(dim=-1).double().sqrt()
    # the L1 norm of a distribution is 1
    sparse = (root - 1 / each.norm(dim=-1)) / torch.where(root > 1, root - 1, 1)
    return mask_undefined(sparse.clamp(0, 1), _has_distribution(each) & (root > 1))


def _has_distribution(each: Float[Tensor, "b k"]) -> Bool[Tensor, " b"]:
    """Return which rows are distributions."""
    return (each > 0).any(dim=-1) & ~each.isnan().any(dim=-1)


# --- all layers, heads and queries at once


@declare_metric("sink mass", "share", higher_is_better=None, low=0.0, high=1.0)
def sink_mass(attention: AttentionMap, sinks: Bool[Tensor, "*b k"]) -> SampleScores:
    """Compute the share of attention on sink keys, averaged over layers, heads and queries.

    Rows without weight, or with a negative weight, do not count.

    Args:
        attention: A map with any number of layers, heads and queries.
        sinks: Which keys are sinks, (k,) for all samples or (b, k) per sample: the first token,
            separators, registers, or the result of `overt.attribution.find_sinks`.

    Returns:
        One share per sample.

    Raises:
        ValueError: The map is signed, or the shape of `sinks` does not fit.

    Example:
        >>> from overt import words
        >>> attention = AttentionMap.from_cells(torch.tensor([[0.6, 0.2, 0.2]]), words(3))
        >>> sink_mass(attention, torch.tensor([True, False, False]))
        tensor([0.6000])
    """
    weights = attention.weights.double()
    total = weights.sum(dim=-1)
    if attention.kind is Kind.SIGNED:
        raise ValueError("signed weights are not a distribution: take their positive part first")
    there = (total > 0) & ~invalid_distribution(weights)
    taken = (weights * rearrange(_mask_per_sample(sinks, attention), "b k -> b 1 1 1 k")).sum(
        dim=-1
    )
    # a share per row: rows of sub-probabilities have sums below one
    each = torch.where(there, taken / torch.where(there, total, 1), 0)
    count = there.sum(dim=(1, 2, 3))
    return mask_undefined(each.sum(dim=(1, 2, 3)) / count.clamp_min(1), count > 0).clamp(0, 1)


def _mask_per_sample(sinks: Bool[Tensor, "*b k"], attention: AttentionMap) -> Bool[Tensor, "b k"]:
    """Expand a mask of keys to all samples."""
    b, k = len(attention), len(attention.keys)
    if tuple(sinks.shape) not in ((k,), (b, k)):
        raise ValueError(f"sinks must have shape ({k},) or ({b}, {k}), got {tuple(sinks.shape)}")
    return sinks.expand(b, k)


@declare_metric("head redundancy", "share", higher_is_better=None, low=0.0, high=1.0)
def head_redundancy(attention: AttentionMap) -> SampleScores:
    """Compute how similar the heads of a layer are: 1 if all are equal, 0 if none share a key.

    It is 1 less the mean Jensen-Shannon divergence as a share of ln 2, over pairs of heads, layers
    and queries. Rows in which either head has no weight, or a negative one, do not count.

    Args:
        attention: A map with at least two heads.

    Returns:
        One redundancy per sample.

    Raises:
        ValueError: The map is signed or has one head.

    Example:
        >>> from overt import words
        >>> weights = torch.tensor([[[[[1.0, 0.0]], [[1.0, 0.0]]]], [[[[1.0, 0.0]], [[0.0, 1.0]]]]])
        >>> head_redundancy(AttentionMap(weights, words(2)))  # two equal heads, two disjoint ones
        tensor([1., 0.])
    """
    if attention.kind is Kind.SIGNED:
        raise ValueError("signed weights are not a distribution: take their positive part first")
    heads = attention.values.shape[2]
    if heads < 2:
        raise ValueError("head redundancy needs at least 2 heads, got 1")
    each = attention.normalize().weights.double().unbind(dim=2)
    total = torch.zeros(len(attention), dtype=torch.float64, device=attention.values.device)
    count = torch.zeros_like(total)
    for at, first in enumerate(each):
        # each pair once; a loop over heads needs less memory than all pairs at once
        for second in each[:at]:
            there = (first.sum(dim=-1) > 0) & (second.sum(dim=-1) > 0)
            there &= ~(invalid_distribution(first) | invalid_distribution(second))
            alike = 1 - _js_divergence(first, second) / math.log(2)
            total += torch.where(there, alike, 0).sum(dim=(1, 2))
            count += there.sum(dim=(1, 2))
    return mask_undefined(total / count.clamp_min(1), count > 0).clamp(0, 1)


def _js_divergence(first: Tensor, second: Tensor) -> Tensor:
    """Compute the Jensen-Shannon divergence along the last axis, in nats."""
    middle = (first + second) / 2
    return (_entropy(middle) - (_entropy(first) + _entropy(second)) / 2).clamp_min(0)


def _entropy(each: Tensor) -> Tensor:
    return -torch.where(each > 0, each * torch.where(each > 0, each, 1).log(), 0).sum(dim=-1)
