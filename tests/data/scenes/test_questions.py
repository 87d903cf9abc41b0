from dataclasses import replace

import pytest

from overt.data.scenes.balanced_questions import generate_scene
from overt.data.scenes.questions import (
    ALL_FAMILIES,
    ANSWERS,
    CHOICE_FAMILIES,
    COMPARISONS,
    FAMILIES,
    RELATIONS,
    WORDS,
    QuestionProgram,
    chance_accuracy,
    find_evidence,
    is_content_word,
    make_question,
    noun_phrase,
    plural,
    program_words,
    run_program,
)
from overt.data.scenes.world import NEUTRAL, Background, Scene, Thing, change_thing, remove_thing
from overt.errors import UserError

PLAIN = Background((90.0,) * 3, (90.0,) * 3, (0.0, 0.0, 0.0), 0.0, 0, ())
THINGS = (
    Thing("circle", "red", "large", "solid", 0.2, 0.2),
    Thing("ring", "red", "small", "striped", 0.8, 0.3),
    Thing("cross", "blue", "medium", "solid", 0.5, 0.8),
    Thing("ring", "green", "large", "striped", 0.3, 0.6),
    Thing("square", "white", "small", "solid", 0.7, 0.6),
)
SCENE = Scene("train", 0, 0, THINGS, PLAIN)


def describe(**values):
    order = ("size", "texture", "color", "shape")
    return tuple((name, values[name]) for name in order if name in values)


CASES = [
    # program, words, answer, target, mentioned, evidence
    (
        QuestionProgram("exist", (describe(color="red", shape="ring"),)),
        "is there a red ring",
        "yes",
        {1},
        {1},
        {1},
    ),
    (
        QuestionProgram("exist", (describe(color="orange"),)),
        "is there an orange thing",
        "no",
        (),
        (),
        (),
    ),
    (
        QuestionProgram("exist", (describe(shape="ring"),)),
        "is there a ring",
        "yes",
        {1, 3},
        {1, 3},
        (),
    ),
    (
        QuestionProgram("count", (describe(texture="striped"),)),
        "how many striped things are there",
        "2",
        {1, 3},
        {1, 3},
        {1, 3},
    ),
    (
        QuestionProgram("count", (describe(shape="cross"),)),
        "how many crosses are there",
        "1",
        {2},
        {2},
        {2},
    ),
    (
        QuestionProgram("count", (describe(color="cyan"),)),
        "how many cyan things are there",
        "0",
        (),
        (),
        (),
    ),
    (
        QuestionProgram("query-color", (describe(size="large", shape="circle"),), "color"),
        "what color is the large circle",
        "red",
        {0},
        {0},
        {0},
    ),
    (
        QuestionProgram("query-shape", (describe(color="blue"),), "shape"),
        "what shape is the blue thing",
        "cross",
        {2},
        {2},
        {2},
    ),
    (
        QuestionProgram("query-size", (describe(shape="square"),), "size"),
        "what size is the square",
        "small",
        {4},
        {4},
        {4},
    ),
    (
        QuestionProgram("query-texture", (describe(size="small", color="red"),), "texture"),
        "what texture is the small red thing",
        "striped",
        {1},
        {1},
        {1},
    ),
    (
        QuestionProgram(
            "compare",
            (describe(color="blue", shape="cross"), describe(color="white", shape="square")),
            "larger",
        ),
        "which is larger the blue cross or the white square",
        "blue",
        {2, 4},
        {2, 4},
        {2, 4},
    ),
    (
        QuestionProgram(
            "compare",
            (describe(color="blue", shape="cross"), describe(color="white", shape="square")),
            "smaller",
        ),
        "which is smaller the blue cross or the white square",
        "white",
        {2, 4},
        {2, 4},
        {2, 4},
    ),
    (
        QuestionProgram(
            "compare",
            (describe(color="blue", shape="cross"), describe(color="green", shape="ring")),
            "larger",
        ),
        "which is larger the blue cross or the green ring",
        "green",
        {2, 3},
        {2, 3},
        {2, 3},
    ),
    (
        QuestionProgram("same", (describe(color="red"),), "color"),
        "do the two red things have the same color",
        "yes",
        {0, 1},
        {0, 1},
        {0, 1},
    ),
    (
        QuestionProgram("same", (describe(shape="ring"),), "texture"),
        "do the two rings have the same texture",
        "yes",
        {1, 3},
        {1, 3},
        {1, 3},
    ),
    (
        QuestionProgram("same", (describe(texture="striped", shape="ring"),), "size"),
        "do the two striped rings have the same size",
        "no",
        {1, 3},
        {1, 3},
        {1, 3},
    ),
    (
        QuestionProgram(
            "spatial",
            (describe(color="red", shape="circle"), describe(color="green", shape="ring")),
            "left",
        ),
        "which is further left the red circle or the green ring",
        "red",
        {0, 3},
        {0, 3},
        {0, 3},
    ),
    (
        QuestionProgram(
            "spatial",
            (describe(color="green", shape="ring"), describe(color="red", shape="circle")),
            "right",
        ),
        "which is further right the green ring or the red circle",
        "green",
        {0, 3},
        {0, 3},
        {0, 3},
    ),
    (
        QuestionProgram(
            "spatial",
            (describe(color="green", shape="ring"), describe(color="red", shape="circle")),
            "above",
        ),
        "which is higher up the green ring or the red circle",
        "red",
        {0, 3},
        {0, 3},
        {0, 3},
    ),
    (
        QuestionProgram(
            "spatial",
            (describe(color="red", shape="circle"), describe(color="green", shape="ring")),
            "below",
        ),
        "which is lower down the red circle or the green ring",
        "green",
        {0, 3},
        {0, 3},
        {0, 3},
    ),
    (
        QuestionProgram("relate", (describe(shape="ring"), describe(color="blue")), "left"),
        "what color is the ring left of the blue thing",
        "green",
        {3},
        {2, 3},
        {2, 3},
    ),
]


