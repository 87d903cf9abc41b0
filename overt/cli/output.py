"""Output of commands: tables, recipes, results and progress."""

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from overt.errors import RunError, print_to_stderr

LONG_WORD = 20  # characters; longer words, such as paths, are broken


def is_plain() -> bool:
    """Return whether to print without colours and boxes: to a file or pipe, or with NO_COLOR."""
    return sys.stdout is None or not sys.stdout.isatty() or bool(os.environ.get("NO_COLOR"))


def escape_control_characters(text: str) -> str:
    """Escape control characters except newlines.

    Titles, tokens and names in files may contain terminal escape sequences.
    """
    return "".join(one if one.isprintable() or one == "\n" else repr(one)[1:-1] for one in text)


def show(text: str) -> None:
    """Print a line, with control characters escaped."""
    print(escape_control_characters(text))


def print_table(title: str, header: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Print a table: with boxes on a terminal, else as plain aligned columns.

    On a terminal too narrow for its words, each line is a block with one cell per row.
    """
    if not is_plain():
        from rich.console import Console
        from rich.padding import Padding
        from rich.table import Table
        from rich.text import Text

        console = Console()
        if _needed_width(header, lines) > console.width:
            for text, indent in _blocks(title, header, lines):
                console.print(Padding(Text(text), (0, 0, 0, indent)))
            return
        drawn = Table(
            title=Text(escape_control_characters(title)), title_justify="left", header_style="bold"
        )
        for name in header:
            drawn.add_column(Text(name), overflow="fold")
        for line in lines:
            drawn.add_row(*(Text(escape_control_characters(cell)) for cell in line))
        console.print(drawn)
        return
    print(_table_text(title, header, lines))


def _needed_width(header: Sequence[str], lines: Sequence[Sequence[str]]) -> int:
    """Return the width of a table whose words are not broken, except for very long ones."""
    columns = zip(header, *lines, strict=True)
    words = [[len(word) for cell in column for word in cell.split()] for column in columns]
    return 1 + sum(3 + min(LONG_WORD, max(lengths, default=0)) for lengths in words)


def _blocks(
    title: str, header: Sequence[str], lines: Sequence[Sequence[str]]
) -> Iterator[tuple[str, int]]:
    """Yield the rows of a table in blocks, each with its indentation."""
    yield escape_control_characters(title), 0
    for first, *others in lines:
        yield escape_control_characters(first), 2
        for name, cell in zip(header[1:], others, strict=True):
            if cell:
                yield escape_control_characters(f"{name}: {cell}"), 6


def _table_text(title: str, header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Format a table as plain text."""
    title, lines = (
        escape_control_characters(title),
        [[escape_control_characters(cell) for cell in line] for line in lines],
    )
    widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
    laid = [title]
    for line in (header, *lines):
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        laid.append("  ".join(cells).rstrip())
    return "\n".join(laid)


# `overt list`

_HINT = (
    "`overt list NAME` shows the settings of a recipe and the rows of a table; `overt run "
    "RECIPE --out DIR` and `overt table TABLE --out DIR` run them."
)


def list_text() -> str:
    """Return what `overt list` prints to a file or pipe."""
    return "\n\n".join([*(_table_text(*table) for table in _list_tables()), _HINT])


def show_list() -> None:
    """Print all recipes and tables."""
    if is_plain():
        print(list_text())
        return
    for one in _list_tables():
        print_table(*one)
        print()
    print(_HINT)


def _list_tables() -> list[tuple[str, list[str], list[list[str]]]]:
    """Return the tables of recipes and of tables: title, header and lines."""
    from overt.papers.catalog import recipes, tables

    found = [make() for make in recipes().values()]
    of_recipes = [[one.name, one.about, _first_published(one.paper)] for one in found]
    of_tables = [[one.name, str(len(one.rows)), one.about] for one in tables().values()]
    return [
        ("Recipes", ["recipe", "description", "paper"], of_recipes),
        ("Tables", ["table", "rows", "description"], of_tables),
    ]


def _first_published(paper: Mapping[str, Any]) -> str:
    """Format the first published value of a recipe and the number of others."""
    for name, one in paper.items():
        more = f" and {len(paper) - 1} more" if len(paper) > 1 else ""
        return f"{name} {one.value:g} {one.unit}".rstrip() + more
    return ""


# Recipes, tables, results and models


def show_recipe(recipe: Any, about: str = "") -> None:
    """Print the docstring `about`, the published values and the settings of a recipe."""
    import textwrap

    from overt.experiments import settings

    print(f"{recipe.name}: {recipe.about}\n")
    if about:
        print(f"{about}\n")
    if recipe.paper:
        lines = [
            [name, f"{one.value:g} {one.unit}".rstrip(), one.source]
            for name, one in recipe.paper.items()
        ]
        print_table("Published values", ["metric", "value", "source"], lines)
        print()
    lines = [
        [one.key, settings.format_value(one.value), one.accepts]
        for one in settings.describe(recipe)
    ]
    print_table("Settings, for --set KEY=VALUE", ["key", "value", "accepts"], lines)
    print("\nMeaning of the settings")
    for section, text in settings.explain(recipe).items():
        words = " ".join(text.split())
        print(textwrap.fill(words, 96, initial_indent=f"{section}: ", subsequent_indent="  "))


def show_rows(table: Any) -> None:
    """Print the rows of a table: recipe and changed settings."""
    lines = [[one.label, one.recipe().name, " ".join(one.changes) or "none"] for one in table.rows]
    print_table(f"Table {table.name}: {table.about}", ["row", "recipe", "changes"], lines)


def show_results(results: Mapping[str, Any]) -> None:
    """Print the metrics of a run, with published values if there are any."""
    paper = results.get("paper") or {}
    lines = []
    for name, one in (results.get("ours") or {}).items():
        stated = paper.get(name)
        figure = f"{stated['value']:g} {stated['unit']}".rstrip() if stated else ""
        low, high = one.get("low"), one.get("high")
        spread = f" [{low:.4g}, {high:.4g}]" if low is not None and high is not None else ""
        value = "–" if one["value"] is None else f"{one['value']:.4g}{spread}"
        lines.append([name, value, str(one["unit"]), f"{one['split']}, {one['n']}", figure])
    title = (
        f"{results['recipe']}, seed {results['seed']}, {results.get('seconds', 0):g} s of training"
    )
    print_table(title, ["metric", "ours [95 % CI]", "unit", "split, n", "paper"], lines)


def show_model(
    name: str, device: str = "cpu", dtypes: Sequence[str] | None = None, compiled: bool = False
) -> None:
    """Print how each attention module of a model is captured; `RunError` if one cannot be.

    With `dtypes`, also if empty, its attention implementations are compared as well.
    """
    from overt.inspect import implementation_check, model_check

    options = None if dtypes is None else model_check.ComparisonOptions(tuple(dtypes), compiled)
    found = model_check.check_model(name, say, device, options)
    print_table(name, ["item", "value"], found.facts)
    print()
    print_table("Attention modules", model_check.HEADER, [one.line() for one in found.modules])
    show(f"\n{found.verdict()}")
    if found.differences:
        lines = [one.line() for one in found.differences]
        print()
        print_table("Attention implementations", implementation_check.HEADER, lines)
        show("\n" + "\n".join(one.verdict() for one in found.differences))
    if found.problem:
        raise RunError(found.problem)


# Progress on stderr


def say(line: str) -> None:
    """Print a line of progress to stderr."""
    print_to_stderr(escape_control_characters(line))


def announce(line: str) -> None:
    """Print a line to stderr if it is a terminal, while packages and models are loaded.

    Output to a file or a pipe is that of the command alone.
    """
    if sys.stderr is not None and sys.stderr.isatty():
        say(line)


class ProgressLine:
    """Shows percentage and remaining time on one line of a terminal; prints nothing elsewhere."""

    def __init__(self, name: str) -> None:
        self.name, self.shown, self.started = name, -1, time.monotonic()

    def __call__(self, done: int, total: int | None) -> None:
        now = done * 100 // total if total else done >> 20
        if now == self.shown or sys.stderr is None or not sys.stderr.isatty():
            return
        self.shown = now
        end = "\n" if total and done >= total else ""
        left = ""
        if total and 0 < done < total:
            seconds = (time.monotonic() - self.started) * (total - done) / done
            left = f", about {seconds / 60:.0f} min left" if seconds >= 90 else ""
            left = left or f", about {seconds:.0f} s left"
        said = f"{self.name}: {now} {'%' if total else 'MB'}{left}"
        print_to_stderr(f"\r{said:<48}", end)
