"""Runs against each other on the very same samples: what differs, and whether luck would do it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from overt.errors import BadInput
from overt.measure import statistics
from overt.measure.scorecards.card import Difference
from overt.show.run import Run

CLUSTER = "cluster"  # what samples share, such as their image; earlier runs do not say


@dataclass(frozen=True)
class Versus:
    """One run less the first, on the samples that both have.

    `first` and `second` are numbers of runs; `n` is how many samples both have, and `sizes` how
    many each has. `first_alone` of them only the first got right, `second_alone` only the second;
    None where answers are not right or wrong. `clustered` says whether samples that share an image
    were drawn together.
    """

    first: int
    second: int
    n: int
    sizes: tuple[int, int]
    clustered: bool
    first_alone: int | None
    second_alone: int | None
    differences: tuple[Difference, ...]


def versus(runs: Sequence[Run], seed: int = 0) -> list[Versus]:
    """Every later run less the first, by each measure that both have of each sample.

    What the first run does not have, such as numbers of attention where it has none, is compared
    with the first one that has it. Intervals are bootstraps over samples, whole images at a time
    where the runs say what they are; p-values permute signs the same way, and are corrected for all
    measures and runs together. A run that has no numbers of samples is left out; runs that share no
    sample are `BadInput`.
    """
    known = [number for number, run in enumerate(runs) if run.samples]
    earliest: dict[str, int] = {}
    for number in known:
        for key in _measured(runs[number]):
            earliest.setdefault(key, number)
    found = []
    for at, second in enumerate(known):
        for first in known[:at]:
            keys = [key for key in _measured(runs[second]) if earliest[key] == first]
            if keys or first == known[0]:
                found.append(_pair(runs, first, second, keys, seed))
    chances = [one.p for pair in found for one in pair.differences]
    corrected = iter(
        zip(statistics.holm(chances), statistics.benjamini_hochberg(chances), strict=True)
    )
    return [
        replace(
            pair,
            differences=tuple(
                replace(one, holm=strict, fdr=mild)
                for one, (strict, mild) in zip(pair.differences, corrected, strict=False)
            ),
        )
        for pair in found
    ]


def _pair(runs: Sequence[Run], first: int, second: int, keys: Sequence[str], seed: int) -> Versus:
    a, b = runs[first], runs[second]
    rows = shared_rows(a, b)
    one = {name: array[rows[:, 0]] for name, array in a.samples.items()}
    other = {name: array[rows[:, 1]] for name, array in b.samples.items()}
    clusters = one.get(CLUSTER)
    names = [str(word) for word in (one["id"] if clusters is None else clusters).tolist()]
    keys = [key for key in keys if _numbers(one, other, key)]
    differences: tuple[Difference, ...] = ()
    if keys:
        rest = [other[key].astype(np.float64) - one[key].astype(np.float64) for key in keys]
        table = torch.from_numpy(np.stack(rest))
        table = torch.where(table.isfinite(), table, torch.nan)
        around = statistics.bootstraps(table, seed, clusters=names)
        chances = statistics.permutation_tests(table, seed, clusters=names)
        differences = tuple(
            Difference(
                key=key,
                first=b.name,
                second=a.name,
                n=each.count,
                mean=each.mean,
                low=each.low,
                high=each.high,
                p=p,
                holm=p,
                fdr=p,
                effect=statistics.effect_size(row),
                superiority=statistics.superiority(row),
                direction=_direction(a, key),
            )
            for key, row, each, p in zip(keys, table, around, chances, strict=True)
        )
    sizes = (len(a.samples["id"]), len(b.samples["id"]))
    alone = _alone(one, other)
    return Versus(first, second, len(rows), sizes, clusters is not None, *alone, differences)


def shared_rows(a: Run, b: Run) -> np.ndarray:
    """The rows of samples that two runs share, one line a sample; none is `BadInput`.

    Samples are the same where data set and id are, and also the true answer if both know it.
    """
    place = {str(name): row for row, name in enumerate(b.samples["id"].tolist())}
    pairs = [
        (row, place[str(name)])
        for row, name in enumerate(a.samples["id"].tolist())
        if str(name) in place
    ]
    names = _tested(a), _tested(b)
    same_data = not (names[0] and names[1]) or names[0] & names[1]
    rows = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    if len(rows) and same_data and "truth" in a.samples and "truth" in b.samples:
        agree = a.samples["truth"][rows[:, 0]] == b.samples["truth"][rows[:, 1]]
        rows = rows[agree]
    if not len(rows) or not same_data:
        raise BadInput(
            f"{a.name} was tested on {_said(names[0])} and {b.name} on {_said(names[1])}: they "
            "share no sample, so they cannot be compared; make a page of each."
        )
    return rows


def _tested(run: Run) -> set[str]:
    data = run.results.get("data")
    entries = [one for one in data if isinstance(one, Mapping)] if isinstance(data, list) else []
    tests = [one for one in entries if one.get("split") == "test"] or entries
    return {str(one.get("name") or "") for one in tests} - {""}


def _said(names: set[str]) -> str:
    return " and ".join(sorted(names)) or "unknown data"


def _measured(run: Run) -> dict[str, Any]:
    ours = run.results.get("ours")
    if not isinstance(ours, Mapping):
        return {}
    return {str(key): one for key, one in ours.items() if isinstance(one, Mapping)}


def _numbers(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray], key: str) -> bool:
    """Whether there is a difference of at least two samples."""
    if key not in one or key not in other:
        return False
    both = one[key], other[key]
    if any(array.dtype.kind not in "fiub" for array in both):
        return False
    return int(np.isfinite(both[0].astype(float) - both[1].astype(float)).sum()) > 1


def _direction(run: Run, key: str) -> str:
    entry = _measured(run)[key]
    better = entry.get("higher_is_better")
    if isinstance(better, bool):
        return "higher" if better else "lower"
    said = str(entry.get("direction"))
    return said if said in ("higher", "lower") else "neither"


def _alone(
    one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]
) -> tuple[int | None, int | None]:
    """How many samples only one of two runs got right."""
    if not all("prediction" in some and "truth" in some for some in (one, other)):
        return None, None
    known = one["truth"] != ""
    right = [some["prediction"] == some["truth"] for some in (one, other)]
    if not known.any():
        return None, None
    return int((known & right[0] & ~right[1]).sum()), int((known & right[1] & ~right[0]).sum())


def verdict(one: Difference) -> str:
    """A difference in words: "better", "worse", "higher", "lower" or "no difference shown"."""
    if math.isnan(one.holm) or not one.holm < 0.05 or one.mean == 0:
        return "no difference shown"
    return one.verdict or ("higher" if one.mean > 0 else "lower")
