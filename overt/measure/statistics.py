"""From one number a sample to a mean and how far it can be trusted.

NaN means that a sample has no number, and is left out. Every interval is a percentile bootstrap
from an explicit seed: the same numbers give the same interval on any machine. A number may be
infinite, as `kl` can be: so are then the mean, and the ends of the interval that draws with it
reach. Numbers that are infinite both ways have no mean, and no interval.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

Numbers = Float[Tensor, " b"] | Sequence[float]  # one a sample
_AT_ONCE = 2_000_000  # entries of the table of draws that are held at one time


@dataclass(frozen=True)
class Interval:
    """A mean, the interval that holds it with the confidence asked for, and how many it is of."""

    mean: float
    low: float
    high: float
    count: int


@dataclass(frozen=True)
class Spread:
    """The mean over runs of the mean of each run, and the standard deviation between runs."""

    mean: float
    deviation: float
    seeds: int


def mean(values: Numbers) -> float:
    """The mean of the numbers there are; NaN when there is none."""
    return float(_numbers(values).nanmean())


def over_seeds(values: Float[Tensor, "s b"] | Sequence[Numbers]) -> Spread:
    """Mean and sample standard deviation over seeds; the deviation of one seed is NaN."""
    means = _numbers(values, 2).nanmean(dim=1)
    deviation = float(means.std()) if len(means) > 1 else math.nan
    return Spread(float(means.mean()), deviation, len(means))


def bootstrap(
    values: Numbers,
    seed: int = 0,
    draws: int = 2000,
    confidence: float = 0.95,
    clusters: Sequence[str] | None = None,
) -> Interval:
    """The mean and its interval over samples drawn anew; of one sample the interval says nothing.

    With `clusters` whole clusters are drawn: samples that share an image are no news of each other,
    and taken one by one they make an interval too narrow.
    """
    _check(draws, confidence)
    there = _numbers(values)
    if clusters is not None:
        named = _cluster_of(clusters, len(there))[~there.isnan()].tolist()
        whole = there[~there.isnan()][None]
        return two_level(whole, seed, draws, confidence, [str(at) for at in named])
    there = there[~there.isnan()]
    generator = _generator(seed)
    means = [there[_draw(len(there), some, generator)].mean(dim=1) for some in _parts(there, draws)]
    return _interval(mean(there), torch.cat(means), len(there), confidence)


def paired(
    first: Numbers,
    second: Numbers,
    first_ids: Sequence[str],
    second_ids: Sequence[str],
    seed: int = 0,
    draws: int = 2000,
    confidence: float = 0.95,
    clusters: Sequence[str] | None = None,
) -> Interval:
    """The mean of `first - second` over the same samples, matched by id.

    Far narrower than two intervals side by side, because what makes a sample hard is in both.
    `clusters` are those of the first, as in `bootstrap`. A sample that is infinite in both, the
    same way, has no difference and is left out, as one that is NaN in either.
    """
    place = _places(second_ids, second)
    _places(first_ids, first)
    missing = sorted(place.keys() ^ set(first_ids))
    if missing:
        raise ValueError(
            f"{len(missing)} samples are in one result only, such as {missing[0]!r}: "
            "compare models on the same samples"
        )
    order = torch.tensor([place[name] for name in first_ids], dtype=torch.long)
    difference = _numbers(first) - _numbers(second)[order]
    return bootstrap(difference, seed, draws, confidence, clusters)


def bootstraps(
    values: Float[Tensor, "m b"],
    seed: int = 0,
    draws: int = 2000,
    confidence: float = 0.95,
    clusters: Sequence[str] | None = None,
) -> tuple[Interval, ...]:
    """The means of many measures of the same samples, all from the same samples drawn anew.

    As `bootstrap` of each, at the price of one. A sample that has no number in a measure is left
    out of that one alone, so the number of those that have one varies with the draw.
    """
    _check(draws, confidence)
    there = _numbers(values, 2)
    count = there.shape[1]
    names = [str(at) for at in range(count)] if clusters is None else clusters
    place = _cluster_of(names, count)
    sums, known = _by_cluster(there, place)
    generator = _generator(seed)
    parts = []
    for some in _parts(sums[0] if len(sums) else sums.new_zeros(count), draws):
        drawn = _counts(sums.shape[1], some, generator)
        parts.append(_added(partial(_times, drawn), sums) / (drawn @ known.T))
    means = torch.cat(parts) if parts else there.new_zeros(0, len(there))
    return tuple(
        _interval(mean(row), means[:, at], int((~row.isnan()).sum()), confidence)
        for at, row in enumerate(there)
    )


def two_level(
    values: Float[Tensor, "s b"],
    seed: int = 0,
    draws: int = 2000,
    confidence: float = 0.95,
    clusters: Sequence[str] | None = None,
) -> Interval:
    """The mean over runs and samples; both are drawn anew, each run on the same drawn samples.

    Wider than `bootstrap` of one run as soon as runs differ: it speaks of the method, not of the
    run at hand. `clusters` are as in `bootstrap`. The samples counted have a number in some run.
    """
    _check(draws, confidence)
    values, generator = _numbers(values, 2), _generator(seed)
    place = None if clusters is None else _cluster_of(clusters, values.shape[1])
    means = []
    for some in _parts(values[0], draws):
        samples = _drawn(place, values.shape[1], some, generator)
        means.append(_crossed(values, samples, generator))
    count = int((~values.isnan()).any(dim=0).sum())
    return _interval(_grand_mean(values), torch.cat(means), count, confidence)


def two_level_difference(
    first: Float[Tensor, "s b"],
    second: Float[Tensor, "r b"],
    seed: int = 0,
    draws: int = 2000,
    confidence: float = 0.95,
    clusters: Sequence[str] | None = None,
) -> Interval:
    """`first - second` over runs and samples: each has runs of its own, and samples are shared.

    `clusters` are as in `bootstrap`. The samples counted have a number in some run of either.
    """
    _check(draws, confidence)
    first, second = _numbers(first, 2), _numbers(second, 2)
    if first.shape[1] != second.shape[1]:
        raise ValueError(f"{first.shape[1]} and {second.shape[1]} samples are not the same samples")
    generator = _generator(seed)
    place = None if clusters is None else _cluster_of(clusters, first.shape[1])
    differences = []
    for some in _parts(first[0], draws):
        samples = _drawn(place, first.shape[1], some, generator)
        ours, theirs = (_crossed(one, samples, generator) for one in (first, second))
        differences.append(ours - theirs)
    middle = _grand_mean(first) - _grand_mean(second)
    count = int((~torch.cat([first, second]).isnan()).any(dim=0).sum())
    return _interval(middle, torch.cat(differences), count, confidence)


# --- is there a difference, and how large is it?


def permutation_test(difference: Numbers, seed: int = 0, draws: int = 10_000) -> float:
    """How often chance alone gives a mean as far from 0 as that of these paired differences.

    Two-sided. If nothing told the two apart, every sign could as well be the other one: all signs
    are tried where that is no more than `draws`, else so many are drawn, and the one at hand is
    counted among them, so that a p is never 0. NaN without samples, and where a difference is
    infinite: then the mean is so whatever the signs, and none is further from 0 than another.
    """
    _check(draws)
    there = _numbers(difference)
    there = there[~there.isnan()]
    n = len(there)
    if not n or there.isinf().any():
        return math.nan
    exact = n < 63 and 2**n <= draws
    generator = _generator(seed)
    limit = float(there.sum().abs()) * (1 - 1e-9)  # rounding shall not make equals unequal
    extreme, done = 0, 0
    for some in _parts(there, 2**n if exact else draws):
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
    """`permutation_test` of many measures of the same samples, all from the same signs.

    With `clusters` all samples of a cluster change their sign together: those that share an image
    are no news of each other. NaN for a measure without samples, or with an infinite difference.
    """
    _check(draws)
    there = _numbers(differences, 2)
    names = [str(at) for at in range(there.shape[1])] if clusters is None else clusters
    sums, known = _by_cluster(there, _cluster_of(names, there.shape[1]))
    n = sums.shape[1]
    exact = n < 63 and 2**n <= draws
    limit = sums.sum(dim=1).abs() * (1 - 1e-9)  # rounding shall not make equals unequal
    generator = _generator(seed)
    extreme, done = torch.zeros(len(sums), dtype=torch.long), 0
    for some in _parts(sums[0] if len(sums) else sums.new_zeros(n), 2**n if exact else draws):
        signs = _signs(done, some, n, exact, generator)
        extreme += ((signs @ sums.T).abs() >= limit).sum(dim=0)
        done += some
    more = 0 if exact else 1  # the signs at hand are one of those that could have been
    found = ((extreme + more).double() / (done + more)).tolist()
    some_known = (known.sum(dim=1) > 0) & ~there.isinf().any(dim=1)
    return tuple(p if there else math.nan for p, there in zip(found, some_known, strict=True))


def _signs(
    done: int, some: int, n: int, exact: bool, generator: torch.Generator
) -> Float[Tensor, "d n"]:
    """Signs of n samples: all there are, from number `done` on, or as many drawn at random."""
    if exact:
        numbers = torch.arange(done, done + some)[:, None]
        return 1.0 - 2.0 * ((numbers >> torch.arange(n)) & 1).double()
    return 1.0 - 2.0 * torch.randint(2, (some, n), generator=generator).double()


def holm(p_values: Sequence[float]) -> tuple[float, ...]:
    """P-values corrected for their number: the chance that any at all is found by luck.

    Holm 1979. Ask for p < 0.05 of what comes out. NaN stays NaN and is not counted.

    >>> holm([0.01, 0.04, 0.03])
    (0.03, 0.06, 0.06)
    """
    order, count = _increasing(p_values)
    found, least = [math.nan] * len(p_values), 0.0
    for place, at in enumerate(order):
        least = max(least, min(1.0, (count - place) * p_values[at]))
        found[at] = least
    return tuple(found)


def benjamini_hochberg(p_values: Sequence[float]) -> tuple[float, ...]:
    """P-values corrected for the share of what is found that is found by luck.

    Benjamini and Hochberg 1995. Less strict than `holm`, for looking through many measures. NaN
    stays NaN and is not counted.
    """
    order, count = _increasing(p_values)
    found, most = [math.nan] * len(p_values), 1.0
    for place in reversed(range(count)):
        most = min(most, p_values[order[place]] * count / (place + 1))
        found[order[place]] = most
    return tuple(found)


def effect_size(difference: Numbers) -> float:
    """The mean of paired differences in units of their deviation (Cohen's d_z).

    0.2 is called small, 0.5 medium and 0.8 large. NaN where all differences are the same, or fewer
    than two.
    """
    there = _numbers(difference)
    there = there[~there.isnan()]
    deviation = float(there.std()) if len(there) > 1 else 0.0
    return float(there.mean()) / deviation if deviation > 0 else math.nan


def superiority(difference: Numbers) -> float:
    """The share of samples on which the first is above the second, ties by half; 0.5 is even."""
    there = _numbers(difference)
    there = there[~there.isnan()]
    return float((there > 0).double().mean() + (there == 0).double().mean() / 2)


def _increasing(p_values: Sequence[float]) -> tuple[list[int], int]:
    wrong = [p for p in p_values if not (math.isnan(p) or 0 <= p <= 1)]
    if wrong:
        raise ValueError(f"a p-value is from 0 to 1, not {wrong[0]}")
    there = [at for at, p in enumerate(p_values) if not math.isnan(p)]
    return sorted(there, key=lambda at: p_values[at]), len(there)


# --- drawing


def _cluster_of(clusters: Sequence[str], count: int) -> Int[Tensor, " b"]:
    """The number of the cluster of each sample."""
    if len(clusters) != count:
        raise ValueError(f"{count} samples in {len(clusters)} clusters: name one for each sample")
    number = {name: at for at, name in enumerate(dict.fromkeys(clusters))}
    return torch.tensor([number[name] for name in clusters], dtype=torch.long)


def _by_cluster(
    values: Float[Tensor, "m b"], place: Int[Tensor, " b"]
) -> tuple[Float[Tensor, "m c"], Float[Tensor, "m c"]]:
    """The sum of the numbers of each cluster, and how many they are."""
    clusters = int(place.max()) + 1 if len(place) else 0
    where = place.expand(len(values), -1)
    nothing = torch.zeros(len(values), clusters, dtype=torch.float64)
    known = ~values.isnan()
    sums = nothing.scatter_add(1, where, torch.where(known, values, 0))
    return sums, nothing.scatter_add(1, where, known.double())


def _drawn(
    place: Int[Tensor, " b"] | None, count: int, draws: int, generator: torch.Generator
) -> Float[Tensor, "d b"]:
    """How often each sample is drawn, by itself or with its cluster."""
    if place is None:
        return _counts(count, draws, generator)
    clusters = int(place.max()) + 1 if count else 0
    return _counts(clusters, draws, generator)[:, place]


def _crossed(
    values: Float[Tensor, "s b"], samples: Float[Tensor, "d b"], generator: torch.Generator
) -> Float[Tensor, " d"]:
    """The mean of runs drawn anew over samples that were each drawn so many times."""
    runs = _counts(len(values), len(samples), generator)
    total = _added(partial(_crossed_sum, runs, samples), values)
    return total / _crossed_sum(runs, samples, (~values.isnan()).double())


def _crossed_sum(
    runs: Float[Tensor, "d s"], samples: Float[Tensor, "d b"], values: Float[Tensor, "s b"]
) -> Float[Tensor, " d"]:
    return ((runs @ values) * samples).sum(dim=1)


def _times(drawn: Float[Tensor, "d c"], sums: Float[Tensor, "m c"]) -> Float[Tensor, "d m"]:
    return drawn @ sums.T


def _added(add: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """A sum of numbers by how often each is drawn; one that is not drawn adds nothing, be it inf.

    `add` weighs and sums numbers that are finite. NaN adds nothing.
    """
    total = add(torch.where(values.isfinite(), values, 0))
    for end in (math.inf, -math.inf):
        there = values == end
        if there.any():
            total = torch.where(add(there.double()) > 0, total + end, total)
    return total


def _grand_mean(values: Float[Tensor, "s b"]) -> float:
    return float(values.detach().double().nanmean())


def _parts(values: Float[Tensor, " b"], draws: int) -> Iterator[int]:
    """The draws, split so that a table of draws and samples fits in memory."""
    size = max(1, _AT_ONCE // max(len(values), 1))
    for start in range(0, draws, size):
        yield min(size, draws - start)


def _draw(count: int, draws: int, generator: torch.Generator) -> Int[Tensor, "d b"]:
    """Which of `count` things are drawn, as many as there are, a row a draw."""
    return torch.randint(max(count, 1), (draws, count), generator=generator)


def _counts(count: int, draws: int, generator: torch.Generator) -> Float[Tensor, "d b"]:
    """How often each of `count` things is drawn, a row a draw."""
    drawn = _draw(count, draws, generator)
    once = torch.ones(drawn.shape, dtype=torch.float64)
    return torch.zeros_like(once).scatter_add(1, drawn, once)


def _interval(middle: float, drawn: Float[Tensor, " d"], count: int, confidence: float) -> Interval:
    drawn = drawn[~drawn.isnan()]
    if not count or not len(drawn) or math.isnan(middle):
        return Interval(math.nan, math.nan, math.nan, 0)
    tail = (1 - confidence) / 2
    low, high = _quantiles(drawn, torch.tensor([tail, 1 - tail], dtype=drawn.dtype)).tolist()
    return Interval(middle, low, high, count)


def _quantiles(drawn: Float[Tensor, " d"], at: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """What so large a share of the draws is below; the line between two, unless one is infinite."""
    if drawn.isfinite().all():
        return drawn.quantile(at)
    below, above = (drawn.quantile(at, interpolation=side) for side in ("lower", "higher"))
    ends = torch.where(below == above, below, below + above)
    return torch.where(ends.isfinite(), drawn.quantile(at), ends)


def _check(draws: int, confidence: float = 0.95) -> None:
    if draws < 1:
        raise ValueError(f"{draws} draws say nothing of chance; take 1 at least")
    if not 0 <= confidence <= 1:
        raise ValueError(
            f"a confidence is a share from 0 to 1, not {confidence}; for 95 % give 0.95"
        )


def _numbers(values: Any, axes: int = 1) -> Tensor:
    """Numbers in float64 on the host, one a sample or a row of them for each of several things."""
    try:
        if isinstance(values, (list, tuple)) and any(isinstance(one, Tensor) for one in values):
            values = torch.stack([torch.as_tensor(one) for one in values])
        found = torch.as_tensor(values).detach().double().cpu()
    except (RuntimeError, TypeError, ValueError) as problem:
        raise ValueError(
            f"these are no numbers, as many in each row, but a {type(values).__name__}: {problem}"
        ) from problem
    if found.ndim != axes:
        wanted = "(b,), one a sample" if axes == 1 else "(rows, b), one a row and sample"
        raise ValueError(f"numbers of shape {wanted}, are wanted, not {tuple(found.shape)}")
    return found


def _places(ids: Sequence[str], values: Numbers) -> dict[str, int]:
    if len(ids) != len(values):
        raise ValueError(f"{len(values)} numbers for {len(ids)} ids")
    place = {name: at for at, name in enumerate(ids)}
    if len(place) != len(ids):
        raise ValueError("an id appears twice; numbers can only be matched by ids that are unique")
    return place


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
