"""The kernels of log-shares as operators of PyTorch, which a compiled graph can hold.

A graph cannot look into a kernel that we launch, and by plain operations it would make what the
kernels avoid: keys of all layers in float32, and their gradients. So it is told what goes in, what
comes out and what the gradient is. Whole gradients of queries and keys go back into the graph,
zeros but for the rows and keys that took part; the graph adds them to those of attention.
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
    return launching.Layers(queries, keys, rows, slice(start, stop), scale, hidden).log_shares()


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
) -> list[Tensor]:
    """The gradients of all queries, and after them of all keys, from that of the log-shares."""
    layers = launching.Layers(queries, keys, rows, slice(start, stop), scale, None)
    slopes = slopes.float().contiguous()
    parts, sums = layers.of_rows(slopes, logs)
    of_queries = [torch.zeros_like(one) for one in queries]
    of_keys = [torch.zeros_like(one) for one in keys]
    at = rows.clamp_min(0)[:, None, :, None].expand(parts.shape[1:])
    for layer, (query, key) in enumerate(zip(of_queries, of_keys, strict=True)):
        query.scatter_add_(2, at, parts[layer])
        layers.add_to_keys(layer, slopes[layer], logs[layer], sums[layer], key)
    return of_queries + of_keys


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
) -> list[Tensor]:
    return [torch.empty_like(one) for one in (*queries, *keys)]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    queries, keys, rows, *rest, _ = inputs
    ctx.save_for_backward(*queries, *keys, rows, output)
    ctx.rest = rest


def _backward(ctx: Any, slopes: Tensor) -> tuple[Any, ...]:
    *tensors, rows, logs = ctx.saved_tensors
    half = len(tensors) // 2
    made = log_shares_backward(slopes, logs, tensors[:half], tensors[half:], rows, *ctx.rest)
    return made[:half], made[half:], None, None, None, None, None


log_shares.register_autograd(_backward, setup_context=_keep)
