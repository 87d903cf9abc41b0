"""Guarantees attached to a map: they survive changes of the map and stay literally true."""

import pytest
import torch

from overt.attention import Kind, words
from overt.attribution.attribution_map import AttributionMap

VALUES = torch.tensor([[1.0, -2.0], [0.5, 0.25]])


def make_map() -> AttributionMap:
    return AttributionMap(
        VALUES[:, None, None, None],
        words(2),
        kind=Kind.SIGNED,
        change=torch.tensor([0.0, 1.0]),
        error=VALUES.abs()[:, None, None, None],
        fit=torch.tensor([0.9, 0.8]),
    )


def test_gap_is_the_change_minus_the_sum() -> None:
    assert make_map().gap.tolist() == [1.0, 0.25]
    assert make_map().positive().gap.tolist() == [-1.0, 0.25]  # of the clipped weights
    assert make_map().detach().gap.tolist() == [1.0, 0.25]


def test_normalized_weights_have_no_numbers_of_the_former_ones() -> None:
    """The standard error of a weight is not that of its share, and shares add up to one."""
    found = make_map().positive().normalize()
    assert isinstance(found, AttributionMap)
    assert found.error is None and found.fit is None and found.change is None
    assert found.weights.flatten(1).sum(dim=1).tolist() == [1.0, 1.0]


def test_samples_are_selected_with_their_guarantees() -> None:
    found = make_map().select(torch.tensor([1]))
    assert found.gap.tolist() == [0.25] and found.fit.tolist() == torch.tensor([0.8]).tolist()
    assert found.error.flatten().tolist() == [0.5, 0.25]
    assert make_map().sample(-1).gap.tolist() == [0.25]


def test_a_map_without_a_sum_has_no_gap() -> None:
    with pytest.raises(ValueError, match="add up"):
        _ = AttributionMap(VALUES[:, None, None, None], words(2), kind=Kind.SIGNED).gap
