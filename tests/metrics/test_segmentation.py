"""Segmentation by attention: combined levels, Otsu's threshold and the Jaccard index."""

import math

import pytest
import torch
from skimage.filters import threshold_otsu

from overt.attention import AttentionMap, Kind, grid
from overt.geometry import PixelGeometry
from overt.metrics.segmentation import (
    binarize_otsu,
    combine_levels,
    combine_levels_on_photos,
    geometric_mean,
    jaccard,
    min_max_scale,
    otsu_threshold,
    product_of_levels,
)


def image_map(values: torch.Tensor, geometry: PixelGeometry | None = None) -> AttentionMap:
    """Return a map from images of its cells."""
    b, y, x = values.shape
    return AttentionMap.from_cells(values.reshape(b, -1), grid(y, x, geometry=geometry))


# --- combining


def test_t_lt_10_geometric_mean_matches_an_example_by_hand():
    first = torch.tensor([0.1, 0.2, 0.3, 0.4])
    joined = geometric_mean(torch.stack([first, first.flip(0)]))
    torch.testing.assert_close(
        joined, torch.tensor([0.2, 0.244949, 0.244949, 0.2]), atol=1e-6, rtol=0
    )
    assert float(joined.sum()) == pytest.approx(0.8899, abs=1e-4)
    torch.testing.assert_close(
        min_max_scale(joined.reshape(1, 2, 2)).flatten(), torch.tensor([0.0, 1, 1, 0])
    )


def test_geometric_mean_of_distributions_sums_to_one_only_if_equal(generator):
    both = torch.rand(2, 20, 9, generator=generator).softmax(dim=-1)
    assert (geometric_mean(both).sum(dim=-1) < 1).all()
    same = geometric_mean(torch.stack([both[0], both[0]]))
    torch.testing.assert_close(same, both[0])


def test_levels_are_upsampled_before_they_are_combined(generator):
    low, high = torch.rand(3, 4, 4, generator=generator), torch.rand(3, 2, 2, generator=generator)
    found = combine_levels([image_map(low), image_map(high)], (8, 8))
    assert found.dtype is torch.float64 and found.shape == (3, 8, 8)
    for b in range(3):
        for y in range(8):
            for x in range(8):
                expected = math.sqrt(
                    reference_bilinear(low[b], y, x, 8) * reference_bilinear(high[b], y, x, 8)
                )
                assert float(found[b, y, x]) == pytest.approx(expected, rel=1e-6)
    without_root = combine_levels([image_map(low), image_map(high)], (8, 8), product_of_levels)
    torch.testing.assert_close(without_root, found.square())


def reference_bilinear(cells: torch.Tensor, y: int, x: int, size: int) -> float:
    """Interpolate the value at a pixel center between the centers of the cells around it."""
    count = len(cells)

    def around(at: int) -> tuple[int, int, float]:
        place = min(max((at + 0.5) * count / size - 0.5, 0), count - 1)
        first = min(int(place), count - 1)
        return first, min(first + 1, count - 1), place - first

    (top, bottom, down), (left, right, across) = around(y), around(x)
    upper = float(cells[top, left]) * (1 - across) + float(cells[top, right]) * across
    lower = float(cells[bottom, left]) * (1 - across) + float(cells[bottom, right]) * across
    return upper * (1 - down) + lower * down


def test_tiny_weights_do_not_underflow_in_the_product():
    """A softmax over 1024 cells can be 1e-30; the product of two underflows in float32."""
    tiny = torch.tensor([[[1e-30, 1e-28], [1.0, 1e-29]]])
    assert (combine_levels([image_map(tiny), image_map(tiny)], (2, 2)) > 0).all()


def test_equal_levels_combine_to_the_same_level():
    level = torch.rand(2, 2, 2)
    torch.testing.assert_close(combine_levels([image_map(level)] * 3, (2, 2)), level.double())
    torch.testing.assert_close(combine_levels([image_map(level)], (2, 2)), level.double())


