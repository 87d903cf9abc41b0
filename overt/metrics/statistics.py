"""Means with confidence intervals, tests, and corrections for multiple tests.

NaN marks a sample without a score; it is left out. Intervals are t intervals:

- one run: over clusters of samples (`confidence_interval`), Wilson's for a share;
- several runs on the same samples: crossed random effects (`two_level_interval`), which counts the
  noise of both seeds and samples, with Satterthwaite's degrees of freedom;
- two methods with their own seeds on shared samples: `two_level_difference`; runs paired by seed
  are subtracted first and passed to `two_level_interval`.

There is no interval (`low` and `high` are NaN) for one sample, for one cluster, for equal numbers,
and for infinite numbers. Measured coverage: `docs/intervals.md`.
"""

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from statistics import NormalDist
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from overt.metrics import student_t
from overt.metrics.argument_checks import check_count

Numbers = Float[Tensor, " b"] | Sequence[float]  # one per sample
_AT_ONCE = 2_000_000  # entries of the table of draws in memory at one time
_SAME = 1e-13  # a standard error below this share of the mean is rounding


@dataclass(frozen=True)
class Interval:
    """A mean with its confidence interval.

    Args:
        mean: The mean of the known numbers.
        low: Lower end; NaN where there is no interval.
        high: Upper end; NaN where there is no interval.
        count: Number of samples with a number.
        runs: Number of runs; for two methods, the smaller number.
        error: Standard error of the mean; NaN for a share, whose interval is Wilson's.
        df: Degrees of freedom of t; NaN where t was not used.

    Example:
        >>> found = confidence_interval([1.0, 2.0, 3.0])
        >>> round(found.low, 3), round(found.high, 3)  # 2 +- 4.303 / sqrt(3)
        (-0.484, 4.484)
        >>> round(found.p, 4)
        0.0742
    """

    mean: float
    low: float
    high: float
    count: int
    runs: int = 1
    error: float = math.nan
    df: float = math.nan

    def __repr__(self) -> str:
        """Format with the digits that the width of the interval justifies.

        >>> confidence_interval([1.0, 2.0, 3.0])
        Interval(mean=2.00, low=-0.48, high=4.48, count=3)
        """
        places = decimal_places(self.high - self.low)
        ends = (
            f"mean={self.mean:.{places}f}, low={self.low:.{places}f}, high={self.high:.{places}f}"
        )
        runs = f", runs={self.runs}" if self.runs != 1 else ""
        return f"Interval({ends}, count={self.count}{runs})"

    @property
    def p(self) -> float:
        """Two-sided p-value of a mean of 0, from the same t as the interval.

        It is below 0.05 exactly where the 95 % interval excludes 0. t is not defined where all
        numbers are equal: then 1 if they are 0, else the probability that as many signs agree. NaN
        without an interval, and for a share.
        """
        if self.error == 0:
            return 1.0 if self.mean == 0 else 2.0**-self.df
        return student_t.two_sided_p(self.mean / self.error, self.df)

    @property
    def note(self) -> str:
        """Warning to print beside an interval over few runs; empty for one run and from five on."""
        if self.runs == 2:
            return "two runs: coverage about 90 %"
        return f"provisional: {self.runs} runs" if self.runs in (3, 4) else ""


def decimal_places(width: float) -> int:
    """Return the decimal places that show the width of an interval with three digits.

    Args:
        width: High end minus low end; NaN or 0 where there is no interval.

    Returns:
        From 0 to 9; 4 without an interval.

    Example:
        >>> [decimal_places(width) for width in (0.153, 12.0, 0.0004, math.nan)]
        [3, 1, 6, 4]
    """
    if not (math.isfinite(width) and width > 0):
        return 4
    return min(9, max(0, 2 - math.floor(math.log10(width))))


@dataclass(frozen=True)
class SeedSpread:
    """Mean over runs of the mean of each run, and the standard deviation between runs."""

    mean: float
    deviation: float
    seeds: int


def mean(values: Numbers) -> float:
    """Compute the mean of the known numbers; NaN when there is none.

    Args:
        values: One number per sample, NaN where there is none.

    Returns:
        The mean.

    Example:
        >>> mean([1.0, math.nan, 3.0])
        2.0
    """
    return float(_as_float64(values).nanmean())


