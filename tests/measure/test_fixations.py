"""Where people looked: against scikit-learn, slow copies of the published code, and by hand."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from overt.attention import AttentionMap, grid, words
from overt.measure import (
    auc_judd,
    auc_shuffled,
    centre,
    information_gain,
    mean_of_others,
    nss,
    of_other_images,
    uniform,
)


@pytest.fixture
def looked(generator):
    """Maps with ties, and where people looked; several fixations may fall on one cell."""
    weights = torch.randint(0, 6, (12, 20), generator=generator).float() + 0.1
    counts = torch.poisson(torch.full((12, 20), 0.4), generator=generator)
    counts[:, 0] = 1
    return AttentionMap.from_cells(weights, grid(4, 5)), AttentionMap.from_cells(counts, grid(4, 5))


def flat(made: AttentionMap) -> np.ndarray:
    return made.weights[:, 0, 0, 0].double().numpy()


def test_nss_agrees_with_a_loop_over_fixations(looked):
    maps, fixations = looked
    found = nss(maps, fixations)
    for b, (weights, counts) in enumerate(zip(flat(maps), flat(fixations), strict=True)):
        scaled = (weights - weights.mean()) / weights.std()
        each = [scaled[at] for at, count in enumerate(counts) for _ in range(int(count))]
        assert float(found[b]) == pytest.approx(float(np.mean(each)), abs=1e-5)
    assert nss(uniform(maps), fixations).isnan().all()


def test_judd_agrees_with_sklearn(looked):
    maps, fixations = looked
    found = auc_judd(maps, fixations)
    for b, (weights, counts) in enumerate(zip(flat(maps), flat(fixations), strict=True)):
        weight = np.where(counts > 0, counts, 1)
        expected = roc_auc_score(counts > 0, weights, sample_weight=weight)
        assert float(found[b]) == pytest.approx(expected, abs=1e-6)
    torch.testing.assert_close(auc_judd(uniform(maps), fixations), torch.full((12,), 0.5))


def published_judd(saliency: np.ndarray, fixated: np.ndarray) -> float:
    """The loop of the MIT benchmark's code, without its noise: points at fixated values alone."""
    levels = np.sort(saliency[fixated])[::-1]
    true, false = [0.0], [0.0]
    for place, level in enumerate(levels, start=1):
        above = (saliency >= level).sum()
        true.append(place / len(levels))
        false.append((above - place) / (saliency.size - len(levels)))
    return float(np.trapezoid([*true, 1.0], [*false, 1.0]))


def test_the_published_lines_add_at_most_half_a_fixation(generator):
    for _ in range(20):
        saliency = torch.rand(40, generator=generator)
        fixated = torch.rand(40, generator=generator) > 0.7
        ours = auc_judd(
            AttentionMap.from_cells(saliency[None], words(40)),
            AttentionMap.from_cells(fixated[None].float(), words(40)),
        )
        added = published_judd(saliency.numpy(), fixated.numpy()) - float(ours)
        assert -1e-6 <= added <= 1 / (2 * int(fixated.sum())) + 1e-6


def test_shuffled_agrees_with_sklearn(looked):
    maps, fixations = looked
    others = of_other_images(fixations)
    found = auc_shuffled(maps, fixations, others)
    rows = zip(flat(maps), flat(fixations), flat(others), strict=True)
    for b, (weights, counts, elsewhere) in enumerate(rows):
        expected = roc_auc_score(
            [1] * 20 + [0] * 20,
            np.concatenate([weights, weights]),
            sample_weight=np.concatenate([counts, elsewhere]),
        )
        assert float(found[b]) == pytest.approx(expected, abs=1e-6)


def test_other_images_are_all_but_ones_own(looked):
    _, fixations = looked
    others = flat(of_other_images(fixations))
    counts = flat(fixations)
    assert np.array_equal(others, counts.sum(axis=0, keepdims=True) - counts)
    with pytest.raises(ValueError, match="two images"):
        of_other_images(fixations.select(torch.tensor([0])))


