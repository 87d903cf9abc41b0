import numpy as np
import pytest

from overt.data.scenes.caption_templates import Construction, fill_template, list_counts
from overt.data.scenes.captions import make_caption
from overt.data.scenes.claims import parse_claims
from overt.data.scenes.world import VALUES, Dice, Scene, Thing, change_thing, random_scene


@pytest.mark.parametrize("how", Construction)
def test_captions_are_true_and_varied(how):
    texts = set()
    for index in range(40):
        shown = random_scene("train", 3, index)
        for n in range(3):
            caption = make_caption(shown, how, Dice(np.random.default_rng([index, n])))
            assert caption.holds(shown)
            assert parse_claims(caption.text) == caption.claims
            texts.add(caption.text)
    assert len(texts) > (30 if how is Construction.SETTING else 60)


@pytest.mark.parametrize("how", Construction)
def test_captions_of_similar_objects_are_true(how):
    ground = random_scene("train", 0, 0).background
    spots = [(0.2 + 0.2 * (n % 4), 0.3 + 0.4 * (n // 4)) for n in range(8)]
    twins = [Thing("ring", "red", "small", "solid", x, y) for x, y in spots[:4]]
    cube = [
        Thing("ring", color, size, texture, *spots[4 * a + 2 * b + c])
        for a, color in enumerate(("red", "blue"))
        for b, size in enumerate(("small", "large"))
        for c, texture in enumerate(("solid", "striped"))
    ]  # every attribute but the shape varies, so no other attribute is shared by all
    for things in (twins, cube):
        shown = Scene("train", 0, 0, tuple(things), ground)
        for n in range(30):
            caption = make_caption(shown, how, Dice(np.random.default_rng(n)))
            assert caption.holds(shown) and parse_claims(caption.text) == caption.claims


def test_captions_avoid_values_without_a_word():
    shown = change_thing(
        random_scene("train", 0, 1), 0, color="gray", shape="hexagon", texture="dotted"
    )
    for how in Construction:
        for n in range(20):
            caption = make_caption(shown, how, Dice(np.random.default_rng(n)))
            assert caption.holds(shown) and parse_claims(caption.text) == caption.claims


@pytest.mark.parametrize("name", VALUES)
def test_list_counts_contains_the_needed_value(name):
    shown = random_scene("train", 0, 2)
    needed = getattr(shown.things[0], name)
    for n in range(20):
        _, claimed = list_counts(shown, Dice(np.random.default_rng(n)), name, needed)
        assert ((name, needed),) in [claim.what for claim in claimed]
        assert len({claim.what for claim in claimed}) == len(claimed) <= 3


def test_captions_depend_only_on_the_rng():
    shown = random_scene("train", 0, 3)
    for how in Construction:
        captions = [fill_template(shown, how, Dice(np.random.default_rng(5))) for _ in range(2)]
        assert captions[0] == captions[1]
