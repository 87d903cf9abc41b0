"""Gradients by the input: Captum, closed forms, and noise drawn once."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overt.attention import Kind
from overt.attribution import input_gradient, input_x_gradient, smooth_grad, var_grad
from overt.attribution.target_scores import Contrast
from tests.attribution.networks import TARGET, MeanReader, Net, padded_text


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().double().eval()


@pytest.fixture
def images() -> Tensor:
    return torch.randn(2, 3, 6, 8, generator=torch.Generator().manual_seed(1)).double()


def test_gradients_agree_with_captum(net: Net, images: Tensor) -> None:
    captum = pytest.importorskip("captum.attr")
    slope = captum.Saliency(net).attribute(images, TARGET)
    found = input_gradient(net, images, TARGET)
    assert found.kind is Kind.AMOUNT
    torch.testing.assert_close(found.weights.flatten(1), slope.amax(dim=1).flatten(1))
    found = input_gradient(net, images, TARGET, norm=2.0)
    torch.testing.assert_close(found.weights.flatten(1), slope.norm(dim=1).flatten(1))
    expected = captum.InputXGradient(net).attribute(images, TARGET)
    found = input_x_gradient(net, images, TARGET)
    assert found.kind is Kind.SIGNED
    torch.testing.assert_close(found.weights.flatten(1), expected.sum(dim=1).flatten(1))


def test_a_contrast_is_the_gradient_of_a_difference(net: Net, images: Tensor) -> None:
    found = input_x_gradient(net, images, Contrast(TARGET, 0)).values
    first, second = (input_x_gradient(net, images, one).values for one in (TARGET, 0))
    torch.testing.assert_close(found, first - second)


def test_input_x_gradient_adds_up_to_the_score_without_biases() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7, bias=False), nn.ReLU(), nn.Linear(7, 3, bias=False))
    x = torch.randn(4, 5)
    found = input_x_gradient(net, x, 2).weights.flatten(1).sum(dim=1)
    torch.testing.assert_close(found, net(x)[:, 2].detach())


def slow_gradients(net: Net, images: Tensor, samples: int, noise: float) -> Tensor:
    """Return the gradient of each noisy image, from the same draws."""
    drawn = torch.Generator().manual_seed(5)
    found = []
    for _ in range(samples):
        away = torch.randn(images.shape, generator=drawn)
        for image, one, target in zip(images, away, TARGET, strict=True):
            noisy = image + noise * (image.max() - image.min()) * one
            noisy = noisy.requires_grad_()
            net(noisy[None])[0, target].backward()
            found.append(noisy.grad)
    net.zero_grad(set_to_none=True)
    return torch.stack(found).unflatten(0, (samples, -1))


@pytest.mark.parametrize(("norm", "chunk"), [(math.inf, None), (2.0, 1), (1.0, 5)])
def test_noisy_gradients_agree_with_the_slow_reference(
    norm: float, chunk: int | None, net: Net, images: Tensor
) -> None:
    slopes = slow_gradients(net, images, 6, 0.2)
    for method, expected in ((smooth_grad, slopes.mean(0)), (var_grad, slopes.var(0, False))):
        drawn = torch.Generator().manual_seed(5)
        found = method(
            net, images, TARGET, drawn, samples=6, noise=0.2, norm=norm, chunk=chunk
        ).check()
        wanted = torch.linalg.vector_norm(expected, norm, dim=1)
        torch.testing.assert_close(found.weights.flatten(1), wanted.flatten(1))


def test_noisy_gradients_agree_with_captum(net: Net) -> None:
    """Captum draws all copies of an image at once, which gives the same numbers for one image."""
    captum = pytest.importorskip("captum.attr")
    net.float()
    image = torch.randn(1, 3, 8, 16)  # a multiple of 16 numbers per draw
    deviation = float(0.1 * (image.max() - image.min()))
    theirs = captum.NoiseTunnel(captum.Saliency(net))
    for method, name in ((smooth_grad, "smoothgrad"), (var_grad, "vargrad")):
        torch.manual_seed(7)
        expected = theirs.attribute(
            image, nt_type=name, nt_samples=9, stdevs=deviation, target=1, abs=False
        )
        drawn = torch.Generator().manual_seed(7)
        found = method(net, image, 1, drawn, samples=9, noise=0.1)
        wanted = expected.abs().amax(dim=1).flatten(1)
        torch.testing.assert_close(found.weights.flatten(1), wanted, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("method", [smooth_grad, var_grad])
def test_the_noise_of_a_text_does_not_depend_on_its_padding(method: Any) -> None:
    reader = MeanReader().double()
    with torch.no_grad():
        reader.embed.weight[0] = 100.0  # padding is not part of the range of a text
    alone, padded = (
        method(reader, padded_text(6, n), 1, torch.Generator().manual_seed(0), samples=8).weights
        for n in (0, 5)
    )
    torch.testing.assert_close(padded[..., :6], alone)
    assert not padded[..., 6:].any()


def test_wrong_numbers_raise(net: Net, images: Tensor) -> None:
    with pytest.raises(ValueError, match="0 and 0.15"):
        smooth_grad(net, images, 1, torch.Generator(), samples=0)
    with pytest.raises(ValueError, match="-1"):
        var_grad(net, images, 1, torch.Generator(), noise=-1.0)
