"""Kept positions are those of a loop over samples and heads."""

import pytest
import torch
from torch import Tensor

from overt.nn.cache_eviction import keep_positions


def slow_keep(scores: Tensor, present: Tensor, keep: int, first: int, last: int) -> list[int]:
    """One sample and head: protected positions, then the largest, then padding."""
    n = len(scores)
    real = [k for k in range(n) if present[k]]
    protected = [k for k in real if k in real[:first] or k >= n - last]
    rest = sorted((k for k in real if k not in protected), key=lambda k: (-float(scores[k]), k))
    padding = [k for k in range(n) if not present[k]]
    return sorted([*protected, *rest, *padding][:keep])


@pytest.mark.parametrize(("first", "last"), [(0, 0), (2, 0), (0, 3), (2, 2)])
@pytest.mark.parametrize("keep", [4, 7, 10, 20])
def test_positions_equal_those_of_a_loop(keep: int, first: int, last: int) -> None:
    torch.manual_seed(0)
    scores = torch.randint(0, 4, (3, 2, 10)).float()  # with ties
    scores[:, 1] -= 10
    present = torch.arange(10) >= torch.tensor([0, 2, 7])[:, None]
    found = keep_positions(scores, present, keep, first, last)
    for i in range(3):
        for g in range(2):
            expected = slow_keep(scores[i, g], present[i], keep, first, last)
            assert found[i, g].tolist() == expected


def test_infinite_scores_are_kept_and_low_ones_come_before_padding() -> None:
    scores = torch.tensor([[[5.0, -torch.inf, 3.0, torch.inf, -3e38]]])
    present = torch.tensor([[False, True, True, True, True]])
    assert keep_positions(scores, present, 1).tolist() == [[[3]]]
    assert keep_positions(scores, present, 4).tolist() == [[[1, 2, 3, 4]]]
    assert keep_positions(scores, present, 5).tolist() == [[[0, 1, 2, 3, 4]]]


def test_half_precision_scores_order_as_they_are() -> None:
    scores = torch.tensor([[[1.0, 3.0, 2.0, 6e4]]], dtype=torch.float16)
    everything = torch.ones(1, 4, dtype=torch.bool)
    assert keep_positions(scores, everything, 2).tolist() == [[[1, 3]]]


def test_errors_name_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)  # as for users
    scores, everything = torch.rand(1, 2, 6), torch.ones(1, 6, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"present.*\(1, 6\)"):
        keep_positions(scores, everything[:, :5], 2)
    with pytest.raises(ValueError, match="keep=3.*last=2"):
        keep_positions(scores, everything, 3, first=2, last=2)
    with pytest.raises(ValueError, match="keep=0"):
        keep_positions(scores, everything, 0)
    with pytest.raises(ValueError, match="NaN"):
        keep_positions(scores * torch.nan, everything, 2)
    scores[0, 1, 2:] = torch.inf
    with pytest.raises(ValueError, match="4 pos.*keep is 3"):
        keep_positions(scores, everything, 3)
