"""SVHN, cropped digits: the official MATLAB files of house numbers seen from the street.

Netzer, Wang, Coates, Bissacco, Wu and Ng, "Reading Digits in Natural Images with Unsupervised
Feature Learning", 2011, http://ufldl.stanford.edu/housenumbers/. A file has `X`, 32 x 32 x 3 x n
bytes, and `y`, n labels from 1 to 10 where 10 is the digit 0.
"""

from pathlib import Path

import numpy as np
from jaxtyping import Int, UInt8

from overt.data.matlab import Wanted, read_arrays
from overt.data.pictures import Pictures
from overt.data.splits import Split, rows_of, split_of
from overt.errors import Damaged

SIDE = 32
FOLDER = "svhn"
EXTRA = "extra"
RECORDS = {"train": 73_257, "test": 26_032, EXTRA: 531_131}
VALIDATION = 5_000
DIGITS = tuple("0123456789")

Loaded = tuple[UInt8[np.ndarray, "n 3 32 32"], Int[np.ndarray, " n"]]


class Svhn(Pictures):
    """SVHN: 68,257 / 5,000 / 26,032 digits in train / val / test, and 531,131 easier in `extra`.

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
        chosen = split if split == EXTRA else split_of(split)
        part = chosen if chosen in (EXTRA, Split.TEST) else "train"
        path = root / FOLDER / f"{part}_32x32.mat"
        count = RECORDS[part] if records is None else records
        pictures, labels = read_mat(path, count)
        if isinstance(chosen, Split):
            rows = rows_of(chosen, count, validation)
        else:
            rows = np.arange(count, dtype=np.int64)
        super().__init__("svhn", chosen, str(part), [pictures], labels, rows, DIGITS, [path])


def read_mat(path: Path, records: int) -> Loaded:
    """The pictures and the digits of one file; another file is `Damaged`, in one sentence."""
    shape = (SIDE, SIDE, 3, records)
    wanted = {"X": Wanted(shape, ("uint8",)), "y": Wanted((records, 1))}
    found = read_arrays(path, wanted)
    labels = found["y"].reshape(-1)
    wrong = np.flatnonzero(~np.isin(labels, np.arange(1, 11)))
    if len(wrong):
        raise Damaged(
            f"{path}: record {wrong[0]} has label {labels[wrong[0]]}, but labels go from 1 to 10. "
            "Get the file again."
        )
    pictures = np.ascontiguousarray(found["X"].transpose(3, 2, 0, 1))
    return pictures, labels.astype(np.int64) % 10
