"""Is the answer made of what is attended to? Remove it and see.

`decide` takes a mask over the keys, 1 to keep and 0 to remove, and gives the logits of the classes.
It is called with the same samples each time, so whatever the mask leaves alone is computed once:

    features = model.encode(batch)
    decide = lambda keep: model.decide(features, {"image": keep}).prediction
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from overt.attention import AttentionMap
from overt.measure.cells import Choose, as_many, mass_cells, shuffle
from overt.measure.location import support
from overt.measure.measured import Measured, defined, measured, row

Decide = Callable[[Float[Tensor, "b k"]], Float[Tensor, "b c"]]


# --- what removing them does


@dataclass(frozen=True, eq=False)
class Removed:
    """What becomes of the answers when cells are taken away: see the measures of these names."""

    deletion: Measured
    insertion: Measured
    flips: Measured


def removed(decide: Decide, cells: Bool[Tensor, "b k"]) -> Removed:
    """`deletion`, `insertion` and `flips` of the same cells, from three calls of `decide`."""
    return _removed(decide, cells, probabilities(decide, torch.ones_like(cells)))


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
    """1 where the answer is another one once `cells` are removed, else 0.

    Not defined where the logits are NaN before or after, or there is no cell to remove.
    """
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
    if draws < 1:
        raise ValueError(f"{draws} draws leave no random cells to compare with; take 1 at least")
    _, seen = row(attention)
    # drawn before ties are broken: the random cells are the same whichever way a map is read
    shuffles = [shuffle(seen, generator) for _ in range(draws)]
    cells = choose(attention, generator)
    whole = probabilities(decide, torch.ones_like(cells))
    by_chance = [_removed(decide, as_many(cells, seen, mixed), whole) for mixed in shuffles]
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
    without, alone = probabilities(decide, ~cells), probabilities(decide, cells)
    answer = whole.argmax(dim=-1, keepdim=True)
    some = cells.any(dim=-1) & ~whole.isnan().any(dim=-1)
    fallen = (whole.gather(-1, answer) - without.gather(-1, answer))[:, 0]
    other = (without.argmax(dim=-1, keepdim=True) != answer)[:, 0]
    return Removed(
        deletion=defined(fallen, some),
        insertion=defined(alone.gather(-1, answer)[:, 0], some),
        flips=defined(other.double(), some & ~without.isnan().any(dim=-1)),
    )


@torch.no_grad()
def probabilities(decide: Decide, keep: Bool[Tensor, "b k"]) -> Float[Tensor, "b c"]:
    """What each class is worth to the model when it sees the cells kept, without a gradient."""
    logits = decide(keep.float())
    if len(logits) != len(keep):
        raise ValueError(
            f"decide gives logits of {len(logits)} samples for {len(keep)} masks; where it cannot "
            "take its samples several times over, ask with at_once=1"
        )
    if logits.shape[-1] < 2:
        raise ValueError("an answer needs two classes at least to change")
    return logits.double().softmax(dim=-1)
