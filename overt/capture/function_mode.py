"""`TorchFunctionMode` that captures SDPA, MultiheadAttention, FlexAttention and eager attention.

While a session is open, each call of an overridable PyTorch function is intercepted here. Fused
kernels are called unchanged and their inputs recorded; eager attention is recognized by its softmax
and the product with the values. No extra computation takes place, unless an edit needs the weights.
"""

import sys
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from overt.capture import (
    _torch_compat,
    axis_provenance,
    axis_roles,
    eager_attention,
    masks,
    validation,
)
from overt.capture.axis_provenance import axes_of
from overt.capture.axis_roles import LeadingAxes
from overt.capture.block_scores import GradTap, tap_gradients
from overt.capture.call import QKCall, Route, default_scale
from overt.capture.edits import attend_with_edits, edits_of
from overt.capture.hooks import raise_if_nested
from overt.capture.records import CallRecord, record_call
from overt.capture.state import FLEX, STATE

_FLEX = torch.ops.higher_order.flex_attention

# Operators as called by exported graphs, and the equivalent functions.
_ATEN = torch.ops.aten
_ATEN_FUNCTIONS: dict[Any, Any] = {
    _ATEN.scaled_dot_product_attention: F.scaled_dot_product_attention,
    _ATEN.scaled_dot_product_attention.default: F.scaled_dot_product_attention,
    _ATEN.softmax: torch.softmax,
    _ATEN.softmax.int: torch.softmax,
    _ATEN.matmul: torch.matmul,
    _ATEN.matmul.default: torch.matmul,
    _ATEN.bmm: torch.bmm,
    _ATEN.bmm.default: torch.bmm,
    _ATEN.baddbmm: torch.baddbmm,
    _ATEN.baddbmm.default: torch.baddbmm,
    _ATEN.einsum: torch.einsum,
    _ATEN.einsum.default: torch.einsum,
    _ATEN.dropout: torch.dropout,
    _ATEN.dropout.default: torch.dropout,
}
# Operators that only move or copy numbers.
_ATEN_FUNCTIONS |= {
    getattr(_ATEN, name).default: getattr(Tensor, to)
    for name, to in (
        ("view", "view"),
        ("reshape", "reshape"),
        ("_unsafe_view", "view"),
        ("clone", "clone"),
        ("contiguous", "contiguous"),
    )
}
_CAPTURED = (
    axis_provenance.TRACKED_FUNCTIONS
    | eager_attention.FUNCTIONS
    | {
        F.scaled_dot_product_attention,
        F.multi_head_attention_forward,
        _FLEX,
        *_ATEN_FUNCTIONS,
    }
)


# Without functions that are tracked only for the axes of eager attention.
_CAPTURED_FUSED = _CAPTURED - (
    (axis_provenance.TRACKED_FUNCTIONS | eager_attention.FUNCTIONS)
    - eager_attention.SOFTMAX_FUNCTIONS
)


class AttentionFunctionMode(TorchFunctionMode):
    """Captures functions that compute attention, and calls all others unchanged."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Return the result of `func`, and record it if it is attention of a watched module."""
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return _capture_while_compiling(self, func, args, kwargs)
        # Before the early returns below: any write may change weights that are being traced.
        if STATE.traces and torch.is_inference_mode_enabled():
            eager_attention.count_writes(func, args, kwargs)
        if func is _FLEX and STATE.dispatch_mode is not None:  # also when called by a graph
            call = _capture_flex if STATE.module_stack else _without_dispatch_mode
            return call(func, args, kwargs)
        # While a softmax result is traced, every function may change it, not only the captured
        # ones.
        functions = _CAPTURED if STATE.tracks_axes else _CAPTURED_FUSED
        if not STATE.module_stack or (func not in functions and not STATE.traces):
            return func(*args, **kwargs)
        if STATE.excluded and STATE.module_stack[-1] in STATE.excluded:
            return func(*args, **kwargs)
        func = _ATEN_FUNCTIONS.get(func, func)
        if _called_by_compiled_graph():  # captured when the graph was traced
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            raise_if_nested(STATE.module_stack[-1], args)
            return capture_sdpa(STATE.module_stack[-1], Route.SDPA, *args, **kwargs)
        if func is F.multi_head_attention_forward:
            return _capture_multi_head(self, args, kwargs)
        if func is _FLEX:
            return _capture_flex(func, args, kwargs)
        return eager_attention.trace_function(func, args, kwargs)


