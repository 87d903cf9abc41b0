"""What a table is, and how it reads when it is filled: ours beside the paper's."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overt import files
from overt.recipes import settings
from overt.recipes.recipe import Figure, Recipe

FACTS = {"seconds": "seconds", "parameters": "numbers", "peak_memory": "bytes"}


@dataclass(frozen=True)
class Row:
    """One row: a recipe and what is changed in it, as `--set` would.

    `home` is the table that the row belongs to, where it is another: its runs are used as they are,
    and show other columns here.
    """

    label: str
    recipe: Callable[[], Recipe]
    changes: tuple[str, ...] = ()
    home: str = ""


@dataclass(frozen=True)
class Table:
    """Rows that are compared by the same measures, `columns`: names in the results' `ours`.

    Its files are called `stem`: tables that share a folder have names of their own.
    """

    name: str
    about: str
    rows: tuple[Row, ...]
    columns: tuple[str, ...]
    stem: str = "table"


@dataclass(frozen=True)
class Entry:
    """One run of a table: its results, or the sentence that says why there are none.

    `source` is "run", "reused", "committed" or "failed".
    """

    row: str
    seed: int
    place: Path
    source: str
    results: Mapping[str, Any] | None = None
    error: str = ""


@dataclass(frozen=True)
class Cell:
    """One measure of one row: mean and sample deviation over its seeds, and the paper's figure."""

    mean: float | None
    deviation: float | None
    seeds: int
    unit: str
    higher_is_better: bool | None
    paper: Figure | None


@dataclass(frozen=True)
class Filled:
    """A table with what is known of it."""

    table: Table
    recipes: Mapping[str, Recipe]
    entries: tuple[Entry, ...]

    @property
    def failures(self) -> tuple[Entry, ...]:
        """The runs without results."""
        return tuple(entry for entry in self.entries if entry.results is None)

    def of_row(self, label: str) -> list[Entry]:
        """The runs of one row."""
        return [entry for entry in self.entries if entry.row == label]

    def cell(self, label: str, column: str) -> Cell:
        """Mean, deviation and the paper's figure of one measure of one row."""
        found = [_measure(entry, column) for entry in self.of_row(label)]
        ours = [one for one in found if one is not None]
        values = [float(one["value"]) for one in ours]
        paper = self.recipes[label].paper.get(column)
        return Cell(
            mean=statistics.fmean(values) if values else None,
            deviation=statistics.stdev(values) if len(values) > 1 else None,
            seeds=len(values),
            unit=str(ours[0].get("unit", "")) if ours else paper.unit if paper else "",
            higher_is_better=_direction(ours[0] if ours else {}, paper),
            paper=paper,
        )


def write(filled: Filled, out: Path) -> None:
    """Write `table.json` for programs and `table.md` for people, or as the table is called."""
    files.write_json(out / f"{filled.table.stem}.json", as_json(filled))
    header, lines = as_text(filled)
    text = [f"# {filled.table.name}", "", filled.table.about, ""]
    text += [f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *lines)]
    for entry in filled.failures:
        text += ["", f"{entry.row}, seed {entry.seed} failed: {entry.error}"]
    files.write_text(out / f"{filled.table.stem}.md", "\n".join(text) + "\n")


def as_json(filled: Filled) -> dict[str, Any]:
    """The table as JSON values: each row with its cells and its runs."""
    rows = []
    for label, recipe in filled.recipes.items():
        cells = {column: filled.cell(label, column) for column in filled.table.columns}
        rows.append(
            {
                "row": label,
                "recipe": recipe.name,
                "settings": settings.to_json(recipe),
                "ours": {name: _cell_json(cell) for name, cell in cells.items()},
                "runs": [
                    {
                        "seed": entry.seed,
                        "folder": str(entry.place),
                        "source": entry.source,
                        **({"error": entry.error} if entry.error else {}),
                    }
                    for entry in filled.of_row(label)
                ],
            }
        )
    return {"schema": 1, "table": filled.table.name, "about": filled.table.about, "rows": rows}


