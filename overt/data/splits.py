"""Which records belong to train, val and test, the same on every machine and for ever."""

from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from overt.errors import BadInput

SEED = 2018  # of the held-out records; a constant, so that nobody's val is somebody's train

Indices = NDArray[np.int64]


class Split(StrEnum):
    """The parts of a data set. `val` is held out of the official training part."""

    TRAIN = "train"
    VAL = "val"
    TEST = "test"
    TRAIN_VAL = "train+val"


class Labels(StrEnum):
    """Which of two sets of classes: the many fine ones or the few coarse ones."""

    FINE = "fine"
    COARSE = "coarse"


def split_of(name: str) -> Split:
    """The split of that name; another name is `BadInput` and the sentence lists the right ones."""
    try:
        return Split(name)
    except ValueError:
        known = ", ".join(split.value for split in Split)
        raise BadInput(f"There is no split {name!r}; choose one of: {known}.") from None


def labels_of(name: str) -> Labels:
    """The labels of that name: fine or coarse."""
    try:
        return Labels(name)
    except ValueError:
        raise BadInput(f"There are no {name!r} labels; choose fine or coarse.") from None


def held_out(count: int, validation: int) -> tuple[Indices, Indices]:
    """The records of `train` and of `val`: val is the last of a fixed permutation, both sorted."""
    if not 0 <= validation < count:
        raise BadInput(f"{validation} of {count} training records cannot be held out.")
    # NumPy promises that this old stream never changes; the newer Generator may.
    order = np.random.RandomState(SEED).permutation(count).astype(np.int64)
    cut = count - validation
    return np.sort(order[:cut]), np.sort(order[cut:])


def rows_of(split: Split, count: int, validation: int) -> Indices:
    """The records of the official part behind `split` that belong to it, in the file's order."""
    if split in (Split.TEST, Split.TRAIN_VAL):
        return np.arange(count, dtype=np.int64)
    train, val = held_out(count, validation)
    return train if split is Split.TRAIN else val
