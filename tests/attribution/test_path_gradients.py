"""Integrated and expected gradients: Captum, completeness, and memory of one backward pass."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from overt.attention import Kind
from overt.attribution import expected_gradients, integrated_gradients
from overt.attribution.target_scores import Contrast
from tests.attribution.networks import TARGET, Net


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().double().eval()


@pytest.fixture
def images() -> Tensor:
    return torch.randn(2, 3, 6, 8, generator=torch.Generator().manual_seed(1)).double()


@pytest.mark.parametrize("steps", [1, 7, 50])
def test_integrated_gradients_agree_with_captum(steps: int, net: Net, images: Tensor) -> None:
    captum = pytest.importorskip("captum.attr")
    start = torch.full_like(images, 0.3)
    expected, gap = captum.IntegratedGradients(net).attribute(
        images, start, TARGET, n_steps=steps, return_convergence_delta=True
    )
    found = integrated_gradients(net, images, TARGET, baseline=start, steps=steps).check()
    assert found.kind is Kind.SIGNED
    torch.testing.assert_close(found.weights.flatten(1), expected.sum(dim=1).flatten(1))
    torch.testing.assert_close(found.gap, -gap)  # theirs is the sum minus the change
    again = integrated_gradients(net, images, TARGET, baseline=0.3, steps=steps)
    torch.testing.assert_close(again.values, found.values)


def test_integrated_gradients_are_exact_for_polynomials() -> None:
    """n points of Gauss and Legendre integrate polynomials up to the degree 2 n - 1."""
    x, start = torch.tensor([[2.0, -1.0]]).double(), torch.tensor([[1.0, 0.5]]).double()
    found = integrated_gradients(
        lambda x: x.pow(4).sum(dim=1), x, lambda out: out, baseline=start, steps=2
    )
    torch.testing.assert_close(found.weights.flatten(), (x.pow(4) - start.pow(4)).flatten())
    torch.testing.assert_close(found.gap, torch.zeros(1).double())


def test_more_steps_make_the_gap_smaller(net: Net, images: Tensor) -> None:
    gaps = [
        float(integrated_gradients(net, images, TARGET, steps=steps).gap.abs().max())
        for steps in (2, 200)
    ]
    assert gaps[1] < gaps[0] / 10


def test_contrastive_gradients_are_differences(net: Net, images: Tensor) -> None:
    found = integrated_gradients(net, images, Contrast(TARGET, 0)).values
    first, second = (integrated_gradients(net, images, one).values for one in (TARGET, 0))
    torch.testing.assert_close(found, first - second)


class Deep(nn.Module):
    """A network whose activations need much more memory than its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.Tanh(), nn.Conv2d(16, 16, 3, padding=1), nn.Tanh()
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).mean(dim=(2, 3))


class LiveBytes:
    """Count the bytes of saved tensors that are alive, and their peak."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def pack(self, tensor: Tensor) -> "Kept":
        return Kept(self, tensor)

    def measure(self, run: Any) -> int:
        with saved_tensors_hooks(self.pack, lambda kept: kept.tensor):
            run()
        return self.peak


class Kept:
    """One saved tensor, counted until it is freed."""

    def __init__(self, live: LiveBytes, tensor: Tensor) -> None:
        self.live, self.tensor = live, tensor
        live.now += tensor.numel() * tensor.element_size()
        live.peak = max(live.peak, live.now)

    def __del__(self) -> None:
        self.live.now -= self.tensor.numel() * self.tensor.element_size()


def test_fifty_steps_save_as_many_tensors_as_one_backward_pass() -> None:
    """The peak of tensors saved for a backward pass is at most 1.2 times that of one pass."""
    net, images = Deep(), torch.randn(4, 3, 16, 16)

    def one_pass() -> None:
        leaf = images.clone().requires_grad_()
        torch.autograd.grad(net(leaf)[:, 1].sum(), leaf)

    alone = LiveBytes().measure(one_pass)
    whole = LiveBytes().measure(lambda: integrated_gradients(net, images, 1, steps=50))
    assert alone > 0 and whole <= 1.2 * alone
    small = LiveBytes().measure(lambda: integrated_gradients(net, images, 1, steps=9, chunk=1))
    assert small < 0.5 * alone


def test_expected_gradients_agree_with_captum(net: Net, images: Tensor) -> None:
    """Both draw at random: they differ by less than five standard errors everywhere."""
    captum = pytest.importorskip("captum.attr")
    starts = torch.randn(5, 3, 6, 8, generator=torch.Generator().manual_seed(2)).double()
    torch.manual_seed(0)
    expected = captum.GradientShap(net).attribute(images, starts, n_samples=600, target=TARGET)
    drawn = torch.Generator().manual_seed(3)
    found = expected_gradients(net, images, TARGET, drawn, starts, samples=600)
    away = (found.weights.flatten(1) - expected.sum(dim=1).flatten(1)).abs()
    assert found.error is not None
    assert bool((away < 5 * 2**0.5 * found.error.flatten(1)).all())
    scores = net(torch.cat([images, starts])).detach()
    change = scores[[0, 1], TARGET] - torch.stack([scores[2:, c].mean() for c in TARGET])
    torch.testing.assert_close(found.change, change)
    assert bool((found.gap.abs() < 0.2 * change.abs() + 0.05).all())


def test_expected_gradients_of_a_linear_model_with_one_baseline_are_exact() -> None:
    net, x, start = nn.Linear(4, 2), torch.randn(3, 4), torch.randn(1, 4)
    found = expected_gradients(net, x, 0, torch.Generator().manual_seed(0), start, samples=5)
    torch.testing.assert_close(found.weights.flatten(1), (net.weight[0] * (x - start)).detach())
    torch.testing.assert_close(found.gap, torch.zeros(3), atol=1e-6, rtol=0)
    assert found.error is not None and bool((found.error < 1e-6).all())


def test_the_standard_error_is_that_of_the_mean() -> None:
    """Repeat with 25 seeds: the spread of the results is about the reported error."""
    x, starts = torch.tensor([[1.0, 2.0]]), torch.zeros(1, 2)
    found = [
        expected_gradients(
            lambda x: x.square().sum(dim=1),
            x,
            lambda out: out,
            torch.Generator().manual_seed(seed),
            starts,
            samples=50,
        )
        for seed in range(25)
    ]
    spread = torch.stack([one.weights.flatten() for one in found]).std(dim=0)
    errors = [one.error.flatten() for one in found if one.error is not None]
    ratio = spread / torch.stack(errors).mean(dim=0)
    assert len(errors) == 25 and bool(((ratio > 0.6) & (ratio < 1.5)).all())


def test_expanded_gradients_are_supported() -> None:
    """The gradient of a sum is one number, expanded."""
    x = torch.randn(2, 3, 4)
    found = integrated_gradients(lambda x: x.sum(dim=(1, 2)), x, lambda out: out, steps=2)
    torch.testing.assert_close(found.weights.flatten(1), x.sum(dim=2))


def test_wrong_numbers_raise(net: Net, images: Tensor) -> None:
    with pytest.raises(ValueError, match="steps.* 0"):
        integrated_gradients(net, images, 1, steps=0)
    with pytest.raises(ValueError, match="samples.* 1"):
        expected_gradients(net, images, 1, torch.Generator(), images, samples=1)
    with pytest.raises(ValueError, match=r"\(m, 3, 6, 8\)"):
        expected_gradients(net, images, 1, torch.Generator(), images[..., 1:])
