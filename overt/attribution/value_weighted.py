"""Attention weighted by the norm of the values, and value zeroing.

Kobayashi, Kuribayashi, Yokoi and Inui, "Attention is Not Only a Weight: Analyzing Transformers with
Vector Norms", EMNLP 2020, https://arxiv.org/abs/2004.10102. Mohebbi, Zuidema, Chrupała and
Alishahi, "Quantifying Context Mixing in Transformers", EACL 2023, https://arxiv.org/abs/2301.12971.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from overt.attention import AttentionMap, Kind, Layout
from overt.attribution.raw_attention import (
    hide_missing_rows,
    resolve_rows,
    union_mask,
    without_autocast,
)
from overt.capture.block_scores import Index
from overt.capture.call import Call
from overt.capture.session import watch
from overt.capture.stacked_calls import stack_layers
from overt.capture.trace import AttentionTrace, Where, unnamed_layout

Project = Callable[[Call], Float[Tensor, "o i"] | None]
Distance = Callable[[Float[Tensor, "b n d"], Float[Tensor, "b n d"]], Float[Tensor, "b n"]]

_PROJECTION_NAMES = (
    "out_proj",
    "o_proj",
    "c_proj",
    "out_lin",
    "proj",
    "to_out",
    "wo",
    "o",
    "dense",
    "output",
)


# --- value norms


def output_projection(call: Call) -> Float[Tensor, "o i"] | None:
    """Return the weight of the output projection in the attention module of a call.

    Args:
        call: A captured call.

    Returns:
        The matrix, or None if the module has no such layer.
    """
    return _linear(call.module, _width(call))


def find_output_projection(model: nn.Module) -> Project:
    """Return a function that finds the output projection in or next to the attention module.

    Some models, such as BERT, have the projection in a sibling module.

    Args:
        model: The model that contains the modules of the calls.

    Returns:
        A function for the `project` argument of `value_norms`.
    """

    def find(call: Call) -> Float[Tensor, "o i"] | None:
        found = output_projection(call)
        if found is not None or not call.name:
            return found
        # BERT: `attention.self` attends, `attention.output.dense` projects.
        parent = model.get_submodule(call.name.rpartition(".")[0])
        siblings = [child for name, child in parent.named_children() if name in _PROJECTION_NAMES]
        for module in (parent, *siblings):
            found = _linear(module, _width(call))
            if found is not None:
                return found
        return None

    return find


@without_autocast
def value_norms(
    trace: AttentionTrace, rows: Where | None = None, project: Project = output_projection
) -> AttentionMap:
    """Compute the norm of the vector that each key contributes to each query, per head.

    That is the attention weight times the norm of the value after the output projection (Kobayashi
    et al. 2020). Without a projection the norm of the value alone is used, with a warning.

    Args:
        trace: A trace of `overt.watch`.
        rows: The name of a span or positions per sample; None computes all queries.
        project: Returns the output projection of a call: `output_projection` looks in the attention
            module, `find_output_projection(model)` also next to it.

    Returns:
        A map of amounts for all layers and heads.

    Raises:
        ValueError: A call has no values for its heads.

    Example:
        >>> from torch import nn
        >>> from overt import watch
        >>> layer = nn.MultiheadAttention(8, 2, batch_first=True)
        >>> x = torch.randn(1, 5, 8)
        >>> with watch(layer) as trace:
        ...     out, _ = layer(x, x, x, need_weights=False)
        >>> value_norms(trace).shape
        (1, 1, 2, 5, 5)
    """
    at, queries, keys = resolve_rows(trace, rows)
    values = []
    for call, contribution in zip(trace.calls, _projected_values(trace, project), strict=True):
        values.append(call.weights(at) * contribution.norm(dim=-1).transpose(1, 2)[:, :, None])
    return _to_map(trace, stack_layers(values), at, queries, keys)


@without_autocast
def summed_value_norms(
    trace: AttentionTrace, rows: Where | None = None, project: Project = output_projection
) -> AttentionMap:
    """Compute the norm of the vector that each key contributes to each query, summed over heads.

    Heads may cancel each other, so this is not the sum of `value_norms`. The vectors of all pairs
    of
    positions are never stored: their norms follow from the products of the heads' contributions of
    each key.

    Args:
        trace: A trace of `overt.watch`.
        rows: The name of a span or positions per sample; None computes all queries.
        project: Returns the output projection of a call.

    Returns:
        A map of amounts for all layers, with one head.

    Raises:
        ValueError: A layer has no output projection, or a call has no values for its heads.

    Example:
        >>> from torch import nn
        >>> from overt import watch
        >>> layer = nn.MultiheadAttention(8, 2, batch_first=True)
        >>> x = torch.randn(1, 5, 8)
        >>> with watch(layer) as trace:
        ...     out, _ = layer(x, x, x, need_weights=False)
        >>> summed_value_norms(trace).shape  # heads are summed before the norm
        (1, 1, 1, 5, 5)
    """
    at, queries, keys = resolve_rows(trace, rows)
    values = []
    for call, contribution in zip(
        trace.calls, _projected_values(trace, project, required=True), strict=True
    ):
        weights = call.weights(at)
        # |sum_h w_h c_h|^2 = sum_hj w_h w_j (c_h . c_j), for the contributions c of the heads of a
        # key.
        products = contribution @ contribution.mT  # b k h h
        squares = torch.einsum("bhqk,bkhj,bjqk->bqk", weights, products, weights)
        positive = squares > 0  # the gradient of the root is infinite at zero
        values.append(torch.where(positive, torch.where(positive, squares, 1).sqrt(), 0)[:, None])
    return _to_map(trace, stack_layers(values), at, queries, keys)


def _projected_values(
    trace: AttentionTrace, project: Project, required: bool = False
) -> list[Float[Tensor, "b k h o"]]:
    """Return the contribution of each head to the output if a key had all of its weight."""
    trace.check_stackable()
    found, without = [], []
    for call in trace.calls:
        value, matrix = _value(call), project(call)
        h = call.shape[1]
        # Keys first, heads second: (b, k, h, d).
        value = value.repeat_interleave(h // value.shape[1], dim=1).transpose(1, 2)
        value = value.to(torch.promote_types(value.dtype, torch.float32))
        if matrix is None:
            without.append(call.name)
            found.append(value)
            continue
        if matrix.shape[1] != h * value.shape[-1]:
            raise ValueError(
                f"the output projection of {call.name or 'the model'} has the shape "
                f"{tuple(matrix.shape)}, expected {h * value.shape[-1]} inputs: {h} heads of "
                f"{value.shape[-1]} features"
            )
        # The inputs of the projection are the heads one after the other.
        heads = matrix.to(value.dtype).unflatten(1, (h, -1))
        found.append(torch.einsum("bkhd,ohd->bkho", value, heads))
    if without:
        message = (
            f"no output projection in {without[0]!r}; use project=find_output_projection(model)"
        )
        if required:
            raise ValueError(f"{message}: heads cannot be summed without it")
        warnings.warn(f"{message}. The norms are those of the values alone.", stacklevel=3)
    return found


def _value(call: Call) -> Float[Tensor, "b g k d"]:
    b, h, q, k = call.shape
    value = call.value
    if value is None or value.shape[-2] != k or value.numel() % (b * k * value.shape[-1]):
        raise ValueError(f"{call.name or 'the model'} has no values of its keys")
    value = value.reshape(b, -1, k, value.shape[-1])
    # Values of other heads than the weights would multiply wrong pairs.
    whole = call.output is None or call.output.numel() == b * h * q * value.shape[-1]
    if h % value.shape[1] or not whole or call.head_indices is not None:
        raise ValueError(
            f"{call.name or 'the model'} has values of other heads than its weights; select heads "
            "of the resulting map, not of the trace"
        )
    return value


def _width(call: Call) -> int:
    value = call.value
    return 0 if value is None else call.shape[1] * value.shape[-1]


def _linear(module: nn.Module, width: int) -> Float[Tensor, "o i"] | None:
    """Return the weight (out, in) of a linear layer with a usual name that takes all heads."""
    children = dict(module.named_children())
    for name in _PROJECTION_NAMES:
        child = children.get(name)
        if isinstance(child, nn.Sequential) and len(child):
            child = child[0]
        weight = getattr(child, "weight", None)
        if not isinstance(weight, Tensor) or weight.ndim != 2:
            continue
        if (
            type(child).__name__ == "Conv1D"
        ):  # the linear layer of GPT-2 stores its weight transposed
            weight = weight.mT
        if weight.shape[1] == width:
            return weight
    return None


def _to_map(
    trace: AttentionTrace, values: Tensor, at: Index, queries: Layout, keys: Layout
) -> AttentionMap:
    mask = union_mask(trace, at)
    if isinstance(at, Tensor):
        there = (at >= 0).to(values.device)
        values = values * there[:, None, None, :, None]
        mask = hide_missing_rows(mask, there, len(keys))
    signed = any(call.kind is Kind.SIGNED for call in trace.calls)
    return AttentionMap(values, keys, queries, mask, Kind.SIGNED if signed else Kind.AMOUNT)


# --- value zeroing


def cosine_distance(
    one: Float[Tensor, "b n d"], other: Float[Tensor, "b n d"]
) -> Float[Tensor, "b n"]:
    """Compute one minus the cosine similarity, clamped at zero.

    Args:
        one: Vectors.
        other: Vectors of the same shape.

    Returns:
        The distances.
    """
    return (1 - torch.nn.functional.cosine_similarity(one, other, dim=-1)).clamp_min(0)


def value_zeroing(
    run: Callable[[], Any],
    block: nn.Module,
    distance: Distance = cosine_distance,
    layout: Layout | None = None,
) -> AttentionMap:
    """Compute how much each position of a layer changes without the value of each position.

    Mohebbi et al. 2023. The block is run again on its own input, once per position, with the value
    of that position set to zero in every head of its self-attention. The paper divides each row by
    its sum: use `.normalize()`. With gradients every run is kept; use `torch.no_grad()` for
    inference.

    Args:
        run: Calls the model.
        block: The layer: attention and everything up to its output.
        distance: Compares outputs; the cosine distance by default.
        layout: The layout of the positions.

    Returns:
        A map of amounts with one layer and one head.

    Raises:
        ValueError: The block is not deterministic, has a cache, or does not run self-attention
            once.

    Example:
        >>> from torch import nn
        >>> block = nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
        >>> x = torch.randn(1, 5, 8)
        >>> value_zeroing(lambda: block(x), block).shape
        (1, 1, 1, 5, 5)
    """
    args, kwargs, before = _capture_block(run, block)
    if kwargs.get("past_key_values") is not None:  # running the block again would extend it
        raise ValueError(
            "a layer with a cache cannot be run twice; call the model with use_cache=False"
        )
    with watch(block) as trace:
        again = _output(block(*args, **kwargs))
    if again.shape != before.shape or not torch.allclose(again, before, rtol=1e-4, atol=1e-5):
        raise ValueError(
            f"{type(block).__name__} is not deterministic; use model.eval(), and run it without a "
            "cache"
        )
    # The name of the call, so that cross-attention in the block is left unchanged.
    call = _self_attention_call(trace)
    n = call.shape[3]
    edit = ZeroValue(call.name)
    changes = []
    # calls are not kept; the reference output is computed by the same operations as the others
    with watch(block, edit=edit, each=lambda call: None):
        whole = _output(block(*args, **kwargs))
        # The loop variable is the position that the edit reads.
        for edit.position in range(n):
            changes.append(distance(whole, _output(block(*args, **kwargs))))
    values = torch.stack(changes, dim=-1)
    mask = call.visible()
    # The change of a query by a key that it cannot see is indirect, or rounding.
    if mask is not None:
        values = values * mask
    layout = layout or unnamed_layout(n)
    return AttentionMap(values[:, None, None], layout, layout, mask, Kind.AMOUNT)


class ZeroValue:
    """An edit that sets the value of one position to zero in the module called `name`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.position: int | None = None

    def __call__(self, call: Call, weights: Float[Tensor, "b h q k"]) -> Float[Tensor, "b h q k"]:
        """Return the weights with zero on that position, which equals a value of zero."""
        if self.position is None or call.name != self.name:
            return weights
        kept = torch.ones_like(weights[0, 0, 0])
        kept[self.position] = 0
        return weights * kept


