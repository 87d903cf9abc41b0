"""Resampling of attention maps to other grids."""

import pytest
import torch

from overt.attention import AttentionMap, Kind, grid, words
from overt.geometry import PixelGeometry
from overt.metrics.resample import resample_to_grid


def grid_map(cells: list[float], shape: tuple[int, int]) -> AttentionMap:
    return AttentionMap.from_cells(torch.tensor([cells]), grid(*shape))


def test_upsampling_matches_an_example_by_hand():
    found = resample_to_grid(grid_map([0.0, 1.0], (1, 2)), (1, 4))
    torch.testing.assert_close(found.values.flatten(), torch.tensor([0, 0.25, 0.75, 1.0]))
    assert found.kind is Kind.AMOUNT and found.keys.find("image").shape == (1, 4)


def test_downsampling_takes_the_mean_of_covered_cells():
    found = resample_to_grid(grid_map([1.0, 3, 5, 7], (2, 2)), (1, 2))
    assert found.values.flatten().tolist() == [3, 5]
    # one bright cell counts in any smaller grid
    bright = torch.zeros(256)
    bright[37] = 256.0
    assert float(resample_to_grid(grid_map(bright.tolist(), (16, 16)), (1, 1)).values) == 1


def slow_area_means(cells: torch.Tensor, length: int) -> torch.Tensor:
    """Average along an axis by repeating every cell until all borders fall between cells."""
    fine = cells.repeat_interleave(length, dim=0)
    return fine.reshape(length, len(cells), *cells.shape[1:]).mean(dim=1)


@pytest.mark.parametrize("now", [(5, 7), (14, 9), (16, 3), (4, 11)])
@pytest.mark.parametrize("shape", [(3, 2), (4, 3), (2, 7), (1, 1)])
def test_coarser_cells_are_means_by_area_at_any_ratio(now, shape):
    cells = torch.rand(*now, dtype=torch.float64)
    shape = tuple(min(one, other) for one, other in zip(shape, now, strict=True))
    expected = slow_area_means(slow_area_means(cells, shape[0]).T, shape[1]).T
    attention = AttentionMap.from_cells(cells.reshape(1, -1), grid(*now))
    found = resample_to_grid(attention, shape).values.reshape(shape)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found.mean(), cells.mean())  # so the mean of the map is kept


def test_whole_ratios_are_the_means_of_adaptive_pooling_to_the_bit():
    cells = torch.rand(1, 1, 12, 28)
    attention = AttentionMap.from_cells(cells.reshape(1, -1), grid(12, 28))
    pooled = torch.nn.functional.interpolate(cells, (4, 28), mode="area")
    pooled = torch.nn.functional.interpolate(pooled, (4, 7), mode="area")
    assert torch.equal(resample_to_grid(attention, (4, 7)).values.flatten(), pooled.flatten())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_dtype_is_kept(dtype):
    attention = AttentionMap.from_cells(torch.rand(1, 35).to(dtype), grid(5, 7))
    for shape in ((3, 2), (5, 3), (9, 9)):
        assert resample_to_grid(attention, shape).values.dtype is dtype


def test_resampling_agrees_with_painting_on_the_photo():
    """A photo with one pixel per cell is a grid too."""
    geometry = PixelGeometry.identity(1, (12, 8))
    cells = torch.rand(1, 6)
    attention = AttentionMap.from_cells(cells, grid(3, 2, geometry=geometry))
    found = resample_to_grid(attention, (12, 8))
    torch.testing.assert_close(
        found.values.reshape(12, 8), geometry.paint(cells, (3, 2))[0], atol=1e-6, rtol=1e-5
    )
    assert found.keys.find("image").geometry is geometry


def test_the_same_grid_returns_the_same_map():
    attention = grid_map([1.0, 2], (1, 2)).normalize()
    assert resample_to_grid(attention, (1, 2)) is attention


def test_layers_heads_and_queries_are_resampled_separately():
    values = torch.rand(2, 3, 2, 4, 6)
    wide = AttentionMap(values, grid(2, 3), words(4), kind=Kind.SIGNED)
    found = resample_to_grid(wide, (4, 6))
    assert found.values.shape == (2, 3, 2, 4, 24) and found.kind is Kind.SIGNED
    alone = resample_to_grid(
        AttentionMap(values[1:, 2:, 1:, 3:], grid(2, 3), kind=Kind.SIGNED), (4, 6)
    )
    torch.testing.assert_close(found.values[1, 2, 1, 3], alone.values.flatten())


def test_fully_hidden_rows_stay_hidden_and_partly_hidden_rows_raise():
    seen = torch.tensor([[True, True], [False, False]])
    attention = AttentionMap.from_cells(torch.tensor([[1.0, 2], [0, 0]]), grid(1, 2), seen)
    assert resample_to_grid(attention, (2, 2)).check().rows[:, 0].tolist() == [True, False]
    half = AttentionMap.from_cells(torch.ones(1, 2), grid(1, 2), torch.tensor([[True, False]]))
    with pytest.raises(ValueError, match="hidden cells"):
        resample_to_grid(half, (2, 2))


def test_maps_without_grid_and_empty_grids_raise():
    with pytest.raises(ValueError, match=r"cells.*one image"):
        resample_to_grid(AttentionMap.from_cells(torch.ones(1, 4), words(4)), (2, 2))
    with pytest.raises(ValueError, match="at least 1"):
        resample_to_grid(grid_map([1.0, 2], (1, 2)), (0, 2))


def test_a_constant_map_stays_exactly_constant():
    """Otherwise ranks and thresholds of a uniform control would depend on rounding."""
    for value in (1 / 49, 0.1, 1 / 3):
        even = AttentionMap.from_cells(torch.full((2, 49), value), grid(7, 7))
        for shape in ((14, 14), (9, 5), (3, 16), (28, 10)):
            found = resample_to_grid(even, shape).weights
            assert (found == found.flatten()[0]).all()
