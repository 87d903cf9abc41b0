"""Segmentation by attention: against scikit-image, values by hand, and a planted object."""

import math

import pytest
import torch
from skimage.filters import threshold_otsu

from overt.attention import AttentionMap, Kind, grid
from overt.geometry import PixelGeometry
from overt.measure import (
    binarised,
    combined,
    combined_on_photos,
    jaccard,
    otsu,
    product,
    root_of_product,
)
from overt.measure.segmentation import rescaled


def of(values: torch.Tensor, geometry: PixelGeometry | None = None) -> AttentionMap:
    """A map out of pictures of its cells."""
    b, y, x = values.shape
    return AttentionMap.from_cells(values.reshape(b, -1), grid(y, x, geometry=geometry))


# --- combining


def test_t_lt_10_the_root_of_the_product_by_hand():
    first = torch.tensor([0.1, 0.2, 0.3, 0.4])
    joined = root_of_product(torch.stack([first, first.flip(0)]))
    torch.testing.assert_close(
        joined, torch.tensor([0.2, 0.244949, 0.244949, 0.2]), atol=1e-6, rtol=0
    )
    assert float(joined.sum()) == pytest.approx(0.8899, abs=1e-4)
    torch.testing.assert_close(
        rescaled(joined.reshape(1, 2, 2)).flatten(), torch.tensor([0.0, 1, 1, 0])
    )


def test_the_root_of_two_distributions_sums_to_one_only_if_they_are_the_same(generator):
    both = torch.rand(2, 20, 9, generator=generator).softmax(dim=-1)
    assert (root_of_product(both).sum(dim=-1) < 1).all()
    same = root_of_product(torch.stack([both[0], both[0]]))
    torch.testing.assert_close(same, both[0])


def test_levels_are_enlarged_before_they_are_joined(generator):
    low, high = torch.rand(3, 4, 4, generator=generator), torch.rand(3, 2, 2, generator=generator)
    found = combined([of(low), of(high)], (8, 8))
    assert found.dtype is torch.float64 and found.shape == (3, 8, 8)
    for b in range(3):
        for y in range(8):
            for x in range(8):
                expected = math.sqrt(
                    slow_bilinear(low[b], y, x, 8) * slow_bilinear(high[b], y, x, 8)
                )
                assert float(found[b, y, x]) == pytest.approx(expected, rel=1e-6)
    without_root = combined([of(low), of(high)], (8, 8), product)
    torch.testing.assert_close(without_root, found.square())


def slow_bilinear(cells: torch.Tensor, y: int, x: int, size: int) -> float:
    """The value at a pixel's centre, between the centres of the cells around it."""
    count = len(cells)

    def around(at: int) -> tuple[int, int, float]:
        place = min(max((at + 0.5) * count / size - 0.5, 0), count - 1)
        first = min(int(place), count - 1)
        return first, min(first + 1, count - 1), place - first

    (top, bottom, down), (left, right, across) = around(y), around(x)
    upper = float(cells[top, left]) * (1 - across) + float(cells[top, right]) * across
    lower = float(cells[bottom, left]) * (1 - across) + float(cells[bottom, right]) * across
    return upper * (1 - down) + lower * down


def test_tiny_weights_do_not_vanish_in_the_product():
    """A softmax over 1024 cells goes down to 1e-30; the product of two is no float32."""
    tiny = torch.tensor([[[1e-30, 1e-28], [1.0, 1e-29]]])
    assert (combined([of(tiny), of(tiny)], (2, 2)) > 0).all()


def test_three_levels_and_one_level():
    level = torch.rand(2, 2, 2)
    torch.testing.assert_close(combined([of(level)] * 3, (2, 2)), level.double())
    torch.testing.assert_close(combined([of(level)], (2, 2)), level.double())


