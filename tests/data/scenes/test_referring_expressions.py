import itertools
import re

import pytest
import torch

from overt.data.scenes.noun_phrases import parse_phrase
from overt.data.scenes.proposals import only_detected, only_true
from overt.data.scenes.referring_expressions import (
    CLEAR,
    ReferringScenes,
    make_expressions,
    referents,
)
from overt.data.scenes.render import render
from overt.data.scenes.world import ATTRIBUTES, Scene, Thing, random_scene
from overt.data.vocabulary import BEGIN, END
from overt.errors import UserError

SCENES = [random_scene("train", 0, index) for index in range(40)]
EXPRESSIONS = [(shown, one) for shown in SCENES for one in make_expressions(shown)]
DATA = ReferringScenes("val", 0, 12)


def fits(thing, what):
    return all(getattr(thing, name) == value for name, value in what)


def slow_referents(text, things):
    """The objects that an expression matches, by its words and plain loops."""
    found = re.fullmatch(r"the (.+?) (?:(?:to the )?(left|right) of|(above|below)) the (.+)", text)
    if found is None:
        return [i for i, thing in enumerate(things) if fits(thing, parse_phrase(text))]
    anchors = [thing for thing in things if fits(thing, parse_phrase(found[4]))]
    assert len(anchors) == 1
    at = anchors[0]
    beside = {
        "left": lambda t: t.x < at.x,
        "right": lambda t: t.x > at.x,
        "above": lambda t: t.y < at.y,
        "below": lambda t: t.y > at.y,
    }[found[2] or found[3]]
    return [
        i for i, t in enumerate(things) if fits(t, parse_phrase(found[1])) and t != at and beside(t)
    ]


def test_each_expression_matches_exactly_one_object():
    for shown, one in EXPRESSIONS:
        assert slow_referents(one.text, shown.things) == [one.thing]
        assert referents(shown.things, one.what, one.relation, one.anchor) == (one.thing,)
    assert len(EXPRESSIONS) > 0.97 * sum(len(shown.things) for shown in SCENES)


def test_attribute_expressions_are_minimal():
    for shown, one in EXPRESSIONS:
        if one.relation is None:
            thing = shown.things[one.thing]
            facts = [(name, getattr(thing, name)) for name in ATTRIBUTES]
            for count in range(1, len(one.what)):
                for less in itertools.combinations(facts, count):
                    assert sum(fits(thing, less) for thing in shown.things) > 1


def test_relations_are_used_only_when_needed_and_clear():
    placed = [(shown, one) for shown, one in EXPRESSIONS if one.relation is not None]
    assert 0.3 * len(EXPRESSIONS) < len(placed) < 0.7 * len(EXPRESSIONS)
    for shown, one in placed:
        (at,) = [i for i, thing in enumerate(shown.things) if fits(thing, one.anchor)]
        alike = {i for i, thing in enumerate(shown.things) if fits(thing, one.what)} - {at}
        assert len(alike) > 1
        axis = "x" if one.relation in ("left", "right") else "y"
        sign = 1 if one.relation in ("left", "above") else -1
        for i in alike:
            offset = sign * (getattr(shown.things[at], axis) - getattr(shown.things[i], axis))
            assert offset >= CLEAR if i == one.thing else offset <= -CLEAR


def test_identical_objects_need_a_relation_or_are_left_out():
    ground = SCENES[0].background
    ring = Thing("ring", "red", "small", "solid", 0.2, 0.5)
    square = Thing("square", "blue", "large", "solid", 0.5, 0.5)
    twin = Thing("ring", "red", "small", "solid", 0.8, 0.5)
    found = make_expressions(Scene("train", 0, 0, (ring, square, twin), ground))
    assert {one.thing for one in found} == {0, 1, 2}
    assert {one.relation for one in found if one.thing != 1} == {"left", "right"}
    alone = make_expressions(Scene("train", 0, 0, (ring, twin), ground))
    assert alone == ()


def test_phrases_refer_to_the_object_and_its_anchor():
    for shown, one in EXPRESSIONS:
        first, *rest = one.phrases
        assert first.things == (one.thing,)
        assert parse_phrase(" ".join(one.words[: first.end_word])) == one.what
        assert len(rest) == (one.relation is not None)
        for phrase in rest:
            assert fits(shown.things[phrase.things[0]], one.anchor)


def test_batches_have_one_sample_per_expression():
    batch = DATA.batch([3, 9])
    expressions = [*make_expressions(DATA.scene(3))[:4], *make_expressions(DATA.scene(9))[:4]]
    assert batch.text.texts == tuple(one.text for one in expressions)
    assert batch.image_of.tolist() == [0] * 4 + [1] * (len(expressions) - 4)
    for row, one in enumerate(expressions):
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


def test_both_groups_occur():
    batch = DATA.batch(range(12))
    assert 10 < batch.groups.count("place") < 38


def test_each_limits_the_expressions_per_scene():
    assert len(ReferringScenes("val", 0, 12, each=1).batch([0, 1])) == 2
    with pytest.raises(UserError, match="at least 1"):
        ReferringScenes("val", 0, 12, each=0)


def test_filtered_regions_are_masked_and_have_no_target():
    unfiltered = DATA.batch([3, 9])
    for keep in (only_true, only_detected):
        data = ReferringScenes("val", 0, 12, keep=keep)
        found = data.batch([3, 9])
        for name in ("boxes", "labels", "tokens", "images"):
            assert torch.equal(getattr(found, name), getattr(unfiltered, name))
        hidden = ~found.region_mask
        assert (
            hidden.any()
            and not found.target.weights[:, 0, 0][
                hidden[:, None].expand_as(found.target.weights[:, 0, 0])
            ].any()
        )
        found.target.check()
        labelled = found.region_mask.gather(1, found.labels[:, None])
        assert labelled.all() if keep is only_true else not labelled.any()
