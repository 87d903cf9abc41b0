"""The earth mover's distance: exact in a line, from below on a grid, against foreign copies."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import wasserstein_distance

from overt.attention import AttentionMap, grid, words
from overt.supervise.transport import emd
from tests.supervise.maps import random_map, random_target, rows_of


def cells(values: torch.Tensor, height: int, width: int) -> AttentionMap:
    return AttentionMap.from_cells(values, grid(height, width))


def one_cell(y: int, x: int, height: int, width: int) -> AttentionMap:
    values = torch.zeros(height, width, dtype=torch.float64)
    values[y, x] = 1
    return cells(values.flatten()[None], height, width)


def test_words_by_hand():
    """All weight three words on, in a text of five: three fifths of its length."""
    loss = emd(rows_of([1.0, 0, 0, 0, 0]), rows_of([0.0, 0, 0, 1, 0]))
    assert float(loss.total) == pytest.approx(0.6) and int(loss.count) == 1
    assert float(emd(rows_of([0.5, 0.5]), rows_of([2.0, 2.0])).total) == 0


def test_words_agree_with_scipy_over_the_words_that_are_there():
    for seed in range(3):
        attention = random_map(b=4, l=1, h=1, k=6, seed=seed)
        target = random_target(attention, seed + 10)
        expected, count = 0.0, 0
        for b in range(4):
            for q in range(4):
                seen = attention.visible[b, q]
                theirs = target.weights[b, 0, 0, q][seen].numpy()
                if seen.any() and theirs.sum() > 0:
                    ours = attention.weights[b, 0, 0, q][seen].numpy()
                    place = np.arange(len(ours))
                    expected += wasserstein_distance(place, place, ours, theirs) / len(ours)
                    count += 1
        loss = emd(attention, target)
        assert float(loss.total) == pytest.approx(expected) and int(loss.count) == count > 0


@pytest.mark.parametrize("directions", [1, 2, 8])
def test_a_grid_agrees_with_scipy_along_every_direction(directions):
    generator = torch.Generator().manual_seed(0)
    ours, theirs = (torch.rand(2, 12, generator=generator, dtype=torch.float64) for _ in range(2))
    loss = emd(cells(ours, 3, 4), cells(theirs, 3, 4), directions)
    y, x = np.divmod(np.arange(12), 4)
    expected = 0.0
    for b in range(2):
        for at in range(directions):
            angle = (at + 1 / 3) * math.pi / directions
            place = (y * math.sin(angle) + x * math.cos(angle)) / 4
            expected += wasserstein_distance(place, place, ours[b].numpy(), theirs[b].numpy())
    most = 1 / math.sin(math.pi / (2 * directions))  # of the sum over directions, for a unit step
    assert float(loss.total) == pytest.approx(expected / most)


def test_on_a_grid_it_is_never_more_than_the_exact_distance():
    ot = pytest.importorskip("ot")
    y, x = np.divmod(np.arange(35), 7)
    places = np.stack([y, x], axis=1) / 7
    cost = ot.dist(places, places, metric="euclidean")
    generator = torch.Generator().manual_seed(1)
    shares = []
    for sharp in (1, 4, 16):
        for _ in range(5):
            ours, theirs = (
                torch.rand(1, 35, generator=generator, dtype=torch.float64).pow(sharp)
                for _ in range(2)
            )
            a, t = (one[0].numpy() / one.sum().item() for one in (ours, theirs))
            exact = ot.emd2(a, t, cost)
            found = float(emd(cells(ours, 5, 7), cells(theirs, 5, 7)).total)
            assert found <= exact + 1e-9
            shares.append(found / exact)
    assert np.mean(shares) > 0.6  # and of its order


def test_a_shift_costs_its_length():
    """At most all and at least 98 % of it with 8 directions, wherever it goes."""
    shape = (6, 9)
    for y, x in [(0, 1), (5, 0), (5, 8), (2, 7), (1, 1)]:
        found = float(emd(one_cell(0, 0, *shape), one_cell(y, x, *shape)).total)
        exact = math.hypot(y, x) / 9
        assert 0.98 * exact <= found <= exact + 1e-12


def test_it_is_zero_only_for_equal_maps():
    """Two diagonals of a square look alike along both axes."""
    one, other = torch.eye(2, dtype=torch.float64), torch.eye(2, dtype=torch.float64).flip(0)
    for directions in (1, 2, 8):
        loss = emd(cells(one.reshape(1, 4), 2, 2), cells(other.reshape(1, 4), 2, 2), directions)
        assert float(loss.total) > 0.05
        same = emd(cells(one.reshape(1, 4), 2, 2), cells(one.reshape(1, 4), 2, 2), directions)
        assert float(same.total) == 0


def test_near_is_better_than_far_which_the_squared_error_does_not_know():
    target = one_cell(0, 0, 1, 6)
    found = [float(emd(one_cell(0, x, 1, 6), target).total) for x in range(6)]
    assert found == sorted(found) and found[1] < found[5] / 4


@pytest.mark.parametrize("keys", [words(6), grid(2, 3)])
def test_gradients_agree_with_differences(keys):
    target = AttentionMap.from_cells(torch.rand(2, 6, dtype=torch.float64), keys)

    def loss(scores: torch.Tensor) -> torch.Tensor:
        return emd(AttentionMap.from_scores(scores, keys), target).total

    scores = torch.randn(2, 1, 2, 1, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(loss, (scores,))


def test_rows_without_a_target_count_nothing_and_padding_changes_nothing():
    attention = random_map(b=3, seed=2)
    target = random_target(attention, seed=5)
    pad = torch.nn.functional.pad
    wider = AttentionMap.from_scores(
        pad(attention.values.masked_fill(attention.values.isneginf(), 0.0), (0, 2)),
        words(7),
        attention.queries,
        pad(attention.mask, (0, 2)),
    )
    longer = replace(target, values=pad(target.values, (0, 2)), keys=words(7))
    torch.testing.assert_close(emd(wider, longer).total, emd(attention, target).total)
    none = emd(attention, replace(target, values=target.values * 0))
    assert float(none.total) == 0 and int(none.count) == 0


def test_autocast_rounds_nothing():
    ours, theirs = (cells(torch.rand(2, 12), 3, 4) for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        found = emd(ours, theirs).total
    assert torch.equal(found, emd(ours, theirs).total)


def test_keys_without_places_are_refused():
    mixed = AttentionMap(torch.rand(1, 1, 1, 1, 6), words(2) + grid(2, 2)).normalize()
    with pytest.raises(ValueError, match="all words or all cells of one picture"):
        emd(mixed, mixed)
    assert float(emd(mixed.between("global", "image"), mixed.between("global", "image")).total) == 0
    with pytest.raises(ValueError, match="needs a direction"):
        emd(rows_of([1.0, 0.0]), rows_of([1.0, 0.0]), directions=0)


@pytest.mark.parametrize(("ours", "theirs"), [((2, 2), (1, 4)), ((2, 3), (1, 6))])
def test_grids_of_other_sides_do_not_compare(ours, theirs):
    weights = torch.rand(2, ours[0] * ours[1], generator=torch.Generator().manual_seed(0))
    first, second = cells(weights, *ours), cells(weights, *theirs)
    for one, other in ((first, second), (second, first)):
        with pytest.raises(ValueError, match="are not equally far apart"):
            emd(one, other)
    with pytest.raises(ValueError, match="are not equally far apart"):
        emd(AttentionMap.from_cells(weights, words(weights.shape[1])), first)
    line = AttentionMap.from_cells(weights[:, :4], words(4))
    assert float(emd(cells(weights[:, :4], 1, 4), line).total) == 0
