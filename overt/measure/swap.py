"""Does attention follow its query? The query of another image is put in, and the map watched.

Jetley, Lord, Lee and Torr, "Learn To Pay Attention", ICLR 2018, https://arxiv.org/abs/1804.02391,
appendix A.5 and figure 10, with numbers in place of pictures. `look` gives the maps of all samples
when sample i is asked with the query of sample rows[i]:

    features = model.encode(batch)
    look = lambda rows: model.decide(replace(features, query=features.query[rows])).attention[0]
    swap = swapped(look, partners(alike(batch.labels), generator))
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from overt.attention import AttentionMap
from overt.measure.agreement import js
from overt.measure.location import mass_inside
from overt.measure.measured import Measured, defined, measured, rows, shares

Look = Callable[[Int[Tensor, " b"]], AttentionMap]


# --- whose query


def alike(labels: Int[Tensor, " b"]) -> Bool[Tensor, "b b"]:
    """Other samples of the same class, as in the paper; a negative label is of no class."""
    known = labels >= 0
    same = labels[:, None] == labels[None, :]
    return same & known[:, None] & known[None, :] & ~_itself(labels)


def unlike(labels: Int[Tensor, " b"]) -> Bool[Tensor, "b b"]:
    """Samples of other classes."""
    known = labels >= 0
    return (labels[:, None] != labels[None, :]) & known[:, None] & known[None, :]


def anyone(labels: Int[Tensor, " b"]) -> Bool[Tensor, "b b"]:
    """All other samples."""
    return ~_itself(labels)


def partners(allowed: Bool[Tensor, "b b"], generator: torch.Generator) -> Int[Tensor, " b"]:
    """For each sample a random one of those allowed in its row; -1 where there is none."""
    noise = torch.rand(allowed.shape, generator=generator, device=generator.device)
    chosen = noise.to(allowed.device).masked_fill(~allowed, -1.0).argmax(dim=-1)
    return torch.where(allowed.any(dim=-1), chosen, -1)


def _itself(labels: Int[Tensor, " b"]) -> Bool[Tensor, "b b"]:
    return torch.eye(len(labels), dtype=torch.bool, device=labels.device)


# --- what it does


@dataclass(frozen=True, eq=False)
class Swap:
    """The map of each sample by its own query and by another's; `there` is False without one."""

    own: AttentionMap
    other: AttentionMap
    there: Bool[Tensor, " b"]

    @property
    def moved(self) -> Measured:
        """See the measure of this name."""
        return defined(moved(self.other, self.own), self.there)

    @property
    def js(self) -> Measured:
        """The Jensen-Shannon divergence of both maps, in nats: 0 where the query does nothing."""
        return defined(js(self.other, self.own), self.there)

    @property
    def change(self) -> Float[Tensor, "b k"]:
        """How each weight changes, as a share of what it was: what figure 10 draws.

        0 for a key that neither map may see or gives anything to; NaN without a partner.
        """
        after, before, _ = rows(self.other, self.own)
        ratio = torch.where(after == before, 0, (after - before) / before)
        return torch.where(self.there[:, None], ratio, torch.nan).float()

    def gain(self, truth: AttentionMap) -> Measured:
        """How much more attention falls on the truth of the image when another one asks for it.

        With queries of the same class about 0 is good: either finds the object. With those of
        other classes a map that follows its query loses it.
        """
        return defined(mass_inside(self.other, truth) - mass_inside(self.own, truth), self.there)


def swapped(look: Look, partner: Int[Tensor, " b"]) -> Swap:
    """The maps before and after each sample is asked with the query of its partner.

    `partners` makes such a choice; -1 stands for none, and leaves the numbers of a sample NaN.
    """
    itself = torch.arange(len(partner), device=partner.device)
    there = partner >= 0
    with torch.no_grad():
        return Swap(look(itself), look(torch.where(there, partner, itself)), there)


@measured("moved", "share", higher_is_better=None, low=0.0, high=1.0)
def moved(attention: AttentionMap, before: AttentionMap) -> Measured:
    """The share of the attention that has gone elsewhere: half the sum of all differences.

    0 when the maps are the same, 1 when they share no cell. Neither is good in itself: it says how
    far a map depends on what was changed. Not defined where either is empty or has a weight below
    0.
    """
    ours, theirs, _ = rows(attention, before)
    first, second = shares(ours, attention.kind), shares(theirs, before.kind)
    apart = (first - second).abs().sum(dim=-1) / 2
    return defined(apart.clamp_max(1), ~apart.isnan())
