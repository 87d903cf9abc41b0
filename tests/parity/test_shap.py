"""Shapley values, expected gradients and DeepLift equal those of the library shap.

Where all sets of parts are run, KernelSHAP is exact in both. Draws differ: then both are compared
with the exact values, or by their standard errors. shap changes the seed of numpy, so its state is
restored.
"""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from overt.attribution import deep_lift, expected_gradients, kernel_shap
from tests.attribution.networks import TARGET, MeanReader, Net, padded_text

pytestmark = pytest.mark.long
PARTS = 4  # squares of an image


@pytest.fixture(scope="module")
def shap() -> Iterator[ModuleType]:
    state = np.random.get_state()  # noqa: NPY002 (shap seeds it)
    reason = "shap is not installed: `make .venv/.apart`"
    yield pytest.importorskip("shap", reason=reason, exc_type=ImportError)
    np.random.set_state(state)  # noqa: NPY002


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().double().eval()


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def mixed(x: Tensor) -> Tensor:
    """Return a score with interactions of two and three features, and one that is not read."""
    return x[:, 0] * x[:, 1] + x[:, 2].tanh() * x[:, 3] * x[:, 4] + x[:, 4] ** 2 + 0 * x[:, 5]


def on_numpy(function: Any) -> Any:
    """Return a function of arrays, as shap takes it."""

    def call(given: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return np.asarray(function(torch.from_numpy(given)))

    return call


def their_values(shap: ModuleType, function: Any, start: Tensor, x: Tensor, samples: int) -> Tensor:
    """Return KernelSHAP of shap, without its selection of features."""
    explainer = shap.KernelExplainer(on_numpy(function), start.numpy())
    found = explainer.shap_values(x.numpy(), nsamples=samples, l1_reg=False, silent=True)
    return torch.from_numpy(np.asarray(found))


def test_values_of_all_sets_of_features_are_equal(shap: ModuleType) -> None:
    x, start = normal(3, 6), normal(1, 6, seed=2)
    expected = their_values(shap, mixed, start, x, 62)
    found = kernel_shap(mixed, x, lambda out: out, torch.Generator(), samples=62, baseline=start)
    torch.testing.assert_close(found.weights.flatten(1), expected, atol=1e-8, rtol=0)


def test_mean_over_baselines_is_that_of_several_background_samples(shap: ModuleType) -> None:
    x, starts = normal(2, 6), normal(4, 6, seed=2)
    expected = their_values(shap, mixed, starts, x, 62)
    found = [
        kernel_shap(mixed, x, lambda out: out, torch.Generator(), samples=62, baseline=one)
        for one in starts
    ]
    mean = torch.stack([one.weights.flatten(1) for one in found]).mean(dim=0)
    torch.testing.assert_close(mean, expected, atol=1e-8, rtol=0)


def test_values_of_squares_of_an_image_are_equal(shap: ModuleType, net: Net) -> None:
    images = normal(2, 3, 6, 8)
    found = kernel_shap(net, images, TARGET, torch.Generator(), cells=2, samples=14, baseline=0.5)
    shares = found.weights.reshape(2, 2, 3, 2, 4).sum(dim=(2, 4)).flatten(1)
    for row in range(2):

        def score(shown: Tensor, row: int = row) -> Tensor:
            large = shown.reshape(-1, 1, 2, 2).repeat_interleave(3, 2).repeat_interleave(4, 3)
            return net(torch.where(large > 0, images[row], 0.5))[:, TARGET[row]]

        there = torch.ones(1, PARTS).double()
        expected = their_values(shap, score, 0 * there, there, 14)
        torch.testing.assert_close(shares[row], expected[0], atol=1e-8, rtol=0)


def test_values_of_words_are_equal(shap: ModuleType) -> None:
    reader, text = MeanReader().double(), padded_text(6, 3)
    masks = torch.full_like(text["input_ids"], 4)
    drawn = torch.Generator()
    found = kernel_shap(reader, text, 2, drawn, samples=62, baseline=masks)

    def score(shown: Tensor) -> Tensor:
        ids = torch.where(shown > 0, text["input_ids"][:, :6], 4)
        return reader(ids, torch.ones_like(ids))[:, 2]

    there = torch.ones(1, 6).double()
    expected = their_values(shap, score, 0 * there, there, 62)
    torch.testing.assert_close(found.weights[0, ..., :6].flatten(), expected[0], atol=1e-8, rtol=0)


def test_drawn_sets_are_as_close_to_the_exact_values(shap: ModuleType) -> None:
    """12 parts have 4,094 sets, 600 are drawn: both are within 5 % of the largest exact value."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 1)).double()

    def function(x: Tensor) -> Tensor:
        return net(x)[:, 0].detach()

    x, zero = normal(1, 12), torch.zeros(1, 12).double()
    everything = kernel_shap(function, x, lambda out: out, torch.Generator(), samples=5000)
    exact = everything.weights.flatten()
    drawn = torch.Generator().manual_seed(0)
    found = kernel_shap(function, x, lambda out: out, drawn, samples=600).weights.flatten()
    np.random.seed(0)  # noqa: NPY002
    expected = their_values(shap, function, zero, x, 600)[0]
    scale = float(exact.abs().max())
    for one in (found, expected):
        assert float((one - exact).abs().max()) <= 0.05 * scale
    all_of_theirs = their_values(shap, function, zero, x, 5000)[0]
    torch.testing.assert_close(exact, all_of_theirs, atol=1e-8, rtol=0)


def test_expected_gradients_and_their_errors_agree(shap: ModuleType) -> None:
    """All differences are below five standard errors; the errors themselves agree to 10 %.

    The images have one channel, because shap has an error per channel.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 3, 1), Net()).eval()
    images, starts = normal(2, 1, 6, 8).float(), normal(5, 1, 6, 8, seed=2).float()
    values, variances = shap.GradientExplainer(net, starts).shap_values(
        images, nsamples=500, rseed=0, return_variances=True
    )
    drawn = torch.Generator().manual_seed(3)
    found = expected_gradients(net, images, TARGET, drawn, starts, samples=500)
    theirs = torch.from_numpy(np.stack([values[row, ..., TARGET[row]] for row in range(2)]))
    variance = torch.from_numpy(np.stack([variances[int(TARGET[row])][row] for row in range(2)]))
    # theirs is divided by the root of the number of samples only
    error = (variance.flatten(1) / 500**0.5).sqrt()
    assert found.error is not None
    own = found.error.flatten(1)
    away = (found.weights.flatten(1) - theirs.flatten(1)).abs()
    assert bool((away < 5 * (own.square() + error.square()).sqrt()).all())
    assert 0.9 < float(own.mean() / error.mean()) < 1.1


