"""A recipe without a model, and a runner that writes what a run writes but trains nothing."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from overt import files
from overt.recipes import folder, settings
from overt.recipes.comparison import Row, Table
from overt.recipes.recipe import NO_FIGURES, Figure, Recipe, Train


@dataclass(frozen=True)
class Data:
    limit: int | None = None


@dataclass(frozen=True)
class Model:
    width: float = 1.0
    bias: float = 0.0


@dataclass(frozen=True)
class Toy:
    name: str = "toy"
    about: str = "nothing to learn"
    paper: Mapping[str, Figure] = field(default_factory=lambda: NO_FIGURES)
    data: Data = field(default_factory=Data)
    model: Model = field(default_factory=Model)
    train: Train = field(default_factory=Train)

    def build(self, context: object) -> Any:
        raise NotImplementedError


def toy() -> Toy:
    return Toy()


def stated() -> Toy:
    return Toy("stated", paper={"accuracy": Figure(0.75, "share", True, "Table 1, row 2")})


@pytest.fixture
def toy_table() -> Table:
    rows = (Row("plain", toy), Row("wide", toy, ("model.width=2",)), Row("stated", stated))
    return Table("toys", "toys compared", rows, ("accuracy", "error"))


@pytest.fixture
def write_run() -> Callable[..., dict[str, Any]]:
    """`write_run(folder, recipe, seed, status)` leaves a run folder behind."""

    def write(
        out: Path, recipe: Recipe, seed: int = 0, status: str = "done", **more: Any
    ) -> dict[str, Any]:
        width = settings.flatten(recipe)["model.width"]
        results = {
            "schema": 1,
            "status": status,
            "recipe": recipe.name,
            "settings": settings.to_json(recipe),
            "seed": seed,
            "ours": {
                "accuracy": {
                    "value": width / 4 + seed / 100,
                    "unit": "share",
                    "higher_is_better": True,
                    "split": "test",
                    "n": 10,
                },
                "error": {"value": 20.0 - seed, "unit": "%", "higher_is_better": False},
            },
            "seconds": 1.5,
            **more,
        }
        out.mkdir(parents=True, exist_ok=True)
        files.write_json(out / folder.RESULTS, results)
        if status == "done":
            files.seal(out, [folder.RESULTS])
        return results

    return write


@pytest.fixture
def runner(
    monkeypatch: pytest.MonkeyPatch, write_run: Callable[..., dict[str, Any]]
) -> list[tuple[str, float, int, bool]]:
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
        return write_run(out, recipe, seed)

    monkeypatch.setattr("overt.recipes.running.run", run)
    return asked
