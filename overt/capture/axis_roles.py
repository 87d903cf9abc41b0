"""Decide which leading axes of attention are samples and which are heads.

`(b, h, q, k)` is only a convention: heads also come before the batch, folded into it, in groups, or
beside windows. The role of an axis follows from its origin (`axis_provenance`): heads were split
off the features of queries, keys or values, windows off their positions. If the origin is not
known, the convention decides; if the convention is ambiguous, an error names the module.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor, nn

from overt.capture.axes import num_heads_of
from overt.capture.axis_provenance import Axes, Dim, Factor
from overt.capture.state import STATE

SAMPLE, WINDOW, HEAD = range(3)  # larger roles are heads too, in the order of their features
Roles = tuple[tuple[int, int], ...]  # (size, role) of each factor of an axis


@dataclass(frozen=True)
class LeadingAxes:
    """The samples and heads in the leading axes of attention: the factors of each axis."""

    factors: tuple[Roles, ...]

    @property
    def plain(self) -> bool:
        """Whether the leading axes are samples, then heads."""
        kinds = [{role for _, role in axis} for axis in self.factors]
        return len(kinds) == 2 and max(kinds[0], default=0) < HEAD and kinds[1] <= {HEAD}

    @property
    def ordered(self) -> bool:
        """Whether samples come before heads, so that no permutation is needed."""
        return self._order == sorted(self._order)

    @property
    def lead(self) -> tuple[int, ...]:
        """The sizes of the leading axes."""
        return tuple(prod(size for size, _ in axis) for axis in self.factors)

    @property
    def sizes(self) -> tuple[int, int]:
        """The number of samples, times windows, and the number of heads."""
        flat = self._flat
        heads = prod(size for size, role in flat if role >= HEAD)
        return prod(size for size, _ in flat) // max(1, heads), heads

    @property
    def _flat(self) -> Roles:
        return tuple(factor for axis in self.factors for factor in axis)

    @property
    def _order(self) -> list[int]:
        flat = self._flat
        return sorted(range(len(flat)), key=lambda at: flat[at][1])

    def to_bhnm(self, tensor: Tensor) -> Tensor:
        """Return (b, h, n, m), with windows merged into the samples."""
        if self.plain and tensor.ndim == 4:
            return tensor
        lead, rest = self.lead, tuple(tensor.shape[-2:])
        tensor = tensor.expand(*lead, *rest)
        tensor = tensor.reshape(*(size for size, _ in self._flat), *rest)
        # Split into factors; permute to samples, windows, heads; merge.
        order, count = self._order, len(self._flat)
        tensor = tensor.permute(*order, count, count + 1)
        return tensor.reshape(*self.sizes, *rest)

    def from_bhnm(self, tensor: Tensor) -> Tensor:
        """Undo `to_bhnm`."""
        flat, order, rest = self._flat, self._order, tuple(tensor.shape[-2:])
        if self.plain:
            return tensor
        tensor = tensor.reshape(*(flat[at][0] for at in order), *rest)
        # The inverse permutation.
        where = sorted(range(len(order)), key=order.__getitem__)
        tensor = tensor.permute(*where, len(order), len(order) + 1)
        return tensor.reshape(*self.lead, *rest)


BATCH_HEADS = LeadingAxes(((), ()))


@dataclass(frozen=True)
class AxisEvidence:
    """The axes of an operand of attention, with its positions and features.

    `lead` maps each leading axis of the weights to an axis of the operand, None for none.
    """

    axes: Axes
    lead: tuple[int | None, ...]
    positions: frozenset[Dim]
    features: frozenset[Dim]

    def roles(self, at: int) -> Roles | None:
        """Return the roles of the factors of one leading axis; None if they cannot be inferred."""
        axis = self.lead[at]
        if axis is None:
            return None
        factors = self.axes.axes[axis]
        found = [self._role(factor) for factor in factors]
        if HEAD in found:  # grouped-query attention: keys repeated for the queries of their group
            found = [
                HEAD if factor.repeated else role
                for factor, role in zip(factors, found, strict=True)
            ]
        if any(role is None for role in found) or any(one.gathered for one in factors):
            return None
        return tuple((one.size, role or 0) for one, role in zip(factors, found, strict=True))

    def source(self, at: int, count: int, place: int) -> Factor | None:
        """Return one of the factors of a leading axis; None unless there are `count` of them."""
        axis = self.lead[at]
        factors = () if axis is None else self.axes.axes[axis]
        return factors[place] if len(factors) == count else None

    @cached_property
    def has_heads(self) -> bool:
        """Whether one of the leading axes was split off the features."""
        beside = [self.axes.axes[at] for at in self.lead if at is not None]
        return any(factor.dims <= self.features for axis in beside for factor in axis)

    def _role(self, factor: Factor) -> int | None:
        dims = factor.dims
        if dims <= self.features:
            return HEAD
        # Partly features: heads mixed with another axis.
        if dims & self.features:
            return None
        if dims & self.positions:
            return WINDOW
        # If heads are found elsewhere, what is left is samples, unless entries were repeated.
        certain = all(dim.certain for dim in dims) or (self.has_heads and not factor.repeated)
        return SAMPLE if certain else None


def axis_evidence(
    axes: Axes, positions: int, features: int, lead: Sequence[int | None]
) -> AxisEvidence:
    """Return the evidence of an operand, given its axes of positions and of features."""
    shared = axes.dims(features) & axes.dims(positions)
    known = axes.features or axes.dims(features) - shared
    if shared and not axes.features:  # image patches mix positions and features
        return AxisEvidence(axes, (None,) * len(lead), frozenset(), frozenset())
    return AxisEvidence(axes, tuple(lead), axes.dims(positions) - known, known)


def broadcast_positions(ndim: int, count: int) -> tuple[int | None, ...]:
    """Return the axis that broadcasting aligns with each of `count` leading axes."""
    first = ndim - 2 - count
    return tuple(at if at >= 0 else None for at in range(first, ndim - 2))


def infer_leading_axes(
    module: nn.Module, lead: Sequence[int], found: Sequence[AxisEvidence]
) -> LeadingAxes:
    """Infer the roles of the leading axes of a call from the first conclusive evidence.

    Raises:
        NotImplementedError: If axes could be samples or heads.
    """
    if STATE.num_heads is not None:  # nn.MultiheadAttention, which folds (b h)
        return LeadingAxes(_by_convention(module, tuple(lead), STATE.num_heads))
    # An axis of size 1 has no role; each other one takes the first evidence that explains its size.
    inferred = [
        ()
        if size == 1
        else next((r for one in found if (r := _matching_roles(one, at, size))), None)
        for at, size in enumerate(lead)
    ]
    if all(roles is None or not roles for roles in inferred):
        return LeadingAxes(_by_convention(module, tuple(lead), num_heads_of(module)))
    # Some axes are known. An unknown last axis is heads if no other is, by convention.
    heads = any(role == HEAD for roles in inferred if roles for _, role in roles)
    factors = list[Roles]()
    for at, (size, roles) in enumerate(zip(lead, inferred, strict=True)):
        if roles is None:
            last = at == len(lead) - 1 and len(lead) > 1 and not heads
            roles = ((size, HEAD if last else SAMPLE),)
        factors.append(roles)
    return LeadingAxes(_order_heads(tuple(factors), found))


def _order_heads(factors: tuple[Roles, ...], found: Sequence[AxisEvidence]) -> tuple[Roles, ...]:
    """Number heads in several axes by their features: groups may come before what they divide."""
    heads = [
        (at, place)
        for at, axis in enumerate(factors)
        for place, (_, role) in enumerate(axis)
        if role == HEAD
    ]
    for one in found if len(heads) > 1 else ():
        sources = [one.source(at, len(factors[at]), place) for at, place in heads]
        split = [source for source in sources if source is not None and source.part is None]
        # A larger stride in the projection is an outer factor: it comes first in the numbers of
        # heads.
        strides = [source.stride for source in split]
        if len(split) < len(heads) or len({source.dims for source in split}) > 1:
            continue
        if len(set(strides)) < len(strides) or strides == sorted(strides, reverse=True):
            continue
        rank = {
            where: sum(other > mine for other in strides)
            for where, mine in zip(heads, strides, strict=True)
        }
        return tuple(
            tuple(
                (size, role + rank.get((at, place), 0)) for place, (size, role) in enumerate(axis)
            )
            for at, axis in enumerate(factors)
        )
    return factors


def all_samples(lead: Sequence[int]) -> LeadingAxes:
    """Return leading axes that are all samples."""
    return LeadingAxes(tuple(((size, SAMPLE),) for size in lead))


def _matching_roles(one: AxisEvidence, at: int, size: int) -> Roles | None:
    roles = one.roles(at)
    return roles if roles and prod(each for each, _ in roles) == size else None


def _by_convention(module: nn.Module, lead: tuple[int, ...], heads: int) -> tuple[Roles, ...]:
    """Roles by convention: `b h`, or `(b h)` if the module declares its number of heads."""
    if not lead:
        return ((), ())
    if len(lead) == 1:
        folded = heads > 1 and lead[0] % heads == 0
        # `b` alone and `(b h)` are both possible.
        if folded and STATE.num_heads is None and lead[0] != heads:
            raise ambiguous_axes_error(module, lead)
        return (((lead[0] // heads, SAMPLE), (heads, HEAD)),) if folded else (((lead[0], SAMPLE),),)
    at = len(lead) - 1
    # Heads are the last leading axis, unless only another axis has the declared number of heads.
    if heads > 1 and lead[at] != heads and heads in lead:
        at = 1 if lead[1] == heads else lead.index(heads)
    return tuple(((size, HEAD if one == at else SAMPLE),) for one, size in enumerate(lead))


def ambiguous_axes_error(module: nn.Module, lead: Sequence[int]) -> NotImplementedError:
    """Return the error for axes that could be samples or heads."""
    return NotImplementedError(
        f"cannot tell samples from heads in the leading axes {tuple(lead)} of "
        f"{type(module).__name__}; use scaled_dot_product_attention on (b, h, n, d), or leave this "
        "module out by naming the layers you need: watch(model, layers=[...])"
    )


def broadcast_lead(*tensors: Tensor) -> tuple[int, ...]:
    """Return the broadcast leading shape of these tensors."""
    return tuple(torch.broadcast_shapes(*(one.shape[:-2] for one in tensors)))
