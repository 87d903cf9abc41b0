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

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from overt.data.batch import Batch
from overt.data.photos import target
from overt.data.shapes import (
    ANSWERS,
    ASKED,
    HALF,
    KINDS,
    NAMES,
    PLAIN,
    RELATION_OF,
    RELATIONAL,
    SIDE,
    TERNARY,
    TERNARY_ANSWERS,
    THINGS,
    Integers,
    Questions,
    Things,
    ask,
    place,
    relation,
    render,
)
from overt.data.splits import Split, split_of
from overt.data.vocabulary import Reader, Vocabulary, pad, tokenize
from overt.errors import BadInput
from overt.geometry import PixelGeometry, TextGeometry

VERSION = 1
SIZES = {Split.TRAIN: 9_800, Split.VAL: 200, Split.TEST: 200}
CELLS = (5, 5)
CHUNK = 256  # scenes that are drawn together; a part of what a seed means

Group = Callable[[str], str]


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


def _boxes(things: Things) -> Float[Tensor, "b 6 4"]:
    """The pixels of each thing, from the first to behind the last."""
    centres = torch.from_numpy(things.centres).flip(-1).float()
    return torch.cat([centres - HALF, centres + HALF + 1], dim=-1)


def _words() -> tuple[str, ...]:
    """All words that a question can have."""
    asked = " ".join(text.format(a="", b="") for kinds in ASKED.values() for text in kinds.values())
    return tuple(sorted({*NAMES, *(word for word, _, _ in tokenize(asked))}))
