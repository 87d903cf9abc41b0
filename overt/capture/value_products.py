"""Bring the weights of a product with values to (b, h, q, k), and back."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor, nn

from overt.capture import axis_roles, validation
from overt.capture.axis_provenance import Axes, Axis, axes_of, infer_axes, unknown_axes
from overt.capture.axis_roles import AxisEvidence, LeadingAxes
from overt.capture.contractions import Contraction


@dataclass(frozen=True, eq=False)
class ValueProduct:
    """How the operands of a product of weights with values map to (b, h, q, k).

    Attributes:
        split: Shape of the weights with rows and heads in separate axes.
        order: Axes of `split`: leading axes, rows, keys.
        axes: Samples and heads in the leading axes.
        softmax_axes: Axes of the softmax in the same order, None if not known.
        reshaped: Whether only leading axes of the softmax were regrouped.
        dropped: Number of last columns of the softmax that the product leaves out.
        gathered: Whether keys were selected in another way.
        beside: Axis of the values for each leading axis, None for none.
        value_axes: Summed and remaining axes of the values.
        merged: Whether rows and heads share an axis of the weights.
    """

    split: tuple[int, ...]
    order: tuple[int, ...]
    axes: LeadingAxes
    softmax_axes: tuple[int, ...] | None
    reshaped: bool
    dropped: int
    gathered: bool
    beside: tuple[int | None, ...]
    value_axes: tuple[int, ...]
    merged: bool = False

    @classmethod
    def from_contraction(
        cls, module: nn.Module, weights: Tensor, values: Tensor, found: Contraction, origin: Any
    ) -> "ValueProduct":
        """Infer the mapping of a contraction; raise if the weights are not a supported map."""
        logits = _logits_axes(origin)
        axes, split, lead, row, keys = _split_rows(module, axes_of(weights), found, origin, logits)
        # Axes that `_split_rows` has moved from the rows to the leading axes are heads that the
        # values do not have.
        beside = (*found.beside, *(None,) * (len(lead) - len(found.beside)))
        # By origin in the softmax: leading axes, then rows, then keys.
        sources = [_softmax_axis(axes[at], origin) for at in (*lead, row, keys)]
        value_axes = axes_of(values)
        _check_product(module, axes[row], logits, sources, value_axes, found, values)
        if any(one.part is not None for at in lead for one in axes[at]):
            validation.raise_unsupported(
                module, "multiplies slices of its weights, such as single heads, with values"
            )
        # Weights that samples or heads share have size 1 where the values have more.
        sizes = [
            max(split[at], 1 if by is None else values.shape[by])
            for at, by in zip(lead, beside, strict=True)
        ]
        # Evidence on the roles of the leading axes: the values first, then the scores.
        evidence = []
        if len(found.free) == 1:
            evidence.append(
                axis_roles.axis_evidence(value_axes, found.summed, found.free[0], beside)
            )
        evidence.append(_logits_evidence(logits, sources, [axes[at] for at in lead], origin))
        leading = (
            axis_roles.all_samples(sizes)
            if origin.single_query
            else axis_roles.infer_leading_axes(module, sizes, evidence)
        )
        softmax_axes, reshaped = _match_softmax_axes(sources, axes, (*lead, row, keys), origin)
        gathered = any(one.gathered or (one.part or (0, 1))[1] != 1 for one in axes[keys])
        at = sources[-2]
        # Rows that are features: a later product that sums over them is linear attention.
        origin.channels |= at is not None and logits.all_features(at)
        return cls(
            split,
            (*lead, row, keys),
            leading,
            softmax_axes,
            reshaped,
            origin.dims[-1].size - split[keys],
            gathered,
            beside,
            (found.summed, *found.free),
            len(split) != weights.ndim,
        )

    @property
    def plain(self) -> bool:
        """Whether the weights are (b, h, q, k) already."""
        straight = len(self.split) == 4 and self.order == (0, 1, 2, 3)
        whole = self.axes.plain and straight and not self.merged
        return whole and self.split[:2] == self.axes.lead

    @property
    def ordered(self) -> bool:
        """Whether no axes of the weights need to be permuted."""
        plain = self.order == tuple(range(len(self.order)))
        return plain and self.axes.ordered

    def to_bhqk(self, weights: Tensor) -> Tensor:
        """Return weights as (b, h, q, k)."""
        if self.plain:  # the same tensor object, so that its gradient is found
            return weights
        weights = self.axes.to_bhnm(weights.reshape(self.split).permute(self.order))
        return weights.expand(self.axes.sizes[0], -1, -1, -1)

    def from_bhqk(self, weights: Tensor) -> Tensor:
        """Undo `to_bhqk`."""
        weights = self.axes.from_bhnm(weights)
        rest = tuple(weights.shape[-2:])
        weights = weights.reshape(*self.axes.lead, *rest)
        # The inverse permutation.
        where = sorted(range(len(self.order)), key=self.order.__getitem__)
        return weights.permute(where)

    def logits_to_bhqk(self, logits: Tensor) -> Tensor | None:
        """Return logits as (b, h, q, k); None if their axes are not known."""
        if self.reshaped:
            logits = logits.reshape(*self.axes.lead, *logits.shape[-2:])
        elif self.softmax_axes is None:
            return None
        else:
            logits = logits.permute(self.softmax_axes)
        return self.axes.to_bhnm(logits).expand(self.axes.sizes[0], -1, -1, -1)

    def factor_to_bhnd(self, one: Tensor) -> Tensor | None:
        """Return queries or keys as (b, h, n, d); None if their axes differ from the weights."""
        straight = self.reshaped or self.softmax_axes == tuple(range(len(self.softmax_axes or ())))
        if not straight or (self.reshaped and one.numel() % prod(self.axes.lead)):
            return None
        if self.reshaped:
            return self.axes.to_bhnm(one.reshape(*self.axes.lead, *one.shape[-2:]))
        if one.ndim != len(self.axes.lead) + 2:
            return None
        one, samples = self.axes.to_bhnm(one), self.axes.sizes[0]
        return one.expand(samples, -1, -1, -1) if len(one) == 1 < samples else one

    def values_to_bhkd(self, values: Tensor) -> Tensor:
        """Return values as (b, h, k, d); unchanged if they have several axes of features."""
        if len(self.value_axes) != 2:
            return values
        # Axes in the order of the weights: leading axes, keys, features.
        count = sum(at is not None for at in self.beside)
        moved = values.permute(
            *(at for at in range(values.ndim) if at not in (*self.beside, *self.value_axes)),
            *(at for at in self.beside if at is not None),
            *self.value_axes,
        )
        if moved.ndim - 2 != count:
            return values
        for at, by in enumerate(self.beside):
            moved = moved.unsqueeze(at) if by is None else moved
        return self.axes.to_bhnm(moved)


def _logits_axes(origin: Any) -> Axes:
    """Return the axes of the logits."""
    sizes = [dim.size for dim in origin.dims]
    if origin.logits_node is None or list(origin.logits_node.shape) != sizes:
        return unknown_axes(sizes)
    return infer_axes(origin.logits_node)


def _split_rows(
    module: nn.Module, axes: Axes, found: Contraction, origin: Any, logits: Axes
) -> tuple[list[Axis], tuple[int, ...], tuple[int, ...], int, int]:
    """Split rows from heads that the values do not have."""
    # A row axis of several factors, such as (heads, rows) merged by a view, is split into them.
    split, places = list[Axis](), list[list[int]]()
    for at, axis in enumerate(axes.axes):
        parts = [(one,) for one in axis] if at in found.rows and len(axis) > 1 else [axis]
        places.append(list(range(len(split), len(split) + len(parts))))
        split += parts
    rows = [one for at in found.rows for one in places[at]]
    heads = [at for at in rows if _is_head(split[at], origin, logits)]
    # What is not heads is the query axis. If several are left, prefer the row axis of the softmax,
    # then the only axis that is longer than 1.
    left = [at for at in rows if at not in heads] or rows[-1:]
    if len(left) > 1:
        second = [at for at in left if _softmax_axis(split[at], origin) == len(origin.dims) - 2]
        long = [at for at in left if split[at]]
        left = second if len(second) == 1 else long if len(long) == 1 else left
    if len(left) != 1:
        validation.raise_unsupported(module, "has several query axes that may be heads")
    lead = [places[at][0] for at in found.lead] + [at for at in rows if at != left[0]]
    sizes = tuple(prod(one.size for one in axis) for axis in split)
    return split, sizes, tuple(lead), left[0], places[found.keys][0]


def _is_head(axis: Axis, origin: Any, logits: Axes) -> bool:
    at = _softmax_axis(axis, origin)
    return at is not None and logits.all_features(at)


def _softmax_axis(axis: Axis, origin: Any) -> int | None:
    """Return the axis of the softmax that an axis comes from; None if it is not exactly one."""
    dims = {dim for factor in axis for dim in factor.dims}
    at = [place for place, dim in enumerate(origin.dims) if dim in dims]
    return at[0] if len(dims) == len(at) == 1 else None


def _check_product(
    module: nn.Module,
    row: Axis,
    logits: Axes,
    sources: Sequence[int | None],
    carried: Axes,
    found: Contraction,
    values: Tensor,
) -> None:
    if len(found.free) == 1:
        validation.check_values(module, values, found.summed, found.free[0])
    at, to = sources[-2], sources[-1]
    rows = logits.axes[at] if at is not None else ()
    keys = logits.axes[to] if to is not None else ()
    if any((one.part is not None and one.part[0] > 0) or one.gathered for one in row):
        validation.raise_unsupported(module, "multiplies only some rows of its weights with values")
    validation.check_rows(module, rows, keys, logits.features)
    validation.check_positions(module, rows, keys, carried.axes[found.summed])


def _logits_evidence(
    logits: Axes, sources: Sequence[int | None], lead: Sequence[Axis], origin: Any
) -> AxisEvidence:
    """Return evidence of queries and keys on the leading axes."""
    ends = [logits.dims(at) for at in sources[-2:] if at is not None]
    positions = frozenset[Any]().union(*ends) - logits.features
    joined = [_logits_factors(axis, logits, origin) for axis in lead]
    beside = tuple(None if one is None else at for at, one in enumerate(joined))
    axes = Axes(tuple(one or () for one in joined), logits.features)
    return AxisEvidence(axes, beside, positions, logits.features)


def _logits_factors(axis: Axis, logits: Axes, origin: Any) -> Axis | None:
    """Return the factors of the logits that a leading axis consists of, in order."""
    at = _softmax_axis(axis, origin)
    if at is not None and prod(one.size for one in axis) == origin.dims[at].size:
        return logits.axes[at]
    found = list[Any]()
    for one in axis:
        at = _softmax_axis((one,), origin)
        if at is None or one.size != origin.dims[at].size:
            return None
        found += logits.axes[at]
    return tuple(found)


def _match_softmax_axes(
    sources: Sequence[int | None], axes: Sequence[Axis], order: Sequence[int], origin: Any
) -> tuple[tuple[int, ...] | None, bool]:
    """The axis of the softmax for each axis, and whether only leading axes were regrouped."""
    # Case 1: every axis is one whole axis of the softmax, in any order; only the keys may be a
    # slice.
    known = [at for at in sources if at is not None]
    whole = all(
        not axes[at]
        or (len(axes[at]) == 1 and (place == len(order) - 1 or _is_whole_axis(axes[at], origin)))
        for place, at in enumerate(order)
    )
    # Axes of size 1 have no source; they are matched with those of the softmax in order.
    left = [at for at, dim in enumerate(origin.dims) if at not in known and dim.size == 1]
    empty = sum(not axes[at] for at in order)
    whole &= len(known) == len(set(known)) and len(left) == empty
    if whole and len(known) + empty == len(order) == len(origin.dims):
        waiting = iter(left)
        return tuple(next(waiting) if at is None else at for at in sources), False
    # Case 2: a view has regrouped the leading axes and left rows and keys as they were.
    dims = [dim for at in order for one in axes[at] for dim in one.dims]
    places = [origin.dims.index(dim) for dim in dims if dim in origin.dims]
    last = tuple(order[-2:]) == (len(order) - 2, len(order) - 1)
    straight = places == sorted(places) and len(places) == len(dims) and last
    lead = prod(dim.size for dim in origin.dims[:-2])
    rows = prod(one.size for one in axes[order[-2]])
    same = prod(one.size for at in order[:-2] for one in axes[at]) == lead
    return None, straight and same and rows == origin.dims[-2].size


def _is_whole_axis(axis: Axis, origin: Any) -> bool:
    at = _softmax_axis(axis, origin)
    return at is not None and axis[0].size == origin.dims[at].size and axis[0].part is None
