"""Results of several runs as table cells and bar charts, with the paper's numbers.

Plain text without HTML, so a terminal can print the same table.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from overt.metrics.versions import label_with_version, newest_version, version_of

# attention metrics in the order of the table
_FIRST = (("pointing",), ("mass",), ("rank", "spearman"))
Number = int | float
_ARROWS = {"higher": "↑", "lower": "↓"}


@dataclass(frozen=True)
class ResultCell:
    """One number of one run as text; a dash if missing."""

    text: str = "–"
    measure: str = ""
    interval: str = ""
    n: int | None = None
    split: str = ""
    paper: str = ""
    source: str = ""


@dataclass(frozen=True)
class ResultColumn:
    """One metric over all runs, a cell per run; `arrow` points to the better direction."""

    title: str
    unit: str
    arrow: str
    cells: tuple[ResultCell, ...]

    @property
    def same_n(self) -> int | None:
        """Number of samples behind every number of the column, if equal."""
        found = {cell.n for cell in self.cells if cell.text != "–"}
        return found.pop() if len(found) == 1 else None

    @property
    def same_split(self) -> str:
        """Split of every number of the column, if equal."""
        found = {cell.split for cell in self.cells if cell.text != "–"}
        return found.pop() if len(found) == 1 else ""


def result_columns(results: Sequence[Mapping[str, Any]]) -> list[ResultColumn]:
    """Return the columns of a table whose rows are runs.

    First the task metric of each run, which is its first metric that is not about attention; then
    pointing, mass inside, rank correlation, seconds, and the rest. If tasks differ, the first
    column is called "Task score" and each cell names its metric. No value is marked
    as best: a larger number is no tested difference. Metrics shown in a chart of `group_results`,
    such as `jaccard_8x8` in that of `jaccard`, are left out, unless a paper states them. Results of
    an older definition of a metric get their own labelled column.
    """
    ours = [_metrics(one, "ours") for one in results]
    paper = [_metrics(one, "paper") for one in results]
    versions = [_versioned_names(ours, number) for number in range(len(results))]
    ours, paper = (
        [_rename_metrics(one, called) for one, called in zip(some, versions, strict=True)]
        for some in (ours, paper)
    )
    tasks = [_task(mine, theirs) for mine, theirs in zip(ours, paper, strict=True)]
    names = list(dict.fromkeys(name for one in (*ours, *paper) for name in one))
    drawn = {
        called.get(f"{measure}_{group}", f"{measure}_{group}")
        for one, called in zip(results, versions, strict=True)
        for measure, by_group in _nested_tables(one.get("groups"))
        for group, _ in _nested_tables(by_group)
    } - {name for one in paper for name in one}
    rest = [name for name in names if name not in {*tasks, *drawn} and not _is_seconds(name)]
    lists = [tasks] if any(tasks) else []
    lists += [
        [name] * len(results)
        for name in sorted(rest, key=_metric_order)
        if _metric_order(name) < len(_FIRST)
    ]
    made = [_column(wanted, ours, paper) for wanted in lists]
    if any(isinstance(one.get("seconds"), int | float) for one in results):
        made.append(_seconds(results))
    others = [[name] * len(results) for name in rest if _metric_order(name) == len(_FIRST)]
    others += [
        [name] * len(results)
        for name in dict.fromkeys(tasks)
        if name and any(name in one and name != task for one, task in zip(ours, tasks, strict=True))
    ]
    return made + [_column(wanted, ours, paper) for wanted in others]


@dataclass(frozen=True)
class GroupBar:
    """One run's number within a group; `reach` is its length from 0 to 1."""

    run: int
    text: str
    reach: float
    n: int | None


@dataclass(frozen=True)
class GroupResult:
    """One group of samples, such as a question family; `chance` is the chance level."""

    name: str
    n: int | None
    chance: float | None
    chance_text: str
    bars: tuple[GroupBar, ...]


