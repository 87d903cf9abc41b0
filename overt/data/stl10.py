"""STL-10 from the official binary version, memory-mapped.

Coates, Lee and Ng, "An Analysis of Single-Layer Networks in Unsupervised Feature Learning", 2011,
https://cs.stanford.edu/~acoates/stl10/. A record of `*_X.bin` is 27,648 bytes of a 96 x 96 image,
plane by plane and in each plane column by column; `*_y.bin` has one byte per label, from 1 to 10.
"""

import re
from pathlib import Path

import numpy as np
from jaxtyping import Int, UInt8

from overt.data.image_arrays import ImageArrays, check_records
from overt.data.photo_dataset import check_count, read_lines
from overt.data.splits import Split, parse_split, split_indices
from overt.errors import CorruptFileError

SIDE = 96
PIXELS = 3 * SIDE * SIDE
FOLDER = "stl10_binary"
UNLABELED = "unlabeled"
RECORDS = {"train": 5_000, "test": 8_000, UNLABELED: 100_000}
VALIDATION = 500
FOLDS = 10
NAMES = tuple("airplane bird car cat deer dog horse monkey ship truck".split())
# The same class in CIFAR-10, which has no monkeys; STL-10 has no frogs.
AS_CIFAR10 = (0, 2, 1, 3, 4, 5, 7, -1, 8, 9)


class Stl10(ImageArrays):
    """STL-10: 4,500 / 500 / 8,000 images in train / val / test; `unlabeled` has 100,000 more.

    Args:
        root: Data folder, see `data_root`.
        split: `train`, `val`, `test`, `train+val` or `unlabeled`.
        records: Number of records of the file; None expects the official number.
        validation: Number of training items held out as `val`.

    Raises:
        UserError: The files are missing, or the split does not exist.
        CorruptFileError: A file is not the published one; the message names file and record.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as root:
        ...     Path(root, FOLDER).mkdir()
        ...     _ = Path(root, FOLDER, "test_X.bin").write_bytes(bytes(2 * PIXELS))
        ...     _ = Path(root, FOLDER, "test_y.bin").write_bytes(bytes([1, 10]))
        ...     data = Stl10(root, "test", records=2)
        >>> data.labels([0, 1]), data.batch([0]).images.shape
        (tensor([0, 9]), torch.Size([1, 3, 96, 96]))
    """

    def __init__(
        self,
        root: Path | str,
        split: str = Split.TRAIN,
        records: int | None = None,
        validation: int = VALIDATION,
    ) -> None:
        root = Path(root)
        chosen = split if split == UNLABELED else parse_split(split)
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
            rows = split_indices(chosen, count, validation)
        else:
            rows = np.arange(count, dtype=np.int64)
        super().__init__("stl10", chosen, part, [pictures], labels, rows, NAMES, files)


def open_pictures(path: Path, records: int) -> UInt8[np.ndarray, "n 3 96 96"]:
    """Memory-map the images of one file, upright."""
    check_records(path, records, PIXELS)
    if not records:  # nothing can be mapped
        return np.empty((0, 3, SIDE, SIDE), dtype=np.uint8)
    found = np.memmap(path, dtype=np.uint8, mode="r", shape=(records, 3, SIDE, SIDE))
    return found.transpose(0, 1, 3, 2)


def read_labels(path: Path, records: int) -> Int[np.ndarray, " n"]:
    """Read the class indices of one file, from 0."""
    check_records(path, records, 1)
    labels = np.frombuffer(path.read_bytes(), dtype=np.uint8)
    wrong = np.flatnonzero((labels < 1) | (labels > len(NAMES)))
    if len(wrong):
        raise CorruptFileError(
            f"{path}: record {wrong[0]} has label {labels[wrong[0]]}, expected 1 to "
            f"{len(NAMES)}. Download the file again."
        )
    return labels.astype(np.int64) - 1


def read_folds(root: Path | str, records: int = RECORDS["train"]) -> list[Int[np.ndarray, " n"]]:
    """Read the ten official folds: which records of the training part each trains on."""
    root = Path(root)
    path = root / FOLDER / "fold_indices.txt"
    folds = []
    for number, line in enumerate(read_lines(path), start=1):
        places = line.split()
        if not all(re.fullmatch("[0-9]{1,9}", place) and int(place) < records for place in places):
            raise CorruptFileError(
                f"{path}: line {number} is not a list of records 0 to {records - 1}."
            )
        folds.append(np.array([int(place) for place in places], dtype=np.int64))
    check_count(path, len(folds), FOLDS, "folds")
    return folds
