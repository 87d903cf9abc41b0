"""Maps inside a page: numbers come back, cells lie where geometry says, changes have a sign."""

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image

from overt.geometry import PixelGeometry
from overt.show.beside import difference
from overt.show.layers import (
    change_css,
    change_layer,
    density,
    edges,
    is_hard,
    kept_layer,
    packed,
    packed_size,
    unpacked,
)

PLAIN = PixelGeometry.identity(1, (40, 80))


@given(arrays(np.float64, (3, 4), elements=st.floats(0, 1e6)))
@settings(max_examples=50, deadline=None)
def test_numbers_come_back_to_a_step_of_the_largest(cells: np.ndarray) -> None:
    top = cells.max()
    np.testing.assert_allclose(unpacked(packed(cells)), cells, atol=top * 1.1e-5, rtol=0)
    np.testing.assert_allclose(unpacked(packed(cells, 8)), cells, atol=top * 2.1e-3, rtol=0)
    for bits in (8, 16):
        assert abs(len(packed(cells, bits)) - packed_size(cells, bits)) < 40


def test_what_is_below_zero_counts_as_none() -> None:
    found = unpacked(packed(np.array([[-1.0, 2.0]])))
    np.testing.assert_allclose(found, [[0, 2]])
    assert packed(np.zeros((1, 2))).startswith("1 2 0 0 ")


def pairs(text: str) -> list[list[float]]:
    return [[float(end) for end in pair.split()] for pair in text.split(",")]


def test_cells_lie_where_the_geometry_says() -> None:
    columns, rows = edges(PLAIN, (2, 4))
    assert pairs(columns) == [[0, 25], [25, 50], [50, 75], [75, 100]]
    assert pairs(rows) == [[0, 50], [50, 100]]
    columns, _ = edges(PLAIN.crop(0, 20, 40, 40), (2, 4))
    assert pairs(columns) == [[25, 37.5], [37.5, 50], [50, 62.5], [62.5, 75]]
    columns, _ = edges(PLAIN.flip(), (2, 2))
    assert pairs(columns) == [[50, 100], [0, 50]]
    _, rows = edges(PLAIN.pad(40, 0, 0, 0), (2, 2))
    assert pairs(rows)[0][0] == pairs(rows)[0][1] and pairs(rows)[1] == [0, 100]  # padding


def test_a_change_has_the_sign_and_size_of_that_of_a_figure() -> None:
    rng = np.random.default_rng(0)
    before, after = rng.random((3, 6)), rng.random((2, 4))
    data, most = change_layer(before, after, PLAIN, PLAIN, 96)
    layer = np.asarray(Image.open(io.BytesIO(data)).convert("RGBA")).astype(int)
    assert layer.shape == (48, 96, 4)
    _, wanted = difference(np.zeros((48, 96, 3), np.uint8), before, after)
    assert most == pytest.approx(wanted, rel=0.05)
    moved = density(after).repeat(24, 0).repeat(24, 1) - density(before).repeat(16, 0).repeat(16, 1)
    sure = np.abs(moved) > 0.6 * np.abs(moved).max()
    more = layer[..., 0] > layer[..., 2]
    assert (more[sure] == (moved[sure] > 0)).mean() > 0.95


def test_no_change_lets_the_photo_through() -> None:
    data, most = change_layer(np.ones((2, 2)), np.full((4, 4), 3.0), PLAIN, PLAIN, 32)
    layer = np.asarray(Image.open(io.BytesIO(data)).convert("RGBA"))
    assert most == 0 and layer[..., 3].max() < 12


def test_hard_maps_are_told_from_soft_ones() -> None:
    assert is_hard(np.array([[1.0, 0.0], [1.0, 0.0]]))
    assert not is_hard(np.array([[1.0, 0.0], [0.0, 0.0]]))  # could be a probability
    assert not is_hard(np.array([[0.5, 0.0], [0.5, 0.0]]))


def test_a_veil_leaves_the_kept_cells_of_a_cropped_photo_clear() -> None:
    cells = np.array([[1.0, 0.0], [1.0, 0.0]])
    data = kept_layer(cells, PLAIN.crop(0, 40, 40, 40), 80)
    veil = np.asarray(Image.open(io.BytesIO(data)).convert("RGBA"))[..., 3]
    clear = np.zeros((40, 80), bool)
    clear[:, 40:60] = True
    np.testing.assert_array_equal(veil == 0, clear)


def test_the_scale_of_changes_goes_from_blue_to_orange() -> None:
    assert change_css().startswith("linear-gradient(to right, rgb(5 80 160)")
    assert change_css().endswith("rgb(200 80 0))")
