"""Track the origin of tensor axes: features, heads, positions or samples.

While a model is watched, each operation that moves axes (view, permute, slice, copy) is recorded as
an `OpNode` beside its result; nothing is computed. Axes are inferred only when attention weights
are multiplied with values, by walking the nodes back to the projection: an axis split off the
features of a projection is heads, an axis split off its positions is windows.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overt.capture._torch_compat import is_tracing
from overt.capture.state import STATE


@dataclass(frozen=True, eq=False)
class Dim:
    """A source axis: an axis as the operation that created it made it.

    `certain` is whether it cannot be heads. `attended` is set on the rows of a softmax and of an
    attention output.
    """

    size: int
    certain: bool = False
    attended: Any = None


@dataclass(frozen=True)
class Factor:
    """A factor of an axis: its size, and the source axes it comes from.

    `part` is (start, step) if it is a slice; `gathered` is whether an index tensor selected its
    entries; `repeated` is whether its entries are copies of each other; `moved` is whether they
    were rolled or flipped; `stride` is the distance of its entries in the source axis.
    """

    dims: frozenset[Dim]
    size: int
    part: tuple[int, int] | None = None
    gathered: bool = False
    repeated: bool = False
    moved: bool = False
    stride: int = 1


Axis = tuple[Factor, ...]


@dataclass(frozen=True)
class Axes:
    """The axes of a tensor as products of factors, and the source axes that are features."""

    axes: tuple[Axis, ...]
    features: frozenset[Dim] = frozenset()

    def dims(self, axis: int) -> frozenset[Dim]:
        """Return the source axes of one axis."""
        return _dims_of(self.axes[axis])

    def all_features(self, axis: int) -> bool:
        """Return whether all source axes of an axis are features."""
        dims = self.dims(axis)
        return bool(dims) and dims <= self.features


def _dims_of(axis: Axis) -> frozenset[Dim]:
    return frozenset[Dim]().union(*(factor.dims for factor in axis))


class OpNode:
    """How a tensor was made: the function, its arguments, and the nodes of its inputs."""

    __slots__ = ("args", "axes", "func", "parameter", "parents", "ref", "result", "shape")

    def __init__(
        self,
        tensor: Tensor,
        func: Any = None,
        args: Any = None,
        parents: Sequence["OpNode"] = (),
        result: int | None = None,
    ) -> None:
        # A weak reference, because nodes must not keep activations alive; parents are nodes as
        # well.
        self.ref, self.shape = weakref.ref(tensor), tuple(tensor.shape)
        # A function of parameters alone, such as a reshaped weight, counts as a parameter.
        learned: bool = bool(parents) and all(one.parameter for one in parents)
        self.parameter: bool = learned or isinstance(tensor, nn.Parameter)
        self.func, self.args, self.parents, self.result = func, args, parents, result
        self.axes: Axes | None = None


# --- recording operations


def record_op(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """Record how the result of `func` was made, if its axes can be inferred from that."""
    if is_tracing():  # sizes are tensors there
        return
    tensors = _tensors_in((*args, *kwargs.values()))
    # In-place functions return their argument, whose axes stay the same.
    if not tensors or any(result is one or one.is_nested for one in tensors):
        return
    if func in _ELEMENTWISE and not any(_lookup(one) for one in tensors):
        return  # elementwise operations on untracked tensors carry no information
    parents = [node_of(one) for one in tensors]
    given = _without_tensors(args), {name: _without_tensors(one) for name, one in kwargs.items()}
    if isinstance(result, Tensor):
        STATE.op_nodes[id(result)] = OpNode(result, func, given, parents)
    elif isinstance(result, tuple | list):
        for at, one in enumerate(result):
            if isinstance(one, Tensor):
                STATE.op_nodes[id(one)] = OpNode(one, func, given, parents, at)


def set_axes(tensor: Tensor, axes: Axes) -> None:
    """Set the axes of a tensor."""
    node = OpNode(tensor)
    node.axes = axes
    STATE.op_nodes[id(tensor)] = node


def node_of(tensor: Tensor) -> OpNode:
    """Return the node of a tensor, a new root node if it has none."""
    found = _lookup(tensor)
    if found is None:
        found = STATE.op_nodes[id(tensor)] = OpNode(tensor)
    return found


def _lookup(tensor: Tensor) -> OpNode | None:
    node: OpNode | None = STATE.op_nodes.get(id(tensor))
    return node if node is not None and node.ref() is tensor else None


def _tensors_in(given: Iterable[Any]) -> list[Tensor]:
    found = list[Tensor]()
    for one in given:
        if isinstance(one, Tensor):
            found.append(one)
        elif isinstance(one, tuple | list):
            found += [each for each in one if isinstance(each, Tensor)]
    return found


@dataclass(frozen=True)
class _TensorArg:
    """Stand-in for a tensor argument, which must not be kept alive."""

    shape: tuple[int, ...]
    boolean: bool


def _without_tensors(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _TensorArg(tuple(value.shape), value.dtype == torch.bool)
    if type(value) in (tuple, list):
        return type(value)(_without_tensors(one) for one in value)
    return value


# --- inferring axes


def axes_of(tensor: Tensor) -> Axes:
    """Return the axes of a tensor, as far as they can be inferred."""
    return infer_axes(node_of(tensor))


def unknown_axes(shape: Sequence[int], certain: bool = False) -> Axes:
    """Return axes of unknown origin with these sizes."""
    return Axes(tuple(new_axis(size, certain) for size in shape))


def new_axis(size: int, certain: bool = False) -> Axis:
    """Return an axis with a source of its own; an axis of size 1 has no factors."""
    return () if size == 1 else (Factor(frozenset({Dim(size, certain)}), size),)


def infer_axes(node: OpNode) -> Axes:
    """Infer the axes of a node from its parents, without recursion: graphs may be deep."""
    # Depth first: a node is inferred once all of its parents are.
    waiting = [node]
    while waiting:
        one = waiting[-1]
        missing = [] if _is_root(one) else [each for each in one.parents if each.axes is None]
        if one.axes is None and missing:
            waiting += missing
            continue
        if one.axes is None:
            one.axes = _infer_from_parents(one)
        waiting.pop()
    assert node.axes is not None
    return node.axes


def _is_root(node: OpNode) -> bool:
    """Whether axes start at this node: a projection of (b, n, d) does not depend on its parents.

    Unless the axes of its input were just moved: heads may be folded into the batch.
    """
    if node.func is not F.linear or len(node.shape) > 3:
        return node.func is None
    return _HANDLERS.get(node.parents[0].func) not in (
        _reshape_axes,
        _strided_view_axes,
        _transpose_axes,
    )


def _infer_from_parents(node: OpNode) -> Axes:
    if node.func is None:
        return unknown_axes(node.shape, node.parameter)
    parents = [one.axes or unknown_axes(one.shape) for one in node.parents]
    try:
        found = _HANDLERS[node.func](node, parents)
    except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError):
        found = None  # arguments that the handler does not support
    if found is None or tuple(axis_length(axis) for axis in found.axes) != node.shape:
        return unknown_axes(node.shape)
    return found


def axis_length(axis: Axis) -> int:
    """Return the size of an axis."""
    return prod(factor.size for factor in axis)


# --- rules for each kind of operation

_Handler = Callable[[OpNode, list[Axes]], Axes | None]


def _elementwise_axes(node: OpNode, parents: list[Axes]) -> Axes | None:
    """Elementwise: take each axis from the first operand that has it, tracked operands first."""
    ordered = sorted(parents, key=lambda one: not one.features)
    axes = list[Axis]()
    for back, size in enumerate(reversed(node.shape), start=1):
        given = [one.axes[-back] for one in ordered if len(one.axes) >= back]
        axes.append(next((axis for axis in given if axis_length(axis) == size > 1), new_axis(size)))
    features = frozenset[Dim]().union(*(one.features for one in parents))
    return Axes(tuple(reversed(axes)), features)


def _reshape_axes(node: OpNode, parents: list[Axes]) -> Axes | None:
    """View and reshape: the same factors in the same order, regrouped."""
    waiting = [factor for axis in parents[0].axes for factor in axis]
    axes = list[Axis]()
    for size in node.shape:
        mine, needed = list[Factor](), size
        while needed > 1:
            factor = waiting.pop(0)
            # The outer part of the factor fills this axis, the inner part starts the next one.
            if factor.size > needed:
                if factor.size % needed:
                    return None
                rest = replace(factor, size=factor.size // needed)
                waiting.insert(0, rest)
                factor = replace(factor, size=needed, stride=factor.stride * rest.size)
            elif factor.size == 0 or needed % factor.size:
                return None
            mine.append(factor)
            needed //= factor.size
        axes.append(tuple(mine))
    return Axes(tuple(axes), parents[0].features)


def _strided_view_axes(node: OpNode, parents: list[Axes]) -> Axes | None:
    """Permutations and slices: run them on a meta tensor and read the axes off its strides."""
    given = parents[0]
    sizes = [axis_length(axis) for axis in given.axes]
    # Larger than all steps within the axes behind it, so a stride of the result names its axis and
    # its step.
    strides = [prod(size + 1 for size in sizes[at + 1 :]) for at in range(len(sizes))]
    dummy = torch.empty_strided(sizes, strides, device="meta")
    made = node.func(dummy, *node.args[0][1:], **node.args[1])
    made = made if node.result is None else made[node.result]
    offset, starts = made.storage_offset(), list[int]()
    # Likewise the offset is a sum of starts, read like the digits of a number.
    for stride in strides:
        starts.append(offset // stride)
        offset %= stride
    # The result is read axis by axis: stride 0 is `expand`; an axis of size 1 may be new, and then
    # has a stride of no axis, or that of another one.
    axes, wide = (
        list[Axis](),
        {one for one, size in zip(made.stride(), made.shape, strict=True) if size > 1},
    )
    for size, stride in zip(made.shape, made.stride(), strict=True):
        if stride == 0 and size > 1:
            axes.append((Factor(frozenset({Dim(size)}), size, repeated=True),))
            continue
        at = next(
            (at for at, one in enumerate(strides) if one <= stride and not stride % one), None
        )
        new = size == 1 and (stride != strides[at or 0] or stride in wide)
        if at is None or new:
            axes.append(())
            continue
        axes.append(_slice_axis(given.axes[at], size, starts[at], stride // strides[at]))
    return Axes(tuple(axes), given.features)


def _transpose_axes(node: OpNode, parents: list[Axes]) -> Axes | None:
    """Transpose: a fast path for the most frequent permutation."""
    args, kwargs = node.args
    if kwargs:
        return _strided_view_axes(node, parents)
    axes = list(parents[0].axes)
    one, other = args[1], args[2]
    axes[one], axes[other] = axes[other], axes[one]
    return Axes(tuple(axes), parents[0].features)


def _slice_axis(axis: Axis, size: int, start: int, step: int) -> Axis:
    if size == axis_length(axis) and start == 0 and step == 1:
        return axis
    gathered = any(factor.gathered for factor in axis)
    moved = any(factor.moved for factor in axis)
    # A slice of a slice, in terms of the source.
    if len(axis) == 1 and axis[0].part is not None:
        before, each = axis[0].part
        start, step = before + each * start, each * step
    stride = axis[-1].stride if axis else 1
    return (Factor(_dims_of(axis), size, (start, step), gathered, moved=moved, stride=stride),)


def _index_axes(node: OpNode, parents: list[Axes]) -> Axes | None:
    """`tensor[...]`: slices, or entries selected by index tensors and lists."""
    index = node.args[0][1]
    index = index if isinstance(index, tuple) else (index,)
    if not any(isinstance(one, _TensorArg | list) for one in index):
        return _strided_view_axes(node, parents)
    # Neighbouring index tensors: the selected entries take the place of the first.
    given, at, axes = parents[0], 0, list[Axis]()
    taken, where = frozenset[Dim](), -1
    named = sum(one is not None and one is not Ellipsis for one in index)
    for one in index:
        if one is Ellipsis:
            count = len(given.axes) - named
            axes += given.axes[at : at + count]
            at += count
        elif one is None:
            axes.append(())
        elif isinstance(one, slice):
            length = axis_length(given.axes[at])
            start, _, step = one.indices(length)
            axes.append(_slice_axis(given.axes[at], len(range(*one.indices(length))), start, step))
            at += 1
        else:
            where = len(axes) if where < 0 else where
            taken |= given.dims(at)
            at += 1
    axes += given.axes[at:]
    count = len(node.shape) - len(axes)
    chosen = [
        () if size == 1 else (Factor(taken, size, gathered=True),)
        for size in node.shape[where : where + count]
    ]
    return Axes((*axes[:where], *chosen, *axes[where:]), given.features)


def _move_axes(node: OpNode, parents: list[Axes]) -> Axes | None:
    """`roll` and `flip`: the same entries in another order."""
    args, kwargs = node.args
    given, flips = parents[0], "flip" in node.func.__name__
    places = kwargs.get("dims", args[1:] if flips else args[2] if len(args) > 2 else ())
    places = places[0] if len(places := _as_tuple(places)) == 1 else places
    axes = list(given.axes)
    for at in _as_tuple(places):
        axes[at] = tuple(replace(one, moved=True) for one in axes[at])
    return Axes(tuple(axes), given.features)


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _gather_axes(node: OpNode, parents: list[Axes]) -> Axes | None:
    """`gather`, `index_select`, `take_along_dim`: an index tensor selects along one axis."""
    args, kwargs = node.args
    numbers = [one for one in args[1:] if isinstance(one, int)]
    dim = kwargs["dim"] if "dim" in kwargs else numbers[0]
    given, axes = parents[0], list(parents[0].axes)
    axes[dim] = (Factor(given.dims(dim), node.shape[dim], gathered=True),)
    return Axes(tuple(axes), given.features)


def _cat_axes(node: OpNode, parents: list[Axes]) -> Axes | None:
    """`cat`: slices of one axis form that axis again; other tensors form a new axis."""
    args, kwargs = node.args
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0) % len(node.shape)
    parents = [one for one in parents if len(one.axes) == len(node.shape)]  # empty ones aside
    base = max(parents, key=lambda one: bool(one.features))
    axes, pieces = list(base.axes), [one.axes[dim] for one in parents]
    dims = [_dims_of(one) for one in pieces]
    features = frozenset[Dim]().union(*(one.features for one in parents))
    # Pieces of different lengths have no factor in common.
    if len({axis_length(one) for one in pieces}) > 1 or len(pieces) == 1:
        axes[dim] = (Factor(frozenset[Dim]().union(*dims), node.shape[dim]),)
        return Axes(tuple(axes), features)
    # Equal pieces: their number is a new outer factor, or the axis that they were sliced from.
    source = _sliced_dims(parents, dim)
    outer = Factor(source or frozenset({Dim(len(pieces))}), len(pieces))
    if not source and dim == 0 and _separate_projections(parents):
        features |= outer.dims
    axes[dim] = (outer, *(replace(one, part=None) for one in base.axes[dim]))
    return Axes(tuple(axes), features)


def _sliced_dims(parents: list[Axes], dim: int) -> frozenset[Dim]:
    """Return the source axes that the tensors are consecutive slices of; empty if they are not."""
    for axis in range(len(parents[0].axes)):
        parts = [one.axes[axis] for one in parents]
        sliced = all(len(one) == 1 and one[0].part is not None for one in parts)
        alike = sliced and len({one[0].dims for one in parts}) == 1
        if alike and len({one[0].part for one in parts}) == len(parts):
            return parts[0][0].dims
    return frozenset()


def _separate_projections(parents: list[Axes]) -> bool:
    """Return whether each tensor has its own projection, as with a list of heads."""
    seen = [one.features for one in parents]
    return all(seen) and not frozenset.intersection(*seen)


def _stack_axes(node: OpNode, parents: list[Axes]) -> Axes | None:
    """`stack`: a new axis; it is heads if each tensor has its own projection."""
    args, kwargs = node.args
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0) % len(node.shape)
    base = max(parents, key=lambda one: bool(one.features))
    source = _sliced_dims(parents, dim)
    new = Factor(source or frozenset({Dim(len(parents))}), len(parents))
    features = frozenset[Dim]().union(*(one.features for one in parents))
    # Not among the last two axes, which are positions and features.
    if not source and dim < len(node.shape) - 2 and _separate_projections(parents):
        features |= new.dims
    axes = [tuple(replace(one, part=None) for one in axis) for axis in base.axes]
    axes.insert(dim, (new,) if len(parents) > 1 else ())
    return Axes(tuple(axes), features)


def _repeat_axes(node: OpNode, parents: list[Axes]) -> Axes | None:
    """`repeat` and `repeat_interleave`: a repeated factor before an axis, or behind it."""
    behind = "interleave" in node.func.__name__
    axes = [()] * (len(node.shape) - len(parents[0].axes)) + list(parents[0].axes)
    for at, size in enumerate(node.shape):
        times = size // max(1, axis_length(axes[at]))
        if times > 1:
            new = (Factor(frozenset({Dim(times)}), times, repeated=True),)
            axes[at] = (*axes[at], *new) if behind else (*new, *axes[at])
    return Axes(tuple(axes), parents[0].features)


def _linear_axes(node: OpNode, parents: list[Axes]) -> Axes | None:
    """Projection: the last axis is features; heads split off before stay heads."""
    last = new_axis(node.shape[-1], certain=True)
    kept = _project_axes(parents[0], -1) if not _is_root(node) else None
    if kept is None:
        return Axes(
            (*unknown_axes(node.shape[:-1], len(node.shape) < 4).axes, last), _dims_of(last)
        )
    return Axes((*kept.axes[:-1], last), kept.features | _dims_of(last))


def _conv_axes(node: OpNode, parents: list[Axes]) -> Axes | None:
    """Convolution: features follow the samples, which may contain heads."""
    kept, axes = _project_axes(parents[0], 1), unknown_axes(node.shape, certain=True)
    if kept is None:
        return Axes(axes.axes, axes.dims(1))
    return Axes((kept.axes[0], *axes.axes[1:]), kept.features | axes.dims(1))


def _project_axes(given: Axes, summed: int) -> Axes | None:
    """The axes after projecting one of them; None unless heads or windows were split off before.

    They get new source axes: the output of a projection is not an attention output.
    """
    before = given.features | given.dims(summed)
    others = [axis for at, axis in enumerate(given.axes) if at != summed % len(given.axes)]
    every = [dim for axis in others for dim in _dims_of(axis)]
    heads = [dim for dim in every if dim in before]
    if not heads and len(every) == len(set(every)) and len(given.axes) < 4:
        return None
    new = {dim: Dim(dim.size, dim.certain) for dim in every}
    axes = tuple(
        tuple(
            replace(one, dims=frozenset(new.get(dim, dim) for dim in one.dims), moved=False)
            for one in axis
        )
        for axis in given.axes
    )
    return Axes(axes, frozenset(new[dim] for dim in heads))


def _norm_axes(node: OpNode, parents: list[Axes]) -> Axes | None:
    """Normalization: the last axis is features, unless features are known already."""
    if parents[0].features:
        return replace(parents[0])
    return Axes(parents[0].axes, parents[0].dims(-1))


def _channel_norm_axes(node: OpNode, parents: list[Axes]) -> Axes | None:
    return parents[0] if parents[0].features else Axes(parents[0].axes, parents[0].dims(1))


def _matmul_axes(node: OpNode, parents: list[Axes]) -> Axes | None:
    """Matrix product: rows of the left operand, columns of the right one."""
    places = (1, 2) if node.func in _BADDBMM else (0, 1)
    left, right = (parents[at] for at in places)
    learned = [node.parents[at].parameter for at in places]
    if len(left.axes) < 2 or len(right.axes) < 2:
        return None
    # A product with a matrix of parameters is a projection.
    if learned[1] and not learned[0] and len(right.axes) == 2:
        return _linear_axes(node, parents)
    features = _product_features(left.features | right.features, left.dims(-1) | right.dims(-2))
    axes = list[Axis]()
    for back, size in enumerate(reversed(node.shape[:-2]), start=3):
        given = [
            (one.axes[-back], its)
            for one, its in ((left, learned[0]), (right, learned[1]))
            if len(one.axes) >= back and axis_length(one.axes[-back]) == size > 1
        ]
        axes.append(given[0][0] if given else new_axis(size))
        if given and given[0][1]:
            features |= _dims_of(given[0][0])
    for one, axis, its in ((left, -2, learned[0]), (right, -1, learned[1])):
        features |= one.dims(axis) if its else frozenset()
    return Axes((*reversed(axes), left.axes[-2], right.axes[-1]), features)


def _product_features(features: frozenset[Dim], summed: frozenset[Dim]) -> frozenset[Dim]:
    """The features of a product: if none are known, the summed axes, unless they are keys."""
    if features or any(dim.attended for dim in summed):
        return features
    return summed


def _einsum_axes(node: OpNode, parents: list[Axes]) -> Axes | None:
    """Einsum: one axis per letter of the output."""
    given, _, result = node.args[0][0].replace(" ", "").partition("->")
    terms = given.split(",")
    features = frozenset[Dim]().union(*(one.features for one in parents))
    found, summed = dict[str, Axis](), frozenset[Dim]()
    for term, one, node_ in zip(terms, parents, node.parents, strict=True):
        for letter, axis in zip(term, one.axes, strict=True):
            if letter not in result:
                summed |= _dims_of(axis)
            elif letter not in found or not found[letter]:
                found[letter] = axis
                features |= _dims_of(axis) if node_.parameter else frozenset()
    features = _product_features(features, summed)
    return Axes(tuple(found[letter] for letter in result), features)


# --- tracked operations


def _functions_named(names: str) -> set[Any]:
    """Return the functions of these names in `Tensor`, `torch` and `torch.nn.functional`."""
    spaces = (Tensor, torch, F)
    return {
        getattr(space, name) for name in names.split() for space in spaces if hasattr(space, name)
    }


_ELEMENTWISE = _functions_named(
    "to type_as type float half bfloat16 double contiguous clone detach add sub subtract mul "
    "multiply div divide true_divide neg pow masked_fill where dropout relu elu gelu silu sigmoid "
    "tanh exp softmax normalize __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ "
    "__neg__ __pow__ leaky_relu softplus clamp dropout_ cumsum requires_grad_"
)
_BADDBMM = _functions_named("baddbmm")
_HANDLERS: dict[Any, _Handler] = dict.fromkeys(_ELEMENTWISE, _elementwise_axes)
for _names, _handler in (
    ("view reshape flatten unflatten ravel squeeze unsqueeze", _reshape_axes),
    ("transpose swapaxes swapdims", _transpose_axes),
    ("permute movedim moveaxis t adjoint", _strided_view_axes),
    ("narrow select chunk split tensor_split unbind expand unfold", _strided_view_axes),
    ("__getitem__", _index_axes),
    ("gather index_select take_along_dim", _gather_axes),
    ("roll flip", _move_axes),
    ("cat concat concatenate", _cat_axes),
    ("stack", _stack_axes),
    ("repeat repeat_interleave", _repeat_axes),
    ("linear embedding", _linear_axes),
    ("conv1d conv2d conv3d", _conv_axes),
    ("layer_norm rms_norm", _norm_axes),
    ("group_norm batch_norm instance_norm", _channel_norm_axes),
    ("matmul bmm __matmul__ baddbmm", _matmul_axes),
    ("einsum", _einsum_axes),
):
    _HANDLERS.update(dict.fromkeys(_functions_named(_names), _handler))
for _property in ("mT", "T", "mH", "H"):
    _HANDLERS[getattr(Tensor, _property).__get__] = _strided_view_axes
_HANDLERS.pop(F.unfold, None)  # extracts image patches, unlike `Tensor.unfold`
TRACKED_FUNCTIONS = frozenset(_HANDLERS)
