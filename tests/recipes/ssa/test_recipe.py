"""The values of self-supervision: which rows train twice, search, and have a paper's number."""

import pytest

from overt.errors import BadInput
from overt.recipes import find, recipes, settings
from overt.recipes.ssa.recipe import SsaRecipe, Target

NAMES = [name for name in recipes() if name.startswith("ssa-")]


def made(name: str, *sets: str) -> SsaRecipe:
    found = settings.apply(find(name), sets)
    assert isinstance(found, SsaRecipe)
    return found


def test_all_tasks_are_there() -> None:
    wanted = "trec minilm cifar10 easyvqa daquar yelp vqa scenes"
    assert [f"ssa-{name}" for name in wanted.split()] == NAMES


@pytest.mark.parametrize("target", list(Target))
def test_which_targets_are_searched_for(target: Target) -> None:
    found = made("ssa-trec", f"supervise.target={target.value}")
    assert found.taught is (target is not Target.NONE)
    assert found.searched is (target not in (Target.NONE, Target.GRADCAM, Target.TRUTH))


def test_nothing_taught_from_the_baseline_is_trained_twice() -> None:
    """The control for a second training that starts from the first."""
    found = made("ssa-trec", "supervise.target=none", "supervise.start=baseline")
    assert found.taught and not found.searched


def test_only_the_papers_rows_have_its_numbers() -> None:
    assert made("ssa-trec").paper["accuracy"].value == pytest.approx(0.8491)
    assert made("ssa-trec", "supervise.target=none").paper["accuracy"].value == pytest.approx(0.812)
    assert made("ssa-cifar10", "supervise.loss=mse").paper["accuracy"].value == pytest.approx(
        0.6987
    )
    for sets in (["supervise.target=shuffled"], ["supervise.loss=kl"]):
        assert not made("ssa-trec", *sets).paper
    assert not made("ssa-minilm").paper and not made("ssa-scenes").paper


def test_values_that_do_not_fit_are_refused() -> None:
    with pytest.raises(BadInput, match="look at a picture and at words"):
        made("ssa-trec", "supervise.over=both")
    with pytest.raises(BadInput, match="ssa-trec is about trec6"):
        made("ssa-trec", "data.name=yelp_hat")
    with pytest.raises(BadInput, match=r"supervise\.target takes one of none, surrogate, shuffled"):
        made("ssa-trec", "supervise.target=rubbish")