def _capture_block(run: Callable[[], Any], block: nn.Module) -> tuple[Any, Any, Tensor]:
    """Return the arguments and the output of a block during `run`."""
    found: list[tuple[Any, Any, Tensor]] = []

    def record(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        found.append((args, kwargs, _output(output)))

    handle = block.register_forward_hook(record, with_kwargs=True)
    try:
        run()
    finally:
        handle.remove()
    if len(found) != 1:
        raise ValueError(
            f"the block {type(block).__name__} ran {len(found)} times; `run` must call the model "
            "that contains it once"
        )
    return found[0]


def _output(given: Any) -> Float[Tensor, "b n d"]:
    """Return the features of a block: its output, or the first of several."""
    first = given[0] if isinstance(given, (tuple, list)) else given
    if not isinstance(first, Tensor) or first.ndim != 3:
        raise ValueError(
            "the output of the block must be features (b, n, d); choose a layer of the model"
        )
    return first


def _self_attention_call(trace: AttentionTrace) -> Call:
    """Return the one self-attention call of a block."""
    found = [call for call in trace.calls if not call.cross and call.shape[2] == call.shape[3]]
    if len(found) != 1:
        raise ValueError(
            f"the block has {len(found)} self-attention calls; choose a block that has one"
        )
    return found[0]
