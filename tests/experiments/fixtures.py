"""Fixtures: a table of toys, a runner that trains nothing, and tiny runs."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from overt.experiments import settings
from overt.experiments.recipe import Recipe
from overt.experiments.table import TableSpec
from tests import toys
from tests.experiments import tiny, vqa_datasets


@pytest.fixture
def toy_table() -> TableSpec:
    return toys.TABLE


@pytest.fixture
def write_run() -> Callable[..., dict[str, Any]]:
    """Return `write_run(folder, recipe, seed, status)`, which writes a run folder."""
    return toys.write_run_folder


@pytest.fixture
def run_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float, int, bool]]:
    """Record the runs instead of training: recipe, width, seed and whether to resume."""
    calls: list[tuple[str, float, int, bool]] = []

    def run(
        recipe: Recipe,
        out: Path,
        build: Any = None,
        *,
        seed: int = 0,
        device: str = "auto",
        data_root: Path | None = None,
        resume: bool = False,
        command: Sequence[str] = (),
        show_progress: bool = True,
    ) -> dict[str, Any]:
        calls.append((recipe.name, settings.flatten(recipe)["model.width"], seed, resume))
        return toys.write_run_folder(out, recipe, seed)

    monkeypatch.setattr("overt.experiments.runner.run", run)
    return calls


@pytest.fixture(scope="session")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write datasets in official formats with a few records; see `tiny.use_small_readers`."""
    return tiny.write_datasets(tmp_path_factory.mktemp("few"))


@pytest.fixture(scope="session")
def finished_run(
    few: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[Path, dict[str, Any]]]:
    """Return `finished_run("scenes-soft")`, which runs a tiny recipe on the first call."""
    known: dict[tuple[str, ...], tuple[Path, dict[str, Any]]] = {}

    def finished_run(name: str, *sets: str) -> tuple[Path, dict[str, Any]]:
        if (name, *sets) not in known:
            out = tmp_path_factory.mktemp("ran") / name
            with pytest.MonkeyPatch.context() as patch:
                tiny.use_small_readers(patch)
                results = tiny.run(
                    tiny.recipe(name, *sets), out, data_root=few, command=["overt", "run", name]
                )
            known[name, *sets] = out, results
        return known[name, *sets]

    return finished_run


@pytest.fixture(scope="session")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write VQA datasets in the official formats; see `vqa_datasets.use_small_readers`."""
    return vqa_datasets.write_datasets(tmp_path_factory.mktemp("asked"))


@pytest.fixture
def run(
    asked: Path, few: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., tuple[Path, dict[str, Any]]]:
    """Return `run("han-scenes", ...)`, which runs a tiny recipe: folder and results."""
    tiny.use_small_readers(monkeypatch)
    vqa_datasets.use_small_readers(monkeypatch)
    monkeypatch.setattr("overt.papers.han.features.default_cache", lambda: tmp_path / "cache")

    def run(name: str, *sets: str, out: str = "run", **options: Any) -> tuple[Path, dict[str, Any]]:
        root = few if name == "han-easyvqa" else asked
        recipe = tiny.recipe(name, *vqa_datasets.SMALL, *sets)
        return tmp_path / out, tiny.run(recipe, tmp_path / out, data_root=root, **options)

    return run
