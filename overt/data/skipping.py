"""Going on without what cannot be read, where somebody has asked for it.

Every reader stops at the first broken file and names it. A set of a hundred thousand photos from
the web may never be without one, so the rest can be taken, knowingly:

    some = readable(photos, print)
    some.skipped    # which items, and why
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from overt.data.batch import Batch
from overt.data.source import Source
from overt.errors import Damaged

MOST = 0.05


@dataclass(frozen=True)
class Skipped:
    """An item that could not be read, and the sentence that says why, with its file."""

    index: int
    why: str


class Readable:
    """The items of a data set that can be read, in their order; a data set itself.

    Its digest tells which items it has, so a run without some is not taken for a run with all.
    """

    def __init__(self, data: Source, kept: Sequence[int], skipped: Sequence[Skipped]) -> None:
        self.data, self.name, self.split = data, data.name, data.split
        self.kept, self.skipped = tuple(kept), tuple(skipped)

    def __len__(self) -> int:
        return len(self.kept)

    def batch(self, indices: Sequence[int]) -> Batch:
        """The batch of these items, counted without those that were passed over."""
        return self.data.batch([self.kept[index] for index in indices])

    def digest(self) -> str:
        """A hash of the data set and of what of it is left."""
        if not self.skipped:
            return self.data.digest()
        about = f"{self.data.digest()} without {[one.index for one in self.skipped]}"
        return hashlib.sha256(about.encode()).hexdigest()


def readable(data: Source, report: Callable[[str], None], most: float = MOST) -> Readable:
    """Read every item once, and pass over those that are `Damaged`.

    `report` is told of each in a sentence, with its index, and of their number at the end. More
    than the share `most` of the whole is too much to go on with: that is `Damaged` too, and names
    the first. Without a broken item nothing is said and nothing is left out.
    """
    kept: list[int] = []
    skipped: list[Skipped] = []
    for index in range(len(data)):
        try:
            data.batch([index])
        except Damaged as problem:
            skipped.append(Skipped(index, str(problem)))
            report(f"item {index} of {data.name} {data.split} is passed over: {problem}")
        else:
            kept.append(index)
    if skipped:
        count = f"{len(skipped)} of {len(data)} items of {data.name} {data.split}"
        if len(skipped) > most * len(data):
            raise Damaged(
                f"{count} cannot be read, more than {most:.0%}; the first is {skipped[0].index}: "
                f"{skipped[0].why}"
            )
        report(f"{count} were passed over.")
    return Readable(data, kept, skipped)
