"""Photo overlays: positions, colours, outlines, files and hard attention."""

import inspect
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from overt import AttentionMap, grid, words
from overt.attention import Form, Kind
from overt.geometry import PixelGeometry
from overt.viz import compare_maps, contours, hard_mask
from overt.viz.photo_overlay import (
    OverlayStyle,
    as_photo,
    cell_outline,
    check_finite,
    colour_bar,
    colour_limit,
    colour_table,
    enlarge_photo,
    heat_levels,
    image_cells,
    opacities,
    overlay,
    resize_geometry,
    save_png,
    spotlight,
)

Change = Callable[[PixelGeometry], PixelGeometry]
CHANGES: dict[str, Change] = {
    "unchanged": lambda g: g,
    "resize": lambda g: g.resize((96, 96)),
    "resize and crop": lambda g: g.resize((200, 240)).crop(20, 60, 160, 160),
    "pad": lambda g: g.pad(0, 10, 70, 30),
    "flip": lambda g: g.resize((128, 128)).flip(),
    "all": lambda g: g.resize((150, 300)).crop(10, 40, 120, 200).pad(8, 0, 0, 24).flip(),
}


def one_hot(rows: int, columns: int, row: int, column: int) -> np.ndarray:
    cells = np.zeros((rows, columns))
    cells[row, column] = 1
    return cells


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("size", [(300, 420), (50, 40)], ids=["large", "small"])
def test_bright_spot_follows_the_geometry(change: Change, size: tuple[int, int]) -> None:
    """The brightest pixel is among the photo pixels of the cell, found one by one."""
    geometry = change(PixelGeometry.identity(1, size))
    black = np.zeros((*size, 3), np.uint8)
    for row, column in ((0, 0), (1, 3), (3, 2), (2, 1)):
        into = photo_pixels_in_cell(geometry, row, column)
        if len(into) < 3:  # the cell is in the padding
            continue
        made = overlay(black, one_hot(4, 4, row, column), geometry)
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


def test_pixels_outside_the_crop_are_unchanged() -> None:
    image = np.full((300, 300, 3), 90, np.uint8)
    geometry = PixelGeometry.identity(1, (300, 300)).crop(100, 100, 100, 100)
    made = overlay(image, np.ones((2, 2)), geometry, OverlayStyle(dim=0.0))
    inside = made[100:200, 100:200]
    assert (inside != 90).any(axis=-1).all()
    made[100:200, 100:200] = 90
    assert (made == 90).all()


def test_overlay_has_the_photo_size_or_an_integer_multiple() -> None:
    cells = np.eye(3)
    assert overlay(np.zeros((480, 640, 3), np.uint8), cells).shape == (480, 640, 3)
    assert overlay(np.zeros((64, 64, 3), np.uint8), cells).shape == (256, 256, 3)
    assert overlay(np.zeros((32, 20, 3), np.uint8), cells).shape == (256, 160, 3)


def test_small_photos_have_square_pixels_and_smooth_heat() -> None:
    image = np.random.default_rng(0).integers(0, 255, (16, 16, 3)).astype(np.uint8)
    assert (enlarge_photo(image, 64)[::4, ::4] == image).all()
    assert (enlarge_photo(image, 64)[3::4, 3::4] == image).all()
    levels = heat_levels(
        one_hot(2, 2, 0, 0), resize_geometry(PixelGeometry.identity(1, (16, 16)), (256, 256))
    )
    assert np.abs(np.diff(levels.astype(int), axis=0)).max() <= 3


def test_overlay_mixes_colour_and_photo_by_opacity() -> None:
    """At the centre of a cell, colour and photo are mixed by the opacity of its weight."""
    image = np.full((256, 256, 3), 200, np.uint8)
    cells = np.array([[0.0, 0.5], [0.0, 1.0]])
    made = overlay(image, cells, style=OverlayStyle(strength=0.8, fade=0.0, dim=0.0, top=1.0))
    for (row, column), weight in np.ndenumerate(cells):
        level = round(255 * weight)
        alpha = 0.8 * (level / 255) ** 0.6
        expected = 200 * (1 - alpha) + colour_table("inferno")[level] * alpha
        np.testing.assert_allclose(made[64 + 128 * row, 64 + 128 * column], expected, atol=8)


