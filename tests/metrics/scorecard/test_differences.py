"""Paired differences: infinite values, signed ranks and verdicts."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from overt.metrics.scorecard.differences import (
    Difference,
    differences,
    intervals,
    paired_gaps,
    signed_ranks,
)


def test_two_infinities_of_the_same_sign_are_a_tie() -> None:
    ours = np.array([np.inf, np.inf, -np.inf, 1.0, np.nan])
    theirs = np.array([np.inf, 2.0, np.inf, 0.25, 3.0])
    found = paired_gaps(ours, theirs)
    np.testing.assert_array_equal(found, [0, np.inf, -np.inf, 0.75, np.nan])


def test_ranks_agree_with_scipy(generator) -> None:
    for _ in range(20):
        row = torch.randn(30, generator=generator).mul(3).round()  # with ties and zeros
        row[:3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
        known = row[~row.isnan()].numpy()
        wanted = stats.rankdata(np.abs(known)) * np.sign(known)
        np.testing.assert_allclose(signed_ranks(row)[~row.isnan()].numpy(), wanted)
        assert signed_ranks(row).isnan().sum() == 1


def test_means_are_tested_for_finite_values_and_ranks_for_infinite_ones(generator) -> None:
    rows = [torch.randn(40, generator=generator).double().numpy() + 1 for _ in range(2)]
    rows[1][:25] = np.inf
    names = tuple(f"s{at}" for at in range(40))
    finite, endless = differences(("a", "b"), rows, ("x", "y"), ("lower", "lower"), 0, names)
    assert finite.mean == pytest.approx(rows[0].mean()) and not math.isnan(finite.effect)
    assert (endless.mean, endless.n, endless.verdict) == (math.inf, 40, "worse")
    assert endless.p < 0.01 and math.isnan(endless.effect)
    assert differences((), (), ("x", "y"), (), 0, names) == ()


def test_an_infinite_mean_has_no_confidence_interval() -> None:
    table = torch.tensor([[1.0, torch.inf], [torch.inf, -torch.inf], [1.0, 2.0]])
    first, second, third = intervals(table, ("a", "b"))
    assert first.mean == math.inf and first.count == 2
    assert math.isnan(first.low) and math.isnan(first.high)
    assert math.isnan(second.mean) and second.count == 2
    assert third.mean == 1.5


def test_a_verdict_needs_a_mean_and_a_majority() -> None:
    gap = Difference("kl", "x", "y", 9, math.inf, *[0.0] * 5, 0.0, 0.9, "lower")
    assert gap.verdict == "worse" and replace(gap, mean=-1.0).verdict == "better"
    assert replace(gap, superiority=0.1).verdict == ""
    assert replace(gap, mean=math.nan).verdict == "" and replace(gap, holm=0.2).verdict == ""
