"""CUB-200-2011: photos of 200 bird species, each with a box and fifteen parts.

Wah, Branson, Welinder, Perona and Belongie, "The Caltech-UCSD Birds-200-2011 Dataset", 2011,
https://www.vision.caltech.edu/datasets/cub_200_2011/. The lines of every list in `CUB_200_2011/`
start with the number of a photo: `images.txt`, `image_class_labels.txt`, `train_test_split.txt`,
`bounding_boxes.txt` (x, y, width, height) and `parts/part_locs.txt` (part, x, y, visible).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from overt.data.batch import Batch
from overt.data.dataset import digest_files
from overt.data.images import Resize, Size, stretch
from overt.data.photo_dataset import (
    Box,
    PhotoDataset,
    PhotoEntry,
    check_distinct,
    check_photo_count,
    parse_split_or_all,
    read_lines,
    region_target,
    select_split,
)
from overt.data.splits import Split
from overt.errors import CorruptFileError

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

CropRule = Callable[[Box, Size], Box]


def bird_box(box: Box, size: Size) -> Box:
    """Show only the box around the bird, as papers that train on boxes do."""
    return box


def whole_photo(box: Box, size: Size) -> Box:
    """Show the whole photo."""
    return (0.0, 0.0, float(size[1]), float(size[0]))


class Cub:
    """CUB-200-2011: 5,394 / 600 / 5,794 photos in train / val / test; `all` has all of them.

    The defaults are those of Learn to Pay Attention: the box around the bird, resized to 80 x 80
    pixels. The target is the share of each cell inside the bird's box, which is informative with
    `view=whole_photo`.

    Args:
        root: Data folder, see `data_root`.
        split: `train`, `val`, `test`, `train+val` or `all`.
        size: Canvas (height, width) in pixels.
        resize: How a photo is brought to the canvas: `images.crop`, `fit` or `stretch`.
        view: Part of the photo to show: `bird_box` or `whole_photo`.
        cells: Grid (rows, columns) of the target.
        photos: Expected number of photos in train and test; None accepts any number.
        validation: Number of training items held out as `val`.

    Raises:
        UserError: The files are missing, or the split does not exist.
        CorruptFileError: A file is not the published one; the message names file and record.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from PIL import Image
        >>> from overt.io import write_text
        >>> lists = ["1 001.Albatross", "1 one.jpg", "1 1", "1 0", "1 0 0 4 6"]
        >>> lists += ["1 beak", "1 1 2 3 1"]
        >>> with TemporaryDirectory() as root:
        ...     for name, line in zip(LISTS, lists, strict=True):
        ...         write_text(Path(root, FOLDER, name), line)
        ...     Path(root, FOLDER, "images").mkdir()
        ...     Image.new("RGB", (8, 6)).save(Path(root, FOLDER, "images", "one.jpg"))
        ...     data = Cub(root, "test", view=whole_photo, cells=(1, 2), photos=(0, 1))
        ...     data.batch([0]).target.weights.flatten()  # the box is the left half
        tensor([1., 0.])
    """

    def __init__(
        self,
        root: Path | str,
        split: str = Split.TRAIN,
        size: Size = SIZE,
        resize: Resize = stretch,
        view: CropRule = bird_box,
        cells: Size = CELLS,
        photos: tuple[int, int] | None = (TRAIN, TEST),
        validation: int = VALIDATION,
    ) -> None:
        root = Path(root)
        self.name, self.split, self.cells = "cub", parse_split_or_all(split), cells
        self._folder = root / FOLDER
        self.classes = read_classes(self._folder / "classes.txt")
        self.parts = read_names(self._folder / "parts" / "parts.txt")
        names = read_names(self._folder / "images.txt")
        self._numbers = {name: number for number, name in enumerate(names, start=1)}
        train, test = read_entries(self._folder, names, len(self.classes))
        for found, wanted in zip((train, test), photos or (None, None), strict=True):
            check_photo_count(self._folder / "train_test_split.txt", len(found), wanted)
        boxes = read_boxes(self._folder / "bounding_boxes.txt", len(names))
        entries = select_split(self.split, train, test, validation)
        rows = torch.tensor([self._numbers[entry.path] - 1 for entry in entries], dtype=torch.long)
        self._boxes = boxes[rows]
        at, seen = read_parts(self._folder / "parts" / "part_locs.txt", len(names), len(self.parts))
        self._at, self._seen = at[rows], seen[rows]

        def window(place: int, size: Size) -> Box:
            left, top, right, bottom = self._boxes[place].tolist()
            return view((left, top, right, bottom), size)

        self._photos = PhotoDataset(
            self.name,
            self.split,
            self._folder / "images",
            entries,
            self.classes,
            size,
            resize,
            window,
        )
        self.files = self._photos.files
        self._digest: str | None = None

    def __len__(self) -> int:
        return len(self._photos)

    def labels(self, indices: Sequence[int]) -> Int[Tensor, " b"]:
        """Return the class indices, without opening a photo."""
        return self._photos.labels(indices)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the photos at `indices`, with the bird's box as region and as target."""
        found = self._photos.batch(indices)
        assert found.geometry is not None
        boxes = self._boxes[self._photos.places(indices), None]
        shares = found.geometry.cover_boxes(boxes, self.cells)[:, 0]
        return replace(found, boxes=boxes, target=region_target(shares, self.cells, found.geometry))

    def part_points(
        self, indices: Sequence[int]
    ) -> tuple[Float[Tensor, "b m 2"], Bool[Tensor, "b m"]]:
        """Return the position (y, x) of each part in pixels of the photo, and whether it is
        visible.
        """
        places = self._photos.places(indices)
        return self._at[places], self._seen[places]

    def digest(self) -> str:
        """Return a hash of every photo of the split and of all lists."""
        if self._digest is None:
            lists = [self._folder / name for name in LISTS]
            self._digest = digest_files(self._photos.digest(), lists)
        return self._digest


