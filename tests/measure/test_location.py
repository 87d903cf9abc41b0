import pytest
import torch

from overt.attention import AttentionMap, Kind, grid, words
from overt.measure import mass_inside, pointing_game, support, uniform


def cells(*rows: list[float], seen: list[list[bool]] | None = None) -> AttentionMap:
    mask = None if seen is None else torch.tensor(seen)
    return AttentionMap.from_cells(torch.tensor(rows), words(len(rows[0])), mask)


def test_values_by_hand():
    attention = cells([0.1, 0.6, 0.3, 0.0], [0.1, 0.6, 0.3, 0.0], [0.4, 0.4, 0.1, 0.1])
    truth = cells([0.0, 1.0, 0.0, 1.0], [1.0, 0.0, 0.5, 0.0], [1.0, 0.0, 1.0, 0.0])
    assert pointing_game(attention, truth).tolist() == [1, 0, 0.5]  # a tie counts by halves
    torch.testing.assert_close(mass_inside(attention, truth), torch.tensor([0.6, 0.4, 0.5]))


def test_a_uniform_map_scores_the_share_of_the_truth(generator):
    truth = AttentionMap.from_cells(
        (torch.rand(9, 16, generator=generator) > 0.6).float(), grid(4, 4)
    )
    share = truth.weights.mean(dim=-1).flatten()
    torch.testing.assert_close(pointing_game(uniform(truth), truth), share)
    torch.testing.assert_close(mass_inside(uniform(truth), truth), share)


def test_agrees_with_a_loop_over_cells(generator):
    weights = torch.rand(2, 30, 7, generator=generator)
    seen = torch.rand(30, 7, generator=generator) > 0.3
    truth = torch.where(weights[1] > 0.6, weights[1], 0)
    ours = AttentionMap.from_cells(weights[0], words(7), seen)
    theirs = AttentionMap.from_cells(truth, words(7))
    pointed, mass = pointing_game(ours, theirs), mass_inside(ours, theirs)
    for b in range(30):
        keys = [k for k in range(7) if seen[b, k]]
        inside = {k for k in keys if truth[b, k] > 0}
        if not inside:
            assert pointed[b].isnan() and mass[b].isnan()
            continue
        best = max(keys, key=lambda k: float(weights[0, b, k]))
        assert float(pointed[b]) == (best in inside)
        total = sum(float(weights[0, b, k]) for k in keys)
        part = sum(float(weights[0, b, k]) for k in inside)
        assert float(mass[b]) == pytest.approx(part / total)


def test_the_threshold_is_a_share_of_the_largest_weight():
    truth = cells([0.1, 1.0, 0.5, 0.0])
    assert support(truth).tolist() == [[True, True, True, False]]
    assert support(truth, above=0.3).tolist() == [[False, True, True, False]]
    attention = cells([1.0, 0.0, 0.0, 0.0])
    assert pointing_game(attention, truth).tolist() == [1]
    assert pointing_game(attention, truth, above=0.3).tolist() == [0]
    assert mass_inside(attention, truth, above=0.3).tolist() == [0]


def test_a_gradient_points_where_it_is_largest():
    """Pointing needs an order of the cells, not a distribution."""
    signed = AttentionMap(
        torch.tensor([-3.0, -1.0, -2.0]).reshape(1, 1, 1, 1, 3), words(3), kind=Kind.SIGNED
    )
    assert pointing_game(signed, cells([0.0, 1.0, 0.0])).tolist() == [1]
