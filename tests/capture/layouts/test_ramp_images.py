"""The test pictures can be read again, whatever is done to their values."""

import numpy as np
import pytest

from overt.capture.layouts.ramp_images import (
    NotAffineError,
    RampImages,
    bright_image,
    dark_image,
    decode_canvas,
)


def canvas(photo, gain=(1.0, 2.0, -0.5), shift=3.0):
    return photo.transpose(2, 0, 1) * np.array(gain)[:, None, None] + shift


def shown(size, window=None, change=lambda canvas: canvas):
    ramps = RampImages(size, window or (0, 0, *size))
    pictures = (dark_image(size), bright_image(size), ramps.picture(0), ramps.picture(1))
    return decode_canvas(ramps, *(change(canvas(picture)) for picture in pictures))


@pytest.mark.parametrize("size", [(8, 20), (90, 140), (700, 33)])
def test_each_pixel_is_found_where_it_stands_after_any_gain_and_shift(size):
    found = shown(size)
    y, x = np.meshgrid(*(np.arange(n) + 0.5 for n in size), indexing="ij")
    means = [(found.points[0] - y).mean(axis=1), (found.points[1] - x).mean(axis=0)]
    assert found.window == (slice(0, size[0]), slice(0, size[1]))
    for axis, wrong in enumerate(means):
        assert np.abs(wrong).max() < 0.5 + 1 / found.ramps.along[axis]
        assert abs(wrong.mean()) < 0.05


def test_small_photos_are_met_without_any_rounding():
    found = shown((9, 12))
    y, x = np.meshgrid(np.arange(9) + 0.5, np.arange(12) + 0.5, indexing="ij")
    np.testing.assert_allclose(found.points, np.stack([y, x]), atol=1e-9)


def test_a_window_is_read_with_more_levels_a_pixel():
    near = RampImages((400, 600), (100, 200, 150, 260))
    assert near.along[0] > RampImages((400, 600), (0, 0, 400, 600)).along[0]
    found = shown((400, 600), near.window)
    assert abs(found.points[1][100:150, 229].mean() - 229.5) < 0.1


def test_pixels_that_do_not_answer_are_padding():
    def pad(canvas):
        return np.pad(canvas, [(0, 0), (4, 1), (0, 6)], constant_values=9.0)

    found = shown((20, 30), change=pad)
    assert found.window == (slice(4, 24), slice(0, 30))
    assert np.isnan(found.points[:, :4]).all()
    assert found.area == 600


def test_an_empty_canvas_shows_nothing():
    assert shown((20, 30), change=np.zeros_like).area == 0


def test_what_is_not_a_rectangle_is_refused():
    corner = np.tri(40, 40, dtype=float)
    with pytest.raises(NotAffineError, match="not a rectangle"):
        shown((40, 40), change=lambda canvas: canvas * corner)


def test_no_picture_leaves_the_range_of_eight_bits():
    for size in [(6, 6), (6, 3000), (500, 500)]:
        for axis in (0, 1):
            picture = RampImages(size, (0, 0, *size)).picture(axis)
            assert picture.min() > 20
            assert picture.max() < 235
