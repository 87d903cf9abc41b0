"""SVHN, cropped digits: house numbers from the official MATLAB files.

Netzer, Wang, Coates, Bissacco, Wu and Ng, "Reading Digits in Natural Images with Unsupervised
Feature Learning", 2011, http://ufldl.stanford.edu/housenumbers/. A file has `X`, 32 x 32 x 3 x n
bytes, and `y`, n labels from 1 to 10 where 10 is the digit 0.
"""

from pathlib import Path

import numpy as np
from jaxtyping import Int, UInt8

from overt.data.image_arrays import ImageArrays
from overt.data.mat_files import ArraySpec, read_arrays
from overt.data.splits import Split, parse_split, split_indices
from overt.errors import CorruptFileError

SIDE = 32
FOLDER = "svhn"
EXTRA = "extra"
RECORDS = {"train": 73_257, "test": 26_032, EXTRA: 531_131}
VALIDATION = 5_000
DIGITS = tuple("0123456789")

Loaded = tuple[UInt8[np.ndarray, "n 3 32 32"], Int[np.ndarray, " n"]]


class Svhn(ImageArrays):
    """SVHN: 68,257 / 5,000 / 26,032 digits in train / val / test, and 531,131 easier in `extra`.

    Args:
        root: Data folder, see `data_root`.
        split: `train`, `val`, `test`, `train+val` or `extra`.
        records: Number of records of the file; None expects the official number.
        validation: Number of training items held out as `val`.

    Raises:
        UserError: The files are missing, or the split does not exist.
        CorruptFileError: A file is not the published one; the message names file and record.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from scipy.io import savemat
        >>> arrays = {"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.array([[1], [10]], np.uint8)}
        >>> with TemporaryDirectory() as root:
        ...     Path(root, FOLDER).mkdir()
        ...     savemat(Path(root, FOLDER, "test_32x32.mat"), arrays)
        ...     data = Svhn(root, "test", records=2)
        >>> data.labels([0, 1])
        tensor([1, 0])
    """

    def __init__(
        self,
        root: Path | str,
        split: str = Split.TRAIN,
        records: int | None = None,
        validation: int = VALIDATION,
    ) -> None:
        root = Path(root)
        chosen = split if split == EXTRA else parse_split(split)
        part = chosen if chosen in (EXTRA, Split.TEST) else "train"
        path = root / FOLDER / f"{part}_32x32.mat"
        count = RECORDS[part] if records is None else records
        pictures, labels = read_mat(path, count)
        if isinstance(chosen, Split):
            rows = split_indices(chosen, count, validation)
        else:
            rows = np.arange(count, dtype=np.int64)
        super().__init__("svhn", chosen, str(part), [pictures], labels, rows, DIGITS, [path])


def read_mat(path: Path, records: int) -> Loaded:
    """Read the images and the digits of one file; raise `CorruptFileError` if it is malformed."""
    shape = (SIDE, SIDE, 3, records)
    wanted = {"X": ArraySpec(shape, ("uint8",)), "y": ArraySpec((records, 1))}
    found = read_arrays(path, wanted)
    labels = found["y"].reshape(-1)
    wrong = np.flatnonzero(~np.isin(labels, np.arange(1, 11)))
    if len(wrong):
        raise CorruptFileError(
            f"{path}: record {wrong[0]} has label {labels[wrong[0]]}, expected 1 to 10. "
            "Download the file again."
        )
    pictures = np.ascontiguousarray(found["X"].transpose(3, 2, 0, 1))
    return pictures, labels.astype(np.int64) % 10
