"""What commands print: tables, recipes, results, and the progress of a download."""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from overt.errors import Failed


def plain() -> bool:
    """Whether to print without colours and boxes: into a file or a pipe, or because asked to."""
    return sys.stdout is None or not sys.stdout.isatty() or bool(os.environ.get("NO_COLOR"))


def print_table(title: str, header: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """A table: with boxes on a terminal, else one line a row, columns apart by two spaces."""
    if not plain():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        drawn = Table(title=Text(title), title_justify="left", header_style="bold")
        for name in header:
            drawn.add_column(Text(name), overflow="fold")
        for line in lines:
            drawn.add_row(*map(Text, line))
        Console().print(drawn)
        return
    print(_laid(title, header, lines))


def _laid(title: str, header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table as plain text."""
    widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
    laid = [title]
    for line in (header, *lines):
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        laid.append("  ".join(cells).rstrip())
    return "\n".join(laid)


# The page of `overt list`

_HINT = (
    "`overt list NAME` shows the settings of a recipe and the rows of a table; `overt run "
    "RECIPE --out DIR` and `overt table TABLE --out DIR` run them."
)


def listed() -> str:
    """What `overt list` prints into a file or a pipe."""
    return "\n\n".join([*(_laid(*table) for table in _lists()), _HINT])


def show_list() -> None:
    """All recipes and tables, and how to go on from there."""
    if plain():
        print(listed())
        return
    for one in _lists():
        print_table(*one)
        print()
    print(_HINT)


def _lists() -> list[tuple[str, list[str], list[list[str]]]]:
    """All recipes and all tables: a title, a header, and a line each."""
    from overt.recipes import recipes
    from overt.recipes.tables import tables

    found = [make() for make in recipes().values()]
    of_recipes = [[one.name, one.about, _figures(one.paper)] for one in found]
    of_tables = [[one.name, str(len(one.rows)), one.about] for one in tables().values()]
    return [
        ("Recipes", ["recipe", "what", "paper"], of_recipes),
        ("Tables", ["table", "rows", "what"], of_tables),
    ]


def _figures(paper: Mapping[str, Any]) -> str:
    """The first figure of a paper, and how many more there are."""
    for name, one in paper.items():
        more = f" and {len(paper) - 1} more" if len(paper) > 1 else ""
        return f"{name} {one.value:g} {one.unit}".rstrip() + more
    return ""


# One thing in full


def show_recipe(recipe: Any) -> None:
    """All about one recipe: the docstring of its function, the paper's figures, the settings."""
    import inspect
    import textwrap

    from overt.recipes import recipes, settings

    print(f"{recipe.name}: {recipe.about}\n")
    about = inspect.getdoc(recipes()[recipe.name])
    if about:
        print(f"{about}\n")
    if recipe.paper:
        lines = [
            [name, f"{one.value:g} {one.unit}".rstrip(), one.source]
            for name, one in recipe.paper.items()
        ]
        print_table("Stated in the paper", ["measure", "value", "where"], lines)
        print()
    lines = [[one.key, settings.shown(one.value), one.wants] for one in settings.describe(recipe)]
    print_table("Settings, for --set KEY=VALUE", ["key", "value", "takes"], lines)
    print("\nWhat they mean")
    for section, text in settings.explain(recipe).items():
        words = " ".join(text.split())
        print(textwrap.fill(words, 96, initial_indent=f"{section}: ", subsequent_indent="  "))


def show_rows(table: Any) -> None:
    """The rows of a table, each a recipe and what is changed in it."""
    lines = [
        [one.label, one.recipe().name, " ".join(one.changes) or "nothing"] for one in table.rows
    ]
    print_table(f"Table {table.name}: {table.about}", ["row", "recipe", "changed"], lines)


def show_results(results: Mapping[str, Any]) -> None:
    """What a run measured, beside the paper's figures where there are some."""
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
    print_table(title, ["measure", "ours [95 %]", "unit", "split, n", "paper"], lines)


def show_model(name: str) -> None:
    """A model's attention modules and how each can be seen; one that cannot is exit code 1."""
    from overt.recipes import checkup

    found = checkup.model(name, say)
    print_table(name, ["what", "found"], found.facts)
    print()
    print_table("Attention modules", checkup.HEADER, [one.line() for one in found.modules])
    print(f"\n{found.verdict()}")
    if found.problem:
        raise Failed(found.problem)


# Lines on stderr


def say(line: str) -> None:
    """Tell how far a command has come, where it does not mix with what it prints."""
    print(line, file=sys.stderr, flush=True)


class Line:
    """The progress of a download, on one line of a terminal; silent elsewhere."""

    def __init__(self, name: str) -> None:
        self.name, self.shown = name, -1

    def __call__(self, done: int, total: int | None) -> None:
        now = done * 100 // total if total else done >> 20
        if now == self.shown or sys.stderr is None or not sys.stderr.isatty():
            return
        self.shown = now
        end = "\n" if total and done >= total else ""
        print(f"\r{self.name}: {now} {'%' if total else 'MB'}", end=end, file=sys.stderr)
