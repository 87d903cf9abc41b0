"""Sort-of-CLEVR: six coloured shapes on white, with relational and non-relational questions.

Santoro et al., "A simple neural network module for relational reasoning", NeurIPS 2017,
https://arxiv.org/abs/1706.01427. There are no official files; the world is that of the widely used
generator (https://github.com/kimhc6028/relational-networks): 75 x 75 pixels, six colours, one
object each, a square of 11 pixels or a disc of radius 5, centres at least 10 pixels apart.

Differences to that generator:

- Every question about an image is asked once; the generator draws with replacement.
- A scene in which a square and a disc are equally close (or far) is drawn again: its question
  would have two answers.
- Ternary questions count from zero. The ten usual answers have no zero, and a count of zero would
  be called "1", so they add the answer "0". "In line" is a strip along the segment between the two
  objects; a strip around a whole line, measured down the image, depends on the slope of the line.
  The two objects are drawn from all six colours.
- Each image depends on seed, split and its index only, not on the number of images.
"""

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from overt.data.batch import Batch
from overt.data.photo_dataset import region_target
from overt.data.sort_of_clevr_world import (
    ANSWERS,
    HALF,
    KINDS,
    NAMES,
    NON_RELATIONAL,
    QUESTION_TEMPLATES,
    RELATION_OF,
    RELATIONAL,
    SIDE,
    TERNARY,
    TERNARY_ANSWERS,
    THINGS,
    Integers,
    ShapeQuestions,
    ShapeScenes,
    generate_questions,
    generate_scenes,
    relation_of,
    render,
)
from overt.data.splits import Split, parse_split
from overt.data.vocabulary import Tokenizer, Vocabulary, pad_texts, tokenize
from overt.errors import UserError
from overt.geometry import PixelGeometry

VERSION = 1
SIZES = {Split.TRAIN: 9_800, Split.VAL: 200, Split.TEST: 200}
CELLS = (5, 5)
CHUNK = 256  # scenes that are drawn together; changing it changes the scenes of a seed

Group = Callable[[str], str]


