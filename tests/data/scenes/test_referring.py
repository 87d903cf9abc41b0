import itertools
import re

import pytest
import torch

from overt.data.scenes.language import read
from overt.data.scenes.proposals import only_detected, only_true
from overt.data.scenes.referring import CLEAR, ReferringScenes, expressions, referents
from overt.data.scenes.render import render
from overt.data.scenes.world import ATTRIBUTES, Scene, Thing, scene
from overt.data.vocabulary import BEGIN, END
from overt.errors import BadInput

SCENES = [scene("train", 0, index) for index in range(40)]
SAID = [(shown, said) for shown in SCENES for said in expressions(shown)]
DATA = ReferringScenes("val", 0, 12)


def fits(thing, what):
    return all(getattr(thing, name) == value for name, value in what)


def slow_referents(text, things):
    """The things an expression fits, by its words and plain loops."""
    found = re.fullmatch(r"the (.+?) (?:(?:to the )?(left|right) of|(above|below)) the (.+)", text)
    if found is None:
        return [i for i, thing in enumerate(things) if fits(thing, read(text))]
    anchors = [thing for thing in things if fits(thing, read(found[4]))]
    assert len(anchors) == 1
    at = anchors[0]
    beside = {
        "left": lambda t: t.x < at.x,
        "right": lambda t: t.x > at.x,
        "above": lambda t: t.y < at.y,
        "below": lambda t: t.y > at.y,
    }[found[2] or found[3]]
    return [i for i, t in enumerate(things) if fits(t, read(found[1])) and t != at and beside(t)]


def test_every_expression_fits_one_thing_by_its_words():
    for shown, said in SAID:
        assert slow_referents(said.text, shown.things) == [said.thing]
        assert referents(shown.things, said.what, said.relation, said.anchor) == (said.thing,)
    assert len(SAID) > 0.97 * sum(len(shown.things) for shown in SCENES)


def test_expressions_by_attributes_are_the_shortest():
    for shown, said in SAID:
        if said.relation is None:
            thing = shown.things[said.thing]
            facts = [(name, getattr(thing, name)) for name in ATTRIBUTES]
            for count in range(1, len(said.what)):
                for less in itertools.combinations(facts, count):
                    assert sum(fits(thing, less) for thing in shown.things) > 1


def test_a_place_is_named_only_where_it_is_needed_and_clear():
    placed = [(shown, said) for shown, said in SAID if said.relation is not None]
    assert 0.3 * len(SAID) < len(placed) < 0.7 * len(SAID)
    for shown, said in placed:
        (at,) = [i for i, thing in enumerate(shown.things) if fits(thing, said.anchor)]
        alike = {i for i, thing in enumerate(shown.things) if fits(thing, said.what)} - {at}
        assert len(alike) > 1
        axis = "x" if said.relation in ("left", "right") else "y"
        sign = 1 if said.relation in ("left", "above") else -1
        for i in alike:
            far = sign * (getattr(shown.things[at], axis) - getattr(shown.things[i], axis))
            assert far >= CLEAR if i == said.thing else far <= -CLEAR


def test_twins_are_told_apart_by_place_and_what_cannot_be_told_is_left_out():
    ground = SCENES[0].background
    ring = Thing("ring", "red", "small", "solid", 0.2, 0.5)
    square = Thing("square", "blue", "large", "solid", 0.5, 0.5)
    twin = Thing("ring", "red", "small", "solid", 0.8, 0.5)
    found = expressions(Scene("train", 0, 0, (ring, square, twin), ground))
    assert {said.thing for said in found} == {0, 1, 2}
    assert {said.relation for said in found if said.thing != 1} == {"left", "right"}
    alone = expressions(Scene("train", 0, 0, (ring, twin), ground))
    assert alone == ()


def test_phrases_are_tied_to_the_thing_and_its_anchor():
    for shown, said in SAID:
        first, *rest = said.phrases
        assert first.things == (said.thing,)
        assert read(" ".join(said.words[: first.end_word])) == said.what
        assert len(rest) == (said.relation is not None)
        for phrase in rest:
            assert fits(shown.things[phrase.things[0]], said.anchor)


def test_a_batch_has_one_sample_an_expression():
    batch = DATA.batch([3, 9])
    said = [*expressions(DATA.scene(3))[:4], *expressions(DATA.scene(9))[:4]]
    assert batch.text.texts == tuple(one.text for one in said)
    assert batch.image_of.tolist() == [0] * 4 + [1] * (len(said) - 4)
    for row, one in enumerate(said):
        boxes = torch.from_numpy(render(DATA.scene((3, 9)[batch.image_of[row]]), 64).boxes)
        assert torch.equal(batch.boxes[row, batch.labels[row]], boxes[one.thing])
        tokens = batch.tokens[row][batch.token_mask[row]].tolist()
        assert tokens == [BEGIN, *DATA.vocabulary.encode(one.words), END]
        assert batch.groups[row] == ("attributes" if one.relation is None else "place")
        for phrase in one.phrases:
            weights = batch.target.weights[row, 0, 0, phrase.start_word + 1]
            assert weights.sum() == pytest.approx(1)
            if phrase.things == (one.thing,):
                assert weights[batch.labels[row]] == weights.max()
    batch.target.check()


def test_both_groups_occur_and_batches_are_pure():
    batch = DATA.batch(range(12))
    assert 10 < batch.groups.count("place") < 38
    other = ReferringScenes("val", 0, 12).batch([5])
    assert torch.equal(other.labels, DATA.batch([4, 5]).labels[-len(other) :])


def test_settings():
    assert len(ReferringScenes("val", 0, 12, each=1).batch([0, 1])) == 2
    digests = {ReferringScenes("val", 0, 12, each=n).digest() for n in (1, 4)}
    assert DATA.digest() in digests and len(digests) == 2 and len(DATA) == 12
    with pytest.raises(BadInput, match="at least 1 expression"):
        ReferringScenes("val", 0, 12, each=0)


def test_candidates_that_are_not_kept_are_hidden_and_have_no_target():
    every = DATA.batch([3, 9])
    for keep in (only_true, only_detected):
        data = ReferringScenes("val", 0, 12, keep=keep)
        found = data.batch([3, 9])
        for name in ("boxes", "labels", "tokens", "images"):
            assert torch.equal(getattr(found, name), getattr(every, name))
        hidden = ~found.region_mask
        assert (
            hidden.any()
            and not found.target.weights[:, 0, 0][
                hidden[:, None].expand_as(found.target.weights[:, 0, 0])
            ].any()
        )
        found.target.check()
        named = found.region_mask.gather(1, found.labels[:, None])
        assert named.all() if keep is only_true else not named.any()
        assert data.digest() != DATA.digest()
