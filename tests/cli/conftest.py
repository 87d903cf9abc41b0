"""Commands in a process that has toys in the place of recipes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from overt import cli
from overt.recipes import tables
from overt.recipes.recipe import Recipe
from tests import toys

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def no_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    """No folder of data and no other process is named outside."""
    for name in ("OVERT_DATA", "OVERT_TRACEBACK", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def toy_recipes(monkeypatch: pytest.MonkeyPatch, no_folders: None) -> None:
    """The commands find toys and no recipes."""
    monkeypatch.setattr("overt.recipes.recipes", lambda: dict(toys.RECIPES))
    monkeypatch.setattr(tables, "tables", lambda: {"toys": toys.TABLE, "needy": toys.NEEDY})


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """`call("run", ...)` gives the exit code, what was printed, and what was said on stderr."""

    def call(*args: str | Path) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.main([str(one) for one in args])
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What `running.run` was asked; it leaves results behind and trains nothing."""
    found: list[dict[str, Any]] = []

    def run(recipe: Recipe, out: Path, **options: Any) -> dict[str, Any]:
        found.append({"recipe": recipe, "out": out, **options})
        return toys.leave(out, recipe, options["seed"])

    monkeypatch.setattr("overt.recipes.running.run", run)
    return found
