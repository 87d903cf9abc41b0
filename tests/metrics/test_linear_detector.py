"""The detector agrees with scipy's minimum, and the length control finds what length explains."""

import math

import numpy as np
import pytest
import torch

from overt.metrics.linear_detector import (
    area_under_roc,
    compare_detectors,
    fit_detector,
)


def samples(count=120, seed=0):
    draw = torch.Generator().manual_seed(seed)
    features = torch.randn(count, 3, generator=draw) * torch.tensor([1.0, 10.0, 0.1]) + 5
    chance = torch.sigmoid(2 * (features[:, 0] - 5) - 0.2 * (features[:, 1] - 5))
    return features, torch.rand(count, generator=draw) < chance


@pytest.mark.parametrize("l2", [0.1, 1.0, 30.0])
def test_the_fit_is_the_minimum_that_scipy_finds(l2):
    optimize = pytest.importorskip("scipy.optimize")
    features, wrong = samples()
    detector = fit_detector(features, wrong, l2)
    each = features.double().numpy()
    each = (each - each.mean(axis=0)) / each.std(axis=0)
    sign = np.where(wrong.numpy(), 1, -1)

    def loss(found):
        margin = sign * (each @ found[1:] + found[0])
        return np.logaddexp(0, -margin).sum() + l2 / 2 * (found[1:] ** 2).sum()

    wanted = optimize.minimize(loss, np.zeros(4), method="BFGS", options={"gtol": 1e-8}).x
    assert detector.weights.tolist() == pytest.approx(wanted[1:], abs=1e-5)
    assert float(detector.bias) == pytest.approx(wanted[0], abs=1e-5)
    # The bias has no penalty, so probabilities are right on average.
    mean = float(detector.probability(features).mean())
    assert mean == pytest.approx(float(wrong.double().mean()), abs=1e-6)


def test_area_agrees_with_a_loop_over_pairs():
    draw = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 6, (40,), generator=draw).double()
    wrong = torch.rand(40, generator=draw) < 0.4
    pairs = [
        1.0 if high > low else 0.5 if high == low else 0.0
        for high in scores[wrong].tolist()
        for low in scores[~wrong].tolist()
    ]
    assert area_under_roc(scores, wrong) == pytest.approx(sum(pairs) / len(pairs))
    assert math.isnan(area_under_roc(scores, torch.ones(40).bool()))


def test_a_signal_that_repeats_the_length_adds_nothing_to_it():
    draw = torch.Generator().manual_seed(0)
    length = torch.randint(5, 60, (600,), generator=draw).double()
    share = 1 / length + 0.01 * torch.randn(600, generator=draw, dtype=torch.float64)
    wrong = torch.rand(600, generator=draw, dtype=torch.float64) < length / 70
    found = compare_detectors(share[:, None], length, wrong)
    assert found.auroc["signals"] > 0.65  # looks like a detector of errors
    assert found.auroc["both"] < found.auroc["length"] + 0.01
    assert set(found.brier) == {"signals", "length", "both"}


def test_a_signal_of_its_own_adds_to_the_length():
    features, wrong = samples(400)
    length = torch.rand(400, generator=torch.Generator().manual_seed(1))
    found = compare_detectors(features, length, wrong)
    assert found.auroc["both"] > found.auroc["length"] + 0.2
    assert found.brier["both"] < found.brier["length"]
    again = compare_detectors(features, length, wrong)
    assert torch.equal(again.both, found.both)
    assert not torch.equal(compare_detectors(features, length, wrong, seed=1).both, found.both)


def test_a_sample_is_scored_by_detectors_that_did_not_see_it():
    draw = torch.Generator().manual_seed(0)
    features = torch.randn(60, 30, generator=draw)  # enough to fit any labels
    wrong = torch.rand(60, generator=draw) < 0.5
    inside = fit_detector(features, wrong, 1e-2).probability(features)
    assert area_under_roc(inside, wrong) == 1
    left_out = compare_detectors(features, features[:, 0], wrong, l2=1e-2).auroc["signals"]
    assert 0.25 < left_out < 0.75


def test_wrong_arguments_are_named():
    features, wrong = samples()
    with pytest.raises(ValueError, match="120 wrong of 120"):
        fit_detector(features, wrong | True)
    missing = features.clone()
    missing[3, 1] = torch.nan
    with pytest.raises(ValueError, match="1 features"):
        fit_detector(missing, wrong)
    with pytest.raises(ValueError, match="l2.*0"):
        fit_detector(features, wrong, 0.0)
    with pytest.raises(ValueError, match="folds.*99"):
        compare_detectors(features, features[:, 0], wrong, folds=99)


def test_lengths_are_not_rounded_to_the_dtype_of_the_features():
    draw = torch.Generator().manual_seed(0)
    length = torch.randint(2000, 2004, (200,), generator=draw)
    wrong = length > 2001
    features = torch.randn(200, 1, generator=draw).bfloat16()
    assert compare_detectors(features, length, wrong).auroc["length"] == 1.0


def test_scores_and_samples_that_do_not_fit_raise():
    scores, wrong = torch.tensor([0.1, math.nan, 0.3]), torch.tensor([True, False, True])
    with pytest.raises(ValueError, match="1 scores are NaN"):
        area_under_roc(scores, wrong)
    with pytest.raises(ValueError, match="3 for 2"):
        area_under_roc(scores, wrong[:2])
    features, wrong = samples()
    with pytest.raises(ValueError, match="119 for 120"):
        fit_detector(features[1:], wrong)
    with pytest.raises(ValueError, match="119 for 120"):
        compare_detectors(features, features[1:, 0], wrong)
