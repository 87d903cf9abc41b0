"""Effects of single keys compared with captum's gradients and occlusion, and by hand."""

import pytest
import torch
from captum.attr import FeatureAblation, InputXGradient

from overt.attention import AttentionMap, words
from overt.metrics import (
    gradient_agreement,
    kendall,
    leave_one_out_agreement,
    spearman,
    uniform_map,
)
from overt.metrics.key_effects import gradient_times_input, leave_one_out


@pytest.fixture
def case(generator):
    """Return a small network over words multiplied by a mask."""
    net = torch.nn.Sequential(torch.nn.Linear(7, 9), torch.nn.Tanh(), torch.nn.Linear(9, 2))
    values = torch.randn(5, 7, generator=generator)
    maps = AttentionMap.from_cells(torch.rand(5, 7, generator=generator), words(7))
    return net, values, maps


def test_leave_one_out_agrees_with_captum(case):
    """With two classes the change equals that of the probability of the first class."""
    net, values, maps = case
    found = leave_one_out(lambda keep: net(keep * values), maps)
    expected = FeatureAblation(lambda x: net(x).softmax(dim=-1)).attribute(
        values, baselines=0.0, target=0
    )
    torch.testing.assert_close(
        found.weights[:, 0, 0, 0].float(), expected.abs(), atol=1e-6, rtol=1e-4
    )


@pytest.mark.parametrize("at_once", [2, 3, 7, 50])
def test_several_keys_at_once_give_the_same_effects(case, at_once):
    """The batch repeats all samples without one key, then all without the next."""
    net, values, _ = case
    seen = torch.ones(5, 7, dtype=torch.bool)
    seen[:, 4], seen[2, 5:] = False, False
    maps = AttentionMap.from_cells(torch.rand(5, 7), words(7), seen)
    calls = []

    def decide(keep: torch.Tensor) -> torch.Tensor:
        calls.append(len(keep))
        return net(keep * values.repeat(len(keep) // 5, 1))

    one = leave_one_out(decide, maps)
    calls.clear()
    several = leave_one_out(decide, maps, at_once)
    torch.testing.assert_close(several.weights, one.weights)
    assert sum(calls) == 5 * (1 + 6) and max(calls) == 5 * min(at_once, 6)
    assert len(calls) == 1 + -(-6 // at_once)
    torch.testing.assert_close(
        leave_one_out_agreement(decide, maps, at_once=at_once),
        leave_one_out_agreement(decide, maps),
    )


def test_a_model_with_fixed_batch_size_raises_and_names_at_once(case):
    net, values, maps = case
    with pytest.raises(ValueError, match="at_once=1"):
        leave_one_out(lambda keep: net(keep[:5] * values), maps, at_once=2)
    with pytest.raises(ValueError, match="at_once"):
        leave_one_out(lambda keep: net(keep * values), maps, at_once=0)


def test_hidden_rows_have_no_effects(case):
    _, _, maps = case
    hidden = AttentionMap.from_cells(maps.weights[:, 0, 0, 0], words(7), torch.zeros(5, 7).bool())
    found = leave_one_out(lambda keep: torch.zeros(len(keep), 2), hidden, at_once=3)
    assert not found.weights.any()


def test_gradient_times_input_agrees_with_captum(case):
    """The log-odds of two classes are the difference of their logits."""
    net, values, maps = case
    found = gradient_times_input(lambda keep: net(keep * values), maps)
    expected = InputXGradient(lambda x: net(x) @ torch.tensor([[1.0], [-1.0]])).attribute(
        values, target=0
    )
    torch.testing.assert_close(found.weights[:, 0, 0, 0].float(), expected.abs().detach())
    assert all(value.grad is None for value in net.parameters())


@pytest.mark.parametrize("compare", [kendall, spearman])
def test_a_map_of_the_effects_has_agreement_one(case, compare):
    net, values, maps = case

    def decide(keep: torch.Tensor) -> torch.Tensor:
        return net(keep * values)

    for effect, measure in (
        (leave_one_out, leave_one_out_agreement),
        (gradient_times_input, gradient_agreement),
    ):
        best = effect(decide, maps)
        torch.testing.assert_close(measure(decide, best, compare), torch.ones(5))
        found = measure(decide, maps, compare)
        torch.testing.assert_close(found, compare(maps, best))
        assert measure(decide, uniform_map(maps), compare).isnan().all()


def test_hidden_keys_have_no_effect(case):
    net, values, _ = case
    seen = torch.ones(5, 7, dtype=torch.bool)
    seen[:, 5:] = False
    maps = AttentionMap.from_cells(torch.rand(5, 7), words(7), seen)
    calls = []

    def decide(keep: torch.Tensor) -> torch.Tensor:
        calls.append(keep)
        return net(keep * values)

    for effect in (leave_one_out, gradient_times_input):
        found = effect(decide, maps)
        assert (found.weights[..., 5:] == 0).all() and (found.weights[..., :5] > 0).all()
    assert len(calls) == 1 + 5 + 1


def test_a_constant_model_gives_nan_or_raises(case):
    _, _, maps = case
    assert leave_one_out_agreement(lambda keep: torch.zeros(5, 2), maps).isnan().all()
    for decide in (lambda keep: torch.zeros(5, 2), lambda keep: (keep > 0.5).float()[:, :2]):
        with pytest.raises(ValueError, match="no gradient"):
            gradient_agreement(decide, maps)
