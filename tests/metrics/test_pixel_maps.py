"""Attention maps as images of their grid and of the photo's pixels."""

import pytest
import torch

from overt.attention import AttentionMap, grid, words
from overt.geometry import PixelGeometry
from overt.metrics.pixel_maps import to_grid, to_photo_pixels


def test_to_grid_returns_an_image_of_the_cells():
    values = torch.arange(6.0).reshape(1, 6)
    picture = to_grid(AttentionMap.from_cells(values, grid(2, 3)))
    assert picture.tolist() == [[[0, 1, 2], [3, 4, 5]]]


def test_each_photo_has_a_map_of_its_own_size():
    sizes = [(8, 6), (5, 9)]
    geometry = PixelGeometry.join(
        [PixelGeometry.identity(1, size).resize((4, 4)) for size in sizes]
    )
    attention = AttentionMap.from_cells(torch.rand(2, 16), grid(4, 4, geometry=geometry))
    found = to_photo_pixels(attention)
    assert [tuple(one.weights.shape) for one in found] == sizes
    assert all(one.seen.all() for one in found)


def test_cropped_and_masked_pixels_are_hidden():
    geometry = PixelGeometry.identity(1, (4, 4)).crop(0, 2, 4, 2)
    attention = AttentionMap.from_cells(torch.ones(1, 8), grid(4, 2, geometry=geometry))
    (one,) = to_photo_pixels(attention)
    assert one.seen.tolist() == [[False, False, True, True]] * 4

    hidden = torch.ones(1, 8, dtype=torch.bool)
    hidden[0, :2] = False
    masked = AttentionMap.from_cells(torch.ones(1, 8), grid(4, 2, geometry=geometry), hidden)
    (one,) = to_photo_pixels(masked)
    assert one.seen[:, 2:].tolist() == [[False] * 2] + [[True] * 2] * 3


def test_pixels_between_visible_and_hidden_cells_are_hidden():
    geometry = PixelGeometry.identity(1, (1, 8))
    seen = torch.tensor([[True, False]])
    (one,) = to_photo_pixels(
        AttentionMap.from_cells(torch.ones(1, 2), grid(1, 2, geometry=geometry), seen)
    )
    assert one.seen.tolist() == [[True, True, False, False, False, False, False, False]]


def test_maps_without_image_geometry_raise():
    with pytest.raises(ValueError, match=r"4 keys.*'text'"):
        to_grid(AttentionMap.from_cells(torch.ones(1, 4), words(4)))
    both = grid(2, 2) + words(3)
    with pytest.raises(ValueError, match=r"7 .*'image', 'text'"):
        to_grid(AttentionMap.from_cells(torch.ones(1, 7), both))
    with pytest.raises(ValueError, match="PixelGeometry"):
        to_photo_pixels(AttentionMap.from_cells(torch.ones(1, 4), grid(2, 2)))
