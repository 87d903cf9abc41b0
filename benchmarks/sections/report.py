"""Results of a section: rows with goals, growth curves, and other values."""

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

from .clock import Spread, Times, describe_error, free_memory, reset_cuda_rng

PEERS = (
    "captum grad-cam numba numpy POT pycocoevalcap quantus scipy torch torchmetrics transformers"
).split()
CAPABLE = "a GPU"


class Sense(Enum):
    """Whether a goal is an upper or a lower bound."""

    AT_MOST = "at most"
    AT_LEAST = "at least"


@dataclass(frozen=True)
class Goal:
    """A bound of `make speed`, and the kind of device it applies to."""

    sense: Sense
    number: float
    device: str | None = None  # None: any device

    def text(self) -> str:
        """Format the goal."""
        sign = "<=" if self.sense is Sense.AT_MOST else ">="
        return f"{sign} {self.number:g}"


def at_most(number: float, device: str | None = None) -> Goal:
    """Return an upper bound."""
    return Goal(Sense.AT_MOST, number, device)


def at_least(number: float, device: str | None = None) -> Goal:
    """Return a lower bound."""
    return Goal(Sense.AT_LEAST, number, device)


@dataclass(frozen=True)
class Row:
    """One comparison: its label, both times, the reported number and its goal.

    If it could not be measured, `value` is None and `note` is the reason.
    """

    label: str
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
        """Whether the median reaches the goal; None without a goal or a value."""
        if self.goal is None or self.value is None:
            return None
        if self.goal.sense is Sense.AT_MOST:
            return self.value.median <= self.goal.number
        return self.value.median >= self.goal.number

    @property
    def verdict(self) -> str:
        """Text of the last column."""
        if self.value is None:
            return self.note or "not measured"
        if self.reached is None:
            return self.note
        return "reached" if self.reached else "NOT reached"


@dataclass(frozen=True)
class Curve:
    """Growth of a cost: one line per variant, over the same sizes."""

    title: str
    size: str
    cost: str
    sizes: list[float]
    lines: dict[str, list[float]]
    logarithmic: bool = True


@dataclass
class Report:
    """Results of one section; `save` is called after each part."""

    rows: list[Row] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    save: Callable[[], None] = field(default=lambda: None, repr=False, compare=False)

    def add(self, *rows: Row) -> None:
        """Add rows."""
        self.rows.extend(rows)

    def part(self, label: str, measure: Callable[[], None]) -> None:
        """Run a part of a section; if it fails, add a row with the error and continue."""
        try:
            measure()
        except Exception as error:
            traceback.print_exc()
            self.failed[label] = describe_error(error)
            self.add(missing_row(label, describe_error(error)))
            reset_cuda_rng()
        free_memory()
        self.save()


@dataclass(frozen=True)
class Setting:
    """Options of a benchmark run."""

    device: str = "cpu"
    rounds: int = 9
    quick: bool = False

    @property
    def gpu(self) -> bool:
        """Whether a GPU is measured."""
        return self.device != "cpu"

    def size(self, usual: int, quick: int) -> int:
        """Return a size, the smaller one for a quick run."""
        return quick if self.quick else usual


Section = Callable[[Setting, Report], None]


def speedup_row(
    label: str, times: Times, ours: str, theirs: str, goal: Goal | None = None, note: str = ""
) -> Row:
    """Report how many times as fast ours is."""
    ratio = times.ratio(theirs, ours)
    return Row(
        label,
        ours,
        theirs,
        "times as fast",
        ratio,
        goal,
        times.spread(ours),
        times.spread(theirs),
        note,
    )


def relative_time_row(
    label: str, times: Times, ours: str, theirs: str, goal: Goal | None = None, note: str = ""
) -> Row:
    """Report how many times as long ours takes."""
    ratio = times.ratio(ours, theirs)
    return Row(
        label,
        ours,
        theirs,
        "times as long",
        ratio,
        goal,
        times.spread(ours),
        times.spread(theirs),
        note,
    )


def value_row(label: str, unit: str, number: float, goal: Goal | None, note: str = "") -> Row:
    """Report a number without times: an error, a count, an amount of memory."""
    return Row(label, "", "", unit, Spread.constant(number), goal, note=note)


def gpu_row(label: str, goal: Goal | None, why: str = CAPABLE) -> Row:
    """Report that this machine cannot measure a row."""
    return Row(label, "", "", "", None, goal, note=f"needs {why}")


