import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overt.data.scenes.claims import BackgroundClaim, is_true_caption, parse_claims
from overt.data.scenes.noun_phrases import WORDS
from overt.data.scenes.questions import signed_offset
from overt.data.scenes.world import Background, Scene, Stroke, Thing
from overt.errors import UserError

STROKE = Stroke(0.5, 0.5, 0.1, 0.0, 0, 0, 0)


def make_scene(level=60.0, strokes=6):
    """Two red rings, a blue square and a white circle; the background is configurable."""
    ground = Background((level,) * 3, (level,) * 3, (0.0, 0.0, 0.0), 8.0, 0, (STROKE,) * strokes)
    things = (
        Thing("ring", "red", "large", "striped", 0.2, 0.2),
        Thing("ring", "red", "small", "solid", 0.8, 0.3),
        Thing("square", "blue", "medium", "striped", 0.5, 0.8),
        Thing("circle", "white", "small", "striped", 0.2, 0.7),
    )
    return Scene("test", 0, 0, things, ground)


TRUE = """there is a red ring
there is a large ring and a blue square
a little disc can be seen
the picture shows an object
two rings, one square and one circle
there are three striped things and one solid thing
the picture has four things
the square is blue
the blue thing is a square
the blue thing is a medium striped square
the solid thing is small and red
every ring is red
all small striped things are white
most things are striped
the white thing is left of the blue thing
to the left of the square is the white circle
a ring is above the circle
the large ring is left of a ring
below a ring is the square
a dark and calm picture with two rings
most things are striped on a dark background
four things on a dark background""".splitlines()
FALSE = """there is a blue ring
there is a red ring and a green ring
one ring
two rings and two squares
three things
the ring is red
the square is red
the red square is blue
every striped thing is red
every green thing is red
every thing is red and small
most things are red
the ring is above the circle
the white thing is right of the blue thing
the square is above the large ring
the large ring is left of the green thing
a busy picture with two rings
two rings on a dim background""".splitlines()


@pytest.mark.parametrize("text", TRUE)
def test_true_captions_are_true(text):
    assert is_true_caption(text, make_scene())


@pytest.mark.parametrize("text", FALSE)
def test_false_captions_are_false(text):
    assert not is_true_caption(text, make_scene())


@pytest.mark.parametrize(
    "text",
    ["", "ring", "the", "the ring is", "the dog is red", "a red blue ring", "is", "the ring", ",",
     "six things on a red background", "a big picture with two rings", "two rings and the square",
     "the square is a thing"],
)  # fmt: skip
def test_invalid_captions_raise(text):
    with pytest.raises(UserError):
        parse_claims(text)


@given(st.lists(st.sampled_from(WORDS), max_size=12))
@settings(max_examples=150)
def test_any_words_are_parsed_or_raise(words):
    try:
        found = parse_claims(" ".join(words))
    except UserError:
        return
    assert found and all(claim.holds(make_scene()) in (True, False) for claim in found)


@pytest.mark.parametrize(
    ("level", "strokes", "words"),
    [(74.0, 8, "dark calm"), (76.0, 9, ""), (84.0, 11, ""), (86.0, 12, "dim busy")],
)
def test_background_between_two_words_has_neither(level, strokes, words):
    shown = make_scene(level, strokes)
    true = [word for word in ("dark", "dim", "calm", "busy") if BackgroundClaim(word).holds(shown)]
    assert true == words.split()


@pytest.mark.parametrize(
    ("relation", "offset"), [("left", 0.3), ("right", -0.3), ("above", 0.6), ("below", -0.6)]
)
def test_signed_offset_matches_hand_computed_values(relation, offset):
    things = make_scene().things
    assert signed_offset(relation, things[0], things[2]) == pytest.approx(offset)
