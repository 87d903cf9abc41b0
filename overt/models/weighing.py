"""Weighted sums: from scores to a map and what it gathers."""

import torch
from einops import einsum, rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from overt.attention import AttentionMap, Layout


def weigh(
    scores: Float[Tensor, "b k h"],
    values: Float[Tensor, "b k d"],
    keys: Layout,
    present: Bool[Tensor, "b k"] | None = None,
) -> tuple[Float[Tensor, "b h d"], AttentionMap]:
    """The softmax of the scores over the keys there are, a map a head, and its sums of values.

    The softmax is taken in 32 bits at least; the sums keep the number format of the values.
    """
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    attention = AttentionMap.from_scores(
        rearrange(scores, "b k h -> b 1 h 1 k"),
        keys,
        mask=None if present is None else rearrange(present, "b k -> b 1 k"),
    )
    weights = rearrange(attention.weights, "b 1 h 1 k -> b h k").to(values.dtype)
    return einsum(weights, values, "b h k, b k d -> b h d"), attention
