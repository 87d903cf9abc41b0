"""Attention that a model writes out: softmax, then a product with the values.

A softmax over the last axis may be attention, or a router, or a class head. It is followed through
dropout, casts and reshapes, and is attention when it meets the values in a product. What the
product takes is what counts: sinks that were cut off and heads that were mixed are seen as such.

Shares of one query a sample, (b, k) or (b, k, 1), as additive attention has them, are attention
too when they meet values (b, k, d), but only in a module that is named like it: gates and mixtures
of experts are written alike.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overt.attention import Kind
from overt.capture.axes import four, heads_of
from overt.capture.call import Projected, Route, Written
from overt.capture.edits import changed, edits_of
from overt.capture.places import HERE, looks_like_attention
from overt.capture.records import Record, remember

_SOFTMAX = {F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax}
_DROPOUT = {F.dropout, torch.dropout}
_SAME = {
    Tensor.to,
    Tensor.type_as,
    Tensor.type,
    Tensor.float,
    Tensor.half,
    Tensor.bfloat16,
    Tensor.double,
    Tensor.contiguous,
    Tensor.clone,
    Tensor.view,
    Tensor.reshape,
    torch.reshape,
    Tensor.flatten,
    Tensor.unflatten,
    Tensor.__getitem__,
}
_PRODUCT = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.einsum}
# Where one query has no axis, these give it one.
_TURNED = {
    Tensor.unsqueeze,
    torch.unsqueeze,
    Tensor.squeeze,
    torch.squeeze,
    Tensor.transpose,
    torch.transpose,
    Tensor.permute,
    torch.permute,
}
_TIMES = {Tensor.__mul__, Tensor.mul, torch.mul, Tensor.multiply, torch.multiply}
PASSING = _DROPOUT | _SAME | _TURNED | _TIMES  # only where there is a softmax to follow
FUNCTIONS = _SOFTMAX | PASSING | _PRODUCT


@dataclass(eq=False)
class Softmax:
    """A softmax over the last axis: who took it, of what, and whether it has met values yet.

    `split` when later columns met values apart from the first ones; `product` is what the logits
    were the product of, where that is known.
    """

    module: nn.Module
    logits: Tensor
    product: tuple[Tensor, Tensor] | None = None
    met: bool = False
    split: bool = False


@dataclass(frozen=True, eq=False)
class Trace:
    """A tensor that came out of a softmax, by way of dropout, casts and reshapes.

    `clean` is the same without dropout, which had the rate `rate`; `mixed` when something else than
    those came between, so that its logits say nothing about it; `piece` when the first columns are
    missing. `version` counts how often it had been written in place by then.
    """

    origin: Softmax
    tensor: Tensor
    clean: Tensor
    dropped: int = 0
    rate: float = 0.0
    mixed: bool = False
    piece: bool = False
    heads: int | None = None  # None when the module says how many there are
    version: int = 0

    @property
    def module(self) -> nn.Module:
        """The module that took the softmax."""
        return self.origin.module


@dataclass(frozen=True, eq=False)
class Pooled:
    """The shares of one query a sample, (b, k) or (b, k, 1), on their way to the values.

    `clean`, `rate` and `version` are those of `Trace`. The logits of the origin are (b, 1, 1, k).
    """

    origin: Softmax
    tensor: Tensor
    clean: Tensor
    rate: float = 0.0
    version: int = 0

    @property
    def module(self) -> nn.Module:
        """The module that took the softmax."""
        return self.origin.module


def follow(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of `func`, and a note of what became of a softmax."""
    if func in _PRODUCT:
        return _product(func, args, kwargs)
    if func in _TIMES:
        return _times(func, args, kwargs)
    before = _before_dropout(func, args, kwargs)
    result = func(*args, **kwargs)
    if not isinstance(result, Tensor) or result.ndim < 2:
        return result
    if func in _SOFTMAX:
        axis = args[1] if len(args) > 1 else kwargs.get("dim")
        _begin(args[0] if args else kwargs["input"], axis, result)
        return result
    trace = _known(args[0] if args else kwargs.get("input"))
    if before is not None:
        _note(replace(before, tensor=result, rate=_rate(args, kwargs)))
    elif trace is not None and result is not trace.tensor:
        if func in _DROPOUT:
            _note(replace(trace, tensor=result, rate=_rate(args, kwargs)))
        elif isinstance(trace, Pooled):
            _turned(trace, result)
        elif func in _SAME and result.ndim > 2:
            _same(func, args, kwargs, trace, result)
    return result


