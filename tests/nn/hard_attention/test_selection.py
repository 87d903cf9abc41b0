"""Selection of cells: rules, random draws, schedules, gathering, configs."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from overt.errors import UserError
from overt.nn.hard_attention.selection import (
    CellsInPlace,
    PackedCells,
    PaddedCells,
    Selection,
    apply_rule,
    count_kept,
    gather_cells,
    gumbel_selection,
    keep_above_uniform,
    keep_all,
    keep_gumbel,
    keep_random,
    keep_share,
    keep_top,
    kept_first_order,
    linear_decay,
    linear_ramp,
    pad_cells,
    presence,
    random_selection,
    rule_config,
    rule_from_config,
    selection_from_config,
    soft_to_hard,
    straight_through,
    widen_selection,
)

RULES = {
    "all": keep_all,
    "top": partial(keep_top, count=3),
    "share": partial(keep_share, share=0.4),
    "above uniform": keep_above_uniform,
    "cool": partial(keep_above_uniform, temperature=0.25),
    "random": partial(keep_random, count=3, seed=1),
}


@pytest.fixture
def cells(generator):
    return torch.randn(5, 12, 4, generator=generator, dtype=torch.float64)


# --- reference implementations


def slow_presence(cells):
    """Compute equation 5 element by element."""
    return [[math.sqrt(sum(v * v for v in cell)) for cell in row] for row in cells.tolist()]


def slow_top(scores, count):
    """Select the first of the largest repeatedly."""
    kept = []
    for row in scores.tolist():
        left = list(range(len(row)))
        chosen = set()
        for _ in range(min(count, len(row))):
            best = max(left, key=lambda at: (row[at], -at))
            left.remove(best)
            chosen.add(best)
        kept.append([at in chosen for at in range(len(row))])
    return torch.tensor(kept)


def slow_above_uniform(scores, temperature=1.0):
    """Compute equation 6 cell by cell, without torch."""
    rows = [[math.exp(score / temperature) for score in row] for row in scores.tolist()]
    return torch.tensor([[e / sum(row) > 1 / len(row) for e in row] for row in rows])


def test_presence_follows_equation_5(cells):
    torch.testing.assert_close(presence(cells).tolist(), slow_presence(cells))


def test_presence_is_at_least_float32(cells):
    assert presence(cells).dtype is torch.float64
    for narrow in (torch.float32, torch.bfloat16, torch.float16):
        assert presence(cells.to(narrow)).dtype is torch.float32
    huge = torch.full((1, 1, 2048), 1e4, dtype=torch.float16)
    assert presence(huge).isfinite().all()  # the sum of squares is not, in half precision


def test_han_1_top_cells_have_the_largest_norms():
    cells = torch.tensor([[[3.0, 4.0], [0.0, 0.0], [1.0, 0.0], [6.0, 8.0]]])
    assert presence(cells).tolist() == [[5.0, 0.0, 1.0, 10.0]]
    assert keep_top(presence(cells), 2).tolist() == [[True, False, False, True]]


@given(
    st.lists(st.lists(st.integers(-3, 3), min_size=6, max_size=6), min_size=1, max_size=4),
    st.integers(1, 6),
)
def test_top_agrees_with_the_reference_including_ties(rows, count):
    scores = torch.tensor(rows, dtype=torch.float32)
    assert keep_top(scores, count).equal(slow_top(scores, count))


def test_han_4_adaptive_selection_of_a_toy_example():
    scores = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    expected = torch.tensor([[0.032059, 0.087144, 0.236883, 0.643914]])
    torch.testing.assert_close(scores.softmax(-1), expected, rtol=0, atol=1e-6)
    assert scores.logsumexp(-1).item() - math.log(4) == pytest.approx(3.053895, abs=1e-6)
    kept = keep_above_uniform(scores)
    assert kept.tolist() == [[False, False, False, True]]
    assert kept.equal(slow_above_uniform(scores))


@given(st.lists(st.floats(0, 30, width=32), min_size=2, max_size=20))
def test_adaptively_kept_cells_score_above_the_mean(row):
    """By Jensen's inequality log-mean-exp is at least the mean."""
    scores = torch.tensor([row], dtype=torch.float64)
    kept = keep_above_uniform(scores)
    if len(set(row)) > 1 and max(row) - min(row) > 1e-6:
        assert (scores[kept] > scores.mean()).all()