class SortOfClevr:
    """Questions about generated images: 9,800 / 200 / 200 images in train / val / test.

    An item is one question; questions of a batch about one image share it. There are ten questions
    of each relation per image. Images are rendered on demand, so that a question takes a few bytes
    of memory. `boxes` are the six objects by colour, `target` is the share of each cell that shows
    a deciding object.

    Args:
        split: `train`, `val` or `test`.
        seed: Seed of the scenes.
        count: Number of images; None takes the usual number.
        relations: Relations to ask about: `NON_RELATIONAL`, `RELATIONAL`, `TERNARY`.
        cells: Grid (rows, columns) of the target.
        reader: Tokenizer; None takes the words of the questions.
        group: Function from the kind of a question to its group; `str` gives the kind itself.

    Raises:
        UserError: A setting is out of range.

    Example:
        >>> data = SortOfClevr("train", count=2)
        >>> data.batch([0]).images.shape
        torch.Size([1, 3, 75, 75])
    """

    def __init__(
        self,
        split: str = Split.TRAIN,
        seed: int = 1,
        count: int | None = None,
        relations: Sequence[str] = (NON_RELATIONAL, RELATIONAL),
        cells: tuple[int, int] = CELLS,
        reader: Tokenizer | None = None,
        group: Group = relation_of,
    ) -> None:
        self.name, self.split, self.seed, self.cells = "sortclevr", parse_split(split), seed, cells
        if self.split not in SIZES:
            raise UserError(
                f"sortclevr has train, val and test, not {split!r}: use a larger count."
            )
        self.relations = tuple(name for name in QUESTION_TEMPLATES if name in relations)
        if (
            not relations
            or set(relations) - set(QUESTION_TEMPLATES)
            or len(set(relations)) != len(relations)
        ):
            raise UserError(
                f"relations must be some of {', '.join(QUESTION_TEMPLATES)}, each once, "
                f"got {relations}."
            )
        pictures = SIZES[self.split] if count is None else count
        if pictures < 1 or seed < 0 or seed >= 2**32:
            raise UserError(
                f"count must be at least 1 and seed in 0 to 2**32 - 1, got {pictures} and {seed}."
            )
        self.classes = TERNARY_ANSWERS if TERNARY in self.relations else ANSWERS
        self.reader = reader or Vocabulary(_words())
        self.things, self.questions = _make(self.split, seed, pictures, self.relations)
        self._group = group
        self._read: dict[str, tuple[list[int], list[tuple[int, int]]]] = {}

    def __len__(self) -> int:
        return int(self.questions.answers.size)

    def texts(self, indices: Sequence[int]) -> tuple[str, ...]:
        """Return the questions in words."""
        kinds, first, second = self._lookup(indices)
        return tuple(
            QUESTION_TEMPLATES[RELATION_OF[KINDS[kind]]][KINDS[kind]].format(a=NAMES[a], b=NAMES[b])
            for kind, a, b in zip(kinds, first, second, strict=True)
        )

    def vectors(self, indices: Sequence[int]) -> Float[Tensor, "b v"]:
        """Return the questions as vectors of the usual generator: 11 numbers, or 18 with ternary
        questions.

        Six for the colour, with ternary questions six for the second colour and a third type, then
        the type, then which of its three kinds.
        """
        kinds, first, second = self._lookup(indices)
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
        """Return the questions at `indices`; each image once."""
        scenes, asked = self._at(indices)
        pictures, of = np.unique(scenes, return_inverse=True)
        texts = self.texts(indices)
        read = [self._tokens(text) for text in texts]
        tokens, mask, text = pad_texts(texts, read, self.reader.padding)
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
            text=text,
            boxes=boxes,
            region_mask=torch.ones(boxes.shape[:2], dtype=torch.bool),
            labels=torch.from_numpy(self.questions.answers[scenes, asked]),
            groups=tuple(self._group(KINDS[k]) for k in self.questions.kinds[scenes, asked]),
            target=region_target(
                (shares * deciding[..., None]).sum(dim=1).clamp_max(1),
                self.cells,
                geometry[image_of],
            ),
        )

    def digest(self) -> str:
        """Return a hash of every scene and question, of sample images, and of the version."""
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
            raise UserError(
                f"sortclevr {self.split} has {len(self)} questions: {wrong[0]} is out of range."
            )
        each = self.questions.answers.shape[1]
        return places // each, places % each

    def _lookup(self, indices: Sequence[int]) -> tuple[Integers, Integers, Integers]:
        spot = self._at(indices)
        return self.questions.kinds[spot], self.questions.first[spot], self.questions.second[spot]

    def _tokens(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        if text not in self._read:  # 36 different questions, and 90 with ternary ones
            self._read[text] = self.reader.read(text)
        return self._read[text]


def _make(
    split: Split, seed: int, count: int, relations: Sequence[str]
) -> tuple[ShapeScenes, ShapeQuestions]:
    """Generate scenes and questions in chunks, each with its own stream that NumPy never changes.

    The objects of a scene do not depend on the questions, nor questions on other relations.
    """
    number = list(SIZES).index(split)
    things: list[ShapeScenes] = []
    asked: list[ShapeQuestions] = []
    for chunk in range(-(-count // CHUNK)):
        things.append(generate_scenes(CHUNK, np.random.RandomState([VERSION, seed, number, chunk])))
        parts = [
            generate_questions(
                things[-1],
                np.random.RandomState(
                    [VERSION, seed, number, chunk, 1 + list(QUESTION_TEMPLATES).index(name)]
                ),
                [name],
            )
            for name in relations
        ]
        asked.append(_join(parts, axis=1))
    scenes = ShapeScenes(
        np.concatenate([part.centres for part in things]),
        np.concatenate([part.circles for part in things]),
    )
    rows = np.arange(count)
    return scenes.at(rows), _join(asked, axis=0).at(rows)


def _join(parts: Sequence[ShapeQuestions], axis: int) -> ShapeQuestions:
    same = zip(*(part.parts() for part in parts), strict=True)
    return ShapeQuestions(*(np.concatenate(arrays, axis=axis) for arrays in same))


def _boxes(things: ShapeScenes) -> Float[Tensor, "b 6 4"]:
    """Return the box of each object."""
    centres = torch.from_numpy(things.centres).flip(-1).float()
    return torch.cat([centres - HALF, centres + HALF + 1], dim=-1)


def _words() -> tuple[str, ...]:
    """Return all words that a question can have."""
    asked = " ".join(
        text.format(a="", b="") for kinds in QUESTION_TEMPLATES.values() for text in kinds.values()
    )
    return tuple(sorted({*NAMES, *(word for word, _, _ in tokenize(asked))}))