def read_names(path: Path) -> tuple[str, ...]:
    """Read the names of a list whose lines are numbered 1, 2, 3, ..."""
    found = []
    for number, line in enumerate(read_lines(path), start=1):
        first, _, name = line.partition(" ")
        if first != str(number) or not name.strip():
            raise CorruptFileError(
                f"{path}: line {number} is not `{number} NAME`; download it again."
            )
        found.append(name.strip())
    return tuple(found)


def read_classes(path: Path) -> tuple[str, ...]:
    """Read the names of the species, without the numbers before them."""
    return tuple(name.split(".", 1)[-1] for name in read_names(path))


def read_entries(
    folder: Path, names: Sequence[str], classes: int
) -> tuple[list[PhotoEntry], list[PhotoEntry]]:
    """Read the photos of train and of test, with their classes."""
    labels = _numbers(folder / "image_class_labels.txt", len(names), 1)
    parts = _numbers(folder / "train_test_split.txt", len(names), 1)
    train: list[PhotoEntry] = []
    test: list[PhotoEntry] = []
    for row, (name, label, part) in enumerate(zip(names, labels, parts, strict=True), start=1):
        if label[0] not in range(1, classes + 1):
            path = folder / "image_class_labels.txt"
            raise CorruptFileError(
                f"{path}: photo {row} has class {label[0]:g}, not 1 to {classes}."
            )
        if part[0] not in (0, 1):
            path = folder / "train_test_split.txt"
            raise CorruptFileError(
                f"{path}: photo {row} has {part[0]:g}, not 1 for train or 0 for test."
            )
        (train if part[0] else test).append(PhotoEntry(name, int(label[0]) - 1))
    check_distinct(folder / "images.txt", [*train, *test])
    return train, test


def read_boxes(path: Path, photos: int) -> Float[Tensor, "n 4"]:
    """Read the box of each bird: left, top, right, bottom in pixels of the photo."""
    found = torch.tensor(_numbers(path, photos, 4), dtype=torch.float32)
    empty = ((found[:, 2:] <= 0).any(dim=1)).nonzero()
    if len(empty):
        raise CorruptFileError(
            f"{path}: the box of photo {int(empty[0]) + 1} is empty; download it again."
        )
    return torch.cat([found[:, :2], found[:, :2] + found[:, 2:]], dim=1)


def read_parts(
    path: Path, photos: int, parts: int
) -> tuple[Float[Tensor, "n m 2"], Bool[Tensor, "n m"]]:
    """Read the positions (y, x) of the parts of each bird, and which are visible."""
    lines = read_lines(path)
    if len(lines) != photos * parts:
        raise CorruptFileError(
            f"{path} has {len(lines)} lines for {photos} photos of {parts} parts."
        )
    found = []
    for number, line in enumerate(lines):
        values = _values(line)
        expected = [number // parts + 1, number % parts + 1]
        if len(values) != 5 or values[:2] != expected or values[4] not in (0, 1):
            raise CorruptFileError(
                f"{path}: line {number + 1} is not `{expected[0]} {expected[1]} X Y VISIBLE`."
            )
        found.append(values[2:])
    table = torch.tensor(found, dtype=torch.float32).reshape(photos, parts, 3)
    return table[..., :2].flip(-1), table[..., 2] == 1


def _numbers(path: Path, count: int, width: int) -> list[list[float]]:
    """Read the numbers of each photo from a list with one line per photo, in order."""
    lines = read_lines(path)
    if len(lines) != count:
        raise CorruptFileError(
            f"{path} has {len(lines)} lines for {count} photos; download it again."
        )
    found = []
    for number, line in enumerate(lines, start=1):
        values = _values(line)
        if len(values) != width + 1 or values[0] != number:
            raise CorruptFileError(f"{path}: line {number} is not `{number}` and {width} numbers.")
        found.append(values[1:])
    return found


def _values(line: str) -> list[float]:
    """Return the numbers of a line; none if any of them is not a finite number."""
    try:
        found = [float(value) for value in line.split()]
    except ValueError:
        return []
    return found if all(math.isfinite(value) for value in found) else []