@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
def test_above_uniform_follows_equation_6(cells, temperature):
    scores = presence(cells)
    found = keep_above_uniform(scores, temperature)
    assert found.equal(slow_above_uniform(scores, temperature))


@pytest.mark.parametrize(("scale", "count"), [(0.1, 5), (1.0, 5), (5.0, 3), (20.0, 1), (100.0, 1)])
def test_han_5_larger_norms_keep_fewer(scale, count):
    scores = scale * torch.linspace(0, 1, 10)[None]
    assert int(keep_above_uniform(scores).sum()) == count
    assert keep_above_uniform(scores + 7).equal(keep_above_uniform(scores))
    # a temperature equal to the scale cancels it
    assert int(keep_above_uniform(scores, temperature=scale).sum()) == 5


@pytest.mark.parametrize("value", [0.0, 0.1, 1.0, 3.7, 45.3, 1e4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_han_6_equal_cells_keep_the_first(value, dtype):
    scores = torch.full((2, 100), value, dtype=dtype)
    assert keep_above_uniform(scores).nonzero().tolist() == [[0, 0], [1, 0]]


@given(st.lists(st.floats(0, 50, width=32), min_size=2, max_size=30))
def test_han_7_at_least_one_and_never_all_cells_are_kept(row):
    scores = torch.tensor([row])
    kept = int(keep_above_uniform(scores).sum())
    assert kept >= 1
    if max(row) - min(row) > 1e-3:
        assert kept <= len(row) - 1


def test_han_8_squared_norms_keep_other_cells():
    scores = torch.tensor([[1.0, 2.0, 2.5, 3.0]])
    assert keep_above_uniform(scores).tolist() == [[False, False, True, True]]
    assert keep_above_uniform(scores.square()).tolist() == [[False, False, False, True]]


@pytest.mark.parametrize("rule", [r for r in RULES if r != "random"])
def test_han_9_permuting_cells_permutes_the_selection(cells, generator, rule):
    order = torch.randperm(cells.shape[1], generator=generator)
    kept, moved = RULES[rule](presence(cells)), RULES[rule](presence(cells[:, order]))
    assert moved.equal(kept[:, order])
    pooled = (cells * kept[..., None]).sum(1)
    torch.testing.assert_close((cells[:, order] * moved[..., None]).sum(1), pooled)


@pytest.mark.parametrize("rule", RULES)
def test_absent_cells_are_neither_kept_nor_counted(cells, rule):
    scores = presence(cells)
    there = torch.rand(scores.shape, generator=torch.Generator().manual_seed(3)) > 0.4
    there[0] = False  # a sample without any cell
    there[1] = False
    there[1, 7] = True
    kept = RULES[rule](scores.masked_fill(~there, -torch.inf))
    assert not (kept & ~there).any()
    assert not kept[0].any()
    assert kept[1].tolist() == there[1].tolist()
    if rule not in ("random",):
        for row in range(2, 5):
            alone = apply_rule(RULES[rule], scores[row : row + 1, there[row]], ragged=True)
            assert kept[row, there[row]].equal(alone[0])


@pytest.mark.parametrize(
    ("share", "count"), [(0.25, 6), (0.16, 4), (0.5, 13), (1.0, 25), (1e-3, 1)]
)
def test_share_is_rounded_to_the_nearest_count(share, count):
    scores = torch.rand(3, 25)
    assert keep_share(scores, share).sum(-1).tolist() == [count] * 3
    assert keep_share(scores, share).equal(keep_top(scores, count))
    assert count_kept(partial(keep_share, share=share), 25) == count


def test_half_precision_scores_select_as_their_float32_values():
    scores = (45 + torch.rand(20, 49)).bfloat16()
    assert keep_above_uniform(scores).equal(keep_above_uniform(scores.float()))


def test_counts_and_draws_are_exact_in_half_precision():
    scores = torch.rand(4, 600).bfloat16()
    assert keep_top(scores, 301).sum(-1).tolist() == [301] * 4
    assert keep_share(scores, 301 / 600).sum(-1).tolist() == [301] * 4
    # draws in bfloat16 would tie and favour the first cells
    drawn = keep_random(torch.ones(400, 600).bfloat16(), 60).float().mean(0)
    assert (drawn[:300].mean() - drawn[300:].mean()).abs() < 0.01
    drawn = keep_gumbel(torch.ones(400, 600).bfloat16(), 60).float().mean(0)
    assert (drawn[:300].mean() - drawn[300:].mean()).abs() < 0.01


def test_han_12_selections_have_no_tensors():
    """A rule is a function; a selection is a dataclass without tensors."""
    for selection in (Selection(), random_selection(3), gumbel_selection(3), Selection(keep_all)):
        assert not any(isinstance(value, torch.Tensor) for value in vars(selection).values())


def test_random_cells_differ_between_calls_unless_seeded():
    scores = torch.rand(50, 20)
    one, two = keep_random(scores, 5), keep_random(scores, 5)
    assert not one.equal(two)
    assert one.sum(-1).tolist() == [5] * 50
    assert (one.float().mean(0) - 0.25).abs().max() < 0.25  # every cell is drawn
    fixed = keep_random(scores, 5, seed=2)
    torch.manual_seed(99)
    assert fixed.equal(keep_random(scores.flip(0) * 3, 5, seed=2))
    assert (fixed == fixed[:1]).all()


def test_gumbel_draws_follow_the_softmax():
    scores = torch.tensor([[0.0, 1.0, 2.0, 0.5]])
    found = keep_gumbel(scores.expand(20000, -1), 1).float().mean(0)
    torch.testing.assert_close(found, scores[0].softmax(-1), rtol=0, atol=0.015)
    # without replacement: p(i) + sum over first j of p(j) p(i) / (1 - p(j))
    p = scores[0].softmax(-1)
    second = torch.stack(
        [sum(p[j] * p[i] / (1 - p[j]) for j in range(4) if j != i) for i in range(4)]
    )
    found = keep_gumbel(scores.expand(20000, -1), 2).float().mean(0)
    torch.testing.assert_close(found, p + second, rtol=0, atol=0.015)
    cold = keep_gumbel(scores.expand(200, -1), 1, temperature=0.01)
    assert (cold == keep_top(scores, 1)).all()


def test_han_13_straight_through_is_hard_forward_and_soft_backward(cells):
    cells = cells.requires_grad_()
    scores = presence(cells)
    kept = keep_top(scores.detach(), 3)
    weights = straight_through(scores, kept, 0.0)
    assert weights.equal(kept.to(weights.dtype))
    up = torch.randn_like(weights)
    (found,) = torch.autograd.grad((weights * up).sum(), cells, retain_graph=True)
    (expected,) = torch.autograd.grad((scores.softmax(-1) * up).sum(), cells)
    torch.testing.assert_close(found, expected)
    assert (found[~kept] != 0).any()


def test_soft_to_hard_weights_keep_their_sum(cells):
    scores = presence(cells)
    kept = keep_top(scores, 3)
    weigh = partial(soft_to_hard, hardness=partial(linear_ramp, start=0.2, end=0.6))
    torch.testing.assert_close(weigh(scores, kept, 0.1), 3 * scores.softmax(-1))
    assert weigh(scores, kept, 0.6).equal(kept.to(scores.dtype))
    between = weigh(scores, kept, 0.4)
    torch.testing.assert_close(between, 0.5 * kept + 1.5 * scores.softmax(-1))
    torch.testing.assert_close(between.sum(-1), torch.full((5,), 3.0, dtype=scores.dtype))


def test_linear_decay_values():
    assert [linear_decay(at) for at in (0.0, 0.5, 0.625, 0.75, 1.0)] == [1, 1, 0.5, 0, 0]


def test_widen_selection_adds_dropped_cells_by_score():
    """Kept cells stay kept; absent cells are never added."""
    scores = torch.tensor([[5.0, 1.0, 3.0, -torch.inf, 4.0, 2.0]])
    kept = torch.tensor([[False, True, False, False, False, False]])  # not the largest: a draw
    found = [widen_selection(scores, kept, share)[0].tolist() for share in (0.0, 0.5, 1.0)]
    found = [[place for place, here in enumerate(one) if here] for one in found]
    assert found == [[1], [0, 1, 4], [0, 1, 2, 4, 5]]


def test_linear_ramp_values():
    assert [linear_ramp(at, 0.2, 0.6) for at in (0.0, 0.2, 0.4, 0.6, 1.0)] == pytest.approx(
        [0, 0, 0.5, 1, 1]
    )
    assert [linear_ramp(at, 0.3, 0.3) for at in (0.0, 0.29, 0.3, 1.0)] == [0, 0, 1, 1]
    with pytest.raises(ValueError, match=r"start=.* end="):
        linear_ramp(0.0, 0.6, 0.2)


# --- gathering


def rows_of(found):
    """The kept cells of each sample."""
    return list(
        found.values if isinstance(found, PaddedCells) else found.packed.split(found.counts)
    )


@pytest.mark.parametrize("rule", RULES)
def test_gathered_cells_are_the_kept_ones_in_order(cells, rule):
    kept = RULES[rule](presence(cells))
    found = gather_cells(cells, kept)
    assert isinstance(found, PackedCells if rule in ("above uniform", "cool") else PaddedCells)
    for row, there in enumerate(rows_of(found)):
        assert there.equal(cells[row][kept[row]])


def test_a_known_count_gathers_the_same_cells(cells):
    for count in (1, 3, 12):
        kept = keep_top(presence(cells), count)
        assert gather_cells(cells, kept, count).values.equal(gather_cells(cells, kept).values)
    assert gather_cells(cells, keep_all(presence(cells)), 12).values is cells  # nothing is copied


def test_unequal_counts_are_padded_with_zeros():
    packed = torch.arange(1.0, 13).view(6, 2)
    found = PackedCells(packed, (1, 0, 3, 2))
    assert found.sample_index.tolist() == [0, 2, 2, 2, 3, 3]
    assert found.present.sum(-1).tolist() == [1, 0, 3, 2]
    values = found.pad(packed)
    assert values.shape == (4, 3, 2)
    assert values[found.present].equal(packed)
    assert (values[~found.present] == 0).all()


def test_padded_cells_equal_gathered_cells_with_zero_weights_for_padding(cells):
    kept = keep_above_uniform(presence(cells))
    found, plain = pad_cells(cells, kept), gather_cells(cells, kept)
    assert isinstance(plain, PackedCells) and found.weights is not None
    assert found.values.shape[1] == max(plain.counts)
    assert torch.equal(found.weights.sum(dim=1), kept.sum(dim=1).to(found.weights))
    assert torch.equal(found.values[found.weights == 1], plain.packed)
    none = pad_cells(cells[:0], kept[:0])
    assert none.values.shape == (0, 1, cells.shape[2])


def test_cells_on_a_gpu_stay_in_place_until_padded(cells):
    kept = keep_above_uniform(presence(cells))
    far, marks = cells.to("meta"), kept.to("meta")  # a device other than the CPU
    found = gather_cells(far, marks)
    assert isinstance(found, CellsInPlace) and found.cells is far and found.count is None
    known = gather_cells(far, marks, 3)
    assert isinstance(known, CellsInPlace) and known.count == 3
    assert gather_cells(far, marks, cells.shape[1]).values is far
    filled = CellsInPlace(cells, kept).padded()
    for one, two in zip(
        (filled.values, filled.weights),
        (pad_cells(cells, kept).values, pad_cells(cells, kept).weights),
        strict=True,
    ):
        assert torch.equal(one, two)
    top = keep_top(presence(cells), 3)
    assert CellsInPlace(cells, top, 3).padded().values.equal(gather_cells(cells, top, 3).values)


@given(st.integers(0, 5), st.integers(1, 12), st.integers(0, 2**20))
def test_first_of_the_largest_is_kept_when_scores_tie(samples, cells, seed):
    drawn = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 2, (samples, cells), generator=drawn).float()  # mostly ties
    scores[torch.rand(samples, cells, generator=drawn) < 0.3] = -torch.inf
    kept = keep_above_uniform(scores, temperature=1e-3)
    assert torch.equal(kept & keep_top(scores, 1), keep_top(scores, 1))
    even = torch.zeros(samples, cells)
    assert torch.equal(keep_above_uniform(even), keep_top(even, 1))


@pytest.mark.parametrize("size", [3, 4, 7, 100])
def test_padding_to_a_given_size_does_not_read_the_counts(size):
    cells = torch.randn(5, 7, 2, device="meta")  # reading a number would fail
    kept = torch.ones(5, 7, dtype=torch.bool, device="meta")
    assert pad_cells(cells, kept, size).values.shape == (5, min(size, 7), 2)


def test_extra_padding_has_weight_zero():
    cells = torch.randn(5, 7, 2)
    kept = keep_top(presence(cells), 3)
    tight, roomy = pad_cells(cells, kept), pad_cells(cells, kept, 6)
    assert torch.equal(roomy.values[:, :3], tight.values)
    assert roomy.weights is not None and roomy.weights.sum(dim=1).tolist() == [3.0] * 5


@given(st.integers(0, 6), st.integers(0, 40), st.integers(0, 2**20))
def test_kept_first_order_equals_a_stable_sort(samples, cells, seed):
    drawn = torch.Generator().manual_seed(seed)
    kept = torch.rand(samples, cells, generator=drawn) < torch.rand((), generator=drawn)
    slow = kept.logical_not().byte().argsort(dim=-1, stable=True)
    assert torch.equal(kept_first_order(kept), slow)


def test_sample_without_kept_cells_gathers_nothing(cells):
    kept = keep_top(presence(cells), 3)
    kept[2] = False
    found = gather_cells(cells, kept)
    assert isinstance(found, PackedCells)
    assert found.counts == (3, 3, 0, 3, 3)
    nothing = gather_cells(cells, torch.zeros_like(kept))
    assert isinstance(nothing, PackedCells)
    assert nothing.packed.shape == (0, 4)
    assert nothing.pad(nothing.packed).shape == (5, 0, 4)


@pytest.mark.parametrize("rule", RULES)
def test_han_3_gradient_reaches_kept_cells_only_when_gathered(cells, rule):
    cells = cells.requires_grad_()
    kept = RULES[rule](presence(cells).detach())
    up = torch.randn(5, 4, dtype=cells.dtype)
    found = rows_of(gather_cells(cells, kept))
    sum((row.sum(0) * one).sum() for row, one in zip(found, up, strict=True)).backward()
    assert cells.grad is not None
    assert (cells.grad[~kept] == 0).all()
    # with sum pooling each kept cell of a sample gets the upstream gradient unchanged
    assert cells.grad.equal(torch.where(kept[..., None], up[:, None], 0))


def test_count_kept_is_known_for_fixed_count_rules():
    assert count_kept(partial(keep_top, count=3), 12) == 3
    assert count_kept(partial(keep_top, count=30), 12) == 12
    assert count_kept(partial(keep_random, count=4, seed=0), 12) == 4
    assert count_kept(partial(keep_gumbel, count=4), 12) == 4
    assert count_kept(keep_all, 12) == 12
    assert count_kept(keep_above_uniform, 12) is None
    assert count_kept(lambda scores: scores > 0, 12) is None


# --- saving and errors


@pytest.mark.parametrize("rule", RULES)
def test_rule_is_rebuilt_from_its_config(cells, rule):
    again = rule_from_config(rule_config(RULES[rule]))
    assert again(presence(cells)).equal(RULES[rule](presence(cells)))


@pytest.mark.parametrize(
    "selection",
    [
        Selection(),
        random_selection(3, seed=4),
        gumbel_selection(3, 0.5, straight_through),
        Selection(keep_all, weigh=partial(soft_to_hard, hardness=partial(linear_ramp, end=0.2))),
        Selection(keep_all, weigh=soft_to_hard),
        Selection(partial(keep_top, count=3), widen=linear_decay),
        Selection(widen=partial(linear_decay, start=0.1, end=0.2)),
    ],
)
def test_selection_is_rebuilt_from_its_config(selection):
    again = selection_from_config(selection.config())
    assert again.config() == selection.config()


def test_custom_or_unknown_rule_raises():
    with pytest.raises(UserError, match=r"save .*all, top"):
        rule_config(lambda scores: scores > 0)
    with pytest.raises(UserError, match="keyword arguments"):
        Selection(weigh=lambda scores, kept, progress: scores).config()
    with pytest.raises(UserError, match=r"'best'.* all, top"):
        rule_from_config({"keep": "best"})


def test_out_of_range_numbers_raise():
    scores = torch.rand(2, 4)
    with pytest.raises(ValueError, match="got 0"):
        keep_top(scores, 0)
    for share in (0.0, 1.5):
        with pytest.raises(ValueError, match="above 0"):
            keep_share(scores, share)
    with pytest.raises(ValueError, match=r"temperature.* 0"):
        keep_above_uniform(scores, 0.0)
    with pytest.raises(ValueError, match=r"temperature.* 0"):
        keep_gumbel(scores, 1, -1.0)


@pytest.mark.parametrize(
    ("rule", "given"),
    [
        (lambda scores: scores.softmax(dim=-1), r"float32.*\(2, 4\)"),
        (lambda scores: scores.argsort(dim=-1), r"int64.*\(2, 4\)"),
        (lambda scores: scores.topk(2).indices, r"int64.*\(2, 2\)"),
    ],
)
def test_rule_that_returns_indices_or_probabilities_raises(rule, given):
    with pytest.raises(UserError, match=rf"\(2, 4\), got {given}"):
        apply_rule(rule, torch.rand(2, 4))


# --- a count above the number of cells


@pytest.mark.parametrize("rule", [keep_top, keep_random, keep_gumbel])
def test_a_count_above_the_number_of_cells_raises(rule):
    with pytest.raises(UserError, match=r"99 of 16.*keep_all"):
        rule(torch.rand(2, 16), count=99)
    assert rule(torch.rand(2, 16), count=16).all()


@pytest.mark.parametrize("rule", [keep_top, keep_random, keep_gumbel])
def test_samples_of_a_ragged_batch_may_have_fewer_cells_than_the_count(rule):
    scores = torch.tensor([[3.0, 1.0, -torch.inf], [2.0, 1.0, 3.0]])
    assert torch.equal(rule(scores, count=3), scores.isfinite())
    counted = partial(rule, count=5)
    assert torch.equal(apply_rule(counted, scores, ragged=True), scores.isfinite())
    with pytest.raises(UserError, match="5 of 3"):
        apply_rule(counted, scores)
