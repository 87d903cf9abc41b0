"""How well do people agree with each other? What no map of theirs can be asked to exceed.

Each person in turn is left out and predicted by the others. A map can stand beside that number when
it is asked the same: to predict each person, not their mean, which is smoother than any of them.

    ceiling(nss, truth.people, truth.fixations)        # people by people
    against_each(nss, attention, truth.fixations)      # people by a map

It is a ceiling of one person's worth of the others: with more people they would predict better, and
a model that knows more than fourteen people may pass it (Kümmerer, Wallis and Bethge 2015).
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from einops import rearrange, repeat

from overt.attention import AttentionMap, Form, Kind
from overt.measure.measured import Measured, below_zero, defined

Compare = Callable[[AttentionMap, AttentionMap], Measured]


def left_out(people: AttentionMap) -> AttentionMap:
    """For each person the mean of all others, one query a person.

    Each of the others counts the same: maps are shares of what a person did. A person who is not
    there, who did nothing, whose map has a weight below 0, or who was alone, is predicted by nobody
    and sees no key.
    """
    _one_head(people)
    if people.kind is Kind.SIGNED:
        raise ValueError("signed weights have no mean that is a map; take their positive part")
    seen = people.visible
    weights = people.weights.double()[:, 0, 0].masked_fill(~seen, 0)
    weights = weights.masked_fill(below_zero(weights)[..., None], 0)
    total = weights.sum(dim=-1, keepdim=True)
    there = (total > 0).double()
    shares = weights / torch.where(total > 0, total, 1)
    rest = (shares.sum(dim=1, keepdim=True) - shares).clamp_min(0)
    count = there.sum(dim=1, keepdim=True) - there
    mean = there * rest / count.clamp_min(1)
    # those who are there were shown the same keys
    shown = (seen & (total > 0)).any(dim=1, keepdim=True) & (there > 0) & (count > 0)
    values = torch.where(shown, mean, 0).to(people.weights.dtype)
    return replace(
        people,
        values=values[:, None, None],
        mask=shown,
        kind=Kind.PROBABILITY,
        form=Form.PLAIN,
    )


def ceiling(compare: Compare, people: AttentionMap, truth: AttentionMap | None = None) -> Measured:
    """How well the others predict a person, a mean over people; one number a sample.

    `truth` is what each person is judged by, where it is not `people` themselves: for fixations,
    the counts that were not smoothed. Not defined for a sample with fewer than two people.
    """
    return _over_people(compare, left_out(people), people if truth is None else truth)


def against_each(compare: Compare, attention: AttentionMap, people: AttentionMap) -> Measured:
    """How well a map predicts each person, a mean over people: what stands beside a ceiling.

    People who are not there, or did nothing, do not count.
    """
    if attention.values.shape[1:4] != (1, 1, 1):
        raise ValueError(
            f"a map of one row a sample predicts people, and this one has "
            f"{tuple(attention.values.shape[1:4])} layers, heads and queries"
        )
    count = people.values.shape[3]
    mask = attention.visible
    wide = replace(
        attention,
        values=repeat(attention.values, "b l h 1 k -> b l h p k", p=count),
        queries=people.queries,
        mask=repeat(mask, "b 1 k -> b p k", p=count),
    )
    return _over_people(compare, wide, people)


def _over_people(compare: Compare, maps: AttentionMap, people: AttentionMap) -> Measured:
    _one_head(people)
    if maps.values.shape != people.values.shape:
        raise ValueError(
            f"maps of {tuple(maps.values.shape)} do not predict people of "
            f"{tuple(people.values.shape)}"
        )
    numbers = compare(maps.each_row(), people.each_row())
    did = (people.weights.abs().sum(dim=-1)[:, 0, 0] > 0) & people.rows & maps.rows
    each = rearrange(numbers, "(b p) -> b p", p=people.values.shape[3]).double()
    each = torch.where(did, each, torch.nan)
    return defined(each.nanmean(dim=1), ~each.isnan().all(dim=1))


def _one_head(people: AttentionMap) -> None:
    if people.values.shape[1:3] != (1, 1):
        raise ValueError(
            "people are the queries of one layer and one head, and this map has "
            f"{people.values.shape[1]} and {people.values.shape[2]}"
        )
