"""Recipes of the aligned captioner as plain values."""

import pytest

from overt.errors import BadInput
from overt.recipes import find, settings
from overt.recipes.a2 import recipe as a2
from overt.recipes.a2.recipe import Align, Critic, Fuse, Masks, Preset

MAKERS = (a2.a2_scenes, a2.a2_flickr8k, a2.a2_flickr30k, a2.a2_coco)


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make().name)
def test_settings_lead_back_to_the_recipe(make):
    recipe = make()
    assert find(recipe.name) == recipe
    assert settings.restore(make(), settings.to_json(recipe)) == recipe


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make().name)
def test_every_row_is_another_alignment_of_the_recipe(make):
    found = {label: settings.apply(make(), changes) for label, changes in a2.rows().items()}
    assert len({recipe.align for recipe in found.values()}) == len(found)
    assert found["none"].align.fuse is Fuse.NONE
    assert found["gate-free"].align.masks is Masks.FREE
    assert found["gate-lu2021"].align == Align(Fuse.GATE, Preset.LU2021, penalty=0.03)
    critics = [settings.apply(make(), a2.critical(label, 3)) for label in a2.FUSIONS]
    assert all(recipe.critic.epochs == 3 for recipe in critics)


def test_only_masks_that_learn_by_harm_disturb():
    assert [m for m in Masks if Align(masks=m).disturbs] == [Masks.LEARNED, Masks.SHUFFLED]
    assert not Align(Fuse.NONE).disturbs


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("align.fuse=none", "align.masks=random"), "leave align.masks alone"),
        (("align.preset=lu2021", "align.fuse=max"), "say align.fuse=gate"),
        (("critic.draws=1", "critic.baseline=others"), "critic.baseline=greedy"),
        (("data.name=coco_captions",), "a2-flickr8k is about flickr8k"),
        (("align.fuse=gates",), "did you mean gate"),
    ],
)
def test_values_that_do_not_go_together_are_refused(change, sentence):
    with pytest.raises(BadInput, match=sentence):
        settings.apply(a2.a2_flickr8k(), change)


def test_figures_go_with_the_row():
    row = settings.apply(a2.a2_coco(), a2.critical("gate", 5))
    assert row.paper["cider_d"].value == pytest.approx(1.339)
    assert not settings.apply(a2.a2_coco(), a2.rows()["gate-random"]).paper
    assert not a2.a2_scenes().paper


def test_one_draw_has_a_greedy_baseline():
    assert Critic(draws=1).draws == 1
