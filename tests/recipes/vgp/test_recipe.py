"""The recipes and rows of grounded supervision as plain values."""

import pytest

from overt.errors import BadInput
from overt.recipes import settings
from overt.recipes.vgp import recipe as vgp
from overt.recipes.vgp.recipe import Way


def test_rows_are_one_change_away_from_direct_supervision() -> None:
    ways = set()
    for label, changes in vgp.ROWS.items():
        made = settings.apply(vgp.vgp_scenes(), changes)
        plan = made.supervise
        ways.add(plan.way)
        assert (plan.way.value == label) is not label.startswith("direct-")
        assert made.train == vgp.vgp_scenes().train and made.data == vgp.vgp_scenes().data
    assert ways == set(Way)


def test_only_rows_of_the_paper_on_scenes_state_its_numbers() -> None:
    stated = {
        label
        for label, changes in vgp.ROWS.items()
        if settings.apply(vgp.vgp_scenes(), changes).paper
    }
    assert stated == {"original", "none", "indirect", "direct", "semi-direct"}
    assert not vgp.vgp_entities().paper


@pytest.mark.parametrize(
    ("sets", "told"),
    [
        (["supervise.way=none", "supervise.target=random"], "no target to replace"),
        (["supervise.way=indirect", "supervise.target=uniform"], "truth or shuffled"),
        (["model.begin=minilm"], "for photos"),
        (["against.keep=ewc"], "something to keep"),
    ],
    ids=["placebo", "indirect", "minilm", "keep"],
)
def test_what_makes_no_sense_is_refused_in_a_sentence(sets: list[str], told: str) -> None:
    with pytest.raises(BadInput, match=told):
        settings.apply(vgp.vgp_scenes(), sets)


def test_the_width_is_whole_for_every_head() -> None:
    for width in (0.05, 0.1, 0.3, 1.0):
        made = settings.apply(vgp.vgp_scenes(), [f"model.width={width}", "model.heads=3"])
        assert made.wide % 3 == 0 and made.wide >= 3
