"""Does attention stay on the same things when the image is cropped or mirrored?

Each map leads back to its photo by its geometry, so that views of one photo can be compared there,
pixel by pixel, where both have seen it:

    views = [model(vary(batch, generator)).attention[-1] for _ in range(4)]
    view_consistency(model(batch).attention[-1], views)
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool
from torch import Tensor

from overt.attention import AttentionMap, Kind, grid
from overt.measure.agreement import spearman
from overt.measure.measured import Measured, defined, measured
from overt.measure.photos import Painted, painted

Compare = Callable[[AttentionMap, AttentionMap], Measured]


@measured("consistency", "correlation", higher_is_better=True, low=-1.0, high=1.0)
def view_consistency(
    attention: AttentionMap, views: Sequence[AttentionMap], compare: Compare = spearman
) -> Measured:
    """How alike a map and the maps of other views of its photo are: the mean over the views.

    `compare` is a measure of two maps, such as `js`, whose numbers these then are. Views in which
    it is not defined are left out: for ranks those with a constant map, which follows nothing. A
    map that always looks at the middle is consistent too: hold the number to that of `of_others`.
    """
    if not views:
        raise ValueError("there is no view to compare with")
    numbers = torch.stack([_alike(attention, view, compare) for view in views]).double()
    return defined(numbers.nanmean(dim=0), ~numbers.isnan().all(dim=0))


def of_others(view: AttentionMap) -> AttentionMap:
    """A control: the weights that the next sample has in its view, in the place of one's own.

    The crops and mirrors stay with their photos. What is left of consistency is what a model does
    whatever it is shown.
    """
    if len(view) < 2:
        raise ValueError("a control by other samples needs two samples at least")
    mask = None if view.mask is None else view.mask.roll(-1, dims=0)
    return replace(view, values=view.values.roll(-1, dims=0), mask=mask)


def on_common_pixels(
    first: AttentionMap, second: AttentionMap
) -> list[tuple[AttentionMap, AttentionMap]]:
    """Two maps of the same photos drawn on them, one pair a photo.

    A pixel may be seen where both views show it. Weights are those of the cells, drawn smoothly:
    amounts, which no longer sum to one.
    """
    if len(first) != len(second):
        raise ValueError(f"maps of {len(first)} and of {len(second)} photos do not compare")
    pairs = []
    for ours, theirs in zip(painted(first), painted(second), strict=True):
        if ours.weights.shape != theirs.weights.shape:
            raise ValueError(
                f"photos of {tuple(ours.weights.shape)} and {tuple(theirs.weights.shape)} pixels "
                "are not the same photo: a view must keep the geometry that leads back to it"
            )
        both = ours.seen & theirs.seen
        pairs.append((_drawn(ours, both, first.kind), _drawn(theirs, both, second.kind)))
    return pairs


def _alike(first: AttentionMap, second: AttentionMap, compare: Compare) -> Measured:
    return torch.cat([compare(*pair) for pair in on_common_pixels(first, second)])


def _drawn(picture: Painted, both: Bool[Tensor, "y x"], kind: Kind) -> AttentionMap:
    """A photo as a map over its pixels, of which those that both views show may be seen."""
    height, width = both.shape
    weights = picture.weights.masked_fill(~both, 0)
    drawn = AttentionMap.from_cells(
        weights.reshape(1, -1), grid(height, width), both.reshape(1, -1)
    )
    return replace(drawn, kind=kind if kind is Kind.SIGNED else Kind.AMOUNT)
