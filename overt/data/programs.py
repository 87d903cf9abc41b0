"""The programs behind the questions of CLEVR, run on its scenes.

Johnson et al., "CLEVR: A Diagnostic Dataset for Compositional Language and Elementary Visual
Reasoning", CVPR 2017, https://arxiv.org/abs/1612.06890, supplementary B. A program is a list of
steps, each on the results of earlier ones. Running it says what the answer is and from which things
it is read, so that there is a target for attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from overt.errors import BadInput

ATTRIBUTES = ("color", "shape", "size", "material")
SIDES = ("left", "right", "front", "behind")
LONGEST = 64  # steps; no official program has more than about 25

Objects = frozenset[int]


@dataclass(frozen=True)
class Scene:
    """Things with their attributes and the pixels (x, y) they stand at, and who is beside whom.

    `beside[side][i]` are the things that are on that side of thing i.
    """

    things: tuple[tuple[str, str, str, str], ...]
    points: tuple[tuple[float, float], ...]
    beside: dict[str, tuple[Objects, ...]]


@dataclass(frozen=True)
class Outcome:
    """What a program comes to: the answer, and the things it is read from."""

    answer: str
    things: Objects


def run(program: Sequence[dict[str, Any]], scene: Scene) -> Outcome:
    """Run a program on a scene; one that cannot be run is `BadInput`, with the step.

    The things of the outcome are those in the sets or single things that the last step reads:
    those counted, the one whose color is asked, both sides of a comparison.
    """
    if not 0 < len(program) <= LONGEST:
        raise BadInput(f"a program of {len(program)} steps")
    values: list[Any] = []
    for number, step in enumerate(program):
        try:
            given = [values[place] for place in step["inputs"] if 0 <= place < number]
            if len(given) != len(step["inputs"]):
                raise ValueError("it reads a step that is not before it")
            values.append(_step(step, given, scene))
        except (KeyError, ValueError, TypeError, IndexError, AttributeError) as problem:
            raise BadInput(f"step {number} of a program cannot be run: {problem}") from problem
    return Outcome(_say(values[-1]), _read_by(program, values, len(program) - 1))


def name(step: dict[str, Any]) -> str:
    """What a step does; the files have it under one of two keys."""
    return str(step.get("function") or step["type"])


def family(program: Sequence[dict[str, Any]]) -> str:
    """Which of the five kinds of question a program asks, by its last step."""
    last = name(program[-1])
    if last in ("count", "exist"):
        return last
    if last in ("equal_integer", "less_than", "greater_than"):
        return "compare numbers"
    return "compare attributes" if last.startswith("equal_") else "query attribute"


def _step(step: dict[str, Any], given: list[Any], scene: Scene) -> Any:
    kind, words = name(step), step.get("value_inputs") or step.get("side_inputs") or []
    verb, _, attribute = kind.partition("_")
    match kind, given:
        case "scene", []:
            return frozenset(range(len(scene.things)))
        case "unique", [found]:
            if len(found) != 1:
                raise ValueError(f"{len(found)} things where one is meant")
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
        raise ValueError(f"nothing is called {kind!r:.40}")
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
    raise ValueError(f"{kind} does not go with what it is given")


def _read_by(program: Sequence[dict[str, Any]], values: Sequence[Any], place: int) -> Objects:
    """The things that a step reads, looked for further back where it reads words or numbers."""
    found: Objects = frozenset()
    for before in program[place]["inputs"]:
        value = values[before]
        if isinstance(value, frozenset):
            found |= value
        elif isinstance(value, int) and name(program[before]) == "unique":
            found |= {value}
        else:
            found |= _read_by(program, values, before)
    return found


def _say(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
