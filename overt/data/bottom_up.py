"""Bottom-up features: detected regions of photos, read from the published TSV files.

Anderson et al., "Bottom-Up and Top-Down Attention for Image Captioning and Visual Question
Answering", CVPR 2018, https://github.com/peteanderson80/bottom-up-attention. A folder has one or
more `*.tsv` with one line per photo: its COCO image id, width, height, number of boxes, then boxes
(left, top, right, bottom in pixels) and features as base64 of 32-bit floats. The lines are long,
so the byte offset of each line is found once and saved beside them in `index.json`.
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

from overt import io
from overt.errors import CorruptFileError, RunError, UserError

INDEX, FORMAT = "index.json", "overt bottom-up 1"
FIELDS = 6
NUMBER = re.compile(r"(\d+)\.\w+$")


@dataclass(frozen=True, eq=False)
class DetectedRegions:
    """Regions of several photos, padded to the largest number of regions."""

    features: Float[Tensor, "b m d"]
    boxes: Float[Tensor, "b m 4"]
    present: Bool[Tensor, "b m"]


def is_bottom_up(folder: Path) -> bool:
    """Return whether a folder has bottom-up features as `*.tsv`."""
    return folder.is_dir() and any(folder.glob("*.tsv"))


def coco_image_id(name: str) -> int:
    """Return the COCO image id in a file name: 391895 for COCO_val2014_000000391895.jpg."""
    found = NUMBER.search(name)
    if found is None:
        raise UserError(f"{name!r} does not end in a COCO image id, such as 000000391895.jpg.")
    return int(found.group(1))


class BottomUpFeatures:
    """Region features by COCO image id, read from disk on demand.

    Photos may have different numbers of regions: 10 to 100, or 36 each, as published.
    """

    def __init__(self, folder: Path) -> None:
        paths = sorted(folder.glob("*.tsv"))
        if not paths:
            raise UserError(f"{folder} has no *.tsv with bottom-up features.")
        self.folder = folder
        self._at = _index(folder, paths)
        if not self._at:
            raise CorruptFileError(f"the *.tsv in {folder} are empty; download them again.")
        self.width = self._read(next(iter(self._at)))[1].shape[1]

    def __len__(self) -> int:
        return len(self._at)

    def __contains__(self, photo: int) -> bool:
        return photo in self._at

    def get(self, photos: Sequence[int]) -> DetectedRegions:
        """Return the regions of these photos, in this order."""
        found = [self._read(photo) for photo in photos]
        most = max(len(boxes) for boxes, _ in found)
        features = torch.zeros(len(found), most, self.width)
        where = torch.zeros(len(found), most, 4)
        present = torch.zeros(len(found), most, dtype=torch.bool)
        for row, (boxes, values) in enumerate(found):
            if values.shape[1] != self.width:
                raise CorruptFileError(
                    f"{self.folder}: photo {photos[row]} has {values.shape[1]} features, "
                    f"others {self.width}."
                )
            features[row, : len(values)] = torch.from_numpy(values)
            where[row, : len(boxes)] = torch.from_numpy(boxes)
            present[row, : len(boxes)] = True
        return DetectedRegions(features, where, present)

    def _read(self, photo: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        if photo not in self._at:
            raise UserError(f"{self.folder} has no features of photo {photo}.")
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
        values = values.reshape(n, -1).copy()  # a decoded buffer is read-only
        if int(number) != photo or n < 1:
            raise ValueError(f"the line is of photo {int(number)} with {n} regions")
        if not (np.isfinite(values).all() and np.isfinite(where_boxes).all()):
            raise ValueError(f"photo {photo} has values that are not finite")
    except (ValueError, binascii.Error) as problem:
        raise CorruptFileError(
            f"{where}: cannot read the regions ({problem}); download the file again."
        ) from problem
    return where_boxes, values


def _index(folder: Path, paths: Sequence[Path]) -> dict[int, tuple[str, int]]:
    """Return the byte offset of each photo; saved in the folder if that is writable."""
    sizes = {path.name: path.stat().st_size for path in paths}
    kept = folder / INDEX
    if kept.is_file():
        said = _kept(io.read_json(kept), sizes)
        if said is not None:
            return said
    found: dict[int, tuple[str, int]] = {}
    for path in paths:
        start = 0
        with path.open("rb") as file:
            for line in file:
                fields = line.split(b"\t", FIELDS)
                if len(fields) != FIELDS or not fields[0].isdigit():
                    raise CorruptFileError(
                        f"{path}, byte {start}: not a line of {FIELDS} fields that begins with the "
                        "image id of a photo."
                    )
                photo = int(fields[0])
                if photo in found:
                    first, byte = found[photo]
                    raise CorruptFileError(
                        f"{path}, byte {start}: photo {photo} is listed twice, first in "
                        f"{folder / first}, byte {byte}; download the files again."
                    )
                found[photo] = (path.name, start)
                start += len(line)
    with suppress(RunError, OSError):  # a read-only folder is indexed again next time
        io.write_json(kept, {"format": FORMAT, "sizes": sizes, "at": found})
    return found


def _kept(said: Any, sizes: dict[str, int]) -> dict[int, tuple[str, int]] | None:
    """Return a saved index if it is valid and belongs to these files."""
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
