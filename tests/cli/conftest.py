"""Fixtures of the command line: toy recipes and calls of commands."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from overt import cli
from overt.experiments.recipe import Recipe
from tests import toys

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset the environment variables of data folders and processes."""
    for name in ("OVERT_DATA", "OVERT_TRACEBACK", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def toy_recipes(monkeypatch: pytest.MonkeyPatch, clean_environment: None) -> None:
    """Replace the recipes and tables by toys."""
    monkeypatch.setattr("overt.papers.catalog.recipes", lambda: dict(toys.RECIPES))
    monkeypatch.setattr(
        "overt.papers.catalog.tables", lambda: {"toys": toys.TABLE, "needy": toys.FILES_TABLE}
    )


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Return `call("run", ...)`, which returns exit code, stdout and stderr."""

    def call(*args: str | Path) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.main([str(one) for one in args])
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def runner_calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Record the calls of `runner.run`, which writes results without training."""
    calls: list[dict[str, Any]] = []

    def run(recipe: Recipe, out: Path, build: Any = None, **options: Any) -> dict[str, Any]:
        calls.append({"recipe": recipe, "out": out, **options})
        return toys.write_run_folder(out, recipe, options["seed"])

    monkeypatch.setattr("overt.experiments.runner.run", run)
    return calls
