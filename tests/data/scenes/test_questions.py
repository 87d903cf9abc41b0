from dataclasses import replace

import pytest

from overt.data.scenes.posing import pose
from overt.data.scenes.questions import (
    ALL,
    ANSWERS,
    COMPARISONS,
    FAMILIES,
    RELATIONS,
    WHICH,
    WORDS,
    Program,
    answer,
    chance,
    evidence,
    is_content,
    noun_phrase,
    plural,
    put_question,
    words,
)
from overt.data.scenes.world import NEUTRAL, Background, Scene, Thing, changed, without
from overt.errors import BadInput

PLAIN = Background((90.0,) * 3, (90.0,) * 3, (0.0, 0.0, 0.0), 0.0, 0, ())
THINGS = (
    Thing("circle", "red", "large", "solid", 0.2, 0.2),
    Thing("ring", "red", "small", "striped", 0.8, 0.3),
    Thing("cross", "blue", "medium", "solid", 0.5, 0.8),
    Thing("ring", "green", "large", "striped", 0.3, 0.6),
    Thing("square", "white", "small", "solid", 0.7, 0.6),
)
SCENE = Scene("train", 0, 0, THINGS, PLAIN)


def D(**said):
    order = ("size", "texture", "color", "shape")
    return tuple((name, said[name]) for name in order if name in said)


BY_HAND = [
    # program, words, answer, target, mentioned, evidence
    (
        Program("exist", (D(color="red", shape="ring"),)),
        "is there a red ring",
        "yes",
        {1},
        {1},
        {1},
    ),
    (Program("exist", (D(color="orange"),)), "is there an orange thing", "no", (), (), ()),
    (Program("exist", (D(shape="ring"),)), "is there a ring", "yes", {1, 3}, {1, 3}, ()),
    (
        Program("count", (D(texture="striped"),)),
        "how many striped things are there",
        "2",
        {1, 3},
        {1, 3},
        {1, 3},
    ),
    (Program("count", (D(shape="cross"),)), "how many crosses are there", "1", {2}, {2}, {2}),
    (Program("count", (D(color="cyan"),)), "how many cyan things are there", "0", (), (), ()),
    (
        Program("query-color", (D(size="large", shape="circle"),), "color"),
        "what color is the large circle",
        "red",
        {0},
        {0},
        {0},
    ),
    (
        Program("query-shape", (D(color="blue"),), "shape"),
        "what shape is the blue thing",
        "cross",
        {2},
        {2},
        {2},
    ),
    (
        Program("query-size", (D(shape="square"),), "size"),
        "what size is the square",
        "small",
        {4},
        {4},
        {4},
    ),
    (
        Program("query-texture", (D(size="small", color="red"),), "texture"),
        "what texture is the small red thing",
        "striped",
        {1},
        {1},
        {1},
    ),
    (
        Program(
            "compare", (D(color="blue", shape="cross"), D(color="white", shape="square")), "larger"
        ),
        "which is larger the blue cross or the white square",
        "blue",
        {2, 4},
        {2, 4},
        {2, 4},
    ),
    (
        Program(
            "compare", (D(color="blue", shape="cross"), D(color="white", shape="square")), "smaller"
        ),
        "which is smaller the blue cross or the white square",
        "white",
        {2, 4},
        {2, 4},
        {2, 4},
    ),
    (
        Program(
            "compare", (D(color="blue", shape="cross"), D(color="green", shape="ring")), "larger"
        ),
        "which is larger the blue cross or the green ring",
        "green",
        {2, 3},
        {2, 3},
        {2, 3},
    ),
    (
        Program("same", (D(color="red"),), "color"),
        "do the two red things have the same color",
        "yes",
        {0, 1},
        {0, 1},
        {0, 1},
    ),
    (
        Program("same", (D(shape="ring"),), "texture"),
        "do the two rings have the same texture",
        "yes",
        {1, 3},
        {1, 3},
        {1, 3},
    ),
    (
        Program("same", (D(texture="striped", shape="ring"),), "size"),
        "do the two striped rings have the same size",
        "no",
        {1, 3},
        {1, 3},
        {1, 3},
    ),
    (
        Program(
            "spatial", (D(color="red", shape="circle"), D(color="green", shape="ring")), "left"
        ),
        "which is further left the red circle or the green ring",
        "red",
        {0, 3},
        {0, 3},
        {0, 3},
    ),
    (
        Program(
            "spatial", (D(color="green", shape="ring"), D(color="red", shape="circle")), "right"
        ),
        "which is further right the green ring or the red circle",
        "green",
        {0, 3},
        {0, 3},
        {0, 3},
    ),
    (
        Program(
            "spatial", (D(color="green", shape="ring"), D(color="red", shape="circle")), "above"
        ),
        "which is higher up the green ring or the red circle",
        "red",
        {0, 3},
        {0, 3},
        {0, 3},
    ),
    (
        Program(
            "spatial", (D(color="red", shape="circle"), D(color="green", shape="ring")), "below"
        ),
        "which is lower down the red circle or the green ring",
        "green",
        {0, 3},
        {0, 3},
        {0, 3},
    ),
    (
        Program("relate", (D(shape="ring"), D(color="blue")), "left"),
        "what color is the ring left of the blue thing",
        "green",
        {3},
        {2, 3},
        {2, 3},
    ),
]


