"""Baseline recipes: their datasets, published values and settings."""

import pytest

from overt.data import catalog
from overt.errors import UserError
from overt.experiments import baseline_recipes, settings
from overt.experiments.baseline_recipes import (
    RECIPE_OF_DATASET,
    BaselineData,
    BaselineDataset,
    BaselineRecipe,
    TextBaselineModel,
)
from overt.papers.catalog import find_recipe

MAKERS = (
    baseline_recipes.cifar10_cnn,
    baseline_recipes.cifar100_cnn,
    baseline_recipes.trec_attention,
    baseline_recipes.easyvqa_soft,
)


def test_every_dataset_has_a_recipe() -> None:
    made = {make().data.name: make().name for make in MAKERS}
    assert made == RECIPE_OF_DATASET and set(made) == set(BaselineDataset)
    for name in BaselineDataset:
        assert catalog.find_dataset(name).name == name


def test_published_values_match_the_paper() -> None:
    """Values of the baselines in Tables 1 and 2 of Self Supervision for Attention Networks."""
    ten, hundred, trec, easy = (make() for make in MAKERS)
    assert ten.paper["accuracy"].value == 0.6959 and "Table 2" in ten.paper["accuracy"].source
    assert trec.paper["accuracy"].value == 0.8120 and "Table 1" in trec.paper["accuracy"].source
    assert hundred.paper == easy.paper == {}
    assert all(one.higher_is_better for make in MAKERS for one in make().paper.values())
    assert isinstance(trec.model, TextBaselineModel)


@pytest.mark.parametrize("name", list(RECIPE_OF_DATASET.values()))
@pytest.mark.parametrize("data", list(BaselineDataset))
def test_a_recipe_accepts_only_its_own_dataset(name: str, data: BaselineDataset) -> None:
    recipe = find_recipe(name)
    if RECIPE_OF_DATASET[data] == name:
        assert settings.apply(recipe, [f"data.name={data}"]) == recipe
    else:
        with pytest.raises(UserError, match=f"{data} .*{RECIPE_OF_DATASET[data]}.* {name}"):
            settings.apply(recipe, [f"data.name={data}"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data.name=daquar", "cifar10, .*easyvqa"),
        ("model.dropout=2", "from 0 to 1"),
        ("model.hops=0", "from 1 to 1024"),
        ("model.penalty=-1", "at least 0"),
    ],
)
def test_settings_out_of_range_raise(change: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        settings.apply(baseline_recipes.trec_attention(), [change])


def test_a_recipe_with_a_wrong_name_raises() -> None:
    with pytest.raises(ValueError, match="cifar10-cnn.* mine"):
        BaselineRecipe("mine", "", BaselineData(BaselineDataset.CIFAR10))
