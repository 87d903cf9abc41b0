"""Results of several runs as one table: what was measured, ours beside the paper's.

Plain values with no word of HTML, so that a terminal can print the same table.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# measures of attention that come first, in this order
_FIRST = (("pointing",), ("mass",), ("rank", "spearman"))
Number = int | float
_ARROWS = {"higher": "↑", "lower": "↓"}


@dataclass(frozen=True)
class Cell:
    """One number of one run, ready to print; `text` is a dash where there is none."""

    text: str = "–"
    measure: str = ""
    interval: str = ""
    n: int | None = None
    split: str = ""
    paper: str = ""
    source: str = ""
    best: bool = False


@dataclass(frozen=True)
class Column:
    """One measure over all runs, a cell each in their order; `arrow` points to where better is."""

    title: str
    unit: str
    arrow: str
    cells: tuple[Cell, ...]

    @property
    def same_n(self) -> int | None:
        """How many samples are behind every number of the column, if that is one number."""
        found = {cell.n for cell in self.cells if cell.text != "–"}
        return found.pop() if len(found) == 1 else None

    @property
    def same_split(self) -> str:
        """The split every number of the column was measured on, if that is one."""
        found = {cell.split for cell in self.cells if cell.text != "–"}
        return found.pop() if len(found) == 1 else ""


def columns(results: Sequence[Mapping[str, Any]]) -> list[Column]:
    """The columns of a table whose rows are runs.

    First the task score of each run, which is the first of its measures that is not one of
    attention; then pointing, mass inside, rank correlation, seconds, and the rest. Where runs have
    different tasks the first column is called "task score" and each cell names its measure. The
    best of a column is marked where at least two runs measured the same thing on the same split.
    What a chart of `groups` shows, such as `jaccard_8x8` in that of `jaccard`, is no column, unless
    a paper states it.
    """
    ours = [_measures(one, "ours") for one in results]
    paper = [_measures(one, "paper") for one in results]
    tasks = [_task(mine, theirs) for mine, theirs in zip(ours, paper, strict=True)]
    names = list(dict.fromkeys(name for one in (*ours, *paper) for name in one))
    drawn = {
        f"{measure}_{group}"
        for one in results
        for measure, by_group in _tables(one.get("groups"))
        for group, _ in _tables(by_group)
    } - {name for one in paper for name in one}
    rest = [name for name in names if name not in {*tasks, *drawn} and not _is_seconds(name)]
    lists = [tasks] if any(tasks) else []
    lists += [
        [name] * len(results) for name in sorted(rest, key=_place) if _place(name) < len(_FIRST)
    ]
    made = [_column(wanted, ours, paper) for wanted in lists]
    if any(isinstance(one.get("seconds"), int | float) for one in results):
        made.append(_seconds(results))
    others = [[name] * len(results) for name in rest if _place(name) == len(_FIRST)]
    others += [
        [name] * len(results)
        for name in dict.fromkeys(tasks)
        if name and any(name in one and name != task for one, task in zip(ours, tasks, strict=True))
    ]
    return made + [_column(wanted, ours, paper) for wanted in others]


@dataclass(frozen=True)
class Bar:
    """One run's number within a group, and how far along its axis it reaches, from 0 to 1."""

    run: int
    text: str
    reach: float
    n: int | None


@dataclass(frozen=True)
class Group:
    """One group of samples, such as a question family. `chance` is where guessing would stand."""

    name: str
    n: int | None
    chance: float | None
    chance_text: str
    bars: tuple[Bar, ...]


def groups(results: Sequence[Mapping[str, Any]]) -> dict[str, list[Group]]:
    """For each measure that runs report by group: the groups, a bar for each run that has it."""
    found: dict[str, dict[str, dict[int, Mapping[str, Any]]]] = {}
    for run, one in enumerate(results):
        for measure, by_group in _tables(one.get("groups")):
            for group, entry in _tables(by_group):
                if _number(entry.get("value")) is not None:
                    found.setdefault(measure, {}).setdefault(group, {})[run] = entry
    charts = {}
    for measure, by_name in found.items():
        entries = [entry for by_run in by_name.values() for entry in by_run.values()]
        top = max(1.0, *(_number(entry["value"]) or 0.0 for entry in entries))
        top = 100.0 if 1.5 < top <= 100 else top
        charts[titled(measure)] = [_group(name, by_run, top) for name, by_run in by_name.items()]
    return charts


def number(value: Number, decimals: int = 3) -> str:
    """A number as people write it.

    >>> number(0.6414), number(1234567.0, 0), number(-0.5, 2)
    ('0.641', '1,234,567', '−0.50')
    """
    return f"{value:,.{decimals}f}".replace("-", "−")


def large(value: Number) -> str:
    """A large number in three digits and a word.

    >>> large(2_345_678), large(812), large(3.1e12)
    ('2.35 million', '812', '3.1 trillion')
    """
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if abs(value) >= size:
            return f"{value / size:.3g} {word}"
    return f"{value:,.0f}"


def duration(seconds: Number) -> str:
    """A time as people say it.

    >>> duration(3.21), duration(75), duration(7500)
    ('3.2 s', '1 min 15 s', '2 h 05 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{int(seconds) // 60} min {int(seconds) % 60:02d} s"
    return f"{int(seconds) // 3600} h {int(seconds) % 3600 // 60:02d} min"


def size(count: Number) -> str:
    """A number of bytes as people say it.

    >>> size(512), size(3 * 2**30)
    ('512 B', '3.0 GiB')
    """
    for unit, step in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= step:
            return f"{count / step:.1f} {unit}"
    return f"{count:.0f} B"


def titled(name: str) -> str:
    """A measure's name as a heading: `mass_inside` -> `Mass inside`."""
    plain = name.replace("_", " ").strip()
    return plain[:1].upper() + plain[1:]


