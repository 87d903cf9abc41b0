"""Sort-of-CLEVR: six coloured shapes on white, and questions about one of them, or about several.

Santoro et al., "A simple neural network module for relational reasoning", NeurIPS 2017,
https://arxiv.org/abs/1706.01427. No files are official; the world is that of the widely used
generator (https://github.com/kimhc6028/relational-networks): 75 x 75 pixels, six colours, one thing
each, a square of 11 pixels or a disc of radius 5, centres at least 10 pixels apart.

What we do in another way, and why:

- Every question of a picture is asked once; the generator draws with replacement.
- A scene in which two things are equally close (or far), one of them a square and one a disc, is
  drawn again: its question would have two answers.
- Three-way questions count from zero. With the ten usual answers none can be said, and a count of
  zero would be called "1", so they bring the answer "0" with them. "In line" is a strip along the
  segment between the two things; a strip around a whole line, measured down the picture, depends on
  how steep the line is. The two things are drawn from all six colours.
- Each picture is a function of seed, split and its number alone, whatever the number of pictures.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8
from numpy.typing import NDArray
from torch import Tensor

from overt.data.batch import Batch
from overt.data.photos import target
from overt.data.splits import Split, split_of
from overt.data.vocabulary import Reader, Vocabulary, pad, tokenize
from overt.errors import BadInput
from overt.geometry import PixelGeometry, TextGeometry

VERSION = 1
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

PLAIN, RELATIONAL, TERNARY = "non-relational", "relational", "ternary"
ASKED = {  # the kinds of each relation, in the order of the vector's last three places
    PLAIN: {
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
KINDS = tuple(kind for kinds in ASKED.values() for kind in kinds)
RELATION_OF = {kind: relation for relation, kinds in ASKED.items() for kind in kinds}
EACH = 10  # questions of a relation about one picture
SIZES = {Split.TRAIN: 9_800, Split.VAL: 200, Split.TEST: 200}
CELLS = (5, 5)
CHUNK = 256  # scenes that are drawn together; a part of what a seed means

Integers = NDArray[np.int64]
Group = Callable[[str], str]


def relation(kind: str) -> str:
    """Which of the three relations a kind of question belongs to."""
    return RELATION_OF[kind]


@dataclass(frozen=True)
class Things:
    """The things of n scenes, by colour: centres (y, x) in pixels, and which are discs."""

    centres: Int[np.ndarray, "n 6 2"]
    circles: Bool[np.ndarray, "n 6"]

    def __len__(self) -> int:
        return len(self.centres)

    def at(self, rows: Integers) -> "Things":
        """The scenes at these places."""
        return Things(self.centres[rows], self.circles[rows])


@dataclass(frozen=True)
class Questions:
    """m questions about each of n scenes; `second` is -1 where one colour is named.

    `deciding` are the things that the answer is read from: the ones named, and of the others the
    closest or furthest, those of the same shape, or those that a three-way question finds.
    """

    kinds: Int[np.ndarray, "n m"]
    first: Int[np.ndarray, "n m"]
    second: Int[np.ndarray, "n m"]
    answers: Int[np.ndarray, "n m"]
    deciding: Bool[np.ndarray, "n m 6"]

    def at(self, rows: Integers) -> "Questions":
        """The questions about the scenes at these places."""
        return Questions(*(part[rows] for part in self.parts()))

    def parts(self) -> tuple[NDArray[Any], ...]:
        """The five arrays, in their order."""
        return self.kinds, self.first, self.second, self.answers, self.deciding


def place(count: int, dice: np.random.RandomState) -> Things:
    """Scenes without an ambiguous question: `count` of them."""
    found = _strew(count, dice)
    wrong = np.flatnonzero(ambiguous(found))
    while len(wrong):
        again = _strew(len(wrong), dice)
        found.centres[wrong], found.circles[wrong] = again.centres, again.circles
        wrong = wrong[ambiguous(again)]
    return found


def ambiguous(things: Things) -> Bool[np.ndarray, " n"]:
    """Whether the closest or the furthest thing of some thing could be a square and a disc."""
    near, far = _distances(things)
    wrong = np.zeros(len(things), dtype=bool)
    for distances, best in ((near, near.min(axis=-1)), (far, far.max(axis=-1))):
        tied = distances == best[..., None]
        discs = (tied & things.circles[:, None]).any(axis=-1)
        squares = (tied & ~things.circles[:, None]).any(axis=-1)
        wrong |= (discs & squares).any(axis=-1)
    return wrong


def render(things: Things) -> UInt8[np.ndarray, "n 3 y x"]:
    """The pictures, all at once; a later colour lies over an earlier one.

    A disc is what a midpoint circle of radius 5 fills: all pixels within 5.5 of its centre.
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


