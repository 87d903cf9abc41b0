from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from overt.errors import BadInput
from overt.models.hard import aggregate
from overt.models.hard.aggregate import (
    Aggregate,
    Mean,
    Pairwise,
    Relation,
    Sum,
    aggregate_from,
    pairs_of,
)
from overt.models.hard.selection import (
    Kept,
    Standing,
    filled_up,
    gather,
    keep_above_uniform,
    keep_all,
    keep_top,
    presence,
    straight_through,
)

CELL, ASKED = 6, 5
MAKE = {
    "sum": partial(Sum, CELL),
    "mean": partial(Mean, CELL),
    "pairwise": partial(Pairwise, CELL, size=8, heads=2),
    "literal": partial(Pairwise, CELL, size=8, heads=2, scale=1.0),
    "relation": partial(Relation, CELL, ASKED, hidden=7, layers=3),
}


def made(name: str) -> Aggregate:
    torch.manual_seed(0)
    return MAKE[name]().double()


@pytest.fixture
def cells(generator):
    return torch.randn(5, 9, CELL, generator=generator, dtype=torch.float64)


@pytest.fixture
def question(generator):
    return torch.randn(5, ASKED, generator=generator, dtype=torch.float64)


@pytest.fixture
def ragged(cells):
    """Samples that keep 1, 9, 3, 0 and 2 cells."""
    kept = torch.zeros(5, 9, dtype=torch.bool)
    for row, count in enumerate((1, 9, 3, 0, 2)):
        kept[row] = keep_top(presence(cells), count)[row] if count else False
    return kept


# --- slow copies, for the cells of one sample


def slow_sum(module, cells, question):
    return cells.sum(0)


def slow_mean(module, cells, question):
    return cells.sum(0) / max(1, len(cells))


def slow_pairwise(module, cells, question):
    """Equation 7 as it stands: a query, a key and a value for every cell of every head."""
    size = module.width // module.heads
    total = []
    for head in range(module.heads):
        part = slice(head * size, (head + 1) * size)
        layers = (*module.query_and_key.weight.chunk(2), module.value.weight)
        query, key, value = ([layer[part] @ cell for cell in cells] for layer in layers)
        seen = torch.zeros(size, dtype=cells.dtype)
        for one in query:
            raised = [(module.scale * (one @ other)).exp() for other in key]
            for share, what in zip(raised, value, strict=True):
                seen = seen + share / sum(raised) * what
        total.append(seen)
    return torch.cat(total)


def slow_relation(module, cells, question):
    """The network on [a; b; question], pair by pair, first layer and all."""
    whole = nn.Sequential(module.first, nn.ReLU(), *module.rest)
    total = torch.zeros(module.width, dtype=cells.dtype)
    for one in cells:
        for other in cells:
            total = total + whole(torch.cat([one, other, question]))
    return total


SLOW = {
    "sum": slow_sum,
    "mean": slow_mean,
    "pairwise": slow_pairwise,
    "literal": slow_pairwise,
    "relation": slow_relation,
}


def slowly(name, module, cells, kept, question):
    rows = zip(cells, kept, question, strict=True)
    return torch.stack([SLOW[name](module, row[on], asked) for row, on, asked in rows])


# --- the same, however it is worked out


@pytest.mark.parametrize("name", MAKE)
def test_han_2_all_cells_are_the_plain_aggregation(cells, question, name):
    module = made(name)
    everything = keep_top(presence(cells), 9)
    found = module(gather(cells, everything), question)
    assert found.equal(module(Kept(cells), question))  # to the last bit
    torch.testing.assert_close(found, slowly(name, module, cells, everything, question))


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("count", [1, 4, 8])
def test_a_fixed_number_of_cells_agrees_with_a_slow_copy(cells, question, name, count):
    module, kept = made(name), keep_top(presence(cells), count)
    found = module(gather(cells, kept), question)
    torch.testing.assert_close(found, slowly(name, module, cells, kept, question))


@pytest.mark.parametrize("spare", [-1.0, 1e9], ids=["packed", "filled up"])
@pytest.mark.parametrize("name", MAKE)
def test_han_10_masked_packed_and_filled_up_agree(
    cells, question, ragged, name, spare, monkeypatch
):
    """A 0/1 weight on every cell, and the gathered subset both ways, are the same function."""
    monkeypatch.setattr(aggregate, "SPARE", spare)
    module = made(name)
    expected = slowly(name, module, cells, ragged, question)
    masked = module(Kept(cells, weights=ragged.to(cells.dtype)), question)
    gathered = module(gather(cells, ragged), question)
    torch.testing.assert_close(masked, expected)
    torch.testing.assert_close(gathered, expected)
    torch.testing.assert_close(module(filled_up(cells, ragged), question), expected)
    torch.testing.assert_close(module(Standing(cells, ragged), question), expected)


