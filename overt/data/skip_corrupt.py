"""Skipping of items that cannot be read, on request.

Every reader stops at the first broken file and names it. In a dataset of a hundred thousand photos
from the web some files may be broken, so the rest can be used explicitly:

    some = skip_corrupt_items(photos, print)
    some.skipped    # which items, and why
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from overt.data.batch import Batch
from overt.data.dataset import Dataset
from overt.errors import CorruptFileError

MAX_SHARE = 0.05


@dataclass(frozen=True)
class SkippedItem:
    """An item that cannot be read, and the error message."""

    index: int
    why: str


class ReadableSubset:
    """The readable items of a dataset, in their order.

    The digest depends on the skipped items, so that runs with and without them are not confused.

    Args:
        data: The dataset.
        kept: Indices of readable items.
        skipped: The other items.

    Example:
        >>> from overt.data import PhrasePairs
        >>> data = PhrasePairs("train", seed=0, count=3)
        >>> subset = ReadableSubset(data, kept=[0, 2], skipped=[SkippedItem(1, "1.jpg is empty")])
        >>> len(subset), subset.batch([1]).ids == data.batch([2]).ids
        (2, True)
    """

    def __init__(self, data: Dataset, kept: Sequence[int], skipped: Sequence[SkippedItem]) -> None:
        self.data, self.name, self.split = data, data.name, data.split
        self.kept, self.skipped = tuple(kept), tuple(skipped)

    def __len__(self) -> int:
        return len(self.kept)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the batch of these items, counted without skipped ones."""
        return self.data.batch([self.kept[index] for index in indices])

    def digest(self) -> str:
        """Return a hash of the dataset and of the skipped items."""
        if not self.skipped:
            return self.data.digest()
        about = f"{self.data.digest()} without {[one.index for one in self.skipped]}"
        return hashlib.sha256(about.encode()).hexdigest()


def skip_corrupt_items(
    data: Dataset, report: Callable[[str], None], most: float = MAX_SHARE
) -> ReadableSubset:
    """Read every item once, and skip those that raise `CorruptFileError`.

    Args:
        data: The dataset.
        report: Called with a sentence for each skipped item, and at the end with their number.
        most: Largest share of items that may be skipped.

    Returns:
        The readable items.

    Raises:
        CorruptFileError: More than the share `most` cannot be read; the message names the first.

    Example:
        >>> from overt.data import PhrasePairs
        >>> readable = skip_corrupt_items(PhrasePairs("train", seed=0, count=3), report=print)
        >>> len(readable), readable.skipped
        (3, ())
    """
    kept: list[int] = []
    skipped: list[SkippedItem] = []
    for index in range(len(data)):
        try:
            data.batch([index])
        except CorruptFileError as problem:
            skipped.append(SkippedItem(index, str(problem)))
            report(f"item {index} of {data.name} {data.split} is skipped: {problem}")
        else:
            kept.append(index)
    if skipped:
        count = f"{len(skipped)} of {len(data)} items of {data.name} {data.split}"
        if len(skipped) > most * len(data):
            raise CorruptFileError(
                f"{count} cannot be read, more than {most:.0%}; the first is {skipped[0].index}: "
                f"{skipped[0].why}"
            )
        report(f"{count} were skipped.")
    return ReadableSubset(data, kept, skipped)