def mean_over_seeds(values: Float[Tensor, "s b"] | Sequence[Numbers]) -> SeedSpread:
    """Compute mean and sample standard deviation over seeds; the deviation of one seed is NaN."""
    means = _as_float64(values, 2).nanmean(dim=1)
    deviation = float(means.std()) if len(means) > 1 else math.nan
    return SeedSpread(float(means.mean()), deviation, len(means))


# --- confidence intervals of means


def confidence_interval(
    values: Numbers,
    *,
    clusters: Sequence[str] | None = None,
    confidence: float = 0.95,
    share: bool = False,
) -> Interval:
    """Compute the mean of one run and its t interval.

    Args:
        values: One number per sample, NaN where there is none.
        clusters: The cluster of each sample, such as its image. Samples of a cluster are not
            independent: the interval is over clusters, and wider.
        confidence: Share of such intervals that cover the mean, 0.95 for 95 %.
        share: Whether all numbers are 0 or 1 and not differences of such numbers: then Wilson's
            interval, which also holds near 0 and 1. With clusters it is used where nothing varies.

    Returns:
        The interval; without ends for one sample or one cluster.

    Raises:
        ValueError: The clusters do not fit the samples, or a share is not of 0 and 1.

    Example:
        >>> confidence_interval([0.7]).low
        nan
    """
    return confidence_intervals(
        _as_float64(values)[None], clusters=clusters, confidence=confidence, shares=[share]
    )[0]


def confidence_intervals(
    values: Float[Tensor, "m b"],
    *,
    clusters: Sequence[str] | None = None,
    confidence: float = 0.95,
    shares: Sequence[bool] | None = None,
) -> tuple[Interval, ...]:
    """Compute `confidence_interval` of several metrics on the same samples, one per row."""
    _check_confidence(confidence)
    table = _as_float64(values, 2)
    place = _cluster_index(clusters, table.shape[1])
    kinds = [False] * len(table) if shares is None else shares
    if len(kinds) != len(table):
        raise ValueError(
            f"shares must have one entry per row, got {len(kinds)} for {len(table)} rows"
        )
    return tuple(
        _wilson_interval(row, place, confidence)
        if share
        else _interval([row[None]], place, confidence)
        for row, share in zip(table, kinds, strict=True)
    )


def paired_difference(
    first: Numbers,
    second: Numbers,
    first_ids: Sequence[str] | None = None,
    second_ids: Sequence[str] | None = None,
    *,
    clusters: Sequence[str] | None = None,
    confidence: float = 0.95,
) -> Interval:
    """Compute the mean of `first - second` over the same samples, matched by id or by order.

    Much narrower than two separate intervals, because the difficulty of a sample is in both. A
    sample that is infinite with the same sign in both has no difference and is left out, as one
    that is NaN in either. A warning counts the samples that are NaN in only one.

    Args:
        first: One number per sample.
        second: One number per sample of the other model or map.
        first_ids: The ids of the first samples; None: both are in the same order.
        second_ids: The ids of the second samples, where the first have ids.
        clusters: The clusters of the first samples, as in `confidence_interval`.
        confidence: Share of such intervals that cover the mean.

    Returns:
        The interval of the difference.

    Raises:
        ValueError: The ids are not the same, not unique, or given for one of both; or there are no
            ids and the numbers of samples differ.

    Example:
        >>> found = paired_difference([0.9, 0.6], [0.5, 0.7], ["a", "b"], ["b", "a"])
        >>> round(found.mean, 4)  # (0.9 - 0.7 + 0.6 - 0.5) / 2
        0.15
        >>> round(paired_difference([0.9, 0.6], [0.7, 0.5]).mean, 4)  # in the same order
        0.15
    """
    if first_ids is None or second_ids is None:
        if first_ids is not second_ids:
            raise ValueError("ids of one result only: give first_ids and second_ids, or neither")
        if len(first) != len(second):
            raise ValueError(
                f"without ids both results must have the same samples in the same order, got "
                f"{len(first)} and {len(second)}"
            )
        return _paired_interval(first, _as_float64(second), clusters, confidence)
    place = _index_by_id(second_ids, second)
    _index_by_id(first_ids, first)
    missing = sorted(place.keys() ^ set(first_ids))
    if missing:
        raise ValueError(
            f"both results must have the same samples: {len(missing)} are in only one of them, "
            f"such as {missing[0]!r}"
        )
    order = torch.tensor([place[name] for name in first_ids], dtype=torch.long)
    return _paired_interval(first, _as_float64(second)[order], clusters, confidence)