@pytest.mark.parametrize("spare", [-1.0, 1e9], ids=["packed", "filled up"])
@pytest.mark.parametrize("name", MAKE)
def test_gradients_agree_and_reach_kept_cells_only(
    cells, question, ragged, name, spare, monkeypatch
):
    monkeypatch.setattr(aggregate, "SPARE", spare)
    module, cells = made(name), cells.requires_grad_()
    up = torch.randn(5, module.width, dtype=cells.dtype)

    def gradients(value):
        wanted = [cells, *module.parameters()]
        return torch.autograd.grad((value * up).sum(), wanted, allow_unused=True)

    expected = gradients(slowly(name, module, cells, ragged, question))
    for way in (gather, filled_up, Standing):
        found = gradients(module(way(cells, ragged), question))
        for one, two in zip(found, expected, strict=True):
            torch.testing.assert_close(one, two)
        assert (found[0][~ragged] == 0).all()


@pytest.mark.parametrize(
    "way", [gather, filled_up, Standing], ids=["gather", "filled_up", "standing"]
)
@pytest.mark.parametrize("name", MAKE)
def test_no_cells_at_all_are_finite_forward_and_backward(cells, question, name, way):
    module, cells = made(name), cells.requires_grad_()
    found = module(way(cells, torch.zeros(5, 9, dtype=torch.bool)), question)
    assert (found == 0).all()
    found.sum().backward()
    assert cells.grad is not None
    assert (cells.grad == 0).all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize("name", MAKE)
def test_han_13_straight_through_is_hard_forward_with_gradient_for_dropped_cells(
    cells, question, name
):
    module, cells = made(name), cells.requires_grad_()
    scores = presence(cells)
    kept = keep_top(scores.detach(), 3)
    weights = straight_through(scores, kept, 0.0)
    found = module(Kept(cells, weights=weights), question)
    torch.testing.assert_close(found, module(gather(cells, kept), question))
    found.sum().backward()
    assert cells.grad is not None
    assert (cells.grad[~kept].abs().sum(-1) > 0).all()


def test_pairwise_of_far_scores_is_finite(question):
    module = made("literal")
    cells = 1e3 * torch.randn(5, 9, CELL, dtype=torch.float64)
    kept = keep_top(-presence(cells), 3)  # the dropped cells score far above the kept ones
    for found in (gather(cells, kept), Kept(cells, weights=kept.double())):
        assert module(found, question).isfinite().all()


def test_pairs_are_all_ordered_pairs_of_each_sample():
    counts = (2, 0, 3)
    first, second, sample = pairs_of(counts)
    found = list(zip(first.tolist(), second.tolist(), sample.tolist(), strict=True))
    expected = [(i, j, 0) for i in range(2) for j in range(2)]
    expected += [(i, j, 2) for i in range(2, 5) for j in range(2, 5)]
    assert found == expected


def test_han_11_a_quarter_of_the_cells_is_a_sixteenth_of_the_pairs():
    assert len(pairs_of((64,))[0]) == 4096
    assert len(pairs_of((16,))[0]) == 256


class Made(TorchDispatchMode):
    """Counts the tensors of so many numbers that operations make: new ones, no views."""

    def __init__(self, numbers):
        super().__init__()
        self.numbers, self.count = numbers, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        fresh = not function.is_view and not any(one is made for one in args)
        if fresh and isinstance(made, torch.Tensor) and made.numel() == self.numbers:
            self.count += 1
        return made


@pytest.mark.parametrize("weighed", [False, True])
def test_pairs_are_made_no_more_often_than_they_must(weighed):
    """Once a layer forward; backward once a layer by its product and once by its ReLU."""
    b, m, hidden, layers = 3, 5, 16, 4
    net = Relation(6, 2, hidden, layers)
    weights = torch.rand(b, m, requires_grad=True) if weighed else None
    kept = Kept(torch.randn(b, m, 6, requires_grad=True), weights)
    with Made(b * m * m * hidden) as made:
        net(kept, torch.randn(b, 2)).sum().backward()
    assert made.count <= 3 * layers


def test_packing_is_taken_when_filling_up_is_waste():
    for power in (1, 2):
        assert not aggregate._worth_packing((10, 10, 10, 9), power)
        assert aggregate._worth_packing((10, 2, 2, 2), power)


