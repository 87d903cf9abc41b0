"""Questions about scenes: small programs, their words, answers and deciding evidence.

A question is a program over the things of a scene. Its evidence is not declared but found by
intervention: remove a thing, or set one of its attributes to a value without a word, and test
whether the answer changes.
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
    change_thing,
    remove_thing,
)
from overt.errors import UserError

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
ALL_FAMILIES = tuple(FAMILIES)
# "Which is larger, the red ring or the blue circle?": the words name the two possible answers.
CHOICE_FAMILIES = ("compare", "spatial")
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
ATTRIBUTE_ORDER = ("size", "texture", "color", "shape")  # word order of attributes
_ARGUMENTS = {*ATTRIBUTES, *RELATIONS, *COMPARISONS, *PLURALS.values(), "higher", "lower"}.union(
    *VALUES.values()
)
_PLAIN = (
    "a an are do down further have how is many of or same the there thing things two up what which"
).split()
WORDS: tuple[str, ...] = tuple(sorted(_ARGUMENTS.union(_PLAIN)))

Description = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class QuestionProgram:
    """A question: its family, the described things, and the attribute or relation it is about."""

    family: str
    sides: tuple[Description, ...]
    about: str = ""


@dataclass(frozen=True, slots=True)
class SceneQuestion:
    """A program in words about one scene, with its answer and ground truth.

    `target`: the things the answer is read from. `mentioned`: all things the words refer to.
    `evidence`: by intervention, the things on which the answer depends. `localized` is false where
    no thing decides (nothing visible, none to count). `content` marks the words that carry an
    argument of the program.
    """

    family: str
    words: tuple[str, ...]
    content: tuple[bool, ...]
    answer: str
    program: QuestionProgram
    target: frozenset[int]
    mentioned: frozenset[int]
    evidence: frozenset[int]
    localized: bool


def make_question(program: QuestionProgram, scene: Scene) -> SceneQuestion:
    """Return the question of a program in a scene; raise `UserError` if it has no answer there."""
    found = run_program(program, scene)
    if found is None:
        raise UserError(
            f"{' '.join(program_words(program))!r} has no answer in scene {scene.index}"
        )
    spoken = program_words(program)
    content = tuple(is_content_word(word) for word in spoken)
    target, mentioned = find_referents(program, scene.things)
    proof = find_evidence(program, scene)
    return SceneQuestion(
        program.family, spoken, content, found, program, target, mentioned, proof, bool(proof)
    )


def run_program(program: QuestionProgram, scene: Scene) -> str | None:
    """Run a program on a scene; None if it has no answer, such as "the ring" for two rings.

    Args:
        program: The question.
        scene: The scene.

    Returns:
        The answer, or None.

    Example:
        >>> from overt.data.scenes.world import random_scene
        >>> scene = random_scene("train", seed=0, index=0)
        >>> run_program(QuestionProgram("exist", (Description(),)), scene)
        'yes'
    """
    return _evaluate(program, scene.things)


def find_evidence(program: QuestionProgram, scene: Scene) -> frozenset[int]:
    """Return the things whose removal, or neutral change in one attribute, changes the answer.

    Interventions only take things out of descriptions, so a thing that fits none of the program's
    descriptions cannot matter and is not tried.
    """
    base = run_program(program, scene)
    fitting = {i for side in program.sides for i in matching_things(side, scene.things)}
    return frozenset(i for i in fitting if _is_evidence(program, scene, i, base))


def _is_evidence(program: QuestionProgram, scene: Scene, i: int, base: str | None) -> bool:
    return run_program(program, remove_thing(scene, i)) != base or any(
        run_program(program, change_thing(scene, i, **{name: value})) != base
        for name, value in NEUTRAL.items()
    )


def matching_things(description: Description, things: Sequence[Thing]) -> tuple[int, ...]:
    """Return the indices of the things that match a description."""
    fitting = []
    for i, thing in enumerate(things):  # plain loops: this dominates the cost of a question
        for name, value in description:
            if getattr(thing, name) != value:
                break
        else:
            fitting.append(i)
    return tuple(fitting)


def find_referents(
    program: QuestionProgram, things: Sequence[Thing]
) -> tuple[frozenset[int], frozenset[int]]:
    """Return the things the answer is read from, and all things the words refer to."""
    if program.family == "relate":
        anchor = matching_things(program.sides[1], things)
        target = _related(program, things)
        return frozenset(target), frozenset((*target, *anchor))
    every = frozenset(i for side in program.sides for i in matching_things(side, things))
    return every, every


def _related(program: QuestionProgram, things: Sequence[Thing]) -> tuple[int, ...]:
    """Return the things that match the first description and the relation to the anchor."""
    anchor = _only(program.sides[1], things)
    if anchor is None:
        return ()
    fitting = matching_things(program.sides[0], things)
    return tuple(i for i in fitting if signed_offset(program.about, things[i], anchor) > 0)


def signed_offset(relation: str, one: Thing, other: Thing) -> float:
    """Return how far `one` is on the named side of `other`; negative on the other side."""
    axis, side = RELATIONS[relation]
    return side * ((other.x - one.x) if axis == 0 else (other.y - one.y))


def _only(description: Description, things: Sequence[Thing]) -> Thing | None:
    """Return the single thing that matches a description, or None."""
    fitting = matching_things(description, things)
    return things[fitting[0]] if len(fitting) == 1 else None


def _evaluate(program: QuestionProgram, things: Sequence[Thing]) -> str | None:
    match program.family:
        case "exist":
            return "yes" if matching_things(program.sides[0], things) else "no"
        case "count":
            count = len(matching_things(program.sides[0], things))
            return COUNTS[count] if count < len(COUNTS) else None
        case "query-color" | "query-shape" | "query-size" | "query-texture":
            return _named_value(_only(program.sides[0], things), program.about)
        case "relate":
            related = _related(program, things)
            return _named_value(things[related[0]] if len(related) == 1 else None, "color")
        case "same":
            pair = [things[i] for i in matching_things(program.sides[0], things)]
            return _same_value(program.about, *pair) if len(pair) == 2 else None
        case "compare" | "spatial":
            first, second = (_only(side, things) for side in program.sides)
            return (
                None if first is None or second is None else _compare_pair(program, first, second)
            )
        case family:
            raise UserError(
                f"Unknown question family {family!r}: choose from {', '.join(FAMILIES)}."
            )


def _named_value(thing: Thing | None, attribute: str) -> str | None:
    """Return the value of an attribute, or None if it has no word."""
    value = None if thing is None else getattr(thing, attribute)
    return value if value in VALUES[attribute] else None


def _same_value(attribute: str, first: Thing, second: Thing) -> str | None:
    """Return yes or no for two things; None if an attribute has no word."""
    one, two = _named_value(first, attribute), _named_value(second, attribute)
    return None if one is None or two is None else YES_NO[one != two]


def _compare_pair(program: QuestionProgram, first: Thing, second: Thing) -> str | None:
    """Return the answer about two things; None for a tie or an attribute without a word."""
    if program.family == "spatial":
        return _color_ahead(signed_offset(program.about, first, second), first, second)
    one, two = _named_value(first, "size"), _named_value(second, "size")
    if one is None or two is None:
        return None
    step = SIZES.index(one) - SIZES.index(two)
    return _color_ahead(COMPARISONS[program.about] * step, first, second)


def _color_ahead(lead: float | int, first: Thing, second: Thing) -> str | None:
    """Return the color of the thing that is ahead; None for a tie."""
    return _named_value(first if lead > 0 else second, "color") if lead else None


def chance_accuracy(family: str) -> float:
    """Return the best accuracy without the image: a guess among the possible answers.

    Args:
        family: The family of the question.

    Returns:
        The accuracy.

    Raises:
        KeyError: The family is unknown.

    Example:
        >>> chance_accuracy("exist")
        0.5
    """
    return 1 / 2 if family in CHOICE_FAMILIES else 1 / len(FAMILIES[family])


def program_words(program: QuestionProgram) -> tuple[str, ...]:
    """Return the question of a program in words."""
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


def is_content_word(word: str) -> bool:
    """Return whether a word carries an argument of a program: value, attribute or relation."""
    return word in _ARGUMENTS


def noun_phrase(description: Description) -> tuple[str, ...]:
    """Return a description in words, the noun last: "large striped ring", "red thing"."""
    named = dict(description)
    return (*(named[n] for n in ATTRIBUTE_ORDER[:-1] if n in named), named.get("shape", "thing"))


def plural(noun: str) -> str:
    """Return the plural of a noun."""
    return PLURALS.get(noun, noun + "s")


def _either(sides: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    return ("the", *sides[0], "or", "the", *sides[1])


def _relation(name: str) -> tuple[str, ...]:
    return (name, "of") if name in ("left", "right") else (name,)
