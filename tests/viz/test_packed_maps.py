"""Packed maps: precision, cell edges, differences and hard masks inside a page."""

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image

from overt.geometry import PixelGeometry
from overt.viz.map_diff import difference_image, map_density
from overt.viz.packed_maps import (
    difference_png,
    difference_scale_css,
    grid_edges,
    hard_mask_png,
    is_hard_map,
    pack_map,
    packed_size,
    unpack_map,
)

PLAIN = PixelGeometry.identity(1, (40, 80))


@given(arrays(np.float64, (3, 4), elements=st.floats(0, 1e6)))
@settings(max_examples=50, deadline=None)
def test_unpacked_values_are_exact_to_one_quantization_step(cells: np.ndarray) -> None:
    top = cells.max()
    np.testing.assert_allclose(unpack_map(pack_map(cells)), cells, atol=top * 1.1e-5, rtol=0)
    np.testing.assert_allclose(unpack_map(pack_map(cells, 8)), cells, atol=top * 2.1e-3, rtol=0)
    for bits in (8, 16):
        assert abs(len(pack_map(cells, bits)) - packed_size(cells, bits)) < 40


def test_negative_values_are_packed_as_zero() -> None:
    found = unpack_map(pack_map(np.array([[-1.0, 2.0]])))
    np.testing.assert_allclose(found, [[0, 2]])
    assert pack_map(np.zeros((1, 2))).startswith("1 2 0 0 ")


def parse_pairs(text: str) -> list[list[float]]:
    return [[float(end) for end in pair.split()] for pair in text.split(",")]


def test_grid_edges_follow_the_geometry() -> None:
    columns, rows = grid_edges(PLAIN, (2, 4))
    assert parse_pairs(columns) == [[0, 25], [25, 50], [50, 75], [75, 100]]
    assert parse_pairs(rows) == [[0, 50], [50, 100]]
    columns, _ = grid_edges(PLAIN.crop(0, 20, 40, 40), (2, 4))
    assert parse_pairs(columns) == [[25, 37.5], [37.5, 50], [50, 62.5], [62.5, 75]]
    columns, _ = grid_edges(PLAIN.flip(), (2, 2))
    assert parse_pairs(columns) == [[50, 100], [0, 50]]
    _, rows = grid_edges(PLAIN.pad(40, 0, 0, 0), (2, 2))
    padding, photo = parse_pairs(rows)
    assert padding[0] == padding[1] and photo == [0, 100]


def test_difference_png_agrees_with_difference_image() -> None:
    rng = np.random.default_rng(0)
    before, after = rng.random((3, 6)), rng.random((2, 4))
    data, most = difference_png(before, after, PLAIN, PLAIN, 96)
    layer = np.asarray(Image.open(io.BytesIO(data)).convert("RGBA")).astype(int)
    assert layer.shape == (48, 96, 4)
    _, expected = difference_image(np.zeros((48, 96, 3), np.uint8), before, after)
    assert most == pytest.approx(expected, rel=0.05)
    moved = map_density(after).repeat(24, 0).repeat(24, 1) - map_density(before).repeat(
        16, 0
    ).repeat(16, 1)
    sure = np.abs(moved) > 0.6 * np.abs(moved).max()
    more = layer[..., 0] > layer[..., 2]
    assert (more[sure] == (moved[sure] > 0)).mean() > 0.95


def test_zero_difference_is_transparent() -> None:
    data, most = difference_png(np.ones((2, 2)), np.full((4, 4), 3.0), PLAIN, PLAIN, 32)
    layer = np.asarray(Image.open(io.BytesIO(data)).convert("RGBA"))
    assert most == 0 and layer[..., 3].max() < 12


def test_hard_maps_are_recognized() -> None:
    assert is_hard_map(np.array([[1.0, 0.0], [1.0, 0.0]]))
    assert not is_hard_map(np.array([[1.0, 0.0], [0.0, 0.0]]))  # could be a probability
    assert not is_hard_map(np.array([[0.5, 0.0], [0.5, 0.0]]))


def test_hard_mask_is_transparent_on_kept_cells() -> None:
    cells = np.array([[1.0, 0.0], [1.0, 0.0]])
    data = hard_mask_png(cells, PLAIN.crop(0, 40, 40, 40), 80)
    opacity = np.asarray(Image.open(io.BytesIO(data)).convert("RGBA"))[..., 3]
    clear = np.zeros((40, 80), bool)
    clear[:, 40:60] = True
    np.testing.assert_array_equal(opacity == 0, clear)


def test_difference_scale_goes_from_blue_to_orange() -> None:
    assert difference_scale_css().startswith("linear-gradient(to right, rgb(5 80 160)")
    assert difference_scale_css().endswith("rgb(200 80 0))")
