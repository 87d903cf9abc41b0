"""What the layers of a Transformer encoder compute, by the number of tokens each is given."""

from collections.abc import Iterable


def layer_flops(tokens: int, width: int, inner: int) -> int:
    """Floating-point operations of one layer for one sample: a multiplication and an addition each.

    Four projections of `width` by `width`, queries with keys and weights with values, and an MLP of
    `inner` units. Norms, softmax and activations are not counted, as PyTorch does not count them.
    """
    projections = 4 * tokens * width * width
    attention = 2 * tokens * tokens * width
    mlp = 2 * tokens * width * inner
    return 2 * (projections + attention + mlp)


def encoder_flops(lengths: Iterable[int], width: int, inner: int) -> int:
    """The same for all layers, given `Thinned.lengths`: what was computed, padding included."""
    return sum(layer_flops(tokens, width, inner) for tokens in lengths)


def matching_flops(tokens: int, features: int) -> int:
    """Those of finding pairs to merge: half of the tokens compared with the other half."""
    return 2 * -(-tokens // 2) * (tokens // 2) * features
