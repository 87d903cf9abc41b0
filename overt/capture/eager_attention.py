"""Capture eager attention: a softmax, then a product with the values.

A softmax over the last axis may be attention, a router or a class head. Its result is traced
through dropout, casts and reshapes, and is attention if it is multiplied with values. The operand
of that product is what is captured, so dropped sinks and mixed heads are taken into account.

Pooling weights with one query per sample, (b, k) or (b, k, 1), as in additive attention, are
attention if they are multiplied with values (b, k, d), but only in a module that is named like
attention: gates and mixtures of experts use the same operations.
"""

import re
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overt.attention import Kind
from overt.capture import axis_provenance, contractions, validation
from overt.capture.axis_provenance import Axes, Dim, Factor, OpNode
from overt.capture.call import MaterializedCall, QKCall, Route
from overt.capture.contractions import Contraction
from overt.capture.discovery import looks_like_attention
from overt.capture.edits import apply_edits, edits_of
from overt.capture.hooks import raise_if_nested
from overt.capture.records import CallRecord, record_call
from overt.capture.state import STATE
from overt.capture.value_products import ValueProduct

_SOFTMAX = {F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax}
_DROPOUT = {F.dropout, torch.dropout}
# The same numbers in another dtype, shape or order, or a slice of them.
# A property such as `x.T` reaches a function mode as the `__get__` of its descriptor.
_RESHAPES = {
    getattr(space, name)
    for space in (Tensor, torch)
    for name in (
        "to type_as type float half bfloat16 double contiguous clone view reshape flatten "
        "unflatten unsqueeze squeeze transpose swapaxes swapdims permute movedim moveaxis t "
        "narrow expand __getitem__"
    ).split()
    if hasattr(space, name)
} | {getattr(Tensor, name).__get__ for name in ("mT", "T")}
# Numbers of the weights at other positions, which are not tracked.
_MOVES = {
    getattr(space, name)
    for space in (Tensor, torch, F)
    for name in (
        "pad as_strided cat concat stack gather index_select take_along_dim scatter scatter_add "
        "index_copy index_put masked_select masked_scatter roll flip unfold tril triu repeat tile "
        "repeat_interleave take"
    ).split()
    if hasattr(space, name)
}
# Several results: slices, or entries in another order.
_SPLITS = {
    getattr(space, name)
    for space in (Tensor, torch)
    for name in "chunk split tensor_split unbind split_with_sizes topk sort".split()
    if hasattr(space, name)
}
# Results of the same shape with unrelated numbers.
_CREATES = re.compile(r"(zeros|ones|empty|full|rand|randn|randint|new)_?\w*|bernoulli")
_PRODUCTS = contractions.PRODUCTS
_MULTIPLY = {Tensor.__mul__, Tensor.mul, torch.mul, Tensor.multiply, torch.multiply}
SOFTMAX_FUNCTIONS = frozenset(_SOFTMAX)
FUNCTIONS = _SOFTMAX | _PRODUCTS


@dataclass(eq=False)
class SoftmaxOrigin:
    """A softmax over the last axis.

    Attributes:
        module: The module that called it.
        logits: Its input, None if the result overwrites it.
        product: Queries and keys whose product the logits are, if known.
        multiplied: Whether its result was multiplied with values.
        split: Whether slices of its columns are multiplied with values separately.
        version: Version counter of the logits.
        single_query: Whether there is one query per sample, without an axis for it.
        dims: The axes of its result.
        logits_node: How the logits were made.
        channels: Whether its rows are features of a projection.
    """

    module: nn.Module
    logits: Tensor | None
    product: tuple[Tensor, Tensor] | None = None
    multiplied: bool = False
    split: bool = False
    version: int = 0
    single_query: bool = False
    dims: tuple[Dim, ...] = ()
    logits_node: OpNode | None = None
    channels: bool = False

    def whole_logits(self) -> Tensor | None:
        """Return the input of the softmax; None if it was overwritten since."""
        if self.logits is None or _version_of(self.logits) != self.version:
            return None
        return _as_single_row(self.logits) if self.single_query else self.logits


