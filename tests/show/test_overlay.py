"""The bright spot lands on the right pixels, whatever was done to the photo before."""

import inspect
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from overt.geometry import PixelGeometry
from overt.show import overlay as module_function
from overt.show.overlay import (
    Style,
    check_photo,
    colour_table,
    enlarge,
    heat,
    highest,
    opacities,
    outline,
    overlay,
    resized,
    save_png,
    scale_bar,
    spotlight,
)

Change = Callable[[PixelGeometry], PixelGeometry]
CHANGES: dict[str, Change] = {
    "as it is": lambda g: g,
    "resize": lambda g: g.resize((96, 96)),
    "resize and crop": lambda g: g.resize((200, 240)).crop(20, 60, 160, 160),
    "pad": lambda g: g.pad(0, 10, 70, 30),
    "flip": lambda g: g.resize((128, 128)).flip(),
    "all of it": lambda g: g.resize((150, 300)).crop(10, 40, 120, 200).pad(8, 0, 0, 24).flip(),
}


def one_hot(rows: int, columns: int, row: int, column: int) -> np.ndarray:
    cells = np.zeros((rows, columns))
    cells[row, column] = 1
    return cells


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("size", [(300, 420), (50, 40)], ids=["large", "small"])
def test_the_bright_spot_lands_on_the_right_pixels(change: Change, size: tuple[int, int]) -> None:
    """The brightest pixel lies among the photo pixels that went into the cell, found one by one."""
    geometry = change(PixelGeometry.identity(1, size))
    picture_of = np.zeros((*size, 3), np.uint8)
    for row, column in ((0, 0), (1, 3), (3, 2), (2, 1)):
        into = photo_pixels_in_cell(geometry, row, column)
        if len(into) < 3:  # the cell is in the padding
            continue
        made = overlay(picture_of, one_hot(4, 4, row, column), geometry)
        times = made.shape[0] // size[0]
        bright = made.astype(int).sum(axis=-1)
        peak = np.argwhere(bright == bright.max()).mean(axis=0) / times
        low, high = into.min(axis=0), into.max(axis=0) + 1
        assert (low <= peak).all() and (peak <= high).all(), (peak, low, high)


def photo_pixels_in_cell(geometry: PixelGeometry, row: int, column: int) -> np.ndarray:
    """The photo pixels whose centre falls into a cell of a 4 x 4 grid."""
    at = np.indices(geometry.size[0].tolist()).transpose(1, 2, 0) + 0.5
    canvas = at * geometry.scale[0].numpy() + geometry.offset[0].numpy()
    cell = canvas // (np.array(geometry.canvas) / 4)
    return np.argwhere((cell == (row, column)).all(axis=-1))


def test_pixels_the_model_never_saw_stay_dark() -> None:
    image = np.full((300, 300, 3), 90, np.uint8)
    geometry = PixelGeometry.identity(1, (300, 300)).crop(100, 100, 100, 100)
    made = overlay(image, np.ones((2, 2)), geometry, Style(dim=0.0))
    inside = made[100:200, 100:200]
    assert (inside != 90).any(axis=-1).all()
    made[100:200, 100:200] = 90
    assert (made == 90).all()


def test_the_picture_has_the_photos_own_size_or_a_whole_multiple() -> None:
    cells = np.eye(3)
    assert overlay(np.zeros((480, 640, 3), np.uint8), cells).shape == (480, 640, 3)
    assert overlay(np.zeros((64, 64, 3), np.uint8), cells).shape == (256, 256, 3)
    assert overlay(np.zeros((32, 20, 3), np.uint8), cells).shape == (256, 160, 3)


def test_small_photos_keep_square_pixels_and_get_smooth_heat() -> None:
    image = np.random.default_rng(0).integers(0, 255, (16, 16, 3)).astype(np.uint8)
    assert (enlarge(image, 64)[::4, ::4] == image).all()
    assert (enlarge(image, 64)[3::4, 3::4] == image).all()
    levels = heat(one_hot(2, 2, 0, 0), resized(PixelGeometry.identity(1, (16, 16)), (256, 256)))
    assert np.abs(np.diff(levels.astype(int), axis=0)).max() <= 3


