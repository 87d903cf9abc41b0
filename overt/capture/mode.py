"""Every way in which PyTorch attends, seen from one place.

While a watcher is at work, each call of an overridable PyTorch function comes here first. Fused
kernels are called as they were and their inputs remembered; attention that a model writes out is
known by its softmax and by the product with the values. Nothing is computed that the model did not
compute, unless an edit asks for the weights.
"""

import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from overt.capture import written
from overt.capture.axes import four, heads_of
from overt.capture.call import Projected, Route, default_scale
from overt.capture.edits import edited, edits_of
from overt.capture.places import FLEX, HERE
from overt.capture.products import Tap, tap
from overt.capture.records import Record, remember

_FLEX = torch.ops.higher_order.flex_attention
_ROUTES = written.FUNCTIONS | {
    F.scaled_dot_product_attention,
    F.multi_head_attention_forward,
    _FLEX,
}


class Watching(TorchFunctionMode):
    """Sends the functions that attend to their routes, and leaves all others alone."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """The result of `func`, remembered when it is attention of a module that is watched."""
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return _in_tracing(self, func, args, kwargs)
        if func not in _ROUTES or not HERE.stack or (func in written.PASSING and not HERE.traces):
            return func(*args, **kwargs)
        if _in_a_graph():  # what a graph does was seen when it was made
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return attend(HERE.stack[-1], Route.SDPA, *args, **kwargs)
        if func is F.multi_head_attention_forward:
            return _multi_head(self, args, kwargs)
        if func is _FLEX:
            return _flex(func, args, kwargs)
        return written.follow(func, args, kwargs)


def _never_compiled(function: Any) -> None:
    """Have a function run as it is where it is called from plain Python; graphs still inline it."""
    try:
        from torch._C._dynamo.eval_frame import (
            _FrameAction,
            _FrameExecStrategy,
            set_code_exec_strategy,
        )
    except ImportError:  # names of torch's own, not promised to anybody
        return
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(function.__code__, skip)


# After a break in a graph it would be compiled by itself, with the mode switched on under it.
_never_compiled(Watching.__torch_function__)


def _in_tracing(mode: Watching, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same while a graph is made. Attention that is written out is not followed there."""
    if func is _FLEX:  # first: its graph must not see which module is at work
        return _flex(func, args, kwargs)
    if func is F.scaled_dot_product_attention and HERE.stack:
        return attend(HERE.stack[-1], Route.SDPA, *args, **kwargs)
    if func is F.multi_head_attention_forward and HERE.stack:
        return _multi_head(mode, args, kwargs)
    if func is Tensor.unflatten:  # as a function it calls its parent class, which breaks the graph
        return args[0].unflatten(*args[1:], **kwargs)
    return func(*args, **kwargs)


def _in_a_graph() -> bool:
    """Whether the function is called by a compiled graph at work, as the "eager" backend does."""
    frame = sys._getframe(2)
    if not frame.f_code.co_filename.startswith("<eval_with_key>"):
        return False
    return hasattr(frame.f_locals.get("self"), "compile_subgraph_reason")


