"""Aggregation of selected cells: slow references, packing and padding, FLOPs, configs."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from overt.errors import UserError
from overt.nn.hard_attention import aggregate
from overt.nn.hard_attention.aggregate import (
    Aggregation,
    MeanAggregation,
    NonLocalAggregation,
    RelationAggregation,
    SumAggregation,
    aggregation_from_config,
    cell_pairs,
)
from overt.nn.hard_attention.selection import (
    CellsInPlace,
    PaddedCells,
    gather_cells,
    keep_above_uniform,
    keep_all,
    keep_top,
    pad_cells,
    presence,
    straight_through,
)

CELL, QUESTION = 6, 5
AGGREGATIONS = {
    "sum": partial(SumAggregation, CELL),
    "mean": partial(MeanAggregation, CELL),
    "pairwise": partial(NonLocalAggregation, CELL, size=8, heads=2),
    "literal": partial(NonLocalAggregation, CELL, size=8, heads=2, scale=1.0),
    "relation": partial(RelationAggregation, CELL, QUESTION, hidden=7, layers=3),
}


def make_aggregation(name: str) -> Aggregation:
    torch.manual_seed(0)
    return AGGREGATIONS[name]().double()


@pytest.fixture
def cells(generator):
    return torch.randn(5, 9, CELL, generator=generator, dtype=torch.float64)


@pytest.fixture
def question(generator):
    return torch.randn(5, QUESTION, generator=generator, dtype=torch.float64)


@pytest.fixture
def unequal_kept(cells):
    """Keep 1, 9, 3, 0 and 2 cells of the five samples."""
    kept = torch.zeros(5, 9, dtype=torch.bool)
    for row, count in enumerate((1, 9, 3, 0, 2)):
        kept[row] = keep_top(presence(cells), count)[row] if count else False
    return kept


# --- reference implementations, for the cells of one sample


def slow_sum(module, cells, question):
    return cells.sum(0)


def slow_mean(module, cells, question):
    return cells.sum(0) / max(1, len(cells))


def slow_pairwise(module, cells, question):
    """Equation 7 literally: a query, a key and a value for each cell of each head."""
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
    """Apply the full network to [a; b; question] pair by pair."""
    whole = nn.Sequential(module.first, nn.ReLU(), *module.rest)
    total = torch.zeros(module.width, dtype=cells.dtype)
    for one in cells:
        for other in cells:
            total = total + whole(torch.cat([one, other, question]))
    return total


REFERENCES = {
    "sum": slow_sum,
    "mean": slow_mean,
    "pairwise": slow_pairwise,
    "literal": slow_pairwise,
    "relation": slow_relation,
}


def reference_of_batch(name, module, cells, kept, question):
    rows = zip(cells, kept, question, strict=True)
    return torch.stack([REFERENCES[name](module, row[on], asked) for row, on, asked in rows])


# --- all ways of computing agree


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_han_2_keeping_all_cells_equals_the_plain_aggregation(cells, question, name):
    module = make_aggregation(name)
    everything = keep_top(presence(cells), 9)
    found = module(gather_cells(cells, everything), question)
    assert found.equal(module(PaddedCells(cells), question))  # to the last bit
    torch.testing.assert_close(found, reference_of_batch(name, module, cells, everything, question))


@pytest.mark.parametrize("name", AGGREGATIONS)
@pytest.mark.parametrize("count", [1, 4, 8])
def test_a_fixed_number_of_cells_agrees_with_the_reference(cells, question, name, count):
    module, kept = make_aggregation(name), keep_top(presence(cells), count)
    found = module(gather_cells(cells, kept), question)
    torch.testing.assert_close(found, reference_of_batch(name, module, cells, kept, question))


@pytest.mark.parametrize("spare", [-1.0, 1e9], ids=["packed", "padded"])
@pytest.mark.parametrize("name", AGGREGATIONS)
def test_han_10_masked_packed_and_padded_agree(
    cells, question, unequal_kept, name, spare, monkeypatch
):
    """0/1 weights on all cells, and the kept cells packed or padded, are the same function."""
    monkeypatch.setattr(aggregate, "MAX_PADDING", spare)
    module = make_aggregation(name)
    expected = reference_of_batch(name, module, cells, unequal_kept, question)
    masked = module(PaddedCells(cells, weights=unequal_kept.to(cells.dtype)), question)
    gathered = module(gather_cells(cells, unequal_kept), question)
    torch.testing.assert_close(masked, expected)
    torch.testing.assert_close(gathered, expected)
    torch.testing.assert_close(module(pad_cells(cells, unequal_kept), question), expected)
    torch.testing.assert_close(module(CellsInPlace(cells, unequal_kept), question), expected)


@pytest.mark.parametrize("spare", [-1.0, 1e9], ids=["packed", "padded"])
@pytest.mark.parametrize("name", AGGREGATIONS)
def test_gradients_agree_and_reach_kept_cells_only(
    cells, question, unequal_kept, name, spare, monkeypatch
):
    monkeypatch.setattr(aggregate, "MAX_PADDING", spare)
    module, cells = make_aggregation(name), cells.requires_grad_()
    up = torch.randn(5, module.width, dtype=cells.dtype)

    def gradients(value):
        wanted = [cells, *module.parameters()]
        return torch.autograd.grad((value * up).sum(), wanted, allow_unused=True)

    expected = gradients(reference_of_batch(name, module, cells, unequal_kept, question))
    for way in (gather_cells, pad_cells, CellsInPlace):
        found = gradients(module(way(cells, unequal_kept), question))
        for one, two in zip(found, expected, strict=True):
            torch.testing.assert_close(one, two)
        assert (found[0][~unequal_kept] == 0).all()


@pytest.mark.parametrize(
    "way", [gather_cells, pad_cells, CellsInPlace], ids=["gather", "padded", "in_place"]
)
@pytest.mark.parametrize("name", AGGREGATIONS)
def test_samples_without_cells_are_finite_forward_and_backward(cells, question, name, way):
    module, cells = make_aggregation(name), cells.requires_grad_()
    found = module(way(cells, torch.zeros(5, 9, dtype=torch.bool)), question)
    assert (found == 0).all()
    found.sum().backward()
    assert cells.grad is not None
    assert (cells.grad == 0).all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_han_13_straight_through_is_hard_forward_with_gradient_for_dropped_cells(
    cells, question, name
):
    module, cells = make_aggregation(name), cells.requires_grad_()
    scores = presence(cells)
    kept = keep_top(scores.detach(), 3)
    weights = straight_through(scores, kept, 0.0)
    found = module(PaddedCells(cells, weights=weights), question)
    torch.testing.assert_close(found, module(gather_cells(cells, kept), question))
    found.sum().backward()
    assert cells.grad is not None
    assert (cells.grad[~kept].abs().sum(-1) > 0).all()


def test_pairwise_of_large_scores_is_finite(question):
    module = make_aggregation("literal")
    cells = 1e3 * torch.randn(5, 9, CELL, dtype=torch.float64)
    kept = keep_top(-presence(cells), 3)  # the dropped cells score far above the kept ones
    for found in (gather_cells(cells, kept), PaddedCells(cells, weights=kept.double())):
        assert module(found, question).isfinite().all()


def test_pairs_are_all_ordered_pairs_of_each_sample():
    counts = (2, 0, 3)
    first, second, sample = cell_pairs(counts)
    found = list(zip(first.tolist(), second.tolist(), sample.tolist(), strict=True))
    expected = [(i, j, 0) for i in range(2) for j in range(2)]
    expected += [(i, j, 2) for i in range(2, 5) for j in range(2, 5)]
    assert found == expected


def test_han_11_a_quarter_of_the_cells_gives_a_sixteenth_of_the_pairs():
    assert len(cell_pairs((64,))[0]) == 4096
    assert len(cell_pairs((16,))[0]) == 256


class AllocationCounter(TorchDispatchMode):
    """Count the new tensors (not views) with a given number of elements."""

    def __init__(self, numbers):
        super().__init__()
        self.numbers, self.count = numbers, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        fresh = not function.is_view and not any(one is made for one in args)
        if fresh and isinstance(made, torch.Tensor) and made.numel() == self.numbers:
            self.count += 1
        return made


@pytest.mark.parametrize("with_weights", [False, True])
def test_pair_tensors_are_allocated_a_minimal_number_of_times(with_weights):
    """Per layer: once forward, and backward once for its product and once for its ReLU."""
    b, m, hidden, layers = 3, 5, 16, 4
    net = RelationAggregation(6, 2, hidden, layers)
    weights = torch.rand(b, m, requires_grad=True) if with_weights else None
    kept = PaddedCells(torch.randn(b, m, 6, requires_grad=True), weights)
    with AllocationCounter(b * m * m * hidden) as counter:
        net(kept, torch.randn(b, 2)).sum().backward()
    assert counter.count <= 3 * layers


def test_packing_is_used_when_padding_is_wasteful():
    for power in (1, 2):
        assert not aggregate._worth_packing((10, 10, 10, 9), power)
        assert aggregate._worth_packing((10, 2, 2, 2), power)


@pytest.mark.parametrize("name", ["pairwise", "relation"])
def test_packed_cells_are_computed_without_padding(
    cells, question, unequal_kept, name, monkeypatch
):
    """The first layer gets 15 cells when packed, and 5 x 9 when padded."""
    module, seen = make_aggregation(name), []
    chosen = gather_cells(cells, unequal_kept)
    linear = nn.functional.linear

    def counting(rows, *rest):
        seen.append(rows.shape[:-1].numel())
        return linear(rows, *rest)

    monkeypatch.setattr(nn.functional, "linear", counting)
    for spare, expected in ((-1.0, 15), (1e9, 45)):
        seen.clear()
        monkeypatch.setattr(aggregate, "MAX_PADDING", spare)
        module.forward_padded(chosen) if name == "pairwise" else module(chosen, question)
        assert seen[0] == expected


@pytest.mark.parametrize("way", ["packed", "fixed"])
@pytest.mark.parametrize("name", AGGREGATIONS)
def test_flops_agree_with_torch_flop_counter(cells, question, unequal_kept, name, way, monkeypatch):
    monkeypatch.setattr(aggregate, "MAX_PADDING", -1.0)
    monkeypatch.setattr(
        aggregate, "MIN_MEAN_CELLS", 0
    )  # else products of queries and keys are padded
    module = make_aggregation(name)
    kept = unequal_kept if way == "packed" else keep_top(presence(cells), 4)
    chosen = gather_cells(cells, kept)
    with FlopCounterMode(display=False) as counter:
        module(chosen, question)
    expected = module.flops(kept.sum(-1).double()).sum()
    assert counter.get_total_flops() == int(expected)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_flops_decrease_with_the_number_of_cells(name):
    module = make_aggregation(name)
    every, some = module.flops(torch.tensor([64.0, 16.0])).tolist()
    assert every == some == 0 if name in ("sum", "mean") else every > 3.5 * some


def test_han_12_selection_adds_no_parameters(cells, question):
    """One module takes all cells, a fixed number, or the cells above uniform."""
    module = make_aggregation("pairwise")
    before = sum(p.numel() for p in module.parameters())
    for rule in (keep_all, partial(keep_top, count=3), keep_above_uniform):
        module(gather_cells(cells, rule(presence(cells))), question)
    assert sum(p.numel() for p in module.parameters()) == before == 3 * CELL * 8


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_half_precision_is_close_to_float64(cells, question, unequal_kept, name):
    module = make_aggregation(name)
    expected = module(gather_cells(cells, unequal_kept), question)
    near = module.bfloat16()
    found = near(gather_cells(cells.bfloat16(), unequal_kept), question.bfloat16())
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(
        found.double(), expected, rtol=0.1, atol=0.1 + 0.02 * expected.abs().max().item()
    )


@pytest.mark.parametrize("name", ["sum", "relation"])
def test_sums_of_many_rows_are_accurate_in_half_precision(name):
    """Adding 2,500 pairs or 50 cells one by one in bfloat16 would stop counting at 256."""
    module = make_aggregation(name).float()
    cells, question = 1 + torch.rand(2, 50, CELL), torch.rand(2, QUESTION)
    kept = torch.ones(2, 50, dtype=torch.bool)
    kept[1, 2:] = False
    expected = module(gather_cells(cells, kept), question)
    with torch.autocast("cpu", torch.bfloat16):
        found = module(gather_cells(cells.bfloat16(), kept), question)
    torch.testing.assert_close(found.float(), expected, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_aggregation_is_rebuilt_from_its_config(name):
    module = make_aggregation(name)
    again = aggregation_from_config(module.config())
    assert isinstance(again, Aggregation)
    assert again.config() == module.config()
    assert [p.shape for p in again.parameters()] == [p.shape for p in module.parameters()]


def test_unknown_kind_and_indivisible_size_raise():
    with pytest.raises(UserError, match=r"'max'.*sum.*relation"):
        aggregation_from_config({"kind": "max"})
    with pytest.raises(ValueError, match=r"size=7 .*heads=2"):
        NonLocalAggregation(4, size=7)


def test_kernels_are_skipped_above_the_maximum_of_cells_in_place(question, monkeypatch):
    """Measured: kernels without a known count are faster up to about 48 cells."""
    asked = []
    monkeypatch.setattr(
        aggregate.triton_launch, "supports_attention", lambda *given: bool(asked.append(given))
    )
    cells = torch.randn(5, 60, 4)
    module = NonLocalAggregation(4, 4, heads=2)
    for count, times in (
        (aggregate.MAX_CELLS_IN_PLACE, 1),
        (aggregate.MAX_CELLS_IN_PLACE + 1, 1),
        (None, 2),
    ):
        kept = keep_top(presence(cells), count or 50)
        module(CellsInPlace(cells, kept, count), question.float())
        assert len(asked) == times
