"""Deletion and insertion curves compared with reference code, and examples by hand."""

import numpy as np
import pytest
import torch

from overt.attention import AttentionMap, words
from overt.metrics import (
    aopc,
    comprehensiveness,
    deletion_area,
    deletion_curve,
    insertion_area,
    sufficiency,
)
from overt.metrics.deletion_curves import flip_share, insertion_curve

TENTHS = [tenth / 10 for tenth in range(11)]


def linear_model(weights: torch.Tensor, values: torch.Tensor):
    """Return a model whose logits are sums over keys."""
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


def reference_curve(case, b, shares, insert):
    """Compute the probability of the predicted class, key by key, without batches."""
    weights, values, seen, maps = case
    importance = maps.weights[b, 0, 0, 0]
    order = sorted(range(10), key=lambda k: -float(importance[k]) if seen[b, k] else 9.0)
    count = int(seen[b].sum())

    def answer(keep: set[int]) -> np.ndarray:
        logits = sum((values[b, k] * weights[k] for k in keep), torch.zeros(3)).double()
        return logits.softmax(dim=-1).numpy()

    whole = answer(set(range(10)))
    best = int(whole.argmax())
    heights, changed, removed = [], [], []
    for share in shares:
        number = round(share * count)
        chosen = set(order[: max(1, number) if share else 0])
        found = answer(chosen if insert else set(range(10)) - chosen)
        removed.append(len(chosen) / count)
        heights.append(found[best])
        changed.append(int(found.argmax()) != best)
    return whole[best], np.array(heights), changed, removed


@pytest.mark.parametrize("insert", [False, True])
def test_curves_agree_with_the_reference(case, insert, generator):
    weights, values, _, maps = case
    decide = linear_model(weights, values)
    curve = (insertion_curve if insert else deletion_curve)(decide, maps, generator)
    area = (insertion_area if insert else deletion_area)(decide, maps, generator)
    assert curve.shares == tuple(TENTHS)
    assert curve.removed[:, 3:].T.tolist() == [
        reference_curve(case, b, TENTHS, insert)[3] for b in (3, 4, 5)
    ]
    for b in range(6):
        whole, heights, changed, removed = reference_curve(case, b, TENTHS, insert)
        assert curve.removed[:, b].tolist() == removed
        assert curve.probability[:, b].tolist() == pytest.approx(heights.tolist(), abs=1e-5)
        assert curve.changed[:, b].tolist() == changed
        assert float(area[b]) == pytest.approx(float(np.trapezoid(heights, removed)), abs=1e-5)
        if not insert:
            steps = [heights[at] for at in range(11) if at == 0 or removed[at] > removed[at - 1]]
            drop = whole - np.mean(steps)
            assert float(aopc(decide, maps, generator)[b]) == pytest.approx(drop, abs=1e-5)
            least = min(
                [s for s, other in zip(removed, changed, strict=True) if other], default=1.0
            )
            assert float(flip_share(decide, maps, generator)[b]) == pytest.approx(least)


def test_eraser_metrics_agree_with_the_reference(case, generator):
    weights, values, _, maps = case
    decide = linear_model(weights, values)
    bins = (0.01, 0.05, 0.1, 0.2, 0.5)
    removed, kept = (
        measure(decide, maps, generator) for measure in (comprehensiveness, sufficiency)
    )
    for b in range(6):
        for found, insert in ((removed, False), (kept, True)):
            whole, heights, _, _ = reference_curve(case, b, bins, insert)
            assert float(found[b]) == pytest.approx(float(whole - heights.mean()), abs=1e-5)


def test_ties_are_removed_in_seeded_random_order(case):
    weights, values, _, _ = case
    flat = AttentionMap.from_cells(torch.ones(6, 10), words(10))
    decide = linear_model(weights, values)
    one, again, other = (
        deletion_area(decide, flat, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(one, again) and not torch.equal(one, other)


def test_an_empty_map_gives_nan(case, generator):
    weights, values, seen, _ = case
    none = AttentionMap.from_cells(torch.zeros(6, 10), words(10), seen)
    for measure in (deletion_area, insertion_area, aopc, comprehensiveness, flip_share):
        assert measure(linear_model(weights, values), none, generator).isnan().all()


def test_shares_that_do_not_increase_raise(case, generator):
    weights, values, _, maps = case
    decide = linear_model(weights, values)
    for shares in ((), (0.5, 0.1), (0.2, 0.2), (-0.1, 0.5), (0.5, 1.5)):
        with pytest.raises(ValueError, match="must increase"):
            deletion_curve(decide, maps, generator, shares)
    with pytest.raises(ValueError, match="above 0"):
        comprehensiveness(decide, maps, generator, (0.0, 0.5))
    with pytest.raises(ValueError, match="at least 2 shares"):
        deletion_area(decide, maps, generator, (0.5,))


@pytest.mark.parametrize("measure", [flip_share, deletion_area, insertion_area, comprehensiveness])
@pytest.mark.parametrize("when", ["always", "whole", "part"])
def test_nan_logits_give_nan(measure, when, generator):
    def decide(keep: torch.Tensor) -> torch.Tensor:
        whole = keep.all(dim=-1)
        gone = {"always": whole | True, "whole": whole, "part": ~whole}[when]
        return torch.where(gone[:, None], torch.nan, torch.tensor([1.0, 0.0]))

    maps = AttentionMap.from_cells(torch.rand(2, 4, generator=generator), words(4))
    assert measure(decide, maps, generator).isnan().all()


@pytest.mark.parametrize("keys", [1, 2, 3, 7, 10, 13])
def test_areas_do_not_depend_on_the_number_of_keys(keys, generator):
    """A probability proportional to the kept share has an area of one half."""

    def decide(keep: torch.Tensor) -> torch.Tensor:
        share = keep.mean(dim=-1).double() * (1 - 2e-9) + 1e-9
        return torch.stack([share.log(), (1 - share).log()], dim=-1)

    maps = AttentionMap.from_cells(torch.rand(3, keys, generator=generator), words(keys))
    for measure in (deletion_area, insertion_area):
        found = measure(decide, maps, generator)
        assert found.tolist() == pytest.approx([0.5] * 3, abs=1e-6)
    if keys <= 10:  # the mean is over all numbers of keys; with more keys some are left out
        assert aopc(decide, maps, generator).tolist() == pytest.approx([0.5] * 3, abs=1e-6)


def test_flip_share_is_the_share_actually_removed(generator):
    """One of two keys is a half, also if a tenth is requested."""

    def decide(keep: torch.Tensor) -> torch.Tensor:
        return torch.stack([keep.sum(dim=-1) - 1.5, torch.zeros(len(keep))], dim=-1)

    maps = AttentionMap.from_cells(torch.rand(1, 2, generator=generator), words(2))
    assert flip_share(decide, maps, generator).tolist() == [0.5]


def test_a_curve_with_one_point_has_no_area(generator):
    maps = AttentionMap.from_cells(torch.rand(2, 2, generator=generator), words(2))
    decide = linear_model(torch.randn(2, 3, generator=generator), torch.ones(2, 2))
    assert deletion_area(decide, maps, generator, (0.1, 0.2)).isnan().all()