def _paired_interval(
    first: Numbers, second: Tensor, clusters: Sequence[str] | None, confidence: float
) -> Interval:
    """Return the interval of the differences of samples in the same order."""
    ours = _as_float64(first)
    count = int((ours.isnan() != second.isnan()).sum())
    if count:  # NaN in both is usual: a sample without ground truth
        warnings.warn(
            f"{count} of {len(ours)} samples are NaN in only one of the results and left out: "
            "metrics are NaN for a map without weight, such as Grad-CAM after its ReLU",
            stacklevel=3,
        )
    return confidence_interval(ours - second, clusters=clusters, confidence=confidence)


def two_level_interval(
    values: Float[Tensor, "s b"],
    *,
    clusters: Sequence[str] | None = None,
    confidence: float = 0.95,
) -> Interval:
    """Compute the mean over runs and samples with a crossed random-effects interval.

    Both runs and samples count as random draws: the interval is about the method, not about these
    runs. Covers 95 +- 2 % from three runs on; about 90 % at two runs where seeds differ more than
    samples do (see `Interval.note`). For a difference of runs paired by seed, subtract first. One
    run has the interval of `confidence_interval`.

    Args:
        values: One row per run, one column per sample, NaN where a value is missing.
        clusters: As in `confidence_interval`.
        confidence: Share of such intervals that cover the mean.

    Returns:
        The interval; its `count` is the number of samples with a number in some run.

    Example:
        >>> found = two_level_interval(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        >>> found.mean, round(found.error**2, 4)  # 1 by the two runs, 0.25 by the two samples
        (2.5, 1.25)
    """
    _check_confidence(confidence)
    table = _as_float64(values, 2)
    return _interval([table], _cluster_index(clusters, table.shape[1]), confidence)


def two_level_difference(
    first: Float[Tensor, "s b"],
    second: Float[Tensor, "r b"],
    *,
    clusters: Sequence[str] | None = None,
    confidence: float = 0.95,
) -> Interval:
    """Compute `first - second` where each has its own runs and samples are shared.

    The variances of runs add up; the variance of samples is that of their difference. There is no
    interval where one of the two has one run and the other several: one run does not show how far
    runs of its method differ. Where both have one run, the interval is of the difference of these
    two runs. Samples count if they have a number in some run of either.

    Args:
        first: One row per run, one column per sample.
        second: The runs of the other method, on the same samples.
        clusters: As in `confidence_interval`.
        confidence: Share of such intervals that cover the difference.

    Returns:
        The interval of the difference.

    Raises:
        ValueError: The numbers of samples differ.

    Example:
        >>> first = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> second = torch.tensor([[1.0, 1.0], [2.0, 2.0]])
        >>> found = two_level_difference(first, second)
        >>> found.mean, round(found.error**2, 4)  # runs 1 + 0.25, samples 0.25
        (1.0, 1.5)
    """
    _check_confidence(confidence)
    arms = [_as_float64(first, 2), _as_float64(second, 2)]
    counts = [one.shape[1] for one in arms]
    if counts[0] != counts[1]:
        raise ValueError(f"both must have the same samples, got {counts[0]} and {counts[1]}")
    return _interval(arms, _cluster_index(clusters, counts[0]), confidence)


def _interval(
    arms: Sequence[Float[Tensor, "_ b"]], place: Int[Tensor, " b"], confidence: float
) -> Interval:
    """Compute the interval of one method, or of the difference of two."""
    means = [float(one.nanmean()) for one in arms]
    middle = means[0] - means[1] if len(means) > 1 else means[0]
    known = (~torch.cat(list(arms)).isnan()).any(dim=0)
    runs = min(int((~one.isnan()).any(dim=1).sum()) for one in arms)
    nothing = Interval(middle, math.nan, math.nan, int(known.sum()), runs)
    if not math.isfinite(middle):
        return nothing
    sums = [_cluster_residuals(one[:, known], place[known]) for one in arms]
    error, df = _standard_error(sums)
    if error <= _SAME * abs(middle):
        error = 0.0
    if not error > 0:
        return Interval(middle, math.nan, math.nan, nothing.count, runs, error, df)
    half = student_t.quantile(confidence, df) * error
    return Interval(middle, middle - half, middle + half, nothing.count, runs, error, df)


