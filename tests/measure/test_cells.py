from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from overt.attention import AttentionMap, Kind, words
from overt.measure import mass_cells, random_cells, top_cells, top_share, uniform
from overt.measure.cells import ranked


@given(st.integers(1, 9), st.floats(0.05, 1.0), st.integers(0, 2**31))
def test_mass_cells_are_the_fewest_that_hold_the_share(k, share, seed):
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
        held = sum(float(w) for w in weights[b][chosen[b]])
        assert held == pytest.approx(mass)


def test_top_cells_are_the_largest(generator):
    seen = torch.tensor([[True] * 4, [False, True, True, True]])
    weights = torch.tensor([[0.2, 0.4, 0.1, 0.3], [0.9, 0.1, 0.0, 0.3]])
    made = AttentionMap.from_cells(weights, words(4), seen)
    chosen = top_cells(made, generator, 2)
    assert chosen.tolist() == [[False, True, False, True], [False, True, False, True]]
    # fewer where fewer have any weight, or there are no more
    assert top_cells(made, generator, 9).sum(dim=-1).tolist() == [4, 2]


@pytest.mark.parametrize("choose", [mass_cells, partial(top_cells, count=3)])
def test_equals_are_taken_at_random_and_the_larger_always(choose, generator):
    weights = torch.tensor([1.0, 2.0, 1.0, 2.0, 1.0, 1.0]).expand(4000, 6)
    made = AttentionMap.from_cells(weights, words(6))
    chosen = choose(made, generator).double()  # the two large ones hold a half
    left = 0.0 if choose is mass_cells else 0.25
    expected = torch.tensor([left, 1.0, left, 1.0, left, left], dtype=torch.double)
    torch.testing.assert_close(chosen.mean(dim=0), expected, atol=0.04, rtol=0)
    flat = choose(uniform(made), generator).double().mean(dim=0)
    torch.testing.assert_close(flat, torch.full_like(flat, 0.5), atol=0.04, rtol=0)


def test_the_same_generator_chooses_the_same_equals():
    flat = uniform(AttentionMap.from_cells(torch.ones(8, 12), words(12)))
    for choose in (mass_cells, partial(top_cells, count=3)):
        one, again, other = (
            choose(flat, torch.Generator().manual_seed(seed)) for seed in (3, 3, 4)
        )
        assert torch.equal(one, again) and not torch.equal(one, other)


def test_signed_cells_are_those_that_speak_for_the_answer(generator):
    values = torch.tensor([-5.0, 1.0, 2.0]).reshape(1, 1, 1, 1, 3)
    signed = AttentionMap(values, words(3), kind=Kind.SIGNED)
    assert top_cells(signed, generator, 3).tolist() == [[False, True, True]]


def test_random_cells_are_as_many_and_visible(generator):
    seen = torch.rand(50, 9, generator=generator) > 0.3
    cells = (torch.rand(50, 9, generator=generator) > 0.6) & seen
    drawn = random_cells(cells, seen, generator)
    assert torch.equal(drawn.sum(dim=-1), cells.sum(dim=-1))
    assert not (drawn & ~seen).any() and not torch.equal(drawn, cells)
    many = torch.zeros(3000, 5, dtype=torch.bool)
    many[:, :2] = True
    share = random_cells(many, torch.ones_like(many), generator).float().mean(dim=0)
    torch.testing.assert_close(share, torch.full((5,), 0.4), atol=0.04, rtol=0)


def test_a_share_is_that_of_the_keys_there_are(generator):
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
    assert ranked(made, generator).tolist() == [[2, 3, 0, 1]]


def test_a_row_below_zero_has_no_cells_that_hold_a_share(generator):
    made = AttentionMap.from_cells(torch.tensor([[-1.0, 2, 1], [0, 2, 1]]), words(3))
    assert mass_cells(made, generator).tolist() == [[False] * 3, [False, True, False]]
