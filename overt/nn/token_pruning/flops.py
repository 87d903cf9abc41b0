"""FLOPs of a Transformer encoder, given the number of tokens in each layer."""

from collections.abc import Iterable


def layer_flops(tokens: int, width: int, inner: int) -> int:
    """Count the FLOPs of one layer for one sample; a multiply-add counts as two.

    Four projections of `width` by `width`, queries with keys, weights with values, and an MLP with
    `inner` units. Norms, softmax and activations are not counted, as in PyTorch's FLOP counter.
    """
    # multiply-adds of each part; the factor of two comes at the end
    projections = 4 * tokens * width * width
    attention = 2 * tokens * tokens * width
    mlp = 2 * tokens * width * inner
    return 2 * (projections + attention + mlp)


def encoder_flops(lengths: Iterable[int], width: int, inner: int) -> int:
    """Count the FLOPs of all layers from `PrunedModel.lengths`, padding included.

    Args:
        lengths: The number of tokens of each layer.
        width: The features per token.
        inner: The units of each MLP.

    Returns:
        The FLOPs of one sample; a multiply-add counts as two.

    Example:
        >>> round(encoder_flops([197] * 12, width=768, inner=3072) / 1e9, 1)  # ViT-B/16
        34.9
    """
    return sum(layer_flops(tokens, width, inner) for tokens in lengths)


def matching_flops(tokens: int, features: int) -> int:
    """Count the FLOPs of matching tokens to merge: half of the tokens against the other half."""
    # -(-n // 2) rounds up: with an odd number of tokens there is one more source than targets
    return 2 * -(-tokens // 2) * (tokens // 2) * features
