"""Losses on attention: values by hand, slow references, uncounted rows, extremes, errors."""

import inspect
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import Tensor

from overt.attention import AttentionMap, Form, Kind, Layout, Span, grid, words
from overt.errors import UserError
from overt.losses import classification, cross_entropy, emd, kl, mse, soft_classification
from overt.losses.attention_losses import LOG_EPS, check_shapes, detach_subnormal
from overt.losses.grounding import bce_on_log_weights
from tests.losses.maps import random_map, random_target, rows_of

LOSSES = {"cross_entropy": cross_entropy, "kl": kl, "mse": mse}
HALF_DTYPES = (torch.bfloat16, torch.float16)


def slow_loss(name: str, attention: AttentionMap, target: AttentionMap) -> tuple[float, int]:
    """Compute the sum over rows and their number, one weight at a time."""
    weights, wanted = attention.weights.tolist(), target.weights
    b, l, h, q, k = attention.values.shape
    wanted = wanted.expand(b, l, h, q, k).tolist()
    visible = attention.visible.tolist()
    total, count = 0.0, 0
    for at in range(b):
        for query in range(q):
            if not any(visible[at][query]):
                continue
            found = []
            for layer in range(l):
                for head in range(h):
                    row = weights[at][layer][head][query]
                    goal = wanted[at][layer][head][query]
                    if sum(goal) <= 0:
                        continue
                    value = 0.0
                    for a, t, seen in zip(row, goal, visible[at][query], strict=True):
                        if name == "mse":
                            value += (t - a) ** 2 / sum(visible[at][query]) if seen else 0
                        elif t > 0:
                            value -= t * (math.log(a) if a > 0 else LOG_EPS)
                            value += t * math.log(t) if name == "kl" else 0
                    found.append(value)
            if found:
                total += sum(found) / len(found)
                count += 1
    return total, count


# --- by hand


def test_grounding_of_a_phrase_by_hand():
    """Row [.1, .2, .3, .05, .35] with regions at 2, 3, 4; the first region is the target."""
    row = torch.tensor([0.1, 0.2, 0.3, 0.05, 0.35], dtype=torch.float64)
    keys = words(2) + grid(1, 3)
    attention = AttentionMap(row.view(1, 1, 1, 1, 5), keys).between("global", "image")
    found = attention.weights.flatten().tolist()
    assert found == pytest.approx([0.428571, 0.071429, 0.5], abs=1e-6)
    target = AttentionMap.from_cells(torch.tensor([[1.0, 0, 0]]), grid(1, 3))
    loss = cross_entropy(attention, target)
    assert float(loss.total) == pytest.approx(0.847298, abs=1e-6) and int(loss.count) == 1
    assert float(kl(attention, target).total) == pytest.approx(0.847298, abs=1e-6)
    by_hand = ((1 - 3 / 7) ** 2 + (1 / 14) ** 2 + 0.5**2) / 3
    assert float(mse(attention, target).total) == pytest.approx(by_hand)


def test_perfect_attention_has_zero_loss():
    target = rows_of([0.0, 1.0, 0.0])
    for loss in LOSSES.values():
        assert float(loss(target, target).total) == pytest.approx(0.0, abs=1e-6)


def test_losses_of_uniform_rows_by_hand():
    even, target = rows_of([0.25] * 4), rows_of([0.5, 0.5, 0.0, 0.0])
    assert float(cross_entropy(even, target).total) == pytest.approx(math.log(4))
    assert float(kl(even, target).total) == pytest.approx(math.log(2))
    assert float(mse(even, target).total) == pytest.approx(0.0625)


def test_mse_of_the_two_sample_toy():
    mu, alpha = rows_of([0.5, 0.5], [0.9, 0.1]), rows_of([0.5, 0.5], [0.5, 0.5])
    loss = mse(alpha, mu)
    assert float(loss.total) == pytest.approx(0.16) and int(loss.count) == 2
    assert float(loss.mean()) == pytest.approx(0.08)


def test_target_key_without_attention_has_the_loss_of_weight_1e_9():
    loss = cross_entropy(rows_of([1.0, 0.0]), rows_of([0.0, 1.0]))
    assert float(loss.total) == pytest.approx(-math.log(1e-9), abs=0.05)
    hidden = AttentionMap.from_scores(
        torch.zeros(1, 1, 1, 1, 2), words(2), mask=torch.tensor([[[True, False]]])
    )
    assert float(cross_entropy(hidden, rows_of([0.0, 1.0])).total) == loss.total


