"""What every recipe shares: plain frozen values, common keys, and a word on the paper."""

import dataclasses
import inspect
import json
import subprocess
import sys
from enum import Enum
from typing import Any

import pytest

from overt.recipes import listing, recipes, settings
from overt.recipes.recipe import NO_FIGURES, Context, Figure, Precision, Recipe, Train

NAMES = list(recipes())
PLAIN = (str, int, float, bool, type(None), Enum, tuple)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_plain_frozen_values(name: str) -> None:
    recipe: Any = recipes()[name]()
    assert isinstance(recipe, Recipe) and recipe.name == name
    assert recipe == recipes()[name]()
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.name = "other"
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.train.epochs = 3
    for value in settings.flatten(recipe).values():
        assert isinstance(value, PLAIN)


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_has_the_common_keys(name: str) -> None:
    recipe = recipes()[name]()
    sets = ["data.limit=5", "model.width=0.5", "train.epochs=2", "train.steps=7"]
    changed = settings.apply(recipe, sets)
    assert (changed.data.limit, changed.model.width) == (5, 0.5)
    assert (changed.train.epochs, changed.train.steps) == (2, 7)
    assert settings.restore(recipe, json.loads(json.dumps(settings.to_json(changed)))) == changed


@pytest.mark.parametrize("name", NAMES)
def test_the_docstring_states_the_papers_number_or_that_there_is_none(name: str) -> None:
    make = recipes()[name]
    said, paper = inspect.getdoc(make) or "", make().paper
    if not paper:
        assert "No paper's number" in said
    for figure in list(paper.values())[:1]:  # the first is that of the task
        assert f"{figure.value * 100:.2f} %" in said
        where = figure.source.split(", ")
        assert where[0] in said and where[1] in said


def test_the_listing_shows_every_recipe() -> None:
    found = listing()
    assert [one["name"] for one in found["recipes"]] == NAMES
    assert json.loads(json.dumps(found)) == found


def test_what_training_takes_unless_told() -> None:
    plan = Train()
    assert (plan.epochs, plan.steps, plan.accumulate, plan.workers) == (1, None, 1, 0)
    assert plan.precision is Precision.FP32 and plan.patience is None
    assert dict(NO_FIGURES) == {}


def test_a_class_without_build_is_no_recipe() -> None:
    assert not isinstance(Figure(1.0, "share", True, "Table 1"), Recipe)
    assert not isinstance(Context, Recipe)


def test_making_every_recipe_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from overt.recipes import recipes, settings\n"
        "[settings.describe(make()) for make in recipes().values()]\n"
        "print(*{'torch', 'numpy', 'scipy', 'transformers', 'PIL'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
