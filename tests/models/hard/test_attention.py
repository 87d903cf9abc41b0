import sys
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from overt.attention import Kind, grid
from overt.errors import BadInput
from overt.models.answering.vqa import VQA, Sizes
from overt.models.hard.aggregate import Mean, Pairwise, Relation, Sum
from overt.models.hard.attention import (
    HardAttention,
    asked,
    hard_from,
    linear_flops,
    unasked,
    unplaced,
)
from overt.models.hard.selection import (
    Selection,
    climb,
    drawn,
    ebb,
    filled_up,
    gather,
    keep_above_uniform,
    keep_all,
    keep_top,
    masked,
    presence,
    randomly,
    softened,
    straight_through,
)
from overt.testing import check_model, toy_batch

CELL, ASKED, JOINT = 6, 5, 8
LAYOUT = grid(3, 4)
SELECTIONS = {
    "all": Selection(keep_all),
    "top": Selection(partial(keep_top, count=3)),
    "adaptive": Selection(partial(keep_above_uniform, temperature=0.1)),
    "straight through": Selection(partial(keep_top, count=3), weigh=straight_through),
    "random": randomly(3),
    "drawn": drawn(3),
    "drawn, straight through": drawn(3, weigh=straight_through),
    "softened": Selection(partial(keep_top, count=3), weigh=softened),
}
AGGREGATES = {
    "sum": lambda: Sum(JOINT),
    "mean": lambda: Mean(JOINT),
    "pairwise": lambda: Pairwise(JOINT, size=6, heads=2),
    "relation": lambda: Relation(JOINT, ASKED, hidden=6, layers=3),
}


def made(selection="adaptive", aggregate="sum", **options) -> HardAttention:
    torch.manual_seed(0)
    chosen = SELECTIONS[selection] if isinstance(selection, str) else selection
    return HardAttention(
        CELL, ASKED, JOINT, selection=chosen, aggregate=AGGREGATES[aggregate](), **options
    ).double()


@pytest.fixture
def cells(generator):
    return torch.randn(4, 12, CELL, generator=generator, dtype=torch.float64)


@pytest.fixture
def question(generator):
    return torch.randn(4, ASKED, generator=generator, dtype=torch.float64)


def look(attend, cells, question, mask=None):
    return attend.look(attend.of_cell(cells), question, LAYOUT, mask)


def slow_joint(attend, cells, question):
    """Equations 2 to 4, layer by layer."""

    def through(layers, x):
        for at in range(0, len(layers), 2):
            x = (x @ layers[at].weight.T + layers[at].bias).clamp_min(0)
        return x

    return through(attend.of_cell, cells) + through(attend.of_question, question)[:, None]


@pytest.mark.parametrize("count", [1, 3, 12])
def test_the_sum_of_the_strongest_cells_agrees_with_equations_2_to_5(cells, question, count):
    attend = made(partial(keep_top, count=count)).eval()
    joint = slow_joint(attend, cells, question)
    best = joint.square().sum(-1).argsort(descending=True)[:, :count]
    expected = torch.stack([row[at].sum(0) for row, at in zip(joint, best, strict=True)])
    found = look(attend, cells, question)
    torch.testing.assert_close(found.summary, expected)
    assert found.attention.weights[:, 0, 0, 0].sum(-1).tolist() == [float(count)] * 4


def test_the_map_is_0_and_1_over_the_whole_layout(cells, question):
    found = look(made().eval(), cells, question)
    assert found.attention.kind is Kind.AMOUNT
    assert found.attention.values.shape == (4, 1, 1, 1, 12)
    assert set(found.attention.weights.unique().tolist()) == {0.0, 1.0}
    assert found.attention.keys is LAYOUT
    assert found.extras["cells_kept"].equal(found.attention.weights.sum((1, 2, 3, 4)))
    found.attention.check()


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_han_2_keeping_every_cell_is_the_model_without_attention(cells, question, aggregate):
    plain = look(made("all", aggregate).eval(), cells, question)
    every = look(made(partial(keep_top, count=12), aggregate).eval(), cells, question)
    assert every.summary.equal(plain.summary)
    assert every.attention.weights.equal(plain.attention.weights)