def test_heat_follows_the_formula() -> None:
    """At the centre of a cell, colour and photo are mixed by the opacity of its weight."""
    image = np.full((256, 256, 3), 200, np.uint8)
    cells = np.array([[0.0, 0.5], [0.0, 1.0]])
    made = overlay(image, cells, style=Style(strength=0.8, fade=0.0, dim=0.0, top=1.0))
    for (row, column), weight in np.ndenumerate(cells):
        level = round(255 * weight)
        alpha = 0.8 * (level / 255) ** 0.6
        expected = 200 * (1 - alpha) + colour_table("inferno")[level] * alpha
        np.testing.assert_allclose(made[64 + 128 * row, 64 + 128 * column], expected, atol=8)


def test_fade_and_dim_take_colour_and_light_out_of_the_photo_beneath() -> None:
    image = np.zeros((256, 256, 3), np.uint8)
    image[..., 0] = 90
    nothing = np.zeros((2, 2))
    assert (overlay(image, nothing, style=Style(fade=0.0, dim=0.0)) == image).all()
    assert (overlay(image, nothing, style=Style(fade=1.0, dim=0.0)) == round(90 * 0.2126)).all()
    assert (overlay(image, nothing, style=Style(fade=0.0, dim=0.5)) == image // 2).all()


def test_a_map_that_prefers_nothing_looks_pale() -> None:
    assert highest(np.full((4, 4), 1 / 16)) == pytest.approx(4 / 16)
    assert highest(one_hot(4, 4, 0, 0)) == 1
    assert highest(np.zeros((2, 2))) == 0
    geometry = PixelGeometry.identity(1, (8, 8))
    assert (heat(np.full((4, 4), 1 / 16), geometry) == 64).all()
    assert (heat(np.zeros((4, 4)), geometry) == 0).all()


def test_the_size_of_the_weights_does_not_matter_and_negative_ones_count_as_none() -> None:
    geometry = PixelGeometry.identity(1, (32, 32))
    cells = np.random.default_rng(0).random((4, 4))
    assert (heat(cells, geometry) == heat(1000 * cells, geometry)).all()
    assert (heat(-cells, geometry) == 0).all()
    with pytest.raises(ValueError, match="2 weights of the map are not finite"):
        heat(np.array([[np.nan, 1.0], [np.inf, 0.0]]), geometry)


def test_colours_grow_in_lightness() -> None:
    """What a perceptually uniform map promises: no weight looks darker than a smaller one."""
    luma = colour_table("inferno") @ [0.2126, 0.7152, 0.0722]
    assert (np.diff(luma) > 0).all()
    assert opacities(Style(strength=0.5))[[0, 255]].tolist() == [0, 0.5]
    with pytest.raises(ValueError, match="viridis"):
        colour_table("jet")


# --- outlines


def inside(loops: list[list[tuple[float, float]]], x: float, y: float) -> bool:
    """Whether a point is inside: a ray to the right crosses the lines an odd number of times."""
    crossings = 0
    for loop in loops:
        for (x0, y0), (x1, y1) in pairwise(loop):
            if x0 == x1 and x0 > x and min(y0, y1) <= y < max(y0, y1):
                crossings += 1
    return crossings % 2 == 1


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_outline_surrounds_the_cells_with_evidence(change: Change) -> None:
    geometry = change(PixelGeometry.identity(1, (90, 120)))
    rng = np.random.default_rng(0)
    for _ in range(5):
        truth = (rng.random((5, 6)) < 0.4) * rng.uniform(0.2, 1, (5, 6))
        loops = outline(truth, geometry)
        assert all(loop[0] == loop[-1] for loop in loops)
        boxes = geometry.cells((5, 6))[0].numpy().reshape(5, 6, 4)
        for (row, column), amount in np.ndenumerate(truth):
            x0, y0, x1, y1 = boxes[row, column]
            if x1 > x0 and y1 > y0:
                assert inside(loops, (x0 + x1) / 2, (y0 + y1) / 2) == (amount > 0)


def test_the_outline_of_one_cell_is_a_rectangle() -> None:
    loops = outline(one_hot(2, 2, 1, 0), PixelGeometry.identity(1, (20, 20)))
    assert loops == [[(0, 10), (10, 10), (10, 20), (0, 20), (0, 10)]]
    assert outline(np.zeros((2, 2)), PixelGeometry.identity(1, (20, 20))) == []


def test_a_share_says_how_much_evidence_counts() -> None:
    truth = np.array([[1.0, 0.05]])
    geometry = PixelGeometry.identity(1, (10, 20))
    for share, end in ((0.0, 20), (0.1, 10)):
        assert max(x for loop in outline(truth, geometry, share) for x, _ in loop) == end


def test_the_outline_is_drawn_on_the_picture() -> None:
    image = np.full((256, 256, 3), 128, np.uint8)
    truth = one_hot(2, 2, 0, 1)
    style = Style(fade=0.0, dim=0.0, outline=(0, 255, 0))
    made = overlay(image, np.zeros((2, 2)), style=style, truth=truth)
    rows, columns = np.nonzero((made == (0, 255, 0)).all(axis=-1))
    assert columns.min() == pytest.approx(128, abs=2) and rows.max() == pytest.approx(128, abs=2)
    assert (made[150:, :100] == 128).all()


# --- files and keys


def test_scale_bar_runs_from_the_ground_to_the_last_colour() -> None:
    bar = scale_bar(100, 8, Style(strength=1.0), under=255)
    assert bar.shape == (8, 100, 3)
    assert (bar[:, 0] == 255).all()
    np.testing.assert_allclose(bar[0, -1], colour_table("inferno")[-1], atol=1)


def test_a_png_comes_back_pixel_by_pixel(tmp_path: Path) -> None:
    picture = torch.randint(0, 256, (12, 7, 3), dtype=torch.uint8).numpy()
    save_png(str(tmp_path / "a" / "b.png"), picture)
    assert (np.asarray(Image.open(tmp_path / "a" / "b.png")) == picture).all()


def test_the_package_gives_the_function() -> None:
    assert module_function is overlay


# --- hard attention


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_kept_cells_are_the_photo_and_the_rest_is_dim(change: Change) -> None:
    """Pixels are judged one by one, but for those that a cell's edge may round either way."""
    size = (300, 420)
    geometry = change(PixelGeometry.identity(1, size))
    image = np.random.default_rng(0).integers(60, 256, (*size, 3), dtype=np.uint8)
    cells = one_hot(4, 4, 1, 2) + one_hot(4, 4, 2, 1)
    made = spotlight(image, cells, geometry)
    inside = np.zeros(size, bool)
    for row, column in ((1, 2), (2, 1)):
        into = photo_pixels_in_cell(geometry, row, column)
        inside[tuple(into.T)] = True
    lit = (made == image).all(axis=-1)
    grown = np.zeros((*size, 9), bool)
    padded = np.pad(inside, 1, mode="edge")
    for at in range(9):
        y, x = divmod(at, 3)
        grown[..., at] = padded[y : y + size[0], x : x + size[1]]
    assert lit[grown.all(axis=-1)].all()
    assert not lit[~grown.any(axis=-1)].any()
    assert made[~grown.any(axis=-1)].max() < 90


def test_how_strong_a_kept_cell_is_plays_no_part() -> None:
    image = np.full((64, 64, 3), 200, np.uint8)
    cells = np.array([[0.0, 0.1], [3.0, 0.0]])
    made = spotlight(image, cells)
    assert made.shape == (256, 256, 3)
    assert (made[:128, 128:] == 200).all() and (made[128:, :128] == 200).all()
    assert (made[:128, :128] < 100).all() and (made[128:, 128:] < 100).all()
    assert (spotlight(image, (cells > 0).astype(float)) == made).all()
    assert (spotlight(image, np.zeros((2, 2))) < 100).all()
    lined = spotlight(image, cells, truth=np.array([[1.0, 0.0], [0.0, 0.0]]))
    assert (lined != made).any()
    with pytest.raises(ValueError, match="1 weights of the map are not finite"):
        spotlight(image, np.array([[np.nan]]))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (np.zeros((4, 5, 3)), r"this is \(4, 5, 3\) of float64"),
        (np.zeros((4, 5), np.uint8), r"this is \(4, 5\) of uint8"),
        (np.zeros((4, 5, 4), np.uint8), r"this is \(4, 5, 4\) of uint8"),
        (torch.zeros(3, 4, 5), "this is a Tensor"),
        (Image.new("RGB", (5, 4)), r"this is an? Image: np.asarray\(image.convert\('RGB'\)\)"),
    ],
    ids=["floats", "grey", "alpha", "tensor", "PIL"],
)
def test_what_is_no_photo_is_refused_and_not_drawn_black(given: object, said: str) -> None:
    unchecked = inspect.unwrap(check_photo)  # without the checks of types that only tests have
    with pytest.raises(ValueError, match=said):
        unchecked(given)
    unchecked(np.zeros((4, 5, 3), np.uint8))
