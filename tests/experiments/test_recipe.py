"""All recipes: frozen values, common settings and published values."""

import dataclasses
import inspect
import json
from enum import Enum
from typing import Any

import pytest

from overt.experiments import settings
from overt.experiments.recipe import (
    PublishedValue,
    Recipe,
    RunContext,
)
from overt.papers.catalog import recipes

NAMES = list(recipes())
PLAIN = (str, int, float, bool, type(None), Enum, tuple)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_has_plain_frozen_values(name: str) -> None:
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
def test_every_recipe_has_the_common_settings(name: str) -> None:
    recipe = recipes()[name]()
    sets = ["data.limit=5", "model.width=0.5", "train.epochs=2", "train.steps=7"]
    changed = settings.apply(recipe, sets)
    assert (changed.data.limit, changed.model.width) == (5, 0.5)
    assert (changed.train.epochs, changed.train.steps) == (2, 7)
    assert settings.restore(recipe, json.loads(json.dumps(settings.to_json(changed)))) == changed


@pytest.mark.parametrize("name", NAMES)
def test_the_docstring_states_the_published_value_or_its_absence(name: str) -> None:
    make = recipes()[name]
    docstring, paper = " ".join((inspect.getdoc(make) or "").split()), make().paper
    if not paper:
        assert "No published number" in docstring
    for figure in list(paper.values())[:1]:  # the first value is that of the task
        assert f"{figure.value * 100:.2f} %" in docstring
        where = figure.source.split(", ")
        assert where[0] in docstring and where[1] in docstring


def test_a_class_without_build_is_not_a_recipe() -> None:
    assert not isinstance(PublishedValue(1.0, "share", True, "Table 1"), Recipe)
    assert not isinstance(RunContext, Recipe)
