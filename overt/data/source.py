"""What every data set is, whatever lies behind it."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from overt.data.batch import Batch


@runtime_checkable
class Source(Protocol):
    """Items by number. `batch` is pure: the same indices always give the same batch.

    An item may be several samples, such as a scene with all of its questions. `digest` is a hash
    of what is on disk, or of the program and its seed.
    """

    @property
    def name(self) -> str:
        """What results and caches call it."""
        ...

    @property
    def split(self) -> str:
        """Which part of it this is, such as train or test."""
        ...

    def __len__(self) -> int: ...

    def batch(self, indices: Sequence[int]) -> Batch:
        """The samples of the items named, in their order."""
        ...

    def digest(self) -> str:
        """A hash that differs where the samples do."""
        ...
