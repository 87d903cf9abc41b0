"""Hard attention: equations, gradients, schedules, masks, FLOPs, configs."""

import sys
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from overt.attention import Kind, grid
from overt.errors import UserError
from overt.nn.hard_attention.aggregate import (
    MeanAggregation,
    NonLocalAggregation,
    RelationAggregation,
    SumAggregation,
)
from overt.nn.hard_attention.attention import (
    HardAttention,
    content_presence,
    evidence_first,
    hard_attention_from_config,
    image_presence,
    joint_presence,
    linear_flops,
)
from overt.nn.hard_attention.selection import (
    Selection,
    gather_cells,
    gumbel_selection,
    keep_above_uniform,
    keep_all,
    keep_top,
    linear_decay,
    linear_ramp,
    mask_cells,
    pad_cells,
    presence,
    random_selection,
    soft_to_hard,
    straight_through,
)
from overt.nn.vqa.model import VQA, VQASizes
from overt.testing import check_model, toy_batch

CELL, QUESTION, JOINT = 6, 5, 8
LAYOUT = grid(3, 4)
SELECTIONS = {
    "all": Selection(keep_all),
    "top": Selection(partial(keep_top, count=3)),
    "adaptive": Selection(partial(keep_above_uniform, temperature=0.1)),
    "straight through": Selection(partial(keep_top, count=3), weigh=straight_through),
    "random": random_selection(3),
    "drawn": gumbel_selection(3),
    "drawn, straight through": gumbel_selection(3, weigh=straight_through),
    "softened": Selection(partial(keep_top, count=3), weigh=soft_to_hard),
}
AGGREGATES = {
    "sum": lambda: SumAggregation(JOINT),
    "mean": lambda: MeanAggregation(JOINT),
    "pairwise": lambda: NonLocalAggregation(JOINT, size=6, heads=2),
    "relation": lambda: RelationAggregation(JOINT, QUESTION, hidden=6, layers=3),
}


def make_attention(selection="adaptive", aggregate="sum", **options) -> HardAttention:
    torch.manual_seed(0)
    chosen = SELECTIONS[selection] if isinstance(selection, str) else selection
    return HardAttention(
        CELL, QUESTION, JOINT, selection=chosen, aggregate=AGGREGATES[aggregate](), **options
    ).double()


@pytest.fixture
def cells(generator):
    return torch.randn(4, 12, CELL, generator=generator, dtype=torch.float64)


@pytest.fixture
def question(generator):
    return torch.randn(4, QUESTION, generator=generator, dtype=torch.float64)


def run_attention(attend, cells, question, mask=None):
    return attend.attend(attend.of_cell(cells), question, LAYOUT, mask)


def slow_joint(attend, cells, question):
    """Compute equations 2 to 4, layer by layer."""

    def through(layers, x):
        for at in range(0, len(layers), 2):
            x = (x @ layers[at].weight.T + layers[at].bias).clamp_min(0)
        return x

    return through(attend.of_cell, cells) + through(attend.of_question, question)[:, None]


@pytest.mark.parametrize("count", [1, 3, 12])
def test_sum_of_the_top_cells_follows_equations_2_to_5(cells, question, count):
    attend = make_attention(partial(keep_top, count=count)).eval()
    joint = slow_joint(attend, cells, question)
    best = joint.square().sum(-1).argsort(descending=True)[:, :count]
    expected = torch.stack([row[at].sum(0) for row, at in zip(joint, best, strict=True)])
    found = run_attention(attend, cells, question)
    torch.testing.assert_close(found.summary, expected)
    assert found.attention.weights[:, 0, 0, 0].sum(-1).tolist() == [float(count)] * 4


def test_map_is_binary_and_covers_the_layout(cells, question):
    found = run_attention(make_attention().eval(), cells, question)
    assert found.attention.kind is Kind.AMOUNT
    assert found.attention.values.shape == (4, 1, 1, 1, 12)
    assert set(found.attention.weights.unique().tolist()) == {0.0, 1.0}
    assert found.attention.keys is LAYOUT
    assert found.extras["cells_kept"].equal(found.attention.weights.sum((1, 2, 3, 4)))
    found.attention.check()


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_han_2_keeping_every_cell_equals_the_model_without_attention(cells, question, aggregate):
    plain = run_attention(make_attention("all", aggregate).eval(), cells, question)
    every = run_attention(
        make_attention(partial(keep_top, count=12), aggregate).eval(), cells, question
    )
    assert every.summary.equal(plain.summary)
    assert every.attention.weights.equal(plain.attention.weights)


