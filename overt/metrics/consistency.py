"""Consistency of attention when the image is cropped or mirrored.

The geometry of each map leads back to its photo, so views of one photo are compared there, pixel by
pixel, where both have seen it:

    views = [model(random_shift_flip(batch, generator)).attention[-1] for _ in range(4)]
    view_consistency(model(batch).attention[-1], views)
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from overt.attention import AttentionMap, Kind, grid
from overt.metrics.agreement import spearman
from overt.metrics.metric import SampleScores, declare_metric, mask_undefined
from overt.metrics.pixel_maps import PhotoMap, to_photo_pixels

Compare = Callable[[AttentionMap, AttentionMap], SampleScores]


@declare_metric("consistency", "correlation", higher_is_better=True, low=-1.0, high=1.0)
def view_consistency(
    attention: AttentionMap, views: Sequence[AttentionMap], compare: Compare = spearman
) -> SampleScores:
    """Compute the mean similarity of a map and the maps of other views of its photo.

    A map that always attends to the center is consistent too: compare with the score of
    `weights_of_next_sample`.

    Args:
        attention: A map with one row per sample, with the geometry of its photo.
        views: Maps of other views of the same photos.
        compare: A metric of two maps, Spearman's correlation by default.

    Returns:
        One mean per sample over the views with a score; constant maps have no ranks.

    Raises:
        ValueError: There are no views, or the photos differ.

    Example:
        >>> from overt.geometry import PixelGeometry
        >>> photo = PixelGeometry.identity(1, (8, 8))
        >>> cells = grid(2, 2, geometry=photo)
        >>> attention = AttentionMap.from_cells(torch.tensor([[4, 3, 2, 1]]), cells)
        >>> mirrored = torch.tensor([[3, 4, 1, 2]])
        >>> view = AttentionMap.from_cells(mirrored, grid(2, 2, geometry=photo.flip()))
        >>> view_consistency(attention, [view])  # attention moves with the picture
        tensor([1.])
        >>> view_consistency(attention, [AttentionMap.from_cells(mirrored, cells)])  # not mirrored
        tensor([0.6097])
    """
    if not views:
        raise ValueError("view consistency needs at least 1 view, got 0")
    own = to_photo_pixels(attention)
    # nanmean: a view that shows too little of the photo has no score
    numbers = torch.stack(
        [_view_similarity(attention, own, view, compare) for view in views]
    ).double()
    return mask_undefined(numbers.nanmean(dim=0), ~numbers.isnan().all(dim=0))


def weights_of_next_sample(view: AttentionMap) -> AttentionMap:
    """Replace the weights of each view by those of the next sample: a control.

    Crops and mirrors stay with their photos. The consistency that is left does not depend on the
    content of the image.
    """
    if len(view) < 2:
        raise ValueError("a control by other samples needs at least 2 samples, got 1")
    mask = None if view.mask is None else view.mask.roll(-1, dims=0)
    return replace(view, values=view.values.roll(-1, dims=0), mask=mask)


def _view_similarity(
    attention: AttentionMap, own: Sequence[PhotoMap], view: AttentionMap, compare: Compare
) -> SampleScores:
    """Compute one score per photo, with one call of `compare` per photo size."""
    if len(attention) != len(view):
        raise ValueError(
            f"attention and view must have the same batch, got {len(attention)} and {len(view)}"
        )
    other = to_photo_pixels(view)
    sizes: dict[tuple[int, ...], list[int]] = {}
    for place, (ours, theirs) in enumerate(zip(own, other, strict=True)):
        if ours.seen.shape != theirs.seen.shape:
            raise ValueError(
                f"photos must be the same, got {tuple(ours.seen.shape)} and "
                f"{tuple(theirs.seen.shape)} pixels: a view must keep the geometry of its photo"
            )
        sizes.setdefault(tuple(ours.seen.shape), []).append(place)
    numbers = torch.empty(len(own), device=attention.values.device)
    for places in sizes.values():
        # photos of one size are stacked; weights of pixels do not sum to one, hence amounts
        pair = on_common_pixels([own[at] for at in places], [other[at] for at in places])
        first, second = (
            replace(one, kind=Kind.SIGNED if source.kind is Kind.SIGNED else Kind.AMOUNT)
            for one, source in zip(pair, (attention, view), strict=True)
        )
        numbers[places] = compare(first, second)
    return numbers


def on_common_pixels(
    first: Sequence[PhotoMap], second: Sequence[PhotoMap]
) -> tuple[AttentionMap, AttentionMap]:
    """Return two views of photos of one size as maps over the pixels that both show.

    Weights are those of the cells, interpolated; they no longer sum to one.
    """
    shown = (torch.stack([one.seen for one in side]) for side in (first, second))
    both = torch.stack(tuple(shown)).all(dim=0)
    layout = grid(both.shape[1], both.shape[2])

    def over(pictures: Sequence[PhotoMap]) -> AttentionMap:
        weights = torch.stack([one.weights for one in pictures]).masked_fill(~both, 0)
        return AttentionMap.from_cells(weights.flatten(1), layout, both.flatten(1))

    return over(first), over(second)