@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("selection", ["top", "adaptive", "random", "drawn"])
def test_han_3_no_gradient_for_dropped_cells(cells, question, selection, aggregate):
    attend, cells = made(selection, aggregate), cells.requires_grad_()
    found = look(attend, cells, question)
    found.summary.square().sum().backward()
    kept = found.attention.weights[:, 0, 0, 0] > 0
    assert cells.grad is not None
    assert (cells.grad[~kept] == 0).all()
    assert (cells.grad[kept] != 0).any()


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_han_9_moving_cells_moves_the_map_and_not_the_summary(
    cells, question, generator, aggregate
):
    attend, order = made("adaptive", aggregate).eval(), torch.randperm(12, generator=generator)
    found, moved = look(attend, cells, question), look(attend, cells[:, order], question)
    assert moved.attention.weights.equal(found.attention.weights[..., order])
    torch.testing.assert_close(moved.summary, found.summary)


def test_han_12_a_rule_adds_no_parameters():
    counts = {sum(p.numel() for p in made(name).parameters()) for name in SELECTIONS}
    assert len(counts) == 1


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_han_13_straight_through_looks_like_han_but_sends_gradient_everywhere(
    cells, question, aggregate
):
    through, hard = made("straight through", aggregate), made("top", aggregate)
    cells = cells.requires_grad_()
    found = look(through, cells, question)
    torch.testing.assert_close(found.summary, look(hard, cells, question).summary)
    found.summary.square().sum().backward()
    kept = found.attention.weights[:, 0, 0, 0] > 0
    assert cells.grad is not None
    assert (cells.grad[~kept].abs().sum(-1) > 0).float().mean() > 0.5
    # nothing is saved while it trains, and all is once it has
    assert (
        look(through.eval(), cells, question)
        .extras["flops"]
        .equal(look(hard.eval(), cells, question).extras["flops"])
    )


def test_what_straight_through_costs_in_training_is_all_cells(cells, question):
    through, every = made("straight through", "relation"), made("all", "relation")
    found = look(through, cells, question).extras
    assert found["flops"].equal(look(every, cells, question).extras["flops"])
    assert found["cells_kept"].tolist() == [3.0] * 4


def test_a_draw_is_for_training_only(cells, question):
    for name in ("random", "drawn"):
        attend = made(name)
        maps = [look(attend, cells, question).attention.weights for _ in range(4)]
        assert not all(one.equal(maps[0]) for one in maps)
        attend.eval()
        maps = [look(attend, cells, question).attention.weights for _ in range(2)]
        assert maps[0].equal(maps[1])


def test_from_soft_to_hard_as_training_goes_on(cells, question):
    weigh = partial(softened, hardness=partial(climb, start=0.0, end=0.5))
    attend = made(Selection(partial(keep_top, count=3), weigh=weigh))
    hard = look(made("top"), cells, question)
    away = []
    for progress in (0.0, 0.25, 0.5):
        attend.progress = progress
        found = look(attend, cells, question)
        away.append(float((found.summary - hard.summary).abs().max().detach()))
        torch.testing.assert_close(found.attention.weights.sum(-1), hard.attention.weights.sum(-1))
    assert away[0] > away[1] > away[2] == pytest.approx(0, abs=1e-12)
    attend.progress = 0.0
    assert look(attend.eval(), cells, question).summary.equal(
        look(made("top").eval(), cells, question).summary
    )


def test_from_all_cells_to_a_few_as_training_goes_on(cells, question):
    """All at first, then the largest and fewer of them, and those of the rule in the end."""
    few = partial(keep_top, count=3)
    attend = made(Selection(few, widen=partial(ebb, start=0.2, end=0.6)))
    every, hard = (look(made(name), cells, question) for name in ("all", "top"))
    kept = []
    for progress, count in ((0.0, 12), (0.2, 12), (0.3, 10), (0.5, 5), (0.6, 3), (1.0, 3)):
        attend.progress = progress
        found = look(attend, cells, question)
        assert found.extras["cells_kept"].tolist() == [count] * 4
        kept.append(found.attention.weights > 0)
        slow = look(made(Selection(partial(keep_top, count=count))), cells, question)
        torch.testing.assert_close(found.summary, slow.summary)
    assert all((one | other).equal(one) for one, other in pairwise(kept))
    attend.progress = 0.0
    torch.testing.assert_close(look(attend, cells, question).summary, every.summary)
    torch.testing.assert_close(look(attend.eval(), cells, question).summary, hard.summary)


