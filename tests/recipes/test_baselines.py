"""The recipes on files: which data each reads, and that no figure stands beside other data."""

import pytest

from overt.data import sets
from overt.errors import BadInput
from overt.recipes import baselines, find, settings
from overt.recipes.baselines import RECIPES, BaselineRecipe, Data, Files, TextModel

MAKERS = (
    baselines.cifar10_cnn,
    baselines.cifar100_cnn,
    baselines.trec_attention,
    baselines.easyvqa_soft,
)


def test_every_data_set_has_its_recipe() -> None:
    made = {make().data.name: make().name for make in MAKERS}
    assert made == RECIPES and set(made) == set(Files)
    for name in Files:
        assert sets.find(name).name == name


def test_the_papers_figures() -> None:
    """Self Supervision for Attention Networks, the baselines of Tables 1 and 2."""
    ten, hundred, trec, easy = (make() for make in MAKERS)
    assert ten.paper["accuracy"].value == 0.6959 and "Table 2" in ten.paper["accuracy"].source
    assert trec.paper["accuracy"].value == 0.8120 and "Table 1" in trec.paper["accuracy"].source
    assert hundred.paper == easy.paper == {}
    assert all(one.higher_is_better for make in MAKERS for one in make().paper.values())
    assert isinstance(trec.model, TextModel)


@pytest.mark.parametrize("name", list(RECIPES.values()))
@pytest.mark.parametrize("data", list(Files))
def test_a_recipe_is_about_its_own_data_alone(name: str, data: Files) -> None:
    recipe = find(name)
    if RECIPES[data] == name:
        assert settings.apply(recipe, [f"data.name={data}"]) == recipe
    else:
        with pytest.raises(BadInput, match=f"{name} is not about {data}; {RECIPES[data]} is"):
            settings.apply(recipe, [f"data.name={data}"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("data.name=daquar", "one of cifar10, cifar100, trec6, easyvqa"),
        ("model.dropout=2", "from 0 to 1"),
        ("model.hops=0", "at least 1"),
        ("model.penalty=-1", "at least 0"),
    ],
)
def test_settings_out_of_range_are_refused(change: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        settings.apply(baselines.trec_attention(), [change])


def test_a_recipe_of_another_name_is_refused() -> None:
    with pytest.raises(ValueError, match="mine is not about cifar10"):
        BaselineRecipe("mine", "", Data(Files.CIFAR10))