def _cluster_residuals(
    values: Float[Tensor, "s b"], place: Int[Tensor, " b"]
) -> Float[Tensor, "_ c"]:
    """Sum (number - mean) / (known numbers) by cluster, for each run with numbers."""
    known = ~values.isnan()
    some = known.any(dim=1)
    rest = torch.where(known, values - values.nanmean(), 0)[some] / known.sum()
    _, named = place.unique(return_inverse=True)
    sums = torch.zeros(len(rest), int(named.max()) + 1, dtype=torch.float64)
    return sums.index_add_(1, named, rest)


def _standard_error(arms: Sequence[Float[Tensor, "_ c"]]) -> tuple[float, float]:
    """Compute the standard error of a mean, or of a difference, and its degrees of freedom.

    V = max(rows + items - both, rows, items): the noise of runs, of clusters, and the part counted
    twice. Each of the first two is a floor, because the difference may be negative by chance.
    """
    c = arms[0].shape[1]
    runs = [len(one) for one in arms]
    columns = [one.sum(dim=0) for one in arms]
    apart = columns[0] - columns[1] if len(arms) > 1 else columns[0]
    if c < 2 or (min(runs) < 2 and max(runs) > 1):
        return math.nan, math.nan
    items = c / (c - 1) * float(apart.square().sum())
    if max(runs) == 1:
        return math.sqrt(items), c - 1.0
    rows, both, weight, shared = 0.0, 0.0, 0.0, 0.0
    for sums, s, column in zip(arms, runs, columns, strict=True):
        row = sums.sum(dim=1, keepdim=True)
        mixed = sums - row / c - column / s
        of_rows = s / (s - 1) * float(row.square().sum())
        of_both = s * c / ((s - 1) * (c - 1)) * float(mixed.square().sum())
        rows, both = rows + of_rows, both + of_both
        weight += of_rows**2 / (s - 1)
        shared += of_both**2 / ((s - 1) * (c - 1))
    floor = max(rows, items)
    variance = max(rows + items - both, floor)
    if not variance > 0:
        return 0.0, c - 1.0
    weight += items**2 / (c - 1) + (shared if variance > floor else 0.0)
    return math.sqrt(variance), variance**2 / weight


def _wilson_interval(
    row: Float[Tensor, " b"], place: Int[Tensor, " b"], confidence: float
) -> Interval:
    """Compute Wilson's interval of numbers that are 0 or 1."""
    known = ~row.isnan()
    there = row[known]
    wrong = there[(there != 0) & (there != 1)]
    if len(wrong):
        raise ValueError(f"a share needs numbers 0 and 1, got {float(wrong[0]):g}: use share=False")
    n, clusters = len(there), len(place[known].unique())
    if clusters < n:
        around = _interval([row[None]], place, confidence)
        if around.error != 0:
            return replace(around, low=_clip_to_unit(around.low), high=_clip_to_unit(around.high))
    if clusters < 2:
        return Interval(float(row.nanmean()), math.nan, math.nan, n)
    middle = float(there.mean())
    low, high = _wilson(middle, clusters, confidence)
    return Interval(middle, low, high, n)


def _clip_to_unit(end: float) -> float:
    """Clip an end of an interval to [0, 1]; NaN stays NaN."""
    return end if math.isnan(end) else min(1.0, max(0.0, end))


