"""From one number a sample to a mean and how far it can be trusted.

NaN means that a sample has no number, and is left out. Every interval is a percentile bootstrap
from an explicit seed: the same numbers give the same interval on any machine.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

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


def mean(values: Float[Tensor, " b"]) -> float:
    """The mean of the numbers there are; NaN when there is none."""
    return float(values.double().nanmean())


def over_seeds(values: Float[Tensor, "s b"]) -> Spread:
    """Mean and sample standard deviation over seeds; the deviation of one seed is NaN."""
    means = values.double().nanmean(dim=1).cpu()
    deviation = float(means.std()) if len(means) > 1 else math.nan
    return Spread(float(means.mean()), deviation, len(means))


def bootstrap(
    values: Float[Tensor, " b"], seed: int = 0, draws: int = 2000, confidence: float = 0.95
) -> Interval:
    """The mean and its interval over samples drawn anew."""
    there = values.detach().double().cpu()
    there = there[~there.isnan()]
    generator = _generator(seed)
    means = [there[_draw(len(there), some, generator)].mean(dim=1) for some in _parts(there, draws)]
    return _interval(mean(there), torch.cat(means), len(there), confidence)


def paired(
    first: Float[Tensor, " b"],
    second: Float[Tensor, " b"],
    first_ids: Sequence[str],
    second_ids: Sequence[str],
    seed: int = 0,
    draws: int = 2000,
    confidence: float = 0.95,
) -> Interval:
    """The mean of `first - second` over the same samples, matched by id.

    Far narrower than two intervals side by side, because what makes a sample hard is in both.
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
    difference = first.detach().double().cpu() - second.detach().double().cpu()[order]
    return bootstrap(difference, seed, draws, confidence)


def two_level(
    values: Float[Tensor, "s b"], seed: int = 0, draws: int = 2000, confidence: float = 0.95
) -> Interval:
    """The mean over runs and samples; both are drawn anew, each run on the same drawn samples.

    Wider than `bootstrap` of one run as soon as runs differ: it speaks of the method, not of the
    run at hand.
    """
    generator = _generator(seed)
    means = []
    for some in _parts(values[0], draws):
        samples = _counts(values.shape[1], some, generator)
        means.append(_crossed(values, samples, generator))
    return _interval(_grand_mean(values), torch.cat(means), values.shape[1], confidence)


def two_level_difference(
    first: Float[Tensor, "s b"],
    second: Float[Tensor, "r b"],
    seed: int = 0,
    draws: int = 2000,
    confidence: float = 0.95,
) -> Interval:
    """`first - second` over runs and samples: each has runs of its own, and samples are shared."""
    if first.shape[1] != second.shape[1]:
        raise ValueError(f"{first.shape[1]} and {second.shape[1]} samples are not the same samples")
    generator = _generator(seed)
    differences = []
    for some in _parts(first[0], draws):
        samples = _counts(first.shape[1], some, generator)
        ours, theirs = (_crossed(one, samples, generator) for one in (first, second))
        differences.append(ours - theirs)
    middle = _grand_mean(first) - _grand_mean(second)
    return _interval(middle, torch.cat(differences), first.shape[1], confidence)


def _crossed(
    values: Float[Tensor, "s b"], samples: Float[Tensor, "d b"], generator: torch.Generator
) -> Float[Tensor, " d"]:
    """The mean of runs drawn anew over samples that were each drawn so many times."""
    values = values.detach().double().cpu()
    runs = _counts(len(values), len(samples), generator)
    total = ((runs @ values.nan_to_num(0)) * samples).sum(dim=1)
    return total / ((runs @ (~values.isnan()).double()) * samples).sum(dim=1)


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
    low, high = drawn.quantile(torch.tensor([tail, 1 - tail], dtype=drawn.dtype)).tolist()
    return Interval(middle, low, high, count)


def _places(ids: Sequence[str], values: Float[Tensor, " b"]) -> dict[str, int]:
    if len(ids) != len(values):
        raise ValueError(f"{len(values)} numbers for {len(ids)} ids")
    place = {name: at for at, name in enumerate(ids)}
    if len(place) != len(ids):
        raise ValueError("an id appears twice; numbers can only be matched by ids that are unique")
    return place


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
