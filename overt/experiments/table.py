"""Tables of experiments: their rows, their results, and how they are written."""

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overt import io
from overt.experiments import settings
from overt.experiments.recipe import PublishedValue, Recipe

FOR_A_VERDICT = 5  # seeds; docs/intervals.md
COST_COLUMNS = {"seconds": "seconds", "parameters": "numbers", "peak_memory": "bytes"}


@dataclass(frozen=True)
class RowSpec:
    """One row: a recipe with `changes` to its settings, as for `--set`.

    `home` names another table that the row belongs to: the runs of that table are reused, with the
    columns of this one.

    Args:
        label: The name of the row.
        recipe: Makes the recipe.
        changes: Its changed settings, as `KEY=VALUE`.
        home: The table whose runs are reused.

    Example:
        >>> from overt.papers.catalog import find_recipe
        >>> row = RowSpec("short", lambda: find_recipe("scenes-soft"), ("train.epochs=1",))
        >>> settings.apply(row.recipe(), row.changes).train.epochs
        1
    """

    label: str
    recipe: Callable[[], Recipe]
    changes: tuple[str, ...] = ()
    home: str = ""


def rows_of(
    recipe: Callable[[], Recipe],
    changes: Mapping[str, tuple[str, ...]],
    labels: Iterable[str] | None = None,
    home: str = "",
) -> tuple[RowSpec, ...]:
    """Return rows of one recipe by label: of these labels, or all that `changes` has."""
    chosen = changes if labels is None else labels
    return tuple(RowSpec(label, recipe, changes[label], home) for label in chosen)


@dataclass(frozen=True)
class TableSpec:
    """Rows that are compared by the same metrics, `columns`: names in `ours` of the results.

    `stem` is the name of the files, so that several tables can share a folder.

    Args:
        name: The name of the table.
        about: What it compares.
        rows: Its rows.
        columns: The metrics.
        stem: The name of its files.

    Example:
        >>> from overt.papers.catalog import find_recipe
        >>> row = RowSpec("soft", lambda: find_recipe("scenes-soft"))
        >>> TableSpec("mine", "one row", (row,), ("accuracy",)).stem
        'table'
    """

    name: str
    about: str
    rows: tuple[RowSpec, ...]
    columns: tuple[str, ...]
    stem: str = "table"


@dataclass(frozen=True)
class TableRun:
    """One run of a table: its results, or its error.

    `source` is "run", "reused" (from the table's folder), "committed" (from the folder of results
    to reuse) or "failed".
    """

    row: str
    seed: int
    folder: Path
    source: str
    results: Mapping[str, Any] | None = None
    error: str = ""


@dataclass(frozen=True)
class TableCell:
    """A metric of a row: mean and standard deviation over seeds, and the published value."""

    mean: float | None
    deviation: float | None
    seeds: int
    unit: str
    higher_is_better: bool | None
    paper: PublishedValue | None


@dataclass(frozen=True)
class TableResults:
    """A table with the runs so far."""

    table: TableSpec
    recipes: Mapping[str, Recipe]
    runs: tuple[TableRun, ...]

    @property
    def failures(self) -> tuple[TableRun, ...]:
        """The runs that failed."""
        return tuple(run for run in self.runs if run.results is None)

    def version(self, column: str) -> int:
        """Return the newest version of a metric among the runs; older ones are left out."""
        found = [_metric_of_run(run, column) for run in self.runs]
        return max((_version(one) for one in found if one is not None), default=1)

    def outdated_runs(self, column: str) -> list[TableRun]:
        """Return the runs that have an older version of a metric."""
        last = self.version(column)
        found = [(run, _metric_of_run(run, column)) for run in self.runs]
        return [run for run, one in found if one is not None and _version(one) != last]

    def runs_of_row(self, label: str) -> list[TableRun]:
        """Return the runs of one row."""
        return [run for run in self.runs if run.row == label]

    def cell(self, label: str, column: str) -> TableCell:
        """Return mean, standard deviation and published value of a metric of a row."""
        found = [_metric_of_run(run, column) for run in self.runs_of_row(label)]
        last = self.version(column)
        ours = [one for one in found if one is not None and _version(one) == last]
        values = [float(one["value"]) for one in ours]
        paper = self.recipes[label].paper.get(column)
        return TableCell(
            mean=statistics.fmean(values) if values else None,
            deviation=statistics.stdev(values) if len(values) > 1 else None,
            seeds=len(values),
            unit=str(ours[0].get("unit", "")) if ours else paper.unit if paper else "",
            higher_is_better=_direction(ours[0] if ours else {}, paper),
            paper=paper,
        )


def write_table(results: TableResults, out: Path) -> None:
    """Write `<stem>.json` and `<stem>.md`."""
    io.write_json(out / f"{results.table.stem}.json", as_json(results))
    header, lines = as_text(results)
    text = [f"# {results.table.name}", "", results.table.about, ""]
    text += [f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *lines)]
    for run in results.failures:
        text += ["", f"{run.row}, seed {run.seed} failed: {run.error}"]
    text += [line for note in table_notes(results) for line in ("", note)]
    io.write_text(out / f"{results.table.stem}.md", "\n".join(text) + "\n")


def table_notes(results: TableResults) -> Iterator[str]:
    """Yield notes on runs of an older metric version, and on rows with too few seeds."""
    yield from outdated_notes(results)
    yield from seed_notes(results)


