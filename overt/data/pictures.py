"""Small pictures of one size with their labels: what a set that fits into memory is read into."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int, UInt8
from numpy.typing import NDArray
from torch import Tensor

from overt.data.batch import Batch
from overt.errors import BadInput, Damaged
from overt.files import digest
from overt.geometry import PixelGeometry


class Pictures:
    """One split of a data set whose pictures are arrays, held in memory or mapped from disk.

    `pictures` are the arrays of its files, one after the other; `rows` are the records that belong
    to the split, in its order; `part` is the name of the official part they are from, by which a
    picture has one id in every split. A part that nobody labelled has no labels.
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
        """The names of samples: one a picture, whichever split it is looked at in."""
        rows = self._rows_at(indices)
        return tuple(f"{self.name}/{self._part}/{row:0{self._digits}d}" for row in rows)

    def images(self, indices: Sequence[int]) -> UInt8[Tensor, "b 3 y x"]:
        """The pictures themselves."""
        rows = self._rows_at(indices)
        found = np.empty((len(rows), *self._pictures[0].shape[1:]), dtype=np.uint8)
        part_of = np.searchsorted(self._starts, rows, side="right") - 1
        for number, pictures in enumerate(self._pictures):
            here = part_of == number
            if here.any():
                found[here] = pictures[rows[here] - self._starts[number]]
        return torch.from_numpy(found)

    def labels(self, indices: Sequence[int]) -> Int[Tensor, " b"]:
        """The class numbers; a part without labels is refused."""
        if self._labels is None:
            raise BadInput(f"{self.name} {self.split} has no labels.")
        return torch.from_numpy(self._labels[self._rows_at(indices)])

    def batch(self, indices: Sequence[int]) -> Batch:
        """The samples at these places of the split."""
        height, width = self._pictures[0].shape[-2:]
        return Batch(
            ids=self.ids(indices),
            images=self.images(indices),
            geometry=PixelGeometry.identity(len(indices), (height, width)),
            labels=None if self._labels is None else self.labels(indices),
        )

    def digest(self) -> str:
        """A hash of the files, of which records belong to the split, and of how many classes.

        Two files with the same bytes are `Damaged`: one of them was put in the place of another.
        """
        if self._digest is None:
            whole = hashlib.sha256(f"{self.name} {self.split} {len(self.classes)}".encode())
            for hashed in _apart(self._files):
                whole.update(hashed.encode())
            whole.update(self._rows.tobytes())
            self._digest = whole.hexdigest()
        return self._digest

    def _rows_at(self, indices: Sequence[int]) -> NDArray[np.int64]:
        places = np.asarray(list(indices), dtype=np.int64)
        wrong = places[(places < 0) | (places >= len(self))]
        if len(wrong):
            raise BadInput(
                f"{self.name} {self.split} has samples 0 to {len(self) - 1}, not {wrong[0]}."
            )
        return self._rows[places]


def _apart(paths: Sequence[Path]) -> list[str]:
    """The hash of each file, when no two are the same."""
    found: dict[str, Path] = {}
    for path in paths:
        first = found.setdefault(digest(path), path)
        if first != path:
            raise Damaged(f"{path} holds the same bytes as {first}; get one of them again.")
    return list(found)
