"""Questions about scenes: small programs, their words, their answers and their deciding evidence.

A question is a program over the things of a scene. Which things decide its answer is not declared
but found by intervention: take a thing away, or give one of its attributes a value no word names,
and see whether the answer changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from overt.data.scenes.world import (
    ATTRIBUTES,
    COLORS,
    NEUTRAL,
    SHAPES,
    SIZES,
    TEXTURES,
    VALUES,
    Scene,
    Thing,
    changed,
    without,
)
from overt.errors import BadInput

YES_NO = ("yes", "no")
COUNTS = ("0", "1", "2", "3")
FAMILIES: dict[str, tuple[str, ...]] = {
    "exist": YES_NO,
    "count": COUNTS,
    "query-color": COLORS,
    "query-shape": SHAPES,
    "query-size": SIZES,
    "query-texture": TEXTURES,
    "compare": COLORS,
    "same": YES_NO,
    "spatial": COLORS,
    "relate": COLORS,
}
ALL = tuple(FAMILIES)
# "Which is larger, the red ring or the blue circle?": the words name the two possible answers.
WHICH = ("compare", "spatial")
ANSWERS: tuple[str, ...] = (*YES_NO, *COUNTS, *COLORS, *SHAPES, *SIZES, *TEXTURES)

# Relation -> (axis, side): A is left of B when side * (B - A) > 0 along the axis.
RELATIONS = {"left": (0, 1), "right": (0, -1), "above": (1, 1), "below": (1, -1)}
COMPARISONS = {"larger": 1, "smaller": -1}
PLACES = {
    "left": ("further", "left"),
    "right": ("further", "right"),
    "above": ("higher", "up"),
    "below": ("lower", "down"),
}
PLURALS = {shape: shape + ("es" if shape == "cross" else "s") for shape in SHAPES}
SPOKEN = ("size", "texture", "color", "shape")  # the order of attributes in speech
_ARGUMENTS = {*ATTRIBUTES, *RELATIONS, *COMPARISONS, *PLURALS.values(), "higher", "lower"}.union(
    *VALUES.values()
)
_PLAIN = (
    "a an are do down further have how is many of or same the there thing things two up what which"
).split()
WORDS: tuple[str, ...] = tuple(sorted(_ARGUMENTS.union(_PLAIN)))

Description = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Program:
    """What is asked: the family, the things described, the attribute or relation it is about."""

    family: str
    sides: tuple[Description, ...]
    about: str = ""


@dataclass(frozen=True, slots=True)
class Question:
    """A program put into words about one scene, with its answer and the truth about both.

    `target`: the things the answer is read from. `mentioned`: all things the words refer to.
    `evidence`: by intervention, the things on which the answer depends. `localized` is false where
    no thing decides (nothing there to see, none to count). `content` marks the words that carry an
    argument of the program.
    """

    family: str
    words: tuple[str, ...]
    content: tuple[bool, ...]
    answer: str
    program: Program
    target: frozenset[int]
    mentioned: frozenset[int]
    evidence: frozenset[int]
    localized: bool


def put_question(program: Program, scene: Scene) -> Question:
    """The question a program is in a scene; BadInput where it has no answer there."""
    found = answer(program, scene)
    if found is None:
        raise BadInput(f"{' '.join(words(program))!r} has no answer in scene {scene.index}")
    spoken = words(program)
    content = tuple(is_content(word) for word in spoken)
    target, mentioned = referents(program, scene.things)
    proof = evidence(program, scene)
    return Question(
        program.family, spoken, content, found, program, target, mentioned, proof, bool(proof)
    )


def answer(program: Program, scene: Scene) -> str | None:
    """Run a program on a scene; None where it has no answer: "the ring" where there are two."""
    return _run(program, scene.things)


def evidence(program: Program, scene: Scene) -> frozenset[int]:
    """The things whose removal, or neutral change in one attribute, alters the answer.

    Interventions only ever take a thing out of a description, so that a thing which fits none of
    the program's descriptions cannot matter and is not tried.
    """
    base = answer(program, scene)
    fitting = {i for side in program.sides for i in fitting_things(side, scene.things)}
    return frozenset(i for i in fitting if _matters(program, scene, i, base))


def _matters(program: Program, scene: Scene, i: int, base: str | None) -> bool:
    return answer(program, without(scene, i)) != base or any(
        answer(program, changed(scene, i, **{name: value})) != base
        for name, value in NEUTRAL.items()
    )


def fitting_things(description: Description, things: Sequence[Thing]) -> tuple[int, ...]:
    """The indices of the things a description fits."""
    fitting = []
    for i, thing in enumerate(things):  # plain loops: this is most of the cost of a question
        for name, value in description:
            if getattr(thing, name) != value:
                break
        else:
            fitting.append(i)
    return tuple(fitting)


def referents(program: Program, things: Sequence[Thing]) -> tuple[frozenset[int], frozenset[int]]:
    """The things the answer is read from, and all things the words refer to."""
    if program.family == "relate":
        anchor = fitting_things(program.sides[1], things)
        target = _related(program, things)
        return frozenset(target), frozenset((*target, *anchor))
    every = frozenset(i for side in program.sides for i in fitting_things(side, things))
    return every, every


def _related(program: Program, things: Sequence[Thing]) -> tuple[int, ...]:
    """The things that fit the first description and stand in the relation to the one anchor."""
    anchor = _only(program.sides[1], things)
    if anchor is None:
        return ()
    fitting = fitting_things(program.sides[0], things)
    return tuple(i for i in fitting if _stands(program.about, things[i], anchor))


def _stands(relation: str, first: Thing, second: Thing) -> bool:
    return _lead(relation, first, second) > 0


def _lead(relation: str, first: Thing, second: Thing) -> float:
    """How much further to that side the first thing lies than the second."""
    axis, side = RELATIONS[relation]
    return side * (second.y - first.y if axis else second.x - first.x)


def _only(description: Description, things: Sequence[Thing]) -> Thing | None:
    """The one thing a description fits, or None when there is none or more than one."""
    fitting = fitting_things(description, things)
    return things[fitting[0]] if len(fitting) == 1 else None


def _run(program: Program, things: Sequence[Thing]) -> str | None:
    match program.family:
        case "exist":
            return "yes" if fitting_things(program.sides[0], things) else "no"
        case "count":
            count = len(fitting_things(program.sides[0], things))
            return COUNTS[count] if count < len(COUNTS) else None
        case "query-color" | "query-shape" | "query-size" | "query-texture":
            return _named(_only(program.sides[0], things), program.about)
        case "relate":
            related = _related(program, things)
            return _named(things[related[0]] if len(related) == 1 else None, "color")
        case "same":
            pair = [things[i] for i in fitting_things(program.sides[0], things)]
            return _alike(program.about, *pair) if len(pair) == 2 else None
        case "compare" | "spatial":
            first, second = (_only(side, things) for side in program.sides)
            return None if first is None or second is None else _judge(program, first, second)
        case family:
            raise BadInput(f"no question family {family!r}: choose of {', '.join(FAMILIES)}")


def _named(thing: Thing | None, attribute: str) -> str | None:
    """The value of a thing's attribute, or None where there is no word for it."""
    value = None if thing is None else getattr(thing, attribute)
    return value if value in VALUES[attribute] else None