def seed_notes(results: TableResults) -> Iterator[str]:
    """Yield a note on rows with fewer than five seeds, whose differences give no verdict."""
    done = {row: len(results.runs_of_row(row)) for row in results.recipes}
    for run in results.failures:
        done[run.row] -= 1
    few = {row: count for row, count in done.items() if count < FOR_A_VERDICT}
    if few:
        rows = ", ".join(f"{row} ({count})" for row, count in few.items())
        yield (
            f"Fewer than {FOR_A_VERDICT} seeds: {rows}. A difference over three or four seeds is "
            "provisional, and one over fewer gives numbers and no verdict (docs/intervals.md)."
        )


def outdated_notes(results: TableResults) -> Iterator[str]:
    """Yield a note per column on the runs left out because their metric version is older."""
    for column in results.table.columns:
        old = results.outdated_runs(column)
        if old:
            names = ", ".join(f"{run.row} (seed {run.seed})" for run in old)
            yield (
                f"{column} has version {results.version(column)}; runs with an older version "
                f"are left out: {names}. Run them again."
            )


def as_json(results: TableResults) -> dict[str, Any]:
    """Return the table as JSON values: each row with its cells and its runs."""
    rows = []
    for label, recipe in results.recipes.items():
        cells = {column: results.cell(label, column) for column in results.table.columns}
        rows.append(
            {
                "row": label,
                "recipe": recipe.name,
                "settings": settings.to_json(recipe),
                "ours": {name: _cell_to_json(cell) for name, cell in cells.items()},
                "runs": [
                    {
                        "seed": run.seed,
                        "folder": str(run.folder),
                        "source": run.source,
                        **({"error": run.error} if run.error else {}),
                    }
                    for run in results.runs_of_row(label)
                ],
            }
        )
    versions = {column: results.version(column) for column in results.table.columns}
    return {
        "schema": 1,
        "versions": versions,
        "table": results.table.name,
        "about": results.table.about,
        "rows": rows,
    }


def as_text(results: TableResults) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows: each metric with its direction and published value."""
    from overt.metrics.versions import (  # not needed to list tables
        label_with_version,
        newest_version,
    )

    labels = list(results.recipes)
    cells = {(row, col): results.cell(row, col) for row in labels for col in results.table.columns}
    # Only columns for which some row has a published value get a column for it.
    stated = {col for (_, col), cell in cells.items() if cell.paper is not None}
    header = ["row"]
    for column in results.table.columns:
        version = results.version(column)
        called = label_with_version(column, version, newest_version(column, _all_metrics(results)))
        header.append(_title(called, [cells[label, column] for label in labels]))
        header += ["paper"] if column in stated else []
    lines = []
    for label in labels:
        line = [label]
        for column in results.table.columns:
            cell = cells[label, column]
            line.append(_format_mean(cell))
            if column in stated:
                line.append(_format_number(cell.paper.value) if cell.paper else "")
        lines.append([*line, *_seeds_and_sources(results.runs_of_row(label))])
    return [*header, "seeds", "from"], lines


# Format numbers and read results


def _metric_of_run(run: TableRun, column: str) -> Mapping[str, Any] | None:
    """Return a metric or a cost of a run, or None if it has no number."""
    ours = run.results.get("ours") if run.results else None
    found = ours.get(column) if isinstance(ours, dict) else None
    if found is None and run.results is not None:
        found = _cost(run.results, column)
    value = found.get("value") if isinstance(found, dict) else None
    return found if isinstance(value, int | float) and not isinstance(value, bool) else None


def _all_metrics(results: TableResults) -> list[Mapping[str, Any]]:
    found = [run.results.get("ours") for run in results.runs if run.results is not None]
    return [one for one in found if isinstance(one, Mapping)]


def _version(measure: Mapping[str, Any]) -> int:
    """Return the version of a metric's definition; old results without one have 1."""
    return int(measure.get("version", 1))


def _cost(results: Mapping[str, Any], column: str) -> Mapping[str, Any] | None:
    """Return a cost of a run: an entry of `clock`, or one of `COST_COLUMNS`."""
    clock = results.get("clock")
    if isinstance(clock, dict) and column in clock:
        return {"value": clock[column], "unit": "seconds", "direction": "lower"}
    if column in COST_COLUMNS:
        return {"value": results.get(column), "unit": COST_COLUMNS[column], "direction": "lower"}
    return None


def _direction(ours: Mapping[str, Any], paper: PublishedValue | None) -> bool | None:
    stated = ours.get("higher_is_better")
    if isinstance(stated, bool):
        return stated
    if ours.get("direction") in ("higher", "lower"):
        return bool(ours["direction"] == "higher")
    return paper.higher_is_better if paper else None


def _cell_to_json(cell: TableCell) -> dict[str, Any]:
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


def _title(column: str, cells: Sequence[TableCell]) -> str:
    ways = {cell.higher_is_better for cell in cells} - {None}
    arrow = "" if len(ways) != 1 else " ↑" if True in ways else " ↓"
    units = {cell.unit for cell in cells if cell.unit}
    return f"{column}{arrow}" + (f" ({units.pop()})" if len(units) == 1 else "")


def _format_mean(cell: TableCell) -> str:
    if cell.mean is None:
        return "–"
    if cell.deviation is None:
        return _format_number(cell.mean)
    return f"{_format_number(cell.mean)} ± {cell.deviation:.{_decimals(cell.mean)}f}"


def _format_number(value: float | int) -> str:
    return f"{value:.{_decimals(value)}f}"


def _decimals(value: float | int) -> int:
    return 2 if abs(value) >= 10 else 3


def _seeds_and_sources(runs: Sequence[TableRun]) -> Iterator[str]:
    """Yield the number of seeds and their sources: `2 run, 1 committed`."""
    yield str(sum(run.results is not None for run in runs))
    counts = {
        source: sum(run.source == source for run in runs)
        for source in ("run", "reused", "committed", "failed")
    }
    yield ", ".join(f"{count} {source}" for source, count in counts.items() if count)