def test_signed_maps_stand_alone():
    values = torch.tensor([[[-1.0, 1.0], [0.0, 2.0]]])
    signed = AttentionMap(values.reshape(1, 1, 1, 1, 4), grid(2, 2), kind=Kind.SIGNED)
    torch.testing.assert_close(combined([signed], (2, 2)), values.double())
    with pytest.raises(ValueError, match="signed maps have no product"):
        combined([signed, signed], (2, 2))
    with pytest.raises(ValueError, match="attends to nothing"):
        combined([], (2, 2))


def test_on_photos_is_the_same_where_the_photo_is_the_canvas(generator):
    geometry = PixelGeometry.identity(3, (8, 8))
    levels = [of(torch.rand(3, side, side, generator=generator), geometry) for side in (4, 2)]
    torch.testing.assert_close(torch.stack(combined_on_photos(levels)), combined(levels, (8, 8)))


def test_photos_of_any_size_and_pixels_cut_away():
    sizes = [(6, 12), (9, 4)]
    geometry = PixelGeometry.join(
        [
            PixelGeometry.identity(1, sizes[0]).crop(0, 0, 6, 6).resize((4, 4)),
            PixelGeometry.identity(1, sizes[1]).resize((4, 4)),
        ]
    )
    values = torch.full((2, 2, 2), 0.25) + torch.tensor([[0.0, 0.0], [0.0, 0.5]])
    first, second = combined_on_photos([of(values, geometry)])
    assert [tuple(one.shape) for one in (first, second)] == sizes
    assert (first[:, 6:] == 0.25).all(), "what was not seen counts as the least attended"
    assert float(second[-1, -1]) == 0.75 and float(second[0, 0]) == 0.25


# --- black and white


@pytest.mark.parametrize("sort", ["uniform", "bimodal", "softmax", "few"])
def test_the_threshold_agrees_with_scikit_image(sort, generator):
    maps = torch.rand(25, 11, 13, generator=generator, dtype=torch.float64)
    if sort == "bimodal":
        maps = maps * 0.2 + (torch.rand(maps.shape, generator=generator) > 0.7) * 0.6
    elif sort == "softmax":
        maps = (6 * maps).flatten(1).softmax(dim=-1).reshape(maps.shape)
    elif sort == "few":
        maps = (maps.square() * 5).floor() - 2
    expected = torch.tensor([float(threshold_otsu(one.numpy())) for one in maps])
    found = otsu(maps)
    if sort == "few":  # many thresholds part a few values alike, and either may take another
        both = [maps > one[:, None, None] for one in (found, expected)]
        assert torch.equal(*both)
    else:
        torch.testing.assert_close(found, expected.double(), rtol=1e-6, atol=1e-9)


def test_the_threshold_agrees_with_trying_all(generator):
    maps = rescaled(torch.rand(5, 6, 6, generator=generator, dtype=torch.float64).square())
    for one, found in zip(maps, otsu(maps).tolist(), strict=True):
        binned = [math.floor(min(v * 256, 255)) for v in one.flatten().tolist()]
        spread = {}
        for last in range(255):
            below = [b for b in binned if b <= last]
            above = [b for b in binned if b > last]
            if below and above:
                apart = sum(below) / len(below) - sum(above) / len(above)
                spread[last] = len(below) * len(above) * apart**2
        best = max(spread.values())
        first = min(last for last, value in spread.items() if value >= best * (1 - 1e-9))
        assert found == pytest.approx((first + 0.5) / 256)


@pytest.mark.parametrize(("low", "high"), [(0.2, 0.7), (1e-9, 2e-9), (-3.0, 5.0), (0.5, 0.501)])
def test_t_lt_11_two_values_are_parted_exactly(low, high):
    values = torch.full((1, 4, 4), low, dtype=torch.float64)
    values[0, 1:3, 1:3] = high
    threshold = float(otsu(values))
    assert low < threshold < high
    assert torch.equal(binarised(values), values == high)


def test_t_lt_11_a_constant_map_has_no_object():
    for value in (0.0, 0.3, -1.0):
        constant = torch.full((2, 3, 3), value)
        assert not binarised(constant).any()
        assert float(otsu(constant)[0]) == pytest.approx(value)
        assert not rescaled(constant).any()


