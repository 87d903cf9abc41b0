"""Human preferences: Krippendorff's alpha and shares of wins, ties and losses."""

import math

import pytest
import torch

from overt.metrics.preference import (
    interval_distance,
    krippendorff_alpha,
    nominal_distance,
    ordinal_distance,
    summarize_preferences,
)

NAN = math.nan
# Krippendorff 2011, part C: four observers of twelve units
OBSERVERS = [
    [1, 2, 3, 3, 2, 1, 4, 1, 2, NAN, NAN, NAN],
    [1, 2, 3, 3, 2, 2, 4, 1, 2, 5, NAN, 3],
    [NAN, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, NAN],
    [1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, NAN],
]


@pytest.mark.parametrize(
    ("distance", "published"),
    [(nominal_distance, 0.743), (ordinal_distance, 0.815), (interval_distance, 0.849)],
)
def test_alpha_matches_the_published_example(distance, published):
    ratings = torch.tensor(OBSERVERS).T
    assert krippendorff_alpha(ratings, distance) == pytest.approx(published, abs=5e-4)
    mixed = torch.stack(
        [row[torch.randperm(4)] for row in ratings]
    )  # the order of observers does not matter
    assert krippendorff_alpha(mixed, distance) == pytest.approx(
        krippendorff_alpha(ratings, distance)
    )


def reference_alpha(ratings):
    """Compute nominal alpha over pairs of ratings."""
    units = [[one for one in row if not math.isnan(one)] for row in ratings.tolist()]
    units = [unit for unit in units if len(unit) > 1]
    every = [one for unit in units for one in unit]
    seen = sum(
        sum(a != b for at, a in enumerate(unit) for b in unit[:at]) * 2 / (len(unit) - 1)
        for unit in units
    ) / len(every)
    chance = sum(a != b for at, a in enumerate(every) for b in every[:at]) * 2
    return 1 - seen / (chance / (len(every) * (len(every) - 1)))


def test_alpha_agrees_with_a_loop_over_pairs(generator):
    ratings = torch.randint(-1, 2, (30, 5), generator=generator).float()
    ratings[torch.rand(30, 5, generator=generator) < 0.3] = NAN
    assert krippendorff_alpha(ratings, nominal_distance) == pytest.approx(
        reference_alpha(ratings), abs=1e-12
    )
    assert abs(krippendorff_alpha(ratings)) < 0.25


def test_alpha_of_perfect_and_missing_agreement():
    agreed = torch.tensor([[1.0, 1.0], [-1.0, -1.0], [0.0, 0.0]])
    assert krippendorff_alpha(agreed) == 1
    assert math.isnan(krippendorff_alpha(torch.ones(3, 2)))
    assert math.isnan(krippendorff_alpha(torch.tensor([[1.0, NAN], [NAN, 0.0]])))


def test_preference_summary_matches_an_example_by_hand():
    judged = torch.tensor([[1.0, 1.0, 0.0], [1.0, -1.0, NAN], [0.0, 1.0, 1.0], [NAN, NAN, NAN]])
    found = summarize_preferences(judged)
    assert (found.lose, found.tie, found.win) == (1 / 8, 2 / 8, 5 / 8)
    assert found.margin.mean == pytest.approx((2 / 3 + 0 + 2 / 3) / 3)
    assert found.margin.count == 3 and found.judgements == 8
    assert found.margin.low <= found.margin.mean <= found.margin.high
    assert 0 < found.chance <= 1


def test_many_equal_judgements_are_significant():
    found = summarize_preferences(torch.ones(40, 1))
    assert found.win == 1 and found.chance < 0.01 and math.isnan(found.alpha)


def test_missing_and_invalid_judgements_raise():
    with pytest.raises(ValueError, match="no judgements"):
        summarize_preferences(torch.full((2, 2), NAN))
    with pytest.raises(ValueError, match="-1 .* 0 .* 1"):
        summarize_preferences(torch.tensor([[2.0]]))
