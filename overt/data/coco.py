"""COCO: photos with every thing of 80 kinds outlined.

Lin et al., "Microsoft COCO: Common Objects in Context", ECCV 2014, https://cocodataset.org. In
`coco/annotations/` lie `instances_{train,val}{2014,2017}.json`: photos, kinds ("categories", whose
numbers have gaps) and things ("annotations") with a box (x, y, width, height) and an outline, which
is polygons, or for a crowd the lengths of runs down the columns. Photos are in `coco/val2017/` and
the like.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from overt.data.images import How, Size, stretch
from overt.data.objects import Mask, Outlined, Things, inside_boxes
from overt.data.photos import Box
from overt.data.splits import Split
from overt.errors import BadInput, Damaged
from overt.files import digest, read_json

FOLDER = "coco"
YEARS = ("2014", "2017")
SIZE, CELLS = (224, 224), (14, 14)

Shape = list[Any] | dict[str, Any]  # polygons, or runs
Shapes = Mapping[tuple[int, int], Sequence[Shape]]  # by photo and kind


def coco_objects(
    root: Path | str,
    split: str = Split.VAL,
    year: str = "2017",
    size: Size = SIZE,
    how: How = stretch,
    cells: Size = CELLS,
) -> Outlined:
    """Photos of COCO with the outlines of one kind of thing a sample; train or val.

    A crowd counts as the things it is made of. A pixel is inside a polygon when its middle is; the
    official tools draw edges a little wider.
    """
    root = Path(root)
    photos, things, classes, shapes, path = _read(root, split, year)
    folder = root / FOLDER / f"{split}{year}"
    outline = partial(_drawn, shapes=shapes, path=path)
    about = f"coco masks {digest(path)}"
    return Outlined(
        "coco", f"{split}{year}", folder, photos, things, classes, outline, size, how, cells, about
    )


def coco_boxes(
    root: Path | str,
    split: str = Split.VAL,
    year: str = "2017",
    size: Size = SIZE,
    how: How = stretch,
    cells: Size = CELLS,
) -> Outlined:
    """The same with the boxes in the place of the outlines."""
    root = Path(root)
    photos, things, classes, _, path = _read(root, split, year)
    folder = root / FOLDER / f"{split}{year}"
    about = f"coco boxes {digest(path)}"
    return Outlined(
        "coco-boxes",
        f"{split}{year}",
        folder,
        photos,
        things,
        classes,
        inside_boxes,
        size,
        how,
        cells,
        about,
    )


# --- what a shape covers


def filled(shape: Shape, size: Size) -> Mask:
    """The pixels of a photo of `size` that an outline holds: polygons, or runs of either form."""
    if isinstance(shape, list):
        return _polygons(shape, size)
    counts = shape.get("counts")
    if shape.get("size") != list(size):
        raise ValueError(f"runs of a photo of {shape.get('size')} pixels, not {list(size)}")
    if isinstance(counts, str):
        counts = unpacked(counts)
    if not isinstance(counts, list) or not all(isinstance(n, int) and n >= 0 for n in counts):
        raise ValueError("the runs are no whole numbers")
    if sum(counts) != size[0] * size[1]:
        raise ValueError(f"runs of {sum(counts)} pixels in a photo of {size[0] * size[1]}")
    inside = np.repeat(np.arange(len(counts)) % 2 == 1, counts)  # outside comes first
    return torch.from_numpy(inside.reshape(size[1], size[0]).T.copy())  # down the columns


def unpacked(text: str) -> list[int]:
    """The runs of COCO's compressed form: five bits a letter, from the second on differences.

    Each is told as the difference to the run two before, but for the first three.
    """
    counts: list[int] = []
    at = 0
    while at < len(text):
        value, shift, more = 0, 0, True
        while more:
            if at >= len(text) or not 48 <= ord(text[at]) <= 111:
                raise ValueError("the packed runs end early, or hold a letter that is none")
            bits = ord(text[at]) - 48
            value |= (bits & 0x1F) << shift
            more, shift, at = bool(bits & 0x20), shift + 5, at + 1
            if not more and bits & 0x10:
                value |= -1 << shift
        counts.append(value + counts[-2] if len(counts) > 2 else value)
    return counts


def _polygons(polygons: Sequence[Any], size: Size) -> Mask:
    """The pixels whose middle lies inside any of the polygons."""
    mask = np.zeros(size, dtype=bool)
    for numbers in polygons:
        if len(numbers) < 6 or len(numbers) % 2:
            raise ValueError(f"a polygon of {len(numbers)} numbers")
        corners = np.asarray(numbers, dtype=np.float64).reshape(-1, 2)
        if not np.isfinite(corners).all():
            raise ValueError("a polygon with a corner nowhere")
        mask |= _inside(corners, size)
    return torch.from_numpy(mask)


def _inside(corners: np.ndarray, size: Size) -> np.ndarray:
    """Along each row, inside and outside change where an edge crosses the middle of the row."""
    height, width = size
    middle = np.arange(height) + 0.5
    changes = np.zeros((height, width + 1), dtype=np.int64)
    for (x0, y0), (x1, y1) in zip(corners, np.roll(corners, -1, axis=0), strict=True):
        rows = np.flatnonzero((middle >= min(y0, y1)) & (middle < max(y0, y1)))
        across = x0 + (middle[rows] - y0) * (x1 - x0) / (y1 - y0 if y1 != y0 else 1.0)
        first = np.ceil(across - 0.5).clip(0, width).astype(np.int64)  # the first middle behind it
        np.add.at(changes, (rows, first), 1)
    return changes[:, :width].cumsum(axis=1) % 2 == 1


def _drawn(things: Things, size: Size, shapes: Shapes, path: Path) -> Mask:
    mask = torch.zeros(size, dtype=torch.bool)
    for shape in shapes[things.photo, things.kind]:
        try:
            mask |= filled(shape, size)
        except (ValueError, TypeError) as problem:
            raise Damaged(f"{path}: photo {things.photo} has {problem}; get it again.") from problem
    return mask


# --- the file


def _read(
    root: Path, split: str, year: str
) -> tuple[list[str], list[Things], tuple[str, ...], Shapes, Path]:
    if split not in (Split.TRAIN, Split.VAL) or year not in YEARS:
        raise BadInput(f"coco has train and val of 2014 and 2017, not {split!r} of {year!r}.")
    path = root / FOLDER / "annotations" / f"instances_{split}{year}.json"
    if not path.is_file():
        raise BadInput(f"{path} is missing; `overt data list` says how to get it.")
    table = read_json(path)
    try:
        return *_parsed(table), path
    except (KeyError, TypeError, ValueError) as problem:
        raise Damaged(f"{path} is not what COCO publishes ({problem!r:.80}); get it again.") from (
            problem
        )


def _parsed(table: Any) -> tuple[list[str], list[Things], tuple[str, ...], Shapes]:
    """Photos with anything in them by their number, their things, the kinds, and all shapes."""
    kinds = sorted((int(one["id"]), str(one["name"])) for one in table["categories"])
    number = {kind: place for place, (kind, _) in enumerate(kinds)}
    names = {int(one["id"]): str(one["file_name"]) for one in table["images"]}
    found: dict[tuple[int, int], list[tuple[Box, Shape]]] = {}
    for one in table["annotations"]:
        photo, kind = int(one["image_id"]), number[int(one["category_id"])]
        if photo not in names:
            raise ValueError(f"a thing in photo {photo}, which is not listed")
        shape = one["segmentation"]
        if not isinstance(shape, (list, dict)):
            raise TypeError(f"an outline of {type(shape).__name__}")
        found.setdefault((photo, kind), []).append((_box(one["bbox"]), shape))
    photos = sorted({photo for photo, _ in found})
    place = {photo: at for at, photo in enumerate(photos)}
    ordered = sorted(found.items())
    things = [
        Things(place[photo], kind, tuple(box for box, _ in each)) for (photo, kind), each in ordered
    ]
    shapes = {(place[photo], kind): [shape for _, shape in each] for (photo, kind), each in ordered}
    return [names[photo] for photo in photos], things, tuple(name for _, name in kinds), shapes


def _box(numbers: Any) -> Box:
    left, top, width, height = (float(number) for number in numbers)
    if not all(map(math.isfinite, (left, top, width, height))) or min(width, height) < 0:
        raise ValueError(f"a box of {numbers}")
    return left, top, left + width, top + height
