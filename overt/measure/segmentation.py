"""Does a map cut the object out? Levels are combined, made black and white, and held to a mask.

Jetley, Lord, Lee and Torr, "Learn To Pay Attention", ICLR 2018, https://arxiv.org/abs/1804.02391,
section 5.4 and appendix A.4:

    levels = model(batch).attention[-2:]
    jaccard(binarised(combined(levels, (32, 32))), masks)

The paper does not say how maps of different grids meet. Here each is first brought to the size of
the image.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from overt.attention import AttentionMap, Kind
from overt.measure.measured import Measured, defined, measured
from overt.measure.photos import painted, squares

BINS = 256  # of the histogram, as is common for Otsu's threshold

Join = Callable[[Float[Tensor, "s *n"]], Float[Tensor, "*n"]]


# --- one map of several levels


def root_of_product(levels: Float[Tensor, "s *n"]) -> Float[Tensor, "*n"]:
    """The geometric mean of the levels; of two, the square root of their product.

    Of two distributions it sums to one at most, and to one where they are the same.

    >>> m = torch.tensor([0.1, 0.2, 0.3, 0.4])
    >>> root_of_product(torch.stack([m, m.flip(0)]))
    tensor([0.2000, 0.2449, 0.2449, 0.2000])
    """
    return levels.prod(dim=0) ** (1 / len(levels))


def product(levels: Float[Tensor, "s *n"]) -> Float[Tensor, "*n"]:
    """The product without a root: for progressive attention, where one level follows another."""
    return levels.prod(dim=0)


def combined(
    levels: Sequence[AttentionMap], size: tuple[int, int], join: Join = root_of_product
) -> Float[Tensor, "b y x"]:
    """One map of `size` = (height, width) out of several levels, in double precision.

    Each is enlarged bilinearly, then they are joined. Signed maps, such as class activations, can
    be enlarged alone, and not joined. `size` is that of the image that the model was given;
    `combined_on_photos` goes back to the photo.
    """
    enlarged = [
        torch.nn.functional.interpolate(
            squares(attention)[:, None], size, mode="bilinear", align_corners=False
        )[:, 0]
        for attention in _joinable(levels)
    ]
    return _joined(torch.stack(enlarged), join)


def combined_on_photos(
    levels: Sequence[AttentionMap], join: Join = root_of_product
) -> list[Float[Tensor, "_ _"]]:
    """The same on each photo at its own size, through the geometry of the maps.

    A pixel that was not seen, as a crop has cut it away, counts as the least attended one.
    """
    maps = []
    for each in zip(*(painted(attention) for attention in _joinable(levels)), strict=True):
        joined = _joined(torch.stack([one.weights for one in each]), join)
        seen = torch.stack([one.seen for one in each]).all(dim=0)
        maps.append(torch.where(seen, joined, joined.masked_fill(~seen, torch.inf).amin()))
    return maps


def _joinable(levels: Sequence[AttentionMap]) -> Sequence[AttentionMap]:
    if not levels:
        raise ValueError("there is no level to combine: this model attends to nothing")
    if len(levels) > 1 and any(one.kind is Kind.SIGNED for one in levels):
        raise ValueError("signed maps have no product that means anything; take one of them alone")
    return levels


def _joined(levels: Float[Tensor, "s *n"], join: Join) -> Float[Tensor, "*n"]:
    """One level stays as it is: the root of a single signed map is no number."""
    return levels[0] if len(levels) == 1 else join(levels)


# --- black and white


def rescaled(maps: Float[Tensor, "b y x"]) -> Float[Tensor, "b y x"]:
    """Each map from 0 at its lowest to 1 at its highest; a constant map is 0 everywhere."""
    low, high = maps.amin(dim=(-2, -1), keepdim=True), maps.amax(dim=(-2, -1), keepdim=True)
    wide = high > low
    return torch.where(wide, (maps - low) / torch.where(wide, high - low, 1), 0)


def otsu(maps: Float[Tensor, "b y x"]) -> Float[Tensor, " b"]:
    """The threshold that parts the pixels of each map into two groups (Otsu 1979).

    Of 256 bins between the lowest and the highest value it is the centre of the one behind which
    the variance between both groups is largest, the first of equals. Pixels above it are the
    object. The threshold of a constant map is its value.

    >>> otsu(torch.tensor([[[0.0, 0.0, 1.0, 0.9]], [[0.3, 0.3, 0.3, 0.3]]]))
    tensor([0.0020, 0.3000], dtype=torch.float64)
    """
    values = maps.double().flatten(1)
    low, high = values.amin(dim=-1), values.amax(dim=-1)
    bins = (rescaled(maps.double()).flatten(1) * BINS).long().clamp_max(BINS - 1)
    first = BINS * torch.arange(len(bins), device=bins.device)[:, None]
    flat = torch.bincount((bins + first).flatten(), minlength=BINS * len(bins))
    counts = flat.reshape(len(bins), BINS).double()
    centres = (torch.arange(BINS, device=bins.device).double() + 0.5) / BINS
    below, mass = counts.cumsum(dim=-1), (counts * centres).cumsum(dim=-1)
    above, rest = below[:, -1:] - below, mass[:, -1:] - mass
    apart = mass / below.clamp_min(1) - rest / above.clamp_min(1)
    between = (below * above * apart.square()).masked_fill(above == 0, 0)
    # empty bins between two values part them alike, and rounding shall not choose among them
    largest = between.amax(dim=-1, keepdim=True) * (1 - 1e-12)
    chosen = centres[(between >= largest).long().argmax(dim=-1)]
    return low + chosen * (high - low)


def binarised(maps: Float[Tensor, "b y x"]) -> Bool[Tensor, "b y x"]:
    """Which pixels are the object: those above Otsu's threshold; none of a constant map."""
    levels = rescaled(maps.double())
    return levels > otsu(levels)[:, None, None]


@measured("Jaccard", "share", higher_is_better=True, low=0.0, high=1.0)
def jaccard(found: Bool[Tensor, "b y x"], truth: Bool[Tensor, "b y x"]) -> Measured:
    """What both cover over what either covers; not defined where the truth is empty.

    >>> jaccard(torch.tensor([[[True, True, False]]]), torch.tensor([[[False, True, True]]]))
    tensor([0.3333])
    """
    both = (found & truth).flatten(1).sum(dim=-1)
    either = (found | truth).flatten(1).sum(dim=-1)
    return defined(both / either.clamp_min(1), truth.flatten(1).any(dim=-1))
