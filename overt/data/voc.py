"""Pascal VOC: photos with boxes of objects of 20 classes, some of them segmented.

Everingham, Van Gool, Williams, Winn and Zisserman, "The Pascal Visual Object Classes (VOC)
Challenge", 2010, http://host.robots.ox.ac.uk/pascal/VOC/. `VOCdevkit/VOC2007/` (or 2012) has
`JPEGImages/ID.jpg`, `Annotations/ID.xml`, `ImageSets/Main/SPLIT.txt` with one id per line, and for
the photos of `ImageSets/Segmentation/SPLIT.txt` also `SegmentationClass/ID.png`, whose colours are
the classes, and near white where the class is uncertain.
"""

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from overt.data.images import Resize, Size, open_image, stretch
from overt.data.object_masks import (
    AnnotatedPhotos,
    Mask,
    ObjectGroup,
    ObjectMasks,
    box_mask,
    check_listed,
)
from overt.data.photo_dataset import Box, read_lines
from overt.errors import CorruptFileError, UserError
from overt.io import digest

FOLDER = "VOCdevkit"
KINDS = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa"),
    *("train", "tvmonitor"),
)
SPLITS = ("train", "val", "trainval", "test")
SIZE, CELLS = (224, 224), (14, 14)
MOST_BYTES = 1_000_000  # of an XML file; the longest official one has 30 KB
NAME = re.compile(r"[0-9A-Za-z_]+")
VOID = (224, 224, 192)  # colour of edges and uncertain pixels


def voc_boxes(
    root: Path | str,
    split: str = "test",
    year: str = "2007",
    size: Size = SIZE,
    resize: Resize = stretch,
    cells: Size = CELLS,
) -> ObjectMasks:
    """Open VOC with the boxes of one class of objects per sample; difficult objects count too.

    Args:
        root: Data folder, see `data_root`.
        split: `train`, `val`, `trainval` or `test`.
        year: `2007` or `2012`.
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
        >>> from overt.io import write_text
        >>> edges = "<xmin>1</xmin><ymin>1</ymin><xmax>4</xmax><ymax>6</ymax>"
        >>> dog = f"<object><name>dog</name><bndbox>{edges}</bndbox></object>"
        >>> with TemporaryDirectory() as root:
        ...     folder = Path(root, FOLDER, "VOC2007")
        ...     write_text(folder / "ImageSets" / "Main" / "test.txt", "000001")
        ...     write_text(folder / "Annotations" / "000001.xml", f"<annotation>{dog}</annotation>")
        ...     (folder / "JPEGImages").mkdir()
        ...     Image.new("RGB", (8, 6)).save(folder / "JPEGImages" / "000001.jpg")
        ...     voc_boxes(root).batch([0]).boxes
        tensor([[[0., 0., 4., 6.]]])
    """
    photos, _, about = _read(root, "Main", split, year)
    return ObjectMasks(
        f"voc{year}-boxes", split, *photos, box_mask, size, resize, cells, f"boxes {about}"
    )


def voc_masks(
    root: Path | str,
    split: str = "val",
    year: str = "2012",
    size: Size = SIZE,
    resize: Resize = stretch,
    cells: Size = CELLS,
) -> ObjectMasks:
    """Open VOC with the masks of one class of objects per sample; uncertain pixels are outside.

    Args:
        root: Data folder, see `data_root`.
        split: `train`, `val`, `trainval` or `test`.
        year: `2007` or `2012`.
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
        >>> from overt.io import write_text
        >>> edges = "<xmin>1</xmin><ymin>1</ymin><xmax>4</xmax><ymax>6</ymax>"
        >>> dog = f"<object><name>dog</name><bndbox>{edges}</bndbox></object>"
        >>> mask = Image.new("RGB", (8, 6))
        >>> mask.paste(colour_of(KINDS.index("dog")), (0, 0, 4, 6))
        >>> with TemporaryDirectory() as root:
        ...     folder = Path(root, FOLDER, "VOC2012")
        ...     write_text(folder / "ImageSets" / "Segmentation" / "val.txt", "000001")
        ...     write_text(folder / "Annotations" / "000001.xml", f"<annotation>{dog}</annotation>")
        ...     (folder / "JPEGImages").mkdir()
        ...     (folder / "SegmentationClass").mkdir()
        ...     Image.new("RGB", (8, 6)).save(folder / "JPEGImages" / "000001.jpg")
        ...     mask.save(folder / "SegmentationClass" / "000001.png")
        ...     voc_masks(root, cells=(1, 2)).batch([0]).target.weights.flatten()
        tensor([1., 0.])
    """
    photos, pictures, about = _read(root, "Segmentation", split, year)
    check_listed(pictures, split)
    outline = partial(_coloured, pictures=pictures)
    about = f"masks {about} {[digest(one) for one in pictures]}"
    return ObjectMasks(f"voc{year}-masks", split, *photos, outline, size, resize, cells, about)