def test_fade_and_dim_reduce_colour_and_brightness_of_the_photo() -> None:
    image = np.zeros((256, 256, 3), np.uint8)
    image[..., 0] = 90
    nothing = np.zeros((2, 2))
    assert (overlay(image, nothing, style=OverlayStyle(fade=0.0, dim=0.0)) == image).all()
    assert (
        overlay(image, nothing, style=OverlayStyle(fade=1.0, dim=0.0)) == round(90 * 0.2126)
    ).all()
    assert (overlay(image, nothing, style=OverlayStyle(fade=0.0, dim=0.5)) == image // 2).all()


def test_uniform_map_is_pale() -> None:
    assert colour_limit(np.full((4, 4), 1 / 16)) == pytest.approx(4 / 16)
    assert colour_limit(one_hot(4, 4, 0, 0)) == 1
    assert colour_limit(np.zeros((2, 2))) == 0
    geometry = PixelGeometry.identity(1, (8, 8))
    assert (heat_levels(np.full((4, 4), 1 / 16), geometry) == 64).all()
    assert (heat_levels(np.zeros((4, 4)), geometry) == 0).all()


def test_heat_is_scale_invariant_and_zero_for_negative_weights() -> None:
    geometry = PixelGeometry.identity(1, (32, 32))
    cells = np.random.default_rng(0).random((4, 4))
    assert (heat_levels(cells, geometry) == heat_levels(1000 * cells, geometry)).all()
    assert (heat_levels(-cells, geometry) == 0).all()
    with pytest.raises(ValueError, match=r"2 weights.*finite"):
        heat_levels(np.array([[np.nan, 1.0], [np.inf, 0.0]]), geometry)


def test_colour_table_increases_in_lightness() -> None:
    """Perceptually uniform: no weight looks darker than a smaller one."""
    luma = colour_table("inferno") @ [0.2126, 0.7152, 0.0722]
    assert (np.diff(luma) > 0).all()
    assert opacities(OverlayStyle(strength=0.5))[[0, 255]].tolist() == [0, 0.5]
    with pytest.raises(ValueError, match="viridis"):
        colour_table("jet")


# --- outlines


def is_inside(loops: list[list[tuple[float, float]]], x: float, y: float) -> bool:
    """Whether a point is inside: a ray to the right crosses the lines an odd number of times."""
    crossings = 0
    for loop in loops:
        for (x0, y0), (x1, y1) in pairwise(loop):
            if x0 == x1 and x0 > x and min(y0, y1) <= y < max(y0, y1):
                crossings += 1
    return crossings % 2 == 1


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_outline_surrounds_the_cells_with_evidence(change: Change) -> None:
    geometry = change(PixelGeometry.identity(1, (90, 120)))
    rng = np.random.default_rng(0)
    for _ in range(5):
        truth = (rng.random((5, 6)) < 0.4) * rng.uniform(0.2, 1, (5, 6))
        loops = cell_outline(truth, geometry)
        assert all(loop[0] == loop[-1] for loop in loops)
        boxes = geometry.cells((5, 6))[0].numpy().reshape(5, 6, 4)
        for (row, column), amount in np.ndenumerate(truth):
            x0, y0, x1, y1 = boxes[row, column]
            if x1 > x0 and y1 > y0:
                assert is_inside(loops, (x0 + x1) / 2, (y0 + y1) / 2) == (amount > 0)


def test_outline_of_one_cell_is_a_rectangle() -> None:
    loops = cell_outline(one_hot(2, 2, 1, 0), PixelGeometry.identity(1, (20, 20)))
    assert loops == [[(0, 10), (10, 10), (10, 20), (0, 20), (0, 10)]]
    assert cell_outline(np.zeros((2, 2)), PixelGeometry.identity(1, (20, 20))) == []


def test_outline_share_is_a_threshold() -> None:
    truth = np.array([[1.0, 0.05]])
    geometry = PixelGeometry.identity(1, (10, 20))
    for share, end in ((0.0, 20), (0.1, 10)):
        assert max(x for loop in cell_outline(truth, geometry, share) for x, _ in loop) == end


def test_outline_is_drawn_on_the_overlay() -> None:
    image = np.full((256, 256, 3), 128, np.uint8)
    truth = one_hot(2, 2, 0, 1)
    style = OverlayStyle(fade=0.0, dim=0.0, outline=(0, 255, 0))
    made = overlay(image, np.zeros((2, 2)), style=style, truth=truth)
    rows, columns = np.nonzero((made == (0, 255, 0)).all(axis=-1))
    assert columns.min() == pytest.approx(128, abs=2) and rows.max() == pytest.approx(128, abs=2)
    assert (made[150:, :100] == 128).all()


# --- files and colour bars


def test_colour_bar_runs_from_the_background_to_the_last_colour() -> None:
    bar = colour_bar(100, 8, OverlayStyle(strength=1.0), under=255)
    assert bar.shape == (8, 100, 3)
    assert (bar[:, 0] == 255).all()
    np.testing.assert_allclose(bar[0, -1], colour_table("inferno")[-1], atol=1)


def test_saved_png_loads_unchanged(tmp_path: Path) -> None:
    picture = torch.randint(0, 256, (12, 7, 3), dtype=torch.uint8).numpy()
    save_png(str(tmp_path / "a" / "b.png"), picture)
    assert (np.asarray(Image.open(tmp_path / "a" / "b.png")) == picture).all()


# --- hard attention


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_spotlight_keeps_selected_cells_and_dims_the_rest(change: Change) -> None:
    """Every pixel is checked, except those at cell edges, which may round either way."""
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


def test_spotlight_ignores_the_size_of_weights() -> None:
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
    with pytest.raises(ValueError, match=r"1 weights.*finite"):
        spotlight(image, np.array([[np.nan]]))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (np.zeros((4, 5, 3)), r"5, 3\).*float64.*as"),
        (np.zeros((4, 5), np.uint8), r"5\).*fromarray"),
        (np.zeros((4, 5, 4), np.uint8), r"\(4, 5, 4\).*uint8"),
        (torch.zeros(3, 4, 5), r"Tensor.*permute"),
        ("photo.png", r"png: .*Image\.open"),
    ],
    ids=["floats", "grey", "alpha", "tensor", "path"],
)
def test_invalid_photos_raise(given: object, message: str) -> None:
    unchecked = inspect.unwrap(as_photo)  # without the type checks of the test suite
    with pytest.raises(ValueError, match=message):
        unchecked(given)