def test_log_weights_may_exceed_that_loss_and_have_gradients():
    scores = torch.tensor([40.0, 0.0], requires_grad=True)
    attention = AttentionMap.from_scores(scores.view(1, 1, 1, 1, 2), words(2))
    loss = cross_entropy(attention, rows_of([0.0, 1.0])).total
    loss.backward()
    assert float(loss.detach()) == pytest.approx(40.0)
    assert scores.grad.tolist() == pytest.approx([1.0, -1.0])


def test_tiny_plain_weights_have_no_gradient():
    for tiny in (1e-12, 1e-38, 1e-42, 0.0):
        weights = torch.tensor([[1.0, tiny]], requires_grad=True)
        attention = AttentionMap.from_cells(weights, words(2))
        cross_entropy(attention, rows_of([0.0, 1.0])).total.backward()
        assert weights.grad.tolist() == [[0, 0]]


def test_classification_by_hand():
    prediction = torch.tensor([[0.0, 0.0], [math.log(3.0), 0.0]])
    loss = classification(prediction, torch.tensor([0, 1]))
    assert float(loss.total) == pytest.approx(math.log(2) + math.log(4))
    assert float(loss.count) == 2
    rows = [row[label] - math.log(sum(map(math.exp, row)))
            for row, label in zip(prediction.tolist(), [0, 1], strict=True)]  # fmt: skip
    assert float(loss.total) == pytest.approx(-sum(rows))
    half = classification(prediction.to(torch.bfloat16) * 1000, torch.tensor([1, 1]))
    assert half.total.dtype == torch.float32 and half.total.isfinite()
    assert classification(prediction.double(), torch.tensor([0, 1])).total.dtype == torch.float64
    empty = classification(torch.zeros(0, 3), torch.zeros(0, dtype=torch.long))
    assert float(empty.total) == 0 and float(empty.count) == 0


def test_soft_classification_by_hand():
    """Ten annotators: 6 chose class one, 3 class three, 1 no class; the second row has none."""
    prediction = torch.tensor([[0.0, 1.0, 2.0], [1.0, 2.0, 3.0]])
    answers = torch.tensor([[0.6, 0.0, 0.3], [0.0, 0.0, 0.0]])
    loss = soft_classification(prediction, answers)
    total = math.log(sum(math.exp(x) for x in (0.0, 1.0, 2.0)))
    assert float(loss.total) == pytest.approx(0.6 * total + 0.3 * (total - 2))
    assert int(loss.count) == 1
    labels = torch.tensor([2, 0])
    sure = torch.nn.functional.one_hot(labels, 3).float()
    one, other = soft_classification(prediction, sure), classification(prediction, labels)
    torch.testing.assert_close(one.total, other.total)
    assert soft_classification(prediction.bfloat16(), answers).total.dtype == torch.float32


# --- slow references


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("plain", [True, False])
def test_every_loss_agrees_with_its_slow_reference(name, heads, masked, plain):
    for seed in range(3):
        attention = random_map(seed=seed, masked=masked)
        target = random_target(attention, seed + 10, heads)
        if plain:
            attention = replace(attention, values=attention.weights, form=Form.PLAIN)
        loss = LOSSES[name](attention, target)
        total, count = slow_loss(name, attention, target)
        assert float(loss.total) == pytest.approx(total, rel=1e-9)
        assert int(loss.count) == count > 0


