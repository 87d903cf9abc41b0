"""Inputs and outputs of an attention module under test."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor, nn

from overt.attention import GLOBAL_QUERY, AttentionMap, Kind, Layout, grid, words


@dataclass(frozen=True)
class InputSizes:
    """The feature sizes of queries and keys, and the number of queries.

    Args:
        query: Features of a query; 0 for modules without query features.
        key: Features of a key.
        queries: The number of queries; None for self-attention.

    Example:
        >>> sizes = InputSizes(query=0, key=16, queries=1)  # pooling: no query features
        >>> random_inputs(sizes, shape=(2, 3), lengths=[6, 4]).queries.shape
        torch.Size([2, 1, 0])
    """

    query: int = 8
    key: int = 8
    queries: int | None = 2


@dataclass(frozen=True, eq=False)
class AttentionInputs:
    """Queries, keys that are also the values, and a mask of the present keys.

    Args:
        queries: The queries.
        keys: The keys.
        present: Which keys are not masked.
        shape: The keys as a grid, such as (2, 3).

    Example:
        >>> inputs = random_inputs(InputSizes(), shape=(2, 3), lengths=[6, 4])
        >>> inputs.present.sum(dim=1), inputs.grid_layout.find("image").shape
        (tensor([6, 4]), (2, 3))
    """

    queries: Float[Tensor, "b q e"]
    keys: Float[Tensor, "b k d"]
    present: Bool[Tensor, "b k"]
    shape: tuple[int, int]

    @property
    def grid_layout(self) -> Layout:
        """The layout of the keys as cells of an image."""
        return grid(*self.shape)

    @property
    def text_layout(self) -> Layout:
        """The layout of the keys as words of a text."""
        return words(self.keys.shape[1])

    @property
    def query_layout(self) -> Layout:
        """The layout of several queries."""
        return words(self.queries.shape[1], "queries")

    def to(self, where: torch.device | torch.dtype | str) -> "AttentionInputs":
        """Return a copy on another device or in another dtype."""
        present = self.present if isinstance(where, torch.dtype) else self.present.to(where)
        return self._with(self.keys.to(where), self.queries.to(where), present)

    def clone(self) -> "AttentionInputs":
        """Return a copy with its own memory."""
        return self._with(self.keys.clone(), self.queries.clone(), self.present.clone())

    def select(self, rows: Sequence[int]) -> "AttentionInputs":
        """Return some samples."""
        at = torch.tensor(rows, dtype=torch.long)
        return self._with(self.keys[at], self.queries[at], self.present[at])

    def _with(self, keys: Tensor, queries: Tensor, present: Tensor) -> "AttentionInputs":
        """Replace the tensors; in self-attention queries and keys stay one tensor."""
        queries = keys if self.queries is self.keys else queries
        return AttentionInputs(queries, keys, present, self.shape)


CallModule = Callable[[Any, AttentionInputs], tuple[Tensor, AttentionMap]]


def weights_to_map(weights: Float[Tensor, "b h q k"], inputs: AttentionInputs) -> AttentionMap:
    """Return the map of softmax weights, for an `attend` function.

    Args:
        weights: The weights of the heads.
        inputs: The inputs of the module.

    Returns:
        The map that checks use.

    Example:
        >>> inputs = random_inputs(InputSizes(queries=2), shape=(2, 3), lengths=[6, 4])
        >>> weights = inputs.present / inputs.present.sum(dim=-1, keepdim=True)
        >>> weights_to_map(weights[:, None, None].expand(-1, 4, 2, -1), inputs).weights.shape
        torch.Size([2, 1, 4, 2, 6])
    """
    single = inputs.queries.shape[1] == 1
    return AttentionMap(
        rearrange(weights, "b h q k -> b 1 h q k"),
        inputs.text_layout,
        GLOBAL_QUERY if single else inputs.query_layout,
        rearrange(inputs.present, "b k -> b 1 k"),
    )


def default_call(module: Any, inputs: AttentionInputs) -> tuple[Tensor, AttentionMap]:
    """Call `module(queries, keys, present)`, which returns an output and a map or weights.

    Args:
        module: The module.
        inputs: Its inputs.

    Returns:
        The output (b, q, ...) and the map; weights (b, h, q, k) are converted to a map.

    Example:
        >>> def attend(queries, keys, present):
        ...     scores = (queries @ keys.mT).masked_fill(~present[:, None], -torch.inf)
        ...     weights = scores.softmax(dim=-1)
        ...     return weights @ keys, weights[:, None]
        >>> output, attention = default_call(attend, random_inputs(InputSizes(), (2, 3), [6, 4]))
        >>> output.shape, attention.weights.shape
        (torch.Size([2, 2, 8]), torch.Size([2, 1, 1, 2, 6]))
    """
    output, attention = module(inputs.queries, inputs.keys, inputs.present)
    if isinstance(attention, Tensor):
        attention = weights_to_map(attention, inputs)
    return output, attention


def random_inputs(
    sizes: InputSizes, shape: tuple[int, int], lengths: Sequence[int], seed: int = 0
) -> AttentionInputs:
    """Return random inputs, one sample per entry of `lengths`, with that many present keys."""
    generator = torch.Generator().manual_seed(seed)
    count, samples = shape[0] * shape[1], len(lengths)
    keys = torch.randn(samples, count, sizes.key, generator=generator)
    count_queries = 1 if sizes.queries is None else sizes.queries
    queries = torch.randn(samples, count_queries, sizes.query, generator=generator)
    # padding is at the end
    present = torch.arange(count) < torch.tensor(lengths, dtype=torch.long)[:, None]
    return AttentionInputs(keys if sizes.queries is None else queries, keys, present, shape)


@dataclass(frozen=True, eq=False)
class AttentionOutput:
    """The output of a module: a tensor with one row per sample, and an `AttentionMap` if correct.

    Args:
        output: The output.
        attention: The map.
    """

    output: Any
    attention: Any

    @property
    def weights(self) -> Tensor:
        """The weights of the map."""
        weights: Tensor = self.attention.weights
        return weights


@dataclass(frozen=True, eq=False)
class AttentionCase:
    """A module in evaluation mode, its inputs and its result; only copies of it are run.

    Args:
        module: The module.
        attend: How the module is called.
        sizes: The sizes of its inputs.
        inputs: Three samples with six, four and two of six keys.
        result: The output of a copy for these inputs.
        unreached: Prefixes of the names of parameters without a gradient.
        tolerance: The tolerance of comparisons.
    """

    module: nn.Module
    attend: CallModule
    sizes: InputSizes
    inputs: AttentionInputs
    result: AttentionOutput
    unreached: tuple[str, ...]
    tolerance: float

    @property
    def is_self_attention(self) -> bool:
        """Whether queries and keys are the same."""
        return self.sizes.queries is None

    def copy(self) -> nn.Module:
        """Return a copy that a check may modify."""
        return copy.deepcopy(self.module)

    def run(
        self, inputs: AttentionInputs | None = None, module: nn.Module | None = None
    ) -> AttentionOutput:
        """Run a copy, or the given module, on a copy of the inputs."""
        inputs = (self.inputs if inputs is None else inputs).clone()
        return AttentionOutput(*self.attend(self.copy() if module is None else module, inputs))

    def valid_parts(
        self, result: AttentionOutput, inputs: AttentionInputs
    ) -> tuple[Tensor, Tensor]:
        """Return output and weights, with zeros for queries that are padding."""
        if not self.is_self_attention:
            return result.output, result.weights
        missing = rearrange(~inputs.present, "b q -> b 1 1 q 1")
        rows = ~inputs.present.reshape(*inputs.present.shape, *[1] * (result.output.ndim - 2))
        return result.output.masked_fill(rows, 0), result.weights.masked_fill(missing, 0)

    def differs(
        self,
        found: AttentionOutput,
        expected: AttentionOutput | None = None,
        tolerance: float | None = None,
    ) -> str | None:
        """Return how a result differs from the expected one; None if it does not."""
        expected = self.result if expected is None else expected
        pairs = zip(
            ("output", "map"),
            self.valid_parts(found, self.inputs),
            self.valid_parts(expected, self.inputs),
            strict=True,
        )
        return first_difference(pairs, self.tolerance if tolerance is None else tolerance)

    def total(self, result: AttentionOutput, inputs: AttentionInputs) -> Tensor:
        """Return a number that depends on every entry of a result."""
        generator = torch.Generator().manual_seed(7)
        total = torch.zeros((), dtype=torch.float64)
        for part in self.valid_parts(result, inputs):
            # a random factor per entry, the same in every call: a plain sum would hide errors that
            # cancel
            share = torch.rand(part.shape, generator=generator, dtype=torch.float64)
            total = total + (part.double() * share).sum()
        return total


def first_difference(pairs: Any, tolerance: float) -> str | None:
    """Return how the first pair of tensors differs by more than `tolerance`, or None.

    Differences are relative for numbers above one.
    """
    for name, one, two in pairs:
        one, two = one.detach().double(), two.detach().double()
        if one.shape != two.shape:
            return f"the {name} has shape {tuple(one.shape)} instead of {tuple(two.shape)}"
        if not one.numel():
            continue
        by = float((one - two).abs().max()) / max(1.0, float(two.abs().max()))
        # not `by > tolerance`: NaN must count as a difference
        if not by <= tolerance:
            return f"the {name} differs by {by:.2g}"
    return None


def is_probability(attention: AttentionMap) -> bool:
    """Return whether the rows of a map sum to one."""
    return attention.kind is Kind.PROBABILITY
