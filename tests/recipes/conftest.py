"""A table of toys, and a runner that writes what a run writes but trains nothing."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from overt.recipes import settings
from overt.recipes.comparison import Table
from overt.recipes.recipe import Recipe
from tests import toys
from tests.recipes import asked_files, tiny


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


@pytest.fixture(scope="session")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data sets in the official formats with a few records each; see `tiny.expect_few`."""
    return tiny.write(tmp_path_factory.mktemp("few"))


@pytest.fixture(scope="session")
def ran(
    few: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[Path, dict[str, Any]]]:
    """`ran("scenes-soft")` runs a recipe, tiny, the first time it is asked for."""
    known: dict[tuple[str, ...], tuple[Path, dict[str, Any]]] = {}

    def ran(name: str, *sets: str) -> tuple[Path, dict[str, Any]]:
        if (name, *sets) not in known:
            out = tmp_path_factory.mktemp("ran") / name
            with pytest.MonkeyPatch.context() as patch:
                tiny.expect_few(patch)
                results = tiny.run(
                    tiny.recipe(name, *sets), out, data_root=few, command=["overt", "run", name]
                )
            known[name, *sets] = out, results
        return known[name, *sets]

    return ran


@pytest.fixture(scope="session")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sets of visual questions in the official formats; see `asked_files.expect_few`."""
    return asked_files.write(tmp_path_factory.mktemp("asked"))


@pytest.fixture
def run(
    asked: Path, few: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., tuple[Path, dict[str, Any]]]:
    """`run("han-scenes", ...)` runs a recipe, tiny, and gives its folder and results."""
    tiny.expect_few(monkeypatch)
    asked_files.expect_few(monkeypatch)
    monkeypatch.setattr("overt.recipes.han.features.default_cache", lambda: tmp_path / "cache")

    def run(name: str, *sets: str, out: str = "run", **options: Any) -> tuple[Path, dict[str, Any]]:
        root = few if name == "han-easyvqa" else asked
        recipe = tiny.recipe(name, *asked_files.SMALL, *sets)
        return tmp_path / out, tiny.run(recipe, tmp_path / out, data_root=root, **options)

    return run