def attend(
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
    """SDPA as it was called, its inputs remembered, with the edits of whoever watches."""
    query, key, value = _as_autocast(query, key, value)
    boolean = attn_mask is not None and attn_mask.dtype == torch.bool
    heads = 1 if query.ndim == 4 else heads_of(module)
    mask = _mask(attn_mask, query, key, heads)
    taps = _taps(query, key)
    source = Projected(
        four(query, heads),
        four(key, heads),
        default_scale(query) if scale is None else scale,
        bias=None if boolean else mask,
        allowed=mask if boolean else None,
        causal=is_causal,
        taps=taps,
    )
    edits = edits_of(module)
    if edits:
        changed, output = edited(module, route, source, four(value, heads), dropout_p, edits)
        remember(Record(module, route, changed, four(value, heads), output, HERE.cross))
        return _unfolded(output, (*query.shape[:-1], value.shape[-1]), heads)
    if taps is not None:  # rows of a loss are added into the gradients that the kernel makes
        query, key = taps[0].tensor, taps[1].tensor
    output = F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    remember(Record(module, route, source, four(value, heads), output, HERE.cross))
    return output


def _as_autocast(*tensors: Tensor) -> list[Tensor]:
    """What SDPA makes of its inputs under autocast, so that what is seen is what was multiplied."""
    device = tensors[0].device.type
    # asked of devices that may not know it: PyTorch 2.11 breaks a graph at the question
    known = device in ("cpu", "cuda") or torch.amp.is_autocast_available(device)
    if not known or not torch.is_autocast_enabled(device) or tensors[0].dtype == torch.float64:
        return list(tensors)
    return [tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors]


def _mask(mask: Tensor | None, query: Tensor, key: Tensor, heads: int) -> Tensor | None:
    """A mask for the four axes of the call: folded heads and windows are told apart in it too."""
    if mask is None or query.ndim == 4 or mask.ndim < 3:
        return mask
    return four(mask.expand(*query.shape[:-1], key.shape[-2]), heads)


def _unfolded(output: Tensor, shape: tuple[int, ...], heads: int) -> Tensor:
    """Four axes as they came: windows back behind the heads if they stood there."""
    if len(shape) == 5 and heads > 1 and shape[1] == heads != shape[2]:
        return output.unflatten(0, (shape[0], shape[2])).movedim(2, 1)
    return output.reshape(shape)


def _taps(query: Tensor, key: Tensor) -> tuple[Tap, ...] | None:
    """Places for the gradients of a loss on this call, when the model learns."""
    learns = torch.is_grad_enabled() and query.requires_grad and key.requires_grad
    if torch.compiler.is_compiling() or not learns or query.ndim != 4 or _transformed():
        return None
    return tap(query, key)


def _transformed() -> bool:
    """Whether `torch.func` or forward-mode differentiation is at work, which taps do not follow."""
    inside = torch._C._functorch.maybe_current_level() is not None
    return inside or torch.autograd.forward_ad._current_level >= 0


def _never(*_: Any) -> bool:
    return False


def _in_projection(
    query: Tensor, key: Tensor, value: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Queries, keys and values from one packed weight."""
    if query is key and key is value:
        packed = F.linear(query, weight, bias)
        return tuple(part.contiguous() for part in packed.chunk(3, dim=-1))
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    parts = zip((query, key, value), weight.chunk(3), biases, strict=True)
    return tuple(F.linear(given, part, shift) for given, part, shift in parts)


def _twin(function: Any) -> Callable[..., Any]:
    """The same function, but it does not ask whether somebody overrides it.

    `F.multi_head_attention_forward` hands itself over as a whole. What attends is inside, and the
    twin lets us see that. It splits the projection with `chunk`: `unflatten` breaks compiled graphs
    when functions are overridden.
    """
    own = {"has_torch_function": _never, "_in_projection_packed": _in_projection}
    names = {**function.__globals__, **own}
    code = function.__code__.replace(co_name="multi_head_attention_seen")  # compiled by itself
    twin = types.FunctionType(code, names, code.co_name, function.__defaults__)
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


_MULTI_HEAD = _twin(F.multi_head_attention_forward)


def _multi_head(mode: Watching, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`nn.MultiheadAttention`: fused, or written out when it is asked for its weights."""
    before = HERE.heads, HERE.cross
    HERE.heads = kwargs["num_heads"] if "num_heads" in kwargs else args[4]
    query = kwargs["query"] if "query" in kwargs else args[0]
    key = kwargs["key"] if "key" in kwargs else args[1]
    HERE.cross = _apart(query, key)
    try:
        with mode:
            return _MULTI_HEAD(*args, **kwargs)
    finally:
        HERE.heads, HERE.cross = before


def _apart(query: Tensor, key: Tensor) -> bool | None:
    """Whether keys are others than queries; None where only names could tell.

    `nn.MultiheadAttention` turns its arguments one by one where values are not the keys.
    """
    if key is query:
        return False
    if query.shape != key.shape:
        return True
    if torch.compiler.is_compiling() or _transformed():
        return None
    return (query.data_ptr(), query.stride()) != (key.data_ptr(), key.stride())


def _flex(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """FlexAttention: its score function and mask function are asked again for the part wanted.

    It compiles itself, and its graph breaks when it meets a module whose parameters its score
    function uses. So the record does not say who called; the module says so when it is done.
    """
    query, key, value, score, block, scale = args[:6]
    output = func(*args, **kwargs)
    if not isinstance(score, torch.fx.GraphModule):  # that is the graph at work, seen before
        HERE.events.add((FLEX, None, query, key, value, output[0], score, block[-1], scale))
    return output