def test_signed_maps_combine_only_alone():
    values = torch.tensor([[[-1.0, 1.0], [0.0, 2.0]]])
    signed = AttentionMap(values.reshape(1, 1, 1, 1, 4), grid(2, 2), kind=Kind.SIGNED)
    torch.testing.assert_close(combine_levels([signed], (2, 2)), values.double())
    with pytest.raises(ValueError, match="signed"):
        combine_levels([signed, signed], (2, 2))
    with pytest.raises(ValueError, match="at least 1 level"):
        combine_levels([], (2, 2))


def test_combining_on_photos_equals_combining_on_the_canvas(generator):
    geometry = PixelGeometry.identity(3, (8, 8))
    levels = [
        image_map(torch.rand(3, side, side, generator=generator), geometry) for side in (4, 2)
    ]
    torch.testing.assert_close(
        torch.stack(combine_levels_on_photos(levels)), combine_levels(levels, (8, 8))
    )


def test_photos_have_any_size_and_cropped_pixels_get_the_minimum():
    sizes = [(6, 12), (9, 4)]
    geometry = PixelGeometry.join(
        [
            PixelGeometry.identity(1, sizes[0]).crop(0, 0, 6, 6).resize((4, 4)),
            PixelGeometry.identity(1, sizes[1]).resize((4, 4)),
        ]
    )
    values = torch.full((2, 2, 2), 0.25) + torch.tensor([[0.0, 0.0], [0.0, 0.5]])
    first, second = combine_levels_on_photos([image_map(values, geometry)])
    assert [tuple(one.shape) for one in (first, second)] == sizes
    assert (first[:, 6:] == 0.25).all(), "cropped pixels count as the least attended"
    assert float(second[-1, -1]) == 0.75 and float(second[0, 0]) == 0.25


# --- thresholds


@pytest.mark.parametrize("sort", ["uniform", "bimodal", "softmax", "few"])
def test_otsu_threshold_agrees_with_scikit_image(sort, generator):
    maps = torch.rand(25, 11, 13, generator=generator, dtype=torch.float64)
    if sort == "bimodal":
        maps = maps * 0.2 + (torch.rand(maps.shape, generator=generator) > 0.7) * 0.6
    elif sort == "softmax":
        maps = (6 * maps).flatten(1).softmax(dim=-1).reshape(maps.shape)
    elif sort == "few":
        maps = (maps.square() * 5).floor() - 2
    expected = torch.tensor([float(threshold_otsu(one.numpy())) for one in maps])
    found = otsu_threshold(maps)
    if (
        sort == "few"
    ):  # many thresholds separate a few values equally; the two may choose different ones
        both = [maps > one[:, None, None] for one in (found, expected)]
        assert torch.equal(*both)
    else:
        torch.testing.assert_close(found, expected.double(), rtol=1e-6, atol=1e-9)


def test_otsu_threshold_agrees_with_exhaustive_search(generator):
    maps = min_max_scale(torch.rand(5, 6, 6, generator=generator, dtype=torch.float64).square())
    for one, found in zip(maps, otsu_threshold(maps).tolist(), strict=True):
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
def test_t_lt_11_two_values_are_separated_exactly(low, high):
    values = torch.full((1, 4, 4), low, dtype=torch.float64)
    values[0, 1:3, 1:3] = high
    threshold = float(otsu_threshold(values))
    assert low < threshold < high
    assert torch.equal(binarize_otsu(values), values == high)


def test_t_lt_11_a_constant_map_selects_all_pixels():
    """It marks all pixels: a map that marked none would be worse than any other."""
    for value in (0.0, 0.3, -1.0):
        constant = torch.full((2, 3, 3), value)
        assert binarize_otsu(constant).all()
        rounded = constant * (1 + 1e-7 * torch.arange(9.0).reshape(3, 3))
        assert binarize_otsu(rounded).all()  # constant except for rounding
        assert float(otsu_threshold(constant)[0]) == pytest.approx(value)
        assert not min_max_scale(constant).any()


