import hashlib
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from overt.data.scenes.balanced_questions import generate_scene
from overt.data.scenes.render import PAINT, mask_boxes, render, signed_distance
from overt.data.scenes.world import (
    COLORS,
    NEUTRAL,
    SHAPES,
    VALUES,
    Background,
    Scene,
    Thing,
    change_thing,
    random_scene,
    remove_thing,
)
from overt.errors import UserError

PLAIN = Background((90.0,) * 3, (90.0,) * 3, (0.0, 0.0, 0.0), 0.0, 0, ())


@pytest.fixture(scope="module")
def scenes():
    return [random_scene("train", 5, i) for i in range(40)] + [
        generate_scene("test", 5, i)[0] for i in range(40)
    ]


def single_scene(thing):
    return Scene("train", 0, 0, (thing,), PLAIN)


def checksum():
    """Checksum of scenes, questions and pixels, which must not depend on the process."""
    digest = hashlib.sha256()
    for i in range(6):
        one, questions = generate_scene("val", 9, i)
        digest.update(
            repr((one, [(q.words, q.answer, sorted(q.evidence)) for q in questions])).encode()
        )
        for size in (64, 96):
            digest.update(render(one, size).image.tobytes())
    return digest.hexdigest()


def test_another_process_gives_the_same_pixels_and_questions():
    root = Path(__file__).parents[3]
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]; import test_render; print(test_render.checksum())"
    )
    folders = [str(Path(__file__).parent), str(root)]
    for seed in ("1", "77"):
        run = subprocess.run(
            [sys.executable, "-c", code, *folders],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert run.stdout.strip() == checksum()


def test_render_returns_image_masks_and_boxes(scenes):
    drawn = render(scenes[0], 80)
    count = len(scenes[0].things)
    assert drawn.image.shape == (80, 80, 3) and drawn.image.dtype == np.uint8
    assert drawn.masks.shape == (count, 80, 80) and drawn.masks.dtype == np.bool_
    assert drawn.boxes.shape == (count, 4) and drawn.boxes.dtype == np.float32
    assert (drawn.masks == (drawn.owners == np.arange(count)[:, None, None])).all()


@pytest.mark.parametrize("size", [64, 112])
def test_masks_are_disjoint_and_objects_mostly_visible(scenes, size):
    for one in scenes:
        masks = render(one, size).masks
        assert masks.sum(axis=0).max() == 1
        for thing, mask in zip(one.things, masks, strict=True):
            assert mask.sum() >= 0.55 * render(single_scene(thing), size).masks.sum()


def test_boxes_enclose_the_visible_pixels(scenes):
    for one in scenes[:10]:
        drawn = render(one, 64)
        for mask, box in zip(drawn.masks, drawn.boxes, strict=True):
            y, x = np.nonzero(mask)
            assert box.tolist() == [x.min(), y.min(), x.max() + 1, y.max() + 1]
    assert mask_boxes(np.zeros((1, 5, 5), bool)).tolist() == [[0, 0, 0, 0]]


def test_large_and_small_renderings_agree(scenes):
    for one in scenes[:25]:
        small, large = render(one, 64), render(one, 192)
        shrunk = large.masks.reshape(len(one.things), 64, 3, 64, 3).mean(axis=(2, 4)) > 0.5
        both, either = (shrunk & small.masks).sum((1, 2)), (shrunk | small.masks).sum((1, 2))
        assert (both / either > 0.7).all()
        colours = large.image.reshape(64, 3, 64, 3, 3).mean(axis=(1, 3))
        assert np.abs(colours - small.image).mean() < 12


def test_renderings_of_indivisible_sizes_agree(scenes):
    for one in scenes[:8]:
        small, large = render(one, 64), render(one, 224)
        at = (np.arange(224) * 64) // 224
        grown = small.masks[:, at][:, :, at]
        both, either = (grown & large.masks).sum((1, 2)), (grown | large.masks).sum((1, 2))
        assert (both / either > 0.7).all()


AREAS = {
    "circle": math.pi,
    "square": 1.72**2,
    "triangle": 0.56 * 1.78**2,
    "cross": 4 * 0.34 * 2 - 4 * 0.34**2,
    "ring": math.pi * (1 - 0.25),
    "diamond": 2 * 1.1**2,
    "hexagon": 2 * math.sqrt(3) * 0.92**2,
}


@pytest.mark.parametrize("shape", [*SHAPES, "hexagon"])
def test_shapes_have_the_expected_area(shape):
    thing = Thing(shape, "red", "large", "solid", 0.5, 0.5)
    found = render(single_scene(thing), 512).masks.mean()
    assert found == pytest.approx(AREAS[shape] * thing.radius**2, rel=0.01)


def test_shapes_are_distinguishable():
    masks = {
        shape: render(single_scene(Thing(shape, "red", "small", "solid", 0.5, 0.5)), 64).masks[0]
        for shape in SHAPES
    }
    for a in SHAPES:
        for b in SHAPES:
            if a != b:
                assert (masks[a] & masks[b]).sum() / (masks[a] | masks[b]).sum() < 0.86


@pytest.mark.parametrize("color", COLORS)
def test_solid_object_has_its_colour(color):
    drawn = render(single_scene(Thing("square", color, "large", "solid", 0.5, 0.5)), 64)
    assert np.abs(np.median(drawn.image[drawn.masks[0]], axis=0) - PAINT[color]).max() <= 1


@pytest.mark.parametrize("shape", SHAPES)
def test_stripes_are_visible_on_the_smallest_object(shape):
    striped = render(single_scene(Thing(shape, "red", "small", "striped", 0.5, 0.5)), 64)
    inside = striped.image[..., 0][striped.masks[0]]
    assert 0.15 < (inside > 180).mean() < 0.8 and (inside < 120).mean() > 0.15


def test_intervention_changes_only_pixels_near_the_object(scenes):
    for one in scenes[:12]:
        before = render(one, 64)
        thing = one.things[0]
        near = 1.1 * thing.radius + 3 / 64
        centres = (np.arange(64) + 0.5) / 64
        far = (np.abs(centres - thing.x)[None] > near) | (np.abs(centres - thing.y)[:, None] > near)
        others = [
            remove_thing(one, 0),
            *(change_thing(one, 0, **{n: v}) for n, v in NEUTRAL.items()),
        ]
        for other in others:
            after = render(other, 64).image
            assert (after == before.image)[far].all()
            assert (after != before.image)[~far].any()


def test_later_objects_cover_clutter_and_earlier_objects():
    one = Thing("square", "red", "large", "solid", 0.5, 0.5)
    two = Thing("square", "blue", "large", "solid", 0.6, 0.5)
    drawn = render(Scene("train", 0, 0, (one, two), random_scene("train", 0, 0).background), 64)
    assert (drawn.image[drawn.masks[1]][:, 2] > 130).mean() > 0.9
    flipped = render(Scene("train", 0, 0, (two, one), PLAIN), 64)
    assert flipped.masks[1].sum() > drawn.masks[0].sum()


def test_background_belongs_to_no_object(scenes):
    bare = replace(scenes[0], things=())
    drawn = render(bare, 64)
    assert drawn.masks.shape == (0, 64, 64) and drawn.boxes.shape == (0, 4)
    assert drawn.image.std() > 3
    assert not np.array_equal(drawn.image, render(replace(bare, background=PLAIN), 64).image)


@pytest.mark.parametrize("size", [16, 5000])
def test_out_of_range_sizes_raise(scenes, size):
    with pytest.raises(UserError, match=str(size)):
        render(scenes[0], size)


def test_unknown_shape_raises():
    with pytest.raises(UserError, match="blob"):
        signed_distance("blob", np.zeros((1, 1), np.float32), np.zeros((1, 1), np.float32), 0.1)


def test_every_attribute_value_can_be_rendered():
    for name, values in VALUES.items():
        for value in (*values, NEUTRAL[name]):
            thing = replace(Thing("circle", "red", "small", "solid", 0.5, 0.5), **{name: value})
            assert render(single_scene(thing), 64).masks.any()
