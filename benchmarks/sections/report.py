"""What a section finds: rows that stand beside goals, curves of growth, and plain facts."""

import os
import platform
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import Any

import overt

from .clock import Spread, Times, renew, tidy, told

PEERS = "captum numba numpy POT pycocoevalcap quantus scipy torch torchmetrics transformers".split()
CAPABLE = "a GPU"


class Sense(Enum):
    """On which side of a goal a number should lie."""

    AT_MOST = "at most"
    AT_LEAST = "at least"


@dataclass(frozen=True)
class Goal:
    """A number that `make bench` is held to, and the kind of machine it was set for."""

    sense: Sense
    number: float
    device: str | None = None  # None: any

    def told(self) -> str:
        """As it is printed."""
        sign = "<=" if self.sense is Sense.AT_MOST else ">="
        return f"{sign} {self.number:g}"


def at_most(number: float, device: str | None = None) -> Goal:
    """No more than this."""
    return Goal(Sense.AT_MOST, number, device)


def at_least(number: float, device: str | None = None) -> Goal:
    """No less than this."""
    return Goal(Sense.AT_LEAST, number, device)


@dataclass(frozen=True)
class Row:
    """One comparison: what it is of, both times, the number that counts and its goal.

    `value` is None where it could not be measured, and then `note` says why.
    """

    what: str
    ours: str
    theirs: str
    unit: str
    value: Spread | None
    goal: Goal | None = None
    ours_s: Spread | None = None
    theirs_s: Spread | None = None
    note: str = ""

    @property
    def reached(self) -> bool | None:
        """Whether the median is on the right side of the goal; None where there is none."""
        if self.goal is None or self.value is None:
            return None
        if self.goal.sense is Sense.AT_MOST:
            return self.value.median <= self.goal.number
        return self.value.median >= self.goal.number

    @property
    def verdict(self) -> str:
        """What the last column says."""
        if self.value is None:
            return self.note or "not measured"
        if self.reached is None:
            return self.note
        return "reached" if self.reached else "NOT reached"


@dataclass(frozen=True)
class Curve:
    """How a cost grows: one line a way, over the same sizes."""

    title: str
    size: str
    cost: str
    sizes: list[float]
    lines: dict[str, list[float]]
    logarithmic: bool = True


@dataclass
class Report:
    """What one section found; `save` is called whenever there is more of it."""

    rows: list[Row] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    save: Callable[[], None] = field(default=lambda: None, repr=False, compare=False)

    def add(self, *rows: Row) -> None:
        """More rows."""
        self.rows.extend(rows)

    def part(self, what: str, measure: Callable[[], None]) -> None:
        """Some of a section. One that breaks is a row that says why; the others go on."""
        try:
            measure()
        except Exception as error:
            traceback.print_exc()
            self.failed[what] = told(error)
            self.add(absent(what, told(error)))
            renew()
        tidy()
        self.save()


@dataclass(frozen=True)
class Setting:
    """How a section is asked to measure."""

    device: str = "cpu"
    rounds: int = 9
    quick: bool = False

    @property
    def gpu(self) -> bool:
        """Whether the work is done by a card."""
        return self.device != "cpu"

    def some(self, usual: int, quick: int) -> int:
        """A size, smaller when only a trial is wanted."""
        return quick if self.quick else usual


Section = Callable[[Setting, Report], None]


def faster(
    what: str, times: Times, ours: str, theirs: str, goal: Goal | None = None, note: str = ""
) -> Row:
    """How many times as fast ours is as theirs."""
    ratio = times.over(theirs, ours)
    return Row(
        what, ours, theirs, "times as fast", ratio, goal, times.of(ours), times.of(theirs), note
    )


def dearer(
    what: str, times: Times, ours: str, theirs: str, goal: Goal | None = None, note: str = ""
) -> Row:
    """How many times as long ours takes as what it is added to."""
    ratio = times.over(ours, theirs)
    return Row(
        what, ours, theirs, "times as long", ratio, goal, times.of(ours), times.of(theirs), note
    )


def exact(what: str, unit: str, number: float, goal: Goal | None, note: str = "") -> Row:
    """A number without times: an error, a count, an amount of memory."""
    return Row(what, "", "", unit, Spread.exact(number), goal, note=note)


def needs(what: str, goal: Goal | None, why: str = CAPABLE) -> Row:
    """A row that this machine cannot measure."""
    return Row(what, "", "", "", None, goal, note=f"needs {why}")


