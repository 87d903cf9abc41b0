"""Selection of top cells by mass, count or share, and of random cells."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from overt.attention import AttentionMap, Kind, words
from overt.metrics import uniform_map
from overt.metrics.top_cells import mass_cells, random_cells, rank_keys, top_cells, top_share


@given(st.integers(1, 9), st.floats(0.05, 1.0), st.integers(0, 2**31))
def test_mass_cells_are_the_fewest_with_the_share(k, share, seed):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randint(0, 5, (4, k), generator=generator).float()
    seen = torch.rand(4, k, generator=generator) > 0.2
    chosen = mass_cells(AttentionMap.from_cells(weights, words(k), seen), generator, share)
    for b in range(4):
        there = sorted(
            (float(w) for w, s in zip(weights[b], seen[b], strict=True) if s), reverse=True
        )
        total, mass, count = sum(there), 0.0, 0
        while total and mass < share * total - 1e-5:
            mass, count = mass + there[count], count + 1
        assert int(chosen[b].sum()) == count
        assert not (chosen[b] & ~seen[b]).any()
        mass_of_chosen = sum(float(w) for w in weights[b][chosen[b]])
        assert mass_of_chosen == pytest.approx(mass)


def test_top_cells_are_the_largest(generator):
    seen = torch.tensor([[True] * 4, [False, True, True, True]])
    weights = torch.tensor([[0.2, 0.4, 0.1, 0.3], [0.9, 0.1, 0.0, 0.3]])
    made = AttentionMap.from_cells(weights, words(4), seen)
    chosen = top_cells(made, generator, 2)
    assert chosen.tolist() == [[False, True, False, True], [False, True, False, True]]
    # fewer if fewer cells have weight or are visible
    assert top_cells(made, generator, 9).sum(dim=-1).tolist() == [4, 2]


@pytest.mark.parametrize("choose", [mass_cells, partial(top_cells, count=3)])
def test_ties_are_broken_at_random_and_larger_weights_always_taken(choose, generator):
    weights = torch.tensor([1.0, 2.0, 1.0, 2.0, 1.0, 1.0]).expand(4000, 6)
    made = AttentionMap.from_cells(weights, words(6))
    chosen = choose(made, generator).double()  # the two large weights are one half
    left = 0.0 if choose is mass_cells else 0.25
    expected = torch.tensor([left, 1.0, left, 1.0, left, left], dtype=torch.double)
    torch.testing.assert_close(chosen.mean(dim=0), expected, atol=0.04, rtol=0)
    flat = choose(uniform_map(made), generator).double().mean(dim=0)
    torch.testing.assert_close(flat, torch.full_like(flat, 0.5), atol=0.04, rtol=0)


def test_the_same_seed_breaks_ties_the_same_way():
    flat = uniform_map(AttentionMap.from_cells(torch.ones(8, 12), words(12)))
    for choose in (mass_cells, partial(top_cells, count=3)):
        one, again, other = (
            choose(flat, torch.Generator().manual_seed(seed)) for seed in (3, 3, 4)
        )
        assert torch.equal(one, again) and not torch.equal(one, other)


def test_top_cells_of_signed_maps_are_positive(generator):
    values = torch.tensor([-5.0, 1.0, 2.0]).reshape(1, 1, 1, 1, 3)
    signed = AttentionMap(values, words(3), kind=Kind.SIGNED)
    assert top_cells(signed, generator, 3).tolist() == [[False, True, True]]


def test_random_cells_are_visible_and_as_many_as_the_given_cells(generator):
    seen = torch.rand(50, 9, generator=generator) > 0.3
    cells = (torch.rand(50, 9, generator=generator) > 0.6) & seen
    drawn = random_cells(cells, seen, generator)
    assert torch.equal(drawn.sum(dim=-1), cells.sum(dim=-1))
    assert not (drawn & ~seen).any() and not torch.equal(drawn, cells)
    many = torch.zeros(3000, 5, dtype=torch.bool)
    many[:, :2] = True
    share = random_cells(many, torch.ones_like(many), generator).float().mean(dim=0)
    torch.testing.assert_close(share, torch.full((5,), 0.4), atol=0.04, rtol=0)


def test_top_share_counts_visible_keys(generator):
    seen = torch.tensor([[True] * 8, [True] * 3 + [False] * 5])
    weights = torch.arange(16.0).reshape(2, 8)
    made = AttentionMap.from_cells(weights, words(8), seen)
    chosen = top_share(made, generator, 0.25)
    assert chosen[0].nonzero().flatten().tolist() == [6, 7]
    assert chosen[1].nonzero().flatten().tolist() == [2]
    assert top_share(made, generator, 0.0).sum(dim=-1).tolist() == [1, 1]
    assert top_share(made, generator, 1.0).sum(dim=-1).tolist() == [8, 3]
    with pytest.raises(ValueError, match="from 0 to 1"):
        top_share(made, generator, 1.5)


def test_hidden_keys_come_last(generator):
    seen = torch.tensor([[True, False, True, True]])
    made = AttentionMap.from_cells(torch.tensor([[0.1, 9.0, 0.7, 0.2]]), words(4), seen)
    assert rank_keys(made, generator).tolist() == [[2, 3, 0, 1]]


def test_mass_cells_of_negative_rows_are_empty(generator):
    made = AttentionMap.from_cells(torch.tensor([[-1.0, 2, 1], [0, 2, 1]]), words(3))
    assert mass_cells(made, generator).tolist() == [[False] * 3, [False, True, False]]