def test_a_map_of_the_middle_gains_nothing_by_shuffled_area():
    """All people look near the middle: the centre does well by Judd's area, and at chance by this.

    Every image has its fixations at the same places, so nothing is special about any.
    """
    like = AttentionMap.from_cells(torch.ones(6, 81), grid(9, 9))
    middle = centre(like)
    counts = (middle.weights[:, 0, 0, 0] > 1 / 60).float()
    fixations = AttentionMap.from_cells(counts, grid(9, 9))
    assert (auc_judd(middle, fixations) > 0.95).all()
    shuffled = auc_shuffled(middle, fixations, of_other_images(fixations))
    torch.testing.assert_close(shuffled, torch.full((6,), 0.5))
    gain = information_gain(middle, fixations, middle)
    torch.testing.assert_close(gain, torch.zeros(6))


def test_information_gain_by_hand():
    weights = torch.tensor([[0.5, 0.25, 0.25, 0.0], [0.5, 0.25, 0.25, 0.0]])
    maps = AttentionMap.from_cells(weights, words(4))
    counts = torch.tensor([[2.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
    gain = information_gain(maps, AttentionMap.from_cells(counts, words(4)), uniform(maps))
    assert float(gain[0]) == pytest.approx((2 * 1 + 0) / 3, abs=1e-5)
    # a fixation where the map has nothing costs what the published floor makes of it
    assert float(gain[1]) == pytest.approx(math.log2(2.220446e-16 / 0.25), abs=1e-3)


def test_the_prior_may_be_what_people_do_elsewhere(looked):
    maps, fixations = looked
    prior = mean_of_others(fixations)
    found = information_gain(fixations, fixations, prior)
    assert (found > 0).all()  # nobody knows better where people looked
    assert information_gain(maps, fixations, prior).isfinite().all()


def test_without_fixations_there_is_no_number(looked):
    maps, fixations = looked
    none = AttentionMap.from_cells(torch.zeros(12, 20), grid(4, 5))
    for found in (
        nss(maps, none),
        auc_judd(maps, none),
        auc_shuffled(maps, none, fixations),
        auc_shuffled(maps, fixations, none),
        information_gain(maps, none, maps),
        information_gain(maps, fixations, none),
    ):
        assert found.isnan().all()


def test_hidden_keys_do_not_count(looked, generator):
    maps, fixations = looked
    seen = torch.ones(12, 20, dtype=torch.bool)
    seen[:, 15:] = False
    weights, counts = (one.weights[:, 0, 0, 0] for one in (maps, fixations))
    hidden = [AttentionMap.from_cells(one, words(20), seen) for one in (weights, counts)]
    short = [AttentionMap.from_cells(one[:, :15], words(15)) for one in (weights, counts)]
    for measure in (nss, auc_judd, lambda a, f: information_gain(a, f, centre_of(a))):
        torch.testing.assert_close(measure(*hidden), measure(*short))
    torch.testing.assert_close(
        auc_shuffled(*hidden, of_other_images(hidden[1])),
        auc_shuffled(*short, of_other_images(short[1])),
    )


def centre_of(maps: AttentionMap) -> AttentionMap:
    return uniform(maps)


def test_weights_below_zero_gain_nothing(looked):
    maps, counts = looked
    weights = maps.weights[:, 0, 0, 0].clone()
    weights[0, int((counts.weights[0, 0, 0, 0] == 0).nonzero()[0])] = -1  # where nobody looked
    signed = AttentionMap.from_cells(weights, grid(4, 5))
    for ours, prior in ((signed, uniform(maps)), (uniform(maps), signed)):
        found = information_gain(ours, counts, prior)
        assert found[0].isnan() and not found[1:].isnan().any()
    assert not nss(signed, counts).isnan().any()
