"""Earth mover's distance: exact for sequences, a lower bound on grids, compared with SciPy."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import wasserstein_distance

from overt.attention import AttentionMap, grid, words
from overt.losses.transport import emd
from tests.losses.maps import random_map, random_target, rows_of


def grid_map(values: torch.Tensor, height: int, width: int) -> AttentionMap:
    return AttentionMap.from_cells(values, grid(height, width))


def one_cell(y: int, x: int, height: int, width: int) -> AttentionMap:
    values = torch.zeros(height, width, dtype=torch.float64)
    values[y, x] = 1
    return grid_map(values.flatten()[None], height, width)


def test_emd_of_words_by_hand():
    """Moving all weight by three words in a text of five costs three fifths."""
    loss = emd(rows_of([1.0, 0, 0, 0, 0]), rows_of([0.0, 0, 0, 1, 0]))
    assert float(loss.total) == pytest.approx(0.6) and int(loss.count) == 1
    assert float(emd(rows_of([0.5, 0.5]), rows_of([2.0, 2.0])).total) == 0


def test_emd_of_words_agrees_with_scipy_over_visible_words():
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
def test_emd_of_grids_agrees_with_scipy_along_each_direction(directions):
    generator = torch.Generator().manual_seed(0)
    ours, theirs = (torch.rand(2, 12, generator=generator, dtype=torch.float64) for _ in range(2))
    loss = emd(grid_map(ours, 3, 4), grid_map(theirs, 3, 4), directions)
    y, x = np.divmod(np.arange(12), 4)
    expected = 0.0
    for b in range(2):
        for at in range(directions):
            angle = (at + 1 / 3) * math.pi / directions
            place = (y * math.sin(angle) + x * math.cos(angle)) / 4
            expected += wasserstein_distance(place, place, ours[b].numpy(), theirs[b].numpy())
    most = 1 / math.sin(math.pi / (2 * directions))  # of the sum over directions, for a unit step
    assert float(loss.total) == pytest.approx(expected / most)


def test_emd_of_grids_is_a_lower_bound_of_the_exact_distance():
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
            found = float(emd(grid_map(ours, 5, 7), grid_map(theirs, 5, 7)).total)
            assert found <= exact + 1e-9
            shares.append(found / exact)
    assert np.mean(shares) > 0.6  # and of the same magnitude


def test_emd_of_a_shift_is_its_length():
    """With 8 directions it is between 98 % and 100 % of the length in any direction."""
    shape = (6, 9)
    for y, x in [(0, 1), (5, 0), (5, 8), (2, 7), (1, 1)]:
        found = float(emd(one_cell(0, 0, *shape), one_cell(y, x, *shape)).total)
        exact = math.hypot(y, x) / 9
        assert 0.98 * exact <= found <= exact + 1e-12


def test_emd_is_zero_only_for_equal_maps():
    """The two diagonals of a square have equal projections on both axes."""
    one, other = torch.eye(2, dtype=torch.float64), torch.eye(2, dtype=torch.float64).flip(0)
    for directions in (1, 2, 8):
        loss = emd(
            grid_map(one.reshape(1, 4), 2, 2), grid_map(other.reshape(1, 4), 2, 2), directions
        )
        assert float(loss.total) > 0.05
        same = emd(grid_map(one.reshape(1, 4), 2, 2), grid_map(one.reshape(1, 4), 2, 2), directions)
        assert float(same.total) == 0


def test_emd_increases_with_the_distance():
    target = one_cell(0, 0, 1, 6)
    found = [float(emd(one_cell(0, x, 1, 6), target).total) for x in range(6)]
    assert found == sorted(found) and found[1] < found[5] / 4


@pytest.mark.parametrize("keys", [words(6), grid(2, 3)])
def test_gradients_agree_with_finite_differences(keys):
    target = AttentionMap.from_cells(torch.rand(2, 6, dtype=torch.float64), keys)

    def loss(scores: torch.Tensor) -> torch.Tensor:
        return emd(AttentionMap.from_scores(scores, keys), target).total

    scores = torch.randn(2, 1, 2, 1, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(loss, (scores,))


def test_rows_without_a_target_do_not_count_and_padding_changes_nothing():
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


def test_autocast_does_not_change_the_loss():
    ours, theirs = (grid_map(torch.rand(2, 12), 3, 4) for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        found = emd(ours, theirs).total
    assert torch.equal(found, emd(ours, theirs).total)


def test_keys_without_positions_raise():
    mixed = AttentionMap(torch.rand(1, 1, 1, 1, 6), words(2) + grid(2, 2)).normalize()
    with pytest.raises(ValueError, match="2, 2.* 6 positions"):
        emd(mixed, mixed)
    assert float(emd(mixed.between("global", "image"), mixed.between("global", "image")).total) == 0
    with pytest.raises(ValueError, match="directions .* 0"):
        emd(rows_of([1.0, 0.0]), rows_of([1.0, 0.0]), directions=0)


@pytest.mark.parametrize(("ours", "theirs"), [((2, 2), (1, 4)), ((2, 3), (1, 6))])
def test_grids_of_unequal_shape_raise(ours, theirs):
    weights = torch.rand(2, ours[0] * ours[1], generator=torch.Generator().manual_seed(0))
    first, second = grid_map(weights, *ours), grid_map(weights, *theirs)
    for one, other in ((first, second), (second, first)):
        shapes = [re.escape(str(map_.keys.spans[0].shape)) for map_ in (one, other)]
        with pytest.raises(ValueError, match=" and ".join(shapes)):
            emd(one, other)
    with pytest.raises(ValueError, match="same grid"):
        emd(AttentionMap.from_cells(weights, words(weights.shape[1])), first)
    line = AttentionMap.from_cells(weights[:, :4], words(4))
    assert float(emd(grid_map(weights[:, :4], 1, 4), line).total) == 0