def test_binarization_ignores_scale_and_shift(generator):
    maps = torch.rand(6, 8, 8, generator=generator, dtype=torch.float64)
    assert torch.equal(binarize_otsu(maps), binarize_otsu(maps * 8 + 2))


# --- Jaccard index


def test_jaccard_matches_examples_by_hand():
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


def test_a_planted_object_is_segmented():
    truth = torch.zeros(1, 32, 32, dtype=torch.bool)
    truth[:, 8:24, 8:24] = True
    levels = []
    for side in (16, 8):
        cells = torch.nn.functional.avg_pool2d(truth[:, None].float(), 32 // side)[:, 0]
        levels.append(image_map(cells / cells.sum()))
    assert float(jaccard(binarize_otsu(combine_levels(levels, (32, 32))), truth)) > 0.85
    anywhere = [image_map(torch.rand(1, 16, 16)), image_map(torch.rand(1, 8, 8))]
    assert float(jaccard(binarize_otsu(combine_levels(anywhere, (32, 32))), truth)) < 0.5


def test_maps_of_every_vgg_variant_can_be_binarized(generator):
    """Levels of attention, gated attention and signed class activations."""
    from overt.data.batch import Batch
    from overt.papers.ltpa.vgg import HEAD_ONLY, VGGAttention, VGGGap, VGGProgressive, VGGSizes

    sizes = VGGSizes(3, 0.05, HEAD_ONLY)
    images = torch.rand(2, 3, 32, 32, generator=generator)
    batch = Batch(("a", "b"), images, geometry=PixelGeometry.identity(2, (32, 32)))
    attending, gated, gap = VGGAttention(sizes), VGGProgressive(sizes), VGGGap(sizes)
    with torch.no_grad():
        found = [
            combine_levels(attending.eval()(batch).attention, (32, 32)),
            combine_levels(gated.eval()(batch).attention, (32, 32), product_of_levels),
            combine_levels(
                [gap.class_activation(gap.eval().encode(batch), torch.tensor([0, 2]))], (32, 32)
            ),
        ]
    for one in found:
        cut = binarize_otsu(one)
        assert cut.shape == (2, 32, 32)
        assert (cut.flatten(1).any(dim=-1) & ~cut.flatten(1).all(dim=-1)).all()


@pytest.mark.gpu
def test_gpu_and_cpu_agree(generator):
    levels = [image_map(torch.rand(5, side, side, generator=generator)) for side in (16, 8)]
    here = binarize_otsu(combine_levels(levels, (32, 32)))
    there = binarize_otsu(combine_levels([one.to("cuda") for one in levels], (32, 32)))
    assert there.is_cuda and float((here != there.cpu()).float().mean()) < 1e-3
    torch.testing.assert_close(jaccard(there, here.cuda()).cpu(), jaccard(there.cpu(), here))
    geometry = PixelGeometry.identity(5, (32, 32))
    photos = [
        image_map(one.weights.reshape(5, n, n), geometry)
        for one, n in zip(levels, (16, 8), strict=True)
    ]
    painted = combine_levels_on_photos([one.to("cuda") for one in photos])
    assert painted[0].is_cuda
    torch.testing.assert_close(torch.stack(painted).cpu(), combine_levels(levels, (32, 32)))


def test_masks_that_are_not_boolean_or_differ_in_shape_raise(monkeypatch):
    """One mask would broadcast, and whole numbers would be compared bit by bit."""
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    mask = torch.rand(2, 4, 4) > 0.5
    for other in (mask[:1], mask[..., :3], mask.long(), mask.float()):
        with pytest.raises(ValueError, match=r"4, 4.*binarize_otsu"):
            jaccard(mask, other)


def test_a_map_with_an_infinite_or_nan_weight_marks_nothing():
    maps = torch.rand(3, 4, 4)
    maps[0, 1, 1], maps[1, 2, 2] = torch.inf, torch.nan
    assert binarize_otsu(maps).flatten(1).any(dim=1).tolist() == [False, False, True]
