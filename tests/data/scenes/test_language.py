import numpy as np
import pytest

from overt.data.scenes.language import (
    NUMBERS,
    WORDS,
    descriptions,
    entails,
    excludes,
    one,
    ordered,
    read,
    say,
    say_after,
    several,
    singling,
    vocabulary,
)
from overt.data.scenes.world import NEUTRAL, VALUES, Dice, changed, scene
from overt.data.vocabulary import UNKNOWN, tokenize
from overt.errors import BadInput


def all_descriptions():
    """Every conjunction of attributes, by plain loops."""
    for size in (None, *VALUES["size"]):
        for texture in (None, *VALUES["texture"]):
            for color in (None, *VALUES["color"]):
                for shape in (None, *VALUES["shape"]):
                    facts = {"size": size, "texture": texture, "color": color, "shape": shape}
                    yield ordered({name: v for name, v in facts.items() if v is not None})


def test_every_description_is_read_back_from_its_words():
    dice = Dice(np.random.default_rng(0))
    known = vocabulary()
    for what in all_descriptions():
        for plural in (False, True):
            for phrase in (
                say(what, plural=plural),
                say(what, dice, plural),
                say_after(what, dice, plural),
                one(say(what, dice)),
                several(1 + plural, what, dice),
            ):
                assert read(phrase) == what
                assert UNKNOWN not in known.encode([word for word, _, _ in tokenize(phrase)])


def test_words_are_sorted_and_cover_the_numbers():
    assert list(WORDS) == sorted(set(WORDS))
    assert set(NUMBERS[1:]) < set(WORDS) and "zero" not in WORDS


@pytest.mark.parametrize(
    ("phrase", "why"),
    [("a red blue ring", "two things about the color"), ("a red dog", "'dog'"), ("?", "'?'")],
)
def test_other_phrases_are_refused(phrase, why):
    with pytest.raises(BadInput, match=why.replace("?", r"\?")):
        read(phrase)


def test_adjectives_move_behind_the_noun():
    what = (("size", "large"), ("color", "red"), ("shape", "square"))
    said = {say_after(what, Dice(np.random.default_rng(n))) for n in range(40)}
    assert {"large square that is red", "square that is red and large"} <= said
    assert all("square" in phrase and " that is " in phrase for phrase in said)
    assert (
        say_after((("shape", "cross"),), Dice(np.random.default_rng(0)), plural=True) == "crosses"
    )


def test_descriptions_of_a_thing_leave_out_what_has_no_word():
    shown = scene("train", 0, 0)
    assert len(descriptions(shown.things[0])) == 2**4 - 1
    told = descriptions(changed(shown, 0, color=NEUTRAL["color"]).things[0])
    assert len(told) == 2**3 - 1
    assert all("color" not in dict(what) for what in told)


def test_singling_descriptions_fit_one_thing_and_are_all_there_are():
    for index in range(8):
        things = scene("train", 1, index).things
        for i, thing in enumerate(things):
            wanted = {
                what
                for what in all_descriptions()
                if what
                and [n for n, t in enumerate(things) if all(getattr(t, k) == v for k, v in what)]
                == [i]
            }
            found = singling(things, i)
            assert set(found) == wanted
            assert [len(what) for what in found] == sorted(len(what) for what in found)
            assert all(getattr(thing, name) == v for what in found for name, v in what)


def test_entailment_and_exclusion_by_hand():
    red, blue = (("color", "red"),), (("color", "blue"),)
    red_ring, ring = (("color", "red"), ("shape", "ring")), (("shape", "ring"),)
    assert entails(red_ring, red) and entails(red, red) and entails(red, ())
    assert not entails(red, red_ring) and not entails(red, blue)
    assert excludes(red_ring, blue) and not excludes(red, ring) and not excludes((), red)
