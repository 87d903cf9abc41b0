"""Fixed splits into train, val and test, the same on every machine."""

from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from overt.errors import UserError

SEED = 2018  # of the held-out records; constant, so that splits never overlap between runs

Indices = NDArray[np.int64]


class Split(StrEnum):
    """Parts of a dataset; `val` is held out of the official training part.

    Attributes:
        TRAIN: The official training part, without what `VAL` holds out.
        VAL: Held out of the official training part.
        TEST: The official test part.
        TRAIN_VAL: The whole official training part.

    Example:
        >>> Split("val") is Split.VAL, str(Split.VAL)
        (True, 'val')
    """

    TRAIN = "train"
    VAL = "val"
    TEST = "test"
    TRAIN_VAL = "train+val"


class Labels(StrEnum):
    """Granularity of classes: fine or coarse.

    Attributes:
        FINE: All classes.
        COARSE: Groups of classes.

    Example:
        >>> Labels("coarse") is Labels.COARSE
        True
    """

    FINE = "fine"
    COARSE = "coarse"


def parse_split(name: str) -> Split:
    """Return the split of that name; raise `UserError` for another name."""
    try:
        return Split(name)
    except ValueError:
        known = ", ".join(split.value for split in Split)
        raise UserError(f"Unknown split {name!r}: choose from {known}.") from None


def parse_official_split(dataset: str, name: str) -> Split:
    """Return train, val or test of a dataset with these three; raise `UserError` for another."""
    if name not in (Split.TRAIN, Split.VAL, Split.TEST):
        raise UserError(f"{dataset} has train, val and test, not {name!r}.")
    return Split(name)


def parse_labels(name: str) -> Labels:
    """Return the labels of that name: fine or coarse."""
    try:
        return Labels(name)
    except ValueError:
        raise UserError(f"Unknown labels {name!r}: choose fine or coarse.") from None


def hold_out_indices(count: int, validation: int) -> tuple[Indices, Indices]:
    """Return the records of `train` and of `val`, by a fixed permutation, both sorted."""
    if not 0 <= validation < count:
        raise UserError(
            f"validation must be 0 to {count - 1} of {count} records, got {validation}."
        )
    # NumPy guarantees that this legacy stream never changes; that of Generator may.
    order = np.random.RandomState(SEED).permutation(count).astype(np.int64)
    cut = count - validation
    return np.sort(order[:cut]), np.sort(order[cut:])


def split_indices(split: Split, count: int, validation: int) -> Indices:
    """Return the records of the official part behind `split` that belong to it, sorted."""
    if split in (Split.TEST, Split.TRAIN_VAL):
        return np.arange(count, dtype=np.int64)
    train, val = hold_out_indices(count, validation)
    return train if split is Split.TRAIN else val
