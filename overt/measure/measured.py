"""What a measure is: a pure function that gives one number a sample and says what it means.

A measure takes maps of one row a sample and answers with a tensor of shape (b,): NaN where it is
not defined, such as a sample without a truth. Means and intervals are `statistics`' business.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, Protocol, cast, runtime_checkable

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from overt.attention import AttentionMap, Kind

Arguments = ParamSpec("Arguments")
Measured = Float[Tensor, " b"]  # one number a sample, NaN where there is none


@dataclass(frozen=True)
class Measure:
    """What the numbers of a measure mean, so that a table or a report can lay itself out.

    `higher_is_better` is None where neither direction is good in itself, as for entropy.
    """

    name: str
    unit: str
    higher_is_better: bool | None
    low: float = -math.inf
    high: float = math.inf


@runtime_checkable
class Declared(Protocol[Arguments]):
    """A function that carries its `Measure`."""

    measure: Measure
    __name__: str

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Tensor: ...


def measured(
    name: str,
    unit: str,
    higher_is_better: bool | None,
    low: float = -math.inf,
    high: float = math.inf,
) -> Callable[[Callable[Arguments, Tensor]], Declared[Arguments]]:
    """Say what the numbers of a function mean: sets its attribute `measure`, and nothing else.

    >>> @measured("length", "cells", None, low=0.0)
    ... def length(values):
    ...     return values.norm(dim=-1)
    >>> length.measure.unit
    'cells'
    """

    def declare(function: Callable[Arguments, Tensor]) -> Declared[Arguments]:
        declared = cast(Declared[Arguments], function)
        declared.measure = Measure(name, unit, higher_is_better, low, high)
        return declared

    return declare


def row(attention: AttentionMap) -> tuple[Float[Tensor, "b k"], Bool[Tensor, "b k"]]:
    """The weights of a map of one row a sample, in double precision, and the keys it may see.

    A row with a weight that is NaN is as one that sees no key: ranks and largest weights would
    else be those of numbers that are none.
    """
    if not isinstance(attention, AttentionMap):
        raise TypeError(
            f"a measure takes an AttentionMap, and this is of type {type(attention).__name__}; "
            "AttentionMap.from_cells(weights, grid(7, 7)) makes one of weights (b, k)"
        )
    _, l, h, q, _ = attention.values.shape
    if l * h * q != 1:
        raise ValueError(
            f"a measure reads one row a sample, and this map has {l} layers, {h} heads and "
            f"{q} queries: take .layer(i) or .head(i), fuse with .over_layers() or "
            ".over_heads(), or measure each row by itself with .each_row()"
        )
    seen = attention.visible[:, 0]
    weights = rearrange(attention.weights.double(), "b 1 1 1 k -> b k").masked_fill(~seen, 0)
    seen = seen & ~weights.isnan().any(dim=-1, keepdim=True)
    return weights.masked_fill(~seen, 0), seen


def rows(
    attention: AttentionMap, truth: AttentionMap
) -> tuple[Float[Tensor, "b k"], Float[Tensor, "b k"], Bool[Tensor, "b k"]]:
    """The weights of two maps over the same keys, and the keys that both may see."""
    ours, seen = row(attention)
    theirs, also_seen = row(truth)
    if ours.shape != theirs.shape:
        raise ValueError(
            f"a map of {len(attention)} samples and {len(attention.keys)} keys does not compare "
            f"with a truth of {len(truth)} samples and {len(truth.keys)} keys"
        )
    both = seen & also_seen
    return ours.masked_fill(~both, 0), theirs.masked_fill(~both, 0), both


def shares(weights: Float[Tensor, "b k"], kind: Kind) -> Float[Tensor, "b k"]:
    """Weights as shares of their sum; NaN for a row without any, or with one below 0."""
    if kind is Kind.SIGNED:
        raise ValueError("signed weights have no shares; take their positive part first")
    each = weights / weights.sum(dim=-1, keepdim=True)
    return torch.where(below_zero(weights)[..., None], torch.nan, each)


def below_zero(weights: Float[Tensor, "*rows k"]) -> Bool[Tensor, "*rows"]:
    """Which rows have a weight below 0, by more than rounding leaves: no shares of a whole."""
    whole = weights.clamp_min(0).sum(dim=-1, keepdim=True)
    return (weights < -1e-6 * whole).any(dim=-1)


def defined(values: Float[Tensor, " b"], where: Bool[Tensor, " b"]) -> Measured:
    """The numbers in single precision, NaN where they are not defined."""
    return torch.where(where, values, torch.nan).float()
