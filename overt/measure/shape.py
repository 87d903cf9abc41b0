"""How wide is a map, whatever the truth?

All of these read weights as shares of a whole: a row with a weight below 0 has none, and no number.
"""

import math

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from overt.attention import AttentionMap, Kind
from overt.measure.measured import Measured, below_zero, defined, measured, row, shares


@measured("entropy", "nats", higher_is_better=None, low=0.0)
def entropy(attention: AttentionMap) -> Measured:
    """`-sum_k a log a` over the visible keys: 0 for one cell, log n for n cells alike.

    A row that does not sum to one is read as shares of its sum. Not defined where a weight is below
    0.
    """
    weights, _ = row(attention)
    each = shares(weights, attention.kind)
    terms = torch.where(each > 0, each * torch.where(each > 0, each, 1).log(), 0)
    return defined(-terms.sum(dim=-1), _whole(each)).clamp_min(0)


@measured("effective support", "cells", higher_is_better=None, low=1.0)
def effective_support(attention: AttentionMap) -> Measured:
    """`1 / sum_k a^2`: how many cells share the attention, if they shared it alike.

    Not defined where a weight is below 0.
    """
    weights, _ = row(attention)
    each = shares(weights, attention.kind)
    return defined(1 / each.square().sum(dim=-1), _whole(each)).clamp_min(1)


@measured("Gini", "share", higher_is_better=None, low=0.0, high=1.0)
def gini(attention: AttentionMap) -> Measured:
    """How unequal the visible keys are: 0 when all are alike, 1 - 1/n when one of n has it all.

    The only one of the usual numbers for sparsity that keeps all six of its axioms (Hurley and
    Rickard 2009). Not defined where a weight is below 0.
    """
    weights, seen = row(attention)
    each = shares(weights, attention.kind)
    count = seen.sum(dim=-1, keepdim=True)
    # hidden keys have no weight and come first; ranks start behind them
    ordered = each.masked_fill(~seen, -1).sort(dim=-1).values.clamp_min(0)
    hidden = seen.shape[-1] - count
    rank = torch.arange(1, seen.shape[-1] + 1, device=seen.device) - hidden
    unequal = ((2 * rank - count - 1) * ordered).sum(dim=-1) / count[:, 0].clamp_min(1)
    return defined(unequal.clamp(0, 1), _whole(each))


@measured("Hoyer", "share", higher_is_better=None, low=0.0, high=1.0)
def hoyer(attention: AttentionMap) -> Measured:
    """`(sqrt n - |a|_1 / |a|_2) / (sqrt n - 1)`: 0 for n keys alike, 1 for one (Hoyer 2004, eq. 2).

    Not defined where only one key may be seen, or a weight is below 0.
    """
    weights, seen = row(attention)
    each = shares(weights, attention.kind)
    root = seen.sum(dim=-1).double().sqrt()
    sparse = (root - 1 / each.norm(dim=-1)) / torch.where(root > 1, root - 1, 1)
    return defined(sparse.clamp(0, 1), _whole(each) & (root > 1))


def _whole(each: Float[Tensor, "b k"]) -> Bool[Tensor, " b"]:
    """Which rows have weights that are shares of a whole."""
    return (each > 0).any(dim=-1) & ~each.isnan().any(dim=-1)


# --- of all layers, heads and queries at once


@measured("sink mass", "share", higher_is_better=None, low=0.0, high=1.0)
def sink_mass(attention: AttentionMap, sinks: Bool[Tensor, "*b k"]) -> Measured:
    """The share of the attention that falls on `sinks`, a mean over layers, heads and queries.

    Which keys are sinks is told from outside: the first token, separators, registers, or what
    `overt.capture.derived.find_sinks` finds; a mask (k,) is for all samples, one (b, k) for each.
    Rows without weight, or with one below 0, do not count.
    """
    weights = attention.weights.double()
    total = weights.sum(dim=-1)
    if attention.kind is Kind.SIGNED:
        raise ValueError("signed weights have no shares; take their positive part first")
    there = (total > 0) & ~below_zero(weights)
    taken = (weights * rearrange(_for_each(sinks, attention), "b k -> b 1 1 1 k")).sum(dim=-1)
    each = torch.where(there, taken / torch.where(there, total, 1), 0)
    count = there.sum(dim=(1, 2, 3))
    return defined(each.sum(dim=(1, 2, 3)) / count.clamp_min(1), count > 0).clamp(0, 1)


def _for_each(sinks: Bool[Tensor, "*b k"], attention: AttentionMap) -> Bool[Tensor, "b k"]:
    """A mask of keys for every sample, which is given for all or for each."""
    b, k = len(attention), len(attention.keys)
    if tuple(sinks.shape) not in ((k,), (b, k)):
        raise ValueError(
            f"a mask of sinks of shape {tuple(sinks.shape)} does not fit {b} samples of {k} keys: "
            f"give ({k},) for all or ({b}, {k}) for each"
        )
    return sinks.expand(b, k)


@measured("head redundancy", "share", higher_is_better=None, low=0.0, high=1.0)
def head_redundancy(attention: AttentionMap) -> Measured:
    """How alike the heads of a layer are: 1 less their divergence, over pairs, layers and queries.

    The divergence is Jensen and Shannon's as a share of ln 2: 1 when all heads look alike, 0 when
    no two share a key. Rows in which either head has no weight, or one below 0, do not count.
    """
    if attention.kind is Kind.SIGNED:
        raise ValueError("signed weights have no shares; take their positive part first")
    heads = attention.values.shape[2]
    if heads < 2:
        raise ValueError("a layer of one head has none to compare it with")
    each = attention.normalize().weights.double().unbind(dim=2)
    total = torch.zeros(len(attention), dtype=torch.float64, device=attention.values.device)
    count = torch.zeros_like(total)
    for at, first in enumerate(each):
        for second in each[:at]:
            there = (first.sum(dim=-1) > 0) & (second.sum(dim=-1) > 0)
            there &= ~(below_zero(first) | below_zero(second))
            alike = 1 - _divergence(first, second) / math.log(2)
            total += torch.where(there, alike, 0).sum(dim=(1, 2))
            count += there.sum(dim=(1, 2))
    return defined(total / count.clamp_min(1), count > 0).clamp(0, 1)


def _divergence(first: Tensor, second: Tensor) -> Tensor:
    """Jensen and Shannon's divergence along the last axis, in nats."""
    middle = (first + second) / 2
    return (_nats(middle) - (_nats(first) + _nats(second)) / 2).clamp_min(0)


def _nats(each: Tensor) -> Tensor:
    return -torch.where(each > 0, each * torch.where(each > 0, each, 1).log(), 0).sum(dim=-1)
