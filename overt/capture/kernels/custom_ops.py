"""Custom operators for the log-softmax kernels, for use under `torch.compile`.

The compiler cannot trace into a kernel launch, and with plain operations it would materialize what
the kernels avoid: float32 keys of all layers and their gradients. The operators declare output
shapes and gradients of the selected rows and keys; the graph adds these into the gradients of
attention.
"""

from typing import Any

import torch
from torch import Tensor

from overt.capture.kernels import triton_launch


# The schemas are written down: PyTorch 2.6 cannot infer that of `list[Tensor]`.
@torch.library.custom_op(
    "overt::block_log_softmax",
    mutates_args=(),
    schema="(Tensor[] queries, Tensor[] keys, Tensor rows, SymInt start, SymInt stop, "
    "float scale, Tensor? hidden) -> Tensor",
)
def block_log_softmax(
    queries: list[Tensor],  # (b, h, q, d) each
    keys: list[Tensor],  # (b, g, k, d) each
    rows: Tensor,  # (b, s)
    start: int,
    stop: int,
    scale: float,
    hidden: Tensor | None,  # (b, 1, s or 1, stop - start)
) -> Tensor:
    """Compute the log-softmax (l, b, h, s, r) of rows over keys `start` to `stop`, in float32."""
    layers = triton_launch.BlockLauncher(
        _same_strides(queries), _same_strides(keys), rows, slice(start, stop), scale, hidden
    )
    return layers.log_softmax()


def _same_strides(tensors: list[Tensor]) -> list[Tensor]:
    """Return tensors of equal strides, which the kernels need and a graph does not guarantee."""
    strides = {one.stride() for one in tensors}
    if len(strides) == 1 and tensors[0].stride(-1) == 1:
        return tensors
    return [one.contiguous() for one in tensors]


@block_log_softmax.register_fake
def _fake_forward(
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


@torch.library.custom_op(
    "overt::block_log_softmax_backward",
    mutates_args=(),
    schema="(Tensor slopes, Tensor logs, Tensor[] queries, Tensor[] keys, Tensor rows, "
    "SymInt start, SymInt stop, float scale) -> (Tensor, Tensor)",
)
def block_log_softmax_backward(
    slopes: Tensor,
    logs: Tensor,
    queries: list[Tensor],
    keys: list[Tensor],
    rows: Tensor,
    start: int,
    stop: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Compute the gradients (l, b, h, s, d) of the rows and (l, b, g, r, d) of the keys.

    Rows that share a position each hold the sum of their gradients.
    """
    layers = triton_launch.BlockLauncher(
        _same_strides(queries), _same_strides(keys), rows, slice(start, stop), scale, None
    )
    slopes = slopes.float().contiguous()
    of_rows, sums = layers.row_gradient(slopes, logs, once=False)
    of_keys = _empty_key_gradients(keys, stop - start)
    layers.write_key_gradient((slopes, logs, sums), of_keys, 0)
    return of_rows, of_keys


@block_log_softmax_backward.register_fake
def _fake_backward(
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
    return of_rows, _empty_key_gradients(keys, stop - start)


def _empty_key_gradients(keys: list[Tensor], count: int) -> Tensor:
    b, g, _, d = keys[0].shape
    return keys[0].new_empty((len(keys), b, g, count, d))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    # Not the mask: hidden columns are -inf in the saved output.
    queries, keys, rows, *rest, _ = inputs
    ctx.save_for_backward(*queries, *keys, rows, output)
    ctx.rest = rest


def _backward(ctx: Any, slopes: Tensor) -> tuple[Any, ...]:
    """Whole gradients, by operations that the compiler can fuse with the addition that follows.

    Each position looks up its row instead of scattering rows, so no extra pass over memory.
    """
    *tensors, rows, logs = ctx.saved_tensors
    half, (start, stop, _) = len(tensors) // 2, ctx.rest
    queries, keys = tensors[:half], tensors[half:]
    of_rows, of_keys = block_log_softmax_backward(slopes, logs, queries, keys, rows, *ctx.rest)
    _, h, n, d = queries[0].shape
    # `argmax` finds the first row at a position; with `once=False` every such row holds the sum.
    positions = torch.arange(n, device=rows.device)
    match = rows.clamp_min(0)[:, None] == positions[:, None]
    there = match.any(dim=-1)[:, None, :, None]
    row = match.to(torch.uint8).argmax(dim=-1)[:, None, :, None].expand(-1, h, n, d)
    whole = [torch.where(there, one.gather(2, row), 0) for one in of_rows.unbind()]
    # `pad` counts from the last axis: nothing for the features, then before and after the keys.
    ends = 0, 0, start, keys[0].shape[2] - stop
    padded = [torch.nn.functional.pad(one, ends) for one in of_keys.unbind()]
    return whole, padded, None, None, None, None, None


block_log_softmax.register_autograd(_backward, setup_context=_save)
