"""Attention of one layer, and helpers shared by the other attribution methods."""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Concatenate, ParamSpec

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from overt.attention import AttentionMap, Kind, Layout
from overt.capture.block_scores import ALL, Index, no_autocast
from overt.capture.call import Call, QKCall
from overt.capture.trace import AttentionTrace, Where, resolve_positions, visible_in_any

HeadFusion = Callable[
    ..., Tensor
]  # (weights, dim=, keepdim=True) -> weights: torch.mean, torch.amax
Rest = ParamSpec("Rest")


def without_autocast(
    make: Callable[Concatenate[AttentionTrace, Rest], AttentionMap],
) -> Callable[Concatenate[AttentionTrace, Rest], AttentionMap]:
    """Run a function outside autocast, so that products keep the precision of their inputs."""

    @wraps(make)
    def exact(trace: AttentionTrace, *args: Rest.args, **kwargs: Rest.kwargs) -> AttentionMap:
        device = device_of(trace.calls[0]) if trace.calls else torch.device("cpu")
        with no_autocast(device):
            return make(trace, *args, **kwargs)

    return exact


def layer_attention(
    trace: AttentionTrace,
    layer: int | str = -1,
    rows: Where | None = None,
    fuse: HeadFusion = torch.mean,
) -> AttentionMap:
    """Return the weights of one layer with its heads fused.

    Use `trace.map(layer)` for the separate heads.

    Args:
        trace: A trace of `overt.watch`.
        layer: The index or the module name of the layer.
        rows: The name of a span or positions per sample; None returns all queries.
        fuse: Fuses heads, called as `fuse(weights, dim=, keepdim=True)`.

    Returns:
        A map with one layer and one head. The mean of probabilities is a probability; any other
        fusion gives amounts.

    Raises:
        ValueError: A row is out of range, or `rows` has another batch size.

    Example:
        >>> from torch import nn
        >>> from overt import watch
        >>> module = nn.MultiheadAttention(8, 2, batch_first=True)
        >>> x = torch.randn(1, 5, 8)
        >>> with watch(module) as trace:
        ...     _ = module(x, x, x)
        >>> layer_attention(trace).shape
        (1, 1, 1, 5, 5)
    """
    single = AttentionTrace([trace.call(layer)], trace.layout)
    if rows is None:
        return single.map(0).over_heads(fuse)
    at, queries, keys = resolve_rows(single, rows)
    call = single.calls[0]
    values = call.weights(at)
    mask = call.visible(at)
    if isinstance(at, Tensor):
        present = (at >= 0).to(values.device)
        values = values * present[:, None, :, None]
        mask = hide_missing_rows(mask, present, len(keys))
    return AttentionMap(values[:, None], keys, queries, mask, call.kind).over_heads(fuse)


def resolve_rows(trace: AttentionTrace, rows: Where | None) -> tuple[Index, Layout, Layout]:
    """Return the positions of the rows, their layout, and the layout of the keys."""
    queries, keys = trace.layouts(trace.calls)
    if rows is None:
        return ALL, queries, keys
    at, queries = resolve_positions(queries, rows)
    if isinstance(at, Tensor) and len(at) != trace.calls[0].shape[0]:
        raise ValueError(f"rows has {len(at)} samples, the trace has {trace.calls[0].shape[0]}")
    if isinstance(at, Tensor):
        _check_range(at, trace.calls[0].shape[2])
    return at, queries, keys


def _check_range(at: Tensor, count: int) -> None:
    """Raise for positions out of range; on a GPU asynchronously, without synchronizing."""
    if at.device.type == "cpu" and not torch.compiler.is_compiling():
        if bool((at >= count).any()):
            raise ValueError(f"row {int(at.max())} is out of range for {count} queries")
    else:
        torch._assert_async((at < count).all(), f"a row is out of range for {count} queries")


def check_self_attention(trace: AttentionTrace, method: str) -> None:
    """Raise unless all calls are self-attention of one forward pass with non-negative weights."""
    trace.check_stackable()
    passes = len({call.step for call in trace.calls})
    if passes > 1:
        raise ValueError(
            f"{method} needs one forward pass, and the trace has {passes}; choose one with at(step)"
        )
    for call in trace.calls:
        _, _, q, k = call.shape
        if call.cross or q != k:
            raise ValueError(
                f"{method} needs self-attention of whole sequences, and {call.name or 'the model'} "
                f"has {'cross-attention with ' if call.cross else ''}{q} queries and {k} keys; "
                "choose calls with where(...)"
            )
        if call.kind is Kind.SIGNED:
            raise ValueError(
                f"{method} needs non-negative weights, and those of {call.name} were mixed after "
                "their softmax"
            )


def union_mask(trace: AttentionTrace, rows: Index = ALL) -> Bool[Tensor, "b #s k"] | None:
    """Return which keys each query may attend to in any layer; None if all are visible."""
    return visible_in_any(trace.calls, rows, ALL)


def hide_missing_rows(
    mask: Bool[Tensor, "b #s k"] | None, present: Bool[Tensor, "b s"], k: int
) -> Bool[Tensor, "b s k"] | None:
    """Mask the rows that a sample does not have; on a GPU without synchronizing."""
    if mask is None and present.is_cpu and bool(present.all()):
        return None
    b, s = present.shape
    shown = present[..., None].expand(b, s, k)
    return shown if mask is None else shown & mask.to(shown.device)


def row_positions(at: Index, b: int, length: int, device: torch.device) -> Int[Tensor, "b s"]:
    """Return positions as one row per sample, also if they are the same for all samples."""
    if isinstance(at, Tensor):
        return at.to(device)
    return torch.arange(length, device=device)[at].expand(b, -1)


def one_hot_rows(
    rows: Int[Tensor, "b s"], length: int, dtype: torch.dtype
) -> Float[Tensor, "b s k"]:
    """Return rows with all weight on their own position; zeros for rows that a sample lacks."""
    # `one_hot` takes no negative index: row 0 instead, then zero.
    own = torch.nn.functional.one_hot(rows.clamp_min(0), length)
    return (own * (rows >= 0)[..., None]).to(dtype)


def row_chunks(count: int, size: int) -> Iterator[slice]:
    """Yield slices that split `count` rows into about equal chunks of at most `size`."""
    chunks = -(-count // size)
    for number in range(chunks):
        yield slice(count * number // chunks, count * (number + 1) // chunks)


def default_chunk(call: Call) -> int:
    """Return how many rows of a call to compute at a time: some megabytes, more on a GPU."""
    b, h, _, k = call.shape
    return max(8, (1 << (20 if device_of(call).type == "cpu" else 26)) // (b * h * k))


def device_of(call: Call) -> torch.device:
    """Return the device of a call."""
    return _tensor(call).device


def compute_dtype(call: Call) -> torch.dtype:
    """Return the dtype for computations on a call: float32 or more."""
    return torch.promote_types(_tensor(call).dtype, torch.float32)


def _tensor(call: Call) -> Tensor:
    return call.source.query if isinstance(call.source, QKCall) else call.source.used
