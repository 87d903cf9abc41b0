"""Curves of removal: against one sample at a time, and by hand."""

import numpy as np
import pytest
import torch

from overt.attention import AttentionMap, words
from overt.measure import (
    comprehensiveness,
    deletion_area,
    deletion_curve,
    flip_share,
    flipping,
    insertion_area,
    insertion_curve,
    sufficiency,
)

TENTHS = [tenth / 10 for tenth in range(11)]


def linear(weights: torch.Tensor, values: torch.Tensor):
    """Logits that add up key by key."""
    return lambda keep: torch.einsum("bk,bk,kc->bc", keep, values, weights)


@pytest.fixture
def case(generator):
    weights, values = (
        torch.randn(10, 3, generator=generator),
        torch.randn(6, 10, generator=generator),
    )
    seen = torch.ones(6, 10, dtype=torch.bool)
    seen[3:, 7:] = False
    maps = AttentionMap.from_cells(torch.rand(6, 10, generator=generator), words(10), seen)
    return weights, values, seen, maps


def slow_curve(case, b, shares, insert):
    """The probability of the first answer, key after key, without batches."""
    weights, values, seen, maps = case
    importance = maps.weights[b, 0, 0, 0]
    order = sorted(range(10), key=lambda k: -float(importance[k]) if seen[b, k] else 9.0)
    count = int(seen[b].sum())

    def answer(keep: set[int]) -> np.ndarray:
        logits = sum((values[b, k] * weights[k] for k in keep), torch.zeros(3)).double()
        return logits.softmax(dim=-1).numpy()

    whole = answer(set(range(10)))
    best = int(whole.argmax())
    heights, changed = [], []
    for share in shares:
        number = round(share * count)
        chosen = set(order[: max(1, number) if share else 0])
        found = answer(chosen if insert else set(range(10)) - chosen)
        heights.append(found[best])
        changed.append(int(found.argmax()) != best)
    return whole[best], np.array(heights), changed


@pytest.mark.parametrize("insert", [False, True])
def test_curves_agree_with_one_sample_at_a_time(case, insert, generator):
    weights, values, _, maps = case
    decide = linear(weights, values)
    curve = (insertion_curve if insert else deletion_curve)(decide, maps, generator)
    area = (insertion_area if insert else deletion_area)(decide, maps, generator)
    assert curve.shares == tuple(TENTHS)
    for b in range(6):
        whole, heights, changed = slow_curve(case, b, TENTHS, insert)
        assert curve.probability[:, b].tolist() == pytest.approx(heights.tolist(), abs=1e-5)
        assert curve.changed[:, b].tolist() == changed
        assert float(area[b]) == pytest.approx(float(np.trapezoid(heights, TENTHS)), abs=1e-5)
        if not insert:
            drop = whole - heights.mean()
            assert float(flipping(decide, maps, generator)[b]) == pytest.approx(drop, abs=1e-5)
            least = min([s for s, other in zip(TENTHS, changed, strict=True) if other], default=1.0)
            assert float(flip_share(decide, maps, generator)[b]) == pytest.approx(least)


def test_erasers_numbers_agree_with_one_sample_at_a_time(case, generator):
    weights, values, _, maps = case
    decide = linear(weights, values)
    bins = (0.01, 0.05, 0.1, 0.2, 0.5)
    removed, kept = (
        measure(decide, maps, generator) for measure in (comprehensiveness, sufficiency)
    )
    for b in range(6):
        for found, insert in ((removed, False), (kept, True)):
            whole, heights, _ = slow_curve(case, b, bins, insert)
            assert float(found[b]) == pytest.approx(float(whole - heights.mean()), abs=1e-5)


def test_equals_are_removed_at_random_and_seeded(case):
    weights, values, _, _ = case
    flat = AttentionMap.from_cells(torch.ones(6, 10), words(10))
    decide = linear(weights, values)
    one, again, other = (
        deletion_area(decide, flat, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(one, again) and not torch.equal(one, other)


def test_a_map_of_nothing_has_no_number(case, generator):
    weights, values, seen, _ = case
    none = AttentionMap.from_cells(torch.zeros(6, 10), words(10), seen)
    for measure in (deletion_area, insertion_area, flipping, comprehensiveness, flip_share):
        assert measure(linear(weights, values), none, generator).isnan().all()


def test_shares_must_grow(case, generator):
    weights, values, _, maps = case
    decide = linear(weights, values)
    for shares in ((), (0.5, 0.1), (0.2, 0.2), (-0.1, 0.5), (0.5, 1.5)):
        with pytest.raises(ValueError, match="must grow"):
            deletion_curve(decide, maps, generator, shares)
    with pytest.raises(ValueError, match="above 0"):
        comprehensiveness(decide, maps, generator, (0.0, 0.5))
    with pytest.raises(ValueError, match="no area"):
        deletion_area(decide, maps, generator, (0.5,))


@pytest.mark.parametrize("measure", [flip_share, deletion_area, insertion_area, comprehensiveness])
@pytest.mark.parametrize("when", ["always", "whole", "part"])
def test_logits_that_are_no_numbers_have_no_score(measure, when, generator):
    def decide(keep: torch.Tensor) -> torch.Tensor:
        whole = keep.all(dim=-1)
        gone = {"always": whole | True, "whole": whole, "part": ~whole}[when]
        return torch.where(gone[:, None], torch.nan, torch.tensor([1.0, 0.0]))

    maps = AttentionMap.from_cells(torch.rand(2, 4, generator=generator), words(4))
    assert measure(decide, maps, generator).isnan().all()
