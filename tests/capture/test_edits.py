"""Attention changed in flight."""

import pytest
import torch

from overt.attention import Kind
from overt.capture import Bias, watch
from overt.capture.call import QKCall
from tests.capture.toys import FusedAttention, Stack, WrittenAttention


def make(attention=FusedAttention, **more):
    torch.manual_seed(0)
    model = Stack(attention(**more), attention(**more)).double().eval()
    return model, torch.randn(2, 6, 16, dtype=torch.float64)


def uniform(call, weights):
    return torch.full_like(weights, 1 / weights.shape[-1])


KINDS = [
    (FusedAttention, {}),
    (FusedAttention, {"groups": 2}),
    (FusedAttention, {"causal": True}),
    (WrittenAttention, {}),
]


@pytest.mark.parametrize(("attention", "more"), KINDS)
def test_an_edit_that_changes_nothing_changes_nothing(attention, more):
    model, x = make(attention, **more)
    with watch(model, edit=lambda call, weights: weights):
        out = model(x)
    torch.testing.assert_close(out, model(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("attention", "more"), KINDS)
def test_adding_a_bias_is_multiplying_and_dividing_by_the_sum(attention, more):
    model, x = make(attention, **more)
    bias = torch.randn(2, 4, 6, 6, dtype=torch.float64)

    def multiplied(call, weights):
        weights = weights * bias.exp()
        return weights / weights.sum(dim=-1, keepdim=True)

    with watch(model, edit=Bias(lambda call: bias)) as trace:
        added = model(x)
    with watch(model, edit=multiplied):
        torch.testing.assert_close(model(x), added, rtol=0, atol=1e-12)
    assert not torch.allclose(added, model(x))
    assert trace.map().check().kind is Kind.PROBABILITY


def test_a_bias_stays_on_the_fused_kernel(monkeypatch):
    model, x = make()
    with watch(model, edit=Bias(lambda call: torch.zeros(1, 1, 1, 6))) as trace:
        model(x)
    assert all(isinstance(call.source, QKCall) for call in trace)

    def never(*_, **__):
        raise AssertionError("the weights were made real")

    monkeypatch.setattr(QKCall, "weights", never)
    with watch(model, edit=Bias(lambda call: torch.zeros(1, 1, 1, 6))):
        model(x)


def test_hiding_a_key_hides_it_in_every_layer():
    model, x = make()
    hide = torch.zeros(6).index_fill(0, torch.tensor([2]), -torch.inf)
    with watch(model, edit=Bias(lambda call: hide)) as trace:
        out = model(x)
    assert not trace.map().weights[..., 2].any()
    other = x.clone()
    other[:, 2] += 1
    with watch(model, edit=Bias(lambda call: hide)):
        moved = model(other)
    keep = [0, 1, 3, 4, 5]
    torch.testing.assert_close(moved[:, keep], out[:, keep])


def test_only_the_layers_watched_are_edited_and_the_call_says_which():
    model, x = make()
    names = []

    def edit(call, weights):
        names.append((call.name, call.step, call.shape))
        return uniform(call, weights)

    with watch(model, layers=[1], edit=edit) as trace:
        model(x)
    assert names == [("layers.1", 0, (2, 4, 6, 6))]
    assert trace.map().kind is Kind.AMOUNT
    with watch(model, layers=[1], edit=Bias(lambda call: None)):
        torch.testing.assert_close(model(x), model(x))


def test_edits_of_nested_watchers_act_one_after_the_other():
    model, x = make()
    with (
        watch(model, edit=uniform),
        watch(model, edit=lambda call, weights: weights * 2) as inner,
    ):
        model(x)
    torch.testing.assert_close(inner.map().weights, torch.full((2, 2, 4, 6, 6), 1 / 3).double())


def test_an_edit_of_the_wrong_shape_is_said():
    model, x = make()
    with (
        pytest.raises(ValueError, match=r"layers.0 .*\(2, 4, 6, 1\)"),
        watch(model, edit=lambda call, weights: weights[..., :1]),
    ):
        model(x)


def test_an_edit_that_gives_nothing_and_a_bias_that_does_not_fit_are_said():
    model, x = make()
    with (
        pytest.raises(TypeError, match=r"layers.0 .*NoneType"),
        watch(model, edit=lambda call, weights: None),
    ):
        model(x)
    with (
        pytest.raises(ValueError, match=r"layers.0 .*\(7,\)"),
        watch(model, edit=Bias(lambda call: torch.zeros(7))),
    ):
        model(x)
    with (
        pytest.raises(ValueError, match=r"edit.*model"),
        watch(model.layers[0], edit=lambda call, weights: weights[..., :1]),
    ):
        model(x)


def test_gradients_flow_through_an_edit():
    model, x = make()
    factor = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)

    def output(value):
        with watch(model, edit=lambda call, weights: weights**value):
            return model(x).square().sum()

    (found,) = torch.autograd.grad(output(factor), factor)
    step = 1e-6
    with torch.no_grad():
        slope = (output(factor + step) - output(factor - step)) / (2 * step)
    torch.testing.assert_close(found, slope, rtol=1e-6, atol=1e-8)


def test_dropout_stays_on_edited_weights_in_training():
    torch.manual_seed(0)
    model = Stack(WrittenAttention(rate=0.5)).train()
    x = torch.randn(2, 6, 16)
    with watch(model, edit=lambda call, weights: weights) as trace:
        model(x)
    torch.testing.assert_close(trace.map().weights.sum(-1), torch.ones(2, 1, 4, 6))
    torch.manual_seed(1)
    with watch(model, edit=lambda call, weights: weights):
        edited = model(x)
    torch.manual_seed(1)
    torch.testing.assert_close(model(x), edited)
