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
from overt.errors import BadInput
from overt.files import digest
from overt.geometry import PixelGeometry


class Pictures:
    """One split of a data set whose pictures are one array, held in memory or mapped from disk.

    `rows` are the records of the array that belong to the split, in its order; `part` is the name
    of the official part they are from, by which a picture has one id in every split. A part that
    nobody labelled has no labels.
    """

    def __init__(
        self,
        name: str,
        split: str,
        part: str,
        pictures: UInt8[np.ndarray, "n 3 y x"],
        labels: Int[np.ndarray, " n"] | None,
        rows: NDArray[np.int64],
        classes: tuple[str, ...],
        files: Sequence[Path],
    ) -> None:
        self.name, self.split, self.classes = name, split, classes
        self._part, self._pictures, self._labels = part, pictures, labels
        self._rows, self._files = rows, files
        self._digest: str | None = None

    def __len__(self) -> int:
        return len(self._rows)

    def ids(self, indices: Sequence[int]) -> tuple[str, ...]:
        """The names of samples: one a picture, whichever split it is looked at in."""
        return tuple(f"{self.name}/{self._part}/{row:06d}" for row in self._rows_at(indices))

    def images(self, indices: Sequence[int]) -> UInt8[Tensor, "b 3 y x"]:
        """The pictures themselves."""
        return torch.from_numpy(np.ascontiguousarray(self._pictures[self._rows_at(indices)]))

    def labels(self, indices: Sequence[int]) -> Int[Tensor, " b"]:
        """The class numbers; a part without labels is refused."""
        if self._labels is None:
            raise BadInput(f"{self.name} {self.split} has no labels.")
        return torch.from_numpy(self._labels[self._rows_at(indices)])

    def batch(self, indices: Sequence[int]) -> Batch:
        """The samples at these places of the split."""
        height, width = self._pictures.shape[-2:]
        return Batch(
            ids=self.ids(indices),
            images=self.images(indices),
            geometry=PixelGeometry.identity(len(indices), (height, width)),
            labels=None if self._labels is None else self.labels(indices),
        )

    def digest(self) -> str:
        """A hash of the files and of which records belong to the split."""
        if self._digest is None:
            whole = hashlib.sha256(f"{self.name} {self.split} {len(self.classes)}".encode())
            for path in self._files:
                whole.update(digest(path).encode())
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