def _alike(attribute: str, first: Thing, second: Thing) -> str | None:
    """Yes or no for two things; None where the attribute of one has no word."""
    one, two = _named(first, attribute), _named(second, attribute)
    return None if one is None or two is None else YES_NO[one != two]


def _judge(program: Program, first: Thing, second: Thing) -> str | None:
    """The answer about two things; None where an attribute it needs has no word, or they tie."""
    if program.family == "spatial":
        return _which(_lead(program.about, first, second), first, second)
    one, two = _named(first, "size"), _named(second, "size")
    if one is None or two is None:
        return None
    step = SIZES.index(one) - SIZES.index(two)
    return _which(COMPARISONS[program.about] * step, first, second)


def _which(lead: float | int, first: Thing, second: Thing) -> str | None:
    """The color of the thing that is ahead; None where neither is."""
    return _named(first if lead > 0 else second, "color") if lead else None


def chance(family: str) -> float:
    """The share of right answers that words alone can reach: a guess among those they leave."""
    return 1 / 2 if family in WHICH else 1 / len(FAMILIES[family])


def words(program: Program) -> tuple[str, ...]:
    """A program in plain words."""
    sides = [noun_phrase(side) for side in program.sides]
    match program.family:
        case "exist":
            return ("is", "there", "an" if sides[0][0] == "orange" else "a", *sides[0])
        case "count":
            return ("how", "many", *sides[0][:-1], plural(sides[0][-1]), "are", "there")
        case "compare":
            return ("which", "is", program.about, *_either(sides))
        case "same":
            both = ("the", "two", *sides[0][:-1], plural(sides[0][-1]))
            return ("do", *both, "have", "the", "same", program.about)
        case "spatial":
            return ("which", "is", *PLACES[program.about], *_either(sides))
        case "relate":
            side = (*_relation(program.about), "the", *sides[1])
            return ("what", "color", "is", "the", *sides[0], *side)
        case _:
            return ("what", program.about, "is", "the", *sides[0])


def is_content(word: str) -> bool:
    """Whether a word carries an argument of a program: a value, an attribute or a relation."""
    return word in _ARGUMENTS


def noun_phrase(description: Description) -> tuple[str, ...]:
    """A description in words, the noun last: "large striped ring", "red thing"."""
    said = dict(description)
    return (*(said[n] for n in SPOKEN[:-1] if n in said), said.get("shape", "thing"))


def plural(noun: str) -> str:
    """The noun for several."""
    return PLURALS.get(noun, noun + "s")


def _either(sides: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    return ("the", *sides[0], "or", "the", *sides[1])


def _relation(name: str) -> tuple[str, ...]:
    return (name, "of") if name in ("left", "right") else (name,)