@pytest.mark.parametrize("case", CASES, ids=[case[1] for case in CASES])
def test_questions_match_hand_written_cases(case):
    program, text, expected, target, mentioned, evidence = case
    question = make_question(program, SCENE)
    assert " ".join(question.words) == text
    assert question.answer == expected == run_program(program, SCENE)
    assert question.target == set(target) and question.mentioned == set(mentioned)
    assert question.evidence == set(evidence)
    assert question.localized == bool(evidence)
    assert question.family == program.family and question.program == program


def test_hand_written_cases_cover_every_family():
    assert {case[0].family for case in CASES} == set(ALL_FAMILIES)


@pytest.mark.parametrize(
    "program",
    [
        QuestionProgram("query-color", (describe(shape="ring"),), "color"),  # two rings
        QuestionProgram("query-color", (describe(shape="diamond"),), "color"),  # none
        QuestionProgram("spatial", (describe(shape="ring"), describe(color="blue")), "left"),
        QuestionProgram(
            "spatial",
            (describe(color="red", shape="ring"), describe(color="green", shape="ring")),
            "above",
        ),
        QuestionProgram(
            "spatial", (describe(color="blue"), describe(shape="cross")), "left"
        ),  # one object, named twice
        QuestionProgram(
            "compare", (describe(color="red", shape="circle"), describe(color="green")), "larger"
        ),  # a tie
        QuestionProgram("compare", (describe(color="blue"), describe(shape="cross")), "smaller"),
        QuestionProgram("same", (describe(color="blue"),), "size"),  # only one
        QuestionProgram("same", (describe(texture="solid"),), "size"),  # three
        QuestionProgram("relate", (describe(shape="ring"), describe(shape="diamond")), "left"),
        QuestionProgram(
            "relate", (describe(texture="striped"), describe(color="white")), "above"
        ),  # both are
    ],
)
def test_question_without_an_answer_raises(program):
    assert (
        run_program(
            program, replace(SCENE, things=(*THINGS[:3], replace(THINGS[3], y=0.3), THINGS[4]))
        )
        is None
    )
    with pytest.raises(UserError, match="no answer"):
        make_question(
            program, replace(SCENE, things=(*THINGS[:3], replace(THINGS[3], y=0.3), THINGS[4]))
        )


def test_counts_above_three_have_no_answer():
    many = replace(SCENE, things=tuple(replace(t, color="red") for t in THINGS))
    assert run_program(QuestionProgram("count", (describe(color="red"),)), many) is None


def test_neutral_value_is_not_an_answer():
    query = QuestionProgram("query-color", (describe(shape="circle"),), "color")
    assert run_program(query, change_thing(SCENE, 0, color="gray")) is None
    compare = QuestionProgram(
        "compare", (describe(color="blue"), describe(shape="square")), "larger"
    )
    assert run_program(compare, SCENE) == "blue"
    assert run_program(compare, change_thing(SCENE, 2, size="tiny")) is None
    assert run_program(compare, change_thing(SCENE, 4, color="gray")) == "blue"
    smaller = replace(compare, about="smaller")
    assert run_program(smaller, SCENE) == "white"
    assert run_program(smaller, change_thing(SCENE, 4, color="gray")) is None


OPPOSITE = {"larger": "smaller", "left": "right", "above": "below"}
OPPOSITE |= {b: a for a, b in OPPOSITE.items()}


