"""Settings of self-supervision: rows with two trainings, searches, and published numbers."""

import pytest

from overt.errors import UserError
from overt.experiments import settings
from overt.papers.catalog import find_recipe
from overt.papers.ssa.config import SsaRecipe, SsaTarget


def make_recipe(name: str, *sets: str) -> SsaRecipe:
    found = settings.apply(find_recipe(name), sets)
    assert isinstance(found, SsaRecipe)
    return found


@pytest.mark.parametrize("target", list(SsaTarget))
def test_which_targets_need_a_search(target: SsaTarget) -> None:
    found = make_recipe("ssa-trec", f"supervise.target={target.value}")
    unsearched = (SsaTarget.NONE, SsaTarget.GRADCAM, SsaTarget.TRUTH)
    assert found.supervised is (target is not SsaTarget.NONE)
    assert found.needs_search is (target not in unsearched)


def test_the_control_without_target_from_the_baseline_trains_twice() -> None:
    """This is the control for a second training that starts from the first."""
    found = make_recipe("ssa-trec", "supervise.target=none", "supervise.start=baseline")
    assert found.supervised and not found.needs_search


def test_only_rows_of_the_paper_have_published_numbers() -> None:
    assert make_recipe("ssa-trec").paper["accuracy"].value == pytest.approx(0.8491)
    assert make_recipe("ssa-trec", "supervise.target=none").paper[
        "accuracy"
    ].value == pytest.approx(0.812)
    assert make_recipe("ssa-cifar10", "supervise.loss=mse").paper[
        "accuracy"
    ].value == pytest.approx(0.6987)
    for sets in (["supervise.target=shuffled"], ["supervise.loss=kl"]):
        assert not make_recipe("ssa-trec", *sets).paper
    for name in ("ssa-minilm", "ssa-scenes", "ssa-shapes"):
        assert not make_recipe(name).paper


def test_invalid_values_are_rejected() -> None:
    with pytest.raises(UserError, match=r"supervise\.over"):
        make_recipe("ssa-trec", "supervise.over=both")
    with pytest.raises(UserError, match=r"ssa-trec .*trec6"):
        make_recipe("ssa-trec", "data.name=yelp_hat")
    with pytest.raises(UserError, match=r"supervise\.target.*none, surrogate, shuffled"):
        make_recipe("ssa-trec", "supervise.target=rubbish")
