"""How much of its attention does each token give to the image? Read while a model writes.

    image = layout.find("image")
    written = capture.generate(model, keys=image, **inputs)
    token_shares(written.attention)      # (samples, new tokens)

A model that answers from the words alone gives the image little; one that gives it much may still
look at a sink in it. Liu, Zheng and Chen, "Paying More Attention to Image", ECCV 2024,
https://arxiv.org/abs/2407.21771, on how the share falls as a text grows.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from overt.attention import AttentionMap, Kind
from overt.measure.measured import Measured, below_zero, defined, measured


def token_shares(attention: AttentionMap) -> Float[Tensor, "b q"]:
    """The share of each query's attention that the keys of this map get, over layers and heads.

    The rows are as the model used them, so that what went elsewhere is missing from their sum:
    a block, or the rows of `capture.generate` for the keys of the image. NaN where a query may see
    none of the keys, as after the end of a text, or a weight is below 0.
    """
    if attention.kind in (Kind.PROBABILITY, Kind.SIGNED):
        raise ValueError(
            f"rows of {attention.kind.value} weights do not say what went elsewhere: take "
            "attention.block(...), or capture.generate(model, keys=...)"
        )
    weights = attention.weights.double()
    there = attention.rows & ~below_zero(weights).any(dim=2).any(dim=1)
    return torch.where(there, weights.sum(dim=-1).mean(dim=(1, 2)), torch.nan).float()


@measured("image share", "share", higher_is_better=None, low=0.0, high=1.0)
def image_share(attention: AttentionMap) -> Measured:
    """How much of its attention a text gives to the keys of this map, a mean over its tokens."""
    each = token_shares(attention)
    there = ~each.isnan()
    total = torch.where(there, each, 0).double().sum(dim=1)
    return defined(total / there.sum(dim=1).clamp_min(1), there.any(dim=1)).clamp(0, 1)
