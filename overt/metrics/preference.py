"""Preference of judges between two options: shares, interval, p-value and inter-rater agreement.

For a human evaluation by pairs, such as Table 4 of Fei, "Attention-Aligned Transformer for Image
Captioning", AAAI 2022: judges say of each pair which caption is more natural, more relevant or
richer. The paper gives shares only; without agreement and an interval they cannot be interpreted.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from overt.metrics.statistics import Interval, confidence_interval

Judgements = Float[Tensor, "n j"]  # pairs by judges: 1 second, -1 first, 0 tie, NaN missing
Distance = Callable[[Float[Tensor, " v"], Float[Tensor, "v v"]], Float[Tensor, "v v"]]


@dataclass(frozen=True)
class PreferenceSummary:
    """Losses, ties and wins of the second option of each pair.

    Args:
        lose: Share of judgements for the first option.
        tie: Share of ties.
        win: Share of judgements for the second option.
        margin: Wins less losses, averaged over the judges of each pair and then over pairs, with a
            t interval over pairs.
        chance: p-value of the margin, from the same t.
        alpha: Krippendorff's alpha of the judges: 1 for full agreement, 0 for chance; NaN with one
            judge per pair.
        judgements: Number of judgements.
    """

    lose: float
    tie: float
    win: float
    margin: Interval
    chance: float
    alpha: float
    judgements: int


def summarize_preferences(judged: Judgements) -> PreferenceSummary:
    """Summarize judgements of pairs: shares, interval, p-value and agreement (Table 4).

    Args:
        judged: Pairs by judges: 1 for the second option, -1 for the first, 0 for a tie, NaN if
            missing.

    Returns:
        The summary.

    Raises:
        ValueError: There is no judgement, or one that is not -1, 0 or 1.
    """
    there = judged[~judged.isnan()]
    if not len(there):
        raise ValueError("there are no judgements: all entries are NaN")
    if not bool(((there == 0) | (there.abs() == 1)).all()):
        raise ValueError("judgements must be -1 (first), 0 (tie) or 1 (second)")
    pairs = judged.double().nanmean(dim=1)
    lose, tie, win = (float((there == one).double().mean()) for one in (-1, 0, 1))
    margin = confidence_interval(pairs)
    return PreferenceSummary(
        lose, tie, win, margin, margin.p, krippendorff_alpha(judged), len(there)
    )


# --- agreement


def nominal_distance(values: Float[Tensor, " v"], coincidences: Float[Tensor, "v v"]) -> Tensor:
    """Compute the nominal distance: 0 for equal ratings, else 1."""
    return (values[:, None] != values).double()


def interval_distance(values: Float[Tensor, " v"], coincidences: Float[Tensor, "v v"]) -> Tensor:
    """Compute the interval distance: the squared difference of ratings."""
    return (values[:, None] - values).double() ** 2


def ordinal_distance(values: Float[Tensor, " v"], coincidences: Float[Tensor, "v v"]) -> Tensor:
    """Compute the ordinal distance: the squared number of ratings between two values."""
    count = coincidences.sum(dim=0)
    middle = count.cumsum(0) - count / 2
    return (middle[:, None] - middle) ** 2


def krippendorff_alpha(
    ratings: Float[Tensor, "n j"], distance: Distance = ordinal_distance
) -> float:
    """Compute Krippendorff's alpha: 1 less the observed over the expected disagreement.

    Krippendorff, "Computing Krippendorff's Alpha-Reliability", 2011.

    Args:
        ratings: Units by judges, NaN where a rating is missing. Units with fewer than two ratings
            do not count.
        distance: `nominal_distance`, `interval_distance` or `ordinal_distance`.

    Returns:
        Alpha; NaN where no unit has two ratings, and where all ratings are equal.
    """
    ratings = ratings.double()
    ratings = ratings[(~ratings.isnan()).sum(dim=1) > 1]
    values = ratings[~ratings.isnan()].unique()
    if len(values) < 2:
        return float("nan")
    said = torch.stack([(ratings == value).sum(dim=1) for value in values], dim=1).double()
    judges = said.sum(dim=1, keepdim=True)
    # coincidence matrix: pairs of ratings of one unit by different judges
    together = (said / (judges - 1)).T @ said - torch.diag((said / (judges - 1)).sum(dim=0))
    count = together.sum(dim=0)
    apart = distance(values, together)
    expected = (count[:, None] * count - torch.diag(count)) / (count.sum() - 1)
    return 1 - float((together * apart).sum() / (expected * apart).sum())