def slow_order(about, pair):
    """The two objects in the order of the question; the first one is the answer."""
    keys = {"left": lambda t: -t.x, "right": lambda t: t.x, "above": lambda t: -t.y}
    keys |= {"below": lambda t: t.y, "larger": lambda t: t.radius}
    keys |= {"smaller": lambda t: -t.radius}
    return sorted(pair, key=keys[about], reverse=True)


@pytest.mark.parametrize("family", CHOICE_FAMILIES)
def test_choice_questions_are_symmetric(family):
    """Swapping the two names keeps the answer; asking for the opposite changes it."""
    relations = set()
    for i in range(15):
        scene, questions = generate_scene("val", 3, i, families=[family])
        for question in questions:
            program = question.program
            this, that = slow_order(program.about, [scene.things[i] for i in question.target])
            assert question.answer == this.color
            assert run_program(replace(program, sides=program.sides[::-1]), scene) == this.color
            assert run_program(replace(program, about=OPPOSITE[program.about]), scene) == that.color
            named = [word for word in question.words if word in FAMILIES[family]]
            assert len(named) == 2 and set(named) == {this.color, that.color}
            relations.add(program.about)
    assert relations == set(COMPARISONS if family == "compare" else RELATIONS)


def test_unknown_family_raises():
    with pytest.raises(UserError, match="riddle"):
        run_program(QuestionProgram("riddle", (describe(color="red"),)), SCENE)


def slow_evidence(program, scene):
    """Every intervention on every object, without shortcuts."""
    base = run_program(program, scene)
    found = set()
    for i in range(len(scene.things)):
        worlds = [
            remove_thing(scene, i),
            *(change_thing(scene, i, **{n: v}) for n, v in NEUTRAL.items()),
        ]
        if any(run_program(program, world) != base for world in worlds):
            found.add(i)
    return found


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_evidence_agrees_with_all_interventions(family):
    for i in range(12):
        scene, questions = generate_scene("val", 2, i, families=[family])
        for question in questions:
            assert question.evidence == slow_evidence(question.program, scene)
            assert question.evidence == find_evidence(question.program, scene)
            assert question.evidence == question.mentioned
            assert question.target <= question.mentioned
            assert question.localized == (question.answer not in ("no", "0") or family == "same")
            sides = {"exist": 1, "query-color": 1, "query-shape": 1, "query-size": 1}
            sides |= {"query-texture": 1, "compare": 2, "same": 2, "spatial": 2, "relate": 1}
            if question.localized and family != "count":
                assert len(question.target) == sides[family]
            if family == "count":
                assert len(question.target) == int(question.answer)


def test_questions_use_only_listed_words():
    used = {word for i in range(60) for q in generate_scene("train", 1, i)[1] for word in q.words}
    assert used <= set(WORDS) and list(WORDS) == sorted(set(WORDS))
    assert all(word == word.lower() and word.isalpha() for word in WORDS)


def test_content_words_are_the_arguments():
    question = make_question(CASES[6][0], SCENE)
    assert question.words == ("what", "color", "is", "the", "large", "circle")
    assert question.content == (False, True, False, False, True, True)
    found = {}
    for case in CASES:
        question = make_question(case[0], SCENE)
        if question.family in CHOICE_FAMILIES:
            marked = zip(question.words, question.content, strict=True)
            found[question.program.about] = " ".join(word for word, content in marked if content)
    assert found == {
        "larger": "larger blue cross green ring",
        "smaller": "smaller blue cross white square",
        "left": "left red circle green ring",
        "right": "right green ring red circle",
        "above": "higher green ring red circle",
        "below": "lower red circle green ring",
    }
    assert [w for w in WORDS if not is_content_word(w)] == (
        "a an are do down further have how is many of or same the there thing things two up what"
        " which".split()
    )


def test_noun_phrases_and_plurals():
    assert noun_phrase(describe(color="red", size="large")) == ("large", "red", "thing")
    assert [plural(n) for n in ("cross", "ring", "thing")] == ["crosses", "rings", "things"]
    words = program_words(QuestionProgram("count", (describe(size="small", shape="cross"),)))
    assert words[-4:] == (
        "small",
        "crosses",
        "are",
        "there",
    )


def test_answers_are_the_union_of_all_families():
    assert set(ANSWERS) == {a for answers in FAMILIES.values() for a in answers}
    assert len(set(ANSWERS)) == len(ANSWERS)


def test_chance_accuracy_of_every_family():
    assert (
        chance_accuracy("exist") == chance_accuracy("same") == 1 / 2
        and chance_accuracy("count") == 1 / 4
    )
    assert chance_accuracy("query-size") == 1 / 3 and chance_accuracy("query-shape") == 1 / 6
    assert chance_accuracy("query-color") == chance_accuracy("relate") == 1 / 8
    assert (
        chance_accuracy("query-texture")
        == chance_accuracy("compare")
        == chance_accuracy("spatial")
        == 1 / 2
    )