@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("selection", ["top", "adaptive", "random", "drawn"])
def test_han_3_dropped_cells_get_no_gradient(cells, question, selection, aggregate):
    attend, cells = make_attention(selection, aggregate), cells.requires_grad_()
    found = run_attention(attend, cells, question)
    found.summary.square().sum().backward()
    kept = found.attention.weights[:, 0, 0, 0] > 0
    assert cells.grad is not None
    assert (cells.grad[~kept] == 0).all()
    assert (cells.grad[kept] != 0).any()


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_han_9_permuting_cells_permutes_the_map_and_keeps_the_summary(
    cells, question, generator, aggregate
):
    attend, order = (
        make_attention("adaptive", aggregate).eval(),
        torch.randperm(12, generator=generator),
    )
    found, moved = (
        run_attention(attend, cells, question),
        run_attention(attend, cells[:, order], question),
    )
    assert moved.attention.weights.equal(found.attention.weights[..., order])
    torch.testing.assert_close(moved.summary, found.summary)


def test_han_12_selections_add_no_parameters():
    counts = {sum(p.numel() for p in make_attention(name).parameters()) for name in SELECTIONS}
    assert len(counts) == 1


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_han_13_straight_through_equals_han_forward_with_gradient_for_all_cells(
    cells, question, aggregate
):
    through, hard = make_attention("straight through", aggregate), make_attention("top", aggregate)
    cells = cells.requires_grad_()
    found = run_attention(through, cells, question)
    torch.testing.assert_close(found.summary, run_attention(hard, cells, question).summary)
    found.summary.square().sum().backward()
    kept = found.attention.weights[:, 0, 0, 0] > 0
    assert cells.grad is not None
    assert (cells.grad[~kept].abs().sum(-1) > 0).float().mean() > 0.5
    # in evaluation mode its FLOPs are those of the hard selection
    assert (
        run_attention(through.eval(), cells, question)
        .extras["flops"]
        .equal(run_attention(hard.eval(), cells, question).extras["flops"])
    )


def test_straight_through_in_training_costs_the_flops_of_all_cells(cells, question):
    through, every = (
        make_attention("straight through", "relation"),
        make_attention("all", "relation"),
    )
    found = run_attention(through, cells, question).extras
    assert found["flops"].equal(run_attention(every, cells, question).extras["flops"])
    assert found["cells_kept"].tolist() == [3.0] * 4


def test_random_selections_are_deterministic_in_eval_mode(cells, question):
    for name in ("random", "drawn"):
        attend = make_attention(name)
        maps = [run_attention(attend, cells, question).attention.weights for _ in range(4)]
        assert not all(one.equal(maps[0]) for one in maps)
        attend.eval()
        maps = [run_attention(attend, cells, question).attention.weights for _ in range(2)]
        assert maps[0].equal(maps[1])


def test_weights_go_from_soft_to_hard_during_training(cells, question):
    weigh = partial(soft_to_hard, hardness=partial(linear_ramp, start=0.0, end=0.5))
    attend = make_attention(Selection(partial(keep_top, count=3), weigh=weigh))
    hard = run_attention(make_attention("top"), cells, question)
    away = []
    for progress in (0.0, 0.25, 0.5):
        attend.progress = progress
        found = run_attention(attend, cells, question)
        away.append(float((found.summary - hard.summary).abs().max().detach()))
        torch.testing.assert_close(found.attention.weights.sum(-1), hard.attention.weights.sum(-1))
    assert away[0] > away[1] > away[2] == pytest.approx(0, abs=1e-12)
    attend.progress = 0.0
    assert run_attention(attend.eval(), cells, question).summary.equal(
        run_attention(make_attention("top").eval(), cells, question).summary
    )


def test_number_of_kept_cells_decreases_during_training(cells, question):
    """All cells first, then fewer of the largest, and in the end those of the rule."""
    few = partial(keep_top, count=3)
    attend = make_attention(Selection(few, widen=partial(linear_decay, start=0.2, end=0.6)))
    every, hard = (run_attention(make_attention(name), cells, question) for name in ("all", "top"))
    kept = []
    for progress, count in ((0.0, 12), (0.2, 12), (0.3, 10), (0.5, 5), (0.6, 3), (1.0, 3)):
        attend.progress = progress
        found = run_attention(attend, cells, question)
        assert found.extras["cells_kept"].tolist() == [count] * 4
        kept.append(found.attention.weights > 0)
        slow = run_attention(
            make_attention(Selection(partial(keep_top, count=count))), cells, question
        )
        torch.testing.assert_close(found.summary, slow.summary)
    assert all((one | other).equal(one) for one, other in pairwise(kept))
    attend.progress = 0.0
    torch.testing.assert_close(run_attention(attend, cells, question).summary, every.summary)
    torch.testing.assert_close(run_attention(attend.eval(), cells, question).summary, hard.summary)