@pytest.mark.parametrize("name", ["pairwise", "relation"])
def test_what_is_packed_runs_on_kept_cells_alone(cells, question, ragged, name, monkeypatch):
    """The first layer sees 15 cells when packed, and 5 x 9 when filled up."""
    module, seen = made(name), []
    chosen = gather(cells, ragged)
    linear = nn.functional.linear

    def counting(rows, *rest):
        seen.append(rows.shape[:-1].numel())
        return linear(rows, *rest)

    monkeypatch.setattr(nn.functional, "linear", counting)
    for spare, expected in ((-1.0, 15), (1e9, 45)):
        seen.clear()
        monkeypatch.setattr(aggregate, "SPARE", spare)
        module.filled_up(chosen) if name == "pairwise" else module(chosen, question)
        assert seen[0] == expected


@pytest.mark.parametrize("way", ["packed", "fixed"])
@pytest.mark.parametrize("name", MAKE)
def test_flops_are_those_that_torch_counts(cells, question, ragged, name, way, monkeypatch):
    monkeypatch.setattr(aggregate, "SPARE", -1.0)
    monkeypatch.setattr(aggregate, "FEW", 0)  # else products of queries and keys are filled up
    module = made(name)
    kept = ragged if way == "packed" else keep_top(presence(cells), 4)
    chosen = gather(cells, kept)
    with FlopCounterMode(display=False) as counter:
        module(chosen, question)
    expected = module.flops(kept.sum(-1).double()).sum()
    assert counter.get_total_flops() == int(expected)


@pytest.mark.parametrize("name", MAKE)
def test_flops_fall_with_the_cells(name):
    module = made(name)
    every, some = module.flops(torch.tensor([64.0, 16.0])).tolist()
    assert every == some == 0 if name in ("sum", "mean") else every > 3.5 * some


def test_han_12_selection_adds_no_parameters(cells, question):
    """The same module serves all cells, a fixed number, and as many as are above uniform."""
    module = made("pairwise")
    before = sum(p.numel() for p in module.parameters())
    for rule in (keep_all, partial(keep_top, count=3), keep_above_uniform):
        module(gather(cells, rule(presence(cells))), question)
    assert sum(p.numel() for p in module.parameters()) == before == 3 * CELL * 8


@pytest.mark.parametrize("name", MAKE)
def test_half_precision_stays_near(cells, question, ragged, name):
    module = made(name)
    expected = module(gather(cells, ragged), question)
    near = module.bfloat16()
    found = near(gather(cells.bfloat16(), ragged), question.bfloat16())
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(
        found.double(), expected, rtol=0.1, atol=0.1 + 0.02 * expected.abs().max().item()
    )


@pytest.mark.parametrize("name", ["sum", "relation"])
def test_many_rows_are_not_lost_in_half_precision(name):
    """2,500 pairs, or 50 cells, added one by one: sixteen bits would stop counting at 256."""
    module = made(name).float()
    cells, question = 1 + torch.rand(2, 50, CELL), torch.rand(2, ASKED)
    kept = torch.ones(2, 50, dtype=torch.bool)
    kept[1, 2:] = False
    expected = module(gather(cells, kept), question)
    with torch.autocast("cpu", torch.bfloat16):
        found = module(gather(cells.bfloat16(), kept), question)
    torch.testing.assert_close(found.float(), expected, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("name", MAKE)
def test_an_aggregation_comes_back_from_its_values(name):
    module = made(name)
    again = aggregate_from(module.config())
    assert isinstance(again, Aggregate)
    assert again.config() == module.config()
    assert [p.shape for p in again.parameters()] == [p.shape for p in module.parameters()]


def test_what_is_not_known_is_refused():
    with pytest.raises(BadInput, match="kind 'max' is not one of sum, mean, pairwise, relation"):
        aggregate_from({"kind": "max"})
    with pytest.raises(ValueError, match="7 features do not part into 2 heads"):
        Pairwise(4, size=7)


def test_on_a_card_a_large_known_number_of_cells_is_gathered(question, monkeypatch):
    """As measured: kernels that need not know the number are quicker up to about 48 cells."""
    asked = []
    monkeypatch.setattr(aggregate.card, "can_look", lambda *given: bool(asked.append(given)))
    cells = torch.randn(5, 60, 4)
    module = Pairwise(4, 4, heads=2)
    for count, times in ((aggregate.STANDING, 1), (aggregate.STANDING + 1, 1), (None, 2)):
        kept = keep_top(presence(cells), count or 50)
        module(Standing(cells, kept, count), question.float())
        assert len(asked) == times