def _column(
    names: Sequence[str],
    ours: Sequence[Mapping[str, Mapping[str, Any]]],
    paper: Sequence[Mapping[str, Mapping[str, Any]]],
) -> Column:
    """One column: for each run the measure named, with the paper's figure where there is one."""
    entries = [one.get(name, {}) for one, name in zip(ours, names, strict=True)]
    stated = [one.get(name, {}) for one, name in zip(paper, names, strict=True)]
    different = len({name for name in names if name}) > 1
    values = [_number(entry.get("value")) for entry in entries]
    theirs = [_number(entry.get("value")) for entry in stated]
    digits = decimals(value for value in (*values, *theirs) if value is not None)
    both = [{**state, **entry} for entry, state in zip(entries, stated, strict=True)]
    units = {str(entry.get("unit") or "") for entry in both if entry}
    arrows = {_arrow(entry) for entry in both if entry}
    arrow = arrows.pop() if len(arrows) == 1 else ""
    best = _best(names, entries, values, arrow)
    cells = [
        Cell(
            text="–" if value is None else number(value, digits),
            measure=titled(name) if different and entry else "",
            interval=_interval(entry, digits),
            n=entry.get("n") if isinstance(entry.get("n"), int) else None,
            split=str(entry.get("split") or ""),
            paper="" if figure is None else number(figure, digits),
            source=str(state.get("source") or ""),
            best=marked,
        )
        for name, entry, state, value, figure, marked in zip(
            names, entries, stated, values, theirs, best, strict=True
        )
    ]
    title = "Task score" if different else titled(next(name for name in names if name))
    return Column(title, units.pop() if len(units) == 1 else "", arrow, tuple(cells))


def _arrow(entry: Mapping[str, Any]) -> str:
    """Where better is, from `direction` or from `higher_is_better`, whichever was written."""
    better = entry.get("higher_is_better")
    if isinstance(better, bool):
        return "↑" if better else "↓"
    return _ARROWS.get(str(entry.get("direction")), "")


def _best(
    names: Sequence[str],
    entries: Sequence[Mapping[str, Any]],
    values: Sequence[float | None],
    arrow: str,
) -> list[bool]:
    there = [(value, i) for i, value in enumerate(values) if value is not None]
    alike = {(names[i], entries[i].get("split"), entries[i].get("unit")) for _, i in there}
    if not arrow or len(there) < 2 or len(alike) != 1:
        return [False] * len(values)
    top = max(there)[0] if arrow == "↑" else min(there)[0]
    return [value == top for value in values]


def _seconds(results: Sequence[Mapping[str, Any]]) -> Column:
    measures = [
        {"seconds": {"value": one.get("seconds"), "direction": "lower"}}
        if _number(one.get("seconds")) is not None
        else {}
        for one in results
    ]
    return _column(["seconds"] * len(results), measures, [{}] * len(results))


def _group(name: str, by_run: Mapping[int, Mapping[str, Any]], top: float) -> Group:
    chances = {_number(entry.get("chance")) for entry in by_run.values()} - {None}
    counts = {entry.get("n") for entry in by_run.values() if isinstance(entry.get("n"), int)}
    chance = chances.pop() if len(chances) == 1 else None
    digits = decimals([top])
    bars = []
    for run, entry in by_run.items():
        value = _number(entry["value"]) or 0.0
        n = entry.get("n")
        bars.append(
            Bar(
                run,
                number(value, digits),
                min(1.0, max(0.0, value / top)),
                n if isinstance(n, int) else None,
            )
        )
    return Group(
        name=name,
        n=counts.pop() if len(counts) == 1 else None,
        chance=None if chance is None else min(1.0, max(0.0, chance / top)),
        chance_text="" if chance is None else number(chance, digits),
        bars=tuple(bars),
    )


def decimals(values: Iterable[Number]) -> int:
    """How many decimals a column needs: three for shares, one for percentages, none for counts.

    >>> decimals([0.641, 0.5]), decimals([64.1]), decimals([12345.6])
    (3, 1, 0)
    """
    top = max((abs(value) for value in values), default=0.0)
    return 3 if top < 10 else 1 if top < 1000 else 0


def _interval(entry: Mapping[str, Any], digits: int) -> str:
    low, high = _number(entry.get("low")), _number(entry.get("high"))
    if low is None or high is None:
        return ""
    return f"{number(low, digits)} to {number(high, digits)}"


def task_of(results: Mapping[str, Any]) -> str:
    """The measure that is a run's task: the first that is not one of attention, or nothing."""
    return _task(_measures(results, "ours"), _measures(results, "paper"))


def _task(ours: Mapping[str, Any], paper: Mapping[str, Any]) -> str:
    plain = [
        name for name in (*ours, *paper) if _place(name) == len(_FIRST) and not _is_seconds(name)
    ]
    return plain[0] if plain else ""


def _place(name: str) -> int:
    """Where a measure stands among those that come first; after them all if it is none of them."""
    words = set(name.lower().replace("_", " ").replace("-", " ").split())
    places = [place for place, known in enumerate(_FIRST) if words & set(known)]
    return places[0] if places else len(_FIRST)


def _is_seconds(name: str) -> bool:
    return name.lower() == "seconds"


def _measures(results: Mapping[str, Any], key: str) -> dict[str, Mapping[str, Any]]:
    return dict(_tables(results.get(key)))


def _tables(value: Any) -> list[tuple[str, Mapping[str, Any]]]:
    """The entries of a table that are tables themselves; whatever else is there is passed over."""
    if not isinstance(value, Mapping):
        return []
    return [(str(key), entry) for key, entry in value.items() if isinstance(entry, Mapping)]


def _number(value: Any) -> float | None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if good else None
