"""COCO: photos with segmented objects of 80 classes.

Lin et al., "Microsoft COCO: Common Objects in Context", ECCV 2014, https://cocodataset.org.
`coco/annotations/` has `instances_{train,val}{2014,2017}.json`: photos, classes ("categories",
whose numbers have gaps) and objects ("annotations") with a box (x, y, width, height) and a
segmentation, which is polygons, or for a crowd a run-length encoding along the columns. Photos
are in `coco/val2017/` and the like.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from overt.data.download import require_file
from overt.data.images import Resize, Size, stretch
from overt.data.object_masks import AnnotatedPhotos, Mask, ObjectGroup, ObjectMasks, box_mask
from overt.data.photo_dataset import Box
from overt.data.splits import Split
from overt.errors import CorruptFileError, UserError
from overt.io import digest, read_json

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
    resize: Resize = stretch,
    cells: Size = CELLS,
) -> ObjectMasks:
    """Open COCO with the masks of one class of objects per sample.

    A crowd counts as its objects. A pixel is inside a polygon if its centre is; the official tools
    draw edges a little wider.

    Args:
        root: Data folder, see `data_root`.
        split: `train` or `val`.
        year: `2014` or `2017`.
        size: Canvas (height, width) in pixels.
        resize: How a photo is brought to the canvas: `images.crop`, `fit` or `stretch`.
        cells: Grid (rows, columns) of the target.

    Returns:
        The photos with object masks.

    Raises:
        UserError: The files are missing, or the split does not exist.
        CorruptFileError: A file is not the published one; the message names file and record.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from PIL import Image
        >>> from overt.io import write_json
        >>> table = {
        ...     "images": [{"id": 7, "file_name": "7.jpg"}],
        ...     "categories": [{"id": 18, "name": "dog"}],
        ...     "annotations": [
        ...         {"image_id": 7, "category_id": 18, "bbox": [0, 0, 4, 6],
        ...          "segmentation": [[0, 0, 4, 0, 4, 6]]},
        ...     ],
        ... }
        >>> with TemporaryDirectory() as root:
        ...     write_json(Path(root, FOLDER, "annotations", "instances_val2017.json"), table)
        ...     Path(root, FOLDER, "val2017").mkdir()
        ...     Image.new("RGB", (8, 6)).save(Path(root, FOLDER, "val2017", "7.jpg"))
        ...     data = coco_objects(root, "val")
        ...     data.batch([0]).groups, int(data.masks([0])[0].sum())
        (('dog',), 12)
    """
    photos, shapes, path = _read(Path(root), split, year)
    outline = partial(_object_mask, shapes=shapes, path=path)
    about = f"coco masks {digest(path)}"
    return ObjectMasks("coco", f"{split}{year}", *photos, outline, size, resize, cells, about)


def coco_boxes(
    root: Path | str,
    split: str = Split.VAL,
    year: str = "2017",
    size: Size = SIZE,
    resize: Resize = stretch,
    cells: Size = CELLS,
) -> ObjectMasks:
    """Open COCO with the boxes of one class of objects per sample as masks.

    Args:
        root: Data folder, see `data_root`.
        split: `train` or `val`.
        year: `2014` or `2017`.
        size: Canvas (height, width) in pixels.
        resize: How a photo is brought to the canvas: `images.crop`, `fit` or `stretch`.
        cells: Grid (rows, columns) of the target.

    Returns:
        The photos with box masks.

    Raises:
        UserError: The files are missing, or the split does not exist.
        CorruptFileError: A file is not the published one; the message names file and record.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from PIL import Image
        >>> from overt.io import write_json
        >>> dog = {"image_id": 7, "category_id": 18, "bbox": [0, 0, 4, 6], "segmentation": []}
        >>> table = {
        ...     "images": [{"id": 7, "file_name": "7.jpg"}],
        ...     "categories": [{"id": 18, "name": "dog"}],
        ...     "annotations": [dog],
        ... }
        >>> with TemporaryDirectory() as root:
        ...     write_json(Path(root, FOLDER, "annotations", "instances_val2017.json"), table)
        ...     Path(root, FOLDER, "val2017").mkdir()
        ...     Image.new("RGB", (8, 6)).save(Path(root, FOLDER, "val2017", "7.jpg"))
        ...     data = coco_boxes(root, "val")
        ...     data.batch([0]).groups, int(data.masks([0])[0].sum())
        (('dog',), 24)
    """
    photos, _, path = _read(Path(root), split, year)
    about = f"coco boxes {digest(path)}"
    return ObjectMasks(
        "coco-boxes", f"{split}{year}", *photos, box_mask, size, resize, cells, about
    )


# --- masks


def decode_mask(shape: Shape, size: Size) -> Mask:
    """Decode a segmentation to a mask of `size`: polygons, or RLE in either form."""
    if isinstance(shape, list):
        return _polygons(shape, size)
    counts = shape.get("counts")
    if shape.get("size") != list(size):
        raise ValueError(f"runs of a photo of {shape.get('size')} pixels, not {list(size)}")
    if isinstance(counts, str):
        counts = decode_rle(counts)
    if not isinstance(counts, list) or not all(isinstance(n, int) and n >= 0 for n in counts):
        raise ValueError("runs that are not integers")
    if sum(counts) != size[0] * size[1]:
        raise ValueError(f"runs of {sum(counts)} pixels in a photo of {size[0] * size[1]}")
    inside = np.repeat(np.arange(len(counts)) % 2 == 1, counts)  # outside comes first
    return torch.from_numpy(inside.reshape(size[1], size[0]).T.copy())  # down the columns


def decode_rle(text: str) -> list[int]:
    """Decode COCO's compressed RLE: five bits per letter.

    From the fourth run on, each value is the difference to the run two before.
    """
    counts: list[int] = []
    at = 0
    while at < len(text):
        value, shift, more = 0, 0, True
        while more:
            if at >= len(text) or not 48 <= ord(text[at]) <= 111:
                raise ValueError("compressed runs that end early or have an invalid letter")
            bits = ord(text[at]) - 48
            value |= (bits & 0x1F) << shift
            more, shift, at = bool(bits & 0x20), shift + 5, at + 1
            if not more and bits & 0x10:
                value |= -1 << shift
        counts.append(value + counts[-2] if len(counts) > 2 else value)
    return counts


def _polygons(polygons: Sequence[Any], size: Size) -> Mask:
    """Return the pixels whose middle lies inside any of the polygons."""
    mask = np.zeros(size, dtype=bool)
    for numbers in polygons:
        if len(numbers) < 6 or len(numbers) % 2:
            raise ValueError(f"a polygon of {len(numbers)} numbers")
        corners = np.asarray(numbers, dtype=np.float64).reshape(-1, 2)
        if not np.isfinite(corners).all():
            raise ValueError("a polygon with a corner that is not finite")
        mask |= _inside(corners, size)
    return torch.from_numpy(mask)


def _inside(corners: np.ndarray, size: Size) -> np.ndarray:
    """Return the pixels inside a polygon by scan lines through pixel centres."""
    height, width = size
    middle = np.arange(height) + 0.5
    changes = np.zeros((height, width + 1), dtype=np.int64)
    for (x0, y0), (x1, y1) in zip(corners, np.roll(corners, -1, axis=0), strict=True):
        rows = np.flatnonzero((middle >= min(y0, y1)) & (middle < max(y0, y1)))
        across = x0 + (middle[rows] - y0) * (x1 - x0) / (y1 - y0 if y1 != y0 else 1.0)
        # the first pixel centre behind the edge
        first = np.ceil(across - 0.5).clip(0, width).astype(np.int64)
        np.add.at(changes, (rows, first), 1)
    return changes[:, :width].cumsum(axis=1) % 2 == 1


def _object_mask(things: ObjectGroup, size: Size, shapes: Shapes, path: Path) -> Mask:
    mask = torch.zeros(size, dtype=torch.bool)
    for shape in shapes[things.photo, things.kind]:
        try:
            mask |= decode_mask(shape, size)
        except (ValueError, TypeError) as problem:
            raise CorruptFileError(
                f"{path}: photo {things.photo} has {problem}; download it again."
            ) from problem
    return mask


# --- the file


def _read(root: Path, split: str, year: str) -> tuple[AnnotatedPhotos, Shapes, Path]:
    """Return the photos with their objects, all segmentations, and the file of both."""
    if split not in (Split.TRAIN, Split.VAL) or year not in YEARS:
        raise UserError(f"coco has train and val of 2014 and 2017, not {split!r} of {year!r}.")
    path = root / FOLDER / "annotations" / f"instances_{split}{year}.json"
    require_file(path)
    table = read_json(path)
    try:
        names, things, classes, shapes = _parsed(table)
    except (KeyError, TypeError, ValueError) as problem:
        raise CorruptFileError(
            f"{path} is not a COCO instances file ({problem!r:.80}); download it again."
        ) from problem
    return (root / FOLDER / f"{split}{year}", names, things, classes), shapes, path


def _parsed(table: Any) -> tuple[list[str], list[ObjectGroup], tuple[str, ...], Shapes]:
    """Return the photos with objects, their objects, the classes, and all segmentations.

    Objects whose box has no area are left out; the official files have some.
    """
    kinds = sorted((int(one["id"]), str(one["name"])) for one in table["categories"])
    number = {kind: place for place, (kind, _) in enumerate(kinds)}
    names = {int(one["id"]): str(one["file_name"]) for one in table["images"]}
    found: dict[tuple[int, int], list[tuple[Box, Shape]]] = {}
    for one in table["annotations"]:
        photo, kind = int(one["image_id"]), number[int(one["category_id"])]
        if photo not in names:
            raise ValueError(f"an object in photo {photo}, which is not listed")
        shape = one["segmentation"]
        if not isinstance(shape, (list, dict)):
            raise TypeError(f"a segmentation of type {type(shape).__name__}")
        box = _box(one["bbox"])
        if box[0] < box[2] and box[1] < box[3]:
            found.setdefault((photo, kind), []).append((box, shape))
    photos = sorted({photo for photo, _ in found})
    place = {photo: at for at, photo in enumerate(photos)}
    ordered = sorted(found.items())
    things = [
        ObjectGroup(place[photo], kind, tuple(box for box, _ in each))
        for (photo, kind), each in ordered
    ]
    shapes = {(place[photo], kind): [shape for _, shape in each] for (photo, kind), each in ordered}
    return [names[photo] for photo in photos], things, tuple(name for _, name in kinds), shapes


def _box(numbers: Any) -> Box:
    left, top, width, height = (float(number) for number in numbers)
    if not all(map(math.isfinite, (left, top, width, height))) or min(width, height) < 0:
        raise ValueError(f"a box of {numbers}")
    return left, top, left + width, top + height
