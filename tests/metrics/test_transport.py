"""Exact earth mover's distance compared with POT, scipy and the EMD loss."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import wasserstein_distance

from overt.attention import AttentionMap, grid, words
from overt.losses import emd as loss
from overt.metrics import transport
from overt.metrics.transport import emd, solve_dual_lp, solve_network_simplex


def random_weights(count: int, sharp: int, generator: torch.Generator) -> torch.Tensor:
    return torch.rand(3, count, generator=generator, dtype=torch.float64).pow(sharp)


@pytest.mark.parametrize("sharp", [1, 4, 30])
@pytest.mark.parametrize("shape", [(5, 7), (1, 6), (4, 4)])
def test_emd_on_grids_agrees_with_pot(generator, sharp, shape):
    ot = pytest.importorskip("ot")
    count = math.prod(shape)
    ours, theirs = (random_weights(count, sharp, generator) for _ in range(2))
    y, x = np.divmod(np.arange(count), shape[1])
    places = np.stack([y, x], axis=1) / max(shape)
    cost = ot.dist(places, places, metric="euclidean")
    found = emd(*(AttentionMap.from_cells(one, grid(*shape)) for one in (ours, theirs)))
    for b in range(3):
        a, t = (one[b].numpy() / one[b].sum().item() for one in (ours, theirs))
        assert float(found[b]) == pytest.approx(ot.emd2(a, t, cost), rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("sharp", [1, 30])
def test_both_solvers_agree(generator, sharp):
    """POT and scipy give the same value."""
    pytest.importorskip("ot")
    given, wanted = (random_weights(9, sharp, generator)[0].numpy() for _ in range(2))
    given, wanted = given / given.sum(), wanted / wanted.sum()
    cost = torch.rand(9, 9, generator=generator, dtype=torch.float64).numpy()
    assert solve_network_simplex(given, wanted, cost) == pytest.approx(
        solve_dual_lp(given, wanted, cost), rel=1e-9
    )


def test_scipy_is_used_without_pot(generator, monkeypatch):
    ours, theirs = (
        AttentionMap.from_cells(random_weights(12, 3, generator), grid(3, 4)) for _ in range(2)
    )
    quick = emd(ours, theirs)
    monkeypatch.setattr(transport, "_solver", lambda: solve_dual_lp)
    torch.testing.assert_close(emd(ours, theirs), quick, rtol=1e-6, atol=1e-9)


def test_emd_on_words_agrees_with_scipy_over_visible_words(generator):
    ours, theirs = (random_weights(6, 1, generator) for _ in range(2))
    there = torch.arange(6) < torch.tensor([6, 4, 1])[:, None]
    found = emd(*(AttentionMap.from_cells(one, words(6), there) for one in (ours, theirs)))
    for b, n in enumerate([6, 4, 1]):
        place = np.arange(n)
        expected = wasserstein_distance(place, place, ours[b, :n], theirs[b, :n]) / n
        assert float(found[b]) == pytest.approx(expected, abs=1e-7)


def test_the_loss_is_a_lower_bound(generator):
    ours, theirs = (
        AttentionMap.from_cells(random_weights(35, 3, generator), grid(5, 7)) for _ in range(2)
    )
    exact = emd(ours, theirs)
    for b in range(3):
        row = torch.tensor([b])
        assert float(loss(ours.select(row), theirs.select(row)).total) <= float(exact[b]) + 1e-6
    line = AttentionMap.from_cells(random_weights(5, 1, generator), words(5))
    other = AttentionMap.from_cells(random_weights(5, 1, generator), words(5))
    assert float(loss(line, other).total) == pytest.approx(float(emd(line, other).sum()), rel=1e-5)


def test_emd_matches_examples_by_hand():
    """Move all mass between corners of a 3 x 4 grid, or half of it one cell to the right."""
    start = torch.zeros(2, 12)
    start[:, 0] = 1
    end = torch.zeros(2, 12)
    end[0, 11] = 1
    end[1, :2] = 0.5
    found = emd(*(AttentionMap.from_cells(one, grid(3, 4)) for one in (start, end)))
    assert found.tolist() == pytest.approx([math.hypot(2, 3) / 4, 0.5 / 4])
    assert emd.info.higher_is_better is False


def test_equal_maps_have_zero_distance_and_empty_maps_nan():
    maps = AttentionMap.from_cells(torch.tensor([[3.0, 0, 1, 0], [0, 0, 0, 0]]), grid(2, 2))
    found = emd(maps, maps)
    assert float(found[0]) == 0 and math.isnan(found[1])


def test_keys_without_positions_raise():
    mixed = AttentionMap(torch.rand(1, 1, 1, 1, 6), words(2) + grid(2, 2)).normalize()
    with pytest.raises(ValueError, match="one picture"):
        emd(mixed, mixed)


def test_a_map_that_requires_grad_is_accepted(generator):
    weights = random_weights(6, 1, generator).requires_grad_()
    truth = AttentionMap.from_cells(random_weights(6, 1, generator), grid(2, 3))
    learning = AttentionMap.from_cells(weights, grid(2, 3))
    found = emd(learning, truth)
    assert torch.equal(found, emd(AttentionMap.from_cells(weights.detach(), grid(2, 3)), truth))
    assert not found.requires_grad


@pytest.mark.parametrize(("ours", "theirs"), [((2, 2), (1, 4)), ((2, 3), (1, 6)), ((2, 3), (3, 2))])
def test_grids_of_different_shapes_raise(ours, theirs, generator):
    weights = random_weights(ours[0] * ours[1], 1, generator)
    first, second = (AttentionMap.from_cells(weights, grid(*one)) for one in (ours, theirs))
    for one, other in ((first, second), (second, first)):
        with pytest.raises(ValueError, match="same grid"):
            emd(one, other)


def test_a_row_of_cells_compares_with_words(generator):
    first, second = random_weights(4, 1, generator), random_weights(4, 1, generator)
    line = AttentionMap.from_cells(second, grid(1, 4))
    found = emd(AttentionMap.from_cells(first, grid(1, 4)), line)
    text = emd(AttentionMap.from_cells(first, words(4)), line)
    assert torch.allclose(found, text, atol=1e-6)


@pytest.mark.parametrize("keys", [words(4), grid(2, 2)])
def test_negative_weights_give_nan(keys):
    signed = AttentionMap.from_cells(torch.tensor([[-1.0, 2, 0, 0], [1, 2, 0, 0]]), keys)
    plain = AttentionMap.from_cells(torch.ones(2, 4), keys)
    assert emd(signed, plain).isnan().tolist() == [True, False]