@pytest.mark.parametrize("name", ["adaptive", "top"])
@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_masked_cells_give_what_gathered_ones_do(cells, question, name, aggregate):
    """The same summary and the same gradients, with operations that no number decides on."""
    attend = made(name, aggregate)
    found = []
    for collect in (gather, masked):
        attend.collect = collect
        looked = look(attend, cells, question)
        slopes = torch.autograd.grad(looked.summary.sin().sum(), attend.parameters())
        found.append([looked.summary, looked.attention.weights, *looked.extras.values(), *slopes])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_a_card_fills_samples_up_and_finds_the_same(cells, question, aggregate, monkeypatch):
    """What `gather` does there, here: places that are filled up are no cells of the map."""
    mask = torch.ones(4, 12, dtype=torch.float64)
    mask[0, 5:] = 0
    attend = made("adaptive", aggregate).eval()
    wanted = look(attend, cells, question, mask)
    monkeypatch.setattr(sys.modules[HardAttention.__module__], "gather", on_a_card)
    found = look(attend, cells, question, mask)
    torch.testing.assert_close(found.summary, wanted.summary)
    assert found.attention.weights.equal(wanted.attention.weights)
    for name, values in wanted.extras.items():
        torch.testing.assert_close(found.extras[name], values)


def on_a_card(cells, kept, count=None):
    return filled_up(cells, kept) if count is None else gather(cells, kept, count)


def test_what_can_be_recorded():
    assert made("top").recordable() and made("all").recordable() and made("random").recordable()
    attend = made("adaptive")
    assert not attend.recordable()
    attend.collect = masked
    assert attend.recordable()


def test_advancing_tells_steps_of_other_work_apart(cells, question):
    attend = made(Selection(partial(keep_top, count=3), widen=partial(ebb, start=0.2, end=0.6)))
    look(attend, cells, question)
    told = [attend.advance(at / 100)[0] for at in range(101)]
    assert told == sorted(told, reverse=True) and set(told) == set(range(3, 13))
    assert attend.progress == 1.0
    soft = made(Selection(partial(keep_top, count=3), weigh=softened))
    assert [soft.advance(at)[1] for at in (0.25, 0.5, 0.75)] == [0.5, 1.0, 1.0]
    still = made("top"), made(Selection(partial(keep_top, count=3), weigh=straight_through))
    assert all(one.advance(0.1) == one.advance(0.9) for one in still)
    own = made(Selection(weigh=lambda scores, kept, progress: scores * progress))
    assert own.advance(0.1) != own.advance(0.2)


def test_an_adaptive_choice_narrows_too_and_knows_cells_that_are_not_there(cells, question):
    attend = made(Selection(SELECTIONS["adaptive"].rule, widen=ebb))
    mask = torch.ones(4, 12, dtype=torch.float64)
    mask[0, 5:] = 0
    attend.progress = 0.0
    found = look(attend, cells, question, mask).extras["cells_kept"]
    assert found.tolist() == [5, 12, 12, 12]
    attend.progress = 1.0
    narrow = look(attend, cells, question, mask)
    slow = look(made("adaptive"), cells, question, mask)
    torch.testing.assert_close(narrow.summary, slow.summary)


def test_the_question_moves_the_choice_unless_it_is_not_asked(cells, question):
    question = 20 * question  # a new network hardly hears it
    other = question.flip(0)
    for score, moves in ((asked, True), (unasked, False)):
        attend = made("top", score=score).eval()
        one, two = (look(attend, cells, q).attention.weights for q in (question, other))
        assert one.equal(two) is not moves
        image = attend.of_cell(cells)
        joint = image + attend.of_question(question)[:, None]
        expected = keep_top(presence(joint if moves else image), 3)
        assert one[:, 0, 0, 0].bool().equal(expected)


def test_a_place_does_not_make_a_cell_present(cells, question):
    attend = HardAttention(
        CELL, ASKED, depth=None, selection=partial(keep_top, count=3), score=unplaced
    )
    cells[..., -2:] *= 100
    expected = keep_top(presence(cells[..., :-2]), 3)
    found = look(attend.double().eval(), cells, question).attention.weights
    assert found[:, 0, 0, 0].bool().equal(expected)


