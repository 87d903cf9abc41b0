"""Does attention stay on the same things when the image is cropped or mirrored?

Each map leads back to its photo by its geometry, so that views of one photo can be compared there,
pixel by pixel, where both have seen it:

    views = [model(vary(batch, generator)).attention[-1] for _ in range(4)]
    view_consistency(model(batch).attention[-1], views)
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

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
    own = painted(attention)
    numbers = torch.stack([_alike(attention, own, view, compare) for view in views]).double()
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


def _alike(
    attention: AttentionMap, own: Sequence[Painted], view: AttentionMap, compare: Compare
) -> Measured:
    """One number a photo, from as many calls of `compare` as photos have sizes."""
    if len(attention) != len(view):
        raise ValueError(f"maps of {len(attention)} and of {len(view)} photos do not compare")
    other = painted(view)
    sizes: dict[tuple[int, ...], list[int]] = {}
    for place, (ours, theirs) in enumerate(zip(own, other, strict=True)):
        if ours.seen.shape != theirs.seen.shape:
            raise ValueError(
                f"photos of {tuple(ours.seen.shape)} and {tuple(theirs.seen.shape)} pixels are "
                "not the same photo: a view must keep the geometry that leads back to it"
            )
        sizes.setdefault(tuple(ours.seen.shape), []).append(place)
    numbers = torch.empty(len(own), device=attention.values.device)
    for places in sizes.values():
        pair = on_common_pixels([own[at] for at in places], [other[at] for at in places])
        first, second = (
            replace(one, kind=Kind.SIGNED if source.kind is Kind.SIGNED else Kind.AMOUNT)
            for one, source in zip(pair, (attention, view), strict=True)
        )
        numbers[places] = compare(first, second)
    return numbers


def on_common_pixels(
    first: Sequence[Painted], second: Sequence[Painted]
) -> tuple[AttentionMap, AttentionMap]:
    """Two views of photos of one size, as maps over the pixels that both of them show.

    Weights are those of the cells, drawn smoothly: amounts, which no longer sum to one.
    """
    shown = (torch.stack([one.seen for one in side]) for side in (first, second))
    both = torch.stack(tuple(shown)).all(dim=0)
    layout = grid(both.shape[1], both.shape[2])

    def over(pictures: Sequence[Painted]) -> AttentionMap:
        weights = torch.stack([one.weights for one in pictures]).masked_fill(~both, 0)
        return AttentionMap.from_cells(weights.flatten(1), layout, both.flatten(1))

    return over(first), over(second)
