"""Labelled images of one size as arrays, in memory or memory-mapped."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int, UInt8
from numpy.typing import NDArray
from torch import Tensor

from overt.data.batch import Batch
from overt.data.dataset import check_indices, digest_files
from overt.data.download import require_file
from overt.errors import CorruptFileError, UserError
from overt.geometry import PixelGeometry
from overt.io import digest


class ImageArrays:
    """One split of a dataset whose images are arrays, in memory or memory-mapped.

    Args:
        name: Name of the dataset.
        split: Name of the split.
        part: Official part that the records are from; an image has the same id in every split.
        pictures: Arrays of the files, one after the other.
        labels: Class of every record; None for a part without labels.
        rows: Records of the split, in its order.
        classes: Names of the classes.
        files: Files that the arrays were read from, for the digest.
        digits: Number of digits of the record number in ids.

    Example:
        >>> pictures, labels = np.zeros((4, 3, 8, 8), np.uint8), np.array([0, 1, 1, 0])
        >>> rows, classes = np.array([0, 2]), ("cat", "dog")
        >>> data = ImageArrays("toy", "train", "train", [pictures], labels, rows, classes, files=[])
        >>> data.batch([1]).ids, data.labels([1])
        (('toy/train/000002',), tensor([1]))
    """

    def __init__(
        self,
        name: str,
        split: str,
        part: str,
        pictures: Sequence[UInt8[np.ndarray, "_ 3 y x"]],
        labels: Int[np.ndarray, " n"] | None,
        rows: NDArray[np.int64],
        classes: tuple[str, ...],
        files: Sequence[Path | str],
        digits: int = 6,
    ) -> None:
        self.name, self.split, self.classes = name, split, classes
        self._part, self._pictures, self._labels = part, pictures, labels
        self._rows, self._digits = rows, digits
        self._files = [Path(one) for one in files]
        self._starts = np.cumsum([0, *(len(one) for one in pictures)])
        self._digest: str | None = None

    def __len__(self) -> int:
        return len(self._rows)

    def ids(self, indices: Sequence[int]) -> tuple[str, ...]:
        """Return the ids of samples: one per image, the same in every split."""
        rows = self._rows_at(indices)
        return tuple(f"{self.name}/{self._part}/{row:0{self._digits}d}" for row in rows)

    def images(self, indices: Sequence[int]) -> UInt8[Tensor, "b 3 y x"]:
        """Return the images."""
        rows = self._rows_at(indices)
        found = np.empty((len(rows), *self._pictures[0].shape[1:]), dtype=np.uint8)
        part_of = np.searchsorted(self._starts, rows, side="right") - 1
        for number, pictures in enumerate(self._pictures):
            here = part_of == number
            if here.any():
                found[here] = pictures[rows[here] - self._starts[number]]
        return torch.from_numpy(found)

    def labels(self, indices: Sequence[int]) -> Int[Tensor, " b"]:
        """Return the class indices; raise `UserError` for a part without labels."""
        if self._labels is None:
            raise UserError(f"{self.name} {self.split} has no labels.")
        return torch.from_numpy(self._labels[self._rows_at(indices)])

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the samples at `indices`."""
        height, width = self._pictures[0].shape[-2:]
        return Batch(
            ids=self.ids(indices),
            images=self.images(indices),
            geometry=PixelGeometry.identity(len(indices), (height, width)),
            labels=None if self._labels is None else self.labels(indices),
        )

    def digest(self) -> str:
        """Return a hash of the files, of the records of the split, and of the number of classes.

        Two files with equal bytes raise `CorruptFileError`: one was copied over the other.
        """
        if self._digest is None:
            about = f"{self.name} {self.split} {len(self.classes)}"
            hashed = "".join([about, *_distinct_digests(self._files)])
            self._digest = digest_files(hashed, [], self._rows.tobytes())
        return self._digest

    def _rows_at(self, indices: Sequence[int]) -> NDArray[np.int64]:
        return self._rows[np.array(check_indices(self, indices, "samples"), dtype=np.int64)]


def check_records(path: Path, records: int, length: int) -> None:
    """Raise unless a file exists and has this number of records of `length` bytes."""
    require_file(path)
    size = path.stat().st_size
    if size != records * length:
        raise CorruptFileError(
            f"{path} ends in record {size // length} with {size} bytes; {records} records of "
            f"{length} bytes are {records * length} bytes. Download the file again."
        )


def _distinct_digests(paths: Sequence[Path]) -> list[str]:
    """Return the hash of each file; raise `CorruptFileError` if two are equal."""
    found: dict[str, Path] = {}
    for path in paths:
        first = found.setdefault(digest(path), path)
        if first != path:
            raise CorruptFileError(f"{path} has the same bytes as {first}; download both again.")
    return list(found)
