import pytest
import torch

from overt.attention import AttentionMap, grid, words
from overt.geometry import PixelGeometry
from overt.measure.photos import painted, squares


def test_a_map_is_a_picture_of_its_grid():
    values = torch.arange(6.0).reshape(1, 6)
    picture = squares(AttentionMap.from_cells(values, grid(2, 3)))
    assert picture.tolist() == [[[0, 1, 2], [3, 4, 5]]]


def test_each_photo_is_painted_at_its_own_size():
    sizes = [(8, 6), (5, 9)]
    geometry = PixelGeometry.join(
        [PixelGeometry.identity(1, size).resize((4, 4)) for size in sizes]
    )
    attention = AttentionMap.from_cells(torch.rand(2, 16), grid(4, 4, geometry=geometry))
    found = painted(attention)
    assert [tuple(one.weights.shape) for one in found] == sizes
    assert all(one.seen.all() for one in found)


def test_what_a_crop_cuts_away_and_what_is_masked_is_not_seen():
    geometry = PixelGeometry.identity(1, (4, 4)).crop(0, 2, 4, 2)
    attention = AttentionMap.from_cells(torch.ones(1, 8), grid(4, 2, geometry=geometry))
    (one,) = painted(attention)
    assert one.seen.tolist() == [[False, False, True, True]] * 4

    hidden = torch.ones(1, 8, dtype=torch.bool)
    hidden[0, :2] = False
    masked = AttentionMap.from_cells(torch.ones(1, 8), grid(4, 2, geometry=geometry), hidden)
    (one,) = painted(masked)
    assert one.seen[:, 2:].tolist() == [[False] * 2] + [[True] * 2] * 3


def test_a_pixel_between_a_cell_that_is_seen_and_one_that_is_not_is_not_seen():
    geometry = PixelGeometry.identity(1, (1, 8))
    seen = torch.tensor([[True, False]])
    (one,) = painted(AttentionMap.from_cells(torch.ones(1, 2), grid(1, 2, geometry=geometry), seen))
    assert one.seen.tolist() == [[True, True, False, False, False, False, False, False]]


def test_maps_that_are_no_pictures_are_refused():
    with pytest.raises(ValueError, match=r"over \['text'\] with 4 keys"):
        squares(AttentionMap.from_cells(torch.ones(1, 4), words(4)))
    both = grid(2, 2) + words(3)
    with pytest.raises(ValueError, match=r"\['image', 'text'\] with 7 keys"):
        squares(AttentionMap.from_cells(torch.ones(1, 7), both))
    with pytest.raises(ValueError, match="give its span a PixelGeometry"):
        painted(AttentionMap.from_cells(torch.ones(1, 4), grid(2, 2)))
