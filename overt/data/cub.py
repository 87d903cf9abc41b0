"""CUB-200-2011: photos of 200 kinds of birds, each with a box and fifteen parts.

Wah, Branson, Welinder, Perona and Belongie, "The Caltech-UCSD Birds-200-2011 Dataset", 2011,
https://www.vision.caltech.edu/datasets/cub_200_2011/. The lines of every list in `CUB_200_2011/`
start with the number of a photo: `images.txt`, `image_class_labels.txt`, `train_test_split.txt`,
`bounding_boxes.txt` (x, y, width, height) and `parts/part_locs.txt` (part, x, y, visible).
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from overt.data.batch import Batch
from overt.data.images import How, Size, stretch
from overt.data.photos import (
    Box,
    Entry,
    PhotoSet,
    apart,
    chosen,
    counted,
    read_lines,
    split_or_all,
    target,
)
from overt.data.splits import Split
from overt.errors import Damaged
from overt.files import digest

FOLDER = "CUB_200_2011"
TRAIN, TEST = 5_994, 5_794
VALIDATION = 600
SIZE = (80, 80)
CELLS = (8, 8)
LISTS = (
    "classes.txt",
    "images.txt",
    "image_class_labels.txt",
    "train_test_split.txt",
    "bounding_boxes.txt",
    "parts/parts.txt",
    "parts/part_locs.txt",
)

View = Callable[[Box, Size], Box]


def bird(box: Box, size: Size) -> Box:
    """Show the box around the bird alone, as papers that train on boxes do."""
    return box


def scenery(box: Box, size: Size) -> Box:
    """Show the whole photo, whatever the box."""
    return (0.0, 0.0, float(size[1]), float(size[0]))


class Cub:
    """CUB-200-2011: 5,394 / 600 / 5,794 photos in train / val / test; `all` is all of them.

    The defaults are those of Learn to Pay Attention: the box around the bird, drawn out to 80 x 80
    pixels. With `view=scenery` there is something to find: the target is the share of each of
    `cells` inside the bird's box. `photos` says how many photos train and test have, where the
    files are not the official ones; None takes any number.
    """

    def __init__(
        self,
        root: Path | str,
        split: str = Split.TRAIN,
        size: Size = SIZE,
        how: How = stretch,
        view: View = bird,
        cells: Size = CELLS,
        photos: tuple[int, int] | None = (TRAIN, TEST),
        validation: int = VALIDATION,
    ) -> None:
        root = Path(root)
        self.name, self.split, self.cells = "cub", split_or_all(split), cells
        self._folder = root / FOLDER
        self.classes = read_classes(self._folder / "classes.txt")
        self.parts = read_names(self._folder / "parts" / "parts.txt")
        names = read_names(self._folder / "images.txt")
        self._numbers = {name: number for number, name in enumerate(names, start=1)}
        train, test = read_entries(self._folder, names, len(self.classes))
        if photos is not None:
            for found, wanted in zip((train, test), photos, strict=True):
                counted(self._folder / "train_test_split.txt", len(found), wanted)
        boxes = read_boxes(self._folder / "bounding_boxes.txt", len(names))
        entries = chosen(self.split, train, test, validation)
        rows = torch.tensor([self._numbers[entry.path] - 1 for entry in entries], dtype=torch.long)
        self._boxes = boxes[rows]
        at, seen = read_parts(self._folder / "parts" / "part_locs.txt", len(names), len(self.parts))
        self._at, self._seen = at[rows], seen[rows]

        def window(place: int, size: Size) -> Box:
            left, top, right, bottom = self._boxes[place].tolist()
            return view((left, top, right, bottom), size)

        self._photos = PhotoSet(
            self.name,
            self.split,
            self._folder / "images",
            entries,
            self.classes,
            size,
            how,
            window,
        )
        self.files = self._photos.files
        self._digest: str | None = None

    def __len__(self) -> int:
        return len(self._photos)

    def labels(self, indices: Sequence[int]) -> Int[Tensor, " b"]:
        """The class numbers, without opening a photo."""
        return self._photos.labels(indices)

    def batch(self, indices: Sequence[int]) -> Batch:
        """The photos at these places, with the bird's box as region and as target."""
        found = self._photos.batch(indices)
        assert found.geometry is not None
        boxes = self._boxes[self._photos.places(indices), None]
        shares = found.geometry.cover_boxes(boxes, self.cells)[:, 0]
        return replace(found, boxes=boxes, target=target(shares, self.cells, found.geometry))

    def part_points(
        self, indices: Sequence[int]
    ) -> tuple[Float[Tensor, "b m 2"], Bool[Tensor, "b m"]]:
        """Where each part is, (y, x) in pixels of the photo, and whether it is to be seen."""
        places = self._photos.places(indices)
        return self._at[places], self._seen[places]

    def digest(self) -> str:
        """A hash of every photo of the split and of all the lists."""
        if self._digest is None:
            found = hashlib.sha256(self._photos.digest().encode())
            for name in LISTS:
                found.update(digest(self._folder / name).encode())
            self._digest = found.hexdigest()
        return self._digest


