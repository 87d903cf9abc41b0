"""`TorchDispatchMode` that finds attention which the function mode did not capture.

`AttentionFunctionMode` recognizes attention by the Python functions that a model calls. This mode
works one level below, on every operation that reaches the dispatcher: TorchScript, exported graphs,
exponentials divided by their sum, products of other libraries. Results of a softmax or of
exponentials are followed into matrix products, and into broadcast products that are summed; fused
attention is recognized by its operator name. Any other matrix whose rows sum to one is recognized
by its values where it is multiplied: weights may be normalized in many ways.
Attention without a matching record ran and was not captured. The mode is active in the first
`watch` block of a model and costs about as much as the forward pass.
"""

import re
import weakref
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from overt.capture import _torch_compat
from overt.capture.state import STATE

_ATEN = torch.ops.aten
_FUSED = re.compile(
    r"scaled_dot_product|(flash|efficient|cudnn|sage|paged)_?(attn|attention)|multi_head_attention"
    r"|transformer_encoder_layer|scaled_dot_attention|attn\w*_(fwd|forward)|attention_forward"
)
_BACKWARD = re.compile(r"backward|bwd")
_SOFTMAX = {_ATEN._softmax, _ATEN._safe_softmax}
_LOG_SOFTMAX = {_ATEN._log_softmax}
_EXP = {_ATEN.exp, _ATEN.exp_, _ATEN.exp2, _ATEN.exp2_}
_SUM = {_ATEN.sum, _ATEN.norm, _ATEN.linalg_vector_norm, _ATEN.mean}
_MULTIPLY = {_ATEN.mul, _ATEN.mul_}
_DROPOUT = {_ATEN.native_dropout, _ATEN.bernoulli, _ATEN.bernoulli_}
# Matrix products and the argument index of their first factor.
_PRODUCTS = {_ATEN.mm: 0, _ATEN.bmm: 0, _ATEN.addmm: 1, _ATEN.baddbmm: 1, _ATEN.addbmm: 1}
# Slices of the weights, or several of them concatenated.
_PARTS = {_ATEN.slice, _ATEN.select, _ATEN.split, _ATEN.split_with_sizes, _ATEN.unbind}
_PARTS |= {_ATEN.index, _ATEN.index_select, _ATEN.cat, _ATEN.stack, _ATEN.expand, _ATEN.repeat}


@dataclass(eq=False)
class DispatchedSoftmax:
    """A softmax, or exponentials, over `keys` keys of `queries` queries.

    `summed` is whether the exponentials were also summed; `keys` is None for exponentials.
    """

    queries: int
    keys: int | None
    ndim: int
    summed: bool = True
    dropped: bool = False
    captured: bool = False


@dataclass(eq=False)
class AttentionOp:
    """A product of weights with values in a module; `origin` is None for fused attention."""

    module: nn.Module
    operation: str
    origin: DispatchedSoftmax | None
    numel: int = 0
    captured: bool = False

    @property
    def uncaptured(self) -> bool:
        """Whether this is attention without a record."""
        if self.origin is None:
            return not self.captured
        return not self.captured and not self.origin.captured and self.origin.summed