@pytest.mark.parametrize("name", ["adaptive", "top"])
@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_masked_and_gathered_cells_agree(cells, question, name, aggregate):
    """Equal summaries and gradients, with operations that do not depend on tensor values."""
    attend = make_attention(name, aggregate)
    found = []
    for collect in (gather_cells, mask_cells):
        attend.collect = collect
        looked = run_attention(attend, cells, question)
        slopes = torch.autograd.grad(looked.summary.sin().sum(), attend.parameters())
        found.append([looked.summary, looked.attention.weights, *looked.extras.values(), *slopes])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_padded_cells_as_on_a_gpu_give_the_same_result(cells, question, aggregate, monkeypatch):
    """Run the GPU branch of `gather_cells` here: padding is not part of the map."""
    mask = torch.ones(4, 12, dtype=torch.float64)
    mask[0, 5:] = 0
    attend = make_attention("adaptive", aggregate).eval()
    wanted = run_attention(attend, cells, question, mask)
    monkeypatch.setattr(sys.modules[HardAttention.__module__], "gather_cells", gather_cells_on_gpu)
    found = run_attention(attend, cells, question, mask)
    torch.testing.assert_close(found.summary, wanted.summary)
    assert found.attention.weights.equal(wanted.attention.weights)
    for name, values in wanted.extras.items():
        torch.testing.assert_close(found.extras[name], values)


def gather_cells_on_gpu(cells, kept, count=None):
    return pad_cells(cells, kept) if count is None else gather_cells(cells, kept, count)


def test_cuda_graph_safety_depends_on_the_selection():
    assert (
        make_attention("top").cuda_graph_safe()
        and make_attention("all").cuda_graph_safe()
        and make_attention("random").cuda_graph_safe()
    )
    attend = make_attention("adaptive")
    assert not attend.cuda_graph_safe()
    attend.collect = mask_cells
    assert attend.cuda_graph_safe()


def test_advance_returns_a_key_per_distinct_schedule_state(cells, question):
    attend = make_attention(
        Selection(partial(keep_top, count=3), widen=partial(linear_decay, start=0.2, end=0.6))
    )
    run_attention(attend, cells, question)
    told = [attend.advance(at / 100)[0] for at in range(101)]
    assert told == sorted(told, reverse=True) and set(told) == set(range(3, 13))
    assert attend.progress == 1.0
    soft = make_attention(Selection(partial(keep_top, count=3), weigh=soft_to_hard))
    assert [soft.advance(at)[1] for at in (0.25, 0.5, 0.75)] == [0.5, 1.0, 1.0]
    still = (
        make_attention("top"),
        make_attention(Selection(partial(keep_top, count=3), weigh=straight_through)),
    )
    assert all(one.advance(0.1) == one.advance(0.9) for one in still)
    own = make_attention(Selection(weigh=lambda scores, kept, progress: scores * progress))
    assert own.advance(0.1) != own.advance(0.2)


def test_adaptive_selection_with_widening_ignores_absent_cells(cells, question):
    attend = make_attention(Selection(SELECTIONS["adaptive"].rule, widen=linear_decay))
    mask = torch.ones(4, 12, dtype=torch.float64)
    mask[0, 5:] = 0
    attend.progress = 0.0
    found = run_attention(attend, cells, question, mask).extras["cells_kept"]
    assert found.tolist() == [5, 12, 12, 12]
    attend.progress = 1.0
    narrow = run_attention(attend, cells, question, mask)
    slow = run_attention(make_attention("adaptive"), cells, question, mask)
    torch.testing.assert_close(narrow.summary, slow.summary)


def test_selection_depends_on_the_question_unless_the_score_ignores_it(cells, question):
    question = 20 * question  # an untrained network hardly depends on it
    other = question.flip(0)
    for score, moves in ((joint_presence, True), (image_presence, False)):
        attend = make_attention("top", score=score).eval()
        one, two = (run_attention(attend, cells, q).attention.weights for q in (question, other))
        assert one.equal(two) is not moves
        image = attend.of_cell(cells)
        joint = image + attend.of_question(question)[:, None]
        expected = keep_top(presence(joint if moves else image), 3)
        assert one[:, 0, 0, 0].bool().equal(expected)


