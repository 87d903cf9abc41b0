"""CLEVR: questions about rendered scenes of simple things, with the programs that answer them.

Johnson et al., "CLEVR: A Diagnostic Dataset for Compositional Language and Elementary Visual
Reasoning", CVPR 2017, https://cs.stanford.edu/people/jcjohns/clevr/. In `CLEVR_v1.0/` lie
`questions/CLEVR_{split}_questions.json`, `scenes/CLEVR_{train,val}_scenes.json` and
`images/{split}/CLEVR_{split}_000000.png`.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from overt.data.asked import Asked, Look, gallery, one_hot, words_of
from overt.data.batch import Batch
from overt.data.images import Size
from overt.data.photos import PhotoSet, target
from overt.data.programs import ATTRIBUTES, SIDES, Scene, family, run
from overt.data.records import records
from overt.data.splits import Split
from overt.data.vocabulary import Reader
from overt.errors import BadInput, Damaged
from overt.files import digest
from overt.geometry import PixelGeometry

FOLDER = "CLEVR_v1.0"
QUESTIONS = {Split.TRAIN: 699_989, Split.VAL: 149_991, Split.TEST: 149_988}
ANSWERS = (  # 28 of them; the 29 of some papers is a slip
    *("yes", "no"),
    *(str(number) for number in range(11)),
    *("blue", "brown", "cyan", "gray", "green", "purple", "red", "yellow"),
    *("cube", "cylinder", "sphere"),
    *("large", "small"),
    *("metal", "rubber"),
)
CELLS = (8, 8)
MOST_THINGS = 16  # a scene has 3 to 10
PICTURE = (320, 480)


@dataclass(frozen=True)
class Questions:
    """The questions of a split; `things` says, a bit a thing, which of them decide the answer."""

    ids: NDArray[np.int64]
    photos: tuple[str, ...]
    photo_of: NDArray[np.int64]
    texts: tuple[str, ...]
    answers: NDArray[np.int64]
    families: tuple[str, ...]
    templates: NDArray[np.int64]
    things: NDArray[np.int32]


class Clevr:
    """One split of CLEVR: 699,989 / 149,991 / 149,988 questions in train / val / test.

    Classes are the 28 answers; the answers of test are not public. `groups` are the five kinds of
    question (count, exist, compare numbers, compare attributes, query attribute); `templates` has
    the index of each question's own family, one of 90. With `spread`, the scenes are read, each
    program is run, and the target is a Gaussian of that many pixels around every thing that the
    answer is read from; a question about nothing (a count of 0) has none. `questions` is how many
    a split has; None takes any number.
    """

    def __init__(
        self,
        root: Path | str,
        split: str = Split.TRAIN,
        spread: float | None = None,
        cells: Size = CELLS,
        reader: Reader | None = None,
        look: Look | None = None,
        questions: dict[Split, int] | None = QUESTIONS,
    ) -> None:
        root = Path(root)
        if split not in QUESTIONS:
            raise BadInput(f"clevr has train, val and test, not {split!r}.")
        self.name, self.split, self.classes, self.cells = "clevr", Split(split), ANSWERS, cells
        if spread is not None and (self.split is Split.TEST or spread < 0):
            raise BadInput(f"clevr {split} cannot say what to look at with a spread of {spread}.")
        self._folder, self._spread = root / FOLDER, spread
        self._scenes: dict[str, Scene] = {}
        if spread is not None:
            self._scenes = read_scenes(self._path("scenes", self.split))
        wanted = {} if questions is None else questions
        found = read_questions(
            self._path("questions", self.split), wanted.get(self.split), self._scenes
        )
        self._found = found
        if reader is None:
            train = found.texts
            if self.split is not Split.TRAIN:
                path = self._path("questions", Split.TRAIN)
                train = read_questions(path, wanted.get(Split.TRAIN), {}).texts
            reader = words_of(train)
        self.reader = reader
        self._asked = Asked(
            self.name,
            self.split,
            self._folder / "images",
            found.photos,
            found.photo_of,
            found.texts,
            [f"clevr/{self.split}/{number:06d}" for number in found.ids],
            reader,
            look or Look(),
        )
        self.files = self._asked.files

    def __len__(self) -> int:
        return len(self._asked)

    def labels(self, indices: Sequence[int]) -> Int[Tensor, " b"]:
        """The classes of the answers."""
        if self.split is Split.TEST:
            raise BadInput("The answers of clevr test are not public.")
        return torch.from_numpy(self._found.answers[self._asked.places(indices)])

    def templates(self, indices: Sequence[int]) -> Int[Tensor, " b"]:
        """The question families as numbered by the official files, -1 where they are not said."""
        return torch.from_numpy(self._found.templates[self._asked.places(indices)])

    def photo_ids(self, indices: Sequence[int]) -> tuple[str, ...]:
        """The names of the pictures, as in a cache of features over `photos`."""
        return self._asked.photo_ids(indices)

    def photos(self, look: Look | None = None) -> PhotoSet:
        """The pictures of the split by themselves, each once, to compute features of."""
        return gallery(self.name, self.split, self._folder / "images", self._found.photos, look)

    def batch(self, indices: Sequence[int]) -> Batch:
        """The questions at these places, each picture once."""
        found = self._asked.batch(indices)
        if self.split is Split.TEST:
            return found
        labels, places = self.labels(indices), self._asked.places(indices)
        found = replace(
            found,
            labels=labels,
            answers=one_hot(labels, len(ANSWERS)),
            groups=tuple(self._found.families[place] for place in places),
        )
        if self._spread is None:
            return found
        geometry = found.sample_geometry
        if geometry is None:  # features stand in for pictures
            geometry = PixelGeometry.identity(len(places), PICTURE)
        shares = geometry.density(self.points(indices), self.cells, self._spread)
        return replace(found, target=target(shares, self.cells, geometry))

    def points(self, indices: Sequence[int]) -> list[Tensor]:
        """Where the things are that each answer is read from, (y, x) in pixels of the picture."""
        if self._spread is None:
            raise BadInput("Say `spread=` for what to look at: scenes and programs are then read.")
        found = []
        for place in self._asked.places(indices):
            scene = self._scenes[self._found.photos[self._found.photo_of[place]]]
            bits = int(self._found.things[place])
            at = [(y, x) for one, (x, y) in enumerate(scene.points) if bits >> one & 1]
            found.append(torch.tensor(at, dtype=torch.float32).reshape(-1, 2))
        return found

    def digest(self) -> str:
        """A hash of the questions, of names and sizes of the pictures, and of the target.

        Not of the contents of pictures: there are 18 GB of them.
        """
        about = f"clevr {self.split} {self._spread} {self.cells} {len(self)}"
        whole = hashlib.sha256(about.encode())
        whole.update(digest(self._path("questions", self.split)).encode())
        if self._spread is not None:
            whole.update(digest(self._path("scenes", self.split)).encode())
        whole.update(self._asked.digest_names().encode())
        return whole.hexdigest()

    def _path(self, kind: str, split: Split) -> Path:
        return self._folder / kind / f"CLEVR_{split}_{kind}.json"


def read_questions(path: Path, wanted: int | None, scenes: dict[str, Scene]) -> Questions:
    """The questions of one official file; with scenes, every program is run and must agree."""
    photos: dict[str, int] = {}
    rows: list[tuple[int, int, int, int, int]] = []
    texts, families = [], []
    kinds: dict[str, str] = {}
    for number, entry in enumerate(records(path, "questions")):
        match entry:
            case {"image_filename": str(file), "question": str(text), "split": str(split)}:
                photo = f"{split}/{file}"
            case _:
                raise Damaged(f"{path}: entry {number} has no question and image_filename.")
        answer, kind, things = _answer(path, number, entry, scenes.get(photo), bool(scenes))
        own, template = entry.get("question_index", number), entry.get("question_family_index", -1)
        if not isinstance(own, int) or not isinstance(template, int):
            raise Damaged(f"{path}: entry {number} has no whole number as its index.")
        rows.append((own, photos.setdefault(photo, len(photos)), answer, template, things))
        texts.append(text)
        families.append(kinds.setdefault(kind, kind))
    if not rows or (wanted is not None and len(rows) != wanted):
        raise Damaged(f"{path} has {len(rows)} questions, not {wanted or 'any'}; get it again.")
    table = np.array(rows, dtype=np.int64)
    if len(np.unique(table[:, 0])) != len(table):
        raise Damaged(f"{path} has two questions of one question_index; get it again.")
    return Questions(
        table[:, 0],
        tuple(photos),
        table[:, 1],
        tuple(texts),
        table[:, 2],
        tuple(families),
        table[:, 3],
        table[:, 4].astype(np.int32),
    )


def read_scenes(path: Path) -> dict[str, Scene]:
    """The scenes of one official file, by `split/file` of their picture."""
    found = {}
    for number, entry in enumerate(records(path, "scenes")):
        try:
            found[f"{entry['split']}/{entry['image_filename']}"] = _scene(entry)
        except (KeyError, TypeError, ValueError, IndexError) as problem:
            raise Damaged(f"{path}: entry {number} is not a scene: {problem!r:.60}.") from problem
    return found


def _answer(
    path: Path, number: int, entry: dict[str, Any], scene: Scene | None, check: bool
) -> tuple[int, str, int]:
    """The class of the answer, the kind of question, and the deciding things as bits."""
    answer, program = entry.get("answer"), entry.get("program")
    if answer is None:
        return -1, "", 0
    if answer not in ANSWERS or not isinstance(program, list) or not program:
        raise Damaged(f"{path}: entry {number} has no program, or the answer {answer!r:.20}.")
    try:
        kind = family(program)
        if not check:
            return ANSWERS.index(answer), kind, 0
        if scene is None:
            raise BadInput("its picture is in no scene")
        outcome = run(program, scene)
        if outcome.answer != answer:
            raise BadInput(f"its program says {outcome.answer!r}, not {answer!r}")
    except (BadInput, KeyError, TypeError, AttributeError) as problem:
        raise Damaged(
            f"{path}: entry {number}: {problem}; get it and the scenes again."
        ) from problem
    return ANSWERS.index(answer), kind, sum(1 << thing for thing in outcome.things)


def _scene(entry: dict[str, Any]) -> Scene:
    things = entry["objects"]
    if len(things) > MOST_THINGS:
        raise ValueError(f"{len(things)} things")
    sides = {side: entry["relationships"][side] for side in SIDES}
    if any(len(each) != len(things) for each in sides.values()):
        raise ValueError("relationships of other things")
    if any(not 0 <= one < len(things) for each in sides.values() for row in each for one in row):
        raise ValueError("relationships of things that are not there")
    return Scene(
        tuple(tuple(str(thing[name]) for name in ATTRIBUTES) for thing in things),  # type: ignore[misc]
        tuple(
            (float(thing["pixel_coords"][0]), float(thing["pixel_coords"][1])) for thing in things
        ),
        {side: tuple(frozenset(row) for row in each) for side, each in sides.items()},
    )


def turned(batch: Batch, generator: torch.Generator, most: float = 0.05) -> Batch:
    """A batch whose images are turned about their middle by up to `most` radians either way.

    Relation networks that learn CLEVR from pixels are shown it so in training. Beyond the edge its
    last pixels go on, where public programs put black corners. A turned grid of pixels is no grid
    any more: geometry, boxes and targets, which say where things stand, are left out.
    """
    if batch.images is None:
        raise BadInput("Only a batch with images can be turned.")
    images = batch.images
    angles = most * (2 * torch.rand(len(images), generator=generator) - 1)
    across, down = images.shape[-1] / images.shape[-2], images.shape[-2] / images.shape[-1]
    cos, sin, nil = angles.cos(), angles.sin(), torch.zeros_like(angles)
    # sampling places are in halves of a side, which are not equal where the image is no square
    rows = torch.stack([cos, -sin * down, nil, sin * across, cos, nil], dim=-1)
    places = functional.affine_grid(rows.view(-1, 2, 3), list(images.shape), align_corners=False)
    floating = images.is_floating_point()
    pixels = images if floating else images.float()
    found = functional.grid_sample(
        pixels, places.to(pixels), padding_mode="border", align_corners=False
    )
    if not floating:
        found = found.round().clamp(0, 255).to(images.dtype)
    return replace(batch, images=found, geometry=None, boxes=None, region_mask=None, target=None)
