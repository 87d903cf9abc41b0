import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from overt.errors import BadInput
from overt.models.hard.selection import (
    Kept,
    Ragged,
    Selection,
    Standing,
    climb,
    drawn,
    ebb,
    filled_up,
    gather,
    keep_above_uniform,
    keep_all,
    keep_gumbel,
    keep_random,
    keep_share,
    keep_top,
    kept_by,
    kept_first,
    number_kept,
    presence,
    randomly,
    rule_config,
    rule_from,
    selection_from,
    softened,
    straight_through,
    widened,
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


# --- slow copies


def slow_presence(cells):
    """Equation 5, number by number."""
    return [[math.sqrt(sum(v * v for v in cell)) for cell in row] for row in cells.tolist()]


def slow_top(scores, count):
    """The first of the largest, again and again."""
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
    """Equation 6, cell by cell, without torch."""
    rows = [[math.exp(score / temperature) for score in row] for row in scores.tolist()]
    return torch.tensor([[e / sum(row) > 1 / len(row) for e in row] for row in rows])


def test_presence_agrees_with_equation_5(cells):
    torch.testing.assert_close(presence(cells).tolist(), slow_presence(cells))


def test_presence_is_float32_at_least(cells):
    assert presence(cells).dtype is torch.float64
    for narrow in (torch.float32, torch.bfloat16, torch.float16):
        assert presence(cells.to(narrow)).dtype is torch.float32
    huge = torch.full((1, 1, 2048), 1e4, dtype=torch.float16)
    assert presence(huge).isfinite().all()  # the sum of squares is not, in half precision


def test_han_1_top_by_norm():
    cells = torch.tensor([[[3.0, 4.0], [0.0, 0.0], [1.0, 0.0], [6.0, 8.0]]])
    assert presence(cells).tolist() == [[5.0, 0.0, 1.0, 10.0]]
    assert keep_top(presence(cells), 2).tolist() == [[True, False, False, True]]


@given(
    st.lists(st.lists(st.integers(-3, 3), min_size=6, max_size=6), min_size=1, max_size=4),
    st.integers(1, 8),
)
def test_top_agrees_with_a_slow_copy_ties_and_all(rows, count):
    scores = torch.tensor(rows, dtype=torch.float32)
    assert keep_top(scores, count).equal(slow_top(scores, count))


def test_han_4_adaptive_toy():
    scores = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    expected = torch.tensor([[0.032059, 0.087144, 0.236883, 0.643914]])
    torch.testing.assert_close(scores.softmax(-1), expected, rtol=0, atol=1e-6)
    assert scores.logsumexp(-1).item() - math.log(4) == pytest.approx(3.053895, abs=1e-6)
    kept = keep_above_uniform(scores)
    assert kept.tolist() == [[False, False, False, True]]
    assert kept.equal(slow_above_uniform(scores))


@given(st.lists(st.floats(0, 30, width=32), min_size=2, max_size=20))
def test_every_adaptive_cell_is_above_the_mean(row):
    """Jensen: log-mean-exp is no less than the mean."""
    scores = torch.tensor([row], dtype=torch.float64)
    kept = keep_above_uniform(scores)
    if len(set(row)) > 1 and max(row) - min(row) > 1e-6:
        assert (scores[kept] > scores.mean()).all()


@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
def test_above_uniform_agrees_with_equation_6(cells, temperature):
    scores = presence(cells)
    found = keep_above_uniform(scores, temperature)
    assert found.equal(slow_above_uniform(scores, temperature))


@pytest.mark.parametrize(("scale", "count"), [(0.1, 5), (1.0, 5), (5.0, 3), (20.0, 1), (100.0, 1)])
def test_han_5_larger_norms_keep_fewer(scale, count):
    scores = scale * torch.linspace(0, 1, 10)[None]
    assert int(keep_above_uniform(scores).sum()) == count
    assert keep_above_uniform(scores + 7).equal(keep_above_uniform(scores))
    # a temperature undoes the scale
    assert int(keep_above_uniform(scores, temperature=scale).sum()) == 5


@pytest.mark.parametrize("value", [0.0, 0.1, 1.0, 3.7, 45.3, 1e4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_han_6_equal_cells_leave_the_first(value, dtype):
    scores = torch.full((2, 100), value, dtype=dtype)
    assert keep_above_uniform(scores).nonzero().tolist() == [[0, 0], [1, 0]]


@given(st.lists(st.floats(0, 50, width=32), min_size=2, max_size=30))
def test_han_7_one_at_least_and_never_all(row):
    scores = torch.tensor([row])
    kept = int(keep_above_uniform(scores).sum())
    assert kept >= 1
    if max(row) - min(row) > 1e-3:
        assert kept <= len(row) - 1


def test_han_8_squared_norms_would_keep_other_cells():
    scores = torch.tensor([[1.0, 2.0, 2.5, 3.0]])
    assert keep_above_uniform(scores).tolist() == [[False, False, True, True]]
    assert keep_above_uniform(scores.square()).tolist() == [[False, False, False, True]]


@pytest.mark.parametrize("rule", [r for r in RULES if r != "random"])
def test_han_9_moving_the_cells_moves_the_choice(cells, generator, rule):
    order = torch.randperm(cells.shape[1], generator=generator)
    kept, moved = RULES[rule](presence(cells)), RULES[rule](presence(cells[:, order]))
    assert moved.equal(kept[:, order])
    pooled = (cells * kept[..., None]).sum(1)
    torch.testing.assert_close((cells[:, order] * moved[..., None]).sum(1), pooled)


@pytest.mark.parametrize("rule", RULES)
def test_absent_cells_are_never_kept_nor_counted(cells, rule):
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
            alone = RULES[rule](scores[row : row + 1, there[row]])
            assert kept[row, there[row]].equal(alone[0])


@pytest.mark.parametrize(
    ("share", "count"), [(0.25, 6), (0.16, 4), (0.5, 13), (1.0, 25), (1e-3, 1)]
)
def test_a_share_is_the_nearest_count(share, count):
    scores = torch.rand(3, 25)
    assert keep_share(scores, share).sum(-1).tolist() == [count] * 3
    assert keep_share(scores, share).equal(keep_top(scores, count))
    assert number_kept(partial(keep_share, share=share), 25) == count


def test_half_precision_scores_choose_as_their_float32_values():
    scores = (45 + torch.rand(20, 49)).bfloat16()
    assert keep_above_uniform(scores).equal(keep_above_uniform(scores.float()))


def test_counts_and_draws_are_exact_in_half_precision():
    scores = torch.rand(4, 600).bfloat16()
    assert keep_top(scores, 301).sum(-1).tolist() == [301] * 4
    assert keep_share(scores, 301 / 600).sum(-1).tolist() == [301] * 4
    # draws in sixteen bits would tie, and favour the first cells
    drawn = keep_random(torch.ones(400, 600).bfloat16(), 60).float().mean(0)
    assert (drawn[:300].mean() - drawn[300:].mean()).abs() < 0.01
    drawn = keep_gumbel(torch.ones(400, 600).bfloat16(), 60).float().mean(0)
    assert (drawn[:300].mean() - drawn[300:].mean()).abs() < 0.01


def test_han_12_no_parameters():
    """A rule is a function; a selection is a value without tensors."""
    for selection in (Selection(), randomly(3), drawn(3), Selection(keep_all)):
        assert not any(isinstance(value, torch.Tensor) for value in vars(selection).values())


def test_random_cells_differ_from_step_to_step_but_not_with_a_seed():
    scores = torch.rand(50, 20)
    one, two = keep_random(scores, 5), keep_random(scores, 5)
    assert not one.equal(two)
    assert one.sum(-1).tolist() == [5] * 50
    assert (one.float().mean(0) - 0.25).abs().max() < 0.25  # all cells have their turn
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


def test_softened_goes_from_soft_to_hard_and_keeps_its_sum(cells):
    scores = presence(cells)
    kept = keep_top(scores, 3)
    weigh = partial(softened, hardness=partial(climb, start=0.2, end=0.6))
    torch.testing.assert_close(weigh(scores, kept, 0.1), 3 * scores.softmax(-1))
    assert weigh(scores, kept, 0.6).equal(kept.to(scores.dtype))
    between = weigh(scores, kept, 0.4)
    torch.testing.assert_close(between, 0.5 * kept + 1.5 * scores.softmax(-1))
    torch.testing.assert_close(between.sum(-1), torch.full((5,), 3.0, dtype=scores.dtype))


def test_an_ebb_is_a_climb_turned_over():
    assert [ebb(at) for at in (0.0, 0.5, 0.625, 0.75, 1.0)] == [1, 1, 0.5, 0, 0]


def test_what_was_left_out_comes_back_by_its_score():
    """Whatever was kept stays; a cell that is not there never comes."""
    scores = torch.tensor([[5.0, 1.0, 3.0, -torch.inf, 4.0, 2.0]])
    kept = torch.tensor([[False, True, False, False, False, False]])  # not the largest: a draw
    found = [widened(scores, kept, share)[0].tolist() for share in (0.0, 0.5, 1.0)]
    found = [[place for place, here in enumerate(one) if here] for one in found]
    assert found == [[1], [0, 1, 4], [0, 1, 2, 4, 5]]


def test_a_climb_starts_ends_and_may_switch():
    assert [climb(at, 0.2, 0.6) for at in (0.0, 0.2, 0.4, 0.6, 1.0)] == pytest.approx(
        [0, 0, 0.5, 1, 1]
    )
    assert [climb(at, 0.3, 0.3) for at in (0.0, 0.29, 0.3, 1.0)] == [0, 0, 1, 1]
    with pytest.raises(ValueError, match="does not go forward"):
        climb(0.0, 0.6, 0.2)


# --- gathering


def rows_of(found):
    """The kept cells of each sample."""
    return list(found.values if isinstance(found, Kept) else found.packed.split(found.counts))


@pytest.mark.parametrize("rule", RULES)
def test_gathered_cells_are_the_kept_ones_in_their_order(cells, rule):
    kept = RULES[rule](presence(cells))
    found = gather(cells, kept)
    assert isinstance(found, Ragged if rule in ("above uniform", "cool") else Kept)
    for row, there in enumerate(rows_of(found)):
        assert there.equal(cells[row][kept[row]])


def test_a_known_count_gathers_the_same(cells):
    for count in (1, 3, 12):
        kept = keep_top(presence(cells), count)
        assert gather(cells, kept, count).values.equal(gather(cells, kept).values)
    assert gather(cells, keep_all(presence(cells)), 12).values is cells  # nothing is copied


def test_unequal_numbers_are_filled_up_with_zeros():
    packed = torch.arange(1.0, 13).view(6, 2)
    found = Ragged(packed, (1, 0, 3, 2))
    assert found.owners.tolist() == [0, 2, 2, 2, 3, 3]
    assert found.present.sum(-1).tolist() == [1, 0, 3, 2]
    values = found.filled(packed)
    assert values.shape == (4, 3, 2)
    assert values[found.present].equal(packed)
    assert (values[~found.present] == 0).all()


def test_filled_up_holds_what_is_gathered_and_counts_the_rest_as_nothing(cells):
    kept = keep_above_uniform(presence(cells))
    found, plain = filled_up(cells, kept), gather(cells, kept)
    assert isinstance(plain, Ragged) and found.weights is not None
    assert found.values.shape[1] == max(plain.counts)
    assert torch.equal(found.weights.sum(dim=1), kept.sum(dim=1).to(found.weights))
    assert torch.equal(found.values[found.weights == 1], plain.packed)
    none = filled_up(cells[:0], kept[:0])
    assert none.values.shape == (0, 1, cells.shape[2])


def test_on_a_card_cells_stay_where_they_are_until_somebody_wants_them_side_by_side(cells):
    kept = keep_above_uniform(presence(cells))
    far, marks = cells.to("meta"), kept.to("meta")  # a device that is no CPU
    found = gather(far, marks)
    assert isinstance(found, Standing) and found.cells is far and found.count is None
    known = gather(far, marks, 3)
    assert isinstance(known, Standing) and known.count == 3
    assert gather(far, marks, cells.shape[1]).values is far
    filled = Standing(cells, kept).side_by_side()
    for one, two in zip(
        (filled.values, filled.weights),
        (filled_up(cells, kept).values, filled_up(cells, kept).weights),
        strict=True,
    ):
        assert torch.equal(one, two)
    top = keep_top(presence(cells), 3)
    assert Standing(cells, top, 3).side_by_side().values.equal(gather(cells, top, 3).values)


@given(st.integers(0, 5), st.integers(1, 12), st.integers(0, 2**20))
def test_where_nothing_stands_out_the_first_of_the_largest_is_kept(samples, cells, seed):
    drawn = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 2, (samples, cells), generator=drawn).float()  # mostly ties
    scores[torch.rand(samples, cells, generator=drawn) < 0.3] = -torch.inf
    kept = keep_above_uniform(scores, temperature=1e-3)
    assert torch.equal(kept & keep_top(scores, 1), keep_top(scores, 1))
    even = torch.zeros(samples, cells)
    assert torch.equal(keep_above_uniform(even), keep_top(even, 1))


@pytest.mark.parametrize("room", [3, 4, 7, 100])
def test_room_that_is_known_is_not_asked_for(room):
    cells = torch.randn(5, 7, 2, device="meta")  # reading a number would fail
    kept = torch.ones(5, 7, dtype=torch.bool, device="meta")
    assert filled_up(cells, kept, room).values.shape == (5, min(room, 7), 2)


def test_more_room_than_needed_changes_nothing_but_the_places_that_count_nothing():
    cells = torch.randn(5, 7, 2)
    kept = keep_top(presence(cells), 3)
    tight, roomy = filled_up(cells, kept), filled_up(cells, kept, 6)
    assert torch.equal(roomy.values[:, :3], tight.values)
    assert roomy.weights is not None and roomy.weights.sum(dim=1).tolist() == [3.0] * 5


@given(st.integers(0, 6), st.integers(0, 40), st.integers(0, 2**20))
def test_kept_cells_come_first_as_in_a_stable_sort(samples, cells, seed):
    drawn = torch.Generator().manual_seed(seed)
    kept = torch.rand(samples, cells, generator=drawn) < torch.rand((), generator=drawn)
    slow = kept.logical_not().byte().argsort(dim=-1, stable=True)
    assert torch.equal(kept_first(kept), slow)


def test_a_sample_without_cells_gathers_nothing(cells):
    kept = keep_top(presence(cells), 3)
    kept[2] = False
    found = gather(cells, kept)
    assert isinstance(found, Ragged)
    assert found.counts == (3, 3, 0, 3, 3)
    nothing = gather(cells, torch.zeros_like(kept))
    assert isinstance(nothing, Ragged)
    assert nothing.packed.shape == (0, 4)
    assert nothing.filled(nothing.packed).shape == (5, 0, 4)


@pytest.mark.parametrize("rule", RULES)
def test_han_3_gradient_reaches_kept_cells_only(cells, rule):
    cells = cells.requires_grad_()
    kept = RULES[rule](presence(cells).detach())
    up = torch.randn(5, 4, dtype=cells.dtype)
    found = rows_of(gather(cells, kept))
    sum((row.sum(0) * one).sum() for row, one in zip(found, up, strict=True)).backward()
    assert cells.grad is not None
    assert (cells.grad[~kept] == 0).all()
    # with sum pooling every kept cell of a sample gets the gradient from above, unchanged
    assert cells.grad.equal(torch.where(kept[..., None], up[:, None], 0))


def test_the_number_kept_is_known_when_it_is_fixed():
    assert number_kept(partial(keep_top, count=3), 12) == 3
    assert number_kept(partial(keep_top, count=30), 12) == 12
    assert number_kept(partial(keep_random, count=4, seed=0), 12) == 4
    assert number_kept(partial(keep_gumbel, count=4), 12) == 4
    assert number_kept(keep_all, 12) == 12
    assert number_kept(keep_above_uniform, 12) is None
    assert number_kept(lambda scores: scores > 0, 12) is None


# --- saving, and what is refused


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_comes_back_from_its_values(cells, rule):
    again = rule_from(rule_config(RULES[rule]))
    assert again(presence(cells)).equal(RULES[rule](presence(cells)))


@pytest.mark.parametrize(
    "selection",
    [
        Selection(),
        randomly(3, seed=4),
        drawn(3, 0.5, straight_through),
        Selection(keep_all, weigh=partial(softened, hardness=partial(climb, end=0.2))),
        Selection(keep_all, weigh=softened),
        Selection(partial(keep_top, count=3), widen=ebb),
        Selection(widen=partial(ebb, start=0.1, end=0.2)),
    ],
)
def test_a_selection_comes_back_from_its_values(selection):
    again = selection_from(selection.config())
    assert again.config() == selection.config()


def test_what_cannot_be_saved_or_read_is_refused():
    with pytest.raises(BadInput, match="cannot be saved: keep is one of all, top"):
        rule_config(lambda scores: scores > 0)
    with pytest.raises(BadInput, match="with its numbers by name"):
        Selection(weigh=lambda scores, kept, progress: scores).config()
    with pytest.raises(BadInput, match="keep 'best' is not one of all, top"):
        rule_from({"keep": "best"})


def test_numbers_that_make_no_sense_are_refused():
    scores = torch.rand(2, 4)
    with pytest.raises(ValueError, match="at least one cell"):
        keep_top(scores, 0)
    for share in (0.0, 1.5):
        with pytest.raises(ValueError, match="above 0 and at most 1"):
            keep_share(scores, share)
    with pytest.raises(ValueError, match="temperature is above 0"):
        keep_above_uniform(scores, 0.0)
    with pytest.raises(ValueError, match="temperature is above 0"):
        keep_gumbel(scores, 1, -1.0)


@pytest.mark.parametrize(
    ("rule", "given"),
    [
        (lambda scores: scores.softmax(dim=-1), r"float32 of \(2, 4\)"),
        (lambda scores: scores.argsort(dim=-1), r"int64 of \(2, 4\)"),
        (lambda scores: scores.topk(2).indices, r"int64 of \(2, 2\)"),
    ],
)
def test_a_rule_that_gives_places_or_shares_is_refused(rule, given):
    with pytest.raises(BadInput, match=rf"each of \(2, 4\) scores, and this one gave {given}"):
        kept_by(rule, torch.rand(2, 4))
