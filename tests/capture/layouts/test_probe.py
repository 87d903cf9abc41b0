"""Transforms whose geometry is known by composing it, and transforms that have none."""

import random

import numpy as np
import pytest
import torch
from PIL import Image

from overt.capture.layouts.probe import measure_placement, preserve_rng
from overt.capture.layouts.ramp_images import NotAffineError
from overt.geometry import PixelGeometry

FILTERS = ["NEAREST", "BOX", "BILINEAR", "BICUBIC", "LANCZOS"]


def first(canvas):
    return [np.asarray(canvas).transpose(2, 0, 1)]


def resized(photo, size, kind="BICUBIC"):
    return np.asarray(Image.fromarray(photo).resize((size[1], size[0]), Image.Resampling[kind]))


def same(found, expected, at=0):
    torch.testing.assert_close(found.scale[at], expected.scale[0])
    torch.testing.assert_close(found.offset[at], expected.offset[0])
    torch.testing.assert_close(found.kept[at], expected._window()[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", FILTERS)
@pytest.mark.parametrize("size", [(90, 140), (311, 64), (225, 1000), (20, 31)])
def test_resize_crop_and_pad_with_every_filter(kind, size):
    def transform(photo):
        small = resized(photo, (150, 170), kind)[10:138, 5:165]
        return first(np.pad(small, [(2, 0), (0, 9), (0, 0)], constant_values=77))

    found = measure_placement(transform, [size]).geometries[0]
    expected = PixelGeometry.identity(1, size).resize((150, 170))
    expected = expected.crop(10, 5, 128, 160).pad(2, 0, 0, 9)
    assert found.canvas == (130, 169)
    if kind in ("NEAREST", "BOX"):  # which move what they show by up to half a photo pixel
        for corner in (torch.zeros(2), found.size[0]):
            wrong = corner * (found.scale - expected.scale) + found.offset - expected.offset
            assert (wrong.abs() < 0.5 + 0.5 * expected.scale).all()
    else:
        same(found, expected)


def test_a_mirrored_photo_has_a_negative_scale():
    found = measure_placement(lambda photo: first(resized(photo, (64, 96))[:, ::-1]), [(200, 300)])
    same(found.geometries[0], PixelGeometry.identity(1, (200, 300)).resize((64, 96)).flip())


def test_padding_before_the_resize():
    def transform(photo):
        square = np.pad(photo, [(60, 60), (0, 0), (0, 0)])
        return first(resized(square, (224, 224)))

    found = measure_placement(transform, [(180, 300)]).geometries[0]
    same(found, PixelGeometry.identity(1, (180, 300)).pad(60, 0, 60, 0).resize((224, 224)))


def test_mirrored_borders_are_not_taken_for_the_photo():
    def transform(photo):
        return first(np.pad(photo, [(0, 9), (0, 5), (0, 0)], mode="symmetric"))

    found = measure_placement(transform, [(100, 75)]).geometries[0]
    same(found, PixelGeometry.identity(1, (100, 75)).pad(0, 0, 9, 5))


def test_canvases_of_different_sizes_share_the_largest():
    tiles = measure_placement(first, [(40, 70), (60, 30), (40, 70)])
    assert tiles.geometries[0].canvas == (60, 70)
    assert tiles.canvases.tolist() == [[[40, 70]], [[60, 30]], [[40, 70]]]
    same(tiles.geometries[0], PixelGeometry.identity(1, (60, 30)).pad(0, 0, 0, 40), at=1)


def test_tiles_of_one_picture_agree_on_its_size():
    def transform(photo):
        if photo.shape[0] < 50:
            return first(resized(photo, (64, 64)))
        large = resized(photo, (128, 190))
        large = np.pad(large, [(0, 0), (0, 2), (0, 0)])
        return [tile for x in (0, 64, 128) for tile in first(large[:64, x : x + 64])] + first(
            resized(photo, (64, 64))
        )

    tiles = measure_placement(transform, [(111, 307), (40, 60)])
    assert tiles.present.tolist() == [[True] * 4, [True, False, False, False]]
    whole = PixelGeometry.identity(1, (111, 307))
    for tile, x in enumerate((0, 64, 128)):
        expected = whole.resize((128, 190)).pad(0, 0, 0, 2).crop(0, x, 64, 64)
        same(tiles.geometries[tile], expected)
    same(tiles.geometries[3], whole.resize((64, 64)))
    assert tiles.geometries[1].kept[1].tolist() == [0, 0, 0, 0]


def test_a_thin_strip_on_a_tile_is_placed_by_its_neighbours():
    def transform(photo):
        large = np.pad(resized(photo, (64, 69)), [(0, 0), (0, 59), (0, 0)])
        return first(large[:, :64]) + first(large[:, 64:])

    found = measure_placement(transform, [(200, 213)]).geometries[1]
    whole = PixelGeometry.identity(1, (200, 213)).resize((64, 69)).pad(0, 0, 0, 59)
    same(found, whole.crop(0, 64, 64, 64))


@pytest.mark.parametrize("angle", [1.0, 5.0, 45.0, 90.0])
def test_a_turned_photo_is_refused(angle):
    def transform(photo):
        return first(Image.fromarray(photo).rotate(angle, Image.Resampling.BILINEAR))

    with pytest.raises(NotAffineError):
        measure_placement(transform, [(200, 260)])


def test_a_transposed_or_shuffled_photo_is_refused():
    with pytest.raises(NotAffineError):
        measure_placement(lambda photo: first(photo.transpose(1, 0, 2)), [(100, 120)])
    order = np.random.default_rng(0).permutation(120)
    with pytest.raises(NotAffineError):
        measure_placement(lambda photo: first(photo[:, order]), [(100, 120)])


def test_a_bent_photo_is_refused():
    bent = ((np.arange(300) / 300) ** 1.2 * 300).astype(int)
    with pytest.raises(NotAffineError, match="uniform scaling"):
        measure_placement(lambda photo: first(photo[:, bent]), [(100, 300)])


def test_chance_is_refused_and_leaves_the_generators_as_they_were():
    def transform(photo):
        left = random.randrange(20) + int(np.random.randint(5)) + int(torch.randint(5, ()))  # noqa: NPY002
        return first(photo[:, left : left + 60])

    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    before = np.random.random(), torch.rand(()).item()  # noqa: NPY002
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    with pytest.raises(NotAffineError, match="random"):
        measure_placement(transform, [(100, 120)])
    assert (np.random.random(), torch.rand(()).item()) == before  # noqa: NPY002


def test_the_generator_of_python_is_left_alone_too():
    state = random.getstate()
    with preserve_rng():
        random.random()
    assert random.getstate() == state


def test_photos_of_no_size_are_refused():
    with pytest.raises(ValueError, match="positive sizes"):
        measure_placement(first, [])
    with pytest.raises(ValueError, match="positive sizes"):
        measure_placement(first, [(0, 4)])
