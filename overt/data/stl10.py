"""STL-10 from the official binary version, read in place.

Coates, Lee and Ng, "An Analysis of Single-Layer Networks in Unsupervised Feature Learning", 2011,
https://cs.stanford.edu/~acoates/stl10/. A record of `*_X.bin` is 27,648 bytes of a 96 x 96 picture,
plane by plane and in each plane column by column; `*_y.bin` has one byte a label, from 1 to 10.
"""

import re
from pathlib import Path

import numpy as np
from jaxtyping import Int, UInt8

from overt.data.photos import read_lines
from overt.data.pictures import Pictures
from overt.data.splits import Split, rows_of, split_of
from overt.errors import BadInput, Damaged

SIDE = 96
PIXELS = 3 * SIDE * SIDE
FOLDER = "stl10_binary"
UNLABELED = "unlabeled"
RECORDS = {"train": 5_000, "test": 8_000, UNLABELED: 100_000}
VALIDATION = 500
FOLDS = 10
NAMES = tuple("airplane bird car cat deer dog horse monkey ship truck".split())
# The class of CIFAR-10 that means the same; it has no monkeys, and STL-10 has no frogs.
AS_CIFAR10 = (0, 2, 1, 3, 4, 5, 7, -1, 8, 9)


class Stl10(Pictures):
    """STL-10: 4,500 / 500 / 8,000 pictures in train / val / test; `unlabeled` has 100,000 more.

    `records` says how many records the file holds, where it is not the official one.
    """

    def __init__(
        self,
        root: Path | str,
        split: str = Split.TRAIN,
        records: int | None = None,
        validation: int = VALIDATION,
    ) -> None:
        root = Path(root)
        chosen = split if split == UNLABELED else split_of(split)
        part = str(chosen if chosen in (UNLABELED, Split.TEST) else "train")
        count = RECORDS[part] if records is None else records
        folder = root / FOLDER
        files = [folder / f"{part}_X.bin"]
        pictures = open_pictures(files[0], count)
        labels = None
        if part != UNLABELED:
            files.append(folder / f"{part}_y.bin")
            labels = read_labels(files[1], count)
        if isinstance(chosen, Split):
            rows = rows_of(chosen, count, validation)
        else:
            rows = np.arange(count, dtype=np.int64)
        super().__init__("stl10", chosen, part, [pictures], labels, rows, NAMES, files)


def open_pictures(path: Path, records: int) -> UInt8[np.ndarray, "n 3 96 96"]:
    """The pictures of one file, upright, mapped into memory and not read."""
    _check_size(path, records, PIXELS)
    if not records:  # nothing can be mapped
        return np.empty((0, 3, SIDE, SIDE), dtype=np.uint8)
    found = np.memmap(path, dtype=np.uint8, mode="r", shape=(records, 3, SIDE, SIDE))
    return found.transpose(0, 1, 3, 2)


def read_labels(path: Path, records: int) -> Int[np.ndarray, " n"]:
    """The class numbers of one file, from 0."""
    _check_size(path, records, 1)
    labels = np.frombuffer(path.read_bytes(), dtype=np.uint8)
    wrong = np.flatnonzero((labels < 1) | (labels > len(NAMES)))
    if len(wrong):
        raise Damaged(
            f"{path}: record {wrong[0]} has label {labels[wrong[0]]}, but labels go from 1 to "
            f"{len(NAMES)}. Get the file again."
        )
    return labels.astype(np.int64) - 1


def read_folds(root: Path | str, records: int = RECORDS["train"]) -> list[Int[np.ndarray, " n"]]:
    """The ten official folds: which records of the training part each trains on."""
    root = Path(root)
    path = root / FOLDER / "fold_indices.txt"
    folds = []
    for number, line in enumerate(read_lines(path), start=1):
        places = line.split()
        if not all(re.fullmatch("[0-9]{1,9}", place) and int(place) < records for place in places):
            raise Damaged(f"{path}: line {number} is not a list of records 0 to {records - 1}.")
        folds.append(np.array([int(place) for place in places], dtype=np.int64))
    if len(folds) != FOLDS:
        raise Damaged(f"{path} has {len(folds)} folds, not {FOLDS}; get it again.")
    return folds


def _check_size(path: Path, records: int, length: int) -> None:
    if not path.is_file():
        raise BadInput(f"{path} is missing; `overt data list` says how to get it.")
    size = path.stat().st_size
    if size != records * length:
        raise Damaged(
            f"{path} ends in record {size // length} with {size} bytes; {records} records of "
            f"{length} bytes are {records * length} bytes. Get the file again."
        )
