"""The recipes about scenes: what each one changes, and nothing more."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from overt.data.scenes.posing import ROUND
from overt.recipes import demo, scenes
from overt.recipes.recipe import Context
from overt.recipes.scenes import Look, Supervise, Target
from tests.recipes import tiny

NOT_ASKED = ("grounded", "aligned-captions")  # captions, whose words are the task


def test_rows_differ_in_how_they_look_and_what_they_are_taught() -> None:
    soft = scenes.scenes_soft()
    assert soft.model.look is Look.SOFT and soft.supervise.target is Target.NOTHING
    blind, mean, truth = scenes.scenes_question(), scenes.scenes_none(), scenes.scenes_truth()
    assert blind.model == replace(soft.model, look=Look.BLIND)
    assert mean.model == replace(soft.model, look=Look.MEAN)
    assert truth.model == soft.model and truth.supervise == Supervise(Target.TRUTH)
    for other in (blind, mean, truth):
        assert (other.data, other.train) == (soft.data, soft.train)
        assert other.paper == {}


def test_what_is_tested_on_is_whole_rounds() -> None:
    """Else words would give a little away."""
    assert scenes.Data().test % ROUND == 0
    asking = [demo.recipe_of(row) for row in demo.ROWS if row.label not in NOT_ASKED]
    assert all(recipe.data.test % ROUND == 0 for recipe in asking)


@pytest.mark.parametrize("name", ["scenes-question", "scenes-none", "scenes-soft"])
def test_the_question_alone_sees_no_image(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    experiment = tiny.recipe(name).build(Context(tmp_path, device="cpu"))
    batch = experiment.example()
    assert batch.images is not None
    dark = replace(batch, images=torch.zeros_like(batch.images))
    model = experiment.model.eval()
    with torch.no_grad():
        seen, unseen = model(batch).prediction, model(dark).prediction
    assert torch.equal(seen, unseen) == (name == "scenes-question")


def test_only_soft_attention_gives_a_map_of_the_image(tmp_path: Path) -> None:
    for name, looks in (("scenes-question", False), ("scenes-none", False), ("scenes-soft", True)):
        experiment = tiny.recipe(name).build(Context(tmp_path, device="cpu"))
        with torch.no_grad():
            maps = experiment.model.eval()(experiment.example()).attention
        assert any(one.keys.spans[0].name == "image" for one in maps) == looks
