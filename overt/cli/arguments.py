"""What several commands take, how the shell completes it, and the process they run in."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from overt.cli.printing import plain
from overt.errors import BadInput

if TYPE_CHECKING:
    from typer import Context
else:  # what is passed in is not typer's own class but the one below it
    Context = typer.Context.__mro__[1]


def examples(*lines: str) -> str:
    """What stands below the options of a command: lines to copy, one below the other."""
    if plain():
        return "\n".join(["\b", "Examples:", *(f"  $ {line}" for line in lines)])
    return "\n\n".join(["Examples:", *(f"- `{line}`" for line in lines)])


# Completion of names in the shell


def complete_recipe(incomplete: str) -> list[str]:
    """Names of recipes."""
    from overt.recipes import recipes

    return [name for name in recipes() if name.startswith(incomplete)]


def complete_listed(incomplete: str) -> list[str]:
    """Names of recipes and tables."""
    return list(dict.fromkeys(complete_recipe(incomplete) + complete_table(incomplete)))


def complete_table(incomplete: str) -> list[str]:
    """Names of tables."""
    from overt.recipes.tables import tables

    return [name for name in tables() if name.startswith(incomplete)]


def complete_set(context: Context, incomplete: str) -> list[str]:
    """The keys of the recipe, or of the table's first recipe, that stands before on the line."""
    from overt.recipes import recipes, settings
    from overt.recipes.tables import tables

    makers = {**{name: table.rows[0].recipe for name, table in tables().items()}, **recipes()}
    words = [context.params.get("recipe"), context.params.get("name"), *context.args]
    for word in words:
        if word in makers:
            keys = settings.flatten(makers[word]())
            return [f"{key}=" for key in keys if key.startswith(incomplete)]
    return []


def complete_data(incomplete: str) -> list[str]:
    """Names of data sets."""
    from overt.data import sets

    return [each.name for each in sets.SETS if each.name.startswith(incomplete)]


# Options

Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="The seed of all random numbers.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 or mps.")]
Data = Annotated[
    Path | None, typer.Option("--data", help="The folder of data sets; else OVERT_DATA names it.")
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", autocompletion=complete_set,
                 help="Change a setting; may be repeated. `overt list RECIPE` shows the keys."),
]  # fmt: skip
Resume = Annotated[bool, typer.Option("--resume", help="Go on with what is in the folder.")]
Rows = Annotated[
    list[str] | None, typer.Option(help="Only these rows: repeat it, or put commas between.")
]


def split_values(values: Sequence[str] | None, option: str) -> list[str]:
    """The words of an option that is repeated, or has commas between, or both.

    None of them is none of the option; one that is given and names nothing is refused, as a shell's
    variable that is not set would else be everything.
    """
    for value in values or ():
        if not value.replace(",", "").strip():
            kind = option.lstrip("-")
            raise BadInput(f"{option} names nothing; leave it out for the usual {kind}.")
    parts = [part.strip() for value in values or () for part in value.split(",")]
    return [part for part in parts if part]


def folder_of_run(word: str) -> Path:
    """The folder that a word names; an empty one would be the folder that one is in."""
    if not word:
        raise typer.BadParameter("the name of the run is empty")
    return Path(word)


def named(word: str, what: str) -> None:
    """Refuse an empty word where a folder or a model is named, before it is taken for `.`."""
    if not word:
        raise BadInput(f"the name of the {what} is empty; name its folder, or `.` for this one.")


# The process and its command line


def first_process() -> bool:
    """Whether this is the one process of a run that prints and writes."""
    return os.environ.get("RANK", "0") == "0"


def one_process(command: str) -> None:
    """Refuse a command that cannot be shared among processes."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise BadInput(
            f"`overt {command}` runs in one process; start `overt run` with torchrun or "
            "accelerate for a run on many."
        )


def command_line(context: Context) -> list[str]:
    """The command line as it was given, for the record."""
    given = context.find_root().obj
    return ["overt", *given] if isinstance(given, list) else ["overt"]
