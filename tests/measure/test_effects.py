"""What each key does: against captum's gradients and occlusion, and by hand."""

import pytest
import torch
from captum.attr import FeatureAblation, InputXGradient

from overt.attention import AttentionMap, words
from overt.measure import (
    gradient_agreement,
    kendall,
    leave_one_out,
    leave_one_out_agreement,
    slope,
    spearman,
    uniform,
)


@pytest.fixture
def case(generator):
    """A small network over words that a mask multiplies."""
    net = torch.nn.Sequential(torch.nn.Linear(7, 9), torch.nn.Tanh(), torch.nn.Linear(9, 2))
    values = torch.randn(5, 7, generator=generator)
    maps = AttentionMap.from_cells(torch.rand(5, 7, generator=generator), words(7))
    return net, values, maps


def test_leaving_out_agrees_with_captum(case):
    """With two classes the answer moves by as much as the probability of the first."""
    net, values, maps = case
    found = leave_one_out(lambda keep: net(keep * values), maps)
    expected = FeatureAblation(lambda x: net(x).softmax(dim=-1)).attribute(
        values, baselines=0.0, target=0
    )
    torch.testing.assert_close(
        found.weights[:, 0, 0, 0].float(), expected.abs(), atol=1e-6, rtol=1e-4
    )


def test_slopes_agree_with_captum(case):
    """The log-odds of two classes are the difference of their logits."""
    net, values, maps = case
    found = slope(lambda keep: net(keep * values), maps)
    expected = InputXGradient(lambda x: net(x) @ torch.tensor([[1.0], [-1.0]])).attribute(
        values, target=0
    )
    torch.testing.assert_close(found.weights[:, 0, 0, 0].float(), expected.abs().detach())
    assert all(value.grad is None for value in net.parameters())


@pytest.mark.parametrize("compare", [kendall, spearman])
def test_a_map_of_the_effects_agrees_with_them(case, compare):
    net, values, maps = case

    def decide(keep: torch.Tensor) -> torch.Tensor:
        return net(keep * values)

    for effect, measure in ((leave_one_out, leave_one_out_agreement), (slope, gradient_agreement)):
        best = effect(decide, maps)
        torch.testing.assert_close(measure(decide, best, compare), torch.ones(5))
        found = measure(decide, maps, compare)
        torch.testing.assert_close(found, compare(maps, best))
        assert measure(decide, uniform(maps), compare).isnan().all()


def test_hidden_keys_have_no_effect(case):
    net, values, _ = case
    seen = torch.ones(5, 7, dtype=torch.bool)
    seen[:, 5:] = False
    maps = AttentionMap.from_cells(torch.rand(5, 7), words(7), seen)
    calls = []

    def decide(keep: torch.Tensor) -> torch.Tensor:
        calls.append(keep)
        return net(keep * values)

    for effect in (leave_one_out, slope):
        found = effect(decide, maps)
        assert (found.weights[..., 5:] == 0).all() and (found.weights[..., :5] > 0).all()
    assert len(calls) == 1 + 5 + 1


def test_no_number_where_nothing_does_anything(case):
    _, _, maps = case
    assert leave_one_out_agreement(lambda keep: torch.zeros(5, 2), maps).isnan().all()
    for decide in (lambda keep: torch.zeros(5, 2), lambda keep: (keep > 0.5).float()[:, :2]):
        with pytest.raises(ValueError, match="gradients can follow"):
            gradient_agreement(decide, maps)