def test_content_presence_ignores_position_features(cells, question):
    attend = HardAttention(
        CELL, QUESTION, depth=None, selection=partial(keep_top, count=3), score=content_presence
    )
    cells[..., -2:] *= 100
    expected = keep_top(presence(cells[..., :-2]), 3)
    found = run_attention(attend.double().eval(), cells, question).attention.weights
    assert found[:, 0, 0, 0].bool().equal(expected)


def test_depth_0_projects_the_question_only(cells, question):
    attend = HardAttention(CELL, QUESTION, depth=0, selection=keep_all).double().eval()
    assert [p.shape for p in attend.parameters()] == [(CELL, QUESTION), (CELL,)]
    expected = cells.sum(1) + 12 * attend.of_question(question)
    torch.testing.assert_close(run_attention(attend, cells, question).summary, expected)


def test_depth_none_passes_cells_unchanged(cells, question):
    attend = HardAttention(CELL, QUESTION, depth=None, selection=keep_all).double().eval()
    assert not list(attend.parameters())
    torch.testing.assert_close(run_attention(attend, cells, question).summary, cells.sum(1))


@pytest.mark.parametrize("selection", ["top", "adaptive", "straight through", "all"])
@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_masked_cells_equal_cells_never_given(cells, question, selection, aggregate):
    attend = make_attention(selection, aggregate)
    mask = torch.ones(4, 12, dtype=torch.float64)
    mask[:, [1, 4, 5]] = 0
    left = mask[0].bool()
    found = run_attention(attend, cells, question, mask)
    alone = attend.attend(attend.of_cell(cells[:, left]), question, grid(3, 3))
    torch.testing.assert_close(found.summary, alone.summary)
    assert (found.attention.weights[..., ~left] == 0).all()
    nothing = run_attention(attend, cells, question, torch.zeros_like(mask))
    assert (nothing.summary == 0).all()
    assert nothing.attention.weights.sum() == 0
    nothing.summary.sum().backward()
    grads = [p.grad for p in attend.parameters() if p.grad is not None]
    assert all(grad.isfinite().all() for grad in grads)


def test_fractional_mask_scales_its_cell(cells, question):
    attend = make_attention("all").eval()
    mask = torch.rand(4, 12, dtype=torch.float64) + 0.1
    expected = (slow_joint(attend, cells, question) * mask[..., None]).sum(1)
    torch.testing.assert_close(run_attention(attend, cells, question, mask).summary, expected)


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_flops_per_sample_agree_with_torch_flop_counter(cells, question, aggregate):
    attend = make_attention("top", aggregate).eval()
    image = attend.of_cell(cells)
    with FlopCounterMode(display=False) as counter:
        found = attend.attend(image, question, LAYOUT)
    assert counter.get_total_flops() == int(found.extras["flops"].sum())


SIZES = VQASizes(vocabulary=10, answers=3, cell=6, word=5, question=7, hidden=8, dropout=0.2)


@pytest.mark.long
@pytest.mark.parametrize("selection", SELECTIONS)
def test_every_selection_passes_check_model_inside_a_vqa_model(selection):
    def make() -> VQA:
        torch.manual_seed(0)
        attend = HardAttention(SIZES.seen, SIZES.question, selection=SELECTIONS[selection])
        return VQA(SIZES, attend)

    check_model(make, toy_batch())


def test_vqa_model_returns_cells_kept_and_flops():
    attend = HardAttention(
        SIZES.seen,
        SIZES.question,
        selection=partial(keep_top, count=3),
        aggregate=NonLocalAggregation(SIZES.seen, size=SIZES.seen),
    )
    found = VQA(SIZES, attend).eval()(toy_batch()).extras
    assert found["cells_kept"].tolist() == [3.0] * 4
    asking = linear_flops(attend.of_question)
    assert found["flops"].equal(attend.aggregate.flops(found["cells_kept"]) + asking)


@pytest.mark.parametrize("joint", [1, 5, 16, 33])
@pytest.mark.parametrize("aggregate", [None, lambda joint: NonLocalAggregation(joint, size=6)])
def test_joint_width_may_differ_from_the_cell_width(joint, aggregate):
    """The width of a summary is independent of the width of a cell."""
    made = None if aggregate is None else aggregate(joint)
    attend = HardAttention(32, 8, joint=joint, aggregate=made).eval()
    summary, attention = attend(torch.rand(3, 12, 32), torch.rand(3, 8), grid(3, 4))
    assert summary.shape == (3, attend.width) and attention.check() is attention


