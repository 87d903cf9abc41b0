"""Which of two do people prefer, how surely, and do they agree among themselves?

For a human evaluation by pairs, such as Table 4 of Fei, "Attention-Aligned Transformer for Image
Captioning", AAAI 2022: judges say of each pair which caption is more natural, more relevant or
richer. The paper gives shares alone; without agreement and an interval they cannot be read.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from overt.measure.statistics import Interval, bootstrap, permutation_test

Judged = Float[Tensor, "n j"]  # of pairs by judges: 1 second, -1 first, 0 neither, NaN not asked
Distance = Callable[[Float[Tensor, " v"], Float[Tensor, "v v"]], Float[Tensor, "v v"]]


@dataclass(frozen=True)
class Preferred:
    """How often the second of a pair loses, ties and wins, over all judgements.

    `margin` is wins less losses, of each pair over its judges and then over pairs, which are what
    is drawn anew; `chance` is how often as large a margin comes about by itself. `alpha` is the
    agreement of judges: 1 all, 0 as by chance; NaN where each pair had one judge.
    """

    lose: float
    tie: float
    win: float
    margin: Interval
    chance: float
    alpha: float
    judgements: int


def preferred(judged: Judged, seed: int = 0) -> Preferred:
    """What judges said of pairs, with an interval, a test and their agreement (Table 4)."""
    there = judged[~judged.isnan()]
    if not len(there):
        raise ValueError("nobody has judged any pair")
    if not bool(((there == 0) | (there.abs() == 1)).all()):
        raise ValueError("a judgement is -1, 0 or 1: the first, neither, the second")
    pairs = judged.double().nanmean(dim=1)
    lose, tie, win = (float((there == one).double().mean()) for one in (-1, 0, 1))
    chance = permutation_test(pairs[~pairs.isnan()], seed)
    margin = bootstrap(pairs, seed)
    return Preferred(lose, tie, win, margin, chance, krippendorff(judged), len(there))


# --- agreement


def nominal(values: Float[Tensor, " v"], coincidences: Float[Tensor, "v v"]) -> Tensor:
    """Two answers are the same or not."""
    return (values[:, None] != values).double()


def interval(values: Float[Tensor, " v"], coincidences: Float[Tensor, "v v"]) -> Tensor:
    """Answers are apart by the square of their difference."""
    return (values[:, None] - values).double() ** 2


def ordinal(values: Float[Tensor, " v"], coincidences: Float[Tensor, "v v"]) -> Tensor:
    """Answers are apart by the square of how many answers lie between them."""
    count = coincidences.sum(dim=0)
    middle = count.cumsum(0) - count / 2
    return (middle[:, None] - middle) ** 2


def krippendorff(ratings: Float[Tensor, "n j"], distance: Distance = ordinal) -> float:
    """Krippendorff's alpha: 1 less the disagreement there is over what chance would make.

    Krippendorff, "Computing Krippendorff's Alpha-Reliability", 2011. Any number of judges, any of
    them missing (NaN); units that fewer than two have judged do not count. NaN where no unit has
    two, and where all answers are the same: then nothing could have differed.
    """
    ratings = ratings.double()
    ratings = ratings[(~ratings.isnan()).sum(dim=1) > 1]
    values = ratings[~ratings.isnan()].unique()
    if len(values) < 2:
        return float("nan")
    said = torch.stack([(ratings == value).sum(dim=1) for value in values], dim=1).double()
    judges = said.sum(dim=1, keepdim=True)
    # pairs of answers of different judges of one unit, each unit as much as it has answers
    together = (said / (judges - 1)).T @ said - torch.diag((said / (judges - 1)).sum(dim=0))
    count = together.sum(dim=0)
    apart = distance(values, together)
    expected = (count[:, None] * count - torch.diag(count)) / (count.sum() - 1)
    return 1 - float((together * apart).sum() / (expected * apart).sum())
