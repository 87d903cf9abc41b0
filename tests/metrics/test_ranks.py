"""Ranks, pair counts and inversions compared with scipy and with loops."""

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st

from overt.metrics import ranks
from overt.metrics.ranks import average_ranks, count_pairs, inversions


def test_ranks_agree_with_scipy(generator):
    values = torch.randint(0, 5, (8, 11), generator=generator).double()
    seen = torch.rand(8, 11, generator=generator) > 0.3
    found = average_ranks(values, seen)
    for b in range(8):
        expected = scipy.stats.rankdata(values[b][seen[b]].numpy())
        assert found[b][seen[b]].tolist() == expected.tolist()
        assert (found[b][~seen[b]] == 0).all()


def reference_pairs(first, second):
    counts = [0, 0, 0, 0]
    for i in range(len(first)):
        for j in range(i):
            x, y = np.sign(first[i] - first[j]), np.sign(second[i] - second[j])
            counts[0] += x * y < 0
            counts[1] += x == 0
            counts[2] += y == 0
            counts[3] += x == 0 and y == 0
    return counts


@given(st.integers(1, 40), st.integers(1, 6), st.integers(0, 2**31))
def test_pair_counts_agree_with_a_loop(k, levels, seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-3, 2**levels, (2, 4, k), generator=generator).double()
    seen = torch.rand(4, k, generator=generator) > 0.2
    found = count_pairs(values[0], values[1], seen)
    for b in range(4):
        expected = reference_pairs(*(side[b][seen[b]].tolist() for side in values))
        assert [int(one[b]) for one in found] == expected


@pytest.mark.parametrize("k", [1, 7, 8, 9, 16, 17, 100])
def test_inversions_agree_with_a_direct_count(k, generator):
    values = torch.randint(-20, 20, (5, k), generator=generator)
    wrong = torch.ones(k, k, dtype=torch.bool).triu(1) & (values[:, :, None] > values[:, None, :])
    assert torch.equal(inversions(values), wrong.sum(dim=(1, 2)))
    assert int(inversions(torch.arange(k).flip(0)[None])) == k * (k - 1) // 2


def test_torch_and_numpy_sorting_agree(monkeypatch, generator):
    """Test the GPU code path on a CPU."""
    values = torch.randint(0, 9, (2, 6, 30), generator=generator).double()
    seen = torch.rand(6, 30, generator=generator) > 0.2
    here = average_ranks(values[0], seen), *count_pairs(values[0], values[1], seen)
    monkeypatch.setattr(ranks, "_argsort", lambda rows: rows.argsort(dim=-1))
    monkeypatch.setattr(ranks, "_sort", lambda rows: rows.sort(dim=-1).values)
    there = average_ranks(values[0], seen), *count_pairs(values[0], values[1], seen)
    assert all(torch.equal(one, two) for one, two in zip(here, there, strict=True))


def test_empty_rows_have_empty_ranks():
    none = torch.zeros(3, 0, dtype=torch.double)
    assert average_ranks(none, none.bool()).shape == (3, 0)
    assert [one.tolist() for one in count_pairs(none, none, none.bool())] == [[0, 0, 0]] * 4


def test_an_empty_batch_has_no_inversions_and_no_tau():
    assert inversions(torch.zeros(0, 4).long()).shape == (0,)
    empty, seen = torch.zeros(0, 4), torch.zeros(0, 4).bool()
    assert ranks.kendall_tau(empty, empty, seen).shape == (0,)