def missing_row(label: str, why: str, goal: Goal | None = None) -> Row:
    """Report that an alternative is not installed or not applicable."""
    return Row(label, "", "", "", None, goal, note=why)


# --- text and JSON


def to_dict(report: Report) -> dict[str, Any]:
    """Convert a report to JSON values."""
    rows = []
    for row in report.rows:
        one = asdict(row)
        if row.goal is not None:
            one["goal"] = {**asdict(row.goal), "sense": row.goal.sense.value}
        rows.append({**one, "reached": row.reached, "verdict": row.verdict})
    curves = [asdict(curve) for curve in report.curves]
    found = {"rows": rows, "curves": curves, "facts": report.facts}
    return {**found, "failed": report.failed} if report.failed else found


def format_seconds(spread: Spread | None) -> str:
    """Format a time in a suitable unit."""
    if spread is None:
        return ""
    number = spread.median
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number / 1e-6:.2g} us"


def format_value(value: Spread | None) -> str:
    """Format the reported number, with its quartiles if it has any."""
    if value is None:
        return ""
    text = f"{value.median:.3g}"
    return text if value.low == value.high else f"{text} ({value.low:.3g}-{value.high:.3g})"


HEADINGS = ("benchmark", "ours", "theirs", "number (quartiles)", "unit", "goal", "")


def row_cells(row: Row) -> tuple[str, ...]:
    """Return the cells of a row."""
    sides = [
        " ".join(filter(None, (name, format_seconds(elapsed))))
        for name, elapsed in ((row.ours, row.ours_s), (row.theirs, row.theirs_s))
    ]
    goal = "" if row.goal is None else row.goal.text()
    return (row.label, *sides, format_value(row.value), row.unit, goal, row.verdict)


def format_table(found: dict[str, Report]) -> str:
    """Format all rows as aligned text, one block per section."""
    lines = {name: [row_cells(row) for row in report.rows] for name, report in found.items()}
    all_lines = [HEADINGS, *(line for many in lines.values() for line in many)]
    widths = [max(len(line[at]) for line in all_lines) for at in range(len(HEADINGS))]

    def align(line: Sequence[str]) -> str:
        return "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))

    parts = [align(HEADINGS).rstrip()]
    for name, many in lines.items():
        parts += ["", f"[{name}]", *(align(line).rstrip() for line in many)]
    return "\n".join(parts)


def markdown_table(found: dict[str, dict[str, Any]]) -> str:
    """Format the rows of a results file as a Markdown table."""
    lines = ["| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
    for name, report in found.items():
        lines.append(f"| **{name}** |" + " |" * (len(HEADINGS) - 1))
        lines += ["| " + " | ".join(row_cells(row_from_dict(one))) + " |" for one in report["rows"]]
    return "\n".join(lines)


def row_from_dict(values: dict[str, Any]) -> Row:
    """Convert a row of a results file."""
    spreads = {
        name: None if values[name] is None else Spread(**values[name])
        for name in ("value", "ours_s", "theirs_s")
    }
    goal = values["goal"]
    goal = None if goal is None else Goal(Sense(goal["sense"]), goal["number"], goal["device"])
    words = {name: values[name] for name in ("label", "ours", "theirs", "unit", "note")}
    return Row(**words, **spreads, goal=goal)


def count_goals(rows: Sequence[Row]) -> dict[str, int]:
    """Count the goals reached, missed and not measured."""
    goals = [row for row in rows if row.goal is not None]
    return {
        "reached": sum(row.reached is True for row in goals),
        "missed": sum(row.reached is False for row in goals),
        "not measured": sum(row.reached is None for row in goals),
    }


# --- the machine


def machine(device: str = "cpu") -> dict[str, Any]:
    """Describe the machine."""
    cpu_info = Path("/proc/cpuinfo")
    lines = cpu_info.read_text().splitlines() if cpu_info.exists() else []
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


def commit(name: str | None = None) -> str | None:
    """Return the short name of the measured commit, given or of this checkout."""
    found = name
    if found is None:
        from overt.experiments import runner

        found = runner.git_commit()
    if found is None:
        return None
    short, mark, changes = found.partition("+")
    return f"{short[:7]}{mark}{changes}"


def peers() -> dict[str, str]:
    """Return the versions of the installed alternatives."""
    found = {}
    for name in PEERS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
