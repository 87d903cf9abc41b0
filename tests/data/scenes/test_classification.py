from collections import Counter

import numpy as np
import pytest
import torch

from overt.data.scenes.classification import (
    TEXTURED,
    DominantScenes,
    dominant_class,
    dominant_scene,
    dominant_thing,
)
from overt.data.scenes.render import render
from overt.data.scenes.world import (
    NEUTRAL,
    SHAPES,
    TEXTURES,
    VALUES,
    Scene,
    change_thing,
    remove_thing,
)
from overt.errors import UserError

SCENES = [dominant_scene("train", 0, index) for index in range(48)]
DATA = DominantScenes("val", 0, 24)


def test_dominant_object_is_largest_and_not_covered():
    for shown in SCENES:
        i = dominant_thing(shown.things)
        assert i == len(shown.things) - 1
        thing = shown.things[i]
        others = shown.things[:i]
        assert 3 <= len(others) <= 6
        assert all(other.radius < thing.radius and other.shape != thing.shape for other in others)
        alone = Scene("train", 0, 0, (thing,), shown.background)
        np.testing.assert_array_equal(render(alone, 64).masks[0], render(shown, 64).masks[i])


def test_only_the_dominant_object_changes_the_class():
    for shown in SCENES:
        i, label = dominant_thing(shown.things), dominant_class(shown)
        assert SHAPES[label] == shown.things[i].shape
        for shape in SHAPES:
            assert dominant_class(change_thing(shown, i, shape=shape)) == SHAPES.index(shape)
        assert dominant_class(change_thing(shown, i, shape=NEUTRAL["shape"])) is None
        for color in VALUES["color"]:
            assert dominant_class(change_thing(shown, i, color=color)) == label
        for j in range(len(shown.things)):
            if j == i:
                continue
            assert dominant_class(remove_thing(shown, j)) == label
            for name in ("shape", "color", "texture"):
                for value in (*VALUES[name], NEUTRAL[name]):
                    assert dominant_class(change_thing(shown, j, **{name: value})) == label


def test_mask_contains_the_pixels_of_the_dominant_object():
    for index in range(8):
        shown, mask = DATA.scene(index), DATA.mask(index).numpy()
        i = dominant_thing(shown.things)
        before = render(shown, 64).image.astype(int)
        after = render(change_thing(shown, i, color=NEUTRAL["color"], texture="solid"), 64).image
        moved = (before != after).any(axis=-1)
        grown = mask
        for axis in (0, 1):
            grown = grown | np.roll(grown, 1, axis) | np.roll(grown, -1, axis)
        assert (moved & ~grown).sum() <= 2  # the soft edge is one pixel wide, except at a sharp tip
        assert (moved & mask).sum() >= 0.95 * mask.sum()


def test_textures_can_be_part_of_the_class():
    found = [dominant_scene("train", 0, index, TEXTURED) for index in range(24)]
    labels = [dominant_class(shown, TEXTURED) for shown in found]
    assert sorted(labels) == sorted([*range(12)] * 2)
    for shown, label in zip(found, labels, strict=True):
        i = dominant_thing(shown.things)
        texture, shape = TEXTURED[label].split()
        assert (shown.things[i].texture, shown.things[i].shape) == (texture, shape)
        other = TEXTURES[1 - TEXTURES.index(texture)]
        assert dominant_class(change_thing(shown, i, texture=other), TEXTURED) == TEXTURED.index(
            f"{other} {shape}"
        )


def test_classes_are_balanced_and_independent_of_the_color():
    assert set(Counter(dominant_class(shown) for shown in SCENES).values()) == {8}
    many = [dominant_scene("test", 2, index) for index in range(240)]
    colors = Counter((dominant_class(s), s.things[-1].color) for s in many)
    assert max(colors.values()) < 16  # 5 of each pair are expected


def test_batches_have_labels_targets_and_ids():
    batch = DATA.batch([4, 7])
    batch.target.check()
    assert batch.images.dtype == torch.uint8 and batch.images.shape == (2, 3, 64, 64)
    assert batch.labels.tolist() == [dominant_class(DATA.scene(n)) for n in (4, 7)]
    for row, index in enumerate((4, 7)):
        blocks = DATA.mask(index).float().reshape(8, 8, 8, 8).mean(dim=(1, 3)).flatten()
        torch.testing.assert_close(batch.target.weights[row, 0, 0, 0], blocks / blocks.sum())
        torch.testing.assert_close(batch.target.coverage[row, 0], blocks)
    assert batch.ids == ("scenes-dominant-val-0-000004", "scenes-dominant-val-0-000007")
    assert batch.target.keys.find("image").shape == (8, 8)


def test_classes_and_cells_are_checked():
    two = DominantScenes("val", 0, 24, classes=SHAPES[:2])
    assert set(two.batch(range(24)).labels.tolist()) == {0, 1}
    for wrong in (("circle",), ("circle", "circle"), ("circle", "dog"), ("solid", "striped"), ()):
        with pytest.raises(UserError, match="two or more"):
            DominantScenes("val", 0, 24, classes=wrong)
    with pytest.raises(UserError, match="does not fit"):
        DominantScenes("val", 0, 24, cells=(65, 8))


def test_two_largest_objects_raise():
    thing = SCENES[0].things[-1]
    with pytest.raises(UserError, match="found 2"):
        dominant_thing((thing, thing))
