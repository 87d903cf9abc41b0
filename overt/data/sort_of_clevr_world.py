"""The world of Sort-of-CLEVR: scenes of six coloured shapes, and every answer about them.

All functions work on many scenes at once. See `sort_of_clevr` for the dataset and for the
differences to the usual generator.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Int, UInt8
from numpy.typing import NDArray

SIDE, HALF, APART = 75, 5, 10
COLOURS = {
    "red": (255, 0, 0),
    "green": (0, 255, 0),
    "blue": (0, 0, 255),
    "orange": (255, 156, 0),
    "gray": (128, 128, 128),
    "yellow": (255, 255, 0),
}
NAMES = tuple(COLOURS)
THINGS = len(COLOURS)
ANSWERS = ("yes", "no", "rectangle", "circle", "1", "2", "3", "4", "5", "6")
TERNARY_ANSWERS = (*ANSWERS, "0")

NON_RELATIONAL, RELATIONAL, TERNARY = "non-relational", "relational", "ternary"
QUESTION_TEMPLATES = {  # by relation and kind, in the order of `vectors`
    NON_RELATIONAL: {
        "shape": "what shape is the {a} object?",
        "left": "is the {a} object on the left?",
        "top": "is the {a} object at the top?",
    },
    RELATIONAL: {
        "closest": "what shape is the object closest to the {a} object?",
        "furthest": "what shape is the object furthest from the {a} object?",
        "count": "how many objects have the shape of the {a} object?",
    },
    TERNARY: {
        "between": "how many objects are between the {a} object and the {b} object?",
        "in line": "is any object in line between the {a} object and the {b} object?",
        "obtuse": "how many objects make an obtuse triangle with the {a} object and the {b} "
        "object?",
    },
}
KINDS = tuple(kind for kinds in QUESTION_TEMPLATES.values() for kind in kinds)
RELATION_OF = {kind: relation for relation, kinds in QUESTION_TEMPLATES.items() for kind in kinds}
EACH = 10  # questions per relation and image

Integers = NDArray[np.int64]


def relation_of(kind: str) -> str:
    """Return which of the three relations a kind of question belongs to."""
    return RELATION_OF[kind]


@dataclass(frozen=True)
class ShapeScenes:
    """Objects of n scenes, by colour: centres (y, x) in pixels, and which are discs."""

    centres: Int[np.ndarray, "n 6 2"]
    circles: Bool[np.ndarray, "n 6"]

    def __len__(self) -> int:
        return len(self.centres)

    def at(self, rows: Integers) -> "ShapeScenes":
        """Return the scenes at `rows`."""
        return ShapeScenes(self.centres[rows], self.circles[rows])


@dataclass(frozen=True)
class ShapeQuestions:
    """m questions about each of n scenes; `second` is -1 where one colour is named.

    `deciding` are the objects that the answer is read from: the named ones, and of the others the
    closest or furthest, those of the same shape, or those that a ternary question finds.
    """

    kinds: Int[np.ndarray, "n m"]
    first: Int[np.ndarray, "n m"]
    second: Int[np.ndarray, "n m"]
    answers: Int[np.ndarray, "n m"]
    deciding: Bool[np.ndarray, "n m 6"]

    def at(self, rows: Integers) -> "ShapeQuestions":
        """Return the questions about the scenes at `rows`."""
        return ShapeQuestions(*(part[rows] for part in self.parts()))

    def parts(self) -> tuple[NDArray[Any], ...]:
        """Return the five arrays, in order."""
        return self.kinds, self.first, self.second, self.answers, self.deciding


def generate_scenes(count: int, dice: np.random.RandomState) -> ShapeScenes:
    """Generate `count` scenes without an ambiguous question."""
    found = _place_objects(count, dice)
    wrong = np.flatnonzero(is_ambiguous(found))
    while len(wrong):
        again = _place_objects(len(wrong), dice)
        found.centres[wrong], found.circles[wrong] = again.centres, again.circles
        wrong = wrong[is_ambiguous(again)]
    return found


def is_ambiguous(things: ShapeScenes) -> Bool[np.ndarray, " n"]:
    """Return whether a square and a disc tie as the closest or furthest object of some object."""
    near, far = _distances(things)
    wrong = np.zeros(len(things), dtype=bool)
    for distances, best in ((near, near.min(axis=-1)), (far, far.max(axis=-1))):
        tied = distances == best[..., None]
        discs = (tied & things.circles[:, None]).any(axis=-1)
        squares = (tied & ~things.circles[:, None]).any(axis=-1)
        wrong |= (discs & squares).any(axis=-1)
    return wrong


def render(things: ShapeScenes) -> UInt8[np.ndarray, "n 3 y x"]:
    """Render all images at once; a later colour occludes an earlier one.

    A disc is a filled midpoint circle of radius 5: all pixels within 5.5 of its centre.
    """
    pictures = np.full((len(things), SIDE, SIDE, 3), 255, dtype=np.uint8)
    reach = np.arange(-HALF, HALF + 1)
    disc = reach[:, None] ** 2 + reach[None] ** 2 <= (HALF + 0.5) ** 2
    which = np.arange(len(things))[:, None, None]
    for number, colour in enumerate(COLOURS.values()):
        y, x = (things.centres[:, number, axis, None] + reach for axis in (0, 1))
        spot = (which, y[:, :, None], x[:, None, :])
        filled = disc[None] | ~things.circles[:, number, None, None]
        ink = np.array(colour, dtype=np.uint8)
        pictures[spot] = np.where(filled[..., None], ink, pictures[spot])
    return np.ascontiguousarray(pictures.transpose(0, 3, 1, 2))


def generate_questions(
    things: ShapeScenes, dice: np.random.RandomState, relations: Sequence[str]
) -> ShapeQuestions:
    """Generate ten different questions per relation and scene, in the order of `relations`."""
    parts = []
    answers, deciding = _answer_all(things)
    for name in relations:
        numbers = [KINDS.index(kind) for kind in QUESTION_TEMPLATES[name]]
        pairs = _pairs() if name == TERNARY else [(one, one) for one in range(THINGS)]
        every = np.array([(kind, *pair) for kind in numbers for pair in pairs])
        order = dice.random_sample((len(things), len(every))).argsort(axis=1, kind="stable")
        parts.append(every[order[:, :EACH]])
    asked = np.concatenate(parts, axis=1)
    kinds, first, second = asked[..., 0], asked[..., 1], asked[..., 2]
    scene = np.arange(len(things))[:, None]
    return ShapeQuestions(
        kinds=kinds,
        first=first,
        second=np.where(first == second, -1, second),
        answers=answers[kinds, scene, first, second],
        deciding=deciding[kinds, scene, first, second],
    )


def _place_objects(count: int, dice: np.random.RandomState) -> ShapeScenes:
    """Place objects one by one, each drawn until it is far enough from the previous ones."""
    centres = np.zeros((count, THINGS, 2), dtype=np.int64)
    for number in range(THINGS):
        left = np.arange(count)
        while len(left):
            drawn = dice.randint(HALF, SIDE - HALF, size=(len(left), 2))
            away = ((drawn[:, None] - centres[left, :number]) ** 2).sum(axis=-1)
            good = (away >= APART**2).all(axis=-1)
            centres[left[good], number] = drawn[good]
            left = left[~good]
    return ShapeScenes(centres, dice.random_sample((count, THINGS)) >= 0.5)


def _distances(things: ShapeScenes) -> tuple[Integers, Integers]:
    """Return squared distances with a large and with a zero diagonal."""
    steps = things.centres[:, :, None] - things.centres[:, None]
    far = (steps**2).sum(axis=-1)
    return far + np.eye(THINGS, dtype=np.int64) * (2 * SIDE**2), far


def _answer_all(
    things: ShapeScenes,
) -> tuple[Int[np.ndarray, "9 n 6 6"], Bool[np.ndarray, "9 n 6 6 6"]]:
    """Return the answer to every kind of question about every pair, and the deciding objects.

    Questions about one colour are on the diagonal.
    """
    count = len(things)
    answers = np.zeros((len(KINDS), count, THINGS, THINGS), dtype=np.int64)
    deciding = np.zeros((len(KINDS), count, THINGS, THINGS, THINGS), dtype=bool)
    own = np.arange(THINGS)
    near, far = _distances(things)
    shape = np.where(things.circles, ANSWERS.index("circle"), ANSWERS.index("rectangle"))
    same = things.circles[:, :, None] == things.circles[:, None]
    y, x = things.centres[..., 0], things.centres[..., 1]
    scene = np.arange(count)[:, None]
    itself = np.broadcast_to(np.eye(THINGS, dtype=bool), (count, THINGS, THINGS))
    one: dict[str, tuple[Integers, NDArray[np.bool_]]] = {
        "shape": (shape, itself),
        "left": (_yes(2 * x < SIDE), itself),
        "top": (_yes(2 * y < SIDE), itself),
        "closest": (shape[scene, near.argmin(-1)], itself | (own == near.argmin(-1)[..., None])),
        "furthest": (shape[scene, far.argmax(-1)], itself | (own == far.argmax(-1)[..., None])),
        "count": (_number(same.sum(axis=-1)), same),
    }
    for kind, (answer, decided) in one.items():
        answers[KINDS.index(kind)][:, own, own] = answer
        deciding[KINDS.index(kind)][:, own, own] = decided
    named = np.eye(THINGS, dtype=bool)
    named = named[:, None] | named[None]
    for kind, holds in (("between", _between), ("in line", _in_line), ("obtuse", _obtuse)):
        found = holds(things.centres) & ~named
        total = found.sum(axis=-1)
        number = KINDS.index(kind)
        answers[number] = _yes(total > 0) if kind == "in line" else _number(total)
        deciding[number] = found | named
    return answers, deciding


def _between(centres: Int[np.ndarray, "n 6 2"]) -> Bool[np.ndarray, "n 6 6 6"]:
    """Return which objects have their centre in the box that two centres span, edges included."""
    a, b, c = _triples(centres)
    return np.all((np.minimum(a, b) <= c) & (c <= np.maximum(a, b)), axis=-1)


def _in_line(centres: Int[np.ndarray, "n 6 2"]) -> Bool[np.ndarray, "n 6 6 6"]:
    """Return which objects are within half an object of the segment between two centres."""
    a, b, c = _triples(centres)
    along, across = ((c - a) * (b - a)).sum(axis=-1), _cross(b - a, c - a)
    length = ((b - a) ** 2).sum(axis=-1)
    return (along > 0) & (along < length) & (across**2 <= HALF**2 * length)


def _obtuse(centres: Int[np.ndarray, "n 6 2"]) -> Bool[np.ndarray, "n 6 6 6"]:
    """Return which objects make an obtuse triangle with two others."""
    a, b, c = _triples(centres)
    corners = ((b - a, c - a), (a - b, c - b), (a - c, b - c))
    wide = [(one * other).sum(axis=-1) < 0 for one, other in corners]
    return np.asarray((wide[0] | wide[1] | wide[2]) & (_cross(b - a, c - a) != 0))


def _triples(centres: Integers) -> tuple[Integers, Integers, Integers]:
    return centres[:, :, None, None], centres[:, None, :, None], centres[:, None, None, :]


def _cross(one: Integers, other: Integers) -> Integers:
    return np.asarray(one[..., 0] * other[..., 1] - one[..., 1] * other[..., 0])


def _yes(holds: NDArray[np.bool_]) -> Integers:
    return np.where(holds, ANSWERS.index("yes"), ANSWERS.index("no"))


def _number(count: Integers) -> Integers:
    """Return the answers for counts; zero is the last answer."""
    return np.where(count > 0, ANSWERS.index("1") - 1 + count, TERNARY_ANSWERS.index("0"))


def _pairs() -> list[tuple[int, int]]:
    return [(a, b) for a in range(THINGS) for b in range(THINGS) if a != b]
