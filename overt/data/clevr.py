"""CLEVR: questions about rendered scenes, with the functional programs that answer them.

Johnson et al., "CLEVR: A Diagnostic Dataset for Compositional Language and Elementary Visual
Reasoning", CVPR 2017, https://cs.stanford.edu/people/jcjohns/clevr/. `CLEVR_v1.0/` has
`questions/CLEVR_{split}_questions.json`, `scenes/CLEVR_{train,val}_scenes.json` and
`images/{split}/CLEVR_{split}_000000.png`.
"""

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

from overt.data.batch import Batch
from overt.data.clevr_programs import ATTRIBUTES, SIDES, ClevrScene, question_family, run_program
from overt.data.dataset import digest_files
from overt.data.images import Size
from overt.data.json_stream import iterate_records
from overt.data.photo_dataset import density_target
from overt.data.splits import Split, parse_official_split
from overt.data.vocabulary import Tokenizer
from overt.data.vqa_dataset import PhotoInput, PhotoQuestions, build_vocabulary, one_hot
from overt.errors import CorruptFileError, UserError
from overt.geometry import PixelGeometry

FOLDER = "CLEVR_v1.0"
QUESTIONS = {Split.TRAIN: 699_989, Split.VAL: 149_991, Split.TEST: 149_988}
ANSWERS = (  # 28 answers; some papers say 29, which is a mistake
    *("yes", "no"),
    *(str(number) for number in range(11)),
    *("blue", "brown", "cyan", "gray", "green", "purple", "red", "yellow"),
    *("cube", "cylinder", "sphere"),
    *("large", "small"),
    *("metal", "rubber"),
)
CELLS = (8, 8)
MAX_THINGS = 16  # a scene has 3 to 10
PICTURE = (320, 480)


@dataclass(frozen=True)
class ClevrQuestions:
    """Questions of a split; bit i of `things` is set if object i decides the answer."""

    ids: NDArray[np.int64]
    photos: tuple[str, ...]
    photo_of: NDArray[np.int64]
    texts: tuple[str, ...]
    answers: NDArray[np.int64]
    families: tuple[str, ...]
    templates: NDArray[np.int64]
    things: NDArray[np.int32]


