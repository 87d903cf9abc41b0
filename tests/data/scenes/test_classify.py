from collections import Counter

import numpy as np
import pytest
import torch

from overt.data.scenes.classify import (
    TEXTURED,
    DominantScenes,
    class_of,
    dominant,
    dominant_scene,
)
from overt.data.scenes.render import render
from overt.data.scenes.world import NEUTRAL, SHAPES, TEXTURES, VALUES, Scene, changed, without
from overt.errors import BadInput

SCENES = [dominant_scene("train", 0, index) for index in range(48)]
DATA = DominantScenes("val", 0, 24)


def test_the_largest_thing_stands_alone_and_on_top():
    for shown in SCENES:
        i = dominant(shown.things)
        assert i == len(shown.things) - 1
        thing = shown.things[i]
        others = shown.things[:i]
        assert 3 <= len(others) <= 6
        assert all(other.radius < thing.radius and other.shape != thing.shape for other in others)
        alone = Scene("train", 0, 0, (thing,), shown.background)
        np.testing.assert_array_equal(render(alone, 64).masks[0], render(shown, 64).masks[i])


def test_interventions_on_the_largest_thing_change_the_class_and_no_other_does():
    for shown in SCENES:
        i, label = dominant(shown.things), class_of(shown)
        assert SHAPES[label] == shown.things[i].shape
        for shape in SHAPES:
            assert class_of(changed(shown, i, shape=shape)) == SHAPES.index(shape)
        assert class_of(changed(shown, i, shape=NEUTRAL["shape"])) is None
        for color in VALUES["color"]:
            assert class_of(changed(shown, i, color=color)) == label
        for j in range(len(shown.things)):
            if j == i:
                continue
            assert class_of(without(shown, j)) == label
            for name in ("shape", "color", "texture"):
                for value in (*VALUES[name], NEUTRAL[name]):
                    assert class_of(changed(shown, j, **{name: value})) == label


def test_the_mask_holds_the_pixels_a_change_of_the_deciding_thing_changes():
    for index in range(8):
        shown, mask = DATA.scene(index), DATA.mask(index).numpy()
        i = dominant(shown.things)
        before = render(shown, 64).image.astype(int)
        after = render(changed(shown, i, color=NEUTRAL["color"], texture="solid"), 64).image
        moved = (before != after).any(axis=-1)
        grown = mask
        for axis in (0, 1):
            grown = grown | np.roll(grown, 1, axis) | np.roll(grown, -1, axis)
        assert (moved & ~grown).sum() <= 2  # the soft edge is one pixel wide, but at a sharp tip
        assert (moved & mask).sum() >= 0.95 * mask.sum()


def test_textures_can_be_part_of_the_class():
    found = [dominant_scene("train", 0, index, TEXTURED) for index in range(24)]
    labels = [class_of(shown, TEXTURED) for shown in found]
    assert sorted(labels) == sorted([*range(12)] * 2)
    for shown, label in zip(found, labels, strict=True):
        i = dominant(shown.things)
        texture, shape = TEXTURED[label].split()
        assert (shown.things[i].texture, shown.things[i].shape) == (texture, shape)
        other = TEXTURES[1 - TEXTURES.index(texture)]
        assert class_of(changed(shown, i, texture=other), TEXTURED) == TEXTURED.index(
            f"{other} {shape}"
        )


def test_classes_are_even_and_colours_tell_nothing():
    assert set(Counter(class_of(shown) for shown in SCENES).values()) == {8}
    many = [dominant_scene("test", 2, index) for index in range(240)]
    colors = Counter((class_of(s), s.things[-1].color) for s in many)
    assert max(colors.values()) < 16  # 5 of each pair are to be expected


def test_a_batch():
    batch = DATA.batch([4, 7])
    batch.target.check()
    assert batch.images.dtype == torch.uint8 and batch.images.shape == (2, 3, 64, 64)
    assert batch.labels.tolist() == [class_of(DATA.scene(n)) for n in (4, 7)]
    for row, index in enumerate((4, 7)):
        blocks = DATA.mask(index).float().reshape(8, 8, 8, 8).mean(dim=(1, 3)).flatten()
        torch.testing.assert_close(batch.target.weights[row, 0, 0, 0], blocks / blocks.sum())
    assert batch.ids == ("scenes-dominant-val-0-000004", "scenes-dominant-val-0-000007")
    assert batch.target.keys.find("image").shape == (8, 8)
    again = DominantScenes("val", 0, 24).batch([7, 4])
    assert torch.equal(again.images.flip(0), batch.images)


def test_settings():
    kinds = [
        DATA,
        DominantScenes("test", 0, 24),
        DominantScenes("val", 0, 24, size=32),
        DominantScenes("val", 0, 24, cells=(4, 4)),
        DominantScenes("val", 0, 24, classes=SHAPES[:2]),
    ]
    assert len({data.digest() for data in kinds}) == 5
    assert set(kinds[-1].batch(range(24)).labels.tolist()) == {0, 1}
    for wrong in (("circle",), ("circle", "circle"), ("circle", "dog"), ("solid", "striped"), ()):
        with pytest.raises(BadInput, match="classes are two or more"):
            DominantScenes("val", 0, 24, classes=wrong)
    with pytest.raises(BadInput, match="does not fit"):
        DominantScenes("val", 0, 24, cells=(65, 8))


def test_one_thing_must_dominate():
    thing = SCENES[0].things[-1]
    with pytest.raises(BadInput, match="2 things are the largest"):
        dominant((thing, thing))