# After a graph break it would be compiled separately, while the mode is active.
_torch_compat.skip_compilation(AttentionFunctionMode.__torch_function__)


def _capture_while_compiling(
    mode: AttentionFunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Capture attention while a graph is traced; eager attention is not captured there."""
    if func is _FLEX:  # first: its graph must not depend on the module stack
        return _capture_flex(func, args, kwargs)
    if func is F.scaled_dot_product_attention and STATE.module_stack:
        return capture_sdpa(STATE.module_stack[-1], Route.SDPA, *args, **kwargs)
    if func is F.multi_head_attention_forward and STATE.module_stack:
        return _capture_multi_head(mode, args, kwargs)
    if func is Tensor.unflatten:  # the function calls super(), which breaks the graph
        return args[0].unflatten(*args[1:], **kwargs)
    return func(*args, **kwargs)


def _called_by_compiled_graph() -> bool:
    """Return whether the function is called by a running compiled graph (backend "eager")."""
    # Frame 1 is `__torch_function__`, frame 2 its caller. Generated code of FX has this file name;
    # only Dynamo sets the attribute, so a graph of `torch.export`, which was not captured when it
    # was made, does not count.
    frame = sys._getframe(2)
    if not frame.f_code.co_filename.startswith("<eval_with_key>"):
        return False
    return hasattr(frame.f_locals.get("self"), "compile_subgraph_reason")


def capture_sdpa(
    module: nn.Module,
    route: Route,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Call SDPA, with edits if there are any, and record its inputs and output."""
    # The arguments as the kernel will interpret them: a plain mask, autocast, known leading axes.
    given, causal = masks.resolve_mask(module, attn_mask, is_causal, query.device)
    query, key, value, given = _cast_for_autocast(query, key, value, given)
    axes = _infer_axes(module, query, key, value, enable_gqa)
    boolean = given is not None and given.dtype == torch.bool
    mask = _mask_to_bhqk(given, query, key, axes)
    # Taps are for tensors that are the same in the record and in the kernel, (b, h, n, d).
    taps = _make_taps(query, key) if axes.plain else None
    source = QKCall(
        _expand_queries(axes, query, key, value),
        axes.to_bhnm(key),
        default_scale(query) if scale is None else scale,
        bias=None if boolean else mask,
        allowed=mask if boolean else None,
        causal=causal,
        taps=taps,
    )
    # With edits: attend on (b, h, n, d), then return the leading axes that the model has passed.
    edits = edits_of(module)
    if edits:
        changed, output = attend_with_edits(
            module, route, source, axes.to_bhnm(value), dropout_p, edits
        )
        exact = not dropout_p
        record_call(
            CallRecord(
                module, route, changed, axes.to_bhnm(value), output, STATE.is_cross, exact=exact
            )
        )
        lead = (
            query.shape[:-2] if axes.plain and query.ndim < 4 else axes.from_bhnm(output).shape[:-2]
        )
        return axes.from_bhnm(output).reshape(*lead, *output.shape[-2:])
    if taps is not None:  # losses on rows add into the gradients of the kernel
        query, key = taps[0].tensor, taps[1].tensor
    output = F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    _set_output_axes(query, value, output)
    # Without edits: record the inputs of the fused kernel, and its output for verification.
    record = CallRecord(
        module,
        route,
        source,
        axes.to_bhnm(value),
        output,
        STATE.is_cross,
        through_interface=STATE.in_interface,
    )
    # The output is then not weights times values in the order of the record, so it is not compared.
    if dropout_p or not axes.ordered:
        record = replace(record, exact=False)
    record_call(record if axes.plain else replace(record, leading_axes=axes))
    return output


def _infer_axes(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, grouped: bool
) -> LeadingAxes:
    """Infer the roles of the leading axes; by convention in a graph, where axes are not tracked."""
    # With `enable_gqa` SDPA itself takes axis -3 for the heads.
    if query.ndim == 4 and (grouped or torch.compiler.is_compiling()):
        return axis_roles.BATCH_HEADS
    if _checked_before(query, key, value):
        return axis_roles.BATCH_HEADS
    lead = axis_roles.broadcast_lead(query, key, value)
    if torch.compiler.is_compiling():
        return axis_roles.infer_leading_axes(module, lead, ())
    # In the order in which they count as evidence: the first conclusive operand decides.
    axes = [axes_of(one) for one in (value, query, key)]
    validation.check_values(module, value, -2, -1)
    features = axes[1].features | axes[2].features
    validation.check_rows(module, axes[1].axes[-2], axes[2].axes[-2], features)
    validation.check_positions(module, axes[1].axes[-2], axes[2].axes[-2], axes[0].axes[-2])
    found = [
        axis_roles.axis_evidence(
            one, -2, -1, axis_roles.broadcast_positions(len(one.axes), len(lead))
        )
        for one in axes
    ]
    return axis_roles.infer_leading_axes(module, lead, found)


def _checked_before(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether the module attended on (b, h, n, d) in a checked block, and does so again."""
    if not STATE.scoped or STATE.tracks_axes:
        return False
    usual = query.ndim == key.ndim == value.ndim == 4 and key.shape[:2] == value.shape[:2]
    return usual and query.shape[:2] == key.shape[:2]


def _expand_queries(axes: LeadingAxes, query: Tensor, *others: Tensor) -> Tensor:
    """Queries for each sample, also if all samples share them."""
    query, most = axes.to_bhnm(query), max(len(axes.to_bhnm(one)) for one in others)
    return query.expand(most, -1, -1, -1) if len(query) == 1 < most else query


def _set_output_axes(query: Tensor, value: Tensor, output: Tensor) -> None:
    """Set the axes of an attention output from those of queries and values."""
    if STATE.scoped and not STATE.tracks_axes:  # nobody reads them
        return
    if torch.compiler.is_compiling() or output.ndim != query.ndim or value.ndim < 2:
        return
    given, carried = axes_of(query), axes_of(value)
    lead = given.axes[:-2] if output.shape[:-2] == query.shape[:-2] else None
    if lead is not None:
        features = given.features | carried.features
        validation.set_output_axes(output, lead, carried.axes[-1], features)


def _cast_for_autocast(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Cast inputs as SDPA does under autocast, so that the record matches the computation."""
    device = query.device.type
    # is_autocast_available breaks graphs of PyTorch 2.11, so it is not called for cpu and cuda
    known = device in ("cpu", "cuda") or torch.amp.is_autocast_available(device)
    if not known or not torch.is_autocast_enabled(device) or query.dtype == torch.float64:
        return query, key, value, mask
    dtype = torch.get_autocast_dtype(device)
    return query.to(dtype), key.to(dtype), value.to(dtype), masks.autocast_mask(mask)


def _mask_to_bhqk(
    mask: Tensor | None, query: Tensor, key: Tensor, axes: LeadingAxes
) -> Tensor | None:
    """Return the mask with the axes (b, h, q, k) of the call."""
    if mask is None or (axes.plain and query.ndim == 4) or mask.ndim < 3:
        return mask
    return axes.to_bhnm(mask.expand(*axes.lead, query.shape[-2], key.shape[-2]))


def _make_taps(query: Tensor, key: Tensor) -> tuple[GradTap, ...] | None:
    """Gradient taps for queries and keys, if both have a gradient."""
    learns = torch.is_grad_enabled() and query.requires_grad and key.requires_grad
    if (
        torch.compiler.is_compiling()
        or not learns
        or query.ndim != 4
        or _torch_compat.in_func_transform()
    ):
        return None
    return tap_gradients(query, key)


def _has_no_torch_function(*_: Any) -> bool:
    return False


def _project_packed(
    query: Tensor, key: Tensor, value: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Project queries, keys and values with one packed weight."""
    # One product for self-attention, as in PyTorch.
    if query is key and key is value:
        packed = F.linear(query, weight, bias)
        return tuple(part.contiguous() for part in packed.chunk(3, dim=-1))
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    parts = zip((query, key, value), weight.chunk(3), biases, strict=True)
    return tuple(F.linear(given, part, shift) for given, part, shift in parts)


def _without_override(function: Any) -> Callable[..., Any]:
    """Return a copy of the function that does not dispatch to `__torch_function__` itself.

    `F.multi_head_attention_forward` is overridden as a whole; its copy lets the mode intercept the
    attention inside. It splits the projection with `chunk`: `unflatten` breaks compiled graphs
    under a function mode.
    """
    # A function looks its globals up by name when it runs, so replacing names in a copied
    # dictionary changes the copy only.
    own = {"has_torch_function": _has_no_torch_function, "_in_projection_packed": _project_packed}
    names = {**function.__globals__, **own}
    code = function.__code__.replace(
        co_name="multi_head_attention_seen"
    )  # own name, since it is compiled separately
    twin = types.FunctionType(code, names, code.co_name, function.__defaults__)
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


_MULTI_HEAD_FORWARD = _without_override(F.multi_head_attention_forward)


def _capture_multi_head(
    mode: AttentionFunctionMode, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Capture `nn.MultiheadAttention`: fused, or eager if it returns its weights."""
    before = STATE.num_heads, STATE.is_cross
    # `num_heads` is the fifth argument of `F.multi_head_attention_forward`.
    STATE.num_heads = kwargs["num_heads"] if "num_heads" in kwargs else args[4]
    query = kwargs["query"] if "query" in kwargs else args[0]
    key = kwargs["key"] if "key" in kwargs else args[1]
    STATE.is_cross = _is_cross(query, key)
    try:
        # PyTorch disables a mode while its handler runs, so it is entered again for the copy.
        with mode:
            return _MULTI_HEAD_FORWARD(*args, **kwargs)
    finally:
        STATE.num_heads, STATE.is_cross = before


def _is_cross(query: Tensor, key: Tensor) -> bool | None:
    """Return whether keys come from another tensor than queries; None if not known.

    Compares memory: `nn.MultiheadAttention` transposes its arguments one by one.
    """
    if key is query:
        return False
    if query.shape != key.shape:
        return True
    # Fake and wrapped tensors have no addresses to compare.
    if torch.compiler.is_compiling() or _torch_compat.in_func_transform():
        return None
    return (query.data_ptr(), query.stride()) != (key.data_ptr(), key.stride())


def _without_dispatch_mode(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a higher-order operator without the dispatch mode, which it does not support."""
    with _torch_compat.without_dispatch_modes():
        return func(*args, **kwargs)


def _capture_flex(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Capture FlexAttention; its score_mod and mask_mod are called again when weights are read.

    It compiles itself, and its graph breaks on a module whose parameters the score_mod uses. The
    event therefore has no module; the post-hook of the module assigns it.
    """
    query, key, value, score, block, scale = args[:6]
    checked = STATE.dispatch_mode is not None and not torch.compiler.is_compiling()
    output = _without_dispatch_mode(func, args, kwargs) if checked else func(*args, **kwargs)
    if not isinstance(score, torch.fx.GraphModule):  # a running graph, captured before
        # The operator returns (output, log-sum-exp, maxima); the last entry of `block` is the
        # mask_mod.
        STATE.events.add((FLEX, None, query, key, value, output[0], score, block[-1], scale))
    return output
