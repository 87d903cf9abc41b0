from typing import Any

import pytest

from overt.data.programs import Scene, family, run
from overt.errors import BadInput

# a big red metal cube left of a small red rubber ball, which is left of a small blue metal ball
SCENE = Scene(
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


def step(
    kind: str, *inputs: int, value: str | None = None, key: str = "function"
) -> dict[str, Any]:
    return {key: kind, "inputs": list(inputs), "value_inputs": [] if value is None else [value]}


def chain(*steps: str | tuple[str, str]) -> list[dict[str, Any]]:
    """A program whose steps each read the one before."""
    found = [step("scene")]
    for one in steps:
        kind, value = one if isinstance(one, tuple) else (one, None)
        found.append(step(kind, len(found) - 1, value=value))
    return found


RED, BLUE = ("filter_color", "red"), ("filter_color", "blue")
CUBE, BALL = ("filter_shape", "cube"), ("filter_shape", "sphere")


@pytest.mark.parametrize(
    ("program", "answer", "things", "kind"),
    [
        (chain("count"), "3", {0, 1, 2}, "count"),
        (chain(RED, "count"), "2", {0, 1}, "count"),
        (chain(("filter_material", "metal"), BALL, "exist"), "yes", {2}, "exist"),
        (chain(("filter_color", "green"), "exist"), "no", set(), "exist"),
        (chain(BLUE, "unique", "query_size"), "small", {2}, "query attribute"),
        (
            chain(CUBE, "unique", ("relate", "right"), BLUE, "unique", "query_material"),
            "metal",
            {2},
            "query attribute",
        ),
        (
            chain(BLUE, "unique", "same_shape", "unique", "query_color"),
            "red",
            {1},
            "query attribute",
        ),
        (chain(BLUE, "unique", ("relate", "left"), "count"), "2", {0, 1}, "count"),
    ],
)
def test_programs_by_hand(program, answer, things, kind):
    outcome = run(program, SCENE)
    assert (outcome.answer, set(outcome.things), family(program)) == (answer, things, kind)


def test_two_branches():
    reds = [*chain(RED, "count"), step("scene"), step("filter_color", 3, value="blue")]
    compared = [*reds, step("count", 4), step("greater_than", 2, 5)]
    outcome = run(compared, SCENE)
    assert outcome.answer == "yes" and outcome.things == {0, 1, 2}
    assert family(compared) == "compare numbers"
    assert run([*compared[:-1], step("less_than", 2, 5)], SCENE).answer == "no"
    assert run([*compared[:-1], step("equal_integer", 2, 5)], SCENE).answer == "no"
    either = [*chain(RED), step("scene"), step("filter_shape", 2, value="cube")]
    assert run([*either, step("union", 1, 3), step("count", 4)], SCENE).things == {0, 1}
    assert run([*either, step("intersect", 1, 3), step("count", 4)], SCENE).things == {0}
    one = [*chain(CUBE, "unique", "query_color"), step("scene"), step("filter_color", 4)]
    one[5]["value_inputs"] = ["blue"]
    equal = [*one, step("unique", 5), step("query_color", 6), step("equal_color", 3, 7)]
    assert run(equal, SCENE).answer == "no" and run(equal, SCENE).things == {0, 2}
    assert family(equal) == "compare attributes"


def test_the_other_names_of_keys():
    program = [step("scene", key="type"), step("filter_color", 0, value="red", key="type")]
    program[1]["side_inputs"] = program[1].pop("value_inputs")
    assert run([*program, step("count", 1, key="type")], SCENE).answer == "2"


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ([], "0 steps"),
        ([step("scene")] * 65, "65 steps"),
        (chain("unique"), "step 1 .* 3 things where one is meant"),
        (chain("dance"), "step 1 .* nothing is called 'dance'"),
        (chain("query_color"), "step 1 .* does not go with"),
        ([step("count", 0)], "step 0 .* not before it"),
        ([step("scene"), step("count", -1)], "step 1 .* not before it"),
        ([step("scene"), {"function": "count"}], "step 1"),
        ([{"inputs": []}], "step 0"),
        (chain(RED, "count", ("relate", "above")), "step 3"),
        (chain(BLUE, "unique", ("relate", "above")), "step 3"),
        (chain(("filter_color", "red"), "count", "count"), "step 3"),
    ],
)
def test_what_cannot_be_run_is_named(program, said):
    with pytest.raises(BadInput, match=said):
        run(program, SCENE)
