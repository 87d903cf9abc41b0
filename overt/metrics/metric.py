"""Metrics: functions that return one score per sample and declare what it means.

A metric takes maps with one row per sample and returns a tensor of shape (b,). The score is NaN
where the metric is not defined, for example for a sample without a target. Means and confidence
intervals are in `statistics`.
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
SampleScores = Float[Tensor, " b"]  # one score per sample, NaN where undefined


@dataclass(frozen=True)
class MetricInfo:
    """Description of a metric, from which tables and reports are laid out.

    Args:
        name: Name in tables and results.
        unit: Unit of the score, such as "share" or "nats".
        higher_is_better: None where neither direction is good in itself, as for entropy.
        low: Lower bound of the score.
        high: Upper bound of the score.
        version: Version of the definition. It goes up whenever the same maps give other numbers.
            Every result contains it, and numbers of different versions are never compared.
        description: One line that says what the score measures.
        key: Identifier in scorecards and on the command line.

    Example:
        >>> info = MetricInfo("mass inside", "share", True, 0.0, 1.0, description="Share inside")
        >>> info.summary
        'Share inside; 0 to 1, higher is better'
    """

    name: str
    unit: str
    higher_is_better: bool | None
    low: float = -math.inf
    high: float = math.inf
    version: int = 1
    description: str = ""
    key: str = ""

    @property
    def direction(self) -> str:
        """The better direction: "higher", "lower" or "neither"."""
        return {True: "higher", False: "lower", None: "neither"}[self.higher_is_better]

    @property
    def range(self) -> str:
        """The bounds of the score, such as "0 to 1"; "0 or more" without an upper bound."""
        if math.isinf(self.high):
            return "any number" if math.isinf(self.low) else f"{self.low:g} or more"
        return f"{self.low:g} to {self.high:.3g}"

    @property
    def summary(self) -> str:
        """One line: what the score measures, its range and its better direction."""
        better = {
            "higher": "higher is better",
            "lower": "lower is better",
            "neither": "neither direction is better",
        }
        return f"{self.description}; {self.range}, {better[self.direction]}"


@runtime_checkable
class Metric(Protocol[Arguments]):
    """A function with the attribute `info`, as `declare_metric` makes it."""

    info: MetricInfo
    __name__: str

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Tensor: ...


def declare_metric(
    name: str,
    unit: str,
    higher_is_better: bool | None,
    low: float = -math.inf,
    high: float = math.inf,
    version: int = 1,
    key: str = "",
) -> Callable[[Callable[Arguments, Tensor]], Metric[Arguments]]:
    """Declare a function to be a metric: set its attribute `info` to a `MetricInfo`.

    The description is the first line of the function's docstring without its "Compute", so that
    line has to be understandable by itself.

    Args:
        name: Name in tables and results.
        unit: Unit of the score.
        higher_is_better: None where neither direction is good in itself.
        low: Lower bound of the score.
        high: Upper bound of the score.
        version: Version of the definition; see `MetricInfo`.
        key: Identifier in scorecards; the function's name by default.

    Returns:
        A decorator that returns the function itself.

    Example:
        >>> @declare_metric("length", "cells", None, low=0.0)
        ... def length(values):
        ...     "Compute the Euclidean length of each row."
        ...     return values.norm(dim=-1)
        >>> length.info.summary
        'Euclidean length of each row; 0 or more, neither direction is better'
    """

    def declare(function: Callable[Arguments, Tensor]) -> Metric[Arguments]:
        declared = cast(Metric[Arguments], function)
        said = (function.__doc__ or "").strip().partition("\n")[0].rstrip(".")
        said = said.removeprefix("Compute ").removeprefix("the ")
        said = said[:1].upper() + said[1:]
        declared.info = MetricInfo(
            name, unit, higher_is_better, low, high, version, said, key or declared.__name__
        )
        return declared

    return declare


def single_row(attention: AttentionMap) -> tuple[Float[Tensor, "b k"], Bool[Tensor, "b k"]]:
    """Return the weights of a map with one row per sample, in float64, and its visible keys.

    A row with a NaN or infinite weight is returned as a row without visible keys: otherwise ranks
    and shares would be those of a diverged model.

    Args:
        attention: A map with one layer, one head and one query.

    Returns:
        The weights (b, k), 0 where a key is not visible, and the mask of visible keys (b, k).

    Raises:
        TypeError: The argument is not an `AttentionMap`.
        ValueError: The map has several layers, heads or queries.
    """
    if not isinstance(attention, AttentionMap):
        raise TypeError(
            f"expected an AttentionMap, got {type(attention).__name__}: make one from weights "
            "(b, k) with AttentionMap.from_cells(weights, grid(7, 7))"
        )
    _, l, h, q, _ = attention.values.shape
    if l * h * q != 1:
        raise ValueError(
            f"a metric needs one row per sample, got {l} layers, {h} heads and {q} queries: "
            "select with .layer(i), .head(i) or .between(query, key), such as "
            '.between("class", "image"), average with .over_layers() or .over_heads(), or score '
            "each row by itself with .rows_as_samples()"
        )
    seen = attention.visible[:, 0]
    weights = rearrange(attention.weights.double(), "b 1 1 1 k -> b k").masked_fill(~seen, 0)
    seen = seen & weights.isfinite().all(dim=-1, keepdim=True)
    return weights.masked_fill(~seen, 0), seen


def paired_rows(
    attention: AttentionMap, truth: AttentionMap
) -> tuple[Float[Tensor, "b k"], Float[Tensor, "b k"], Bool[Tensor, "b k"]]:
    """Return the weights of two maps over the same keys, and the keys visible in both.

    Args:
        attention: A map with one row per sample.
        truth: Another one, over the same samples and keys.

    Returns:
        Both weights (b, k), 0 where a key is not visible in both, and the mask of keys visible in
        both.

    Raises:
        ValueError: The maps differ in their number of samples or keys.

    Example:
        >>> one = AttentionMap.from_weights(torch.tensor([[0.7, 0.3]]), axes="b k")
        >>> ours, theirs, both = paired_rows(one, one)
        >>> ours.float(), both
        (tensor([[0.7000, 0.3000]]), tensor([[True, True]]))
    """
    ours, seen = single_row(attention)
    theirs, also_seen = single_row(truth)
    if ours.shape != theirs.shape:
        raise ValueError(
            f"attention and truth must have the same samples and keys, got {len(attention)} and "
            f"{len(truth)} samples, {len(attention.keys)} and {len(truth.keys)} keys"
            + _grid_remedy(attention, truth)
        )
    both = seen & also_seen
    return ours.masked_fill(~both, 0), theirs.masked_fill(~both, 0), both


def _grid_remedy(attention: AttentionMap, truth: AttentionMap) -> str:
    """Return what to do about maps over grids of another size; nothing for other keys."""
    spans = attention.keys.spans
    grids = [span.shape for span in truth.keys.spans if len(span.shape) == 2]
    if len(attention) != len(truth) or len(grids) != 1:
        return ""
    if len(spans) > 1 and any(span.shape == grids[0] for span in spans):
        return ': choose the cells with .between("class", "image")'
    return f": bring both to one grid, metrics.resample_to_grid(attention, {grids[0]})"


def to_distribution(weights: Float[Tensor, "b k"], kind: Kind) -> Float[Tensor, "b k"]:
    """Normalize weights to sum to one; NaN for a row without weight or with a negative weight."""
    if kind is Kind.SIGNED:
        raise ValueError("signed weights are not a distribution: take their positive part first")
    each = weights / weights.sum(dim=-1, keepdim=True)
    return torch.where(has_negative(weights)[..., None], torch.nan, each)


def invalid_distribution(weights: Float[Tensor, "*rows k"]) -> Bool[Tensor, "*rows"]:
    """Return which rows have a negative, infinite or NaN weight and so are not distributions."""
    return has_negative(weights) | ~weights.isfinite().all(dim=-1)


def has_negative(weights: Float[Tensor, "*rows k"]) -> Bool[Tensor, "*rows"]:
    """Return which rows have a weight below 0, beyond rounding."""
    # relative to the row: differences of large weights leave tiny negative rounding errors
    whole = weights.clamp_min(0).sum(dim=-1, keepdim=True)
    return (weights < -1e-6 * whole).any(dim=-1)


def mask_undefined(values: Float[Tensor, " b"], where: Bool[Tensor, " b"]) -> SampleScores:
    """Return scores as float32 with NaN where they are not defined.

    Args:
        values: One score per sample.
        where: Which samples have a score.

    Returns:
        The scores in float32.

    Example:
        >>> mask_undefined(torch.tensor([0.5, 0.0]), torch.tensor([True, False]))
        tensor([0.5000,    nan])
    """
    return torch.where(where, values, torch.nan).float()


class MetricUnavailableError(ValueError):
    """Raised where a metric or map cannot be computed for this model and dataset."""