def group_results(results: Sequence[Mapping[str, Any]]) -> dict[str, list[GroupResult]]:
    """Return the groups of each metric that runs report by group, with a bar per run.

    Results of an older definition of a metric get their own chart.
    """
    found: dict[str, dict[str, dict[int, Mapping[str, Any]]]] = {}
    ours = [_metrics(one, "ours") for one in results]
    for run, one in enumerate(results):
        called = _versioned_names(ours, run)
        for name, by_group in _nested_tables(one.get("groups")):
            measure = called.get(name, name)
            for group, entry in _nested_tables(by_group):
                if finite_number(entry.get("value")) is not None:
                    found.setdefault(measure, {}).setdefault(group, {})[run] = entry
    charts = {}
    for measure, by_name in found.items():
        entries = [entry for by_run in by_name.values() for entry in by_run.values()]
        top = max(1.0, *(finite_number(entry["value"]) or 0.0 for entry in entries))
        top = 100.0 if 1.5 < top <= 100 else top
        charts[metric_title(measure)] = [
            _group(name, by_run, top) for name, by_run in by_name.items()
        ]
    return charts


def format_number(value: Number, decimals: int = 3) -> str:
    """Format a number with thousands separators and a minus sign.

    >>> format_number(0.6414), format_number(1234567.0, 0), format_number(-0.5, 2)
    ('0.641', '1,234,567', '−0.50')
    """
    return f"{value:,.{decimals}f}".replace("-", "−")


def format_interval(low: Number, high: Number, decimals: int = 3) -> str:
    """Format the ends of an interval; NaN ends are "no interval".

    >>> format_interval(0.25, 0.5), format_interval(float("nan"), float("nan"))
    ('0.250 to 0.500', 'no interval')
    """
    if math.isnan(low) or math.isnan(high):
        return "no interval"
    return f"{format_number(low, decimals)} to {format_number(high, decimals)}"


def format_p_value(p: Number) -> str:
    """Format a p-value with four digits; a smaller one is not shown as 0.

    >>> format_p_value(0.03125), format_p_value(1e-9), format_p_value(float("nan"))
    ('0.0312', '< 0.0001', '–')
    """
    if math.isnan(p):
        return "–"
    return "< 0.0001" if p < 1e-4 else f"{p:.4f}"


def format_large(value: Number) -> str:
    """Format a large number with three digits and a word.

    >>> format_large(2_345_678), format_large(812), format_large(3.1e12)
    ('2.35 million', '812', '3.1 trillion')
    """
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if abs(value) >= size:
            return f"{value / size:.3g} {word}"
    return f"{value:,.0f}"


def format_duration(seconds: Number) -> str:
    """Format a duration.

    >>> format_duration(3.21), format_duration(75), format_duration(7500)
    ('3.2 s', '1 min 15 s', '2 h 05 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{int(seconds) // 60} min {int(seconds) % 60:02d} s"
    return f"{int(seconds) // 3600} h {int(seconds) % 3600 // 60:02d} min"


def format_bytes(count: Number) -> str:
    """Format a number of bytes.

    >>> format_bytes(512), format_bytes(3 * 2**30)
    ('512 B', '3.0 GiB')
    """
    for unit, step in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= step:
            return f"{count / step:.1f} {unit}"
    return f"{count:.0f} B"


def metric_title(name: str) -> str:
    """Return a metric's name as a heading: `mass_inside` -> `Mass inside`."""
    plain = name.replace("_", " ").strip()
    return plain[:1].upper() + plain[1:]


def join_words(words: Sequence[str]) -> str:
    """Return words as a list: "a", "a and b", "a, b and c"."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _versioned_names(
    ours: Sequence[Mapping[str, Mapping[str, Any]]], number: int
) -> dict[str, str]:
    """Return the names of one run's metrics, with a version if other runs have a newer one."""
    found = {}
    for name, entry in ours[number].items():
        found[name] = label_with_version(name, version_of(entry), newest_version(name, ours))
    return found


def _rename_metrics(one: Mapping[str, Any], called: Mapping[str, str]) -> dict[str, Any]:
    return {called.get(name, name): entry for name, entry in one.items()}


def _column(
    names: Sequence[str],
    ours: Sequence[Mapping[str, Mapping[str, Any]]],
    paper: Sequence[Mapping[str, Mapping[str, Any]]],
) -> ResultColumn:
    """Build one column: the named metric of each run, with the paper's number."""
    entries = [one.get(name, {}) for one, name in zip(ours, names, strict=True)]
    stated = [one.get(name, {}) for one, name in zip(paper, names, strict=True)]
    different = len({name for name in names if name}) > 1
    values = [finite_number(entry.get("value")) for entry in entries]
    theirs = [finite_number(entry.get("value")) for entry in stated]
    digits = decimal_places(value for value in (*values, *theirs) if value is not None)
    both = [{**state, **entry} for entry, state in zip(entries, stated, strict=True)]
    units = {str(entry.get("unit") or "") for entry in both if entry}
    arrows = {_arrow(entry) for entry in both if entry}
    arrow = arrows.pop() if len(arrows) == 1 else ""
    cells = [
        ResultCell(
            text="–" if value is None else format_number(value, digits),
            measure=metric_title(name) if different and entry else "",
            interval=_interval(entry, digits),
            n=entry.get("n") if isinstance(entry.get("n"), int) else None,
            split=str(entry.get("split") or ""),
            paper="" if figure is None else format_number(figure, digits),
            source=str(state.get("source") or ""),
        )
        for name, entry, state, value, figure in zip(
            names, entries, stated, values, theirs, strict=True
        )
    ]
    title = "Task score" if different else metric_title(next(name for name in names if name))
    return ResultColumn(title, units.pop() if len(units) == 1 else "", arrow, tuple(cells))


