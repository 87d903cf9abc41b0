"""KernelSHAP and LIME: exact Shapley values, Captum, scikit-learn, segments, errors."""

import math
from collections.abc import Callable
from itertools import combinations

import pytest
import torch
from torch import Tensor

from overt.attribution import kernel_shap, lime
from overt.attribution.additive_models import shapley_sets
from overt.attribution.attribution_map import AttributionMap
from overt.attribution.target_scores import Contrast
from tests.attribution.networks import TARGET, MeanReader, Net, padded_text


def drawn(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def slow_shapley(score: Callable[[Tensor], Tensor], x: Tensor, start: Tensor) -> Tensor:
    """Compute the values of one sample by their definition: the mean over all orders."""
    count = len(x)
    values = torch.zeros(count).double()
    for part in range(count):
        others = [one for one in range(count) if one != part]
        for size in range(count):
            weight = math.factorial(size) * math.factorial(count - size - 1) / math.factorial(count)
            for chosen in combinations(others, size):
                without = start.clone()
                without[list(chosen)] = x[list(chosen)]
                alone = without.clone()
                alone[part] = x[part]
                values[part] += weight * (score(alone[None])[0] - score(without[None])[0])
    return values


def mixed(x: Tensor) -> Tensor:
    """Score with interactions of two and three inputs."""
    return 2 * x[:, 0] + x[:, 1] * x[:, 2] - x[:, 0] * x[:, 3] * x[:, 4] + x[:, 4].square()


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().double().eval()


@pytest.fixture
def images() -> Tensor:
    return torch.randn(2, 3, 6, 8, generator=torch.Generator().manual_seed(1)).double()


def test_all_sets_give_exact_shapley_values() -> None:
    x, start = torch.randn(2, 5).double(), torch.randn(5).double()
    found = kernel_shap(mixed, x, lambda out: out, drawn(), samples=30, baseline=start).check()
    for row in range(2):
        expected = slow_shapley(mixed, x[row], start)
        torch.testing.assert_close(found.weights[row].flatten(), expected, atol=1e-8, rtol=1e-8)
    torch.testing.assert_close(found.gap, torch.zeros(2).double(), atol=1e-10, rtol=0)


def test_drawn_sets_are_close_to_exact_values_and_add_up() -> None:
    x = torch.randn(2, 5).double()
    exact = kernel_shap(mixed, x, lambda out: out, drawn(), samples=30).weights
    found = kernel_shap(mixed, x, lambda out: out, drawn(), samples=28)
    assert float((found.weights - exact).abs().max()) < 0.25 * float(exact.abs().max())
    torch.testing.assert_close(found.gap, torch.zeros(2).double(), atol=1e-10, rtol=0)


@pytest.mark.long
def test_kernel_shap_agrees_with_captum() -> None:
    """Captum draws its sets: with 1000 of 30 possible ones the values agree to 2 %."""
    captum = pytest.importorskip("captum.attr")
    x = torch.randn(1, 5, generator=drawn(4))
    torch.manual_seed(0)
    expected = captum.KernelShap(mixed).attribute(x, n_samples=1000)
    found = kernel_shap(mixed, x, lambda out: out, drawn(), samples=30)
    scale = float(expected.abs().max())
    torch.testing.assert_close(found.weights.flatten(), expected[0], atol=0.02 * scale, rtol=0)


def test_drawn_sets_come_with_their_complements() -> None:
    sets, weights = shapley_sets(9, 40, drawn())
    assert sets.shape == (40, 9) and bool((weights == 1).all())
    assert torch.equal(sets[::2], 1 - sets[1::2])
    sizes = sets.sum(dim=1)
    assert float(sizes.min()) >= 1 and float(sizes.max()) <= 8
    many, _ = shapley_sets(9, 40000, drawn())  # more than all sets
    assert len(many) == 2**9 - 2 and len(many.unique(dim=0)) == len(many)
    # small and large sets are drawn most, in proportion to 1 / (s (9 - s))
    big, _ = shapley_sets(12, 4000, drawn())
    counts = torch.bincount(big.sum(dim=1).long(), minlength=12)[1:]
    expected = torch.tensor([1 / (s * (12 - s)) for s in range(1, 12)])
    shares = expected / expected.sum()
    assert float((counts / 4000 - shares).abs().max()) < 0.02
    with pytest.raises(ValueError, match="at least 40"):
        shapley_sets(20, 39, drawn())


def test_parts_of_images_are_squares_or_segments(net: Net, images: Tensor) -> None:
    found = kernel_shap(net, images, TARGET, drawn(), cells=2, samples=14).weights
    pixels = found.reshape(2, 6, 8)
    for y in (0, 3):
        for x in (0, 4):
            part = pixels[:, y : y + 3, x : x + 4].flatten(1)
            assert bool((part == part[:, :1]).all())
    change = net(images) - net(torch.zeros_like(images))
    expected = change[torch.arange(2), TARGET].detach()
    torch.testing.assert_close(pixels.sum(dim=(1, 2)), expected)
    segments = torch.zeros(2, 6, 8).long()
    segments[:, :3, 4:], segments[:, 3:, :4], segments[:, 3:, 4:] = 1, 2, 3
    again = kernel_shap(net, images, TARGET, drawn(), segments=segments, samples=14).weights
    torch.testing.assert_close(again, found)
    # one part alone has the whole change
    one = kernel_shap(net, images, TARGET, drawn(), cells=1).weights.flatten(1).sum(dim=1)
    torch.testing.assert_close(one, expected)


def test_padding_has_no_value() -> None:
    """Positions that the model does not read are null players."""
    x = torch.randn(1, 6).double()
    found = kernel_shap(mixed, x, lambda out: out, drawn(), samples=62).weights.flatten()
    assert float(found[5].abs()) < 1e-9


@pytest.mark.parametrize("method", [kernel_shap, lime])
def test_the_values_of_a_text_do_not_depend_on_its_padding(
    method: Callable[..., AttributionMap],
) -> None:
    """Padding is no part: drawn sets give it values, which the sum would lack."""
    reader = MeanReader().double()
    alone = method(reader, padded_text(9, 0), 1, drawn(), samples=60)
    padded = method(reader, padded_text(9, 5), 1, drawn(), samples=60)
    torch.testing.assert_close(padded.weights[..., :9], alone.weights)
    assert not padded.weights[..., 9:].any()
    if method is kernel_shap:
        torch.testing.assert_close(padded.gap, torch.zeros(1).double(), atol=1e-12, rtol=0)
    # neither on longer texts of its batch
    two = {key: one.repeat(2, 1) for key, one in padded_text(9, 5).items()}
    two["attention_mask"][0] = 1
    both = method(reader, two, 1, drawn(), samples=60)
    torch.testing.assert_close(both.weights[1], padded.weights[0])


@pytest.mark.parametrize("method", [kernel_shap, lime])
def test_numbers_of_segments_may_have_gaps(
    net: Net, images: Tensor, method: Callable[..., AttributionMap]
) -> None:
    segments = torch.arange(48).reshape(6, 8).expand(2, -1, -1) // 12
    found, spread = (
        method(net, images, TARGET, drawn(), segments=one, samples=9).weights
        for one in (segments, segments * 5 + 2)
    )
    torch.testing.assert_close(spread, found)


def test_lime_agrees_with_ridge_regression_of_scikit_learn(net: Net, images: Tensor) -> None:
    linear_model = pytest.importorskip("sklearn.linear_model")
    found = lime(net, images, TARGET, drawn(3), samples=40, cells=3, width=0.4, ridge=0.5).check()
    sets = torch.rand(40, 9, generator=drawn(3)) < 0.5
    sets[0] = True
    shown = sets.double().reshape(40, 1, 3, 3)
    large = torch.nn.functional.interpolate(shown, (6, 9), mode="nearest")[..., :8]
    # 8 columns in 3 parts: of 3, 3 and 2
    for row in range(2):
        scores = net(images[row] * large)[:, TARGET[row]].detach().numpy()
        cosine = sets.double().mean(dim=1).sqrt()
        weights = torch.exp(-((1 - cosine) ** 2) / 0.4**2).numpy()
        ridge = linear_model.Ridge(alpha=0.5).fit(sets.numpy(), scores, sample_weight=weights)
        expected = torch.from_numpy(ridge.coef_).reshape(1, 1, 3, 3)
        expected = torch.nn.functional.interpolate(expected, (6, 9), mode="nearest")[..., :8]
        torch.testing.assert_close(found.weights[row].reshape(6, 8), expected[0, 0])
        fit = ridge.score(sets.numpy(), scores, weights)
        assert found.fit is not None and float(found.fit[row]) == pytest.approx(fit)


def test_methods_take_contrasts(net: Net, images: Tensor) -> None:
    for method in (kernel_shap, lime):
        found, first, second = (
            method(net, images, target, drawn(), cells=2, samples=14).weights
            for target in (Contrast(TARGET, 0), TARGET, 0)
        )
        torch.testing.assert_close(found, first - second)


def test_wrong_numbers_raise(net: Net, images: Tensor) -> None:
    with pytest.raises(ValueError, match="samples.* 0"):
        kernel_shap(net, images, 1, drawn(), samples=0)
    with pytest.raises(ValueError, match="cells.* 0"):
        kernel_shap(net, images, 1, drawn(), cells=0)
    with pytest.raises(ValueError, match="at least 84"):
        kernel_shap(net, images, 1, drawn(), samples=50, cells=7)
    with pytest.raises(ValueError, match="0, 0.25 and 1.0"):
        lime(net, images, 1, drawn(), samples=0)
    with pytest.raises(ValueError, match=r"\(2, 6, 8\)"):
        lime(net, images, 1, drawn(), segments=torch.zeros(2, 3).long())
    with pytest.raises(ValueError, match="-1"):
        lime(net, images, 1, drawn(), segments=torch.full((2, 6, 8), -1))