def _rate(args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    return float(args[1] if len(args) > 1 else kwargs.get("p", 0.5))


def _before_dropout(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Trace | Pooled | None:
    """What is known of weights that dropout is about to overwrite, with a copy of them; or None."""
    if func is not F.dropout or not (args[3] if len(args) > 3 else kwargs.get("inplace", False)):
        return None
    trace = _known(args[0] if args else kwargs.get("input"))
    if trace is None or trace.clean is not trace.tensor:
        return trace
    return replace(trace, clean=trace.clean.clone())


def _overwritten(trace: Trace | Pooled) -> bool:
    """Whether the weights were written in place since they were noted: not by a softmax, then."""
    return _version(trace.tensor) != trace.version


def _version(tensor: Tensor) -> int:
    """How often a tensor was written in place; inference mode does not count."""
    return 0 if tensor.is_inference() else tensor._version


def _begin(given: Tensor, axis: int | None, result: Tensor) -> None:
    """Follow a softmax over the last axis, or over the keys of one query a sample."""
    module, last = HERE.stack[-1], axis in (-1, result.ndim - 1)
    if last and result.ndim > 2:
        _note(Trace(Softmax(module, given, _factors(given)), result, result))
    elif looks_like_attention(module) and (
        (last and result.ndim == 2)
        or (axis in (1, -2) and result.ndim == 3 and result.shape[2] == 1)
    ):
        _note(Pooled(Softmax(module, _row(given)), result, result))


def _row(shares: Tensor) -> Tensor:
    """(b, 1, 1, k): one head and one query."""
    return shares.reshape(len(shares), 1, 1, -1)


def _note(trace: Trace | Pooled) -> None:
    HERE.traces[id(trace.tensor)] = replace(trace, version=_version(trace.tensor))


def _known(tensor: Any) -> Trace | Pooled | None:
    """What is known of a tensor; one that was written in place since is a mixture of its own."""
    trace = HERE.traces.get(id(tensor))
    if trace is None or trace.tensor is not tensor:
        return None
    if isinstance(trace, Trace) and not trace.mixed and _overwritten(trace):
        return replace(trace, clean=tensor, mixed=True)
    return trace


def _same(func: Any, args: Any, kwargs: Any, trace: Trace, result: Tensor) -> None:
    """The same weights in another type or shape, or without the columns of a sink."""
    dropped, piece = trace.dropped, trace.piece
    if func is Tensor.__getitem__:
        cut = trace.tensor.shape[-1] - result.shape[-1]
        if cut < 0 or result.shape[:-1] != trace.tensor.shape[:-1]:
            return
        dropped += cut
        piece |= result.storage_offset() != trace.tensor.storage_offset()
    elif result.shape[-1] != trace.tensor.shape[-1]:
        return
    whole = trace.clean is trace.tensor
    clean = result if whole else func(trace.clean, *args[1:], **kwargs)
    _note(replace(trace, tensor=result, clean=clean, dropped=dropped, piece=piece))


def _turned(trace: Pooled, result: Tensor) -> None:
    """The shares of one query in another shape; with an axis of queries they are like any other."""
    b, k = len(trace.tensor), trace.tensor.numel() // max(1, len(trace.tensor))
    if tuple(result.shape) not in ((b, k), (b, k, 1), (b, 1, k)):
        return
    clean = result
    if trace.clean is not trace.tensor:
        clean = trace.clean.reshape(result.shape).to(result.dtype)
    if tuple(result.shape) == (b, 1, k):
        _note(Trace(trace.origin, result, clean, rate=trace.rate, heads=1))
    else:
        _note(replace(trace, tensor=result, clean=clean))


def _times(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A product of single numbers, in which shares (b, k, 1) may meet values (b, k, d)."""
    for place, operand in enumerate(args if len(args) == 2 else ()):
        trace, other = _known(operand), args[1 - place]
        if not isinstance(trace, Pooled) or not isinstance(other, Tensor):
            continue
        if operand.ndim == other.ndim == 3 and other.shape[:2] == operand.shape[:2]:
            return _gather(func, args, kwargs, place, trace, other)
    return func(*args, **kwargs)


def _gather(
    func: Any, args: tuple[Any, ...], kwargs: Any, place: int, trace: Pooled, values: Tensor
) -> Any:
    """The shares of one query times the values, remembered, with the edits of whoever watches."""
    source: Projected | Written
    if _overwritten(trace):
        source = Written(_row(trace.tensor), Kind.SIGNED)
    else:
        source = Written(_row(trace.clean), Kind.PROBABILITY, trace.origin.logits)
    edits = edits_of(trace.module)
    if edits:
        source = changed(trace.module, Route.SOFTMAX, source, values, edits)
    if edits or trace.clean is trace.tensor:  # so that a gradient is known by what is kept
        args = _put(args, place, source, trace)
    output = func(*args, **kwargs)
    if not trace.origin.met:
        remember(Record(trace.module, Route.SOFTMAX, source, values, None, HERE.cross))
    trace.origin.met = True
    return output


def _put(
    args: tuple[Any, ...], place: int, source: Projected | Written, trace: Trace | Pooled
) -> tuple[Any, ...]:
    """The arguments of a product with these weights in it; what dropout has dropped stays so."""
    weights = source.weights().reshape(args[place].shape).to(args[place].dtype)
    if trace.clean is not trace.tensor:
        kept = (trace.tensor != 0) | (trace.clean == 0)
        weights = weights * kept / (1 - trace.rate)
    return (*args[:place], weights, *args[place + 1 :])


def _product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    at = 1 if func is torch.einsum else 0
    operands = args[at:]
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        args = (*args[:at], *operands[0])
        operands = args[at:]
    for place, operand in enumerate(operands):
        trace = _known(operand)
        if isinstance(trace, Pooled):
            if func is torch.einsum and len(operands) == 2 and _weighs(args[0], place):
                return _gather(func, args, kwargs, at + place, trace, operands[1 - place])
            continue
        if trace is None and place == 0:
            trace = _mixed(operand, operands)
        if trace is not None and _sums(func, args[0], place) and _whole(trace):
            values = next((one for one in operands if one is not operand), None)
            return _meet(func, args, kwargs, at + place, trace, values)
    result = func(*args, **kwargs)
    if at == 0 and len(operands) == 2 and all(isinstance(one, Tensor) for one in operands):
        HERE.product = (HERE.stack[-1], result.shape, *operands)
    return result


def _factors(logits: Tensor) -> tuple[Tensor, Tensor] | None:
    """Queries and keys, if the last product of this module has the shape of the logits."""
    if HERE.product is None:
        return None
    module, shape, query, key = HERE.product
    HERE.product = None
    same = shape[-2:] == logits.shape[-2:] and shape.numel() == logits.numel()
    if module is not HERE.stack[-1] or not same or not 2 < key.ndim == query.ndim:
        return None
    return query, key.transpose(-1, -2)


def _sums(func: Any, equation: Any, place: int) -> bool:
    """Whether a product sums over the keys, the last axis of the weights at `place`.

    Where it does not, positions are sorted into groups. And where each query has values of its own,
    experts are mixed. In neither case does anybody look at all.
    """
    if func is not torch.einsum:
        return place == 0
    if not isinstance(equation, str):
        return True
    given, _, result = equation.replace(" ", "").partition("->")
    terms = given.split(",")
    query, key = terms[place][-2:-1], terms[place][-1:]
    others = [other for at, other in enumerate(terms) if at != place]
    return key not in result and not any(query in other for other in others)


def _weighs(equation: Any, place: int) -> bool:
    """Whether a sum over two terms takes the keys of one query, `bk`, out of the values `bkd`."""
    if not isinstance(equation, str):
        return False
    given, _, result = equation.replace(" ", "").partition("->")
    terms = given.split(",")
    ours, other = terms[place], terms[1 - place]
    return len(ours) == 2 and other[:2] == ours and len(other) == 3 and ours[1] not in result


def _whole(trace: Trace) -> bool:
    """Whether this is where the weights meet their values; parts that meet apart are refused."""
    trace.origin.split |= trace.piece
    if trace.origin.split and (trace.origin.met or not trace.piece):
        raise NotImplementedError(
            f"{type(trace.module).__name__} cuts its weights into parts that meet different "
            "values, which is not one map over one row of keys; leave it out by naming the layers "
            "you need: watch(model, layers=[...])"
        )
    return not trace.piece


def _mixed(operand: Any, operands: tuple[Any, ...]) -> Trace | None:
    """A softmax of this module that met nothing yet and has just the shape of what meets now."""
    if not isinstance(operand, Tensor) or operand.ndim < 3 or len(operands) < 2:
        return None
    if not isinstance(operands[1], Tensor) or operands[1].ndim < 2:
        return None
    for trace in reversed(HERE.traces.values()):
        if isinstance(trace, Pooled):
            continue
        fits = trace.tensor.shape[-2:] == operand.shape[-2:] and trace.module is HERE.stack[-1]
        if fits and not trace.origin.met and operands[1].shape[-2] == operand.shape[-1]:
            return Trace(trace.origin, operand, operand, mixed=True)
    return None


def _meet(
    func: Any, args: tuple[Any, ...], kwargs: Any, place: int, trace: Trace, values: Tensor | None
) -> Any:
    """The product of weights and values, remembered, with the edits of whoever watches."""
    heads = trace.heads or HERE.heads or heads_of(trace.module)
    used = four(trace.clean, heads)
    if trace.mixed:
        source: Projected | Written = Written(used, Kind.SIGNED)
    else:
        kind = Kind.SUBPROBABILITY if trace.dropped else Kind.PROBABILITY
        factors = trace.origin.product or ()
        if factors and factors[1].shape[-2] != used.shape[-1]:
            factors = ()  # the first columns alone have met values so far
        source = Written(
            *(used, kind, four(trace.origin.logits, heads), trace.dropped),
            *(four(one, heads) for one in factors),
        )
    edits = edits_of(trace.module)
    if edits:
        source = changed(trace.module, Route.SOFTMAX, source, values, edits)
        args = _put(args, place, source, trace)
    output = func(*args, **kwargs)
    if not trace.origin.met:
        remember(Record(trace.module, Route.SOFTMAX, source, values, output, HERE.cross))
    trace.origin.met = True
    return output