@pytest.mark.parametrize("case", BY_HAND, ids=[case[1] for case in BY_HAND])
def test_by_hand(case):
    program, text, wanted, target, mentioned, proof = case
    question = put_question(program, SCENE)
    assert " ".join(question.words) == text
    assert question.answer == wanted == answer(program, SCENE)
    assert question.target == set(target) and question.mentioned == set(mentioned)
    assert question.evidence == set(proof)
    assert question.localized == bool(proof)
    assert question.family == program.family and question.program == program


def test_every_family_is_tried_by_hand():
    assert {case[0].family for case in BY_HAND} == set(ALL)


@pytest.mark.parametrize(
    "program",
    [
        Program("query-color", (D(shape="ring"),), "color"),  # two rings
        Program("query-color", (D(shape="diamond"),), "color"),  # none
        Program("spatial", (D(shape="ring"), D(color="blue")), "left"),
        Program("spatial", (D(color="red", shape="ring"), D(color="green", shape="ring")), "above"),
        Program("spatial", (D(color="blue"), D(shape="cross")), "left"),  # one thing, named twice
        Program("compare", (D(color="red", shape="circle"), D(color="green")), "larger"),  # a tie
        Program("compare", (D(color="blue"), D(shape="cross")), "smaller"),
        Program("same", (D(color="blue"),), "size"),  # only one
        Program("same", (D(texture="solid"),), "size"),  # three
        Program("relate", (D(shape="ring"), D(shape="diamond")), "left"),
        Program("relate", (D(texture="striped"), D(color="white")), "above"),  # both are
    ],
)
def test_a_question_without_an_answer_is_refused(program):
    assert (
        answer(program, replace(SCENE, things=(*THINGS[:3], replace(THINGS[3], y=0.3), THINGS[4])))
        is None
    )
    with pytest.raises(BadInput, match="no answer"):
        put_question(
            program, replace(SCENE, things=(*THINGS[:3], replace(THINGS[3], y=0.3), THINGS[4]))
        )


def test_more_than_three_cannot_be_counted():
    many = replace(SCENE, things=tuple(replace(t, color="red") for t in THINGS))
    assert answer(Program("count", (D(color="red"),)), many) is None


def test_a_neutral_value_is_no_answer():
    query = Program("query-color", (D(shape="circle"),), "color")
    assert answer(query, changed(SCENE, 0, color="gray")) is None
    compare = Program("compare", (D(color="blue"), D(shape="square")), "larger")
    assert answer(compare, SCENE) == "blue"
    assert answer(compare, changed(SCENE, 2, size="tiny")) is None
    assert answer(compare, changed(SCENE, 4, color="gray")) == "blue"
    smaller = replace(compare, about="smaller")
    assert answer(smaller, SCENE) == "white"
    assert answer(smaller, changed(SCENE, 4, color="gray")) is None


OPPOSITE = {"larger": "smaller", "left": "right", "above": "below"}
OPPOSITE |= {b: a for a, b in OPPOSITE.items()}


def slow_which(about, pair):
    """The two things in the order asked for, the one that it is first, read from the things."""
    measure = {"left": lambda t: -t.x, "right": lambda t: t.x, "above": lambda t: -t.y}
    measure |= {"below": lambda t: t.y, "larger": lambda t: t.radius}
    measure |= {"smaller": lambda t: -t.radius}
    return sorted(pair, key=measure[about], reverse=True)


