"""How does the answer change as more and more is removed, the most attended first?

A map is an order of the keys. Keys are removed in that order, or put back into nothing, and the
probability of the answer first given is watched. All of it is asked of a `Decide`; what stands in
the place of what is removed is settled by `removal`:

    decide = in_pixels(classify, images, (7, 7), fill=blurred)
    curve = deletion_curve(decide, attention, generator)
    curve.shares, curve.probability.mean(dim=1)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from overt.attention import AttentionMap
from overt.measure.cells import first, ranked
from overt.measure.faithfulness import Decide, probabilities
from overt.measure.measured import Measured, defined, measured, row

TENTHS = tuple(tenth / 10 for tenth in range(11))
BINS = (0.01, 0.05, 0.1, 0.2, 0.5)  # ERASER's

Keep = Callable[[Bool[Tensor, "b k"]], Bool[Tensor, "b k"]]


@dataclass(frozen=True, eq=False)
class Curve:
    """The probability of the answer first given, at each share of the keys.

    `changed` says where the answer is another one. `there` is False for a sample without keys, or
    without an answer first given: its logits are NaN.
    """

    shares: tuple[float, ...]
    whole: Float[Tensor, " b"]
    probability: Float[Tensor, "s b"]
    changed: Bool[Tensor, "s b"]
    there: Bool[Tensor, " b"]

    @property
    def area(self) -> Measured:
        """The mean height of the curve between its first and last share, by trapezoids."""
        if len(self.shares) < 2:
            raise ValueError("a curve of one point has no area; take two shares at least")
        at = torch.tensor(self.shares, dtype=torch.float64, device=self.probability.device)
        total = torch.trapezoid(self.probability, at, dim=0)
        return defined(total / (at[-1] - at[0]), self.there)

    @property
    def drop(self) -> Measured:
        """How far the probability is below that of the whole, as a mean over the shares."""
        return defined(self.whole - self.probability.mean(dim=0), self.there)


def deletion_curve(
    decide: Decide,
    attention: AttentionMap,
    generator: torch.Generator,
    shares: Sequence[float] = TENTHS,
) -> Curve:
    """The most attended `shares` of the keys are removed; equals in a random order."""
    return _curve(decide, attention, generator, shares, lambda cells: ~cells)


def insertion_curve(
    decide: Decide,
    attention: AttentionMap,
    generator: torch.Generator,
    shares: Sequence[float] = TENTHS,
) -> Curve:
    """Nothing but the most attended `shares` of the keys is kept; equals in a random order."""
    return _curve(decide, attention, generator, shares, lambda cells: cells)


# --- numbers


@measured("deletion area", "probability", higher_is_better=False, low=0.0, high=1.0)
def deletion_area(
    decide: Decide,
    attention: AttentionMap,
    generator: torch.Generator,
    shares: Sequence[float] = TENTHS,
) -> Measured:
    """The area under `deletion_curve`: small when what is attended to first is what decides.

    Petsiuk, Das and Saenko, "RISE", BMVC 2018, https://arxiv.org/abs/1806.07421, section 4.3.
    """
    return deletion_curve(decide, attention, generator, shares).area


@measured("insertion area", "probability", higher_is_better=True, low=0.0, high=1.0)
def insertion_area(
    decide: Decide,
    attention: AttentionMap,
    generator: torch.Generator,
    shares: Sequence[float] = TENTHS,
) -> Measured:
    """The area under `insertion_curve` (RISE, section 4.3)."""
    return insertion_curve(decide, attention, generator, shares).area


@measured("flipping", "probability", higher_is_better=True, low=-1.0, high=1.0)
def flipping(
    decide: Decide,
    attention: AttentionMap,
    generator: torch.Generator,
    shares: Sequence[float] = TENTHS,
) -> Measured:
    """How far the probability falls as pixels or words are flipped, a mean over all steps.

    Samek, Binder, Montavon, Lapuschkin and Müller, "Evaluating the Visualization of What a Deep
    Neural Network Has Learned", 2017, https://arxiv.org/abs/1509.06321, eq. 12 (AOPC); the step in
    which nothing is flipped counts too, as there.
    """
    return deletion_curve(decide, attention, generator, shares).drop


@measured("comprehensiveness", "probability", higher_is_better=True, low=-1.0, high=1.0)
def comprehensiveness(
    decide: Decide,
    attention: AttentionMap,
    generator: torch.Generator,
    shares: Sequence[float] = BINS,
) -> Measured:
    """How far the probability falls without the most attended words, a mean over `shares`.

    DeYoung et al., "ERASER", 2020, https://arxiv.org/abs/1911.03429, section 4.2. At least one word
    is removed.
    """
    return deletion_curve(decide, attention, generator, _some(shares)).drop


@measured("sufficiency", "probability", higher_is_better=False, low=-1.0, high=1.0)
def sufficiency(
    decide: Decide,
    attention: AttentionMap,
    generator: torch.Generator,
    shares: Sequence[float] = BINS,
) -> Measured:
    """How far the probability falls when nothing but the most attended words is left (ERASER)."""
    return insertion_curve(decide, attention, generator, _some(shares)).drop


@measured("flip share", "share", higher_is_better=False, low=0.0, high=1.0)
def flip_share(
    decide: Decide,
    attention: AttentionMap,
    generator: torch.Generator,
    shares: Sequence[float] = TENTHS,
) -> Measured:
    """The least share of the keys whose removal changes the answer; 1 where none does.

    Serrano and Smith, "Is Attention Interpretable?", ACL 2019, https://arxiv.org/abs/1906.03731,
    section 5, where weights of attention are set to zero: see `interventions` for that. No finer
    than `shares`. Not defined where the logits are NaN at any of them.
    """
    curve = deletion_curve(decide, attention, generator, shares)
    at = torch.tensor(curve.shares, dtype=torch.float64, device=curve.probability.device)
    least = torch.where(curve.changed, at[:, None], 1.0).amin(dim=0)
    return defined(least, curve.there & ~curve.probability.isnan().any(dim=0))


def _some(shares: Sequence[float]) -> Sequence[float]:
    if not all(share > 0 for share in shares):
        raise ValueError(f"each share must be above 0, or nothing is removed: {list(shares)}")
    return shares


def _curve(
    decide: Decide,
    attention: AttentionMap,
    generator: torch.Generator,
    shares: Sequence[float],
    keep: Keep,
) -> Curve:
    if len(shares) < 1 or list(shares) != sorted(set(shares)) or shares[0] < 0 or shares[-1] > 1:
        raise ValueError(f"shares must grow, from 0 to 1 at most, and these do not: {list(shares)}")
    _, seen = row(attention)
    order = ranked(attention, generator)
    whole = probabilities(decide, torch.ones_like(seen))
    answer = whole.argmax(dim=-1, keepdim=True)
    heights, changed = [], []
    for share in shares:
        found = probabilities(decide, keep(_first(order, seen, share)))
        heights.append(found.gather(-1, answer)[:, 0])
        changed.append((found.argmax(dim=-1, keepdim=True) != answer)[:, 0])
    return Curve(
        tuple(shares),
        whole.gather(-1, answer)[:, 0],
        torch.stack(heights),
        torch.stack(changed),
        seen.any(dim=-1)
        & (attention.weights != 0).flatten(1).any(dim=-1)
        & ~whole.isnan().any(dim=-1),
    )


def _first(
    order: Int[Tensor, "b k"], seen: Bool[Tensor, "b k"], share: float
) -> Bool[Tensor, "b k"]:
    """The first share of the visible keys, rounded; of a share above 0, one key at least."""
    count = (share * seen.sum(dim=-1, keepdim=True)).round().long()
    return first(order, count.clamp_min(1) if share > 0 else count) & seen
