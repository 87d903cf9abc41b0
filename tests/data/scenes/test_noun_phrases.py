import numpy as np
import pytest

from overt.data.scenes.noun_phrases import (
    NUMBERS,
    WORDS,
    descriptions,
    entails,
    excludes,
    order_attributes,
    parse_phrase,
    unique_descriptions,
    verbalize,
    verbalize_with_clause,
    vocabulary,
    with_article,
    with_number,
)
from overt.data.scenes.world import NEUTRAL, VALUES, Dice, change_thing, random_scene
from overt.data.vocabulary import UNKNOWN, tokenize
from overt.errors import UserError


def all_descriptions():
    """Every conjunction of attributes, by plain loops."""
    for size in (None, *VALUES["size"]):
        for texture in (None, *VALUES["texture"]):
            for color in (None, *VALUES["color"]):
                for shape in (None, *VALUES["shape"]):
                    facts = {"size": size, "texture": texture, "color": color, "shape": shape}
                    yield order_attributes({name: v for name, v in facts.items() if v is not None})


def test_parse_phrase_inverts_verbalize():
    rng = Dice(np.random.default_rng(0))
    known = vocabulary()
    for what in all_descriptions():
        for plural in (False, True):
            for phrase in (
                verbalize(what, plural=plural),
                verbalize(what, rng, plural),
                verbalize_with_clause(what, rng, plural),
                with_article(verbalize(what, rng)),
                with_number(1 + plural, what, rng),
            ):
                assert parse_phrase(phrase) == what
                assert UNKNOWN not in known.encode([word for word, _, _ in tokenize(phrase)])


def test_words_are_sorted_and_contain_the_numbers():
    assert list(WORDS) == sorted(set(WORDS))
    assert set(NUMBERS[1:]) < set(WORDS) and "zero" not in WORDS


@pytest.mark.parametrize(
    ("phrase", "message"),
    [("a red blue ring", "values .*color"), ("a red dog", "'dog'"), ("?", "'?'")],
)
def test_invalid_phrases_raise(phrase, message):
    with pytest.raises(UserError, match=message.replace("?", r"\?")):
        parse_phrase(phrase)


def test_clause_puts_adjectives_after_the_noun():
    what = (("size", "large"), ("color", "red"), ("shape", "square"))
    phrases = {verbalize_with_clause(what, Dice(np.random.default_rng(n))) for n in range(40)}
    assert {"large square that is red", "square that is red and large"} <= phrases
    assert all("square" in phrase and " that is " in phrase for phrase in phrases)
    assert (
        verbalize_with_clause((("shape", "cross"),), Dice(np.random.default_rng(0)), plural=True)
        == "crosses"
    )


def test_descriptions_leave_out_values_without_a_word():
    shown = random_scene("train", 0, 0)
    assert len(descriptions(shown.things[0])) == 2**4 - 1
    without_color = descriptions(change_thing(shown, 0, color=NEUTRAL["color"]).things[0])
    assert len(without_color) == 2**3 - 1
    assert all("color" not in dict(what) for what in without_color)


def test_unique_descriptions_match_exactly_one_object():
    for index in range(8):
        things = random_scene("train", 1, index).things
        for i, thing in enumerate(things):
            expected = {
                what
                for what in all_descriptions()
                if what
                and [n for n, t in enumerate(things) if all(getattr(t, k) == v for k, v in what)]
                == [i]
            }
            found = unique_descriptions(things, i)
            assert set(found) == expected
            assert [len(what) for what in found] == sorted(len(what) for what in found)
            assert all(getattr(thing, name) == v for what in found for name, v in what)


def test_entails_and_excludes_match_hand_written_cases():
    red, blue = (("color", "red"),), (("color", "blue"),)
    red_ring, ring = (("color", "red"), ("shape", "ring")), (("shape", "ring"),)
    assert entails(red_ring, red) and entails(red, red) and entails(red, ())
    assert not entails(red, red_ring) and not entails(red, blue)
    assert excludes(red_ring, blue) and not excludes(red, ring) and not excludes((), red)