@dataclass(frozen=True, eq=False)
class TracedWeights:
    """A tensor that results from a softmax through dropout, casts and reshapes.

    Its axes are tracked in `axis_provenance`.

    Attributes:
        clean: The same tensor without dropout.
        rate: Dropout rate.
        mixed: Whether other operations were applied, so that the logits do not describe it.
        version: Version counter of the tensor.
    """

    origin: SoftmaxOrigin
    tensor: Tensor
    clean: Tensor
    rate: float = 0.0
    mixed: bool = False
    version: int = 0

    @property
    def module(self) -> nn.Module:
        """The module that called the softmax."""
        return self.origin.module


@dataclass(frozen=True, eq=False)
class PoolingWeights:
    """Weights of one query per sample, (b, k) or (b, k, 1), before the product with values.

    `clean`, `rate` and `version` are as in `TracedWeights`.
    """

    origin: SoftmaxOrigin
    tensor: Tensor
    clean: Tensor
    rate: float = 0.0
    version: int = 0

    @property
    def module(self) -> nn.Module:
        """The module that called the softmax."""
        return self.origin.module


def trace_function(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of `func`, and trace the results of softmax through it."""
    # 1. A product: with a traced factor it may be attention.
    if func in _PRODUCTS:
        return _trace_product(func, args, kwargs)
    # 2. An elementwise product: pooling weights (b, k, 1) times values.
    if func in _MULTIPLY and STATE.traces:
        pooled = _match_pooling_product(func, args, kwargs)
        if pooled is not None:
            return pooled[0]
    # 3. Anything else runs, and its result is tracked: axes, a new softmax, or what becomes of one.
    before = _save_before_dropout(func, args, kwargs) if STATE.traces else None
    result = func(*args, **kwargs)
    if func in axis_provenance.TRACKED_FUNCTIONS and func not in _SOFTMAX:
        axis_provenance.record_op(func, args, kwargs, result)
    if func in _SOFTMAX:
        axis = args[1] if len(args) > 1 else kwargs.get("dim")
        _start_trace(
            args[0] if args else kwargs["input"], axis, result, kwargs.get("out") is not None
        )
    elif before is not None:
        _store_trace(replace(before, tensor=result, rate=_dropout_rate(args, kwargs)))
    elif STATE.traces:
        _propagate(func, args, kwargs, result)
    return result


def _propagate(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """Trace weights through a function."""
    # The first argument may be a list of tensors, as of `torch.cat`.
    given = list(args[0]) if args and type(args[0]) in (tuple, list) else [*args, *kwargs.values()]
    trace = next((one for one in map(_lookup, given) if one is not None), None)
    if trace is None:
        return
    for one in result if isinstance(result, tuple | list) else (result,):
        if isinstance(one, Tensor) and one.is_nested:
            _store_trace(replace(trace, tensor=one))
            continue
        if not isinstance(one, Tensor) or one.ndim < 2 or not one.is_floating_point():
            continue
        # An in-place function, or a cast to the same dtype; `_lookup` compares versions.
        if one is trace.tensor:
            continue
        # `clean` stays: the map is that before dropout.
        if func in _DROPOUT:
            _copy_axes(trace.tensor, one)
            _store_trace(replace(trace, tensor=one, rate=_dropout_rate(args, kwargs)))
        elif isinstance(trace, PoolingWeights):
            if func in _RESHAPES:
                _trace_pooling(trace, one)
        elif func in _RESHAPES:
            clean = one
            # Also without dropout, so that both have the same shape.
            if trace.clean is not trace.tensor:
                clean = func(trace.clean, *args[1:], **kwargs)
            _store_trace(replace(trace, tensor=one, clean=clean))
        else:
            _trace_mixture(func, given, trace, one)


def _trace_mixture(func: Any, given: list[Any], trace: TracedWeights, result: Tensor) -> None:
    """Trace weights through arithmetic: the result is mixed, with the same axes if possible."""
    # Of another shape, only moved entries are weights still. They are stored without axes, so that
    # a product with values raises (`_sums_over_keys`) instead of recording a wrong map.
    moved = func in _MOVES or func in _SPLITS
    if result.shape == trace.tensor.shape and not _CREATES.fullmatch(func.__name__):
        if any(_is_features(one, trace) for one in given):
            return  # a gate on features, not attention
        _copy_axes(trace.tensor, result)
    elif not moved:
        return
    _store_trace(TracedWeights(trace.origin, result, result, mixed=True))


def _is_features(other: Any, trace: TracedWeights) -> bool:
    """Return whether this is another tensor, of features, with the shape of the weights."""
    if not isinstance(other, Tensor) or other is trace.tensor or _lookup(other) is not None:
        return False
    if other.shape != trace.tensor.shape or isinstance(other, nn.Parameter):
        return False
    return axis_provenance.axes_of(other).all_features(-1)


def _copy_axes(tensor: Tensor, result: Tensor) -> None:
    """Give the result the axes of a tensor."""
    axis_provenance.set_axes(result, axis_provenance.axes_of(tensor))


def _dropout_rate(args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    return float(args[1] if len(args) > 1 else kwargs.get("p", 0.5))


def _save_before_dropout(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> TracedWeights | PoolingWeights | None:
    """The trace of weights that in-place dropout will overwrite, with a copy of them; or None."""
    if func is not F.dropout or not (args[3] if len(args) > 3 else kwargs.get("inplace", False)):
        return None
    trace = _lookup(args[0] if args else kwargs.get("input"))
    if trace is None or trace.clean is not trace.tensor:
        return trace
    return replace(trace, clean=trace.clean.clone())


def _was_overwritten(trace: TracedWeights | PoolingWeights) -> bool:
    """Return whether the weights were modified in place since they were traced."""
    return _version_of(trace.tensor) != trace.version


def _version_of(tensor: Tensor) -> int:
    """Return the version counter of a tensor; in inference mode, our own count."""
    if not tensor.is_inference():
        return tensor._version
    return STATE.write_counts.get(tensor.untyped_storage().data_ptr(), 0)


# A trailing underscore that is not part of a dunder, `__setitem__`, and `__iadd__` and its kind.
_IN_PLACE = re.compile(
    r".*[^_]_|__setitem__|__i(add|sub|mul|truediv|floordiv|mod|pow|and|or|xor)__"
)


def count_writes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Count in-place writes in inference mode, where PyTorch has no version counters."""
    out = kwargs.get("out")
    named = out is not None or kwargs.get("inplace") or _IN_PLACE.fullmatch(func.__name__)
    written = out if out is not None else args[0] if args else kwargs.get("input")
    if named and isinstance(written, Tensor) and written.is_inference():
        at = written.untyped_storage().data_ptr()
        STATE.write_counts[at] = STATE.write_counts.get(at, 0) + 1


def _start_trace(given: Tensor, axis: int | None, result: Tensor, reused: bool = False) -> None:
    """Start to trace a softmax over the last axis, or over the keys of a single query.

    `reused` is whether the result was written into an existing tensor (`out=`), which the next call
    will overwrite and which may be that of the logits.
    """
    module, last = STATE.module_stack[-1], axis in (-1, result.ndim - 1)
    if result.is_nested:
        if looks_like_attention(module):
            raise_if_nested(module, (result,))
        _store_trace(TracedWeights(SoftmaxOrigin(module, None), result, result))
        return
    clean = result.clone() if reused else result
    logits = None if reused and _shares_memory(given, result) else given
    version = _version_of(given)
    # Two axes may be the scores of classes or experts: those count in attention modules only.
    if last and result.ndim > 2:
        before = axis_provenance.node_of(given)
        origin = SoftmaxOrigin(
            module, logits, _query_and_key(given), version=version, logits_node=before
        )
        _start_axes(origin, result)
        _store_trace(TracedWeights(origin, result, clean))
    elif looks_like_attention(module) and (
        (last and result.ndim == 2)
        or (axis in (1, -2) and result.ndim == 3 and result.shape[2] == 1)
    ):
        _store_trace(
            PoolingWeights(
                SoftmaxOrigin(module, logits, version=version, single_query=True), result, clean
            )
        )


def _start_axes(origin: SoftmaxOrigin, result: Tensor) -> None:
    """Give the weights axes of their own, by which they are recognized later."""
    origin.dims = tuple(Dim(size, attended=True) for size in result.shape)
    axes = [() if dim.size == 1 else (Factor(frozenset({dim}), dim.size),) for dim in origin.dims]
    axis_provenance.set_axes(result, Axes(tuple(axes)))


def _shares_memory(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors share their storage."""
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _as_single_row(shares: Tensor) -> Tensor:
    """(b, 1, 1, k): one head and one query."""
    return shares.reshape(len(shares), 1, 1, -1)


def _store_trace(trace: TracedWeights | PoolingWeights) -> None:
    # By id, because tensors compare elementwise. The trace keeps its tensor alive, so no other
    # tensor gets the id.
    STATE.traces[id(trace.tensor)] = replace(trace, version=_version_of(trace.tensor))


def _lookup(tensor: Any) -> TracedWeights | PoolingWeights | None:
    """The trace of a tensor, None if it has none; mixed if it was modified in place since."""
    trace = STATE.traces.get(id(tensor))
    if trace is None or trace.tensor is not tensor:
        return None
    if isinstance(trace, TracedWeights) and not trace.mixed and _was_overwritten(trace):
        return replace(trace, clean=tensor, mixed=True)
    return trace


def _trace_pooling(trace: PoolingWeights, result: Tensor) -> None:
    """Trace pooling weights in a new shape; with a query axis they become `TracedWeights`."""
    b, k = len(trace.tensor), trace.tensor.numel() // max(1, len(trace.tensor))
    if tuple(result.shape) not in ((b, k), (b, k, 1), (b, 1, k)):
        return
    clean = result
    if trace.clean is not trace.tensor:
        clean = trace.clean.reshape(result.shape).to(result.dtype)
    if tuple(result.shape) == (b, 1, k):
        _start_axes(trace.origin, result)
        _store_trace(TracedWeights(trace.origin, result, clean, rate=trace.rate))
    else:
        _store_trace(replace(trace, tensor=result, clean=clean))


def _match_pooling_product(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any] | None:
    """Return the product of pooling weights (b, k, 1) with values (b, k, d), if this is one."""
    for place, operand in enumerate(args if len(args) == 2 else ()):
        trace, other = _lookup(operand), args[1 - place]
        if not isinstance(trace, PoolingWeights) or not isinstance(other, Tensor):
            continue
        if operand.ndim == other.ndim == 3 and other.shape[:2] == operand.shape[:2]:
            return (_record_pooling(func, args, kwargs, place, trace, other),)
    return None


def _record_pooling(
    func: Any, args: tuple[Any, ...], kwargs: Any, place: int, trace: PoolingWeights, values: Tensor
) -> Any:
    """Multiply pooling weights with values, with edits if there are any, and record the call."""
    # Weights that were changed in place are not described by the logits, and may be negative.
    source: QKCall | MaterializedCall
    if _was_overwritten(trace):
        source = MaterializedCall(_as_single_row(trace.tensor), Kind.SIGNED)
    else:
        source = MaterializedCall(
            _as_single_row(trace.clean), Kind.PROBABILITY, trace.origin.whole_logits()
        )
    edits = edits_of(trace.module)
    if edits:
        source = apply_edits(trace.module, Route.SOFTMAX, source, values, edits)
    if edits or trace.clean is trace.tensor:  # so that gradients of the stored tensor are found
        args = _with_source_weights(args, place, source, trace)
    output = func(*args, **kwargs)
    # No output: an elementwise product is not summed over the keys yet.
    if not trace.origin.multiplied:
        record_call(CallRecord(trace.module, Route.SOFTMAX, source, values, None, STATE.is_cross))
    trace.origin.multiplied = True
    return output


def _with_source_weights(
    args: tuple[Any, ...],
    place: int,
    source: QKCall | MaterializedCall,
    trace: TracedWeights | PoolingWeights,
) -> tuple[Any, ...]:
    """Replace an operand of a product by the weights of `source`, keeping the dropout mask."""
    weights = source.weights().reshape(args[place].shape)
    return _replace_operand(args, place, weights, trace)


def _replace_operand(
    args: tuple[Any, ...], place: int, weights: Tensor, trace: TracedWeights | PoolingWeights
) -> tuple[Any, ...]:
    if weights.numel() == args[place].numel():  # it is larger if all samples shared the weights
        weights = weights.reshape(args[place].shape)
    weights = weights.to(args[place].dtype)
    # The dropout mask of the model: what is zero and was not zero before.
    if trace.clean is not trace.tensor:
        kept = (trace.tensor != 0) | (trace.clean == 0)
        weights = weights * kept / (1 - trace.rate)
    return (*args[:place], weights, *args[place + 1 :])


def _trace_product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    first, args = contractions.split_operands(func, args)
    operands = args[first:]
    tensors = len(operands) > 1 and all(isinstance(one, Tensor) for one in operands)
    whole = kwargs.get("alpha", 1) == 1  # else the product is scaled
    # Is one factor a softmax, and does the product sum over its keys?
    for place, operand in enumerate(operands if tensors and whole else ()):
        trace = _lookup(operand)
        if trace is not None:
            raise_if_nested(trace.module, (operand,))
        if isinstance(trace, PoolingWeights):
            if func is torch.einsum and len(operands) == 2 and _is_pooling_einsum(args[0], place):
                return _record_pooling(
                    func, args, kwargs, first + place, trace, operands[1 - place]
                )
        elif trace is not None:
            found = contractions.find_contraction(func, args[0], operands, place)
            if (
                found is not None
                and _sums_over_keys(trace, operand, found)
                and _covers_all_keys(trace, found)
            ):
                return _record_product(func, args, kwargs, first + place, trace, found)
    # No factor attends: perhaps this product makes the scores of a later softmax.
    if tensors and any(one.is_nested for one in operands):
        return func(*args, **kwargs)  # without a shape
    if tensors:
        _raise_if_composed(func, args[0], operands)
    result = func(*args, **kwargs)
    if func in axis_provenance.TRACKED_FUNCTIONS:
        axis_provenance.record_op(func, args, kwargs, result)
    if func is not torch.einsum and tensors and len(operands) == 2:
        # Versions, because a factor that is changed in place later is not the factor of the scores.
        STATE.last_product = (
            STATE.module_stack[-1],
            result.shape,
            *operands,
            *map(_version_of, operands),
        )
    return result


def _raise_if_composed(func: Any, equation: Any, operands: tuple[Any, ...]) -> None:
    """Raise for linear attention: a product that sums over the features of a softmax result."""
    if not STATE.traces or len(operands) != 2:
        return
    found = contractions.find_contraction(func, equation, operands, 0)
    if found is None:
        return
    for one, axis in ((operands[0], found.keys), (operands[1], found.summed)):
        for dim in axis_provenance.axes_of(one).dims(axis):
            for trace in STATE.traces.values():
                if trace.origin.channels and dim in trace.origin.dims:
                    validation.raise_unsupported(
                        trace.module,
                        "multiplies keys and values before its queries (linear attention), so "
                        "there is no map from queries to keys",
                    )


def _query_and_key(logits: Tensor) -> tuple[Tensor, Tensor] | None:
    """Queries and keys, if the logits are the last product of this module."""
    if STATE.last_product is None:
        return None
    # Taken once: it is freed, and a later softmax has scores of its own.
    module, shape, query, key, *versions = STATE.last_product
    STATE.last_product = None
    # Since the product, scores may be scaled, masked and reshaped in their leading axes.
    same = shape[-2:] == logits.shape[-2:] and shape.numel() == logits.numel()
    same = same and [_version_of(query), _version_of(key)] == versions
    if module is not STATE.module_stack[-1] or not same or not 2 < key.ndim == query.ndim:
        return None
    # The right factor of the scores is (.., d, k).
    return query, key.transpose(-1, -2)


def _sums_over_keys(trace: TracedWeights, operand: Tensor, found: Contraction) -> bool:
    """Return whether a product sums over the keys, the axis of the softmax.

    If not, it assigns positions to groups; and if each query has values of its own, it is a mixture
    of experts. Neither is attention.
    """
    if not found.rows:
        return False
    axes, home = axis_provenance.axes_of(operand), trace.origin.dims
    # A single key has no factors by which it is recognized, only its place.
    if home[-1].size == 1:
        return found.keys == operand.ndim - 1 and operand.shape[-1] == 1
    if home[-1] in axes.dims(found.keys):
        return True
    # No axis of the softmax is left: the weights were moved (`_MOVES`).
    known = {dim for at in range(operand.ndim) for dim in axes.dims(at)} & {*home}
    if not known and not trace.origin.multiplied:
        validation.raise_unsupported(
            trace.module,
            "moves its weights to other positions before the product with the values, which cannot "
            "be tracked",
        )
    return False


def _is_pooling_einsum(equation: Any, place: int) -> bool:
    """Return whether an einsum of two terms pools values `bkd` with weights `bk`."""
    if not isinstance(equation, str):
        return False
    given, _, result = equation.replace(" ", "").partition("->")
    terms = given.split(",")
    ours, other = terms[place], terms[1 - place]
    return len(ours) == 2 and other[:2] == ours and len(other) == 3 and ours[1] not in result


def _covers_all_keys(trace: TracedWeights, found: Contraction) -> bool:
    """Whether a product covers the first columns; raise if slices are multiplied separately."""
    keys = axis_provenance.axes_of(trace.tensor).axes[found.keys]
    # A slice from the first column on only drops columns without values, such as a learned sink.
    piece = any(one.part is not None and one.part[0] > 0 for one in keys) and not trace.mixed
    trace.origin.split |= piece
    if trace.origin.split and (trace.origin.multiplied or not piece):
        validation.raise_unsupported(
            trace.module,
            "multiplies slices of its weights with different values, which is not one map over all "
            "keys",
        )
    return not piece


def _record_product(
    func: Any,
    args: tuple[Any, ...],
    kwargs: Any,
    place: int,
    trace: TracedWeights,
    found: Contraction,
) -> Any:
    """Multiply weights with values, with edits if there are any, and record the call."""
    values = args[contractions.split_operands(func, args)[0] + found.other]
    product = ValueProduct.from_contraction(trace.module, trace.tensor, values, found, trace.origin)
    # After other operations there is no softmax to recompute, and nothing is known about signs.
    if trace.mixed or product.gathered:
        used = trace.tensor if product.gathered else trace.clean
        source: Any = MaterializedCall(product.to_bhqk(used), Kind.SIGNED)
    else:
        source = _source_of(trace, product)
    value = product.values_to_bhkd(values)
    edits = edits_of(trace.module)
    # `to_bhqk` has made another tensor than the model has. It is passed to the product, so that the
    # gradient of a target with respect to the recorded weights exists.
    learns = source.used.requires_grad and torch.is_grad_enabled() and not product.plain
    if edits:
        source = apply_edits(trace.module, Route.SOFTMAX, source, value, edits)
    if edits or (learns and trace.clean is trace.tensor):  # so that gradients are found
        args = _replace_operand(args, place, product.from_bhqk(source.weights()), trace)
    output = func(*args, **kwargs)
    axis_provenance.record_op(func, args, kwargs, output)
    if not trace.origin.multiplied or trace.mixed:  # mixed weights are a separate map
        # Whether the output is weights times values: no dropout, no permuted axes, no added term.
        exact = (
            trace.clean is trace.tensor
            and product.ordered
            and func not in contractions.ADDED_PRODUCTS
        )
        given = output if product.ordered else None
        shown = CallRecord(
            trace.module, Route.SOFTMAX, source, value, given, STATE.is_cross, exact=exact
        )
        record_call(shown)
    trace.origin.multiplied = True
    return output


def _source_of(trace: TracedWeights, product: ValueProduct) -> MaterializedCall:
    """Return the source of unmixed weights, with their logits, queries and keys."""
    used, dropped = product.to_bhqk(trace.clean), product.dropped
    kind = Kind.SUBPROBABILITY if dropped else Kind.PROBABILITY
    logits = trace.origin.whole_logits()
    logits = (
        logits if logits is None or trace.origin.single_query else product.logits_to_bhqk(logits)
    )
    query, key = trace.origin.product or (None, None)
    if key is None or key.shape[-2] != used.shape[-1]:
        query = key = None  # only the first columns were multiplied with values
    return MaterializedCall(
        *(used, kind, logits, 0 if logits is None else dropped),
        *(None if one is None else product.factor_to_bhnd(one) for one in (query, key)),
    )
