"""Paired differences of two maps or two models by several metrics, with intervals and tests.

A score may be infinite, as `kl` is where a map gives nothing to a cell that people looked at. Such
a sample is neither dropped nor averaged: the mean difference is then infinite, and the test is one
of signed ranks, in which an infinite difference is the largest.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from overt.metrics import statistics
from overt.metrics.statistics import Interval


@dataclass(frozen=True)
class Difference:
    """`first - second` by one metric, on the same samples.

    Where a difference is infinite, `mean` is infinite, or NaN with both signs; `p` is then from a
    permutation of the signs of ranks by cluster, and `effect` is NaN.

    Args:
        key: Key of the metric.
        first: Name of the first map or model.
        second: Name of the second map or model.
        n: Number of samples.
        mean: Mean of the differences.
        low: Lower end of the 95 % interval; NaN where there is none, as with one cluster.
        high: Upper end of the interval.
        p: p-value of t over clusters, as the interval.
        holm: p corrected for all metrics of the comparison by Holm's method.
        fdr: p corrected by the method of Benjamini and Hochberg.
        effect: Mean over the standard deviation of the differences.
        superiority: Share of samples on which the first is higher.
        direction: The better direction: "higher", "lower" or "neither".
    """

    key: str
    first: str
    second: str
    n: int
    mean: float
    low: float
    high: float
    p: float
    holm: float
    fdr: float
    effect: float
    superiority: float
    direction: str

    def __repr__(self) -> str:
        """Return the comparison as one line, with the digits that its interval justifies."""
        places = statistics.decimal_places(self.high - self.low)
        numbers = f"{self.mean:+.{places}f} [{self.low:+.{places}f}, {self.high:+.{places}f}]"
        named = f"{self.key}: {self.first} minus {self.second}"
        return f"Difference({named} {numbers}, n={self.n}, p={self.p:.2g}, Holm={self.holm:.2g})"

    @property
    def verdict(self) -> str:
        """ "better", "worse" or "" for the first, at 5 % after Holm's correction.

        An infinite mean that the majority of samples contradicts gives no verdict.
        """
        if self.direction == "neither" or not self.holm < 0.05 or self.mean == 0:
            return ""
        if math.isnan(self.mean):
            return ""
        if math.isinf(self.mean) and (self.superiority > 0.5) != (self.mean > 0):
            return ""
        return "better" if (self.mean > 0) == (self.direction == "higher") else "worse"


def paired_gaps(ours: NDArray[np.floating], theirs: NDArray[np.floating]) -> NDArray[np.float64]:
    """Subtract sample by sample; two equal infinities give 0, a tie."""
    first, second = ours.astype(np.float64), theirs.astype(np.float64)
    with np.errstate(invalid="ignore"):
        found = np.asarray(first - second)
    found[np.isinf(first) & (first == second)] = 0
    return found


def differences(
    keys: Sequence[str],
    rows: Sequence[NDArray[np.float64]],
    names: tuple[str, str],
    directions: Sequence[str],
    seed: int,
    clusters: Sequence[str],
) -> tuple[Difference, ...]:
    """Make a `Difference` of every row of `paired_gaps`; NaN is left out, infinity is not."""
    if not keys:
        return ()
    table = torch.from_numpy(np.stack(rows)).double()
    around = intervals(table, clusters)
    p_values = [
        _rank_test(row, seed, clusters) if row.isinf().any() else one.p
        for row, one in zip(table, around, strict=True)
    ]
    corrected = statistics.holm(p_values), statistics.benjamini_hochberg(p_values)
    return tuple(
        Difference(
            key,
            *names,
            one.count,
            one.mean,
            one.low,
            one.high,
            p,
            holm,
            fdr,
            math.nan if row.isinf().any() else statistics.effect_size(row),
            statistics.probability_of_superiority(row),
            direction,
        )
        for key, row, one, direction, p, holm, fdr in zip(
            keys, table, around, directions, p_values, *corrected, strict=True
        )
    )


def _rank_test(row: Float[Tensor, " b"], seed: int, clusters: Sequence[str]) -> float:
    """Compute p of infinite differences by a permutation of the signs of their ranks."""
    return statistics.permutation_tests(signed_ranks(row)[None], seed, clusters=clusters)[0]


def intervals(
    table: Float[Tensor, "m b"], clusters: Sequence[str], shares: Sequence[bool] | None = None
) -> tuple[Interval, ...]:
    """Compute a mean with its interval over clusters for every row; Wilson's for shares.

    An infinite number makes the mean infinite, infinity of both signs NaN; there is then no
    interval.
    """
    finite = torch.where(table.isinf(), torch.nan, table)
    found = statistics.confidence_intervals(finite, clusters=clusters, shares=shares)
    return tuple(
        _infinite(row) if row.isinf().any() else one for row, one in zip(table, found, strict=True)
    )


def _infinite(row: Float[Tensor, " b"]) -> Interval:
    known = row[~row.isnan()]
    mean = float(known.sum())  # infinite, or NaN for both signs
    return Interval(mean, math.nan, math.nan, len(known))


def signed_ranks(row: Float[Tensor, " b"]) -> Float[Tensor, " b"]:
    """Replace differences by the ranks of their absolute values, with their signs; NaN and 0 stay.

    >>> signed_ranks(torch.tensor([0.1, -0.2, torch.inf, 0.0, torch.nan]))
    tensor([ 2., -3.,  4.,  0., nan], dtype=torch.float64)
    """
    found = row.double().clone()
    known = ~found.isnan()
    sizes = found[known].abs().unique(sorted=True, return_inverse=True, return_counts=True)
    _, place, counts = sizes
    mean = counts.cumsum(dim=0) - (counts - 1) / 2  # ties share the mean of their ranks
    found[known] = mean.double()[place] * found[known].sign()
    return found