def as_text(filled: Filled) -> tuple[list[str], list[list[str]]]:
    """The header and the lines: each measure with its direction, ours, and the paper's if any."""
    labels = list(filled.recipes)
    cells = {(row, col): filled.cell(row, col) for row in labels for col in filled.table.columns}
    stated = {col for (_, col), cell in cells.items() if cell.paper is not None}
    header = ["row"]
    for column in filled.table.columns:
        header.append(_title(column, [cells[label, column] for label in labels]))
        header += ["paper"] if column in stated else []
    lines = []
    for label in labels:
        line = [label]
        for column in filled.table.columns:
            cell = cells[label, column]
            line.append(_ours(cell))
            if column in stated:
                line.append(_number(cell.paper.value) if cell.paper else "")
        lines.append([*line, *_provenance(filled.of_row(label))])
    return [*header, "seeds", "from"], lines


# Numbers and words


def _measure(entry: Entry, column: str) -> Mapping[str, Any] | None:
    """What a run says of one measure, if it gives a number; else of a fact, as `seconds` is."""
    ours = entry.results.get("ours") if entry.results else None
    found = ours.get(column) if isinstance(ours, dict) else None
    if found is None and entry.results is not None:
        found = _fact(entry.results, column)
    value = found.get("value") if isinstance(found, dict) else None
    return found if isinstance(value, int | float) and not isinstance(value, bool) else None


def _fact(results: Mapping[str, Any], column: str) -> Mapping[str, Any] | None:
    """What a run says of its own cost: a number of `clock`, or one of `FACTS`."""
    clock = results.get("clock")
    if isinstance(clock, dict) and column in clock:
        return {"value": clock[column], "unit": "seconds", "direction": "lower"}
    if column in FACTS:
        return {"value": results.get(column), "unit": FACTS[column], "direction": "lower"}
    return None


def _direction(ours: Mapping[str, Any], paper: Figure | None) -> bool | None:
    stated = ours.get("higher_is_better")
    if isinstance(stated, bool):
        return stated
    if ours.get("direction") in ("higher", "lower"):
        return bool(ours["direction"] == "higher")
    return paper.higher_is_better if paper else None


def _cell_json(cell: Cell) -> dict[str, Any]:
    stated = cell.paper
    return {
        "mean": cell.mean,
        "deviation": cell.deviation,
        "seeds": cell.seeds,
        "unit": cell.unit,
        "higher_is_better": cell.higher_is_better,
        "paper": stated.value if stated else None,
        "source": stated.source if stated else None,
    }


def _title(column: str, cells: Sequence[Cell]) -> str:
    ways = {cell.higher_is_better for cell in cells} - {None}
    arrow = "" if len(ways) != 1 else " ↑" if True in ways else " ↓"
    units = {cell.unit for cell in cells if cell.unit}
    return f"{column}{arrow}" + (f" ({units.pop()})" if len(units) == 1 else "")


def _ours(cell: Cell) -> str:
    if cell.mean is None:
        return "–"
    if cell.deviation is None:
        return _number(cell.mean)
    return f"{_number(cell.mean)} ± {cell.deviation:.{_decimals(cell.mean)}f}"


def _number(value: float | int) -> str:
    return f"{value:.{_decimals(value)}f}"


def _decimals(value: float | int) -> int:
    return 2 if abs(value) >= 10 else 3


def _provenance(entries: Sequence[Entry]) -> Iterator[str]:
    """How many seeds there are, and where they come from: `2 run, 1 committed`."""
    yield str(sum(entry.results is not None for entry in entries))
    counts = {
        source: sum(entry.source == source for entry in entries)
        for source in ("run", "reused", "committed", "failed")
    }
    yield ", ".join(f"{count} {source}" for source, count in counts.items() if count)
