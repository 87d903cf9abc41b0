"""Map differences: shared colour scale, positions on the photo and diverging colours."""

import numpy as np
import pytest
from PIL import Image

from overt.geometry import PixelGeometry
from overt.viz.contours import contours
from overt.viz.figure import DPI, PAGE_WIDTH, save_figure
from overt.viz.map_diff import (
    EDGE,
    GAP,
    compare_maps,
    difference_image,
    diverging_colours,
    word_maps,
)
from tests.viz.test_figure import as_deuteranope
from tests.viz.test_photo_overlay import one_hot


def figure_pixels(path, figure) -> np.ndarray:
    return np.asarray(Image.open(save_figure(path, figure)).convert("RGB")).astype(int)


def crop_tile(
    picture: np.ndarray, number: int, columns: int, aspect: float, top: float
) -> np.ndarray:
    """The pixels of one of several images in a row."""
    width = (PAGE_WIDTH - 2 * EDGE - (columns - 1) * GAP) / columns
    left = EDGE + number * (width + GAP)
    inches = top, top + width * aspect, left, left + width
    y0, y1, x0, x1 = (round(DPI * side) for side in inches)
    return picture[y0 + 2 : y1 - 2, x0 + 2 : x1 - 2]


def brightest_positions(part: np.ndarray) -> np.ndarray:
    """Positions of the brightest pixels, as shares of height and width."""
    bright = part.sum(axis=-1)
    return np.argwhere(bright >= bright.max() - 30) / np.array(part.shape[:2])


def is_within(at: np.ndarray, low: tuple[float, float], high: tuple[float, float]) -> bool:
    slack = 0.02
    return bool(((at >= np.array(low) - slack) & (at <= np.array(high) + slack)).all())


def test_bright_spots_match_the_maps_at_the_photo_aspect(tmp_path):
    photo = np.full((200, 400, 3), 60, np.uint8)
    geometry = PixelGeometry.identity(1, (200, 400)).resize((224, 448)).crop(0, 112, 224, 224)
    before, after = one_hot(4, 4, 0, 0), one_hot(4, 4, 3, 3)
    picture = figure_pixels(tmp_path / "a.png", compare_maps(photo, before, after, geometry))
    for number, (row, column) in enumerate([(0, 0), (3, 3)]):
        part = crop_tile(picture, number, 3, 0.5, 0.26)
        # the crop keeps the middle half of the photo
        low, high = (row / 4, 0.25 + column / 8), ((row + 1) / 4, 0.25 + (column + 1) / 8)
        assert is_within(brightest_positions(part), low, high)
    shift = crop_tile(picture, 2, 3, 0.5, 0.26)
    warm, cold = shift[..., 0] - shift[..., 2], shift[..., 2] - shift[..., 0]
    shape = np.array(shift.shape[:2])
    more, less = (np.argwhere(one > 0.9 * one.max()) / shape for one in (warm, cold))
    assert is_within(more, (0.75, 0.625), (1, 0.75)) and is_within(less, (0, 0.25), (0.25, 0.375))


def test_two_maps_share_one_colour_scale():
    """The flat map stays pale next to a sharp one."""
    photo = np.full((256, 256, 3), 60, np.uint8)
    calls = []

    def draw(image, cells, geometry, style):
        calls.append((float(cells.max()), style.top))
        return image

    compare_maps(photo, np.ones((4, 4)), one_hot(4, 4, 1, 1), draw=draw)
    assert calls == [(1.0, 16.0), (16.0, 16.0)]  # density 1 (uniform) and 16


def test_equal_maps_give_a_grey_difference_on_any_grids():
    photo = np.full((256, 256, 3), 60, np.uint8)
    same, most = difference_image(photo, np.ones((4, 4)), np.ones((7, 7)) / 49)
    assert most == 0 and (same.std(axis=-1) == 0).all()
    other, most = difference_image(photo, one_hot(2, 2, 0, 0), np.ones((7, 7)))
    assert most == pytest.approx(3) and (other.std(axis=-1) > 0).any()


def test_diverging_colours_differ_also_with_deuteranopia():
    table = as_deuteranope(diverging_colours().astype(float))
    assert np.linalg.norm(table[0] - table[-1]) > 120
    assert (diverging_colours()[127:129] >= 253).all()


def test_word_maps_are_drawn_in_word_order(tmp_path):
    photo = np.full((100, 100, 3), 60, np.uint8)
    words = ["a", "dog", "runs", "far"]
    maps = np.stack([one_hot(3, 3, at // 3, at % 3) for at in (0, 2, 4, 8)])
    picture = figure_pixels(tmp_path / "a.png", word_maps(photo, words, maps, columns=5))
    assert (crop_tile(picture, 0, 5, 1.0, 0.26) == 60).all()  # the photo without a map
    for number, at in enumerate((0, 2, 4, 8), start=1):
        part = crop_tile(picture, number, 5, 1.0, 0.26)
        low = (at // 3 / 3, at % 3 / 3)
        assert is_within(brightest_positions(part), low, (low[0] + 1 / 3, low[1] + 1 / 3))
    svg = save_figure(tmp_path / "a.svg", word_maps(photo, words, maps, columns=2)).read_text()
    assert [svg.index(f">{word}</") for word in words] == sorted(
        svg.index(f">{word}</") for word in words
    )


def test_draw_function_can_be_replaced_and_bad_maps_raise():
    photo = np.full((64, 64, 3), 60, np.uint8)
    word_maps(photo, ["dog"], np.ones((1, 2, 2)), draw=contours)
    with pytest.raises(ValueError, match="1 maps.*2 words"):
        word_maps(photo, ["a", "dog"], np.ones((1, 2, 2)))
    with pytest.raises(ValueError, match="not finite"):
        compare_maps(photo, np.ones((2, 2)), np.full((2, 2), np.nan))
