"""Toy recipes without a model, and their run folders."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from overt import io
from overt.experiments import run_folder, settings
from overt.experiments.recipe import NO_PUBLISHED_VALUES, PublishedValue, Recipe, TrainConfig
from overt.experiments.table import RowSpec, TableSpec


@dataclass(frozen=True)
class Data:
    limit: int | None = None


@dataclass(frozen=True)
class Files(Data):
    name: str = "cifar10"


@dataclass(frozen=True)
class Model:
    width: float = 1.0


@dataclass(frozen=True)
class Toy:
    name: str = "toy"
    about: str = "nothing to learn"
    paper: Mapping[str, PublishedValue] = field(default_factory=lambda: NO_PUBLISHED_VALUES)
    data: Data = field(default_factory=Data)
    model: Model = field(default_factory=Model)
    train: TrainConfig = field(default_factory=TrainConfig)

    def build(self, context: object) -> Any:
        raise NotImplementedError


def toy() -> Toy:
    """Return a toy recipe without published values."""
    return Toy()


def toy_stated() -> Toy:
    """A toy with a paper: 75 % of all toys are accurate."""
    return Toy(
        "toy-stated", paper={"accuracy": PublishedValue(0.75, "share", True, "Table 1, row 2")}
    )


def toy_files() -> Toy:
    """A toy that needs CIFAR-10."""
    return Toy("toy-files", data=Files())


RECIPES: Mapping[str, Callable[[], Recipe]] = {
    "toy": toy,
    "toy-stated": toy_stated,
    "toy-files": toy_files,
}
TABLE = TableSpec(
    "toys",
    "toys compared",
    (
        RowSpec("plain", toy),
        RowSpec("wide", toy, ("model.width=2",)),
        RowSpec("stated", toy_stated),
    ),
    ("accuracy", "error"),
)
FILES_TABLE = TableSpec("needy", "toys with files", (RowSpec("files", toy_files),), ("accuracy",))


def results_of(recipe: Recipe, seed: int = 0, status: str = "done") -> dict[str, Any]:
    """Return the results of a toy run; the values depend on width and seed."""
    width = settings.flatten(recipe)["model.width"]
    test = {"split": "test", "n": 20}
    accuracy = {"value": width / 4 + seed / 100, "unit": "share", "low": 0.2, "high": 0.6, **test}
    error = {"value": 20.0 - seed, "unit": "%", **test}
    return {
        "schema": 1,
        "status": status,
        "recipe": recipe.name,
        "settings": settings.to_json(recipe),
        "seed": seed,
        "paper": {},
        "ours": {
            "accuracy": {**accuracy, "higher_is_better": True},
            "error": {**error, "higher_is_better": False},
        },
        "seconds": 1.5,
    }


def write_run_folder(
    out: Path, recipe: Recipe, seed: int = 0, status: str = "done", **more: Any
) -> dict[str, Any]:
    """Write the folder of a run and return its results."""
    results = {**results_of(recipe, seed, status), **more}
    out.mkdir(parents=True, exist_ok=True)
    io.write_json(out / run_folder.RESULTS, results)
    if status == "done":
        io.write_manifest(out, [run_folder.RESULTS])
    return results


HOLD_LOCKS = """
import sys
from contextlib import ExitStack
from pathlib import Path
from overt import io
with ExitStack() as stack:
    for name in sys.argv[1:]:
        stack.enter_context(io.lock(Path(name)))
    print("held", flush=True)
    sys.stdin.read()
"""
