"""Recipes of Learn to Pay Attention: rows, published numbers, and settings that conflict."""

from dataclasses import replace

import pytest

from overt.errors import UserError
from overt.experiments import settings
from overt.experiments.recipe import Precision
from overt.experiments.table_runner import row_recipe
from overt.papers import catalog
from overt.papers.ltpa import config as ltpa
from overt.papers.ltpa.config import (
    EXTRA_ROWS,
    TABLE_1,
    LtpaDataset,
    LtpaDecision,
    LtpaImages,
    LtpaModel,
    LtpaNetwork,
    LtpaRecipe,
    LtpaScore,
    model_changes,
    table_1_row,
)

# Table 1 of the paper: errors in percent on CIFAR-10 and CIFAR-100.
PUBLISHED = {
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


def test_each_row_of_table_1_has_its_published_error() -> None:
    table = catalog.find_table("ltpa-1")
    found = {row.label: row_recipe(row, []) for row in table.rows}
    assert len(found) == 2 * (len(PUBLISHED) + len(EXTRA_ROWS)) == 28
    for label, errors in PUBLISHED.items():
        for data, error in zip(MAKERS, errors, strict=True):
            figure = found[f"{data}-{label}"].paper["error"]
            assert figure.value * 100 == pytest.approx(error) and not figure.higher_is_better
            assert figure.source == f"Learn to Pay Attention, Table 1, {TABLE_1[label].name}"
    for label in EXTRA_ROWS:
        for data in MAKERS:
            assert "error" not in found[f"{data}-{label}"].paper
    assert table.columns[0] == "error"


def test_each_row_is_a_different_network() -> None:
    kinds = [(one.net, one.levels, one.score, one.decision) for one in ltpa.table_models().values()]
    assert len(set(kinds)) == len(kinds)
    for label, model in ltpa.table_models().items():
        recipe = settings.apply(ltpa.ltpa_cifar10(), model_changes(model))
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
def test_published_errors_belong_to_their_network_only(sets: list[str], name: str | None) -> None:
    recipe = settings.apply(ltpa.ltpa_cifar10(), sets)
    row = table_1_row(recipe.model)
    assert (row and row.name) == name
    assert ("error" in recipe.paper) is (name is not None)


def test_scenes_have_no_published_number() -> None:
    assert ltpa.ltpa_scenes().paper == {} and table_1_row(ltpa.ltpa_scenes().model) is not None


def test_row_label_finds_the_label_of_each_row() -> None:
    for label, model in ltpa.table_models().items():
        assert ltpa.row_label(model) == label
    assert ltpa.row_label(LtpaModel(score=LtpaScore.ADDITIVE)) is None
    assert ltpa.row_label(LtpaModel(score=LtpaScore.DOT, width=0.5)) == "att2-concat-dp"


def test_recipes_of_table_2_have_its_errors() -> None:
    for make, error in ((ltpa.ltpa_svhn, 3.74), (ltpa.ltpa_cub, 26.80)):
        recipe = make()
        assert recipe.paper["error"].value * 100 == pytest.approx(error)
        assert recipe.judge.transfer == 0 and ltpa.row_label(recipe.model) == "att2-concat-pc"
        assert f"{error:.2f} %" in (make.__doc__ or "")
    assert ltpa.ltpa_svhn().train.rate == pytest.approx(ltpa.SHORT.rate / 10)


def test_the_control_is_the_main_network_with_uniform_scores() -> None:
    for levels in (2, 3):
        one, other = TABLE_1[f"att{levels}-concat-pc"].model, EXTRA_ROWS[f"att{levels}-mean"]
        assert (one.net, one.levels, one.decision) == (other.net, other.levels, other.decision)
        assert (one.score, other.score) == (LtpaScore.PARAMETRISED, LtpaScore.UNIFORM)


def test_all_rows_have_the_same_schedule() -> None:
    recipes = [row_recipe(row, []) for row in catalog.find_table("ltpa-1").rows]
    assert {(one.train, one.sgd) for one in recipes} == {(ltpa.SHORT, ltpa.LtpaSgd())}
    plan, options = ltpa.SHORT, ltpa.LtpaSgd()
    assert (plan.decay, options.momentum, options.nesterov) == (5e-4, 0.9, True)
    assert plan.precision is Precision.BF16 and plan.clip is None and plan.patience is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data.name=cifar100", "ltpa-cifar10 .*: use ltpa-cifar100"),
        ("train.workers=2", r"train\.workers.* 0"),
        ("sgd.dampening=0.9", r"sgd\.dampening=0"),
        ("sgd.momentum=0", r"sgd\.momentum > 0"),
        ("model.levels=4", "from 1 to 3"),
        ("model.levels=0", "from 1 to 3"),
        ("model.score=cosine", "uniform, dot, .*, additive"),
        ("model.inside_dropout=2", "from 0 to 1"),
        ("model.blocks=0", "at least 1"),
        ("judge.items=-1", "at least 0"),
        ("judge.restarts=0", "at least 1"),
        ("judge.photos=16", "from 32 to 512"),
        ("model.gradient=median", "sum, mean"),
    ],
)
def test_conflicting_settings_are_rejected(change: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        settings.apply(ltpa.ltpa_cifar10(), [change])


def test_the_published_optimizer_can_be_set() -> None:
    sets = ["sgd.nesterov=false", "sgd.dampening=0.9", "sgd.fall=halves", "train.rate=1"]
    recipe = settings.apply(ltpa.ltpa_cifar10(), sets)
    assert (recipe.sgd.dampening, recipe.sgd.nesterov, recipe.train.rate) == (0.9, False, 1.0)


def test_a_recipe_with_another_name_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"mine .*ltpa-cifar10"):
        LtpaRecipe("mine", "", LtpaImages(LtpaDataset.CIFAR10))


