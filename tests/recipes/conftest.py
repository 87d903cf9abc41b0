"""A table of toys, and a runner that writes what a run writes but trains nothing."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from overt.recipes import settings
from overt.recipes.comparison import Table
from overt.recipes.recipe import Recipe
from tests import toys


@pytest.fixture
def toy_table() -> Table:
    return toys.TABLE


@pytest.fixture
def write_run() -> Callable[..., dict[str, Any]]:
    """`write_run(folder, recipe, seed, status)` leaves a run folder behind."""
    return toys.leave


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float, int, bool]]:
    """What was asked to run: recipe, width, seed and whether to resume; nothing is trained."""
    asked: list[tuple[str, float, int, bool]] = []

    def run(
        recipe: Recipe,
        out: Path,
        *,
        seed: int = 0,
        device: str = "auto",
        data_root: Path | None = None,
        resume: bool = False,
        command: Sequence[str] = (),
        show_progress: bool = True,
    ) -> dict[str, Any]:
        asked.append((recipe.name, settings.flatten(recipe)["model.width"], seed, resume))
        return toys.leave(out, recipe, seed)

    monkeypatch.setattr("overt.recipes.running.run", run)
    return asked
