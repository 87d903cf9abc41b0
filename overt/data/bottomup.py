"""Bottom-up features: regions of photos that a detector found, in the files they are published in.

Anderson et al., "Bottom-Up and Top-Down Attention for Image Captioning and Visual Question
Answering", CVPR 2018, https://github.com/peteanderson80/bottom-up-attention. A folder holds one or
more `*.tsv`, a line a photo: its number in COCO, width, height, how many boxes, then boxes
(left, top, right, bottom in pixels) and features as base64 of 32-bit numbers. The lines are long,
so where each begins is found once and kept beside them, in `index.json`.
"""

import base64
import binascii
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor

from overt import files
from overt.errors import BadInput, Damaged, Failed

INDEX, FORMAT = "index.json", "overt bottom-up 1"
FIELDS = 6
NUMBER = re.compile(r"(\d+)\.\w+$")


@dataclass(frozen=True, eq=False)
class Detected:
    """The regions of some photos, padded to the most that one of them has."""

    features: Float[Tensor, "b m d"]
    boxes: Float[Tensor, "b m 4"]
    present: Bool[Tensor, "b m"]


def is_bottom_up(folder: Path) -> bool:
    """Whether a folder holds features in these files."""
    return folder.is_dir() and any(folder.glob("*.tsv"))


def photo_number(name: str) -> int:
    """The number of a photo of COCO from its file: 391895 of COCO_val2014_000000391895.jpg."""
    found = NUMBER.search(name)
    if found is None:
        raise BadInput(f"{name!r} does not end in the number of a photo.")
    return int(found.group(1))


class BottomUp:
    """Features of regions by the number of their photo, read from disk when they are asked for.

    Photos may have different numbers of regions: 10 to 100, or 36 each, as they are published.
    """

    def __init__(self, folder: Path) -> None:
        paths = sorted(folder.glob("*.tsv"))
        if not paths:
            raise BadInput(f"{folder} has no *.tsv with bottom-up features.")
        self.folder = folder
        self._at = _index(folder, paths)
        if not self._at:
            raise Damaged(f"the *.tsv in {folder} are empty; get them again.")
        self.width = self._read(next(iter(self._at)))[1].shape[1]

    def __len__(self) -> int:
        return len(self._at)

    def __contains__(self, photo: int) -> bool:
        return photo in self._at

    def get(self, photos: Sequence[int]) -> Detected:
        """The regions of these photos, in this order."""
        found = [self._read(photo) for photo in photos]
        most = max(len(boxes) for boxes, _ in found)
        features = torch.zeros(len(found), most, self.width)
        where = torch.zeros(len(found), most, 4)
        present = torch.zeros(len(found), most, dtype=torch.bool)
        for row, (boxes, values) in enumerate(found):
            if values.shape[1] != self.width:
                raise Damaged(
                    f"{self.folder}: photo {photos[row]} has {values.shape[1]} numbers a region, "
                    f"others {self.width}."
                )
            features[row, : len(values)] = torch.from_numpy(values)
            where[row, : len(boxes)] = torch.from_numpy(boxes)
            present[row, : len(boxes)] = True
        return Detected(features, where, present)

    def _read(self, photo: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        if photo not in self._at:
            raise BadInput(f"{self.folder} has no features of photo {photo}.")
        name, start = self._at[photo]
        with (self.folder / name).open("rb") as file:
            file.seek(start)
            line = file.readline()
        return _parsed(line, photo, f"{self.folder / name}, byte {start}")


def _parsed(line: bytes, photo: int, where: str) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    try:
        number, _, _, count, boxes, features = line.rstrip(b"\r\n").split(b"\t")
        n = int(count)
        where_boxes = np.frombuffer(base64.b64decode(boxes, validate=True), "<f4")
        where_boxes = where_boxes.reshape(n, 4).copy()
        values = np.frombuffer(base64.b64decode(features, validate=True), "<f4")
        values = values.reshape(n, -1).copy()  # what was decoded cannot be written to
        if int(number) != photo or n < 1:
            raise ValueError("numbers that cannot be")
        if not (np.isfinite(values).all() and np.isfinite(where_boxes).all()):
            raise ValueError(f"of photo {photo} some numbers are not finite")
    except (ValueError, binascii.Error) as problem:
        raise Damaged(
            f"{where}: no regions of a photo ({problem}); get the file again."
        ) from problem
    return where_boxes, values


def _index(folder: Path, paths: Sequence[Path]) -> dict[int, tuple[str, int]]:
    """Where each photo's line begins; kept in the folder where that can be written."""
    sizes = {path.name: path.stat().st_size for path in paths}
    kept = folder / INDEX
    if kept.is_file():
        said = _kept(files.read_json(kept), sizes)
        if said is not None:
            return said
    found: dict[int, tuple[str, int]] = {}
    for path in paths:
        start = 0
        with path.open("rb") as file:
            for line in file:
                fields = line.split(b"\t", FIELDS)
                if len(fields) != FIELDS or not fields[0].isdigit():
                    raise Damaged(
                        f"{path}, byte {start}: not a line of {FIELDS} fields that begins with the "
                        "number of a photo."
                    )
                photo = int(fields[0])
                if photo in found:
                    first, byte = found[photo]
                    raise Damaged(
                        f"{path}, byte {start}: photo {photo} comes twice, first in "
                        f"{folder / first}, byte {byte}; get the files again."
                    )
                found[photo] = (path.name, start)
                start += len(line)
    with suppress(Failed, OSError):  # a folder that is only read: found again next time
        files.write_json(kept, {"format": FORMAT, "sizes": sizes, "at": found})
    return found


def _kept(said: Any, sizes: dict[str, int]) -> dict[int, tuple[str, int]] | None:
    """An index that was kept, if it is one, and of these files."""
    if not isinstance(said, dict) or (said.get("format"), said.get("sizes")) != (FORMAT, sizes):
        return None
    found: dict[int, tuple[str, int]] = {}
    for photo, where in said["at"].items() if isinstance(said.get("at"), dict) else ():
        match where:
            case [str(name), int(start)] if photo.isdecimal() and 0 <= start < sizes.get(name, 0):
                found[int(photo)] = (name, start)
            case _:
                return None
    return found or None