def test_setting_names_equal_the_registered_names() -> None:
    from overt.nn.learned_attention.attention import CLASSIFIERS, SCORES

    assert [one.value for one in LtpaScore] == list(SCORES)
    assert [one.value for one in LtpaDecision] == list(CLASSIFIERS)
    assert LtpaModel().net is LtpaNetwork.VGG_ATTENTION


def test_mean_gradients_need_a_vgg_with_attention() -> None:
    for net in ("vgg", "resnet-164-attention"):
        with pytest.raises(UserError, match="vgg-attention"):
            settings.apply(ltpa.ltpa_cifar10(), ["model.gradient=mean", f"model.net={net}"])
    recipe = settings.apply(ltpa.ltpa_cifar10(), ["model.gradient=mean"])
    assert table_1_row(recipe.model) is not None  # the paper's own code


def test_parts_differ_from_each_other_in_one_thing() -> None:
    main = ltpa.PARTS["att2-concat-pc"]
    for label, model in ltpa.PARTS.items():
        assert replace(model, score=main.score) == main, label
    assert len({model.score for model in ltpa.PARTS.values()}) == len(ltpa.PARTS)
    coded = ltpa.AS_IN_THE_CODE
    assert replace(coded["att2-concat-pc-mean-gradient"], gradient=main.gradient) == main
    dropout = coded["att2-concat-pc-dropout"]
    assert (dropout.first_dropout, dropout.inside_dropout, dropout.dropout) == (0.3, 0.4, 0.5)
    assert coded["att2-concat-pc-published"] == replace(dropout, gradient=ltpa.LtpaGradient.MEAN)
    for model in (*ltpa.PARTS.values(), *coded.values()):
        recipe = settings.apply(ltpa.ltpa_cifar100(), model_changes(model))
        assert recipe.model == model


def test_the_published_training_is_that_of_the_appendix() -> None:
    recipe = settings.apply(ltpa.ltpa_cifar100(), ltpa.PUBLISHED_TRAINING)
    plan, options = recipe.train, recipe.sgd
    assert (plan.epochs, plan.batch, plan.rate, plan.warmup) == (300, 128, 1.0, 0.0)
    assert (options.dampening, options.nesterov) == (0.9, False)
    assert options.fall is ltpa.LtpaSchedule.HALVES and plan.decay == 5e-4