def colour_of(kind: int) -> tuple[int, int, int]:
    """Return the colour of a class in segmentation images: its bits, three by three, highest first.

    >>> colour_of(0), colour_of(14)  # aeroplane, person
    ((128, 0, 0), (192, 128, 128))
    """
    number, colour = kind + 1, [0, 0, 0]  # number 0 is the background
    for place in range(8):
        for channel in range(3):
            colour[channel] |= (number >> channel & 1) << (7 - place)
        number >>= 3
    return colour[0], colour[1], colour[2]


def _coloured(things: ObjectGroup, size: Size, pictures: Sequence[Path]) -> Mask:
    pixels, _ = open_image(pictures[things.photo])
    return torch.from_numpy((pixels == np.array(colour_of(things.kind))).all(axis=-1))


def _read(
    root: Path | str, task: str, split: str, year: str
) -> tuple[AnnotatedPhotos, list[Path], str]:
    """Return the photos of a split with their objects, their masks, and a hash of the files."""
    root = Path(root)
    if split not in SPLITS:
        raise UserError(f"voc has {', '.join(SPLITS)}, not {split!r}.")
    folder = root / FOLDER / f"VOC{year}"
    listed = folder / "ImageSets" / task / f"{split}.txt"
    names = [line.split()[0] for line in read_lines(listed)]
    things: list[ObjectGroup] = []
    hashes = []
    for photo, name in enumerate(names):
        if not NAME.fullmatch(name):
            raise CorruptFileError(f"{listed}: {name!r:.40} is not a photo id; download it again.")
        path = folder / "Annotations" / f"{name}.xml"
        found: dict[int, list[Box]] = {}
        for kind, box in read_things(path):
            found.setdefault(kind, []).append(box)
        things += [ObjectGroup(photo, kind, tuple(boxes)) for kind, boxes in sorted(found.items())]
        hashes.append(digest(path))
    photos = (folder / "JPEGImages", [f"{name}.jpg" for name in names], things, KINDS)
    masks = [folder / "SegmentationClass" / f"{name}.png" for name in names]
    return photos, masks, f"{year} {task} {split} {hashes}"


def read_things(path: Path) -> list[tuple[int, Box]]:
    """Read the class and the box of every object in a photo, as edges of pixels.

    The file counts pixels from 1 and includes the last one: 1 to 10 are ten pixels, from 0 to 10. A
    file that declares entities is rejected and not expanded.
    """
    from xml.etree import ElementTree

    if not path.is_file():
        raise CorruptFileError(f"{path} is missing, but a list has its photo; download it again.")
    text = path.read_bytes()
    if len(text) > MOST_BYTES or b"<!" in text:
        raise CorruptFileError(f"{path} is too long, or declares entities; download it again.")
    try:
        return [_thing(one) for one in ElementTree.fromstring(text).findall("object")]
    except (ElementTree.ParseError, ValueError, TypeError) as problem:
        raise CorruptFileError(
            f"{path} is not a VOC annotation: {problem!s:.80}; download it again."
        ) from problem


def _thing(one: Any) -> tuple[int, Box]:
    name = one.findtext("name")
    if name not in KINDS:
        raise ValueError(f"unknown class {name!r}")
    edges = [float(one.findtext(f"bndbox/{edge}")) for edge in ("xmin", "ymin", "xmax", "ymax")]
    left, top, right, bottom = edges
    if not (0 < left <= right < 1e6 and 0 < top <= bottom < 1e6):
        raise ValueError(f"a box of {edges}")
    return KINDS.index(name), (left - 1, top - 1, right, bottom)
