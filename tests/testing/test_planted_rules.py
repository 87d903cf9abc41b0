"""Planted rules: their answers by hand, their truthful maps, and their samples."""

import itertools

import pytest
import torch

from overt.testing import RuleModel, planted_rules, planted_samples
from overt.testing.planted_rules import CELLS, FAR, FIRST, SECOND

RULES = {rule.name: rule for rule in planted_rules(0)}


def values(first: float, second: float) -> torch.Tensor:
    found = torch.full((1, CELLS), 0.7)
    found[0, FIRST], found[0, SECOND] = first, second
    return found


@pytest.mark.parametrize(
    ("name", "first", "second", "expected"),
    [
        *(("one cell", 1, 0, 1), ("one cell", 0, 1, 0), ("shortcut", 0, 1, 0)),
        *(("or", 1, 1, 1), ("or", 1, 0, 1), ("or", 0, -1, -1), ("or", 0, 0, 0)),
        *(("and", 1, 1, 1), ("and", -1, -1, -1), ("and", 1, 0, 0), ("and", 0, -1, 0)),
        *(("distractor", -1, 0, -1), ("and", 0, 0, 0)),
    ],
)
def test_rules_by_hand(name: str, first: float, second: float, expected: float) -> None:
    assert RULES[name].rule(values(first, second)).tolist() == [expected]


@pytest.mark.parametrize("name", RULES)
def test_only_cells_of_the_truth_change_the_answer(name: str) -> None:
    rule = RULES[name]
    x = torch.randn(1, CELLS, generator=torch.Generator().manual_seed(1))
    x[0, [FIRST, SECOND]] = 1.0
    used = {
        cell
        for cell, shown in itertools.product(range(CELLS), ((FIRST,), (FIRST, SECOND)))
        if _changes(rule, x, cell, shown)
    }
    assert used == set(rule.truth(x)[0].nonzero()[:, 0].tolist())


def _changes(rule, x: torch.Tensor, cell: int, shown: tuple[int, ...]) -> bool:
    """Return whether removing a cell changes the score, with some evidence present."""
    given = x.clone()
    given[0, [one for one in (FIRST, SECOND) if one not in shown]] = 0
    without = given.clone()
    without[0, cell] = 0
    return bool((rule.rule(given) != rule.rule(without)).any()) or (
        rule.name == "or" and cell == SECOND and shown == (FIRST,)
        and bool(rule.rule(_only(x, SECOND)) != 0)
    )  # fmt: skip


def _only(x: torch.Tensor, cell: int) -> torch.Tensor:
    found = torch.zeros_like(x)
    found[0, cell] = x[0, cell]
    return found


@pytest.mark.parametrize("name", RULES)
def test_samples_have_the_answer_of_the_rule_and_maps_of_shares(name: str) -> None:
    rule = RULES[name]
    batch, maps = planted_samples(rule, 6, 3)
    model = RuleModel(rule, maps["truthful"]).eval()
    output = model(batch)
    assert batch.labels is not None and batch.target is not None
    assert output.prediction.argmax(dim=1).tolist() == batch.labels.tolist()
    assert torch.equal(output.attention[0].values, maps["truthful"].values)
    truth = rule.truth(model.encode(batch).values[..., 0])
    shares = 0.95 * truth / truth.sum(dim=1, keepdim=True)
    away = maps["truthful"].weights.flatten(1) - shares
    assert bool((away >= -1e-6).all())
    torch.testing.assert_close(away.sum(dim=1), torch.full((6,), 0.05))
    for one in maps.values():
        one.check()
    torch.testing.assert_close(maps["half"].weights[0], maps["truthful"].weights[0],
                               atol=0.02, rtol=0)  # fmt: skip
    assert batch.target.weights[0].flatten().nonzero()[:, 0].tolist() == list(rule.annotated)
    again, _ = planted_samples(rule, 6, 3)
    assert again.images is not None and torch.equal(again.images, batch.images)


def test_the_distractor_is_stronger_than_the_evidence() -> None:
    batch, maps = planted_samples(RULES["distractor"], 64, 0)
    assert batch.images is not None
    assert float(batch.images.abs().max()) > 3
    assert maps["strong cell"].weights[0].flatten().argmax() == FAR