class AttentionDispatchMode(TorchDispatchMode):
    """Follow results of softmax and exponentials into matrix products, in the first forward pass.

    Args:
        fixed: Parameters and buffers of the model. Weights over their rows are not attention to
            positions (a codebook, an expected coordinate).
    """

    def __init__(self, fixed: Collection[Tensor]) -> None:
        super().__init__()
        # Offloaded weights are on the meta device, without storage; while their module runs, other
        # parameters take their place.
        self._fixed = {_storage(one) for one in fixed if not one.is_meta}
        self._offloads = any(one.is_meta for one in fixed)
        self._origins: Any = WeakTensorKeyDictionary()
        self._constants: Any = WeakTensorKeyDictionary()
        self._learned: Any = WeakTensorKeyDictionary()  # made with a parameter or a product
        self._terms: Any = WeakTensorKeyDictionary()  # weights times values, not summed yet
        self.attention_ops: list[AttentionOp] = []

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Let Dynamo compile under this mode: FlexAttention compiles itself."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Return the result of `func`, and follow the results of softmax."""
        with _torch_compat.without_torch_function():  # the function mode has handled this call
            result = func(*args, **(kwargs or {}))
            # Only forward operations of the first pass: later passes and backward repeat them.
            if STATE.module_stack and STATE.steps < 2 and _torch_compat.backward_pass_id() == -1:
                self._inspect(func, args, result)
        return result

    def mark_captured(self, numel: int) -> None:
        """Mark the last product as recorded, if it has this many weights."""
        last = self.attention_ops[-1] if self.attention_ops else None
        if last is not None and last.numel in (0, numel):
            last.captured = True
            if last.origin is not None:
                last.origin.captured = True

    def uncaptured(self) -> list[AttentionOp]:
        """Return the attention that ran and has no record."""
        return [one for one in self.attention_ops if one.uncaptured]

    def _inspect(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        packet = getattr(func, "overloadpacket", None)
        name = _torch_compat.operator_name(func)
        given, made = list(_tensors(args)), list(_tensors((result,)))
        if any(one.is_nested for one in (*given, *made)):
            return
        if _FUSED.search(name) and not _BACKWARD.search(name):
            self.attention_ops.append(AttentionOp(STATE.module_stack[-1], name, None))
        elif packet in _PRODUCTS:
            self._multiply(name, *args[_PRODUCTS[packet] :][:2])
        elif packet in _MULTIPLY and self._start_terms(name, given, made[0]):
            pass
        elif any(one in self._terms for one in given):
            self._sum_terms(packet, given, made)
        elif packet in _SOFTMAX or packet in _LOG_SOFTMAX:
            self._start(made[0], args[1])
        else:
            self._propagate(packet, args, given, made)
        # Matrices made by a product or with a parameter are learned; others, such as the cover of
        # boxes, are inputs.
        if packet in _PRODUCTS or any(
            isinstance(one, nn.Parameter) or one in self._learned for one in given
        ):
            for one in made:
                self._learned[one] = True
        # Also true for operations without tensor arguments, such as `arange`.
        if all(self._is_fixed(one) for one in given):
            for one in made:
                self._constants[one] = True

    def _start(self, result: Tensor, axis: int) -> None:
        if result.ndim > 1:
            keys = result.shape[axis]
            rows = result.shape[-2] if axis in (-1, result.ndim - 1) else result.shape[-1]
            self._origins[result] = DispatchedSoftmax(rows, keys, result.ndim)

    def _propagate(
        self, packet: Any, args: tuple[Any, ...], given: list[Tensor], made: list[Tensor]
    ) -> None:
        """Results with as many entries as the weights, or slices of them, are weights too."""
        source = next((one for one in given if one in self._origins), None)
        if source is None:
            if packet in _EXP and made[0].ndim > 1 and made[0].shape[-2] > 0:
                origin = DispatchedSoftmax(made[0].shape[-2], None, made[0].ndim, summed=False)
                self._origins[made[0]] = origin
            return
        origin = self._origins[source]
        # The sum that normalizes exponentials; it is not weights itself.
        if packet in _SUM:
            origin.summed = True
            return
        origin.dropped |= packet in _DROPOUT
        for one in made:
            if packet in _PARTS or one.numel() == source.numel():
                self._origins[one] = origin

    def _is_fixed(self, tensor: Tensor) -> bool:
        """Return whether a tensor does not depend on the input of the model."""
        return (
            tensor in self._constants
            or _storage(tensor) in self._fixed
            or (self._offloads and isinstance(tensor, nn.Parameter))
        )

    def _start_terms(self, name: str, given: list[Tensor], result: Tensor) -> bool:
        """Return whether this multiplies weights (.., q, k, 1) with values (.., 1, k, d).

        Summed over the keys, this is a product of weights with values, entry by entry.
        """
        for weights, values in (given, given[::-1]) if len(given) == 2 else ():
            origin = self._origins.get(weights)
            if origin is None or self._is_fixed(values):
                continue
            # Sizes of each axis in both factors, 1 where broadcasting adds it. Queries are an axis
            # of the weights alone, features one of the values alone.
            pairs = [
                (
                    weights.shape[at - result.ndim] if result.ndim - at <= weights.ndim else 1,
                    values.shape[at - result.ndim] if result.ndim - at <= values.ndim else 1,
                )
                for at in range(result.ndim)
            ]
            if any(w > v == 1 for w, v in pairs) and any(v > w == 1 for w, v in pairs):
                module = STATE.module_stack[-1]
                self._terms[result] = AttentionOp(module, name, origin, weights.numel())
                return True
        return False

    def _sum_terms(self, packet: Any, given: list[Tensor], made: list[Tensor]) -> None:
        source = next(one for one in given if one in self._terms)
        meeting = self._terms[source]
        if packet in _SUM and made[0].numel() < source.numel():
            self.attention_ops.append(meeting)
            return
        for one in made:
            if one.numel() == source.numel():
                self._terms[one] = meeting

    def _multiply(self, name: str, left: Tensor, right: Tensor) -> None:
        # Weights are the left factor with the keys last, or the right factor with the keys first.
        for weights, values, axis in ((left, right, -1), (right, left, -2)):
            if self._is_fixed(values):
                continue
            origin = self._origins.get(weights)
            if origin is None:
                # Weights made of inputs alone, such as the cover of boxes, are pooling.
                made_here = weights in self._learned and not self._is_fixed(weights)
                if made_here and _is_normalized(weights, axis):
                    module = STATE.module_stack[-1]
                    self.attention_ops.append(AttentionOp(module, name, None, weights.numel()))
                    return
                continue
            if not origin.summed and _is_normalized(weights, axis):
                origin.summed = True  # by subtracting the log of the sum
            if self._attends(origin, weights, axis):
                meeting = AttentionOp(STATE.module_stack[-1], name, origin, weights.numel())
                self.attention_ops.append(meeting)
                return

    def _attends(self, origin: DispatchedSoftmax, weights: Tensor, axis: int) -> bool:
        """Return whether a product sums over the keys, with the same values for several queries."""
        keys, rows = weights.shape[axis], weights.shape[-3 - axis]
        if rows == 1 and (origin.queries > 1 or origin.ndim < 4):
            return False  # each query has its own values: mixture of experts, or a gate
        if origin.keys is None or origin.dropped:
            return True
        if keys > origin.keys:
            return False
        if keys < origin.keys or rows != keys:
            return keys == origin.keys or rows == origin.queries
        # Square weights: only their values tell rows from keys. Most sums over the keys are one;
        # rows may be masked.
        if weights.is_meta:
            return axis == -1
        total = weights.detach().float().sum(axis)
        return bool(((total - 1).abs() < 0.05).float().mean() > 0.5)


def _is_normalized(weights: Tensor, axis: int) -> bool:
    """Return whether the sums over an axis are one, as those of attention weights, or zero.

    Not for a mean over some positions or a choice of one, whose entries are all equal.
    """
    if not weights.is_floating_point() or min(weights.shape) < 2 or weights.is_meta:
        return False
    found = weights.detach().float()
    close = 1e-3 if weights.dtype in (torch.float32, torch.float64) else 2e-2
    total, most = found.sum(axis), found.amax(axis)
    some = found > 1e-3 * most.unsqueeze(axis)  # masks may leave a small number instead of zero
    least = torch.where(some, found, torch.inf).amin(axis)
    sums_to_one = (total - 1).abs() < close
    # Combined on the device and read once.
    whole = (sums_to_one | (total == 0)).all() & (found >= 0).all()
    return bool(whole & (sums_to_one & (most - least > 10 * close * most)).any())


def _storage(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # a tensor without storage
        return id(tensor)


def _tensors(given: Any) -> Iterator[Tensor]:
    """Yield the tensors among arguments, also in nested lists."""
    for one in given:
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, list | tuple):
            yield from _tensors(one)


_PLAIN: "weakref.WeakKeyDictionary[nn.Module, set[Any]]" = weakref.WeakKeyDictionary()
_CHECKED: "weakref.WeakKeyDictionary[nn.Module, dict[Any, list[str]]]" = weakref.WeakKeyDictionary()


def needs_check(model: nn.Module, key: Any) -> bool:
    """Return whether the attention of a model was not checked yet, and can be."""
    return key not in _CHECKED.get(model, {}) and can_check(model)


def mark_checked(model: nn.Module, key: Any, notes: list[str]) -> None:
    """Store that all attention of a model was captured, with notes on what was not verified."""
    _CHECKED.setdefault(model, {})[key] = notes


_UNCHECKABLE: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


def raise_if_subclass_created(model: nn.Module, problem: BaseException) -> None:
    """Raise if a model failed because it creates a tensor subclass, and do not check it again.

    PyTorch cannot construct one (`CausalBias`) while a dispatch mode is active.

    Raises:
        NotImplementedError: Names the module; a second block will work, without the check.
    """
    if "Creating a new Tensor subclass" not in str(problem):
        return
    parts, module, trace = set(model.modules()), model, problem.__traceback__
    while trace is not None:
        inside = trace.tb_frame.f_locals.get("self")
        module = inside if isinstance(inside, nn.Module) and inside in parts else module
        trace = trace.tb_next
    _UNCHECKABLE.add(model)
    raise NotImplementedError(
        f"{type(module).__name__} creates a tensor subclass (such as CausalBias), which PyTorch "
        "does not support while operations are checked; run the block again without the check, or "
        "create it before the block"
    ) from problem


NOT_CHECKED = (
    "operations were not checked (compiled or edited model, CUDA graph, sharded or quantized "
    "weights, a tensor subclass): attention in an unsupported form would be missing here"
)


def was_checked(model: nn.Module, key: Any) -> bool:
    """Return whether the operations of a model were checked in this or an earlier block."""
    return key in _CHECKED.get(model, {})


def mark_plain(model: nn.Module, key: Any) -> None:
    """Store that every call of a model was fused attention with axes (b, h, n, d)."""
    _PLAIN.setdefault(model, set()).add(key)


def is_plain(model: nn.Module, key: Any) -> bool:
    """Return whether the axes of a checked model need no tracking in later blocks."""
    return key in _PLAIN.get(model, ())


def reset_check(model: nn.Module) -> None:
    """Check a model again in its next block."""
    _CHECKED.pop(model, None)
    _PLAIN.pop(model, None)


def check_notes(model: nn.Module, key: Any) -> list[str]:
    """Return the notes stored when a model was checked."""
    return _CHECKED.get(model, {}).get(key, [])


def can_check(model: nn.Module) -> bool:
    """Return whether the operations of a model can be checked in the current context.

    Not inside other dispatch modes, `torch.func` transforms, tracing or CUDA graph capture, and not
    for parameters of a tensor subclass (sharded, quantized).
    """
    plain = all(type(one) in (Tensor, nn.Parameter) for one in model.parameters())
    busy = (
        _torch_compat.has_dispatch_mode()
        or _torch_compat.in_functorch()
        or _torch_compat.is_tracing()
        or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
    )
    return plain and not busy and model not in _UNCHECKABLE
