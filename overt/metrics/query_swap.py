"""Query swap: how much does a map change under the query of another image?

Jetley, Lord, Lee and Torr, "Learn To Pay Attention", ICLR 2018, https://arxiv.org/abs/1804.02391,
appendix A.5 and figure 10, with numbers instead of pictures. `look` returns the maps of all samples
when sample i gets the query of sample rows[i]:

    features = model.encode(batch)
    look = lambda rows: model.decide(replace(features, query=features.query[rows])).attention[0]
    swap = swap_queries(look, draw_partners(same_class_mask(batch.labels), generator))
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from overt.attention import AttentionMap
from overt.metrics.agreement import js
from overt.metrics.argument_checks import check_generator
from overt.metrics.localization import mass_inside
from overt.metrics.metric import (
    SampleScores,
    declare_metric,
    mask_undefined,
    paired_rows,
    to_distribution,
)

AttendWithQueries = Callable[[Int[Tensor, " b"]], AttentionMap]


# --- which samples may be partners


def same_class_mask(labels: Int[Tensor, " b"]) -> Bool[Tensor, "b b"]:
    """Mark for each sample the others of its class (as in the paper); negative labels have none."""
    known = labels >= 0
    same = labels[:, None] == labels[None, :]
    return same & known[:, None] & known[None, :] & ~_identity_mask(labels)


def different_class_mask(labels: Int[Tensor, " b"]) -> Bool[Tensor, "b b"]:
    """Mark for each sample the samples of other classes."""
    known = labels >= 0
    return (labels[:, None] != labels[None, :]) & known[:, None] & known[None, :]


def other_samples_mask(labels: Int[Tensor, " b"]) -> Bool[Tensor, "b b"]:
    """Mark for each sample all other samples."""
    return ~_identity_mask(labels)


def draw_partners(allowed: Bool[Tensor, "b b"], generator: torch.Generator) -> Int[Tensor, " b"]:
    """Draw for each sample one of those allowed in its row; -1 where there is none."""
    device = check_generator(generator).device
    noise = torch.rand(allowed.shape, generator=generator, device=device)
    chosen = noise.to(allowed.device).masked_fill(~allowed, -1.0).argmax(dim=-1)
    return torch.where(allowed.any(dim=-1), chosen, -1)


def _identity_mask(labels: Int[Tensor, " b"]) -> Bool[Tensor, "b b"]:
    return torch.eye(len(labels), dtype=torch.bool, device=labels.device)


# --- effect of a swap


@dataclass(frozen=True, eq=False)
class QuerySwap:
    """Maps of each sample under its own query and under another sample's query.

    Args:
        own: Maps under the sample's own query.
        other: Maps under the partner's query.
        there: Which samples have a partner; scores of others are NaN.
    """

    own: AttentionMap
    other: AttentionMap
    there: Bool[Tensor, " b"]

    @property
    def moved(self) -> SampleScores:
        """Compute the total variation distance of both maps."""
        return mask_undefined(total_variation(self.other, self.own), self.there)

    @property
    def js(self) -> SampleScores:
        """Compute the Jensen-Shannon divergence of both maps, in nats."""
        return mask_undefined(js(self.other, self.own), self.there)

    @property
    def change(self) -> Float[Tensor, "b k"]:
        """Compute the relative change of each weight, as figure 10 draws it.

        0 for a key that is hidden or without weight in both maps; NaN without a partner.
        """
        after, before, _ = paired_rows(self.other, self.own)
        ratio = torch.where(after == before, 0, (after - before) / before)
        return torch.where(self.there[:, None], ratio, torch.nan).float()

    def gain(self, truth: AttentionMap) -> SampleScores:
        """Compute how much more attention falls on the truth under the other query.

        With queries of the same class, about 0 is good: either finds the object. With queries of
        other classes, a map that follows its query loses attention on the object.
        """
        return mask_undefined(
            mass_inside(self.other, truth) - mass_inside(self.own, truth), self.there
        )


def swap_queries(look: AttendWithQueries, partner: Int[Tensor, " b"]) -> QuerySwap:
    """Compute the maps before and after each sample gets the query of its partner.

    Args:
        look: Returns the maps of all samples, given the sample whose query each one gets.
        partner: The partner of each sample, from `draw_partners`; -1 for none.
    """
    itself = torch.arange(len(partner), device=partner.device)
    there = partner >= 0
    with torch.no_grad():
        return QuerySwap(look(itself), look(torch.where(there, partner, itself)), there)


@declare_metric("moved", "share", higher_is_better=None, low=0.0, high=1.0)
def total_variation(attention: AttentionMap, before: AttentionMap) -> SampleScores:
    """Compute the total variation distance of two maps: half the sum of all differences.

    0 when the maps are equal, 1 when they share no cell. Neither is good in itself: it says how far
    a map depends on what was changed. Not defined where either map is empty or has a negative
    weight.

    Args:
        attention: A map with one row per sample.
        before: The map to compare with, over the same keys.

    Returns:
        One distance per sample.
    """
    ours, theirs, _ = paired_rows(attention, before)
    first, second = to_distribution(ours, attention.kind), to_distribution(theirs, before.kind)
    apart = (first - second).abs().sum(dim=-1) / 2
    return mask_undefined(apart.clamp_max(1), ~apart.isnan())