def absent(what: str, why: str, goal: Goal | None = None) -> Row:
    """A row whose peer is not installed or cannot do it."""
    return Row(what, "", "", "", None, goal, note=why)


# --- as text and as JSON


def plain(report: Report) -> dict[str, Any]:
    """A report as JSON has it."""
    rows = []
    for row in report.rows:
        one = asdict(row)
        if row.goal is not None:
            one["goal"] = {**asdict(row.goal), "sense": row.goal.sense.value}
        rows.append({**one, "reached": row.reached, "verdict": row.verdict})
    curves = [asdict(curve) for curve in report.curves]
    found = {"rows": rows, "curves": curves, "facts": report.facts}
    return {**found, "failed": report.failed} if report.failed else found


def seconds(spread: Spread | None) -> str:
    """A time with the unit that suits it."""
    if spread is None:
        return ""
    number = spread.median
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number / 1e-6:.2g} us"


def number(value: Spread | None) -> str:
    """The number that counts, with its quartiles where it has any."""
    if value is None:
        return ""
    told = f"{value.median:.3g}"
    return told if value.low == value.high else f"{told} ({value.low:.3g}-{value.high:.3g})"


HEADINGS = ("what", "ours", "theirs", "number (quartiles)", "unit", "goal", "")


def cells(row: Row) -> tuple[str, ...]:
    """One line of the table."""
    sides = [
        " ".join(filter(None, (name, seconds(taken))))
        for name, taken in ((row.ours, row.ours_s), (row.theirs, row.theirs_s))
    ]
    goal = "" if row.goal is None else row.goal.told()
    return (row.what, *sides, number(row.value), row.unit, goal, row.verdict)


def table(found: dict[str, Report]) -> str:
    """All rows, aligned, a line before each section."""
    lines = {name: [cells(row) for row in report.rows] for name, report in found.items()}
    every = [HEADINGS, *(line for many in lines.values() for line in many)]
    widths = [max(len(line[at]) for line in every) for at in range(len(HEADINGS))]

    def laid(line: Sequence[str]) -> str:
        return "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))

    parts = [laid(HEADINGS).rstrip()]
    for name, many in lines.items():
        parts += ["", f"[{name}]", *(laid(line).rstrip() for line in many)]
    return "\n".join(parts)


def markdown(found: dict[str, dict[str, Any]]) -> str:
    """The same table for a page, out of a file of results."""
    lines = ["| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
    for name, report in found.items():
        lines.append(f"| **{name}** |" + " |" * (len(HEADINGS) - 1))
        lines += ["| " + " | ".join(cells(row_of(one))) + " |" for one in report["rows"]]
    return "\n".join(lines)


def row_of(kept: dict[str, Any]) -> Row:
    """A row out of a file of results."""
    spreads = {
        name: None if kept[name] is None else Spread(**kept[name])
        for name in ("value", "ours_s", "theirs_s")
    }
    goal = kept["goal"]
    goal = None if goal is None else Goal(Sense(goal["sense"]), goal["number"], goal["device"])
    words = {name: kept[name] for name in ("what", "ours", "theirs", "unit", "note")}
    return Row(**words, **spreads, goal=goal)


def tally(rows: Sequence[Row]) -> dict[str, int]:
    """How many goals were reached, missed, and not measured."""
    goals = [row for row in rows if row.goal is not None]
    return {
        "reached": sum(row.reached is True for row in goals),
        "missed": sum(row.reached is False for row in goals),
        "not measured": sum(row.reached is None for row in goals),
    }


# --- the machine


def machine(device: str = "cpu") -> dict[str, Any]:
    """What the numbers were measured on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    found: dict[str, Any] = {
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "overt": overt.__version__,
    }
    if device != "cpu":
        import torch

        found["gpu"] = torch.cuda.get_device_name()
        found["cuda"] = torch.version.cuda
    return found


def commit(given: str | None = None) -> str | None:
    """The commit that is measured, in short: of this checkout, or as it was told of a copy."""
    found = given
    if found is None:
        from overt.recipes import running

        found = running.commit()
    if found is None:
        return None
    name, mark, changes = found.partition("+")
    return f"{name[:7]}{mark}{changes}"


def peers() -> dict[str, str]:
    """The versions of what stands beside ours; what is not installed is left out."""
    found = {}
    for name in PEERS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
