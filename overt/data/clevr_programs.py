"""Execution of CLEVR's functional programs on its scenes.

Johnson et al., "CLEVR: A Diagnostic Dataset for Compositional Language and Elementary Visual
Reasoning", CVPR 2017, https://arxiv.org/abs/1612.06890, supplementary B. A program is a list of
steps, each on the results of earlier ones. Running it gives the answer and the objects that it is
read from, which are the target for attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from overt.errors import UserError

ATTRIBUTES = ("color", "shape", "size", "material")
SIDES = ("left", "right", "front", "behind")
MAX_STEPS = 64  # steps; no official program has more than about 25

Objects = frozenset[int]


@dataclass(frozen=True)
class ClevrScene:
    """Objects with attributes and pixel positions (x, y), and their spatial relations.

    `beside[side][i]` are the objects on that side of object i.
    """

    things: tuple[tuple[str, str, str, str], ...]
    points: tuple[tuple[float, float], ...]
    beside: dict[str, tuple[Objects, ...]]


@dataclass(frozen=True)
class ProgramResult:
    """Answer of a program, and the objects that it is read from."""

    answer: str
    things: Objects


def run_program(program: Sequence[dict[str, Any]], scene: ClevrScene) -> ProgramResult:
    """Run a program on a scene; raise `UserError` with the step if that fails.

    The objects of the result are those that the last step reads: the ones counted, the one whose
    color is queried, both sides of a comparison.
    """
    if not 0 < len(program) <= MAX_STEPS:
        raise UserError(f"a program of {len(program)} steps")
    values: list[Any] = []
    for number, step in enumerate(program):
        try:
            given = [values[place] for place in step["inputs"] if 0 <= place < number]
            if len(given) != len(step["inputs"]):
                raise ValueError("it reads a later step")
            values.append(_step(step, given, scene))
        except (KeyError, ValueError, TypeError, IndexError, AttributeError) as problem:
            raise UserError(f"step {number} of a program cannot be run: {problem}") from problem
    return ProgramResult(_answer_word(values[-1]), _read_by(program, values, len(program) - 1))


def step_name(step: dict[str, Any]) -> str:
    """Return the function of a step; the files have it under one of two keys."""
    return str(step.get("function") or step["type"])


def question_family(program: Sequence[dict[str, Any]]) -> str:
    """Return which of the five kinds of question a program asks, by its last step."""
    last = step_name(program[-1])
    if last in ("count", "exist"):
        return last
    if last in ("equal_integer", "less_than", "greater_than"):
        return "compare numbers"
    return "compare attributes" if last.startswith("equal_") else "query attribute"


def _step(step: dict[str, Any], given: list[Any], scene: ClevrScene) -> Any:
    kind, words = step_name(step), step.get("value_inputs") or step.get("side_inputs") or []
    verb, _, attribute = kind.partition("_")
    match kind, given:
        case "scene", []:
            return frozenset(range(len(scene.things)))
        case "unique", [found]:
            if len(found) != 1:
                raise ValueError(f"expected one object, found {len(found)}")
            return next(iter(found))
        case "relate", [int(thing)]:
            return scene.beside[words[0]][thing]
        case "union", [one, other]:
            return one | other
        case "intersect", [one, other]:
            return one & other
        case "count", [found]:
            return len(found)
        case "exist", [found]:
            return bool(found)
        case "less_than", [one, other]:
            return one < other
        case "greater_than", [one, other]:
            return one > other
    if attribute == "integer" and verb == "equal":
        return given[0] == given[1]
    if attribute not in ATTRIBUTES:
        raise ValueError(f"unknown function {kind!r:.40}")
    at = ATTRIBUTES.index(attribute)
    match verb, given:
        case "filter", [found]:
            return frozenset(one for one in found if scene.things[one][at] == words[0])
        case "same", [int(thing)]:
            same = scene.things[thing][at]
            every = enumerate(scene.things)
            return frozenset(one for one, has in every if has[at] == same and one != thing)
        case "query", [int(thing)]:
            return scene.things[thing][at]
        case "equal", [str(one), str(other)]:
            return one == other
    raise ValueError(f"{kind} got inputs of the wrong type")


def _read_by(program: Sequence[dict[str, Any]], values: Sequence[Any], place: int) -> Objects:
    """Return the objects that a step reads, traced back through words and numbers."""
    found: Objects = frozenset()
    for before in program[place]["inputs"]:
        value = values[before]
        if isinstance(value, frozenset):
            found |= value
        elif isinstance(value, int) and step_name(program[before]) == "unique":
            found |= {value}
        else:
            found |= _read_by(program, values, before)
    return found


def _answer_word(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
