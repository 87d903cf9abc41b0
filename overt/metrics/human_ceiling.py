"""Agreement of people with each other: the ceiling for any map of human attention.

Each person in turn is left out and predicted by the others. A map can be compared with that ceiling
only if it has the same task: to predict each person, not their mean, which is smoother than any of
them.

    inter_human_agreement(nss, truth.people, truth.fixations)       # people by people
    agreement_with_each_human(nss, attention, truth.fixations)      # people by a map

The ceiling depends on the number of people: with more of them, the others predict better. A model
that has learned from more than fourteen people may exceed it (Kümmerer, Wallis and Bethge 2015).
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from einops import rearrange, repeat

from overt.attention import AttentionMap, Form, Kind
from overt.metrics.metric import SampleScores, invalid_distribution, mask_undefined

Compare = Callable[[AttentionMap, AttentionMap], SampleScores]


def leave_one_person_out(people: AttentionMap) -> AttentionMap:
    """Average, for each person, the maps of all others; one query per person.

    All of the others have the same weight: each map is normalized first. A person who is missing,
    has an empty map or a negative weight, or is the only one, gets no prediction: all keys of that
    row are hidden.
    """
    _check_one_head(people)
    if people.kind is Kind.SIGNED:
        raise ValueError(
            "signed weights have no mean that is a map: take their positive part first"
        )
    seen = people.visible
    weights = people.weights.double()[:, 0, 0].masked_fill(~seen, 0)
    weights = weights.masked_fill(invalid_distribution(weights)[..., None], 0)
    total = weights.sum(dim=-1, keepdim=True)
    there = (total > 0).double()
    shares = weights / torch.where(total > 0, total, 1)
    # the sum of all people less the person: no loop over people
    rest = (shares.sum(dim=1, keepdim=True) - shares).clamp_min(0)
    count = there.sum(dim=1, keepdim=True) - there
    mean = there * rest / count.clamp_min(1)
    # all people of a sample were shown the same keys
    shown = (seen & (total > 0)).any(dim=1, keepdim=True) & (there > 0) & (count > 0)
    values = torch.where(shown, mean, 0).to(people.weights.dtype)
    return replace(
        people,
        values=values[:, None, None],
        mask=shown,
        kind=Kind.PROBABILITY,
        form=Form.PLAIN,
    )


def inter_human_agreement(
    compare: Compare, people: AttentionMap, truth: AttentionMap | None = None
) -> SampleScores:
    """Compute how well people predict a left-out person, averaged over people.

    Args:
        compare: A metric of two maps.
        people: Maps of one layer and head, one query per person.
        truth: What each person is scored against, if not `people`: for fixations, the counts before
            smoothing.

    Returns:
        One score per sample; NaN with fewer than two people.

    Example:
        >>> from overt import words
        >>> from overt.metrics import sim
        >>> drawn = torch.tensor([[[[[1.0, 1.0, 0.0, 0.0], [0.0, 1.0, 1.0, 0.0]]]]])  # two people
        >>> people = AttentionMap(drawn, words(4), words(2, "people"), kind=Kind.AMOUNT)
        >>> inter_human_agreement(sim, people)  # the two share one of two words
        tensor([0.5000])
    """
    return _mean_over_people(
        compare, leave_one_person_out(people), people if truth is None else truth
    )


def agreement_with_each_human(
    compare: Compare, attention: AttentionMap, people: AttentionMap
) -> SampleScores:
    """Compute how well a map predicts each person, averaged over people.

    The number to compare with `inter_human_agreement`. Missing people and empty maps do not count.

    Args:
        compare: A metric of two maps.
        attention: A map with one row per sample.
        people: Maps of one layer and head, one query per person.

    Returns:
        One score per sample.

    Raises:
        ValueError: `attention` has several layers, heads or queries.

    Example:
        >>> from overt import words
        >>> from overt.metrics import sim
        >>> drawn = torch.tensor([[[[[1.0, 1.0, 0.0, 0.0], [0.0, 1.0, 1.0, 0.0]]]]])  # two people
        >>> people = AttentionMap(drawn, words(4), words(2, "people"), kind=Kind.AMOUNT)
        >>> attention = AttentionMap.from_cells(torch.tensor([[0.25, 0.5, 0.25, 0.0]]), words(4))
        >>> agreement_with_each_human(sim, attention, people)  # min(1/4, 1/2) + 1/2 with each
        tensor([0.7500])
    """
    if attention.values.shape[1:4] != (1, 1, 1):
        raise ValueError(
            f"expected a map with one row per sample, got {tuple(attention.values.shape[1:4])} "
            "layers, heads and queries"
        )
    count = people.values.shape[3]
    mask = attention.visible
    wide = replace(
        attention,
        values=repeat(attention.values, "b l h 1 k -> b l h p k", p=count),
        queries=people.queries,
        mask=repeat(mask, "b 1 k -> b p k", p=count),
    )
    return _mean_over_people(compare, wide, people)


def _mean_over_people(compare: Compare, maps: AttentionMap, people: AttentionMap) -> SampleScores:
    _check_one_head(people)
    if maps.values.shape != people.values.shape:
        raise ValueError(
            f"maps and people must have the same shape, got {tuple(maps.values.shape)} and "
            f"{tuple(people.values.shape)}"
        )
    # any metric of one row per sample works: each person becomes a sample
    numbers = compare(maps.rows_as_samples(), people.rows_as_samples())
    # a missing person would score like an empty map
    did = (people.weights.abs().sum(dim=-1)[:, 0, 0] > 0) & people.rows & maps.rows
    each = rearrange(numbers, "(b p) -> b p", p=people.values.shape[3]).double()
    each = torch.where(did, each, torch.nan)
    return mask_undefined(each.nanmean(dim=1), ~each.isnan().all(dim=1))


def _check_one_head(people: AttentionMap) -> None:
    if people.values.shape[1:3] != (1, 1):
        raise ValueError(
            "people must be the queries of one layer and one head, got "
            f"{people.values.shape[1]} layers and {people.values.shape[2]} heads"
        )
