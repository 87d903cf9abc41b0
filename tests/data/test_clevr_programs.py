from typing import Any

import pytest

from overt.data.clevr_programs import ClevrScene, question_family, run_program
from overt.errors import UserError

# a big red metal cube left of a small red rubber ball, which is left of a small blue metal ball
SCENE = ClevrScene(
    (
        ("red", "cube", "large", "metal"),
        ("red", "sphere", "small", "rubber"),
        ("blue", "sphere", "small", "metal"),
    ),
    ((10.0, 20.0), (30.0, 25.0), (50.0, 22.0)),
    {
        "left": (frozenset(), frozenset({0}), frozenset({0, 1})),
        "right": (frozenset({1, 2}), frozenset({2}), frozenset()),
        "front": (frozenset({1, 2}), frozenset(), frozenset({1})),
        "behind": (frozenset(), frozenset({0, 2}), frozenset({0})),
    },
)


def make_step(
    kind: str, *inputs: int, value: str | None = None, key: str = "function"
) -> dict[str, Any]:
    return {key: kind, "inputs": list(inputs), "value_inputs": [] if value is None else [value]}


def make_chain(*steps: str | tuple[str, str]) -> list[dict[str, Any]]:
    """A program in which each step takes the output of the step before."""
    found = [make_step("scene")]
    for one in steps:
        kind, value = one if isinstance(one, tuple) else (one, None)
        found.append(make_step(kind, len(found) - 1, value=value))
    return found


RED, BLUE = ("filter_color", "red"), ("filter_color", "blue")
CUBE, BALL = ("filter_shape", "cube"), ("filter_shape", "sphere")


@pytest.mark.parametrize(
    ("program", "answer", "objects", "family"),
    [
        (make_chain("count"), "3", {0, 1, 2}, "count"),
        (make_chain(RED, "count"), "2", {0, 1}, "count"),
        (make_chain(("filter_material", "metal"), BALL, "exist"), "yes", {2}, "exist"),
        (make_chain(("filter_color", "green"), "exist"), "no", set(), "exist"),
        (make_chain(BLUE, "unique", "query_size"), "small", {2}, "query attribute"),
        (
            make_chain(CUBE, "unique", ("relate", "right"), BLUE, "unique", "query_material"),
            "metal",
            {2},
            "query attribute",
        ),
        (
            make_chain(BLUE, "unique", "same_shape", "unique", "query_color"),
            "red",
            {1},
            "query attribute",
        ),
        (make_chain(BLUE, "unique", ("relate", "left"), "count"), "2", {0, 1}, "count"),
    ],
)
def test_programs_give_the_expected_answer_and_objects(program, answer, objects, family):
    outcome = run_program(program, SCENE)
    assert (outcome.answer, set(outcome.things), question_family(program)) == (
        answer,
        objects,
        family,
    )


def test_programs_with_two_branches():
    reds = [
        *make_chain(RED, "count"),
        make_step("scene"),
        make_step("filter_color", 3, value="blue"),
    ]
    compared = [*reds, make_step("count", 4), make_step("greater_than", 2, 5)]
    outcome = run_program(compared, SCENE)
    assert outcome.answer == "yes" and outcome.things == {0, 1, 2}
    assert question_family(compared) == "compare numbers"
    assert run_program([*compared[:-1], make_step("less_than", 2, 5)], SCENE).answer == "no"
    assert run_program([*compared[:-1], make_step("equal_integer", 2, 5)], SCENE).answer == "no"
    either = [*make_chain(RED), make_step("scene"), make_step("filter_shape", 2, value="cube")]
    assert run_program(
        [*either, make_step("union", 1, 3), make_step("count", 4)], SCENE
    ).things == {0, 1}
    assert run_program(
        [*either, make_step("intersect", 1, 3), make_step("count", 4)], SCENE
    ).things == {0}
    one = [
        *make_chain(CUBE, "unique", "query_color"),
        make_step("scene"),
        make_step("filter_color", 4),
    ]
    one[5]["value_inputs"] = ["blue"]
    equal = [
        *one,
        make_step("unique", 5),
        make_step("query_color", 6),
        make_step("equal_color", 3, 7),
    ]
    assert run_program(equal, SCENE).answer == "no" and run_program(equal, SCENE).things == {0, 2}
    assert question_family(equal) == "compare attributes"


def test_alternative_key_names_are_read():
    program = [
        make_step("scene", key="type"),
        make_step("filter_color", 0, value="red", key="type"),
    ]
    program[1]["side_inputs"] = program[1].pop("value_inputs")
    assert run_program([*program, make_step("count", 1, key="type")], SCENE).answer == "2"


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ([], "0 steps"),
        ([make_step("scene")] * 65, "65 steps"),
        (make_chain("unique"), "step 1 .*one .*3"),
        (make_chain("dance"), "step 1 .*'dance'"),
        (make_chain("query_color"), "step 1 .*type"),
        ([make_step("count", 0)], "step 0 .*later"),
        ([make_step("scene"), make_step("count", -1)], "step 1 .*later"),
        ([make_step("scene"), {"function": "count"}], "step 1"),
        ([{"inputs": []}], "step 0"),
        (make_chain(RED, "count", ("relate", "above")), "step 3"),
        (make_chain(BLUE, "unique", ("relate", "above")), "step 3"),
        (make_chain(("filter_color", "red"), "count", "count"), "step 3"),
    ],
)
def test_invalid_programs_raise_with_their_step(program, message):
    with pytest.raises(UserError, match=message):
        run_program(program, SCENE)
