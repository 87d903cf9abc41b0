"""Recipes of hard attention: rows, published numbers, and settings that conflict."""

from collections.abc import Callable

import pytest

from overt.errors import UserError
from overt.experiments import settings
from overt.experiments.table_runner import row_recipe
from overt.papers import catalog
from overt.papers.han import config as han
from overt.papers.han.config import (
    FIXED_COUNT,
    HanAggregate,
    HanImageEncoder,
    HanRecipe,
    HanSelect,
    HanSoftAttention,
    row_label,
)

MAKERS = {make().set_name: make for make in han.RECIPES if make is not han.han_rn_santoro}


@pytest.mark.parametrize("data", list(MAKERS))
def test_each_row_is_a_different_network_with_its_label(data: str) -> None:
    rows = han.table_rows(data)
    for label, model in rows.items():
        recipe = settings.apply(MAKERS[data](), han.model_changes(model))
        assert recipe.set_name == data and row_label(data, recipe.model) == label
    assert len({han._row_signature(data, model) for model in rows.values()}) == len(rows)


def test_rows_match_the_settings_of_the_paper() -> None:
    rows = han.table_rows("vqacp2")
    for k in (16, 32, 48, 64):
        model = rows[f"han-sum-{k}"]
        assert (model.select, model.cells, model.aggregate) == (HanSelect.TOP, k, HanAggregate.SUM)
    assert rows["sum"].select is rows["pairwise"].select is HanSelect.ALL
    assert rows["adahan-pairwise"].select is HanSelect.ABOVE_UNIFORM
    assert rows["han-sum-32-depth0"].depth == 0 and rows["han-sum-32"].depth == 2
    assert rows["simple-han"].eye is rows["simple-san"].eye is HanImageEncoder.STRIDED
    assert rows["simple-han"].share == 0.16
    assert rows["san2-pos"].soft is HanSoftAttention.SAN2_POS


def test_clevr_rows_keep_a_quarter_of_the_cells() -> None:
    """25 % of 5 x 5 cells, rounded, and of 8 x 8; of finer grids too."""
    for data, side in (("sortclevr", 75), ("clevr", 128)):
        rows = han.table_rows(data)
        for label, model in rows.items():
            pixels = 8 if label.endswith("-fine") else 16
            assert model.cells == round((-(-side // pixels)) ** 2 / 4), label
        assert rows["rn"].depth is None and rows["rn-aligned"].depth == 2
        assert han._row_signature(data, MAKERS[data]().model) == han._row_signature(
            data, rows["han-rn"]
        )


def test_grids_of_64_cells_have_no_row_that_keeps_64() -> None:
    for data in ("scenes", "easyvqa"):
        assert "han-sum-64" not in han.table_rows(data)
    assert "han-sum-64" in han.table_rows("daquar")


@pytest.mark.parametrize(
    ("sets", "label"),
    [
        ([], "adahan-sum"),
        (["model.width=0.5", "model.joint=64"], "adahan-sum"),
        (["model.temperature=2"], None),
        (["model.select=top", "model.cells=17"], None),
        (["model.select=top", "model.share=0.9"], "han-sum-16"),
        (["model.select=all", "model.cells=7"], "sum"),
        (["model.soft=san2", "model.select=top"], "san2"),
        (["model.depth=1"], None),
        (["model.select=blind"], "blind-sum-16"),
    ],
)
def test_published_numbers_belong_to_their_row_only(sets: list[str], label: str | None) -> None:
    recipe = settings.apply(han.han_vqacp(), sets)
    assert row_label("vqacp2", recipe.model) == label
    stated = label is not None and not label.startswith("blind")
    assert ("accuracy" in recipe.paper) is stated
    elsewhere = settings.apply(han.han_daquar(), sets)
    assert dict(elsewhere.paper) == {}


@pytest.mark.parametrize(
    ("make", "sets", "message"),
    [
        (han.han_scenes, ["model.eye=cached"], r"model\.eye=cached"),
        (han.han_easyvqa, ["model.eye=cached"], r"model\.eye=cached"),
        (han.han_daquar, ["data.name=easyvqa"], "han-daquar .*daquar"),
        (han.han_scenes, ["model.depth=none"], r"model\.aggregate=relation"),
        (han.han_sortclevr, ["model.depth=none", "model.select=blind"], "select=top"),
        (han.han_scenes, ["model.select=topp"], "model.select"),
        (han.han_scenes, ["model.share=0"], "model.share"),
        (han.han_scenes, ["model.cells=0"], "model.cells"),
        (han.han_easyvqa, ["model.select=oracle"], "han-sortclevr"),
        (han.han_daquar, ["model.select=oracle"], "daquar"),
        (han.han_scenes, ["model.select=oracle", "model.eye=coarse"], "model.eye=fine"),
        (han.han_crowded, ["model.select=oracle", "model.eye=fine"], "model.eye=coarse"),
        (han.han_crowded, ["data.side=7"], "data.side"),
        (han.han_sortclevr, ["model.maps=24,24"], "model.maps"),
        (han.han_sortclevr, ["adam.length=0"], "adam.length"),
    ],
)
def test_conflicting_settings_are_rejected(
    make: Callable[[], HanRecipe], sets: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        settings.apply(make(), sets)


def test_every_selection_rule_has_a_row() -> None:
    chosen = {model.select for data in MAKERS for model in han.table_rows(data).values()}
    assert chosen == set(HanSelect) and set(FIXED_COUNT) < chosen


def test_table_rows_have_the_labels_of_their_recipes() -> None:
    named = (("han-1", "vqacp2"), ("han-scenes", "scenes"), ("han-sortclevr", "sortclevr"))
    for name, data in named:
        for row in catalog.find_table(name).rows:
            recipe = row_recipe(row, [])
            assert isinstance(recipe, HanRecipe)
            assert row_label(data, recipe.model) == row.label


def test_new_settings_keep_the_networks_of_earlier_runs() -> None:
    """The defaults equal what was fixed before: 24 maps, 256 units per pair, all steps."""
    for make in han.RECIPES:
        if make is han.han_rn_santoro:
            continue
        recipe = make()
        assert recipe.model.pair == 256 and recipe.adam.length == 1
        assert recipe.model.maps == (24,) * 4 or make is han.han_crowded


def test_the_relation_network_of_santoro_has_its_published_sizes() -> None:
    recipe = han.han_rn_santoro()
    model, plan = recipe.model, recipe.train
    assert (model.pair, model.hidden) == (2000, (2000, 1000, 500, 100))
    assert model.select is HanSelect.ALL and model.depth is None
    assert (plan.rate, plan.decay, plan.batch) == (1e-4, 0.0, 32)
    assert recipe.adam.schedule is han.HanSchedule.FIXED
    assert row_label("sortclevr", model) == "rn"
    assert recipe.paper["accuracy_relational"].value == 0.94
    assert plan.steps is not None and plan.steps * plan.batch == 36_000 * 8  # as many questions