def ask(things: Things, dice: np.random.RandomState, relations: Sequence[str]) -> Questions:
    """Ten different questions of each relation about each scene, in the order of `relations`."""
    parts = []
    answers, deciding = _answer_all(things)
    for name in relations:
        numbers = [KINDS.index(kind) for kind in ASKED[name]]
        pairs = _pairs() if name == TERNARY else [(one, one) for one in range(THINGS)]
        every = np.array([(kind, *pair) for kind in numbers for pair in pairs])
        order = dice.random_sample((len(things), len(every))).argsort(axis=1, kind="stable")
        parts.append(every[order[:, :EACH]])
    asked = np.concatenate(parts, axis=1)
    kinds, first, second = asked[..., 0], asked[..., 1], asked[..., 2]
    scene = np.arange(len(things))[:, None]
    return Questions(
        kinds=kinds,
        first=first,
        second=np.where(first == second, -1, second),
        answers=answers[kinds, scene, first, second],
        deciding=deciding[kinds, scene, first, second],
    )


class SortOfClevr:
    """Questions about drawn pictures: 9,800 / 200 / 200 pictures in train / val / test.

    An item is one question; questions of a batch about one picture share it. There are ten
    questions of each of `relations` a picture. Pictures are drawn when a batch asks for them, so
    that a set of any size takes a few bytes a question. `boxes` are the six things by colour,
    `target` the share of each of `cells` that shows a deciding thing. `groups` is what `group`
    makes of a question's kind: the relation, or the kind itself with `str`.
    """

    def __init__(
        self,
        split: str = Split.TRAIN,
        seed: int = 1,
        count: int | None = None,
        relations: Sequence[str] = (PLAIN, RELATIONAL),
        cells: tuple[int, int] = CELLS,
        reader: Reader | None = None,
        group: Group = relation,
    ) -> None:
        self.name, self.split, self.seed, self.cells = "sortclevr", split_of(split), seed, cells
        if self.split not in SIZES:
            raise BadInput(f"sortclevr has train, val and test, not {split!r}: ask for more train.")
        self.relations = tuple(name for name in ASKED if name in relations)
        if not relations or set(relations) - set(ASKED) or len(set(relations)) != len(relations):
            raise BadInput(f"Relations are some of {', '.join(ASKED)}, each once: {relations}.")
        pictures = SIZES[self.split] if count is None else count
        if pictures < 1 or seed < 0 or seed >= 2**32:
            raise BadInput(f"{pictures} pictures of seed {seed} cannot be drawn.")
        self.classes = TERNARY_ANSWERS if TERNARY in self.relations else ANSWERS
        self.reader = reader or Vocabulary(_words())
        self.things, self.questions = _make(self.split, seed, pictures, self.relations)
        self._group = group
        self._read: dict[str, tuple[list[int], list[tuple[int, int]]]] = {}

    def __len__(self) -> int:
        return int(self.questions.answers.size)

    def texts(self, indices: Sequence[int]) -> tuple[str, ...]:
        """The questions in words."""
        kinds, first, second = self._asked(indices)
        return tuple(
            ASKED[RELATION_OF[KINDS[kind]]][KINDS[kind]].format(a=NAMES[a], b=NAMES[b])
            for kind, a, b in zip(kinds, first, second, strict=True)
        )

    def vectors(self, indices: Sequence[int]) -> Float[Tensor, "b v"]:
        """The questions as the vectors of the generator: 11 numbers, or 18 with ternary ones.

        Six for the colour, with ternary ones six for the second colour and a third type, then the
        type, then which of its three kinds.
        """
        kinds, first, second = self._asked(indices)
        wide = THINGS * (2 if TERNARY in self.relations else 1)
        types = wide // THINGS + 1
        found = torch.zeros(len(kinds), wide + types + 3)
        rows = torch.arange(len(kinds))
        kind, colour, other = (torch.from_numpy(part) for part in (kinds, first, second))
        found[rows, colour] = 1
        named = other >= 0
        found[rows[named], THINGS + other[named]] = 1
        found[rows, wide + kind // 3] = 1
        found[rows, wide + types + kind % 3] = 1
        return found

    def batch(self, indices: Sequence[int]) -> Batch:
        """The questions at these places, each picture once."""
        scenes, asked = self._at(indices)
        pictures, of = np.unique(scenes, return_inverse=True)
        texts = self.texts(indices)
        read = [self._tokens(text) for text in texts]
        tokens, mask, spans = pad(
            [ids for ids, _ in read], [spans for _, spans in read], self.reader.padding
        )
        geometry = PixelGeometry.identity(len(pictures), (SIDE, SIDE))
        image_of = torch.from_numpy(of.astype(np.int64))
        boxes = _boxes(self.things.at(scenes))
        shares = geometry[image_of].cover_boxes(boxes, self.cells)
        deciding = torch.from_numpy(self.questions.deciding[scenes, asked])
        return Batch(
            ids=tuple(
                f"sortclevr/{self.seed}/{self.split}/{scene:06d}/{question:02d}"
                for scene, question in zip(scenes, asked, strict=True)
            ),
            images=torch.from_numpy(render(self.things.at(pictures))),
            image_of=image_of,
            geometry=geometry,
            tokens=tokens,
            token_mask=mask,
            text=TextGeometry(texts, spans),
            boxes=boxes,
            region_mask=torch.ones(boxes.shape[:2], dtype=torch.bool),
            labels=torch.from_numpy(self.questions.answers[scenes, asked]),
            groups=tuple(self._group(KINDS[k]) for k in self.questions.kinds[scenes, asked]),
            target=target(
                (shares * deciding[..., None]).sum(dim=1).clamp_max(1),
                self.cells,
                geometry[image_of],
            ),
        )

    def digest(self) -> str:
        """A hash of every scene and question, of what they look like, and of the program."""
        about = f"sortclevr {VERSION} {self.split} {self.seed} {self.relations}"
        whole = hashlib.sha256(about.encode())
        for part in (self.things.centres, self.things.circles, *self.questions.parts()):
            whole.update(np.ascontiguousarray(part).tobytes())
        whole.update(render(self.things.at(np.arange(min(4, len(self.things))))).tobytes())
        return whole.hexdigest()

    def _at(self, indices: Sequence[int]) -> tuple[Integers, Integers]:
        places = np.asarray(list(indices), dtype=np.int64)
        wrong = places[(places < 0) | (places >= len(self))]
        if len(wrong):
            raise BadInput(
                f"sortclevr {self.split} has questions 0 to {len(self) - 1}, not {wrong[0]}."
            )
        each = self.questions.answers.shape[1]
        return places // each, places % each

    def _asked(self, indices: Sequence[int]) -> tuple[Integers, Integers, Integers]:
        spot = self._at(indices)
        return self.questions.kinds[spot], self.questions.first[spot], self.questions.second[spot]

    def _tokens(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        if text not in self._read:  # 36 wordings, and 90 with three-way questions
            self._read[text] = self.reader.read(text)
        return self._read[text]


def _make(
    split: Split, seed: int, count: int, relations: Sequence[str]
) -> tuple[Things, Questions]:
    """Scenes and questions in chunks, each with streams of its own that NumPy never changes.

    The things of a scene do not depend on what is asked, nor its questions on other relations.
    """
    number = list(SIZES).index(split)
    things: list[Things] = []
    asked: list[Questions] = []
    for chunk in range(-(-count // CHUNK)):
        things.append(place(CHUNK, np.random.RandomState([VERSION, seed, number, chunk])))
        parts = [
            ask(
                things[-1],
                np.random.RandomState([VERSION, seed, number, chunk, 1 + list(ASKED).index(name)]),
                [name],
            )
            for name in relations
        ]
        asked.append(_join(parts, axis=1))
    scenes = Things(
        np.concatenate([part.centres for part in things]),
        np.concatenate([part.circles for part in things]),
    )
    rows = np.arange(count)
    return scenes.at(rows), _join(asked, axis=0).at(rows)


def _join(parts: Sequence[Questions], axis: int) -> Questions:
    same = zip(*(part.parts() for part in parts), strict=True)
    return Questions(*(np.concatenate(arrays, axis=axis) for arrays in same))


def _strew(count: int, dice: np.random.RandomState) -> Things:
    """Things one after the other, each drawn until it is far enough from those before it."""
    centres = np.zeros((count, THINGS, 2), dtype=np.int64)
    for number in range(THINGS):
        left = np.arange(count)
        while len(left):
            drawn = dice.randint(HALF, SIDE - HALF, size=(len(left), 2))
            away = ((drawn[:, None] - centres[left, :number]) ** 2).sum(axis=-1)
            good = (away >= APART**2).all(axis=-1)
            centres[left[good], number] = drawn[good]
            left = left[~good]
    return Things(centres, dice.random_sample((count, THINGS)) >= 0.5)


def _distances(things: Things) -> tuple[Integers, Integers]:
    """Squared distances, twice: where a thing is very far from itself, and where it is at 0."""
    steps = things.centres[:, :, None] - things.centres[:, None]
    far = (steps**2).sum(axis=-1)
    return far + np.eye(THINGS, dtype=np.int64) * (2 * SIDE**2), far


def _answer_all(
    things: Things,
) -> tuple[Int[np.ndarray, "9 n 6 6"], Bool[np.ndarray, "9 n 6 6 6"]]:
    """The answer to every kind of question about every pair, and the things that decide it.

    Questions about one colour stand on the diagonal.
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
    """Which things have their centre in the box that two centres span, edges included."""
    a, b, c = _triples(centres)
    return np.all((np.minimum(a, b) <= c) & (c <= np.maximum(a, b)), axis=-1)


def _in_line(centres: Int[np.ndarray, "n 6 2"]) -> Bool[np.ndarray, "n 6 6 6"]:
    """Which things have their centre within half a thing of the segment between two centres."""
    a, b, c = _triples(centres)
    along, across = ((c - a) * (b - a)).sum(axis=-1), _cross(b - a, c - a)
    length = ((b - a) ** 2).sum(axis=-1)
    return (along > 0) & (along < length) & (across**2 <= HALF**2 * length)


def _obtuse(centres: Int[np.ndarray, "n 6 2"]) -> Bool[np.ndarray, "n 6 6 6"]:
    """Which things make a triangle with two others that has an angle of more than 90 degrees."""
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
    """The answers that say how many; zero is the last of the answers."""
    return np.where(count > 0, ANSWERS.index("1") - 1 + count, TERNARY_ANSWERS.index("0"))


def _pairs() -> list[tuple[int, int]]:
    return [(a, b) for a in range(THINGS) for b in range(THINGS) if a != b]


def _boxes(things: Things) -> Float[Tensor, "b 6 4"]:
    """The pixels of each thing, from the first to behind the last."""
    centres = torch.from_numpy(things.centres).flip(-1).float()
    return torch.cat([centres - HALF, centres + HALF + 1], dim=-1)


def _words() -> tuple[str, ...]:
    """All words that a question can have."""
    texts = [
        text.format(a=a, b=b) for q in ASKED.values() for text in q.values() for a, b in _named()
    ]
    return tuple(sorted({word for text in texts for word, _, _ in tokenize(text)}))


def _named() -> list[tuple[str, str]]:
    return [(NAMES[a], NAMES[b]) for a, b in _pairs()]
