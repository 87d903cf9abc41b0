"""Options shared by commands, their shell completion, and checks of the process."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from overt.cli.output import is_plain
from overt.errors import UserError

if TYPE_CHECKING:
    from typer import Context
else:  # typer passes click's context, the base class
    Context = typer.Context.__mro__[1]


def examples(*lines: str) -> str:
    """Format example command lines for the end of a help text."""
    if is_plain():
        return "\n".join(["\b", "Examples:", *(f"  $ {line}" for line in lines)])
    return "\n\n".join(["Examples:", *(f"- `{line}`" for line in lines)])


# Shell completion


def complete_recipe(incomplete: str) -> list[str]:
    """Complete the name of a recipe."""
    from overt.papers.catalog import recipes

    return [name for name in recipes() if name.startswith(incomplete)]


def complete_listed(incomplete: str) -> list[str]:
    """Complete the name of a recipe or a table."""
    return list(dict.fromkeys(complete_recipe(incomplete) + complete_table(incomplete)))


def complete_table(incomplete: str) -> list[str]:
    """Complete the name of a table."""
    from overt.papers.catalog import tables

    return [name for name in tables() if name.startswith(incomplete)]


def complete_set(context: Context, incomplete: str) -> list[str]:
    """Complete the settings of the recipe, or of the table's first recipe, on the command line."""
    from overt.experiments import settings
    from overt.papers.catalog import recipes, tables

    makers = {**{name: table.rows[0].recipe for name, table in tables().items()}, **recipes()}
    words = [context.params.get("recipe"), context.params.get("name"), *context.args]
    for word in words:
        if word in makers:
            keys = settings.flatten(makers[word]())
            return [f"{key}=" for key in keys if key.startswith(incomplete)]
    return []


def complete_data(incomplete: str) -> list[str]:
    """Complete the name of a dataset."""
    from overt.data import catalog

    return [each.name for each in catalog.DATASETS if each.name.startswith(incomplete)]


# Options

Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of all random numbers.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 or mps.")]
Data = Annotated[
    Path | None, typer.Option("--data", help="Folder of datasets; OVERT_DATA by default.")
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", autocompletion=complete_set,
                 help="Change a setting; can be repeated. `overt list RECIPE` shows the keys."),
]  # fmt: skip
Recipes = Annotated[
    list[str] | None,
    typer.Option("--recipe", metavar="FILE.py:NAME",
                 help="Python file with the recipe of a run of your own; its code is run. Can be "
                 "repeated."),
]  # fmt: skip
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in the folder.")]
Rows = Annotated[
    list[str] | None, typer.Option(help="Only these rows: comma-separated or repeated.")
]


def split_values(values: Sequence[str] | None, option: str) -> list[str]:
    """Split the values of an option that is repeated or comma-separated.

    An empty value raises `UserError`: an unset shell variable must not select everything.
    """
    for value in values or ():
        if not value.replace(",", "").strip():
            kind = option.lstrip("-")
            raise UserError(f"{option} is empty: name some {kind}, or leave it out.")
    parts = [part.strip() for value in values or () for part in value.split(",")]
    return [part for part in parts if part]


def parse_run_folder(word: str) -> Path:
    """Parse the folder of a run; refuse an empty word, which would be the working directory."""
    if not word:
        raise typer.BadParameter("the folder of a run is empty")
    return Path(word)


def require_name(word: str, what: str) -> None:
    """Raise `UserError` for an empty word, which would be the working directory."""
    if not word:
        raise UserError(f"the name of the {what} is empty: give its folder, or `.` for this one.")


# The process


def is_given(context: Context, name: str) -> bool:
    """Return whether a parameter is on the command line, and not its default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def is_main_process() -> bool:
    """Return whether this process prints and writes files."""
    return os.environ.get("RANK", "0") == "0"


def require_single_process(command: str) -> None:
    """Raise `UserError` if a command that needs one process runs in several."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError(
            f"`overt {command}` runs in one process: use `overt run` with torchrun or accelerate."
        )


def command_line(context: Context) -> list[str]:
    """Return the command line, for results.json."""
    given = context.find_root().obj
    return ["overt", *given] if isinstance(given, list) else ["overt"]
