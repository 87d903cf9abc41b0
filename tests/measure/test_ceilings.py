import math
from dataclasses import replace

import pytest
import torch

from overt.attention import AttentionMap, Kind, words
from overt.measure import auc_judd, cc, nss, spearman, token_auprc, uniform
from overt.measure.ceilings import against_each, ceiling, left_out

PEOPLE = [  # two samples of three people and four words; the last of the second is not there
    [[2.0, 0, 0, 2], [0, 0, 4, 0], [1, 1, 0, 0]],
    [[0, 3, 0, 1], [0, 1, 1, 0], [0, 0, 0, 0]],
]
THERE = [[True, True, True], [True, True, False]]


def people(table=PEOPLE, there=THERE) -> AttentionMap:
    values = torch.tensor(table)[:, None, None]
    _, _, _, p, k = values.shape
    mask = torch.tensor(there)[..., None].expand(len(table), p, k)
    return AttentionMap(values, words(k), words(p, name="people"), mask, Kind.AMOUNT)


def rows(table: list[list[float]]) -> AttentionMap:
    return AttentionMap.from_cells(torch.tensor(table).float(), words(len(table[0])))


def test_others_by_hand():
    found = left_out(people()).check()
    assert found.kind is Kind.PROBABILITY
    wanted = [
        [[0.25, 0.25, 0.5, 0], [0.5, 0.25, 0, 0.25], [0.25, 0, 0.5, 0.25]],
        [[0, 0.5, 0.5, 0], [0, 0.75, 0, 0.25], [0, 0, 0, 0]],
    ]
    torch.testing.assert_close(found.values[:, 0, 0], torch.tensor(wanted))
    assert found.rows.tolist() == THERE


def test_one_who_was_alone_is_predicted_by_nobody():
    alone = people([[[1.0, 2], [0, 0]]], [[True, False]])
    assert not left_out(alone).rows.any()
    assert ceiling(cc, alone).isnan().all()


def slow(compare, sample: int) -> float:
    """Person by person, without a batch."""
    table = [row for row, there in zip(PEOPLE[sample], THERE[sample], strict=True) if there]
    numbers = []
    for at, own in enumerate(table):
        rest = [other for place, other in enumerate(table) if place != at]
        shares = [[value / sum(other) for value in other] for other in rest]
        mean = [sum(column) / len(rest) for column in zip(*shares, strict=True)]
        numbers.append(float(compare(rows([mean]), rows([own]))))
    numbers = [number for number in numbers if not math.isnan(number)]
    return sum(numbers) / len(numbers)


@pytest.mark.parametrize("compare", [cc, spearman, nss, auc_judd, token_auprc])
def test_ceilings_agree_with_asking_people_one_by_one(compare):
    found = ceiling(compare, people())
    wanted = torch.tensor([slow(compare, 0), slow(compare, 1)])
    torch.testing.assert_close(found, wanted)


def test_people_may_be_judged_by_something_else():
    counts = people([[[1.0, 0, 0, 1], [0, 0, 1, 0], [1, 0, 0, 0]], PEOPLE[1]])
    assert not torch.equal(ceiling(nss, people(), counts), ceiling(nss, people()))
    torch.testing.assert_close(ceiling(nss, people(), counts)[1], ceiling(nss, people())[1])


@pytest.mark.parametrize("compare", [cc, nss])
def test_a_map_is_asked_the_same(compare):
    attention = rows([[0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1]])
    found = against_each(compare, attention, people())
    for sample in range(2):
        numbers = [
            compare(attention.select(torch.tensor([sample])), rows([own]))
            for own, there in zip(PEOPLE[sample], THERE[sample], strict=True)
            if there
        ]
        torch.testing.assert_close(found[sample], torch.cat(numbers).mean())


def test_the_mean_of_the_others_scores_the_ceiling_itself():
    """Two people: the others are one map, so judging by hand and by the ceiling is one thing."""
    two = people([[[1.0, 3, 0, 0], [0, 2, 1, 1]]], [[True, True]])
    both = [
        cc(rows([[0, 0.5, 0.25, 0.25]]), rows([[1.0, 3, 0, 0]])),
        cc(rows([[0.25, 0.75, 0, 0]]), rows([[0.0, 2, 1, 1]])),
    ]
    torch.testing.assert_close(ceiling(cc, two), torch.stack(both).mean(dim=0))


def test_padding_is_no_word():
    wide = people()
    mask = wide.visible.clone()
    mask[1, :, 3] = False
    hidden = replace(wide, mask=mask)
    found = left_out(hidden).check()
    assert not found.visible[1, :, 3].any()
    torch.testing.assert_close(
        found.values[1, 0, 0], torch.tensor([[0, 0.5, 0.5, 0], [0, 1.0, 0, 0], [0, 0, 0, 0]])
    )


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(ValueError, match="one row a sample predicts people"):
        against_each(cc, left_out(people()), people())
    with pytest.raises(ValueError, match="one layer and one head"):
        left_out(replace(people(), values=people().values.repeat(1, 2, 1, 1, 1)))
    with pytest.raises(ValueError, match="signed"):
        left_out(replace(people(), kind=Kind.SIGNED))
    with pytest.raises(ValueError, match="do not predict people"):
        ceiling(cc, people(), uniform(people().select(torch.tensor([0]))))


def test_a_person_with_weights_below_zero_is_as_one_who_did_nothing():
    wrong = people([[[2.0, 0, 0, 2], [0, -1, 4, 0], [1, 1, 0, 0]]], [[True] * 3])
    nothing = people([[[2.0, 0, 0, 2], [0, 0, 0, 0], [1, 1, 0, 0]]], [[True] * 3])
    ours, theirs = left_out(wrong), left_out(nothing)
    assert torch.equal(ours.weights, theirs.weights) and torch.equal(ours.visible, theirs.visible)