def test_arrays_and_pil_images_are_photos():
    array = np.random.default_rng(0).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    assert as_photo(array) is array
    assert (as_photo(Image.fromarray(array)) == array).all()
    assert as_photo(Image.new("L", (5, 4), 7)).tolist() == [[[7, 7, 7]] * 5] * 4
    cells = np.eye(2)
    assert (overlay(Image.fromarray(array), cells) == overlay(array, cells)).all()


# --- maps


def self_attention(layers: int = 2) -> AttentionMap:
    """A class token and a grid of 2 x 3 cells, on a photo that was resized and cropped."""
    axis = words(1, "class") + grid(2, 3, geometry=GEOMETRY)
    scores = torch.randn(1, layers, 4, 7, 7, generator=torch.Generator().manual_seed(0))
    return AttentionMap.from_scores(scores, axis, axis)


GEOMETRY = PixelGeometry.identity(1, (40, 60)).resize((20, 30)).crop(0, 5, 20, 24)
PHOTO = np.full((40, 60, 3), 128, np.uint8)


def test_a_map_is_drawn_as_its_class_token_in_the_last_layer():
    attention = self_attention()
    cells = attention.weights[0, -1].mean(dim=0)[0, 1:].reshape(2, 3).double().numpy()
    found, geometry = image_cells(attention)
    np.testing.assert_allclose(found, cells, rtol=1e-6)
    assert geometry is attention.keys.find("image").geometry
    assert (overlay(PHOTO, attention) == overlay(PHOTO, found, GEOMETRY)).all()
    other = attention.weights[0, 0, 2, 3, 1:].reshape(2, 3).double().numpy()
    chosen = image_cells(attention, layer=0, head=2, query="3")[0]
    np.testing.assert_allclose(chosen, other, rtol=1e-6)


