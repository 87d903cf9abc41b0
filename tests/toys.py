"""Recipes without a model, and the run folders they would leave: for tests around runs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from overt import files
from overt.recipes import folder, settings
from overt.recipes.comparison import Row, Table
from overt.recipes.recipe import NO_FIGURES, Figure, Recipe, Train


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
    paper: Mapping[str, Figure] = field(default_factory=lambda: NO_FIGURES)
    data: Data = field(default_factory=Data)
    model: Model = field(default_factory=Model)
    train: Train = field(default_factory=Train)

    def build(self, context: object) -> Any:
        raise NotImplementedError


def toy() -> Toy:
    """A toy without a paper."""
    return Toy()


def toy_stated() -> Toy:
    """A toy with a paper: 75 % of all toys are accurate."""
    return Toy("toy-stated", paper={"accuracy": Figure(0.75, "share", True, "Table 1, row 2")})


def toy_files() -> Toy:
    """A toy that needs CIFAR-10."""
    return Toy("toy-files", data=Files())


RECIPES: Mapping[str, Callable[[], Recipe]] = {
    "toy": toy,
    "toy-stated": toy_stated,
    "toy-files": toy_files,
}
TABLE = Table(
    "toys",
    "toys compared",
    (Row("plain", toy), Row("wide", toy, ("model.width=2",)), Row("stated", toy_stated)),
    ("accuracy", "error"),
)
NEEDY = Table("needy", "toys with files", (Row("files", toy_files),), ("accuracy",))


def results_of(recipe: Recipe, seed: int = 0, status: str = "done") -> dict[str, Any]:
    """What a run of a toy comes to: numbers that follow from width and seed."""
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


def leave(
    out: Path, recipe: Recipe, seed: int = 0, status: str = "done", **more: Any
) -> dict[str, Any]:
    """Leave the folder of a run behind, and return its results."""
    results = {**results_of(recipe, seed, status), **more}
    out.mkdir(parents=True, exist_ok=True)
    files.write_json(out / folder.RESULTS, results)
    if status == "done":
        files.seal(out, [folder.RESULTS])
    return results


HOLD = """
import sys
from contextlib import ExitStack
from pathlib import Path
from overt import files
with ExitStack() as stack:
    for name in sys.argv[1:]:
        stack.enter_context(files.lock(Path(name)))
    print("held", flush=True)
    sys.stdin.read()
"""
