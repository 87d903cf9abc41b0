"""The kernels of log-shares as operators of PyTorch, which a compiled graph can hold.

A graph cannot look into a kernel that we launch, and by plain operations it would make what the
kernels avoid: keys of all layers in float32, and their gradients. So it is told what goes in, what
comes out and what the gradient is: that of the rows and keys that took part, which the graph puts
in their places while it adds them to those of attention.
"""

from typing import Any

import torch
from torch import Tensor

from overt.capture import launching


@torch.library.custom_op("overt::log_shares", mutates_args=())
def log_shares(
    queries: list[Tensor],  # (b, h, q, d) each
    keys: list[Tensor],  # (b, g, k, d) each
    rows: Tensor,  # (b, s)
    start: int,
    stop: int,
    scale: float,
    hidden: Tensor | None,  # (b, 1, s or 1, stop - start)
) -> Tensor:
    """Log-shares (l, b, h, s, r) of some rows over the keys from `start` to `stop`, in float32."""
    layers = launching.Layers(
        _alike(queries), _alike(keys), rows, slice(start, stop), scale, hidden
    )
    return layers.log_shares()


def _alike(tensors: list[Tensor]) -> list[Tensor]:
    """Tensors that lie alike, as kernels want them: a graph may lay them out otherwise."""
    strides = {one.stride() for one in tensors}
    if len(strides) == 1 and tensors[0].stride(-1) == 1:
        return tensors
    return [one.contiguous() for one in tensors]


@log_shares.register_fake
def _shape_of_shares(
    queries: list[Tensor],
    keys: list[Tensor],
    rows: Tensor,
    start: int,
    stop: int,
    scale: float,
    hidden: Tensor | None,
) -> Tensor:
    b, h, _, _ = queries[0].shape
    sizes = len(queries), b, h, rows.shape[1], stop - start
    return queries[0].new_empty(sizes, dtype=torch.float32)


@torch.library.custom_op("overt::log_shares_backward", mutates_args=())
def log_shares_backward(
    slopes: Tensor,
    logs: Tensor,
    queries: list[Tensor],
    keys: list[Tensor],
    rows: Tensor,
    start: int,
    stop: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Gradients (l, b, h, s, d) of the rows and (l, b, g, r, d) of the keys that took part.

    Each of several rows at one position has the sum of them all.
    """
    layers = launching.Layers(_alike(queries), _alike(keys), rows, slice(start, stop), scale, None)
    slopes = slopes.float().contiguous()
    of_rows, sums = layers.of_rows(slopes, logs, joined=True)
    of_keys = _room_for_keys(keys, stop - start)
    layers.put_keys((slopes, logs, sums), of_keys, 0)
    return of_rows, of_keys


@log_shares_backward.register_fake
def _shapes_of_gradients(
    slopes: Tensor,
    logs: Tensor,
    queries: list[Tensor],
    keys: list[Tensor],
    rows: Tensor,
    start: int,
    stop: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    b, h, _, d = queries[0].shape
    of_rows = queries[0].new_empty((len(queries), b, h, rows.shape[1], d))
    return of_rows, _room_for_keys(keys, stop - start)


def _room_for_keys(keys: list[Tensor], count: int) -> Tensor:
    b, g, _, d = keys[0].shape
    return keys[0].new_empty((len(keys), b, g, count, d))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    queries, keys, rows, *rest, _ = inputs
    ctx.save_for_backward(*queries, *keys, rows, output)
    ctx.rest = rest


def _backward(ctx: Any, slopes: Tensor) -> tuple[Any, ...]:
    """Whole gradients, by operations that a graph fuses with what it adds them to.

    Rows are not scattered but looked up, a position at a time: that is no pass over memory more.
    """
    *tensors, rows, logs = ctx.saved_tensors
    half, (start, stop, _) = len(tensors) // 2, ctx.rest
    queries, keys = tensors[:half], tensors[half:]
    of_rows, of_keys = log_shares_backward(slopes, logs, queries, keys, rows, *ctx.rest)
    _, h, n, d = queries[0].shape
    positions = torch.arange(n, device=rows.device)
    match = rows.clamp_min(0)[:, None] == positions[:, None]
    there = match.any(dim=-1)[:, None, :, None]
    row = match.to(torch.uint8).argmax(dim=-1)[:, None, :, None].expand(-1, h, n, d)
    whole = [torch.where(there, one.gather(2, row), 0) for one in of_rows.unbind()]
    ends = 0, 0, start, keys[0].shape[2] - stop
    padded = [torch.nn.functional.pad(one, ends) for one in of_keys.unbind()]
    return whole, padded, None, None, None, None, None


log_shares.register_autograd(_backward, setup_context=_keep)
