"""Side by side: one scale, the right pixels, a difference that says more and less."""

import numpy as np
import pytest
from PIL import Image

from overt.geometry import PixelGeometry
from overt.show.beside import EDGE, GAP, changed, difference, two_ways, word_by_word
from overt.show.contours import contours
from overt.show.figure import DPI, PAGE, save_figure
from tests.show.test_figure import as_deuteranope
from tests.show.test_overlay import one_hot


def pixels(path, figure) -> np.ndarray:
    return np.asarray(Image.open(save_figure(path, figure)).convert("RGB")).astype(int)


def tile(picture: np.ndarray, number: int, columns: int, aspect: float, top: float) -> np.ndarray:
    """The pixels of one of several pictures beside each other."""
    wide = (PAGE - 2 * EDGE - (columns - 1) * GAP) / columns
    left = EDGE + number * (wide + GAP)
    inches = top, top + wide * aspect, left, left + wide
    y0, y1, x0, x1 = (round(DPI * side) for side in inches)
    return picture[y0 + 2 : y1 - 2, x0 + 2 : x1 - 2]


def brightest(part: np.ndarray) -> np.ndarray:
    """Where the brightest pixels are, as shares of height and width."""
    bright = part.sum(axis=-1)
    return np.argwhere(bright >= bright.max() - 30) / np.array(part.shape[:2])


def within(at: np.ndarray, low: tuple[float, float], high: tuple[float, float]) -> bool:
    slack = 0.02
    return bool(((at >= np.array(low) - slack) & (at <= np.array(high) + slack)).all())


def test_bright_spots_are_where_the_maps_have_them_at_the_photos_aspect(tmp_path):
    photo = np.full((200, 400, 3), 60, np.uint8)
    geometry = PixelGeometry.identity(1, (200, 400)).resize((224, 448)).crop(0, 112, 224, 224)
    before, after = one_hot(4, 4, 0, 0), one_hot(4, 4, 3, 3)
    picture = pixels(tmp_path / "a.png", changed(photo, before, after, geometry))
    for number, (row, column) in enumerate([(0, 0), (3, 3)]):
        part = tile(picture, number, 3, 0.5, 0.26)
        # the crop keeps the middle half of the photo
        low, high = (row / 4, 0.25 + column / 8), ((row + 1) / 4, 0.25 + (column + 1) / 8)
        assert within(brightest(part), low, high)
    shift = tile(picture, 2, 3, 0.5, 0.26)
    warm, cold = shift[..., 0] - shift[..., 2], shift[..., 2] - shift[..., 0]
    shape = np.array(shift.shape[:2])
    more, less = (np.argwhere(one > 0.9 * one.max()) / shape for one in (warm, cold))
    assert within(more, (0.75, 0.625), (1, 0.75)) and within(less, (0, 0.25), (0.25, 0.375))


def test_two_maps_share_one_scale():
    """Of a sharp and a flat map, the flat one stays pale."""
    photo = np.full((256, 256, 3), 60, np.uint8)
    seen = []

    def draw(image, cells, geometry, style):
        seen.append((float(cells.max()), style.top))
        return image

    changed(photo, np.ones((4, 4)), one_hot(4, 4, 1, 1), draw=draw)
    assert seen == [(1.0, 16.0), (16.0, 16.0)]  # as dense as an even map, and 16 times


def test_no_change_is_grey_and_grids_may_differ():
    photo = np.full((256, 256, 3), 60, np.uint8)
    same, most = difference(photo, np.ones((4, 4)), np.ones((7, 7)) / 49)
    assert most == 0 and (same.std(axis=-1) == 0).all()
    other, most = difference(photo, one_hot(2, 2, 0, 0), np.ones((7, 7)))
    assert most == pytest.approx(3) and (other.std(axis=-1) > 0).any()


def test_less_and_more_differ_for_everybody():
    table = as_deuteranope(two_ways().astype(float))
    assert np.linalg.norm(table[0] - table[-1]) > 120
    assert (two_ways()[127:129] >= 253).all()


def test_a_caption_has_one_map_a_word_in_its_order(tmp_path):
    photo = np.full((100, 100, 3), 60, np.uint8)
    words = ["a", "dog", "runs", "far"]
    maps = np.stack([one_hot(3, 3, at // 3, at % 3) for at in (0, 2, 4, 8)])
    picture = pixels(tmp_path / "a.png", word_by_word(photo, words, maps, columns=5))
    assert (tile(picture, 0, 5, 1.0, 0.26) == 60).all()  # the photo itself
    for number, at in enumerate((0, 2, 4, 8), start=1):
        part = tile(picture, number, 5, 1.0, 0.26)
        low = (at // 3 / 3, at % 3 / 3)
        assert within(brightest(part), low, (low[0] + 1 / 3, low[1] + 1 / 3))
    svg = save_figure(tmp_path / "a.svg", word_by_word(photo, words, maps, columns=2)).read_text()
    assert [svg.index(f">{word}</") for word in words] == sorted(
        svg.index(f">{word}</") for word in words
    )


def test_any_way_of_drawing_will_do_and_what_does_not_fit_is_said():
    photo = np.full((64, 64, 3), 60, np.uint8)
    word_by_word(photo, ["dog"], np.ones((1, 2, 2)), draw=contours)
    with pytest.raises(ValueError, match="1 maps for 2 words"):
        word_by_word(photo, ["a", "dog"], np.ones((1, 2, 2)))
    with pytest.raises(ValueError, match="not finite"):
        changed(photo, np.ones((2, 2)), np.full((2, 2), np.nan))
