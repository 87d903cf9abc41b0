"""How wide is a map, whatever the truth?"""

import torch

from overt.attention import AttentionMap
from overt.measure.measured import Measured, defined, measured, row, shares


@measured("entropy", "nats", higher_is_better=None, low=0.0)
def entropy(attention: AttentionMap) -> Measured:
    """`-sum_k a log a` over the visible keys: 0 for one cell, log n for n cells alike.

    A row that does not sum to one is read as shares of its sum.
    """
    weights, _ = row(attention)
    each = shares(weights, attention.kind)
    terms = torch.where(each > 0, each * torch.where(each > 0, each, 1).log(), 0)
    return defined(-terms.sum(dim=-1), (weights > 0).any(dim=-1)).clamp_min(0)


@measured("effective support", "cells", higher_is_better=None, low=1.0)
def effective_support(attention: AttentionMap) -> Measured:
    """`1 / sum_k a^2`: how many cells share the attention, if they shared it alike."""
    weights, _ = row(attention)
    each = shares(weights, attention.kind)
    return defined(1 / each.square().sum(dim=-1), (weights > 0).any(dim=-1)).clamp_min(1)
