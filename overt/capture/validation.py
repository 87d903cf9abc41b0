"""Raise for attention that is not a map from positions to positions, naming its module."""

from typing import NoReturn

from torch import Tensor, nn

from overt.capture.axis_provenance import Axes, Axis, Dim, axes_of, new_axis, set_axes
from overt.capture.state import STATE

_INSTEAD = "leave it out by naming the layers you need: watch(model, layers=[...])"


def raise_unsupported(module: nn.Module, what: str) -> NoReturn:
    """Raise NotImplementedError that names the module and what it does."""
    raise NotImplementedError(f"{type(module).__name__} {what}; {_INSTEAD}")


def check_values(module: nn.Module, value: Tensor, summed: int, free: int) -> None:
    """Raise if values are summed over channels, or are the output of another attention."""
    axes = axes_of(value)
    if any(dim.attended for dim in axes.dims(summed)):
        raise_unsupported(
            module,
            "attends to the output of another attention without a projection between them: the map "
            "would be a product of several, not one softmax over the keys",
        )
    if _channels(axes, summed, free):
        raise_unsupported(
            module,
            "attends from channels to channels, which is not a map over positions",
        )


def _channels(axes: Axes, summed: int, free: int) -> bool:
    """Whether the summed axis is features and the other one is not, or is of the same source."""
    if axes.dims(summed) & axes.dims(free) & axes.features:
        return True  # split off the same projection, as heads that attend to heads
    if axes.features:
        return axes.all_features(summed) and not axes.dims(free) & axes.features
    merged = {factor.dims for factor in axes.axes[free]}
    return len(merged) > 1 and len({factor.dims for factor in axes.axes[summed]}) == 1


def check_positions(module: nn.Module, rows: Axis, keys: Axis, summed: Axis) -> None:
    """Raise if rows or columns are not positions in order.

    Positions may be selected or moved by an index, and slices of the queries or of the keys may
    attend separately.
    """
    if any(one.gathered or one.moved for axis in (rows, keys, summed) for one in axis):
        raise_unsupported(
            module,
            "selects or moves its queries, keys or values by index, so rows and columns of its "
            "weights are not positions of its input in order",
        )
    # Chunked attention: the slice of the first call is stored, and a call on another slice with the
    # same keys is the rest of the same map.
    if len(rows) == 1 and rows[0].part is not None:
        against = ("queries", rows[0].dims, tuple((one.dims, one.part) for one in (*keys, *summed)))
        if STATE.key_slices.setdefault(against, rows[0].part) != rows[0].part:
            raise_unsupported(
                module,
                "attends with slices of its queries one after another, so that the rows of each "
                "call are only some of its positions",
            )
    if len(summed) != 1 or summed[0].part is None:
        return
    # The same for slices of the keys, each with a softmax of its own.
    whose = summed[0].dims, tuple((one.dims, one.part) for one in rows)
    before = STATE.key_slices.setdefault(whose, summed[0].part)
    if rows and before != summed[0].part:
        raise_unsupported(
            module,
            "attends to slices of its keys with a separate softmax each, which is not one map over "
            "all keys",
        )


def check_rows(module: nn.Module, rows: Axis, keys: Axis, features: frozenset[Dim]) -> None:
    """Raise if heads are folded into the rows: a row would not be a position."""
    heads = [one for one in rows if one.dims <= features]
    positions = [one for one in rows if not one.dims & features]
    if heads and positions and not any(one.dims & features for one in keys):
        raise_unsupported(
            module,
            "folds heads into the rows of its queries, so a row is not a position of its input",
        )


def set_output_axes(
    output: Tensor, lead: tuple[Axis, ...], free: Axis, features: frozenset[Dim]
) -> None:
    """Set the axes of an attention output (..., q, d)."""
    row = new_axis(output.shape[-2])
    if row:
        dim = Dim(output.shape[-2], attended=True)
        row = (type(row[0])(frozenset({dim}), output.shape[-2]),)
    set_axes(output, Axes((*lead, row, free), features))
