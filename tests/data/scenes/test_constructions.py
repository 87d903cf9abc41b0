import numpy as np
import pytest

from overt.data.scenes.captions import caption
from overt.data.scenes.claims import claims
from overt.data.scenes.constructions import Construction, express, listing
from overt.data.scenes.world import VALUES, Dice, Scene, Thing, changed, scene


@pytest.mark.parametrize("how", Construction)
def test_what_is_said_is_true_and_varied(how):
    texts = set()
    for index in range(40):
        shown = scene("train", 3, index)
        for n in range(3):
            said = caption(shown, how, Dice(np.random.default_rng([index, n])))
            assert said.holds(shown)
            assert claims(said.text) == said.claims
            texts.add(said.text)
    assert len(texts) > (30 if how is Construction.SETTING else 60)


@pytest.mark.parametrize("how", Construction)
def test_something_true_is_said_of_things_that_are_hard_to_tell_apart(how):
    ground = scene("train", 0, 0).background
    spots = [(0.2 + 0.2 * (n % 4), 0.3 + 0.4 * (n // 4)) for n in range(8)]
    twins = [Thing("ring", "red", "small", "solid", x, y) for x, y in spots[:4]]
    cube = [
        Thing("ring", color, size, texture, *spots[4 * a + 2 * b + c])
        for a, color in enumerate(("red", "blue"))
        for b, size in enumerate(("small", "large"))
        for c, texture in enumerate(("solid", "striped"))
    ]  # each attribute but the shape varies while the others stay: nothing is true of all
    for things in (twins, cube):
        shown = Scene("train", 0, 0, tuple(things), ground)
        for n in range(30):
            said = caption(shown, how, Dice(np.random.default_rng(n)))
            assert said.holds(shown) and claims(said.text) == said.claims


def test_things_without_a_word_are_not_spoken_of():
    shown = changed(scene("train", 0, 1), 0, color="gray", shape="hexagon", texture="dotted")
    for how in Construction:
        for n in range(20):
            said = caption(shown, how, Dice(np.random.default_rng(n)))
            assert said.holds(shown) and claims(said.text) == said.claims


@pytest.mark.parametrize("name", VALUES)
def test_a_listing_holds_what_it_must(name):
    shown = scene("train", 0, 2)
    needed = getattr(shown.things[0], name)
    for n in range(20):
        _, claimed = listing(shown, Dice(np.random.default_rng(n)), name, needed)
        assert ((name, needed),) in [claim.what for claim in claimed]
        assert len({claim.what for claim in claimed}) == len(claimed) <= 3


def test_dice_decide_and_nothing_else():
    shown = scene("train", 0, 3)
    for how in Construction:
        said = [express(shown, how, Dice(np.random.default_rng(5))) for _ in range(2)]
        assert said[0] == said[1]
