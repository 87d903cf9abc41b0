"""A line through what was seen becomes the whole numbers behind it."""

import numpy as np
import pytest

from overt.capture.layouts.axis_fit import (
    AxisSamples,
    fit_line,
    guess_line,
    scale_of,
    visible_range,
)
from overt.capture.layouts.ramp_images import NotAffineError


def seen(size, scale, offset, length, noise=0.0, step=0.5):
    at = np.arange(length) + 0.5
    photo = (at - offset) / scale
    inside = (photo > 0) & (photo < size)
    photo = photo + noise * np.random.default_rng(0).standard_normal(length)
    places = np.flatnonzero(inside)
    return AxisSamples(
        size=size,
        step=step,
        length=length,
        start=int(places[0]),
        stop=int(places[-1]) + 1,
        at=at[inside],
        photo=photo[inside],
    )


@pytest.mark.parametrize(
    ("size", "resized", "moved", "length"),
    [(480, 224, 0, 224), (640, 341, -58, 224), (100, 90, 12, 128), (300, -224, 224, 224)],
)
def test_a_resize_and_a_crop_or_pad_are_found_to_the_pixel(size, resized, moved, length):
    axis = seen(size, resized / size, moved, length, noise=0.05)
    assert fit_line(axis, []) == (resized / size, float(moved))


def test_a_crop_before_the_resize_is_found_to_the_pixel():
    scale = 224 / 78
    assert fit_line(seen(90, scale, -6 * scale, 224, noise=0.002), []) == (scale, -6 * scale)


def test_a_line_of_no_whole_pixels_stays_as_it_was_measured():
    scale, offset = fit_line(seen(200, 0.7312, 3.37, 160), [])
    assert (scale, offset) == pytest.approx((0.7312, 3.37))


def test_a_scale_seen_on_another_tile_is_taken_over():
    axis = seen(140, 523.4 / 140, 74, 224, noise=0.01)
    assert fit_line(axis, [523 / 140])[0] == 523 / 140


def test_a_curve_is_refused():
    axis = seen(400, 0.5, 0, 200)
    with pytest.raises(NotAffineError, match="uniform scaling"):
        fit_line(AxisSamples(**{**vars(axis), "photo": axis.photo**2 / 400}), [])


def test_what_does_not_run_along_the_axis_is_refused():
    axis = seen(400, 0.5, 0, 200)
    with pytest.raises(NotAffineError, match="rotated"):
        fit_line(AxisSamples(**{**vars(axis), "photo": np.full(200, 7.0)}), [])


def test_few_pixels_are_the_whole_photo_or_a_strip_at_a_scale_seen_elsewhere():
    assert fit_line(seen(300, 5 / 300, 0, 5), []) is None
    assert guess_line(seen(300, 5 / 300, 0, 5), []) == (5 / 300, 0.0)
    strip = seen(300, 0.5, -145, 20)  # the last five canvas pixels of a photo
    assert guess_line(strip, [0.5]) == (0.5, -145.0)


def test_a_few_large_pixels_are_refused_and_not_guessed():
    with pytest.raises(NotAffineError, match=r"5 .*too few"):
        guess_line(seen(5, 40.0, 0, 200), [])


def test_what_is_kept_ends_where_the_photo_or_the_canvas_ends():
    assert visible_range(seen(100, 2.0, -30, 100), (2.0, -30.0)) == (15.0, 65.0)
    assert visible_range(seen(100, 0.5, 10, 100), (0.5, 10.0)) == (0.0, 100.0)


def test_an_axis_without_a_line_is_taken_for_whole():
    axis = seen(300, 5 / 300, 0, 5)
    assert scale_of(axis, None) == 5 / 300
    assert scale_of(axis, (-0.25, 3.0)) == 0.25