def test_scale_and_shift_do_not_matter(generator):
    maps = torch.rand(6, 8, 8, generator=generator, dtype=torch.float64)
    assert torch.equal(binarised(maps), binarised(maps * 8 + 2))


# --- the measure


def test_jaccard_by_hand():
    found = torch.tensor([[[1, 1, 0, 0]], [[0, 0, 0, 0]], [[1, 0, 0, 0]], [[1, 1, 1, 1]]]).bool()
    truth = torch.tensor([[[0, 1, 1, 0]], [[1, 0, 0, 0]], [[0, 0, 0, 0]], [[1, 1, 1, 1]]]).bool()
    numbers = jaccard(found, truth)
    torch.testing.assert_close(numbers, torch.tensor([1 / 3, 0, torch.nan, 1]), equal_nan=True)


def test_jaccard_agrees_with_scikit_learn(generator):
    from sklearn.metrics import jaccard_score

    found, truth = torch.rand(2, 20, 6, 6, generator=generator) > 0.5
    expected = [
        jaccard_score(t.flatten().numpy(), f.flatten().numpy())
        for f, t in zip(found, truth, strict=True)
    ]
    torch.testing.assert_close(jaccard(found, truth), torch.tensor(expected).float())


def test_a_planted_object_is_cut_out():
    truth = torch.zeros(1, 32, 32, dtype=torch.bool)
    truth[:, 8:24, 8:24] = True
    levels = []
    for side in (16, 8):
        cells = torch.nn.functional.avg_pool2d(truth[:, None].float(), 32 // side)[:, 0]
        levels.append(of(cells / cells.sum()))
    assert float(jaccard(binarised(combined(levels, (32, 32))), truth)) > 0.85
    anywhere = [of(torch.rand(1, 16, 16)), of(torch.rand(1, 8, 8))]
    assert float(jaccard(binarised(combined(anywhere, (32, 32))), truth)) < 0.5


def test_the_maps_of_every_network_can_be_cut(generator):
    """Levels of attention, a gate and what follows it, and class activations, which are signed."""
    from overt.data.batch import Batch
    from overt.models.paying.vgg import HEAD_ONLY, Sizes, VGGAttention, VGGGap, VGGProgressive

    sizes = Sizes(3, 0.05, HEAD_ONLY)
    images = torch.rand(2, 3, 32, 32, generator=generator)
    batch = Batch(("a", "b"), images, geometry=PixelGeometry.identity(2, (32, 32)))
    attending, gated, gap = VGGAttention(sizes), VGGProgressive(sizes), VGGGap(sizes)
    with torch.no_grad():
        found = [
            combined(attending.eval()(batch).attention, (32, 32)),
            combined(gated.eval()(batch).attention, (32, 32), product),
            combined(
                [gap.class_activation(gap.eval().encode(batch), torch.tensor([0, 2]))], (32, 32)
            ),
        ]
    for one in found:
        cut = binarised(one)
        assert cut.shape == (2, 32, 32)
        assert (cut.flatten(1).any(dim=-1) & ~cut.flatten(1).all(dim=-1)).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_finds_the_same(generator):
    levels = [of(torch.rand(5, side, side, generator=generator)) for side in (16, 8)]
    here = binarised(combined(levels, (32, 32)))
    there = binarised(combined([one.to("cuda") for one in levels], (32, 32)))
    assert there.is_cuda and float((here != there.cpu()).float().mean()) < 1e-3
    torch.testing.assert_close(jaccard(there, here.cuda()).cpu(), jaccard(there.cpu(), here))
    geometry = PixelGeometry.identity(5, (32, 32))
    photos = [
        of(one.weights.reshape(5, n, n), geometry) for one, n in zip(levels, (16, 8), strict=True)
    ]
    painted = combined_on_photos([one.to("cuda") for one in photos])
    assert painted[0].is_cuda
    torch.testing.assert_close(torch.stack(painted).cpu(), combined(levels, (32, 32)))
