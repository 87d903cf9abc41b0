"""Recipes of the aligned captioner: rows, settings that conflict, published numbers."""

import pytest

from overt.errors import UserError
from overt.experiments import settings
from overt.papers.a2 import config as a2
from overt.papers.a2.config import A2Align, A2Fusion, A2MaskSource, A2Preset


@pytest.mark.parametrize("make", a2.RECIPES, ids=lambda make: make().name)
def test_each_row_has_a_different_alignment(make):
    found = {label: settings.apply(make(), changes) for label, changes in a2.table_rows().items()}
    assert len({recipe.align for recipe in found.values()}) == len(found)
    assert found["none"].align.fuse is A2Fusion.NONE
    assert found["gate-free"].align.masks is A2MaskSource.FREE
    assert found["gate-lu2021"].align == A2Align(A2Fusion.GATE, A2Preset.LU2021, penalty=0.03)
    critics = [settings.apply(make(), a2.with_critic(label, 3)) for label in a2.FUSIONS]
    assert all(recipe.critic.epochs == 3 for recipe in critics)


def test_only_learned_and_shuffled_masks_perturb():
    assert [m for m in A2MaskSource if A2Align(masks=m).perturbs] == [
        A2MaskSource.LEARNED,
        A2MaskSource.SHUFFLED,
    ]
    assert not A2Align(A2Fusion.NONE).perturbs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("align.fuse=none", "align.masks=random"), r"align\.masks.*learned"),
        (("align.preset=lu2021", "align.fuse=max"), r"align\.fuse=gate"),
        (("critic.draws=1", "critic.baseline=others"), "critic.baseline=greedy"),
        (("data.name=coco_captions",), "a2-flickr8k .*flickr8k"),
        (("align.fuse=gates",), "mean gate"),
    ],
)
def test_conflicting_settings_are_rejected(change, message):
    with pytest.raises(UserError, match=message):
        settings.apply(a2.a2_flickr8k(), change)


def test_published_numbers_match_the_row():
    row = settings.apply(a2.a2_coco(), a2.with_critic("gate", 5))
    assert row.paper["cider_d"].value == pytest.approx(1.339)
    assert not settings.apply(a2.a2_coco(), a2.table_rows()["gate-random"]).paper
    assert not a2.a2_scenes().paper
