"""Human ceiling: leave-one-person-out agreement of human attention maps."""

import math
from dataclasses import replace

import pytest
import torch

from overt.attention import AttentionMap, Kind, words
from overt.metrics import auc_judd, cc, nss, spearman, token_auprc, uniform_map
from overt.metrics.human_ceiling import (
    agreement_with_each_human,
    inter_human_agreement,
    leave_one_person_out,
)

PEOPLE = [  # two samples, three people and four words; the second sample lacks the last person
    [[2.0, 0, 0, 2], [0, 0, 4, 0], [1, 1, 0, 0]],
    [[0, 3, 0, 1], [0, 1, 1, 0], [0, 0, 0, 0]],
]
PRESENT = [[True, True, True], [True, True, False]]


def people(table=PEOPLE, there=PRESENT) -> AttentionMap:
    values = torch.tensor(table)[:, None, None]
    _, _, _, p, k = values.shape
    mask = torch.tensor(there)[..., None].expand(len(table), p, k)
    return AttentionMap(values, words(k), words(p, name="people"), mask, Kind.AMOUNT)


def rows(table: list[list[float]]) -> AttentionMap:
    return AttentionMap.from_cells(torch.tensor(table).float(), words(len(table[0])))


def test_leave_one_person_out_matches_an_example_by_hand():
    found = leave_one_person_out(people()).check()
    assert found.kind is Kind.PROBABILITY
    wanted = [
        [[0.25, 0.25, 0.5, 0], [0.5, 0.25, 0, 0.25], [0.25, 0, 0.5, 0.25]],
        [[0, 0.5, 0.5, 0], [0, 0.75, 0, 0.25], [0, 0, 0, 0]],
    ]
    torch.testing.assert_close(found.values[:, 0, 0], torch.tensor(wanted))
    assert found.rows.tolist() == PRESENT


def test_a_single_person_has_no_ceiling():
    alone = people([[[1.0, 2], [0, 0]]], [[True, False]])
    assert not leave_one_person_out(alone).rows.any()
    assert inter_human_agreement(cc, alone).isnan().all()


def reference_ceiling(compare, sample: int) -> float:
    """Compute the ceiling person by person, without a batch."""
    table = [row for row, there in zip(PEOPLE[sample], PRESENT[sample], strict=True) if there]
    numbers = []
    for at, own in enumerate(table):
        rest = [other for place, other in enumerate(table) if place != at]
        shares = [[value / sum(other) for value in other] for other in rest]
        mean = [sum(column) / len(rest) for column in zip(*shares, strict=True)]
        numbers.append(float(compare(rows([mean]), rows([own]))))
    numbers = [number for number in numbers if not math.isnan(number)]
    return sum(numbers) / len(numbers)


@pytest.mark.parametrize("compare", [cc, spearman, nss, auc_judd, token_auprc])
def test_ceilings_agree_with_a_loop_over_people(compare):
    found = inter_human_agreement(compare, people())
    wanted = torch.tensor([reference_ceiling(compare, 0), reference_ceiling(compare, 1)])
    torch.testing.assert_close(found, wanted)


def test_people_can_be_compared_with_other_maps():
    counts = people([[[1.0, 0, 0, 1], [0, 0, 1, 0], [1, 0, 0, 0]], PEOPLE[1]])
    assert not torch.equal(
        inter_human_agreement(nss, people(), counts), inter_human_agreement(nss, people())
    )
    torch.testing.assert_close(
        inter_human_agreement(nss, people(), counts)[1], inter_human_agreement(nss, people())[1]
    )


@pytest.mark.parametrize("compare", [cc, nss])
def test_a_map_is_compared_with_each_person(compare):
    attention = rows([[0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1]])
    found = agreement_with_each_human(compare, attention, people())
    for sample in range(2):
        numbers = [
            compare(attention.select(torch.tensor([sample])), rows([own]))
            for own, there in zip(PEOPLE[sample], PRESENT[sample], strict=True)
            if there
        ]
        torch.testing.assert_close(found[sample], torch.cat(numbers).mean())


def test_the_ceiling_of_two_people_matches_an_example_by_hand():
    """With two people the others are one map, so the ceiling is easy to compute by hand."""
    two = people([[[1.0, 3, 0, 0], [0, 2, 1, 1]]], [[True, True]])
    both = [
        cc(rows([[0, 0.5, 0.25, 0.25]]), rows([[1.0, 3, 0, 0]])),
        cc(rows([[0.25, 0.75, 0, 0]]), rows([[0.0, 2, 1, 1]])),
    ]
    torch.testing.assert_close(inter_human_agreement(cc, two), torch.stack(both).mean(dim=0))


def test_padding_is_not_counted():
    wide = people()
    mask = wide.visible.clone()
    mask[1, :, 3] = False
    hidden = replace(wide, mask=mask)
    found = leave_one_person_out(hidden).check()
    assert not found.visible[1, :, 3].any()
    torch.testing.assert_close(
        found.values[1, 0, 0], torch.tensor([[0, 0.5, 0.5, 0], [0, 1.0, 0, 0], [0, 0, 0, 0]])
    )


def test_invalid_maps_of_people_raise():
    with pytest.raises(ValueError, match="row per sample"):
        agreement_with_each_human(cc, leave_one_person_out(people()), people())
    with pytest.raises(ValueError, match=r"one layer.*one head"):
        leave_one_person_out(replace(people(), values=people().values.repeat(1, 2, 1, 1, 1)))
    with pytest.raises(ValueError, match="signed"):
        leave_one_person_out(replace(people(), kind=Kind.SIGNED))
    with pytest.raises(ValueError, match="same shape"):
        inter_human_agreement(cc, people(), uniform_map(people().select(torch.tensor([0]))))


def test_a_person_with_negative_weights_counts_as_empty():
    wrong = people([[[2.0, 0, 0, 2], [0, -1, 4, 0], [1, 1, 0, 0]]], [[True] * 3])
    nothing = people([[[2.0, 0, 0, 2], [0, 0, 0, 0], [1, 1, 0, 0]]], [[True] * 3])
    ours, theirs = leave_one_person_out(wrong), leave_one_person_out(nothing)
    assert torch.equal(ours.weights, theirs.weights) and torch.equal(ours.visible, theirs.visible)


@pytest.mark.parametrize("wrong", [torch.inf, torch.nan])
def test_a_person_with_non_finite_weights_counts_as_empty(wrong):
    table = [[0.2, 0.8], [0.5, 0.5], [wrong, 0.5]]
    values = torch.tensor(table)[None, None, None]
    made = AttentionMap(values, words(2), words(3), kind=Kind.AMOUNT)
    found = leave_one_person_out(made)
    torch.testing.assert_close(found.weights[0, 0, 0, :2], torch.tensor([[0.5, 0.5], [0.2, 0.8]]))
    assert found.rows.tolist() == [[True, True, False]]
