"""Is the answer made of what is attended to? Remove it and see.

`decide` takes a mask over the keys, 1 to keep and 0 to remove, and gives the logits of the classes.
It is called with the same samples each time, so whatever the mask leaves alone is computed once:

    features = model.encode(batch)
    decide = lambda keep: model.decide(features, {"image": keep}).prediction
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from overt.attention import AttentionMap
from overt.measure.location import support
from overt.measure.measured import Measured, defined, measured, row, shares

Decide = Callable[[Float[Tensor, "b k"]], Float[Tensor, "b c"]]
Choose = Callable[[AttentionMap, torch.Generator], Bool[Tensor, "b k"]]


# --- which cells; equals are taken in a random order, or a flat map would speak for a corner


def top_cells(
    attention: AttentionMap, generator: torch.Generator, count: int
) -> Bool[Tensor, "b k"]:
    """The `count` cells with the largest weights, random ones of equals; never one without."""
    weights, seen = row(attention)
    order = _descending(weights.masked_fill(~seen, -torch.inf), _shuffle(seen, generator))
    return _first(order, count) & seen & (weights > 0)


def mass_cells(
    attention: AttentionMap, generator: torch.Generator, share: float = 0.5
) -> Bool[Tensor, "b k"]:
    """The fewest cells that hold `share` of the attention between them, random ones of equals."""
    weights, seen = row(attention)
    each = shares(weights, attention.kind).nan_to_num(0)
    order = _descending(each, _shuffle(each, generator))
    ordered = each.gather(-1, order)
    before = ordered.cumsum(dim=-1) - ordered
    needed = before < share - 1e-6  # rounding shall not ask for one more
    return torch.zeros_like(seen).scatter(-1, order, needed) & seen & (weights > 0)


def random_cells(
    cells: Bool[Tensor, "b k"], seen: Bool[Tensor, "b k"], generator: torch.Generator
) -> Bool[Tensor, "b k"]:
    """As many random cells as `cells` has in each sample, among those that may be seen."""
    return _as_many(cells, seen, _shuffle(cells, generator))


def _shuffle(like: Tensor, generator: torch.Generator) -> Int[Tensor, "b k"]:
    noise = torch.rand(like.shape, generator=generator, device=generator.device)
    return noise.argsort(dim=-1, descending=True).to(like.device)


def _descending(
    scores: Float[Tensor, "b k"] | Bool[Tensor, "b k"], mixed: Int[Tensor, "b k"]
) -> Int[Tensor, "b k"]:
    """The places of the scores from the largest to the least, equals in the order of `mixed`."""
    return mixed.gather(-1, scores.gather(-1, mixed).argsort(dim=-1, descending=True, stable=True))


def _as_many(
    cells: Bool[Tensor, "b k"], seen: Bool[Tensor, "b k"], mixed: Int[Tensor, "b k"]
) -> Bool[Tensor, "b k"]:
    return _first(_descending(seen, mixed), cells.sum(dim=-1, keepdim=True)) & seen


def _first(order: Int[Tensor, "b k"], count: int | Int[Tensor, "b 1"]) -> Bool[Tensor, "b k"]:
    place = torch.arange(order.shape[1], device=order.device).expand_as(order)
    return torch.zeros_like(order, dtype=torch.bool).scatter(-1, order, place < count)


# --- what removing them does


@dataclass(frozen=True, eq=False)
class Removed:
    """What becomes of the answers when cells are taken away: see the measures of these names."""

    deletion: Measured
    insertion: Measured
    flips: Measured


def removed(decide: Decide, cells: Bool[Tensor, "b k"]) -> Removed:
    """`deletion`, `insertion` and `flips` of the same cells, from three calls of `decide`."""
    return _removed(decide, cells, _probabilities(decide, torch.ones_like(cells)))


@measured("deletion", "probability", higher_is_better=True, low=-1.0, high=1.0)
def deletion(decide: Decide, cells: Bool[Tensor, "b k"]) -> Measured:
    """How far the probability of the answer first given falls when `cells` are removed.

    Not defined for a sample without a cell to remove.
    """
    return removed(decide, cells).deletion


@measured("insertion", "probability", higher_is_better=True, low=0.0, high=1.0)
def insertion(decide: Decide, cells: Bool[Tensor, "b k"]) -> Measured:
    """The probability of the answer first given when nothing but `cells` is kept."""
    return removed(decide, cells).insertion


@measured("flips", "share", higher_is_better=True, low=0.0, high=1.0)
def flips(decide: Decide, cells: Bool[Tensor, "b k"]) -> Measured:
    """1 where the answer is another one once `cells` are removed, else 0."""
    return removed(decide, cells).flips


@dataclass(frozen=True, eq=False)
class Contrast:
    """What removing the attended cells does, beside removing others.

    `random` is the mean over draws of as many random cells; `truth` is None without a truth.
    """

    attended: Removed
    random: Removed
    truth: Removed | None

    @property
    def beyond_random(self) -> Measured:
        """How much more probability falls with the attended cells than with random ones."""
        return self.attended.deletion - self.random.deletion

    @property
    def beyond_truth(self) -> Measured:
        """The same beside the cells of the truth; about 0 when the map finds what decides."""
        if self.truth is None:
            raise ValueError("no truth was given to compare with")
        return self.attended.deletion - self.truth.deletion


def contrast(
    decide: Decide,
    attention: AttentionMap,
    truth: AttentionMap | None,
    generator: torch.Generator,
    choose: Choose = mass_cells,
    draws: int = 4,
) -> Contrast:
    """Remove what is attended to, as many random cells, and the truth, from the same samples.

    `choose` says which cells a map attends to: `mass_cells`, or `partial(top_cells, count=5)`.
    Where weights tie it chooses at random, so that a flat map does as well as random cells. All
    that is random comes from `generator`: the same state gives the same numbers.
    """
    _, seen = row(attention)
    # drawn before ties are broken: the random cells are the same whichever way a map is read
    shuffles = [_shuffle(seen, generator) for _ in range(draws)]
    cells = choose(attention, generator)
    whole = _probabilities(decide, torch.ones_like(cells))
    by_chance = [_removed(decide, _as_many(cells, seen, mixed), whole) for mixed in shuffles]
    return Contrast(
        attended=_removed(decide, cells, whole),
        random=Removed(
            deletion=torch.stack([one.deletion for one in by_chance]).mean(dim=0),
            insertion=torch.stack([one.insertion for one in by_chance]).mean(dim=0),
            flips=torch.stack([one.flips for one in by_chance]).mean(dim=0),
        ),
        truth=None if truth is None else _removed(decide, support(truth), whole),
    )


def _removed(decide: Decide, cells: Bool[Tensor, "b k"], whole: Float[Tensor, "b c"]) -> Removed:
    without, alone = _probabilities(decide, ~cells), _probabilities(decide, cells)
    answer = whole.argmax(dim=-1, keepdim=True)
    some = cells.any(dim=-1)
    fallen = (whole.gather(-1, answer) - without.gather(-1, answer))[:, 0]
    other = (without.argmax(dim=-1, keepdim=True) != answer)[:, 0]
    return Removed(
        deletion=defined(fallen, some),
        insertion=defined(alone.gather(-1, answer)[:, 0], some),
        flips=defined(other.double(), some),
    )


@torch.no_grad()
def _probabilities(decide: Decide, keep: Bool[Tensor, "b k"]) -> Float[Tensor, "b c"]:
    logits = decide(keep.float())
    if logits.shape[-1] < 2:
        raise ValueError("an answer needs two classes at least to change")
    return logits.double().softmax(dim=-1)