def read_names(path: Path) -> tuple[str, ...]:
    """The names of a list whose lines are numbered 1, 2, 3, ..."""
    found = []
    for number, line in enumerate(read_lines(path), start=1):
        first, _, name = line.partition(" ")
        if first != str(number) or not name.strip():
            raise Damaged(f"{path}: line {number} is not `{number} NAME`; get it again.")
        found.append(name.strip())
    return tuple(found)


def read_classes(path: Path) -> tuple[str, ...]:
    """The names of the kinds of birds, without the numbers before them."""
    return tuple(name.split(".", 1)[-1] for name in read_names(path))


def read_entries(
    folder: Path, names: Sequence[str], classes: int
) -> tuple[list[Entry], list[Entry]]:
    """The photos of train and of test, with their classes."""
    labels = _numbers(folder / "image_class_labels.txt", len(names), 1)
    parts = _numbers(folder / "train_test_split.txt", len(names), 1)
    train: list[Entry] = []
    test: list[Entry] = []
    for row, (name, label, part) in enumerate(zip(names, labels, parts, strict=True), start=1):
        if label[0] not in range(1, classes + 1):
            path = folder / "image_class_labels.txt"
            raise Damaged(f"{path}: photo {row} has class {label[0]:g}, not 1 to {classes}.")
        if part[0] not in (0, 1):
            path = folder / "train_test_split.txt"
            raise Damaged(f"{path}: photo {row} has {part[0]:g}, not 1 for train or 0 for test.")
        (train if part[0] else test).append(Entry(name, int(label[0]) - 1))
    apart(folder / "images.txt", [*train, *test])
    return train, test


def read_boxes(path: Path, photos: int) -> Float[Tensor, "n 4"]:
    """The box of each bird: left, top, right, bottom in pixels of the photo."""
    found = torch.tensor(_numbers(path, photos, 4), dtype=torch.float32)
    empty = ((found[:, 2:] <= 0).any(dim=1)).nonzero()
    if len(empty):
        raise Damaged(f"{path}: the box of photo {int(empty[0]) + 1} is empty; get it again.")
    return torch.cat([found[:, :2], found[:, :2] + found[:, 2:]], dim=1)


def read_parts(
    path: Path, photos: int, parts: int
) -> tuple[Float[Tensor, "n m 2"], Bool[Tensor, "n m"]]:
    """Where the parts of each bird are, (y, x), and which are visible."""
    lines = read_lines(path)
    if len(lines) != photos * parts:
        raise Damaged(f"{path} has {len(lines)} lines for {photos} photos of {parts} parts.")
    found = []
    for number, line in enumerate(lines):
        values = _values(line)
        expected = [number // parts + 1, number % parts + 1]
        if len(values) != 5 or values[:2] != expected or values[4] not in (0, 1):
            raise Damaged(
                f"{path}: line {number + 1} is not `{expected[0]} {expected[1]} X Y VISIBLE`."
            )
        found.append(values[2:])
    table = torch.tensor(found, dtype=torch.float32).reshape(photos, parts, 3)
    return table[..., :2].flip(-1), table[..., 2] == 1


def _numbers(path: Path, count: int, width: int) -> list[list[float]]:
    """The numbers of each photo in a list that has one line a photo, in order."""
    lines = read_lines(path)
    if len(lines) != count:
        raise Damaged(f"{path} has {len(lines)} lines for {count} photos; get it again.")
    found = []
    for number, line in enumerate(lines, start=1):
        values = _values(line)
        if len(values) != width + 1 or values[0] != number:
            raise Damaged(f"{path}: line {number} is not `{number}` and {width} numbers.")
        found.append(values[1:])
    return found


def _values(line: str) -> list[float]:
    """The finite numbers of a line; none where anything else stands in it."""
    try:
        found = [float(value) for value in line.split()]
    except ValueError:
        return []
    return found if all(math.isfinite(value) for value in found) else []
