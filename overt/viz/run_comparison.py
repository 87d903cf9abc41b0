"""Paired comparison of runs on the same samples."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from overt.errors import UserError
from overt.metrics import statistics
from overt.metrics.scorecard.differences import Difference, paired_gaps
from overt.metrics.scorecard.differences import differences as paired
from overt.metrics.versions import version_of
from overt.viz.run_reader import Run

CLUSTER = "cluster"  # samples with the same image; absent in older runs


@dataclass(frozen=True)
class RunComparison:
    """Differences of two runs on their shared samples.

    `first` and `second` are indices of runs, `n` the number of shared samples and `sizes` the
    number of samples of each run. `first_only` and `second_only` count the samples that only one
    run got right; None if answers are not right or wrong. `clustered` says whether samples with the
    same image form one cluster. `redefined` are metrics whose definitions differ between the runs,
    which are not compared.
    """

    first: int
    second: int
    n: int
    sizes: tuple[int, int]
    clustered: bool
    first_only: int | None
    second_only: int | None
    differences: tuple[Difference, ...]
    redefined: tuple[str, ...] = ()


def compare_runs(runs: Sequence[Run], seed: int = 0) -> list[RunComparison]:
    """Compare every later run with the first, for each per-sample metric that both have.

    A metric that the first run lacks is compared with the first run that has it. Intervals are t
    intervals over samples, clustered by image where known; p-values are of the same t test,
    corrected over all metrics and runs. They do not cover variation between seeds. Runs without
    per-sample results are left out.

    Raises:
        UserError: if two runs share no sample.
    """
    known = [number for number, run in enumerate(runs) if run.samples]
    earliest: dict[str, int] = {}
    for number in known:
        for key in _metrics(runs[number]):
            earliest.setdefault(key, number)
    found = []
    for at, second in enumerate(known):
        for first in known[:at]:
            keys = [key for key in _metrics(runs[second]) if earliest[key] == first]
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


def _pair(
    runs: Sequence[Run], first: int, second: int, keys: Sequence[str], seed: int
) -> RunComparison:
    a, b = runs[first], runs[second]
    rows = shared_sample_rows(a, b)
    one = {name: array[rows[:, 0]] for name, array in a.samples.items()}
    other = {name: array[rows[:, 1]] for name, array in b.samples.items()}
    clusters = one.get(CLUSTER)
    names = [str(word) for word in (one["id"] if clusters is None else clusters).tolist()]
    keys = [key for key in keys if _comparable(one, other, key)]
    redefined = tuple(key for key in keys if len({_version(run, key) for run in (a, b)}) > 1)
    keys = [key for key in keys if key not in redefined]
    differences: tuple[Difference, ...] = ()
    if keys:
        rest = [paired_gaps(other[key], one[key]) for key in keys]
        directions = [_direction(a, key) for key in keys]
        differences = paired(keys, rest, (b.name, a.name), directions, seed, names)
    sizes = (len(a.samples["id"]), len(b.samples["id"]))
    alone, grouped = _only_correct(one, other), clusters is not None
    return RunComparison(first, second, len(rows), sizes, grouped, *alone, differences, redefined)


def compare_other_items(
    control: Run, method: Run, keys: Sequence[str], seed: int = 0
) -> tuple[Difference, ...]:
    """Compare metrics of items that are not test samples, such as the captions of an image.

    Items are paired by position; metrics whose items have other names in the other run are left
    out. Items with the same name, such as captions of one image, are one cluster. Differences are
    `method` minus `control`, and each metric is corrected by itself.
    """
    found: list[Difference] = []
    for key in keys:
        ours, theirs = method.elsewhere.get(key), control.elsewhere.get(key)
        names = method.elsewhere.get(f"{key}.id"), control.elsewhere.get(f"{key}.id")
        if ours is None or theirs is None or names[0] is None or names[1] is None:
            continue
        same = np.array_equal(names[0], names[1]) and len(ours) == len(theirs) == len(names[0])
        if same and _version(method, key) == _version(control, key):
            sides = (method.name, control.name)
            clusters = [str(name) for name in names[0].tolist()]
            rest = [paired_gaps(ours, theirs)]
            found += paired([key], rest, sides, [_direction(control, key)], seed, clusters)
    return tuple(found)


def shared_sample_rows(a: Run, b: Run) -> np.ndarray:
    """Return pairs of row indices of the samples that two runs share.

    Samples match by dataset and id, and by the true answer if both have it.

    Raises:
        UserError: if the runs share no sample.
    """
    place = {str(name): row for row, name in enumerate(b.samples["id"].tolist())}
    pairs = [
        (row, place[str(name)])
        for row, name in enumerate(a.samples["id"].tolist())
        if str(name) in place
    ]
    names = _test_sets(a), _test_sets(b)
    same_data = not (names[0] and names[1]) or names[0] & names[1]
    rows = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    if len(rows) and same_data and "truth" in a.samples and "truth" in b.samples:
        agree = a.samples["truth"][rows[:, 0]] == b.samples["truth"][rows[:, 1]]
        rows = rows[agree]
    if not len(rows) or not same_data:
        raise UserError(
            f"{a.name} (tested on {_join_names(names[0])}) and {b.name} (tested on "
            f"{_join_names(names[1])}) share no samples: write one report for each."
        )
    return rows


def _test_sets(run: Run) -> set[str]:
    data = run.results.get("data")
    entries = [one for one in data if isinstance(one, Mapping)] if isinstance(data, list) else []
    tests = [one for one in entries if one.get("split") == "test"] or entries
    return {str(one.get("name") or "") for one in tests} - {""}


def _join_names(names: set[str]) -> str:
    return " and ".join(sorted(names)) or "unknown data"


def _metrics(run: Run) -> dict[str, Any]:
    ours = run.results.get("ours")
    if not isinstance(ours, Mapping):
        return {}
    return {str(key): one for key, one in ours.items() if isinstance(one, Mapping)}


def _comparable(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray], key: str) -> bool:
    """Return whether at least two samples have a difference."""
    if key not in one or key not in other:
        return False
    both = one[key], other[key]
    if any(array.dtype.kind not in "fiub" for array in both):
        return False
    return int((~np.isnan(paired_gaps(*both))).sum()) > 1


def _version(run: Run, key: str) -> int:
    return version_of(_metrics(run).get(key, {}))


def _direction(run: Run, key: str) -> str:
    entry = _metrics(run)[key]
    better = entry.get("higher_is_better")
    if isinstance(better, bool):
        return "higher" if better else "lower"
    direction = str(entry.get("direction"))
    return direction if direction in ("higher", "lower") else "neither"


def _only_correct(
    one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]
) -> tuple[int | None, int | None]:
    """Count the samples that only one of two runs got right."""
    if not all("prediction" in some and "truth" in some for some in (one, other)):
        return None, None
    known = one["truth"] != ""
    right = [some["prediction"] == some["truth"] for some in (one, other)]
    if not known.any():
        return None, None
    return int((known & right[0] & ~right[1]).sum()), int((known & right[1] & ~right[0]).sum())


def describe_verdict(one: Difference) -> str:
    """Return "better", "worse", "higher", "lower" or "no difference shown"."""
    if math.isnan(one.holm) or not one.holm < 0.05 or one.mean == 0:
        return "no difference shown"
    if one.direction != "neither":
        return one.verdict or "no difference shown"
    return "higher" if one.mean > 0 else "lower"
