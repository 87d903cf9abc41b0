"""Bring attention tensors with any leading axes to (b, h, n, m)."""

from torch import Tensor, nn


def to_bhnm(tensor: Tensor, num_heads: int) -> Tensor:
    """Return the tensor as (b, h, n, m), splitting heads off the batch and windows into it.

    With three axes there is one head, or heads are folded into the batch if `num_heads` divides
    it. With five, the fifth axis is windows, before the heads or behind them.

    Args:
        tensor: Weights, queries, keys or values, (..., n, m).
        num_heads: Number of heads of the module, 1 if it does not say.
    """
    if tensor.ndim == 4:
        return tensor
    if tensor.ndim == 3:
        folded = num_heads > 1 and len(tensor) % num_heads == 0
        return tensor.unflatten(0, (-1, num_heads)) if folded else tensor.unsqueeze(1)
    if tensor.ndim < 3:
        raise ValueError(
            f"expected attention with a batch axis, (b, n, m) or more, got {tuple(tensor.shape)}"
        )
    if num_heads > 1 and tensor.shape[1] == num_heads != tensor.shape[-3]:
        tensor = tensor.movedim(1, -3)
    return tensor.flatten(0, -4)


_HEAD_COUNTS = (
    "num_heads",
    "num_attention_heads",
    "n_heads",
    "n_head",
    "nhead",
    "head_num",
    "heads",
)


def num_heads_of(module: nn.Module) -> int:
    """Return the number of heads that a module declares as an attribute, 1 if it declares none."""
    for name in _HEAD_COUNTS:
        count = getattr(module, name, None)
        if isinstance(count, int):
            return count
    return 1
