"""The `Dataset` protocol, the check of indices, and the digest of files."""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from overt.data.batch import Batch
from overt.errors import UserError
from overt.io import digest


@runtime_checkable
class Dataset(Protocol):
    """Items by index, returned as batches.

    `batch` is pure: the same indices always give the same batch. An item may be several samples,
    such as a scene with all of its questions. There is no base class: any class with these members
    is a `Dataset`.

    Example:
        >>> from overt.data import PhrasePairs
        >>> data = PhrasePairs("train", seed=0, count=4)
        >>> isinstance(data, Dataset), len(data.batch([0, 2]))
        (True, 2)
    """

    @property
    def name(self) -> str:
        """Name in results and caches."""
        ...

    @property
    def split(self) -> str:
        """Part of the dataset, such as train or test."""
        ...

    def __len__(self) -> int: ...

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the samples of the items at `indices`, in that order.

        Args:
            indices: Indices of items.
        """
        ...

    def digest(self) -> str:
        """Return a hash of the data, or of the generator and its seed; it differs if the samples
        do.
        """
        ...


def check_indices(data: Dataset, indices: Sequence[int], what: str = "items") -> list[int]:
    """Return the indices as integers, checked against the length of a dataset.

    Args:
        data: The dataset.
        indices: Indices of items.
        what: Name of the items in the message.

    Returns:
        The indices.

    Raises:
        UserError: An index is out of range.

    Example:
        >>> from overt.data import PhrasePairs
        >>> check_indices(PhrasePairs("train", seed=0, count=4), range(2, 4))
        [2, 3]
    """
    found = [int(index) for index in indices]
    for index in found:
        if not 0 <= index < len(data):
            raise UserError(
                f"{data.name} {data.split} has {len(data)} {what}: {index} is out of range."
            )
    return found


def digest_files(about: str, paths: Iterable[Path], more: bytes = b"") -> str:
    """Return a hash of a dataset: its settings, the contents of files, and further bytes.

    Args:
        about: Name, split and settings of the dataset.
        paths: Files that decide the samples.
        more: Anything else that decides them.

    Returns:
        The SHA-256 as hexadecimal digits.

    Example:
        >>> digest_files("toy train", [], b"more") == digest_files("toy test", [], b"more")
        False
    """
    whole = hashlib.sha256(about.encode())
    for path in paths:
        whole.update(digest(path).encode())
    whole.update(more)
    return whole.hexdigest()
