"""Attention pooling: softmax over scores, then weighted sums of values."""

import torch
from einops import einsum, rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from overt.attention import AttentionMap, Layout


def attention_pool(
    scores: Float[Tensor, "b k h"],
    values: Float[Tensor, "b k d"],
    keys: Layout,
    present: Bool[Tensor, "b k"] | None = None,
) -> tuple[Float[Tensor, "b h d"], AttentionMap]:
    """Pool values with the softmax of their scores.

    The softmax runs in float32 or better; the sums keep the dtype of the values.

    Args:
        scores: unnormalised score of each key in each head.
        values: value of each key.
        keys: layout of the keys.
        present: keys that exist; the others (padding) get no weight. All by default.

    Returns:
        The weighted sum of each head, and the attention map.
    """
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    attention = AttentionMap.from_scores(
        rearrange(scores, "b k h -> b 1 h 1 k"),
        keys,
        mask=None if present is None else rearrange(present, "b k -> b 1 k"),
    )
    # hops or glimpses are on the head axis of the map: one layer, one query
    weights = rearrange(attention.weights, "b 1 h 1 k -> b h k").to(values.dtype)
    return einsum(weights, values, "b h k, b k d -> b h d"), attention
