"""Supervision of selected heads: masks, soft minimum, gates, gradient agreement."""

import math

import pytest
import torch

from overt import watch
from overt.attention import AttentionMap, Form, words
from overt.losses import SupervisedModel, cross_entropy, kl
from overt.losses.grounding import direct_supervision
from overt.losses.head_selection import (
    HeadGates,
    cross_entropy_per_head,
    gradient_agreement,
    heads_of_layers,
    mask_target_heads,
    on_selected_heads,
    soft_minimum_over_heads,
    top_heads,
)
from tests.losses.maps import random_map, random_target
from tests.losses.stream import Stream, make_target, pack_samples


def slow_heads(attention: AttentionMap, target: AttentionMap) -> list[list[tuple[float, int]]]:
    """Compute the cross-entropy of each head separately."""
    l, h = attention.values.shape[1:3]
    found = []
    for layer in range(l):
        found.append([])
        for head in range(h):
            one = attention.layer(layer).head(head)
            loss = cross_entropy(one, target)
            found[-1].append((float(loss.total), int(loss.count)))
    return found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("form", [Form.LOG, Form.PLAIN])
def test_cross_entropy_per_head_agrees_with_the_slow_reference(seed, form):
    attention = random_map(seed=seed)
    target = random_target(attention, seed + 7)
    if form is Form.PLAIN:
        attention = AttentionMap(
            attention.weights, attention.keys, attention.queries, attention.mask
        )
    totals, counts = cross_entropy_per_head(attention, target)
    for layer, row in enumerate(slow_heads(attention, target)):
        for head, (total, count) in enumerate(row):
            assert float(totals[layer, head]) == pytest.approx(total)
            assert int(counts[layer, head]) == count
    mean = cross_entropy(attention, target)
    torch.testing.assert_close(totals.mean(), mean.total)


def test_loss_on_selected_heads_is_their_mean():
    attention = random_map(l=3, h=2)
    target = random_target(attention)
    which = torch.tensor([[True, False], [False, False], [False, True]])
    loss = on_selected_heads(which)(attention, target)
    slow = slow_heads(attention, target)
    assert float(loss.total) == pytest.approx((slow[0][0][0] + slow[2][1][0]) / 2)
    assert int(loss.count) == slow[0][0][1]
    torch.testing.assert_close(
        on_selected_heads(torch.ones(3, 2, dtype=torch.bool), kl)(attention, target).total,
        kl(attention, target).total,
    )
    nothing = on_selected_heads(torch.zeros(3, 2, dtype=torch.bool))(attention, target)
    assert float(nothing.total) == 0 and int(nothing.count) == 0


def test_unselected_heads_get_no_gradient():
    torch.manual_seed(0)
    net = Stream(layers=2).double()
    x, there, layout = pack_samples([(torch.randn(4, 8).double(), torch.randn(3, 8).double())])
    with watch(net, layout=layout) as trace:
        net(x, there)
    which = torch.tensor([[False, True], [False, False]])
    found = direct_supervision(
        trace.log_block,
        make_target([{1: [0], 2: [2]}], 4, 3),
        on_selected_heads(which),
        on_selected_heads(which),
    )
    (found["to_regions"].total + found["to_text"].total).backward()
    slopes = net.layers[0].qkv.weight.grad.view(3, 2, 4, 8)  # query, key, value; head
    assert (slopes[:2, 0] == 0).all() and (slopes[:2, 1] != 0).any() and (slopes[2] == 0).all()
    last = net.layers[1].qkv.weight.grad
    assert last is None or (last == 0).all()


def test_heads_are_selected_by_layer_or_by_score():
    assert heads_of_layers([0, -1], (3, 2)).tolist() == [[True] * 2, [False] * 2, [True] * 2]
    scores = torch.tensor([[0.5, float("nan"), 0.9], [0.5, 0.1, 0.9]])
    assert top_heads(scores, 3).tolist() == [[True, False, True], [False, False, True]]
    assert top_heads(torch.full((1, 2), torch.nan), 1).tolist() == [[False, False]]
    with pytest.raises(ValueError, match="count .* 6.* 7"):
        top_heads(scores, 7)
    with pytest.raises(ValueError, match="layer 3 .* 3 layers"):
        heads_of_layers([3], (3, 2))
    with pytest.raises(ValueError, match=r"2 heads.*\(3, 2\)"):
        mask_target_heads(random_target(random_map(), heads=4), torch.ones(3, 2, dtype=torch.bool))


# --- soft minimum