def test_depth_0_fits_the_question_to_untouched_cells(cells, question):
    attend = HardAttention(CELL, ASKED, depth=0, selection=keep_all).double().eval()
    assert [p.shape for p in attend.parameters()] == [(CELL, ASKED), (CELL,)]
    expected = cells.sum(1) + 12 * attend.of_question(question)
    torch.testing.assert_close(look(attend, cells, question).summary, expected)


def test_without_depth_cells_are_handed_on_as_they_are(cells, question):
    attend = HardAttention(CELL, ASKED, depth=None, selection=keep_all).double().eval()
    assert not list(attend.parameters())
    torch.testing.assert_close(look(attend, cells, question).summary, cells.sum(1))


@pytest.mark.parametrize("selection", ["top", "adaptive", "straight through", "all"])
@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_removed_cells_are_as_if_never_there(cells, question, selection, aggregate):
    attend = made(selection, aggregate)
    mask = torch.ones(4, 12, dtype=torch.float64)
    mask[:, [1, 4, 5]] = 0
    left = mask[0].bool()
    found = look(attend, cells, question, mask)
    alone = attend.look(attend.of_cell(cells[:, left]), question, grid(3, 3))
    torch.testing.assert_close(found.summary, alone.summary)
    assert (found.attention.weights[..., ~left] == 0).all()
    nothing = look(attend, cells, question, torch.zeros_like(mask))
    assert (nothing.summary == 0).all()
    assert nothing.attention.weights.sum() == 0
    nothing.summary.sum().backward()
    grads = [p.grad for p in attend.parameters() if p.grad is not None]
    assert all(grad.isfinite().all() for grad in grads)


def test_a_mask_between_0_and_1_weakens_its_cell(cells, question):
    attend = made("all").eval()
    mask = torch.rand(4, 12, dtype=torch.float64) + 0.1
    expected = (slow_joint(attend, cells, question) * mask[..., None]).sum(1)
    torch.testing.assert_close(look(attend, cells, question, mask).summary, expected)


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_flops_of_each_sample_are_those_that_torch_counts(cells, question, aggregate):
    attend = made("top", aggregate).eval()
    image = attend.of_cell(cells)
    with FlopCounterMode(display=False) as counter:
        found = attend.look(image, question, LAYOUT)
    assert counter.get_total_flops() == int(found.extras["flops"].sum())


SIZES = Sizes(vocabulary=10, answers=3, cell=6, word=5, question=7, hidden=8, dropout=0.2)


@pytest.mark.parametrize("selection", SELECTIONS)
def test_every_selection_keeps_the_contract_inside_a_vqa_model(selection):
    def make() -> VQA:
        torch.manual_seed(0)
        attend = HardAttention(SIZES.seen, SIZES.question, selection=SELECTIONS[selection])
        return VQA(SIZES, attend)

    check_model(make, toy_batch())


def test_a_vqa_model_says_what_its_hard_attention_cost():
    attend = HardAttention(
        SIZES.seen,
        SIZES.question,
        selection=partial(keep_top, count=3),
        aggregate=Pairwise(SIZES.seen, size=SIZES.seen),
    )
    found = VQA(SIZES, attend).eval()(toy_batch()).extras
    assert found["cells_kept"].tolist() == [3.0] * 4
    asking = linear_flops(attend.of_question)
    assert found["flops"].equal(attend.aggregate.flops(found["cells_kept"]) + asking)


def test_a_summary_that_does_not_fit_is_refused(cells, question):
    attend = made(aggregate="relation")
    attend.width = 7
    with pytest.raises(ValueError, match="7 features is no whole number of cells of 6"):
        attend(cells, question, LAYOUT)


@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("depth", [2, 0, None])
def test_hard_attention_comes_back_from_its_values(aggregate, depth):
    for name in SELECTIONS:
        attend = made(name, aggregate, depth=depth, score=unasked)
        again = hard_from(attend.config())
        assert again.config() == attend.config()
        assert again.state_dict().keys() == attend.state_dict().keys()


def test_what_cannot_be_saved_or_read_is_refused():
    with pytest.raises(
        BadInput, match="only attention that scores by asked or unasked or unplaced"
    ):
        made(score=lambda joint, image: presence(joint)).config()
    with pytest.raises(BadInput, match="score 'loud' is not one of asked, unasked, unplaced"):
        hard_from({**made().config(), "score": "loud"})