def _wilson(share: float, n: int, confidence: float) -> tuple[float, float]:
    z = NormalDist().inv_cdf((1 + confidence) / 2) if confidence < 1 else math.inf
    if math.isinf(z):
        return 0.0, 1.0
    scale = 1 + z * z / n
    middle = (share + z * z / (2 * n)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return _clip_to_unit(middle - half), _clip_to_unit(middle + half)


# --- tests and effect sizes


def permutation_test(difference: Numbers, seed: int = 0, draws: int = 10_000) -> float:
    """Compute the two-sided p-value of paired differences by permuting their signs.

    It assumes that differences are symmetric around 0 under the null hypothesis. Where they are
    skewed it rejects too often: in 11 to 15 % of cases instead of 5 % at 6 to 20 samples of a
    log-normal. t does no better there (`docs/intervals.md`). Scorecards and reports use
    `confidence_interval(difference).p`, which belongs to the interval.

    Args:
        difference: One paired difference per sample.
        seed: Seed of the permutations.
        draws: Number of permutations. All of them are tried where there are no more than that;
            otherwise the observed one is counted too, so that p is never 0.

    Returns:
        The p-value; NaN without samples, and where a difference is infinite.

    Example:
        >>> permutation_test([1.0, 1.0, 1.0, 1.0])  # 2 of 16 choices of signs are as extreme
        0.125
    """
    _check_draws(draws)
    if isinstance(seed, Tensor | Sequence):
        raise TypeError(
            f"seed must be an int, got {type(seed).__name__}: pass the differences of two maps, "
            "permutation_test(first - second)"
        )
    there = _as_float64(difference)
    there = there[~there.isnan()]
    n = len(there)
    if not n or there.isinf().any():
        return math.nan
    exact = n < 63 and 2**n <= draws
    generator = _generator(seed)
    limit = float(there.sum().abs()) * (1 - 1e-9)  # rounding must not break ties
    extreme, done = 0, 0
    for some in _chunks(there, 2**n if exact else draws):
        signs = _signs(done, some, n, exact, generator)
        extreme += int(((signs @ there).abs() >= limit).sum())
        done += some
    return extreme / done if exact else (extreme + 1) / (done + 1)


def permutation_tests(
    differences: Float[Tensor, "m b"],
    seed: int = 0,
    draws: int = 10_000,
    clusters: Sequence[str] | None = None,
) -> tuple[float, ...]:
    """Compute `permutation_test` of several metrics on the same samples, with the same signs.

    With `clusters`, all samples of a cluster change their sign together, because they are not
    independent. NaN for a metric without samples, or with an infinite difference.
    """
    _check_draws(draws)
    there = _as_float64(differences, 2)
    sums, known = _cluster_sums(there, _cluster_index(clusters, there.shape[1]))
    n = sums.shape[1]
    exact = n < 63 and 2**n <= draws
    limit = sums.sum(dim=1).abs() * (1 - 1e-9)  # rounding must not break ties
    generator = _generator(seed)
    extreme, done = torch.zeros(len(sums), dtype=torch.long), 0
    for some in _chunks(sums[0] if len(sums) else sums.new_zeros(n), 2**n if exact else draws):
        signs = _signs(done, some, n, exact, generator)
        extreme += ((signs @ sums.T).abs() >= limit).sum(dim=0)
        done += some
    more = 0 if exact else 1  # the observed signs are one of the permutations
    found = ((extreme + more).double() / (done + more)).tolist()
    some_known = (known.sum(dim=1) > 0) & ~there.isinf().any(dim=1)
    return tuple(p if there else math.nan for p, there in zip(found, some_known, strict=True))


def _signs(
    done: int, some: int, n: int, exact: bool, generator: torch.Generator
) -> Float[Tensor, "d n"]:
    """Return signs of n samples: all combinations from number `done` on, or random ones."""
    if exact:
        numbers = torch.arange(done, done + some)[:, None]
        return 1.0 - 2.0 * ((numbers >> torch.arange(n)) & 1).double()
    return 1.0 - 2.0 * torch.randint(2, (some, n), generator=generator).double()


def holm(p_values: Sequence[float]) -> tuple[float, ...]:
    """Correct p-values for their number by Holm's method (family-wise error rate).

    Holm 1979. Compare the result with 0.05. NaN stays NaN and is not counted.

    Args:
        p_values: The p-values of all tests.

    Returns:
        The corrected p-values, in the same order.

    Example:
        >>> holm([0.01, 0.04, 0.03])
        (0.03, 0.06, 0.06)
    """
    p_values = _as_float64(p_values).tolist()
    order, count = _ascending_order(p_values)
    found, least = [math.nan] * len(p_values), 0.0
    for place, at in enumerate(order):
        least = max(least, min(1.0, (count - place) * p_values[at]))
        found[at] = least
    return tuple(found)


def benjamini_hochberg(p_values: Sequence[float]) -> tuple[float, ...]:
    """Correct p-values by the method of Benjamini and Hochberg (false discovery rate).

    Benjamini and Hochberg 1995. Less strict than `holm`, for screening many metrics. NaN stays NaN
    and is not counted.

    Args:
        p_values: The p-values of all tests.

    Returns:
        The corrected p-values, in the same order.
    """
    p_values = _as_float64(p_values).tolist()
    p_values = _as_float64(p_values).tolist()
    order, count = _ascending_order(p_values)
    found, most = [math.nan] * len(p_values), 1.0
    for place in reversed(range(count)):
        most = min(most, p_values[order[place]] * count / (place + 1))
        found[order[place]] = most
    return tuple(found)


def effect_size(difference: Numbers) -> float:
    """Compute Cohen's d_z: the mean of paired differences over their standard deviation.

    0.2 is called small, 0.5 medium and 0.8 large.

    Args:
        difference: One paired difference per sample.

    Returns:
        The effect size; NaN where all differences are equal, or with fewer than two.
    """
    there = _as_float64(difference)
    there = there[~there.isnan()]
    deviation = float(there.std()) if len(there) > 1 else 0.0
    return float(there.mean()) / deviation if deviation > 0 else math.nan


def probability_of_superiority(difference: Numbers) -> float:
    """Compute the share of samples on which the first is above the second; ties count half.

    Args:
        difference: `first - second` per sample.

    Returns:
        The share; 0.5 is even.
    """
    there = _as_float64(difference)
    there = there[~there.isnan()]
    return float((there > 0).double().mean() + (there == 0).double().mean() / 2)


def _ascending_order(p_values: Sequence[float]) -> tuple[list[int], int]:
    wrong = [p for p in p_values if not (math.isnan(p) or 0 <= p <= 1)]
    if wrong:
        raise ValueError(f"p-values must be from 0 to 1, got {wrong[0]}")
    there = [at for at, p in enumerate(p_values) if not math.isnan(p)]
    return sorted(there, key=lambda at: p_values[at]), len(there)


# --- clusters and signs


def _cluster_index(clusters: Sequence[str] | None, count: int) -> Int[Tensor, " b"]:
    """Number the cluster of each sample; without clusters each sample is its own."""
    if clusters is None:
        return torch.arange(count)
    if len(clusters) != count:
        raise ValueError(
            f"clusters must name one cluster per sample, got {len(clusters)} for {count} samples"
        )
    number = {name: at for at, name in enumerate(dict.fromkeys(clusters))}
    return torch.tensor([number[name] for name in clusters], dtype=torch.long)


def _cluster_sums(
    values: Float[Tensor, "m b"], place: Int[Tensor, " b"]
) -> tuple[Float[Tensor, "m c"], Float[Tensor, "m c"]]:
    """Sum and count the known numbers of each cluster."""
    clusters = int(place.max()) + 1 if len(place) else 0
    where = place.expand(len(values), -1)
    nothing = torch.zeros(len(values), clusters, dtype=torch.float64)
    known = ~values.isnan()
    sums = nothing.scatter_add(1, where, torch.where(known, values, 0))
    return sums, nothing.scatter_add(1, where, known.double())


def _chunks(values: Float[Tensor, " b"], draws: int) -> Iterator[int]:
    """Split draws so that a table of draws by samples fits in memory."""
    size = max(1, _AT_ONCE // max(len(values), 1))
    for start in range(0, draws, size):
        yield min(size, draws - start)


def _check_draws(draws: int) -> None:
    check_count("draws", draws)


def _check_confidence(confidence: float) -> None:
    if not isinstance(confidence, Real) or not 0 <= confidence <= 1:
        raise ValueError(f"confidence must be from 0 to 1, got {confidence}: for 95 % use 0.95")


def _as_float64(values: Any, axes: int = 1) -> Tensor:
    """Convert numbers to a float64 tensor on the CPU with this number of axes."""
    try:
        if isinstance(values, (list, tuple)) and any(isinstance(one, Tensor) for one in values):
            values = torch.stack([torch.as_tensor(one) for one in values])
        if not hasattr(values, "dtype"):  # a list: float32 would lose digits
            values = torch.as_tensor(values, dtype=torch.float64)
        found = torch.as_tensor(values).detach()
        if found.is_complex():
            raise TypeError("they are complex")
        found = found.double().cpu()
    except (RuntimeError, TypeError, ValueError) as problem:
        raise ValueError(
            f"expected numbers in rows of equal length, got a {type(values).__name__}: {problem}"
        ) from problem
    if found.ndim != axes:
        expected = "(samples,)" if axes == 1 else "(rows, samples)"
        raise ValueError(f"expected numbers of shape {expected}, got {tuple(found.shape)}")
    return found


def _index_by_id(ids: Sequence[str], values: Numbers) -> dict[str, int]:
    if len(ids) != len(values):
        raise ValueError(
            f"values and ids must have the same length, got {len(values)} and {len(ids)}"
        )
    place = {name: at for at, name in enumerate(ids)}
    if len(place) != len(ids):
        raise ValueError("ids must be unique to match samples, but one appears twice")
    return place


def _generator(seed: int) -> torch.Generator:
    if isinstance(seed, bool) or not isinstance(seed, Integral):
        raise TypeError(f"seed must be a whole number, got a {type(seed).__name__}")
    seed = int(seed)
    return torch.Generator().manual_seed(seed)
