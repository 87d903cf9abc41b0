"""The recipes of Learn to Pay Attention: rows, figures, and which settings go together."""

import pytest

from overt.errors import BadInput
from overt.recipes import settings, tables
from overt.recipes.ltpa import recipe as ltpa
from overt.recipes.ltpa.recipe import (
    BESIDE,
    TABLE_1,
    Decision,
    Files,
    LtpaRecipe,
    Model,
    Net,
    Pictures,
    Score,
    changes,
    published,
)
from overt.recipes.recipe import Precision
from overt.recipes.tables import made

# Table 1 of the paper: errors in percent on CIFAR-10 and CIFAR-100.
STATED = {
    "vgg": (7.77, 30.62),
    "vgg-gap": (9.87, 31.77),
    "vgg-pan": (6.29, 24.35),
    "resnet-164": (6.03, 25.34),
    "att-dp": (6.14, 24.22),
    "att2-indep-dp": (5.91, 23.24),
    "att2-concat-dp": (5.86, 23.91),
    "att-pc": (5.67, 23.70),
    "att2-indep-pc": (5.36, 24.00),
    "att2-concat-pc": (5.23, 23.19),
    "att3-concat-pc": (6.34, 22.97),
}
MAKERS = {"cifar10": ltpa.ltpa_cifar10, "cifar100": ltpa.ltpa_cifar100}


def test_every_row_of_the_table_has_the_papers_number_beside_it() -> None:
    table = tables.find("ltpa-1")
    found = {row.label: made(row, []) for row in table.rows}
    assert len(found) == 2 * (len(STATED) + len(BESIDE)) == 28
    for label, errors in STATED.items():
        for data, error in zip(MAKERS, errors, strict=True):
            figure = found[f"{data}-{label}"].paper["error"]
            assert figure.value * 100 == pytest.approx(error) and not figure.higher_is_better
            assert figure.source == f"Learn to Pay Attention, Table 1, {TABLE_1[label].name}"
    for label in BESIDE:
        for data in MAKERS:
            assert "error" not in found[f"{data}-{label}"].paper
    assert table.columns[0] == "error"


def test_each_row_is_another_network() -> None:
    kinds = [(one.net, one.levels, one.score, one.decision) for one in ltpa.models().values()]
    assert len(set(kinds)) == len(kinds)
    for label, model in ltpa.models().items():
        recipe = settings.apply(ltpa.ltpa_cifar10(), changes(model))
        assert recipe.model == model, label


@pytest.mark.parametrize(
    ("sets", "name"),
    [
        (["model.score=dot"], "(VGG-att2)-concat-dp"),
        (["model.score=scaled-dot"], "(VGG-att2)-concat-dp"),
        (["model.levels=1", "model.decision=indep"], "(VGG-att)-pc"),
        (["model.width=0.5", "model.dropout=0"], "(VGG-att2)-concat-pc"),
        (["model.net=vgg", "model.levels=3"], "VGG"),
        (["model.score=additive"], None),
        (["model.decision=product"], None),
        (["model.levels=3", "model.score=dot"], None),
        (["model.score=uniform"], None),
        (["model.net=resnet-164-attention"], None),
    ],
)
def test_a_figure_stands_beside_its_own_network_alone(sets: list[str], name: str | None) -> None:
    recipe = settings.apply(ltpa.ltpa_cifar10(), sets)
    row = published(recipe.model)
    assert (row and row.name) == name
    assert ("error" in recipe.paper) is (name is not None)


def test_scenes_have_no_figure() -> None:
    assert ltpa.ltpa_scenes().paper == {} and published(ltpa.ltpa_scenes().model) is not None


def test_every_row_knows_its_label() -> None:
    for label, model in ltpa.models().items():
        assert ltpa.label_of(model) == label
    assert ltpa.label_of(Model(score=Score.ADDITIVE)) is None
    assert ltpa.label_of(Model(score=Score.DOT, width=0.5)) == "att2-concat-dp"


def test_the_sets_of_table_2() -> None:
    for make, error in ((ltpa.ltpa_svhn, 3.74), (ltpa.ltpa_cub, 26.80)):
        recipe = make()
        assert recipe.paper["error"].value * 100 == pytest.approx(error)
        assert recipe.judge.transfer == 0 and ltpa.label_of(recipe.model) == "att2-concat-pc"
        assert f"{error:.2f} %" in (make.__doc__ or "")
    assert ltpa.ltpa_svhn().train.rate == pytest.approx(ltpa.SHORT.rate / 10)


def test_the_control_is_the_headline_with_average_pooling() -> None:
    for levels in (2, 3):
        one, other = TABLE_1[f"att{levels}-concat-pc"].model, BESIDE[f"att{levels}-mean"]
        assert (one.net, one.levels, one.decision) == (other.net, other.levels, other.decision)
        assert (one.score, other.score) == (Score.PARAMETRISED, Score.UNIFORM)


def test_one_schedule_for_all_rows() -> None:
    recipes = [made(row, []) for row in tables.find("ltpa-1").rows]
    assert {(one.train, one.sgd) for one in recipes} == {(ltpa.SHORT, ltpa.Sgd())}
    plan, options = ltpa.SHORT, ltpa.Sgd()
    assert (plan.decay, options.momentum, options.nesterov) == (5e-4, 0.9, True)
    assert plan.precision is Precision.BF16 and plan.clip is None and plan.patience is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("data.name=cifar100", "ltpa-cifar10 is not about cifar100; ltpa-cifar100 is"),
        ("train.workers=2", "train.workers must be 0"),
        ("sgd.dampening=0.9", "sgd.nesterov=true needs a momentum, and sgd.dampening=0"),
        ("sgd.momentum=0", "needs a momentum"),
        ("model.levels=4", "from 1 to 3"),
        ("model.levels=0", "from 1 to 3"),
        ("model.score=cosine", "one of uniform, dot, scaled-dot, parametrised, additive"),
        ("model.inside_dropout=2", "from 0 to 1"),
        ("model.blocks=0", "at least 1"),
        ("judge.items=-1", "at least 0"),
        ("judge.restarts=0", "at least 1"),
        ("judge.photos=16", "from 32 to 512"),
    ],
)
def test_what_does_not_go_together_is_refused(change: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        settings.apply(ltpa.ltpa_cifar10(), [change])


def test_the_published_optimizer_can_be_asked_for() -> None:
    sets = ["sgd.nesterov=false", "sgd.dampening=0.9", "sgd.fall=halves", "train.rate=1"]
    recipe = settings.apply(ltpa.ltpa_cifar10(), sets)
    assert (recipe.sgd.dampening, recipe.sgd.nesterov, recipe.train.rate) == (0.9, False, 1.0)


def test_a_recipe_of_another_name_is_refused() -> None:
    with pytest.raises(ValueError, match="mine is not about cifar10"):
        LtpaRecipe("mine", "", Pictures(Files.CIFAR10))


def test_the_names_are_those_of_the_models() -> None:
    from overt.models.paying.attention import DECISIONS, SCORES

    assert [one.value for one in Score] == list(SCORES)
    assert [one.value for one in Decision] == list(DECISIONS)
    assert Model().net is Net.VGG_ATTENTION
