"""Segmentation by attention: combine levels, binarize by Otsu's threshold, compare with a mask.

Jetley, Lord, Lee and Torr, "Learn To Pay Attention", ICLR 2018, https://arxiv.org/abs/1804.02391,
section 5.4 and appendix A.4:

    levels = model(batch).attention[-2:]
    jaccard(binarize_otsu(combine_levels(levels, (32, 32))), masks)

The paper does not say how maps of different grids are combined. Here each is first resized to the
image.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from overt.attention import AttentionMap, Kind
from overt.metrics.metric import SampleScores, declare_metric, mask_undefined
from overt.metrics.pixel_maps import to_grid, to_photo_pixels

BINS = 256  # of the histogram; the usual number for Otsu's threshold
TIE = 1e-6  # weights with a smaller relative difference are equal up to rounding

CombineRule = Callable[[Float[Tensor, "s *n"]], Float[Tensor, "*n"]]


# --- one map from several levels


def geometric_mean(levels: Float[Tensor, "s *n"]) -> Float[Tensor, "*n"]:
    """Compute the geometric mean of the levels; for two, the square root of their product.

    For two distributions the sum is at most one, and one where they are equal.

    Example:
        >>> m = torch.tensor([0.1, 0.2, 0.3, 0.4])
        >>> geometric_mean(torch.stack([m, m.flip(0)]))
        tensor([0.2000, 0.2449, 0.2449, 0.2000])
    """
    return levels.prod(dim=0) ** (1 / len(levels))


def product_of_levels(levels: Float[Tensor, "s *n"]) -> Float[Tensor, "*n"]:
    """Compute the product without a root: for progressive attention (levels build on others)."""
    return levels.prod(dim=0)


def combine_levels(
    levels: Sequence[AttentionMap], size: tuple[int, int], join: CombineRule = geometric_mean
) -> Float[Tensor, "b y x"]:
    """Combine the maps of several levels into one map of the size of the image, in float64.

    Each map is enlarged bilinearly. Signed maps, such as class activations, can only be enlarged
    one at a time.

    Args:
        levels: Maps with one row per sample over the cells of the image.
        size: Height and width of the model's input image; `combine_levels_on_photos` uses the
            photo's.
        join: How levels are combined: `geometric_mean` or `product_of_levels`.

    Returns:
        One map per sample.

    Raises:
        ValueError: There is no level, or several signed ones.
    """
    enlarged = [
        torch.nn.functional.interpolate(
            to_grid(attention)[:, None], size, mode="bilinear", align_corners=False
        )[:, 0]
        for attention in _check_levels(levels)
    ]
    return _join(torch.stack(enlarged), join)


def combine_levels_on_photos(
    levels: Sequence[AttentionMap], join: CombineRule = geometric_mean
) -> list[Float[Tensor, "_ _"]]:
    """Combine the maps of several levels on each photo at its original size.

    A pixel that was not seen, because it was cropped, counts as the least attended one.
    """
    maps = []
    for each in zip(
        *(to_photo_pixels(attention) for attention in _check_levels(levels)), strict=True
    ):
        joined = _join(torch.stack([one.weights for one in each]), join)
        seen = torch.stack([one.seen for one in each]).all(dim=0)
        maps.append(torch.where(seen, joined, joined.masked_fill(~seen, torch.inf).amin()))
    return maps


def _check_levels(levels: Sequence[AttentionMap]) -> Sequence[AttentionMap]:
    if not levels:
        raise ValueError("at least 1 level is needed, got 0: the model has no attention")
    if len(levels) > 1 and any(one.kind is Kind.SIGNED for one in levels):
        raise ValueError("signed maps cannot be multiplied: use one of them alone")
    return levels


def _join(levels: Float[Tensor, "s *n"], join: CombineRule) -> Float[Tensor, "*n"]:
    """Combine levels; a single one is returned unchanged, since it may be signed."""
    return levels[0] if len(levels) == 1 else join(levels)


# --- binarization


def min_max_scale(maps: Float[Tensor, "b y x"]) -> Float[Tensor, "b y x"]:
    """Scale each map from 0 at its minimum to 1 at its maximum; a constant map becomes 0."""
    low, high = maps.amin(dim=(-2, -1), keepdim=True), maps.amax(dim=(-2, -1), keepdim=True)
    wide = high > low
    return torch.where(wide, (maps - low) / torch.where(wide, high - low, 1), 0)


def otsu_threshold(maps: Float[Tensor, "b y x"]) -> Float[Tensor, " b"]:
    """Compute Otsu's threshold of each map (Otsu 1979).

    Of 256 bins between minimum and maximum, it is the center of the bin after which the variance
    between both groups is largest, the first of ties. Pixels above it are the object. The threshold
    of a constant map is its value.

    Example:
        >>> otsu_threshold(torch.tensor([[[0.0, 0.0, 1.0, 0.9]], [[0.3, 0.3, 0.3, 0.3]]]))
        tensor([0.0020, 0.3000], dtype=torch.float64)
    """
    values = maps.double().flatten(1)
    low, high = values.amin(dim=-1), values.amax(dim=-1)
    bins = (min_max_scale(maps.double()).flatten(1) * BINS).long().clamp_max(BINS - 1)
    first = BINS * torch.arange(len(bins), device=bins.device)[:, None]
    flat = torch.bincount((bins + first).flatten(), minlength=BINS * len(bins))
    counts = flat.reshape(len(bins), BINS).double()
    centres = (torch.arange(BINS, device=bins.device).double() + 0.5) / BINS
    below, mass = counts.cumsum(dim=-1), (counts * centres).cumsum(dim=-1)
    above, rest = below[:, -1:] - below, mass[:, -1:] - mass
    apart = mass / below.clamp_min(1) - rest / above.clamp_min(1)
    between = (below * above * apart.square()).masked_fill(above == 0, 0)
    # empty bins between two values give the same variance: rounding must not choose among them
    largest = between.amax(dim=-1, keepdim=True) * (1 - 1e-12)
    chosen = centres[(between >= largest).long().argmax(dim=-1)]
    return low + chosen * (high - low)


def binarize_otsu(maps: Float[Tensor, "b y x"]) -> Bool[Tensor, "b y x"]:
    """Mark the pixels above Otsu's threshold.

    A map that is constant up to rounding has no threshold and marks every pixel. If it marked none,
    any other map would beat it. A map with an infinite or NaN weight marks none.

    Args:
        maps: One map per sample.

    Returns:
        The mask of marked pixels.
    """
    maps = maps.double()
    levels = min_max_scale(maps)
    low, high = maps.amin(dim=(-2, -1)), maps.amax(dim=(-2, -1))
    # an infinite or NaN weight leaves no map to threshold: nothing is marked
    constant = high.isfinite() & (high - low <= TIE * torch.maximum(high.abs(), low.abs()))
    return (levels > otsu_threshold(levels)[:, None, None]) | constant[:, None, None]


@declare_metric("Jaccard", "share", higher_is_better=True, low=0.0, high=1.0, version=2)
def jaccard(found: Bool[Tensor, "b y x"], truth: Bool[Tensor, "b y x"]) -> SampleScores:
    """Compute the Jaccard index (IoU) of two masks.

    Version 2: `binarize_otsu` marks all of a constant map instead of nothing.

    Args:
        found: The predicted mask.
        truth: The true mask.

    Returns:
        One index per sample; NaN where the truth is empty.

    Raises:
        ValueError: The masks are not boolean, or differ in shape.

    Example:
        >>> jaccard(torch.tensor([[[True, True, False]]]), torch.tensor([[[False, True, True]]]))
        tensor([0.3333])
    """
    if found.dtype is not torch.bool or truth.dtype is not torch.bool or found.shape != truth.shape:
        raise ValueError(
            f"expected two boolean masks of one shape, got {found.dtype} {tuple(found.shape)} and "
            f"{truth.dtype} {tuple(truth.shape)}: binarize maps first, as with binarize_otsu"
        )
    both = (found & truth).flatten(1).sum(dim=-1)
    either = (found | truth).flatten(1).sum(dim=-1)
    return mask_undefined(both / either.clamp_min(1), truth.flatten(1).any(dim=-1))