def test_soft_minimum_agrees_with_the_slow_reference():
    attention = random_map(l=2, h=3)
    target = random_target(attention)
    for temperature in (0.1, 1.0):
        loss = soft_minimum_over_heads(temperature)(attention, target)
        costs = []
        for row in range(len(attention)):
            for q in range(4):
                one = attention.weights[row, :, :, q].flatten(0, 1)
                wanted = target.weights[row, 0, 0, q]
                if wanted.sum() == 0 or not attention.rows[row, q]:
                    continue
                each = [
                    -sum(float(t) * math.log(float(a)) for a, t in zip(head, wanted, strict=True)
                         if t > 0)
                    for head in one
                ]  # fmt: skip
                mean = sum(math.exp(-cost / temperature) for cost in each) / 6
                costs.append((-temperature * math.log(mean), min(each), sum(each) / 6))
        assert float(loss.total) == pytest.approx(sum(cost for cost, _, _ in costs))
        assert int(loss.count) == len(costs)
        assert all(best <= cost <= mean for cost, best, mean in costs)
    even = soft_minimum_over_heads(1e4)(attention, target)
    torch.testing.assert_close(
        even.total, cross_entropy(attention, target).total, rtol=1e-3, atol=1e-3
    )
    with pytest.raises(ValueError, match=r"temperature .* 0\.0"):
        soft_minimum_over_heads(0.0)


def test_soft_minimum_without_rows_has_a_finite_gradient():
    scores = torch.randn(1, 2, 2, 1, 3, requires_grad=True)
    attention = AttentionMap.from_scores(scores, words(3), words(1))
    nothing = AttentionMap(torch.zeros(1, 1, 1, 1, 3), words(3), words(1))
    loss = soft_minimum_over_heads()(attention, nothing)
    loss.total.backward()
    assert float(loss.total.detach()) == 0 and (scores.grad == 0).all()


# --- gates


def test_initial_gates_are_uniform_and_equal_direct_supervision():
    attention = random_map()
    target = random_target(attention)
    gates = HeadGates(2, 2)
    loss, mean = gates(attention, target), cross_entropy(attention, target)
    torch.testing.assert_close(loss.total.detach(), mean.total)
    assert int(loss.count) == int(mean.count)


def test_gates_converge_to_the_known_optimum():
    """For constant costs gates are proportional to exp(-c / t), with a known loss."""
    attention = random_map(l=2, h=3)
    target = random_target(attention)
    gates = HeadGates(2, 3, temperature=0.7).double()
    optimizer = torch.optim.Adam(gates.parameters(), lr=0.05)
    for _ in range(400):
        optimizer.zero_grad()
        gates(attention, target).mean().backward()
        optimizer.step()
    totals, counts = cross_entropy_per_head(attention, target)
    costs = totals / counts
    expected = (-costs / 0.7).flatten().softmax(dim=0).view(2, 3)
    torch.testing.assert_close(gates.probabilities.detach(), expected, atol=1e-3, rtol=1e-2)
    rest = -0.7 * (-costs / 0.7).exp().mean().log()
    assert float(gates(attention, target).mean().detach()) == pytest.approx(float(rest), abs=1e-4)


def test_gates_and_scores_get_gradients_and_gates_are_loss_modules():
    scores = torch.randn(2, 2, 2, 3, 4, requires_grad=True)
    attention = AttentionMap.from_scores(scores, words(4), words(3))
    target = random_target(attention.detach())
    gates = HeadGates(2, 2)
    gates(attention, target).total.backward()
    assert scores.grad.any() and gates.logits.grad.any()
    assert set(SupervisedModel(torch.nn.Linear(1, 1), gates=gates).loss_modules) == {"gates"}
    with pytest.raises(ValueError, match=r"\(3, 2\)"):
        HeadGates(3, 2)(attention, target)
    with pytest.raises(ValueError, match=r"temperature .* 0\.0"):
        HeadGates(2, 2, 0.0)


# --- gradient agreement


def test_gradient_agreement_is_the_product_of_gradients():
    torch.manual_seed(0)
    weight = torch.randn(6, dtype=torch.float64, requires_grad=True)
    spare = torch.randn(2, dtype=torch.float64, requires_grad=True)
    mixes = torch.randn(2, 3, 6, dtype=torch.float64)

    def task():
        return (weight - 1).square().sum()

    def heads():
        return (mixes @ weight).sin()

    before = weight.detach().clone()
    found = gradient_agreement([weight, spare], task, heads, step=1e-6)
    slope = torch.autograd.grad(task(), weight)[0]
    for layer in range(2):
        for head in range(3):
            own = torch.autograd.grad(heads()[layer, head], weight)[0]
            expected = float(own @ slope / slope.norm())
            assert float(found[layer, head]) == pytest.approx(expected, abs=1e-4)
    assert torch.equal(weight.detach(), before)


def test_gradient_agreement_restores_parameters_after_an_error():
    weight = torch.ones(2, requires_grad=True)
    calls = []

    def heads():
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("broken")
        return torch.zeros(1, 1)

    with pytest.raises(RuntimeError, match="broken"):
        gradient_agreement([weight], weight.sum, heads)
    assert weight.tolist() == [1, 1]
