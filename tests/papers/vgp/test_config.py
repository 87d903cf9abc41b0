"""Recipes and rows of grounded supervision."""

import pytest

from overt.errors import UserError
from overt.experiments import settings
from overt.papers.vgp import config as vgp
from overt.papers.vgp.config import VgpMethod


def test_rows_differ_from_direct_supervision_by_one_change() -> None:
    ways = set()
    for label, changes in vgp.ROWS.items():
        recipe = settings.apply(vgp.vgp_scenes(), changes)
        plan = recipe.supervise
        ways.add(plan.way)
        assert (plan.way.value == label) is not label.startswith("direct-")
        assert recipe.train == vgp.vgp_scenes().train and recipe.data == vgp.vgp_scenes().data
    assert ways == set(VgpMethod)


def test_rows_of_matchers_and_of_the_published_code() -> None:
    for label, changes in vgp.MATCHER_ROWS.items():
        plan = settings.apply(vgp.vgp_scenes(), changes).supervise
        assert label == f"{plan.way.value}-{plan.matcher.value}"
    for changes in vgp.PUBLISHED_CODE_ROWS.values():
        plan = settings.apply(vgp.vgp_entities(), changes).supervise
        assert plan.way is VgpMethod.DIRECT and plan != vgp.vgp_entities().supervise


def test_pretrained_rows_share_all_settings_but_supervision_and_regularization() -> None:
    for make in (vgp.vgp_scenes_pretrained, vgp.vgp_entities_pretrained):
        own = make()
        assert own.is_pretrained and not vgp.vgp_scenes().is_pretrained
        for changes in vgp.PRETRAINED_ROWS.values():
            found = settings.apply(own, changes)
            assert (found.first, found.data, found.model) == (own.first, own.data, own.model)
            assert found.train == own.train and found.after == own.after
    assert len(vgp.PRETRAINED_ROWS) == 11
    with pytest.raises(UserError, match=r"model\.begin=minilm"):
        settings.apply(vgp.vgp_entities_pretrained(), ["model.begin=random"])


def test_only_rows_of_the_paper_have_published_numbers() -> None:
    published = {
        label
        for label, changes in vgp.ROWS.items()
        if settings.apply(vgp.vgp_scenes(), changes).paper
    }
    assert published == {"original", "none", "indirect", "direct", "semi-direct"}
    assert not vgp.vgp_entities().paper


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["supervise.way=none", "supervise.target=random"], r"target.*truth"),
        (["supervise.way=indirect", "supervise.target=uniform"], "truth.*shuffled"),
        (["supervise.matcher=mlp"], r"matcher.*linear"),
        (["supervise.dropped=true"], r"model\.dropout"),
        (["supervise.way=any-head", "supervise.region_loss=bce"], r"region_loss"),
        (["model.begin=minilm"], "needs photos"),
        (["against.keep=ewc"], r"first\.epochs"),
    ],
    ids=["placebo", "indirect", "matcher", "dropped", "region loss", "minilm", "keep"],
)
def test_conflicting_settings_are_rejected(sets: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        settings.apply(vgp.vgp_scenes(), sets)


def test_the_hidden_width_is_a_multiple_of_the_heads() -> None:
    for width in (0.05, 0.1, 0.3, 1.0):
        recipe = settings.apply(vgp.vgp_scenes(), [f"model.width={width}", "model.heads=3"])
        assert recipe.hidden_width % 3 == 0 and recipe.hidden_width >= 3
