"""The networks of the rows: those of the models' room, and every one of them answers."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from overt import models
from overt.data import SortOfClevr
from overt.errors import BadInput
from overt.models.hard.aggregate import Pairwise
from overt.models.hard.selection import Selection, keep_above_uniform, keep_top
from overt.recipes import settings
from overt.recipes.han import recipe as han
from overt.recipes.han.networks import network, selection_of
from overt.recipes.han.recipe import Model, Select

PHOTOS = ("daquar", "vqacp2")


@pytest.mark.parametrize("data", ["scenes", "easyvqa", "daquar", "vqacp2", "sortclevr", "clevr"])
def test_every_row_is_a_network_that_answers(data: str) -> None:
    make = {"vqacp2": han.han_vqacp}.get(data) or getattr(han, f"han_{data}")
    images = SortOfClevr("test", count=1)
    for label, row in han.rows_of(data).items():
        recipe = settings.apply(make(), [*han.changes(row), "model.width=0.05"])
        net = network(recipe.model, images.reader.size, 4, (5, (8, 8)))
        batch = images.batch(range(3))
        if data in PHOTOS:
            seen = torch.randn(3, 64, 5)
            batch = replace(batch, features=seen, boxes=None, region_mask=None)
        output = net(batch)
        assert output.prediction.shape == (3, 4), label
        output.prediction.sum().backward()


def test_the_networks_are_those_of_the_models_room() -> None:
    """The settings of the recipes are the paper's, as the functions that build it have them."""
    photos = network(han.han_vqacp().model, 50, 1000, (2048, (10, 10)))
    assert photos.config() == models.vqa_cp(50).config()
    rows = han.rows_of("vqacp2")

    def of(label: str) -> Model:
        return settings.apply(han.han_vqacp(), han.changes(rows[label])).model

    pairs = network(of("han-pairwise-16"), 50, 1000, (2048, (10, 10)))
    top = partial(keep_top, count=16)
    assert pairs.config() == models.vqa_cp(50, 1000, top, Pairwise(2048)).config()
    depth = network(of("han-sum-16-depth0"), 50, 1000, (2048, (10, 10)))
    assert depth.config() == models.vqa_cp(50, 1000, top, depth=0).config()
    clevr = network(han.han_clevr().model, 50, 28)
    assert clevr.config() == models.relation_net(50, 28, top).config()
    plain = settings.apply(han.han_clevr(), han.changes(han.rows_of("clevr")["rn"])).model
    wanted = models.relation_net(50, 28, models.keep_all, joint=None)
    assert network(plain, 50, 28).config() == wanted.config()


def test_every_choice_is_one() -> None:
    found = {select: selection_of(Model(select, cells=3, share=0.5)) for select in Select}
    assert found[Select.ABOVE_UNIFORM] == Selection(keep_above_uniform)
    warm = selection_of(Model(Select.ABOVE_UNIFORM, temperature=4.0))
    assert warm.config()["rule"] == {"keep": "above_uniform", "temperature": 4.0}
    assert found[Select.STRAIGHT_THROUGH].config()["weigh"] == {"weigh": "straight_through"}
    assert found[Select.SOFT_TO_HARD].config()["weigh"] == {"weigh": "softened"}
    assert found[Select.GUMBEL].config()["training"]["keep"] == "gumbel"
    assert found[Select.RANDOM].config()["training"] == {"keep": "random", "count": 3}
    assert found[Select.SHARE].config()["rule"] == {"keep": "share", "share": 0.5}


def test_a_blind_choice_scores_the_image_alone() -> None:
    recipe = settings.apply(han.han_scenes(), ["model.select=blind", "model.width=0.1"])
    assert network(recipe.model, 20, 4).config()["attend"]["score"] == "unasked"
    plain = settings.apply(han.han_sortclevr(), ["model.depth=none", "model.width=0.1"])
    assert network(plain.model, 20, 4).config()["attend"]["score"] == "unplaced"


def test_cached_cells_are_needed_where_they_are_looked_at() -> None:
    with pytest.raises(BadInput, match="needs features of photos"):
        network(Model(), 5, 5)


def test_layers_begin_as_the_recipe_says() -> None:
    recipe = settings.apply(han.han_sortclevr(), ["model.width=0.1", "model.init=fan-in"])
    large = network(recipe.model, 30, 10).state_dict()
    plain = network(replace(recipe.model, init=han.Init.TORCH), 30, 10).state_dict()
    assert large.keys() == plain.keys()
    assert not large["decision.0.bias"].any() and plain["decision.0.bias"].any()
