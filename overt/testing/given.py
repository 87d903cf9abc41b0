"""What an attention module is asked in a check, how it is called, and what it answers."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor, nn

from overt.attention import POINT, AttentionMap, Kind, Layout, grid, words


@dataclass(frozen=True)
class Sizes:
    """How many features a query and a key have, and how many queries there are.

    `query=0` is for modules that ask nothing, `queries=None` for those whose keys ask each other.
    """

    query: int = 8
    key: int = 8
    queries: int | None = 2


@dataclass(frozen=True, eq=False)
class Given:
    """Queries, keys that are also what is gathered, and which of the keys are there.

    `shape` is that of the keys on a grid, such as (2, 3).
    """

    queries: Float[Tensor, "b q e"]
    keys: Float[Tensor, "b k d"]
    present: Bool[Tensor, "b k"]
    shape: tuple[int, int]

    @property
    def cells(self) -> Layout:
        """The keys as cells of a picture."""
        return grid(*self.shape)

    @property
    def words(self) -> Layout:
        """The keys as words of a text."""
        return words(self.keys.shape[1])

    @property
    def asking(self) -> Layout:
        """The queries, where there are several."""
        return words(self.queries.shape[1], "queries")

    def to(self, where: torch.device | torch.dtype | str) -> "Given":
        """The same on another device or in another number format."""
        present = self.present if isinstance(where, torch.dtype) else self.present.to(where)
        return self._with(self.keys.to(where), self.queries.to(where), present)

    def clone(self) -> "Given":
        """The same in memory of its own."""
        return self._with(self.keys.clone(), self.queries.clone(), self.present.clone())

    def select(self, rows: Sequence[int]) -> "Given":
        """The samples named, in their order."""
        at = torch.tensor(rows, dtype=torch.long)
        return self._with(self.keys[at], self.queries[at], self.present[at])

    def _with(self, keys: Tensor, queries: Tensor, present: Tensor) -> "Given":
        """Keys that ask each other are still one tensor."""
        asking = keys if self.queries is self.keys else queries
        return Given(asking, keys, present, self.shape)


Attend = Callable[[Any, Given], tuple[Tensor, AttentionMap]]


def as_map(weights: Float[Tensor, "b h q k"], given: Given) -> AttentionMap:
    """Weights of heads, after their softmax, as the map that a check reads."""
    alone = given.queries.shape[1] == 1
    return AttentionMap(
        rearrange(weights, "b h q k -> b 1 h q k"),
        given.words,
        POINT if alone else given.asking,
        rearrange(given.present, "b k -> b 1 k"),
    )


def plainly(module: Any, given: Given) -> tuple[Tensor, AttentionMap]:
    """Call `module(queries, keys, present)`, which gives an output and a map, or its weights.

    The output is `(b, q, ...)`, the weights are `(b, h, q, k)`.
    """
    output, attention = module(given.queries, given.keys, given.present)
    if isinstance(attention, Tensor):
        attention = as_map(attention, given)
    return output, attention


def random_given(
    sizes: Sizes, shape: tuple[int, int], lengths: Sequence[int], seed: int = 0
) -> Given:
    """Random numbers for as many samples as there are `lengths`, each with so many keys there."""
    generator = torch.Generator().manual_seed(seed)
    count, samples = shape[0] * shape[1], len(lengths)
    keys = torch.randn(samples, count, sizes.key, generator=generator)
    asking = 1 if sizes.queries is None else sizes.queries
    queries = torch.randn(samples, asking, sizes.query, generator=generator)
    present = torch.arange(count) < torch.tensor(lengths, dtype=torch.long)[:, None]
    return Given(keys if sizes.queries is None else queries, keys, present, shape)


@dataclass(frozen=True, eq=False)
class Answer:
    """What a module gave: a tensor with a row a sample, and an `AttentionMap`, if it is right."""

    output: Any
    attention: Any

    @property
    def weights(self) -> Tensor:
        """The plain weights."""
        weights: Tensor = self.attention.weights
        return weights


@dataclass(frozen=True, eq=False)
class Case:
    """A module in eval mode of which only copies are run, and what it is asked.

    `given` has three samples with six, four and two of six keys; `answer` is what a copy made of
    it. Numbers that rounding may move agree to `tolerance`.
    """

    fresh: nn.Module
    attend: Attend
    sizes: Sizes
    given: Given
    answer: Answer
    unreached: tuple[str, ...]
    tolerance: float

    @property
    def to_itself(self) -> bool:
        """Whether the keys ask each other."""
        return self.sizes.queries is None

    def copy(self) -> nn.Module:
        """A module that a check may do anything to."""
        return copy.deepcopy(self.fresh)

    def ask(self, given: Given | None = None, module: nn.Module | None = None) -> Answer:
        """What a copy, or the module named, makes of inputs that nobody else holds."""
        given = (self.given if given is None else given).clone()
        return Answer(*self.attend(self.copy() if module is None else module, given))

    def there(self, answer: Answer, given: Given) -> tuple[Tensor, Tensor]:
        """Output and weights, with nothing where a query is itself not there."""
        if not self.to_itself:
            return answer.output, answer.weights
        gone = rearrange(~given.present, "b q -> b 1 1 q 1")
        rows = ~given.present.reshape(*given.present.shape, *[1] * (answer.output.ndim - 2))
        return answer.output.masked_fill(rows, 0), answer.weights.masked_fill(gone, 0)

    def differs(
        self, found: Answer, expected: Answer | None = None, tolerance: float | None = None
    ) -> str | None:
        """How an answer to `given` differs from what is expected; None where it does not."""
        expected = self.answer if expected is None else expected
        pairs = zip(
            ("output", "map"),
            self.there(found, self.given),
            self.there(expected, self.given),
            strict=True,
        )
        return apart(pairs, self.tolerance if tolerance is None else tolerance)

    def total(self, answer: Answer, given: Given) -> Tensor:
        """A number that hangs on every entry of an answer."""
        generator = torch.Generator().manual_seed(7)
        total = torch.zeros((), dtype=torch.float64)
        for part in self.there(answer, given):
            share = torch.rand(part.shape, generator=generator, dtype=torch.float64)
            total = total + (part.double() * share).sum()
        return total


def apart(pairs: Any, tolerance: float) -> str | None:
    """How the first of named pairs of tensors differs by more than `tolerance`, or None.

    Beyond one, the difference counts in shares of the largest number.
    """
    for name, one, two in pairs:
        one, two = one.detach().double(), two.detach().double()
        if one.shape != two.shape:
            return f"the {name} has shape {tuple(one.shape)} in the place of {tuple(two.shape)}"
        if not one.numel():
            continue
        by = float((one - two).abs().max()) / max(1.0, float(two.abs().max()))
        if not by <= tolerance:
            return f"the {name} differs by {by:.2g}"
    return None


def is_share(attention: AttentionMap) -> bool:
    """Whether rows of this map promise to sum to one."""
    return attention.kind is Kind.PROBABILITY