def test_expected_gradients_of_a_linear_model_are_equal(shap: ModuleType) -> None:
    torch.manual_seed(0)
    net, x, start = nn.Linear(4, 2), torch.randn(3, 4), torch.randn(1, 4)
    expected = shap.GradientExplainer(net, start).shap_values(x, nsamples=5, rseed=0)[..., 1]
    found = expected_gradients(net, x, 1, torch.Generator(), start, samples=5)
    torch.testing.assert_close(found.weights.flatten(1).double(), torch.from_numpy(expected))


@pytest.mark.parametrize("act", [nn.ReLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU])
def test_deep_lift_is_equal(shap: ModuleType, act: type[nn.Module]) -> None:
    """Theirs has the mean over its background samples; here there is one."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), act(), nn.MaxPool2d(2), nn.Conv2d(6, 4, 3, padding=1), act(),
        nn.Flatten(), nn.Linear(48, 5),
    ).eval()  # fmt: skip
    images, start = normal(2, 3, 6, 8).float(), normal(1, 3, 6, 8, seed=2).float()
    values = shap.DeepExplainer(net, start).shap_values(images, check_additivity=False)
    found = deep_lift(net, images, TARGET, baseline=start)
    expected = np.stack([values[row, ..., TARGET[row]] for row in range(2)]).sum(axis=1)
    expected = torch.from_numpy(expected).flatten(1)
    torch.testing.assert_close(found.weights.flatten(1).double(), expected, atol=1e-5, rtol=1e-4)