@pytest.mark.parametrize("family", WHICH)
def test_which_it_is_has_two_sides(family):
    """Named the other way round it is the same thing; asked for the opposite it is the other."""
    seen = set()
    for i in range(15):
        scene, questions = pose("val", 3, i, families=[family])
        for question in questions:
            program = question.program
            this, that = slow_which(program.about, [scene.things[i] for i in question.target])
            assert question.answer == this.color
            assert answer(replace(program, sides=program.sides[::-1]), scene) == this.color
            assert answer(replace(program, about=OPPOSITE[program.about]), scene) == that.color
            named = [word for word in question.words if word in FAMILIES[family]]
            assert len(named) == 2 and set(named) == {this.color, that.color}
            seen.add(program.about)
    assert seen == set(COMPARISONS if family == "compare" else RELATIONS)


def test_an_unknown_family_is_refused():
    with pytest.raises(BadInput, match="riddle"):
        answer(Program("riddle", (D(color="red"),)), SCENE)


def slow_evidence(program, scene):
    """Every thing, every intervention, nothing skipped."""
    base = answer(program, scene)
    found = set()
    for i in range(len(scene.things)):
        worlds = [without(scene, i), *(changed(scene, i, **{n: v}) for n, v in NEUTRAL.items())]
        if any(answer(program, world) != base for world in worlds):
            found.add(i)
    return found


@pytest.mark.parametrize("family", ALL)
def test_evidence_is_what_interventions_find(family):
    for i in range(12):
        scene, questions = pose("val", 2, i, families=[family])
        for question in questions:
            assert question.evidence == slow_evidence(question.program, scene)
            assert question.evidence == evidence(question.program, scene)
            assert question.evidence == question.mentioned
            assert question.target <= question.mentioned
            assert question.localized == (question.answer not in ("no", "0") or family == "same")
            sides = {"exist": 1, "query-color": 1, "query-shape": 1, "query-size": 1}
            sides |= {"query-texture": 1, "compare": 2, "same": 2, "spatial": 2, "relate": 1}
            if question.localized and family != "count":
                assert len(question.target) == sides[family]
            if family == "count":
                assert len(question.target) == int(question.answer)


def test_words_are_a_closed_list():
    said = {word for i in range(60) for q in pose("train", 1, i)[1] for word in q.words}
    assert said <= set(WORDS) and list(WORDS) == sorted(set(WORDS))
    assert all(word == word.lower() and word.isalpha() for word in WORDS)


def test_content_words_carry_the_arguments():
    question = put_question(BY_HAND[6][0], SCENE)
    assert question.words == ("what", "color", "is", "the", "large", "circle")
    assert question.content == (False, True, False, False, True, True)
    told = {}
    for case in BY_HAND:
        asked = put_question(case[0], SCENE)
        if asked.family in WHICH:
            marked = zip(asked.words, asked.content, strict=True)
            told[asked.program.about] = " ".join(word for word, content in marked if content)
    assert told == {
        "larger": "larger blue cross green ring",
        "smaller": "smaller blue cross white square",
        "left": "left red circle green ring",
        "right": "right green ring red circle",
        "above": "higher green ring red circle",
        "below": "lower red circle green ring",
    }
    assert [w for w in WORDS if not is_content(w)] == (
        "a an are do down further have how is many of or same the there thing things two up what"
        " which".split()
    )


def test_nouns():
    assert noun_phrase(D(color="red", size="large")) == ("large", "red", "thing")
    assert [plural(n) for n in ("cross", "ring", "thing")] == ["crosses", "rings", "things"]
    assert words(Program("count", (D(size="small", shape="cross"),)))[-4:] == (
        "small",
        "crosses",
        "are",
        "there",
    )


def test_answers_are_those_of_the_families():
    assert set(ANSWERS) == {a for answers in FAMILIES.values() for a in answers}
    assert len(set(ANSWERS)) == len(ANSWERS)


def test_chance_is_one_of_the_answers_the_words_leave():
    assert chance("exist") == chance("same") == 1 / 2 and chance("count") == 1 / 4
    assert chance("query-size") == 1 / 3 and chance("query-shape") == 1 / 6
    assert chance("query-color") == chance("relate") == 1 / 8
    assert chance("query-texture") == chance("compare") == chance("spatial") == 1 / 2
