"""Recipes on scenes: differences between the rows."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from overt.data.scenes.balanced_questions import ROUND
from overt.experiments import scenes_recipes
from overt.experiments.recipe import RunContext
from overt.experiments.scenes_recipes import ImagePooling, ScenesVqaSupervision, ScenesVqaTarget
from overt.papers import demo
from overt.papers.catalog import build
from tests.experiments import tiny


def test_recipes_differ_only_in_pooling_and_supervision() -> None:
    soft = scenes_recipes.scenes_soft()
    assert soft.model.look is ImagePooling.SOFT and soft.supervise.target is ScenesVqaTarget.NOTHING
    blind, mean, truth = (
        scenes_recipes.scenes_question(),
        scenes_recipes.scenes_none(),
        scenes_recipes.scenes_truth(),
    )
    assert blind.model == replace(soft.model, look=ImagePooling.BLIND)
    assert mean.model == replace(soft.model, look=ImagePooling.MEAN)
    assert truth.model == soft.model and truth.supervise == ScenesVqaSupervision(
        ScenesVqaTarget.TRUTH
    )
    for other in (blind, mean, truth):
        assert (other.data, other.train) == (soft.data, soft.train)
        assert other.paper == {}


def test_test_sizes_are_multiples_of_a_round() -> None:
    """Otherwise the question words would be weakly informative."""
    assert scenes_recipes.ScenesVqaData().test % ROUND == 0
    every = [demo.demo_recipe(row) for row in demo.ROWS]
    vqa_recipes = [one for one in every if isinstance(one, scenes_recipes.ScenesRecipe)]
    assert len(vqa_recipes) == 4
    assert all(recipe.data.test % ROUND == 0 for recipe in vqa_recipes)


@pytest.mark.parametrize("name", ["scenes-question", "scenes-none", "scenes-soft"])
def test_the_question_only_model_ignores_the_image(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    experiment = build(tiny.recipe(name), RunContext(tmp_path, device="cpu"))
    batch = experiment.example()
    assert batch.images is not None
    dark = replace(batch, images=torch.zeros_like(batch.images))
    model = experiment.model.eval()
    with torch.no_grad():
        seen, unseen = model(batch).prediction, model(dark).prediction
    assert torch.equal(seen, unseen) == (name == "scenes-question")


@pytest.mark.long
def test_only_soft_attention_gives_a_map_of_the_image(tmp_path: Path) -> None:
    for name, looks in (("scenes-question", False), ("scenes-none", False), ("scenes-soft", True)):
        experiment = build(tiny.recipe(name), RunContext(tmp_path, device="cpu"))
        with torch.no_grad():
            maps = experiment.model.eval()(experiment.example()).attention
        assert any(one.keys.spans[0].name == "image" for one in maps) == looks
