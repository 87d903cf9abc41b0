"""The recipes of hard attention: rows, figures, and which settings go together."""

from collections.abc import Callable

import pytest

from overt.errors import BadInput
from overt.recipes import settings, tables
from overt.recipes.han import recipe as han
from overt.recipes.han.recipe import (
    COUNTED,
    Aggregate,
    Eye,
    HanRecipe,
    Model,
    Select,
    Soft,
    label_of,
)
from overt.recipes.tables import made

MAKERS: dict[str, Callable[[], HanRecipe]] = {
    "sortclevr": han.han_sortclevr,
    "scenes": han.han_scenes,
    "easyvqa": han.han_easyvqa,
    "daquar": han.han_daquar,
    "vqacp2": han.han_vqacp,
    "clevr": han.han_clevr,
}


@pytest.mark.parametrize("data", list(MAKERS))
def test_each_row_is_another_network_and_knows_its_label(data: str) -> None:
    rows = han.rows_of(data)
    for label, model in rows.items():
        recipe = settings.apply(MAKERS[data](), han.changes(model))
        assert recipe.set_name == data and label_of(data, recipe.model) == label
    assert len({han._kind(data, model) for model in rows.values()}) == len(rows)


def test_the_rows_of_the_paper_are_what_it_says() -> None:
    rows = han.rows_of("vqacp2")
    for k in (16, 32, 48, 64):
        model = rows[f"han-sum-{k}"]
        assert (model.select, model.cells, model.aggregate) == (Select.TOP, k, Aggregate.SUM)
    assert rows["sum"].select is rows["pairwise"].select is Select.ALL
    assert rows["adahan-pairwise"].select is Select.ABOVE_UNIFORM
    assert rows["han-sum-32-depth0"].depth == 0 and rows["han-sum-32"].depth == 2
    assert rows["simple-han"].eye is rows["simple-san"].eye is Eye.STRIDED
    assert rows["simple-han"].share == 0.16
    assert rows["san2-pos"].soft is Soft.SAN2_POS


def test_a_quarter_of_the_cells() -> None:
    """25 % of 5 x 5 cells, to the nearest, and of 8 x 8; of finer grids too."""
    for data, side in (("sortclevr", 75), ("clevr", 128)):
        rows = han.rows_of(data)
        for label, model in rows.items():
            pixels = 8 if label == "han-rn-fine" else 16
            assert model.cells == round((-(-side // pixels)) ** 2 / 4), label
        assert rows["rn"].depth is None and rows["rn-aligned"].depth == 2
        assert han._kind(data, MAKERS[data]().model) == han._kind(data, rows["han-rn"])


def test_on_64_cells_64_are_all() -> None:
    for data in ("scenes", "easyvqa"):
        assert "han-sum-64" not in han.rows_of(data)
    assert "han-sum-64" in han.rows_of("daquar")


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
def test_a_figure_stands_beside_its_own_row_alone(sets: list[str], label: str | None) -> None:
    recipe = settings.apply(han.han_vqacp(), sets)
    assert label_of("vqacp2", recipe.model) == label
    stated = label is not None and not label.startswith("blind")
    assert ("accuracy" in recipe.paper) is stated
    elsewhere = settings.apply(han.han_daquar(), sets)
    assert dict(elsewhere.paper) == {}


@pytest.mark.parametrize(
    ("make", "sets", "said"),
    [
        (han.han_scenes, ["model.eye=cached"], "eye=cached is for photos"),
        (han.han_easyvqa, ["model.eye=cached"], "eye=cached is for photos"),
        (han.han_daquar, ["data.name=easyvqa"], "han-daquar is about daquar"),
        (han.han_scenes, ["model.depth=none"], "depth=none needs model.aggregate=relation"),
        (
            han.han_sortclevr,
            ["model.depth=none", "model.select=blind"],
            "depth=none chooses by the image alone",
        ),
        (han.han_scenes, ["model.select=topp"], "model.select"),
        (han.han_scenes, ["model.share=0"], "model.share"),
        (han.han_scenes, ["model.cells=0"], "model.cells"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(
    make: Callable[[], HanRecipe], sets: list[str], said: str
) -> None:
    with pytest.raises(BadInput, match=said):
        settings.apply(make(), sets)


def test_every_way_to_choose_is_a_row_somewhere() -> None:
    chosen = {model.select for data in MAKERS for model in han.rows_of(data).values()}
    assert chosen == set(Select) and set(COUNTED) < chosen


def test_rows_of_tables_are_those_rows() -> None:
    for name, data in (
        ("han-1", "vqacp2"),
        ("han-scenes", "scenes"),
        ("han-sortclevr", "sortclevr"),
    ):
        for row in tables.find(name).rows:
            recipe = made(row, [])
            assert isinstance(recipe, HanRecipe)
            assert label_of(data, recipe.model) == row.label


def test_the_default_is_no_toy() -> None:
    model = han.han_vqacp().model
    assert (model.joint, model.state, model.hidden) == (2048, 512, (1024, 2048))
    assert model == Model() and han.han_vqacp().data.answers == 1000