def test_kl_agrees_with_torch():
    attention = random_map(masked=False)
    target = random_target(attention, heads=2)
    foreign = torch.nn.functional.kl_div(
        attention.log_weights, target.weights, reduction="none"
    ).sum(dim=-1)
    expected = foreign.mean(dim=(1, 2))[target.weights.sum(dim=-1)[:, 0, 0] > 0].sum()
    torch.testing.assert_close(kl(attention, target).total, expected)


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_agree_with_finite_differences(name):
    attention = random_map(b=2, q=2, k=3)
    target = random_target(attention)

    def loss(scores: Tensor) -> Tensor:
        made = AttentionMap.from_scores(scores, attention.keys, attention.queries, attention.mask)
        return LOSSES[name](made, target).total

    scores = torch.randn(attention.values.shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(loss, (scores,))


# --- invariances


@pytest.mark.parametrize("name", LOSSES)
def test_target_of_one_head_applies_to_every_head(name):
    attention = random_map()
    target = random_target(attention)
    spread = replace(target, values=target.values.expand_as(attention.values).clone())
    one, all_of_them = LOSSES[name](attention, target), LOSSES[name](attention, spread)
    torch.testing.assert_close(one.total, all_of_them.total)
    assert one.count == all_of_them.count
    heads = [
        LOSSES[name](attention.layer(l).head(h), target).total for l in range(2) for h in range(2)
    ]
    torch.testing.assert_close(one.total, torch.stack(heads).mean())


@pytest.mark.parametrize("name", LOSSES)
def test_head_without_a_target_gets_no_gradient(name):
    """It does not dilute the loss of the other heads either."""
    scores = torch.randn(1, 1, 3, 1, 4, requires_grad=True)
    values = torch.zeros(1, 1, 3, 1, 4)
    values[0, 0, 1, 0, 2] = 1
    target = AttentionMap(values, words(4), kind=Kind.AMOUNT)
    attention = AttentionMap.from_scores(scores, words(4))
    loss = LOSSES[name](attention, target)
    loss.total.backward()
    assert not scores.grad[:, :, [0, 2]].any() and scores.grad[:, :, 1].any()
    alone = LOSSES[name](attention.head(1), target.head(1))
    torch.testing.assert_close(loss.total, alone.total)
    assert loss.count == alone.count == 1


@pytest.mark.parametrize("name", LOSSES)
def test_loss_of_a_sample_does_not_depend_on_the_batch(name):
    """Alone, in another order, and with more padding."""
    attention = random_map(b=5, seed=3)
    target = random_target(attention, seed=4)
    whole = LOSSES[name](attention, target)
    parts = []
    for at in range(5):
        row = torch.tensor([at])
        one, goal = attention.select(row), target.select(row)
        loss = LOSSES[name](one, goal)
        parts.append(loss)
        wider = AttentionMap.from_scores(
            torch.nn.functional.pad(one.values.masked_fill(one.values.isneginf(), 0.0), (0, 2)),
            words(7),
            one.queries,
            torch.nn.functional.pad(one.mask, (0, 2)),
        )
        longer = replace(goal, values=torch.nn.functional.pad(goal.values, (0, 2)), keys=words(7))
        padded = LOSSES[name](wider, longer)
        torch.testing.assert_close(padded.total, loss.total)
        assert padded.count == loss.count
    torch.testing.assert_close(sum(part.total for part in parts), whole.total)
    assert sum(int(part.count) for part in parts) == int(whole.count)
    order = torch.tensor([3, 0, 4, 2, 1])
    again = LOSSES[name](attention.select(order), target.select(order))
    torch.testing.assert_close(again.total, whole.total)


@pytest.mark.parametrize("name", LOSSES)
def test_rows_without_a_target_or_visible_keys_do_not_count(name):
    scores = torch.randn(3, 1, 2, 1, 4, requires_grad=True)
    mask = torch.ones(3, 1, 4, dtype=torch.bool)
    mask[1] = False
    attention = AttentionMap.from_scores(scores, words(4), mask=mask)
    target = rows_of([0.0] * 4, [1.0, 0, 0, 0], [0.0, 1, 0, 0])
    loss = LOSSES[name](attention, target)
    assert int(loss.count) == 1
    loss.total.backward(retain_graph=True)
    assert not scores.grad[:2].any() and scores.grad[2].any() and scores.grad.isfinite().all()
    scores.grad = None
    nothing = LOSSES[name](attention, rows_of(*[[0.0] * 4] * 3))
    assert float(nothing.total.detach()) == 0 and int(nothing.count) == 0
    assert float(nothing.mean().detach()) == 0
    nothing.total.backward()
    assert scores.grad.isfinite().all() and not scores.grad.any()


def test_target_without_visible_keys_does_not_count():
    hidden = AttentionMap.from_cells(
        torch.ones(1, 3), words(3), torch.zeros(1, 3, dtype=torch.bool)
    )
    for loss in LOSSES.values():
        assert int(loss(rows_of([0.2, 0.3, 0.5]), hidden).count) == 0


@pytest.mark.parametrize("name", ["mse", "kl"])
def test_loss_and_gradient_are_zero_at_the_target(name):
    scores = torch.randn(3, 2, 2, 1, 5, dtype=torch.float64, requires_grad=True)
    attention = AttentionMap.from_scores(scores, words(5))
    loss = LOSSES[name](attention, attention.detach())
    loss.total.backward()
    assert float(loss.total.detach()) == pytest.approx(0.0, abs=1e-12)
    torch.testing.assert_close(scores.grad, torch.zeros_like(scores), rtol=0, atol=1e-12)


def test_keys_outside_the_block_get_no_gradient():
    """Renormalising over the regions cancels the weights on the words."""
    scores = torch.randn(2, 2, 2, 1, 5, dtype=torch.float64, requires_grad=True)
    attention = AttentionMap.from_scores(scores, words(2) + grid(1, 3)).between("global", "image")
    target = AttentionMap.from_cells(torch.tensor([[1.0, 0, 0], [0, 1.0, 1.0]]), grid(1, 3))
    cross_entropy(attention, target.normalize()).total.backward()
    torch.testing.assert_close(scores.grad[..., :2], torch.zeros(2, 2, 2, 1, 2).double())
    assert scores.grad[..., 2:].any()


# --- extremes


@pytest.mark.long
@settings(max_examples=500)
@given(
    seed=some.integers(0, 10**6),
    scale=some.sampled_from([0.0, 1.0, 100.0, 1e4, 6e4]),
    kind=some.sampled_from(HALF_DTYPES),
    name=some.sampled_from(sorted(LOSSES)),
    keys=some.integers(1, 5),
    seen=some.floats(0, 1),
    plain=some.booleans(),
)
def test_half_precision_losses_and_gradients_are_finite(seed, scale, kind, name, keys, seen, plain):
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(-1, 2, (2, 1, 2, 2, keys), generator=generator)
    scores = (signs * scale).to(kind).requires_grad_()
    mask = torch.rand(2, 2, keys, generator=generator) < seen
    wanted = (torch.rand(2, 1, 1, 2, keys, generator=generator) < 0.4).to(kind)
    queries = Layout((Span("words", (2,), slice(0, 2)),), 2)
    attention = AttentionMap.from_scores(scores, words(keys), queries, mask)
    if plain:
        attention = replace(attention, values=attention.weights, form=Form.PLAIN)
    target = AttentionMap(wanted, words(keys), queries, kind=Kind.AMOUNT).normalize()
    loss = LOSSES[name](attention, target)
    assert loss.total.isfinite() and loss.total.dtype == torch.float32
    assert float(loss.total.detach()) >= -1e-2 * int(loss.count)
    loss.total.backward()
    assert scores.grad.isfinite().all()
    idle = ~(mask.any(dim=-1) & (wanted.sum(dim=-1)[:, 0, 0] > 0))
    assert not scores.grad.transpose(1, 3)[idle].any()


def test_subnormal_plain_weights_have_finite_loss_and_gradient():
    scores = torch.tensor([[[[[16.0, 0.0]]]]], dtype=torch.float16, requires_grad=True)
    weights = scores.softmax(dim=-1)
    assert 0 < weights[..., 1] < torch.finfo(torch.float16).tiny
    wanted = AttentionMap(torch.tensor([[[[[0.3, 0.7]]]]]), words(2))
    for compare in (cross_entropy, kl, bce_on_log_weights):
        found = compare(AttentionMap(weights, words(2)), wanted)
        (slope,) = torch.autograd.grad(found.total, scores, retain_graph=True)
        assert found.total.isfinite() and slope.isfinite().all()
    large = detach_subnormal(
        AttentionMap(torch.tensor([[[[[0.5, 0.5]]]]], requires_grad=True), words(2))
    )
    assert torch.autograd.grad(large.values.log().sum(), large.values)[0].tolist() == [[[[[2, 2]]]]]


def test_bce_gradients_are_equal_for_log_and_plain_weights():
    scores = torch.randn(2, 1, 2, 3, 5, dtype=torch.float64, requires_grad=True)
    wanted = AttentionMap(torch.rand(2, 1, 1, 3, 5), words(5), words(3, "queries"))
    logs = AttentionMap.from_scores(scores, words(5), words(3, "queries"))
    plain = AttentionMap(logs.weights, words(5), words(3, "queries"))
    slopes = []
    for one in (logs, plain):
        total = bce_on_log_weights(one, wanted).total
        slopes.append(torch.autograd.grad(total, scores, retain_graph=True)[0])
    torch.testing.assert_close(slopes[0], slopes[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("loss", [cross_entropy, kl, mse, bce_on_log_weights, emd])
def test_target_of_another_shape_raises(loss):
    shares = torch.rand(2, 3, 4, 5, 6).softmax(dim=-1)
    attention = AttentionMap(shares, words(6), words(5))
    for b, q, k in ((3, 5, 6), (1, 5, 6), (2, 4, 6), (2, 5, 7)):
        wrong = AttentionMap(torch.ones(b, 1, 1, q, k) / k, words(k), words(q))
        with pytest.raises(ValueError, match=rf"\(2, 5, 6\) and \({b}, {q}, {k}\)"):
            loss(attention, wrong)
    few = AttentionMap(shares[:, :2], words(6), words(5))
    with pytest.raises(ValueError, match="3 layers .* 2 and 4"):
        loss(attention, few)


def test_target_that_is_not_an_attention_map_raises():
    unchecked = inspect.unwrap(check_shapes)  # without the type checks of the tests
    with pytest.raises(TypeError, match=r"Tensor.*AttentionMap"):
        unchecked(AttentionMap(torch.ones(1, 1, 1, 1, 2) / 2, words(2)), torch.ones(1, 1, 1, 1, 2))


@pytest.mark.parametrize("name", LOSSES)
def test_nan_target_gives_a_nan_loss(name):
    """The training loop reports a NaN loss; a skipped row would go unnoticed."""
    torch.manual_seed(0)
    attention = AttentionMap.from_scores(torch.randn(3, 2, 2, 1, 4), words(4))
    cells = torch.rand(3, 4)
    cells[1] = torch.nan
    loss = LOSSES[name](attention, AttentionMap.from_cells(cells, words(4)))
    assert loss.total.isnan() and int(loss.count) == 3


def test_samples_with_ignored_labels_do_not_count():
    torch.manual_seed(0)
    prediction, labels = torch.randn(5, 3), torch.tensor([0, -100, 2, -100, 1])
    loss = classification(prediction, labels)
    wanted = torch.nn.functional.cross_entropy(prediction, labels)  # torch's own mean
    torch.testing.assert_close(loss.mean(), wanted)
    assert int(loss.count) == 3


@pytest.mark.parametrize("label", [3, -1])
def test_label_out_of_range_raises(label):
    with pytest.raises(UserError, match=rf"row 1 is {label}\b.* 3 classes"):
        classification(torch.randn(2, 3), torch.tensor([0, label]))


@pytest.mark.parametrize("loss", [cross_entropy, kl])
def test_nan_attention_gives_a_nan_loss(loss):
    """Before, a NaN weight had the logarithm of zero, and a diverged run went on."""
    weights = torch.tensor([[0.1, torch.nan, 0.2, 0.3], [0.1, 0.2, 0.3, 0.4]])
    attention, target = (
        AttentionMap.from_cells(one, words(4)) for one in (weights, weights[[1, 1]])
    )
    assert attention.log_weights.flatten().isnan().sum() == 1
    assert loss(attention, target).total.isnan()
    assert loss(
        attention.select(torch.tensor([1])), target.select(torch.tensor([1]))
    ).total.isfinite()


def test_logits_and_labels_that_do_not_fit_raise(monkeypatch):
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    logits = torch.rand(3, 4)
    for labels in (torch.zeros(1).long(), torch.zeros(4).long(), torch.zeros(3, 1).long()):
        with pytest.raises(ValueError, match=r"3, 4"):
            classification(logits, labels)
    with pytest.raises(ValueError, match=r"4,.*4,"):
        classification(logits[0], torch.zeros(4).long())
    with pytest.raises(ValueError, match=r"3, 1.*3, 4"):
        soft_classification(logits[:, :1], logits)  # broadcast to zero before


def test_a_map_with_all_rows_names_its_blocks():
    axis = words(1, "class") + grid(2, 2)
    attention = AttentionMap.from_scores(torch.zeros(2, 1, 1, 5, 5), axis, axis)
    target = AttentionMap.from_cells(torch.ones(2, 4), grid(2, 2)).normalize()
    with pytest.raises(ValueError, match=r"'image'.*between\("):
        cross_entropy(attention, target)
    assert cross_entropy(attention.between("class", "image"), target).count == 2
