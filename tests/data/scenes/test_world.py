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
    changed,
    described,
    fits,
    hard_negative,
    key,
    places,
    scene,
    without,
)
from overt.errors import BadInput

PLAIN = Background((90.0,) * 3, (90.0,) * 3, (0.0, 0.0, 0.0), 0.0, 0, ())
THINGS = (
    Thing("circle", "red", "small", "solid", 0.2, 0.2),
    Thing("ring", "red", "large", "striped", 0.6, 0.3),
    Thing("circle", "blue", "large", "solid", 0.3, 0.7),
)
SMALL = Scene("train", 0, 0, THINGS, PLAIN)


@pytest.fixture(scope="module")
def scenes():
    return [scene("train", 3, i) for i in range(60)]


def test_a_scene_follows_from_its_key_alone(scenes):
    assert scene("train", 3, 7) == scenes[7]
    others = [scene("train", 3, 8), scene("train", 4, 7), scene("val", 3, 7), scene("test", 3, 7)]
    assert all(other.things != scenes[7].things for other in others)


def test_no_two_scenes_of_three_splits_are_alike():
    drawn = [scene(split, seed, i).things for split in SPLITS for seed in (0, 1) for i in range(20)]
    assert len(set(drawn)) == len(drawn)


def test_a_purpose_has_its_own_stream():
    assert key("train", 0, 0, 0).random() != key("train", 0, 0, 1).random()


@pytest.mark.parametrize("wrong", [("training", 0, 0), ("train", -1, 0), ("train", 0, -1)])
def test_no_such_scene(wrong):
    with pytest.raises(BadInput):
        scene(*wrong)


def test_scenes_have_four_to_eight_things_in_the_frame(scenes):
    assert {len(one.things) for one in scenes} == {4, 5, 6, 7, 8}
    assert all(fits(one.things) for one in scenes)


def test_every_value_of_every_attribute_is_about_as_frequent():
    things = [thing for i in range(250) for thing in scene("val", 1, i).things]
    for name, values in VALUES.items():
        counts = Counter(getattr(thing, name) for thing in things)
        assert set(counts) == set(values)
        expected = len(things) / len(values)
        assert sum((c - expected) ** 2 / expected for c in counts.values()) < 3.5 * len(values) + 8


def test_no_word_names_a_neutral_value():
    assert set(NEUTRAL) == set(ATTRIBUTES) == set(VALUES)
    assert not any(NEUTRAL[name] in VALUES[name] for name in VALUES)
    assert NEUTRAL["size"] in RADII


def test_described():
    assert described(THINGS, color="red") == (0, 1)
    assert described(THINGS, shape="circle", size="large") == (2,)
    assert described(THINGS, color="green") == ()
    assert described(THINGS) == (0, 1, 2)


def test_interventions_change_one_thing():
    assert without(SMALL, 1).things == (THINGS[0], THINGS[2])
    other = changed(SMALL, 1, color="gray", shape="hexagon")
    assert other.things[1].color == "gray" and other.things[1].shape == "hexagon"
    assert (other.things[0], other.things[2]) == (THINGS[0], THINGS[2])
    assert other.background == SMALL.background and SMALL.things == THINGS


def test_a_hard_negative_differs_in_one_attribute_of_one_thing(scenes):
    rng = np.random.default_rng(0)
    seen = Counter()
    for one in scenes:
        for _ in range(4):
            other, i, name = hard_negative(one, rng)
            pairs = list(zip(one.things, other.things, strict=True))
            assert [k for k, (a, b) in enumerate(pairs) if a != b] == [i]
            before, after = asdict(one.things[i]), asdict(other.things[i])
            assert [k for k in before if before[k] != after[k]] == [name]
            assert after[name] in VALUES[name] and fits(other.things)
            seen[name] += 1
    assert min(seen[name] for name in ("shape", "color", "texture")) > 40 and seen["size"] > 10


def test_fits_refuses_heaps_and_what_leaves_the_frame():
    assert fits(THINGS)
    assert not fits((Thing("circle", "red", "large", "solid", 0.1, 0.5),))
    assert not fits((THINGS[1], Thing("circle", "red", "small", "solid", 0.6, 0.35)))
    # three in a row, each pair a little too near: the one in the middle overlaps twice
    row = [Thing("circle", "red", "small", "solid", x, 0.5) for x in (0.3, 0.43, 0.56)]
    assert fits(row[:2]) and fits(row[1:]) and not fits(row)


def test_places_keeps_things_apart_in_the_given_order():
    dice = Dice(np.random.default_rng(1))
    sizes = ["small", "large", "medium", "small"]
    for _ in range(50):
        spots = places(dice, sizes, [(0, 1, 0, 0.2), (2, 1, 1, 0.2)])
        if spots is not None:
            assert spots[1][0] - spots[0][0] >= 0.2 and spots[1][1] - spots[2][1] >= 0.2
            things = [
                Thing("circle", "red", size, "solid", *spot)
                for size, spot in zip(sizes, spots, strict=True)
            ]
            assert fits(sorted(things, key=lambda thing: -thing.radius))


def test_places_says_when_there_is_no_room():
    assert places(Dice(np.random.default_rng(0)), ["large"] * 40) is None
    assert places(Dice(np.random.default_rng(0)), ["small"] * 2, [(0, 1, 0, 0.9)]) is None


def test_dice_are_fair():
    dice = Dice(np.random.default_rng(0), block=7)
    counts = Counter(dice.below(6) for _ in range(6000))
    assert set(counts) == set(range(6)) and min(counts.values()) > 880
    assert sorted(dice.sample("abcd", 4)) == list("abcd")
    assert all(2 <= dice.uniform(2.0, 3.0) < 3 for _ in range(20))
    assert {dice.pick("xy") for _ in range(40)} == {"x", "y"}
