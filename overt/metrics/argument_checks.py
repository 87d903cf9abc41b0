"""Checks of the arguments that many metrics share: counts, shares, grids and generators.

Each check returns the value in its plain type, so that a NumPy number or an array of shares works
like a Python one, and raises before the model runs.
"""

import math
from collections.abc import Iterable
from itertools import pairwise
from numbers import Integral, Real
from typing import Any, SupportsFloat

import torch


def check_count(name: str, count: Any, least: int = 1) -> int:
    """Return a whole number, of at least `least`.

    >>> check_count("draws", 4)
    4
    """
    number = _to_number(name, f"a whole number of at least {least}", count)
    if number != number // 1 or not math.isfinite(number):
        raise ValueError(f"{name} must be a whole number of at least {least}, got {count}")
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {count}")
    return int(number)


def check_share(share: Any, *, zero: bool = True) -> float:
    """Return a share from 0 to 1; above 0 unless `zero` is allowed.

    >>> check_share(0.5)
    0.5
    """
    asked = "from 0 to 1" if zero else "above 0 and at most 1"
    number = _to_number("share", f"a number {asked}", share)
    # a NaN fails every comparison
    if not (0 <= number <= 1 if zero else 0 < number <= 1):
        raise ValueError(f"share must be {asked}, got {share}")
    return number


def check_shares(shares: Any, *, zero: bool = True) -> tuple[float, ...]:
    """Return increasing shares from 0 to 1; above 0 unless `zero` is allowed.

    >>> check_shares((0, 0.5, 1))
    (0.0, 0.5, 1.0)
    """
    if isinstance(shares, str) or not isinstance(shares, Iterable) or _is_scalar(shares):
        raise TypeError(f"shares must be several numbers such as (0.1, 0.5, 1.0), got {shares!r}")
    found = tuple(_to_number("each share", "a number", share) for share in shares)
    if not zero and not all(share > 0 for share in found):
        raise ValueError(f"shares must increase, above 0 and at most 1, got {list(found)}")
    # not `sorted`, which accepts NaN
    rising = all(one < two for one, two in pairwise(found))
    if not found or not rising or not all(0 <= share <= 1 for share in found):
        raise ValueError(f"shares must increase from 0 to at most 1, got {list(found)}")
    return found


def check_positive(name: str, value: Any, *, zero: bool = False) -> float:
    """Return a finite number above 0, or of 0 or more where `zero` is allowed."""
    asked = f"{'0 or more' if zero else 'above 0'} and finite"
    number = _to_number(name, f"a number {asked}", value)
    if not math.isfinite(number) or number < 0 or (number == 0 and not zero):
        raise ValueError(f"{name} must be {asked}, got {value}")
    return number


def check_grid(cells: Any) -> tuple[int, int]:
    """Return the height and width of a grid, both whole numbers of at least 1."""
    sides = tuple(cells) if isinstance(cells, Iterable) and not isinstance(cells, str) else ()
    whole = all(isinstance(side, Integral) and int(side) >= 1 for side in sides)
    if len(sides) != 2 or not whole:
        raise ValueError(
            f"a grid must be (height, width), two whole numbers of at least 1 such as (7, 7), got "
            f"{cells!r}"
        )
    return int(sides[0]), int(sides[1])


def check_generator(generator: Any) -> torch.Generator:
    """Return a `torch.Generator`; raise if it is a seed, None or anything else."""
    if isinstance(generator, torch.Generator):
        return generator
    seed = generator if type(generator) is int else 0
    raise TypeError(
        f"generator must be a torch.Generator, got {generator!r}: use "
        f"torch.Generator().manual_seed({seed})"
    )


def _to_number(name: str, wanted: str, value: Any) -> float:
    """Convert a real number of Python, NumPy or PyTorch; keep whole numbers whole."""
    scalar = value
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        scalar = value.item()
    if not isinstance(scalar, Real) or not isinstance(scalar, SupportsFloat):
        raise TypeError(f"{name} must be {wanted}, got {value!r}")
    return float(scalar)


def _is_scalar(values: Any) -> bool:
    """Return whether an array or tensor has no axis; iterating over it fails."""
    return getattr(values, "ndim", 1) == 0