def test_the_geometry_of_a_map_may_be_replaced():
    attention = self_attention()
    whole = PixelGeometry.identity(1, (40, 60))
    made = overlay(PHOTO, attention, whole)
    assert (made == overlay(PHOTO, image_cells(attention)[0], whole)).all()
    assert (made != overlay(PHOTO, attention)).any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda one: replace(one, values=one.weights, form=Form.PLAIN, kind=Kind.SIGNED),
            "positive",
        ),
        (lambda one: one.select(torch.tensor([0, 0])), "got 2.*sample"),
        (lambda one: one.block("image", "class"), "got 0.*layout="),
        (lambda one: replace(one, keys=grid(1, 3, "left") + grid(2, 2, "right")), "got 2"),
    ],
    ids=["signed", "samples", "text", "two images"],
)
def test_a_map_without_one_picture_raises(change: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        overlay(PHOTO, change(self_attention()))


@pytest.mark.parametrize("draw", [overlay, spotlight, contours, hard_mask])
def test_a_map_without_geometry_warns_on_a_photo_of_another_shape(draw: Any) -> None:
    attention = AttentionMap.from_cells(torch.rand(1, 49), grid(7, 7))
    photo = np.zeros((300, 451, 3), np.uint8)
    with pytest.warns(UserWarning, match="processor="):
        draw(photo, attention)
    placed = AttentionMap.from_cells(
        torch.rand(1, 49), grid(7, 7, geometry=PixelGeometry.identity(1, (300, 451)))
    )
    oblong = AttentionMap.from_cells(torch.rand(1, 24), grid(4, 6))  # 75 pixels a cell
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        overlay(np.zeros((300, 300, 3), np.uint8), attention)
        overlay(photo, placed)
        overlay(photo, oblong)


def test_every_picture_of_a_photo_takes_a_map():
    attention = self_attention()
    cells = image_cells(attention)[0]
    for draw in (overlay, spotlight, contours, hard_mask):
        assert (draw(PHOTO, attention) == draw(PHOTO, cells, GEOMETRY)).all()
    images = [
        [np.asarray(axes.images[0].get_array()) for axes in figure.axes if axes.images]
        for figure in (
            compare_maps(PHOTO, attention.layer(0), attention),
            compare_maps(PHOTO, image_cells(attention, layer=0)[0], cells, GEOMETRY),
        )
    ]
    assert len(images[0]) >= 3
    for one, other in zip(*images, strict=True):
        assert (one == other).all()


def test_non_finite_weights_raise():
    with pytest.raises(ValueError, match=r"2 weights.*finite"):
        check_finite(np.array([np.nan, np.inf, 1.0]))


@pytest.mark.parametrize("size", [(224, 224), (200, 451), (451, 300)], ids=str)
def test_a_photo_of_another_shape_than_that_of_the_map_raises(size: tuple[int, int]) -> None:
    """A cropped photo, or one that was not turned, would have the heat elsewhere."""
    geometry = PixelGeometry.identity(1, (300, 451)).resize((224, 337)).crop(0, 56, 224, 224)
    heat = AttentionMap.from_cells(torch.eye(16)[:1], grid(4, 4, geometry=geometry))
    with pytest.raises(ValueError, match=r"300 x 451.*pass"):
        overlay(np.zeros((*size, 3), np.uint8), heat)


def test_a_thumbnail_has_the_geometry_of_its_photo() -> None:
    geometry = PixelGeometry.identity(1, (300, 451))
    heat = AttentionMap.from_cells(torch.eye(4)[:1], grid(2, 2, geometry=geometry))
    assert overlay(np.zeros((100, 150, 3), np.uint8), heat).shape == (200, 300, 3)
