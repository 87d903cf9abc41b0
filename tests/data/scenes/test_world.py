from collections import Counter
from dataclasses import asdict

import numpy as np
import pytest

from overt.data.scenes.world import (
    ATTRIBUTES,
    NEUTRAL,
    RADII,
    SPLITS,
    VALUES,
    Background,
    Dice,
    Scene,
    Thing,
    change_thing,
    hard_negative,
    is_valid_layout,
    place_things,
    random_scene,
    remove_thing,
    scene_rng,
)
from overt.errors import UserError

PLAIN = Background((90.0,) * 3, (90.0,) * 3, (0.0, 0.0, 0.0), 0.0, 0, ())
THINGS = (
    Thing("circle", "red", "small", "solid", 0.2, 0.2),
    Thing("ring", "red", "large", "striped", 0.6, 0.3),
    Thing("circle", "blue", "large", "solid", 0.3, 0.7),
)
SMALL = Scene("train", 0, 0, THINGS, PLAIN)


@pytest.fixture(scope="module")
def scenes():
    return [random_scene("train", 3, i) for i in range(60)]


def test_scene_depends_only_on_its_key(scenes):
    assert random_scene("train", 3, 7) == scenes[7]
    others = [
        random_scene("train", 3, 8),
        random_scene("train", 4, 7),
        random_scene("val", 3, 7),
        random_scene("test", 3, 7),
    ]
    assert all(other.things != scenes[7].things for other in others)


def test_scenes_of_all_splits_are_distinct():
    drawn = [
        random_scene(split, seed, i).things
        for split in SPLITS
        for seed in (0, 1)
        for i in range(20)
    ]
    assert len(set(drawn)) == len(drawn)


def test_rng_depends_on_its_purpose():
    assert scene_rng("train", 0, 0, 0).random() != scene_rng("train", 0, 0, 1).random()


@pytest.mark.parametrize("wrong", [("training", 0, 0), ("train", -1, 0), ("train", 0, -1)])
def test_invalid_scene_keys_raise(wrong):
    with pytest.raises(UserError):
        random_scene(*wrong)


def test_scenes_have_four_to_eight_objects_in_the_frame(scenes):
    assert {len(one.things) for one in scenes} == {4, 5, 6, 7, 8}
    assert all(is_valid_layout(one.things) for one in scenes)


def test_attribute_values_are_uniform():
    things = [thing for i in range(250) for thing in random_scene("val", 1, i).things]
    for name, values in VALUES.items():
        counts = Counter(getattr(thing, name) for thing in things)
        assert set(counts) == set(values)
        expected = len(things) / len(values)
        assert sum((c - expected) ** 2 / expected for c in counts.values()) < 3.5 * len(values) + 8


def test_neutral_values_have_no_word():
    assert set(NEUTRAL) == set(ATTRIBUTES) == set(VALUES)
    assert not any(NEUTRAL[name] in VALUES[name] for name in VALUES)
    assert NEUTRAL["size"] in RADII


def test_interventions_change_one_object():
    assert remove_thing(SMALL, 1).things == (THINGS[0], THINGS[2])
    other = change_thing(SMALL, 1, color="gray", shape="hexagon")
    assert other.things[1].color == "gray" and other.things[1].shape == "hexagon"
    assert (other.things[0], other.things[2]) == (THINGS[0], THINGS[2])
    assert other.background == SMALL.background and SMALL.things == THINGS


def test_hard_negative_differs_in_one_attribute_of_one_object(scenes):
    rng = np.random.default_rng(0)
    counts = Counter()
    for one in scenes:
        for _ in range(4):
            other, i, name = hard_negative(one, rng)
            pairs = list(zip(one.things, other.things, strict=True))
            assert [k for k, (a, b) in enumerate(pairs) if a != b] == [i]
            before, after = asdict(one.things[i]), asdict(other.things[i])
            assert [k for k in before if before[k] != after[k]] == [name]
            assert after[name] in VALUES[name] and is_valid_layout(other.things)
            counts[name] += 1
    assert min(counts[name] for name in ("shape", "color", "texture")) > 40 and counts["size"] > 10


def test_layout_with_overlap_or_outside_the_frame_is_invalid():
    assert is_valid_layout(THINGS)
    assert not is_valid_layout((Thing("circle", "red", "large", "solid", 0.1, 0.5),))
    assert not is_valid_layout((THINGS[1], Thing("circle", "red", "small", "solid", 0.6, 0.35)))
    # three in a row, each pair slightly too close: the middle one overlaps twice
    row = [Thing("circle", "red", "small", "solid", x, 0.5) for x in (0.3, 0.43, 0.56)]
    assert is_valid_layout(row[:2]) and is_valid_layout(row[1:]) and not is_valid_layout(row)


def test_place_things_respects_the_order_constraints():
    rng = Dice(np.random.default_rng(1))
    sizes = ["small", "large", "medium", "small"]
    for _ in range(50):
        spots = place_things(rng, sizes, [(0, 1, 0, 0.2), (2, 1, 1, 0.2)])
        if spots is not None:
            assert spots[1][0] - spots[0][0] >= 0.2 and spots[1][1] - spots[2][1] >= 0.2
            things = [
                Thing("circle", "red", size, "solid", *spot)
                for size, spot in zip(sizes, spots, strict=True)
            ]
            assert is_valid_layout(sorted(things, key=lambda thing: -thing.radius))


def test_place_things_returns_none_without_room():
    assert place_things(Dice(np.random.default_rng(0)), ["large"] * 40) is None
    assert place_things(Dice(np.random.default_rng(0)), ["small"] * 2, [(0, 1, 0, 0.9)]) is None


def test_dice_are_uniform():
    rng = Dice(np.random.default_rng(0), block=7)
    counts = Counter(rng.below(6) for _ in range(6000))
    assert set(counts) == set(range(6)) and min(counts.values()) > 880
    assert sorted(rng.sample("abcd", 4)) == list("abcd")
    assert all(2 <= rng.uniform(2.0, 3.0) < 3 for _ in range(20))
    assert {rng.pick("xy") for _ in range(40)} == {"x", "y"}