def _arrow(entry: Mapping[str, Any]) -> str:
    """Return the better direction, from `direction` or `higher_is_better`."""
    better = entry.get("higher_is_better")
    if isinstance(better, bool):
        return "↑" if better else "↓"
    return _ARROWS.get(str(entry.get("direction")), "")


def _seconds(results: Sequence[Mapping[str, Any]]) -> ResultColumn:
    measures = [
        {"seconds": {"value": one.get("seconds"), "direction": "lower"}}
        if finite_number(one.get("seconds")) is not None
        else {}
        for one in results
    ]
    return _column(["seconds"] * len(results), measures, [{}] * len(results))


def _group(name: str, by_run: Mapping[int, Mapping[str, Any]], top: float) -> GroupResult:
    chances = {finite_number(entry.get("chance")) for entry in by_run.values()} - {None}
    counts = {entry.get("n") for entry in by_run.values() if isinstance(entry.get("n"), int)}
    chance = chances.pop() if len(chances) == 1 else None
    digits = decimal_places([top])
    bars = []
    for run, entry in by_run.items():
        value = finite_number(entry["value"]) or 0.0
        n = entry.get("n")
        bars.append(
            GroupBar(
                run,
                format_number(value, digits),
                min(1.0, max(0.0, value / top)),
                n if isinstance(n, int) else None,
            )
        )
    return GroupResult(
        name=name,
        n=counts.pop() if len(counts) == 1 else None,
        chance=None if chance is None else min(1.0, max(0.0, chance / top)),
        chance_text="" if chance is None else format_number(chance, digits),
        bars=tuple(bars),
    )


def decimal_places(values: Iterable[Number]) -> int:
    """Return the decimals of a column: three for fractions, one for percentages, none for counts.

    >>> decimal_places([0.641, 0.5]), decimal_places([64.1]), decimal_places([12345.6])
    (3, 1, 0)
    """
    top = max((abs(value) for value in values if not math.isnan(value)), default=0.0)
    return 3 if top < 10 else 1 if top < 1000 else 0


def _interval(entry: Mapping[str, Any], digits: int) -> str:
    low, high = finite_number(entry.get("low")), finite_number(entry.get("high"))
    if low is None or high is None:
        return ""
    return format_interval(low, high, digits)


def task_metric(results: Mapping[str, Any]) -> str:
    """Return a run's task metric: the first that is not about attention, or an empty string."""
    return _task(_metrics(results, "ours"), _metrics(results, "paper"))


def _task(ours: Mapping[str, Any], paper: Mapping[str, Any]) -> str:
    plain = [
        name
        for name in (*ours, *paper)
        if _metric_order(name) == len(_FIRST) and not _is_seconds(name)
    ]
    return plain[0] if plain else ""


def _metric_order(name: str) -> int:
    """Return the rank of an attention metric in the table; other metrics come last."""
    words = set(name.lower().replace("_", " ").replace("-", " ").split())
    places = [place for place, known in enumerate(_FIRST) if words & set(known)]
    return places[0] if places else len(_FIRST)


def _is_seconds(name: str) -> bool:
    return name.lower() == "seconds"


def _metrics(results: Mapping[str, Any], key: str) -> dict[str, Mapping[str, Any]]:
    return dict(_nested_tables(results.get(key)))


def _nested_tables(value: Any) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the entries that are mappings, and skip everything else."""
    if not isinstance(value, Mapping):
        return []
    return [(str(key), entry) for key, entry in value.items() if isinstance(entry, Mapping)]


def finite_number(value: Any) -> float | None:
    """Return a value as a float, or None if it is not a finite number."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if good else None
