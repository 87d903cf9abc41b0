"""Four axes, (b, h, n, m), whatever stands in front of the last two."""

from torch import Tensor, nn


def four(tensor: Tensor, heads: int) -> Tensor:
    """(b, h, n, m): heads folded into the batch are told apart, windows are samples.

    `heads` is how many the module says it has, 1 if it says nothing. Three axes are one head, or
    heads folded into the batch when their number divides it. Five are windows, before the heads or
    behind them.
    """
    if tensor.ndim == 4:
        return tensor
    if tensor.ndim == 3:
        folded = heads > 1 and len(tensor) % heads == 0
        return tensor.unflatten(0, (-1, heads)) if folded else tensor.unsqueeze(1)
    if tensor.ndim < 3:
        raise ValueError(f"attention of shape {tuple(tensor.shape)} has no axis of samples")
    if heads > 1 and tensor.shape[1] == heads != tensor.shape[-3]:
        tensor = tensor.movedim(1, -3)
    return tensor.flatten(0, -4)


_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "head_num", "heads")


def heads_of(module: nn.Module) -> int:
    """How many heads a module says it has; 1 if it says nothing."""
    for name in _HEADS:
        count = getattr(module, name, None)
        if isinstance(count, int):
            return count
    return 1