class Clevr(PhotoQuestions):
    """One split of CLEVR: 699,989 / 149,991 / 149,988 questions in train / val / test.

    Classes are the 28 answers; the answers of test are not public. `groups` are the five kinds of
    question (count, exist, compare numbers, compare attributes, query attribute).

    Args:
        root: Data folder, see `data_root`.
        split: `train`, `val` or `test`.
        spread: Standard deviation in pixels of the target: scenes are read, every program is run,
            and the target is a Gaussian around each object that the answer is read from. A question
            without such objects (a count of 0) has none. None gives no target.
        cells: Grid (rows, columns) of the target.
        reader: Tokenizer; None builds a vocabulary from the training part.
        photo_input: Canvas of the photos, or a cache of their features.
        questions: Expected number of questions per split; None accepts any number.

    Raises:
        UserError: The files are missing, or the split does not exist.
        CorruptFileError: A file is not the published one; the message names file and record.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from PIL import Image
        >>> from overt.io import write_json
        >>> steps = [("scene", [], []), ("filter_shape", [0], ["cube"]), ("exist", [1], [])]
        >>> program = [dict(zip(("function", "inputs", "value_inputs"), one)) for one in steps]
        >>> question = {"question": "Is there a cube?", "answer": "yes", "program": program}
        >>> image = {"split": "train", "image_filename": "a.png"}
        >>> cube = {"shape": "cube", "color": "red", "size": "large", "material": "metal"}
        >>> scene = {"objects": [{**cube, "pixel_coords": [10, 10, 9]}], "relationships": {}}
        >>> scene["relationships"] = {side: [[]] for side in ("left", "right", "front", "behind")}
        >>> with TemporaryDirectory() as root:
        ...     folder = Path(root, FOLDER)
        ...     questions = {"questions": [{**question, **image, "question_index": 0}]}
        ...     write_json(folder / "questions" / "CLEVR_train_questions.json", questions)
        ...     scenes = {"scenes": [{**scene, **image}]}
        ...     write_json(folder / "scenes" / "CLEVR_train_scenes.json", scenes)
        ...     (folder / "images" / "train").mkdir(parents=True)
        ...     Image.new("RGB", (480, 320)).save(folder / "images" / "train" / "a.png")
        ...     batch = Clevr(root, "train", spread=16.0, questions=None).batch([0])
        >>> batch.groups, int(batch.target.weights.argmax())  # the cube is in the first of 64 cells
        (('exist',), 0)
    """

    def __init__(
        self,
        root: Path | str,
        split: str = Split.TRAIN,
        spread: float | None = None,
        cells: Size = CELLS,
        reader: Tokenizer | None = None,
        photo_input: PhotoInput | None = None,
        questions: dict[Split, int] | None = QUESTIONS,
    ) -> None:
        part = parse_official_split("clevr", split)
        self.classes, self.cells = ANSWERS, cells
        if spread is not None and (part is Split.TEST or spread < 0):
            raise UserError(
                f"clevr {split} has no target with spread={spread}: "
                "give a spread >= 0, and train or val."
            )
        self._folder, self._spread = Path(root) / FOLDER, spread
        self._scenes: dict[str, ClevrScene] = {}
        if spread is not None:
            self._scenes = read_scenes(self._path("scenes", part))
        wanted = {} if questions is None else questions
        found = read_questions(self._path("questions", part), wanted.get(part), self._scenes)
        self._found = found
        if reader is None:
            train = found.texts
            if part is not Split.TRAIN:
                path = self._path("questions", Split.TRAIN)
                train = read_questions(path, wanted.get(Split.TRAIN), {}).texts
            reader = build_vocabulary(train)
        ids = [f"clevr/{part}/{number:06d}" for number in found.ids]
        super().__init__(
            *("clevr", part, self._folder / "images", found.photos, found.photo_of),
            *(found.texts, ids, reader, photo_input),
        )

    def labels(self, indices: Sequence[int]) -> Int[Tensor, " b"]:
        """Return the classes of the answers."""
        if self.split is Split.TEST:
            raise UserError("The answers of clevr test are not public.")
        return torch.from_numpy(self._found.answers[self.places(indices)])

    def templates(self, indices: Sequence[int]) -> Int[Tensor, " b"]:
        """Return the official index of the question family, one of 90; -1 where it is not given."""
        return torch.from_numpy(self._found.templates[self.places(indices)])

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the questions at `indices`; each image once."""
        found = super().batch(indices)
        if self.split is Split.TEST:
            return found
        labels, places = self.labels(indices), self.places(indices)
        found = replace(
            found,
            labels=labels,
            answers=one_hot(labels, len(ANSWERS)),
            groups=tuple(self._found.families[place] for place in places),
        )
        if self._spread is None:
            return found
        geometry = found.sample_geometry
        if geometry is None:  # features replace images
            geometry = PixelGeometry.identity(len(places), PICTURE)
        shares = geometry.density(self.points(indices), self.cells, self._spread)
        return replace(found, target=density_target(shares, self.cells, geometry))

    def points(self, indices: Sequence[int]) -> list[Tensor]:
        """Return the positions (y, x) in pixels of the objects that each answer is read from."""
        if self._spread is None:
            raise UserError("Set `spread=` for targets: scenes and programs are then read.")
        found = []
        for place in self.places(indices):
            scene = self._scenes[self._found.photos[self._found.photo_of[place]]]
            bits = int(self._found.things[place])
            at = [(y, x) for one, (x, y) in enumerate(scene.points) if bits >> one & 1]
            found.append(torch.tensor(at, dtype=torch.float32).reshape(-1, 2))
        return found

    def digest(self) -> str:
        """Return a hash of the questions, of names and sizes of the images, and of the target
        settings.

        Image contents are left out: they are 18 GB.
        """
        about = f"clevr {self.split} {self._spread} {self.cells} {len(self)}"
        kinds = ("questions",) if self._spread is None else ("questions", "scenes")
        paths = [self._path(kind, Split(self.split)) for kind in kinds]
        return digest_files(about, paths, self.digest_names().encode())

    def _path(self, kind: str, split: Split) -> Path:
        return self._folder / kind / f"CLEVR_{split}_{kind}.json"


def read_questions(path: Path, wanted: int | None, scenes: dict[str, ClevrScene]) -> ClevrQuestions:
    """Read the questions of one official file; with scenes, check every program."""
    photos: dict[str, int] = {}
    rows: list[tuple[int, int, int, int, int]] = []
    texts, families = [], []
    kinds: dict[str, str] = {}
    for number, entry in enumerate(iterate_records(path, "questions")):
        match entry:
            case {"image_filename": str(file), "question": str(text), "split": str(split)}:
                photo = f"{split}/{file}"
            case _:
                raise CorruptFileError(
                    f"{path}: entry {number} has no question and image_filename."
                )
        answer, kind, things = _answer(path, number, entry, scenes.get(photo), bool(scenes))
        own, template = entry.get("question_index", number), entry.get("question_family_index", -1)
        if not isinstance(own, int) or not isinstance(template, int):
            raise CorruptFileError(f"{path}: entry {number} has an index that is not an integer.")
        rows.append((own, photos.setdefault(photo, len(photos)), answer, template, things))
        texts.append(text)
        families.append(kinds.setdefault(kind, kind))
    if not rows or (wanted is not None and len(rows) != wanted):
        raise CorruptFileError(
            f"{path} has {len(rows)} questions, expected {wanted or 'any'}; download it again."
        )
    table = np.array(rows, dtype=np.int64)
    if len(np.unique(table[:, 0])) != len(table):
        raise CorruptFileError(f"{path} has a question_index twice; download it again.")
    return ClevrQuestions(
        table[:, 0],
        tuple(photos),
        table[:, 1],
        tuple(texts),
        table[:, 2],
        tuple(families),
        table[:, 3],
        table[:, 4].astype(np.int32),
    )


def read_scenes(path: Path) -> dict[str, ClevrScene]:
    """Read the scenes of one official file, by `split/file` of their image."""
    found = {}
    for number, entry in enumerate(iterate_records(path, "scenes")):
        try:
            found[f"{entry['split']}/{entry['image_filename']}"] = _scene(entry)
        except (KeyError, TypeError, ValueError, IndexError) as problem:
            raise CorruptFileError(
                f"{path}: entry {number} is not a scene: {problem!r:.60}."
            ) from problem
    return found


def _answer(
    path: Path, number: int, entry: dict[str, Any], scene: ClevrScene | None, check: bool
) -> tuple[int, str, int]:
    """Return the class of the answer, the kind of question, and the deciding objects as bits."""
    answer, program = entry.get("answer"), entry.get("program")
    if answer is None:
        return -1, "", 0
    if answer not in ANSWERS or not isinstance(program, list) or not program:
        raise CorruptFileError(
            f"{path}: entry {number} has no program, or the answer {answer!r:.20}."
        )
    try:
        kind = question_family(program)
        if not check:
            return ANSWERS.index(answer), kind, 0
        if scene is None:
            raise UserError("its image is in no scene")
        outcome = run_program(program, scene)
        if outcome.answer != answer:
            raise UserError(f"its program gives {outcome.answer!r}, not {answer!r}")
    except (UserError, KeyError, TypeError, AttributeError) as problem:
        raise CorruptFileError(
            f"{path}: entry {number}: {problem}; download it and the scenes again."
        ) from problem
    return ANSWERS.index(answer), kind, sum(1 << thing for thing in outcome.things)


def _scene(entry: dict[str, Any]) -> ClevrScene:
    things = entry["objects"]
    if len(things) > MAX_THINGS:
        raise ValueError(f"{len(things)} objects, at most {MAX_THINGS}")
    sides = {side: entry["relationships"][side] for side in SIDES}
    if any(len(each) != len(things) for each in sides.values()):
        raise ValueError("relationships of another number of objects")
    if any(not 0 <= one < len(things) for each in sides.values() for row in each for one in row):
        raise ValueError("relationships of objects that do not exist")
    return ClevrScene(
        tuple(tuple(str(thing[name]) for name in ATTRIBUTES) for thing in things),  # type: ignore[misc]
        tuple(
            (float(thing["pixel_coords"][0]), float(thing["pixel_coords"][1])) for thing in things
        ),
        {side: tuple(frozenset(row) for row in each) for side, each in sides.items()},
    )


def rotate_images(batch: Batch, generator: torch.Generator, most: float = 0.05) -> Batch:
    """Return the batch with its images rotated about their centre by up to `most` radians.

    Relation networks are trained on CLEVR pixels with this augmentation. Border pixels are
    repeated, where public implementations use black corners. Geometry, boxes and targets are
    dropped, since a rotated grid of pixels is not axis-aligned.

    Args:
        batch: Batch with images.
        generator: Source of random angles.
        most: Largest angle in radians, in both directions.

    Raises:
        UserError: The batch has no images.
    """
    if batch.images is None:
        raise UserError("Only a batch with images can be rotated.")
    images = batch.images
    angles = most * (2 * torch.rand(len(images), generator=generator) - 1)
    across, down = images.shape[-1] / images.shape[-2], images.shape[-2] / images.shape[-1]
    cos, sin, nil = angles.cos(), angles.sin(), torch.zeros_like(angles)
    # sampling positions are in units of half a side, which differ if the image is not square
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
