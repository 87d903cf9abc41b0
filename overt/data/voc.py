"""Pascal VOC: photos with the boxes of things of 20 kinds, and outlines for some of them.

Everingham, Van Gool, Williams, Winn and Zisserman, "The Pascal Visual Object Classes (VOC)
Challenge", 2010, http://host.robots.ox.ac.uk/pascal/VOC/. In `VOCdevkit/VOC2007/` (or 2012) lie
`JPEGImages/ID.jpg`, `Annotations/ID.xml`, `ImageSets/Main/SPLIT.txt` with an id a line, and for the
photos of `ImageSets/Segmentation/SPLIT.txt` also `SegmentationClass/ID.png`, whose colours are the
kinds, and near white where nobody can tell.
"""

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from overt.data.images import How, Size, open_image, stretch
from overt.data.objects import Mask, Outlined, Things, inside_boxes
from overt.data.photos import Box, read_lines
from overt.errors import BadInput, Damaged
from overt.files import digest

FOLDER = "VOCdevkit"
KINDS = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa"),
    *("train", "tvmonitor"),
)
SPLITS = ("train", "val", "trainval", "test")
SIZE, CELLS = (224, 224), (14, 14)
MOST_BYTES = 1_000_000  # of an XML file; the longest there is has 30 KB
NAME = re.compile(r"[0-9A-Za-z_]+")
VOID = (224, 224, 192)  # the colour of edges and of what nobody can tell


def voc_boxes(
    root: Path | str,
    split: str = "test",
    year: str = "2007",
    size: Size = SIZE,
    how: How = stretch,
    cells: Size = CELLS,
) -> Outlined:
    """Photos with the boxes of one kind of thing a sample; things marked difficult count too."""
    folder, names, things, about = _read(root, "Main", split, year)
    return Outlined(
        f"voc{year}-boxes",
        split,
        folder / "JPEGImages",
        [f"{name}.jpg" for name in names],
        things,
        KINDS,
        inside_boxes,
        size,
        how,
        cells,
        f"boxes {about}",
    )


def voc_masks(
    root: Path | str,
    split: str = "val",
    year: str = "2012",
    size: Size = SIZE,
    how: How = stretch,
    cells: Size = CELLS,
) -> Outlined:
    """Photos with the outlines of one kind of thing a sample; what nobody can tell is outside."""
    folder, names, things, about = _read(root, "Segmentation", split, year)
    pictures = [folder / "SegmentationClass" / f"{name}.png" for name in names]
    for picture in pictures:
        if not picture.is_file():
            raise Damaged(f"{picture} is missing, but {split} names it; get it again.")
    return Outlined(
        f"voc{year}-masks",
        split,
        folder / "JPEGImages",
        [f"{name}.jpg" for name in names],
        things,
        KINDS,
        partial(_coloured, pictures=pictures),
        size,
        how,
        cells,
        f"masks {about} {[digest(one) for one in pictures]}",
    )


def colour_of(kind: int) -> tuple[int, int, int]:
    """The colour of a kind in the pictures of outlines: its bits, three by three, highest first.

    >>> colour_of(0), colour_of(14)  # aeroplane, person
    ((128, 0, 0), (192, 128, 128))
    """
    number, colour = kind + 1, [0, 0, 0]  # number 0 is what is no thing
    for place in range(8):
        for channel in range(3):
            colour[channel] |= (number >> channel & 1) << (7 - place)
        number >>= 3
    return colour[0], colour[1], colour[2]


def _coloured(things: Things, size: Size, pictures: Sequence[Path]) -> Mask:
    pixels, _ = open_image(pictures[things.photo])
    return torch.from_numpy((pixels == np.array(colour_of(things.kind))).all(axis=-1))


def _read(
    root: Path | str, task: str, split: str, year: str
) -> tuple[Path, list[str], list[Things], str]:
    """The photos of a split, their things by kind, and a hash of what was read."""
    root = Path(root)
    if split not in SPLITS:
        raise BadInput(f"voc has {', '.join(SPLITS)}, not {split!r}.")
    folder = root / FOLDER / f"VOC{year}"
    listed = folder / "ImageSets" / task / f"{split}.txt"
    names = [line.split()[0] for line in read_lines(listed)]
    things: list[Things] = []
    hashes = []
    for photo, name in enumerate(names):
        if not NAME.fullmatch(name):
            raise Damaged(f"{listed}: {name!r:.40} is no name of a photo; get it again.")
        path = folder / "Annotations" / f"{name}.xml"
        found: dict[int, list[Box]] = {}
        for kind, box in read_things(path):
            found.setdefault(kind, []).append(box)
        things += [Things(photo, kind, tuple(boxes)) for kind, boxes in sorted(found.items())]
        hashes.append(digest(path))
    return folder, names, things, f"{year} {task} {split} {hashes}"


def read_things(path: Path) -> list[tuple[int, Box]]:
    """The kind and the box of every thing in a photo, the edges of pixels as numbers.

    The file counts pixels from 1 and names the last one inside: 1 to 10 are ten pixels, from 0 to
    10. A file that declares entities is refused and not expanded.
    """
    from xml.etree import ElementTree

    if not path.is_file():
        raise Damaged(f"{path} is missing, but a list names its photo; get it again.")
    text = path.read_bytes()
    if len(text) > MOST_BYTES or b"<!" in text:
        raise Damaged(f"{path} is too long, or declares more than things; get it again.")
    try:
        return [_thing(one) for one in ElementTree.fromstring(text).findall("object")]
    except (ElementTree.ParseError, ValueError, TypeError) as problem:
        raise Damaged(f"{path} does not describe things: {problem!s:.80}; get it again.") from (
            problem
        )


def _thing(one: Any) -> tuple[int, Box]:
    name = one.findtext("name")
    if name not in KINDS:
        raise ValueError(f"there is no kind {name!r}")
    edges = [float(one.findtext(f"bndbox/{edge}")) for edge in ("xmin", "ymin", "xmax", "ymax")]
    left, top, right, bottom = edges
    if not (0 < left <= right < 1e6 and 0 < top <= bottom < 1e6):
        raise ValueError(f"a box of {edges}")
    return KINDS.index(name), (left - 1, top - 1, right, bottom)
