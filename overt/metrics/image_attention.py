"""Share of attention on the image, per generated token.

    image = layout.find("image")
    written = capture.generate(model, keys=image, **inputs)
    image_share_per_token(written.attention)      # (samples, new tokens)

A model that answers from the text alone gives the image little attention. A large share may still
go to a sink in the image. Liu, Zheng and Chen, "Paying More Attention to Image", ECCV 2024,
https://arxiv.org/abs/2407.21771, on how the share falls as a text grows.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from overt.attention import AttentionMap, Kind
from overt.metrics.metric import SampleScores, declare_metric, invalid_distribution, mask_undefined


def image_share_per_token(attention: AttentionMap) -> Float[Tensor, "b q"]:
    """Compute the share of each query's attention on the keys of this map, over layers and heads.

    Rows must be as the model used them, not renormalized: a block of a map, or the rows of
    `capture.generate` for the keys of the image.

    Args:
        attention: Rows over the keys of the image, one query per token.

    Returns:
        One share per sample and token; NaN where a query sees none of the keys, as after the end of
        a text, or where a weight is negative or not finite.

    Raises:
        ValueError: The rows are normalized or signed.

    Example:
        >>> rows = AttentionMap.from_weights(
        ...     torch.tensor([[[0.2, 0.3], [0.1, 0.0]]]), axes="b q k", kind=Kind.SUBPROBABILITY
        ... )
        >>> image_share_per_token(rows)
        tensor([[0.5000, 0.1000]])
    """
    if attention.kind in (Kind.PROBABILITY, Kind.SIGNED):
        raise ValueError(
            f"expected rows with their mass elsewhere missing, got {attention.kind.value} weights: "
            "take attention.block(...), or capture.generate(model, keys=...)"
        )
    weights = attention.weights.double()
    # a row counts only if it is valid in every layer and head
    there = attention.rows & ~invalid_distribution(weights).any(dim=2).any(dim=1)
    return torch.where(there, weights.sum(dim=-1).mean(dim=(1, 2)), torch.nan).float()


@declare_metric("image share", "share", higher_is_better=None, low=0.0, high=1.0)
def image_share(attention: AttentionMap) -> SampleScores:
    """Compute the share of a text's attention on the keys of this map, averaged over its tokens.

    Args:
        attention: As for `image_share_per_token`.

    Returns:
        One share per sample.
    """
    each = image_share_per_token(attention)
    there = ~each.isnan()
    total = torch.where(there, each, 0).double().sum(dim=1)
    return mask_undefined(total / there.sum(dim=1).clamp_min(1), there.any(dim=1)).clamp(0, 1)
