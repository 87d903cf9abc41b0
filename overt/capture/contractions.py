"""Axes of a product of attention weights with values: keys, rows and leading axes.

Covers `matmul`, `bmm`, `baddbmm` and `einsum`, with the weights on either side.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_MATMUL = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm}
_RIGHT = {Tensor.__rmatmul__}
_BADDBMM = {torch.baddbmm, Tensor.baddbmm}
ADDED_PRODUCTS = _BADDBMM  # products plus another term
PRODUCTS = _MATMUL | _BADDBMM | _RIGHT | {torch.einsum}


@dataclass(frozen=True)
class Contraction:
    """The axes of a product of weights with values.

    Attributes:
        keys: Axis of the weights that is summed.
        rows: Axes of the weights that the values do not have.
        lead: The other axes of the weights.
        beside: Axis of the values for each leading axis, None if they do not have it.
        summed: Axis of the values that is summed.
        free: Axes of the values that remain.
        other: Index of the values among the operands.
    """

    keys: int
    rows: tuple[int, ...]
    lead: tuple[int, ...]
    beside: tuple[int | None, ...]
    summed: int
    free: tuple[int, ...]
    other: int


def split_operands(func: Any, args: tuple[Any, ...]) -> tuple[int, tuple[Any, ...]]:
    """Return the index of the first operand, and the arguments with operand lists flattened."""
    if func in _BADDBMM:
        return 1, args
    if func is not torch.einsum:
        return 0, args
    if len(args) == 2 and isinstance(args[1], list | tuple):
        return 1, (args[0], *args[1])
    return 1, args


def find_contraction(
    func: Any, equation: Any, operands: Sequence[Tensor], place: int
) -> Contraction | None:
    """Return the contraction of the operand at `place`; None if it is not contracted."""
    if func is torch.einsum:
        return _einsum_contraction(equation, operands, place)
    other = 1 - place
    weights, values = operands[place], operands[other]
    if weights.ndim < 2 or values.ndim < 2:
        return None
    n, m = weights.ndim, values.ndim
    lead = tuple(range(n - 2))
    # Broadcasting aligns leading axes from the right.
    beside = tuple(at if (at := m - n + one) >= 0 else None for one in lead)
    # The weights are the left factor, so their last axis is summed. `__rmatmul__` has its arguments
    # swapped.
    if place == (func in _RIGHT):
        return Contraction(n - 1, (n - 2,), lead, beside, m - 2, (m - 1,), other)
    return Contraction(n - 2, (n - 1,), lead, beside, m - 1, (m - 2,), other)


def _einsum_contraction(
    equation: Any, operands: Sequence[Tensor], place: int
) -> Contraction | None:
    if not isinstance(equation, str):
        return None
    given, arrow, result = equation.replace(" ", "").partition("->")
    terms = [_expand_ellipsis(*pair) for pair in zip(given.split(","), operands, strict=True)]
    every = "".join(terms)
    # An implicit result has the letters that occur once, in alphabetical order.
    if not arrow:
        once = sorted(one for one in set(every) if every.count(one) == 1 and one not in _DOTS)
        result = "".join(("..." if "..." in given else "", *once))
    result = result.replace("...", _DOTS)
    found = None
    for other, term in enumerate(terms):
        if other == place:
            continue
        kept = result + "".join(one for at, one in enumerate(terms) if at not in (place, other))
        made = _two_term_contraction(terms[place], term, kept, other)
        # Contracted with two operands at once: neither is the values.
        if made is not None and found is not None:
            return None
        found = made if found is None else found
    return found


def _two_term_contraction(ours: str, other: str, kept: str, at: int) -> Contraction | None:
    """Return the contraction of two einsum terms whose letters `kept` remain in the result."""
    # Of weights and values, the summed letter is that of the keys, shared ones that remain are
    # samples and heads, those of the weights alone queries, those of the values alone features.
    summed = [one for one in ours if one in other and one not in kept]
    rows = [one for one in ours if one not in other]
    lead = [one for one in ours if one in other and one in kept]
    free = [one for one in other if one not in ours]
    # A letter twice in one term is a diagonal, which is no product of weights and values.
    whole = len(set(ours)) == len(ours) and len(set(other)) == len(other)
    if len(summed) != 1 or not whole:
        return None
    return Contraction(
        ours.index(summed[0]),
        tuple(ours.index(one) for one in rows),
        tuple(ours.index(one) for one in lead),
        tuple(other.index(one) for one in lead),
        other.index(summed[0]),
        tuple(other.index(one) for one in free),
        at,
    )


# Letters for the axes behind an ellipsis.
_DOTS = "⓪①②③④⑤⑥⑦"


def _expand_ellipsis(term: str, tensor: Tensor) -> str:
    """Replace `...` by one letter per axis, aligned at the last axis."""
    if "..." not in term:
        return term
    count = tensor.ndim - (len(term) - 3)
    return term.replace("...", _DOTS[len(_DOTS) - count :])
