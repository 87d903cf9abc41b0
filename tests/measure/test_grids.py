import pytest
import torch

from overt.attention import AttentionMap, Kind, grid, words
from overt.geometry import PixelGeometry
from overt.measure.grids import on_grid


def of(cells: list[float], shape: tuple[int, int]) -> AttentionMap:
    return AttentionMap.from_cells(torch.tensor([cells]), grid(*shape))


def test_finer_by_hand():
    found = on_grid(of([0.0, 1.0], (1, 2)), (1, 4))
    torch.testing.assert_close(found.values.flatten(), torch.tensor([0, 0.25, 0.75, 1.0]))
    assert found.kind is Kind.AMOUNT and found.keys.find("image").shape == (1, 4)


def test_coarser_is_the_mean_of_what_is_covered():
    found = on_grid(of([1.0, 3, 5, 7], (2, 2)), (1, 2))
    assert found.values.flatten().tolist() == [3, 5]
    # one bright cell is not passed over, however much smaller the grid is
    bright = torch.zeros(256)
    bright[37] = 256.0
    assert float(on_grid(of(bright.tolist(), (16, 16)), (1, 1)).values) == 1


def test_it_agrees_with_painting_on_the_photo():
    """A photo of one pixel a cell is a grid as well."""
    geometry = PixelGeometry.identity(1, (12, 8))
    cells = torch.rand(1, 6)
    attention = AttentionMap.from_cells(cells, grid(3, 2, geometry=geometry))
    found = on_grid(attention, (12, 8))
    torch.testing.assert_close(
        found.values.reshape(12, 8), geometry.paint(cells, (3, 2))[0], atol=1e-6, rtol=1e-5
    )
    assert found.keys.find("image").geometry is geometry


def test_the_same_grid_is_the_same_map():
    attention = of([1.0, 2], (1, 2)).normalize()
    assert on_grid(attention, (1, 2)) is attention


def test_layers_heads_and_queries_stay_apart():
    values = torch.rand(2, 3, 2, 4, 6)
    wide = AttentionMap(values, grid(2, 3), words(4), kind=Kind.SIGNED)
    found = on_grid(wide, (4, 6))
    assert found.values.shape == (2, 3, 2, 4, 24) and found.kind is Kind.SIGNED
    alone = on_grid(AttentionMap(values[1:, 2:, 1:, 3:], grid(2, 3), kind=Kind.SIGNED), (4, 6))
    torch.testing.assert_close(found.values[1, 2, 1, 3], alone.values.flatten())


def test_a_row_that_sees_nothing_stays_so():
    seen = torch.tensor([[True, True], [False, False]])
    attention = AttentionMap.from_cells(torch.tensor([[1.0, 2], [0, 0]]), grid(1, 2), seen)
    assert on_grid(attention, (2, 2)).check().rows[:, 0].tolist() == [True, False]
    half = AttentionMap.from_cells(torch.ones(1, 2), grid(1, 2), torch.tensor([[True, False]]))
    with pytest.raises(ValueError, match="may not see"):
        on_grid(half, (2, 2))


def test_what_has_no_grid_is_refused():
    with pytest.raises(ValueError, match="only a map over the cells of one image"):
        on_grid(AttentionMap.from_cells(torch.ones(1, 4), words(4)), (2, 2))
    with pytest.raises(ValueError, match="no cell"):
        on_grid(of([1.0, 2], (1, 2)), (0, 2))