@pytest.mark.parametrize("joint", [5, 16])
def test_vqa_model_accepts_hard_attention_of_any_width(joint):
    attend = HardAttention(SIZES.seen, SIZES.question, joint=joint)
    found = VQA(SIZES, attend).eval()(toy_batch())
    assert found.prediction.shape == (4, 3)
    again = VQA.from_config(VQA(SIZES, attend).config())
    assert again.decision[1].in_features == joint + SIZES.question


@pytest.mark.parametrize("selection", [keep_all, partial(keep_top, count=3), keep_above_uniform])
def test_cells_of_zeros_can_be_selected(selection, question):
    """After a ReLU cells may be zero; an image of zeros still keeps some."""
    attend = HardAttention(CELL, QUESTION, 4, selection=selection).double().eval()
    b = len(question)
    nothing = torch.zeros(b, 12, CELL, dtype=torch.float64)
    _, attention = attend(nothing, question, LAYOUT)
    kept = attention.weights.flatten(1).sum(dim=-1)
    assert (kept >= 1).all()
    if selection is keep_all:
        assert (kept == 12).all()
    _, removed = attend(nothing, question, LAYOUT, torch.zeros(b, 12, dtype=torch.float64))
    assert not removed.weights.any()


def test_a_mask_removes_cells(cells, question):
    attend = HardAttention(CELL, QUESTION, selection=keep_all).double().eval()
    mask = (torch.arange(cells.shape[1]) % 2).double().expand(cells.shape[:2])
    _, attention = attend(cells, question, LAYOUT, mask)
    assert torch.equal(attention.weights.flatten(1), mask)


@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("depth", [2, 0, None])
def test_hard_attention_is_rebuilt_from_its_config(aggregate, depth):
    for name in SELECTIONS:
        attend = make_attention(name, aggregate, depth=depth, score=image_presence)
        again = hard_attention_from_config(attend.config())
        assert again.config() == attend.config()
        assert again.state_dict().keys() == attend.state_dict().keys()


def test_custom_or_unknown_score_raises():
    with pytest.raises(UserError, match="unplaced"):
        make_attention(score=lambda joint, image: presence(joint)).config()
    with pytest.raises(UserError, match=r"'loud'.*unplaced"):
        hard_attention_from_config({**make_attention().config(), "score": "loud"})


def test_evidence_is_selected_before_the_largest_norms():
    scores = torch.tensor([[5.0, 1.0, 0.0, 1e4, 2.0]])
    evidence = torch.tensor([[0.0, 0.2, 0.7, 0.0, 0.0]])
    order = evidence_first(evidence, scores).argsort(descending=True)
    assert order.tolist() == [[2, 1, 3, 0, 4]]
    none = evidence_first(torch.zeros(1, 5), scores)
    assert torch.equal(none.argsort(), scores.argsort())


def test_attention_with_evidence_keeps_those_cells_unless_a_mask_removes_them():
    torch.manual_seed(0)
    attend = HardAttention(CELL, QUESTION, JOINT, selection=partial(keep_top, count=2)).eval()
    cells, question = torch.rand(1, 12, CELL), torch.rand(1, QUESTION)
    evidence = torch.zeros(1, 12)
    evidence[0, 3], evidence[0, 8] = 0.5, 0.25
    aligned = attend.of_cell(cells)
    kept = attend.attend(aligned, question, LAYOUT, evidence=evidence).attention.weights.flatten()
    assert kept.nonzero().flatten().tolist() == [3, 8]
    mask = torch.ones(1, 12)
    mask[0, 3] = 0
    masked = attend.attend(aligned, question, LAYOUT, mask, evidence).attention.weights.flatten()
    assert masked[3] == 0 and masked[8] > 0 and int((masked > 0).sum()) == 2


def test_a_count_above_the_cells_raises_only_without_a_mask():
    attend = HardAttention(CELL, QUESTION, JOINT, selection=partial(keep_top, count=99)).eval()
    cells, question = torch.rand(2, 12, CELL), torch.rand(2, QUESTION)
    with pytest.raises(UserError, match="99 of 12"):
        attend(cells, question, LAYOUT)
    _, attention = attend(cells, question, LAYOUT, torch.ones(2, 12))
    assert attention.weights.sum() == 24


@pytest.mark.parametrize(
    ("selection", "message"),
    [(keep_top, r"partial\(keep_top"), (4, "rule.*4")],
)
def test_a_selection_that_is_not_a_rule_is_named(selection, message, monkeypatch):
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)  # as for users
    with pytest.raises(TypeError, match=message):
        HardAttention(CELL, QUESTION, selection=selection)


def test_progress_is_a_share():
    with pytest.raises(ValueError, match="progress.*300"):
        make_attention().advance(300.0)
