"""Infidelity and sensitivity compared with captum on the same random numbers."""

import pytest
import torch
from captum import metrics

from overt.attention import AttentionMap, grid, words
from overt.metrics import infidelity, js, sensitivity_max, stability, uniform_map
from overt.metrics.sensitivity import gaussian_noise, random_half, sensitivity_mean, uniform_noise


@pytest.fixture
def case(generator):
    net = torch.nn.Sequential(torch.nn.Linear(7, 9), torch.nn.Tanh(), torch.nn.Linear(9, 3))
    values = torch.randn(5, 7, generator=generator)
    maps = AttentionMap.from_cells(torch.rand(5, 7, generator=generator), words(7)).normalize()
    return net, values, maps


def test_infidelity_agrees_with_captum(case):
    net, values, maps = case
    found = infidelity(
        lambda keep: net(keep * values), maps, torch.Generator().manual_seed(3), draws=20
    )
    generator = torch.Generator().manual_seed(3)
    drawn = [random_half(torch.ones(5, 7, dtype=torch.bool), generator) for _ in range(20)]
    removed = torch.stack(drawn, dim=1).flatten(0, 1).float()  # captum groups draws by sample

    def forward(keep: torch.Tensor) -> torch.Tensor:
        return net(keep * values.repeat_interleave(len(keep) // 5, dim=0)).softmax(dim=-1)

    answer = net(values).argmax(dim=-1)
    expected = metrics.infidelity(
        forward,
        lambda keep: (removed, keep - removed),
        torch.ones(5, 7),
        maps.weights[:, 0, 0, 0],
        target=answer,
        n_perturb_samples=20,
        normalize=True,
    )
    torch.testing.assert_close(found, expected.float(), atol=1e-6, rtol=1e-4)


def test_infidelity_ignores_the_scale_of_weights(case):
    net, values, maps = case
    twice = AttentionMap.from_cells(2 * maps.weights[:, 0, 0, 0], words(7))
    one, two = (
        infidelity(lambda keep: net(keep * values), m, torch.Generator().manual_seed(0))
        for m in (maps, twice)
    )
    torch.testing.assert_close(one, two)


def test_an_additive_model_has_zero_infidelity(generator):
    """If the probability is the sum of the kept weights, these weights have zero infidelity."""
    weights = torch.rand(4, 6, generator=generator)
    maps = AttentionMap.from_cells(weights, words(6)).normalize()
    shares = maps.weights[:, 0, 0, 0]

    def decide(keep: torch.Tensor) -> torch.Tensor:
        first = 0.1 + 0.8 * (keep * shares).sum(dim=-1)
        return torch.stack([first, 1 - first], dim=-1).log()

    assert float(infidelity(decide, maps, generator).max()) < 1e-10
    assert float(infidelity(decide, uniform_map(maps), generator).min()) > 1e-5
    none = AttentionMap.from_cells(torch.zeros(4, 6), words(6))
    assert infidelity(decide, none, generator).isnan().all()


def attend_to_brightness(images: torch.Tensor) -> AttentionMap:
    """Attend to cells by brightness."""
    cells = torch.nn.functional.avg_pool2d(images.mean(dim=1, keepdim=True), 2).flatten(1)
    return AttentionMap.from_scores((8 * cells)[:, None, None, None], grid(2, 2))


def test_sensitivity_agrees_with_captum(generator):
    images = torch.rand(3, 3, 4, 4, generator=generator)
    drawn = torch.Generator().manual_seed(5)
    found = sensitivity_max(attend_to_brightness, images, drawn, draws=6)
    again = torch.Generator().manual_seed(5)
    moved = [uniform_noise(images, again) for _ in range(6)]
    expected = metrics.sensitivity_max(
        lambda x: (attend_to_brightness(x[0] if isinstance(x, tuple) else x).weights[:, 0, 0, 0],),
        images,
        lambda x: torch.stack(moved, dim=1).flatten(0, 1),
        n_perturb_samples=6,
    )
    torch.testing.assert_close(found, expected.float())
    mean = sensitivity_mean(attend_to_brightness, images, torch.Generator().manual_seed(5), draws=6)
    own = attend_to_brightness(images).weights
    each = [(attend_to_brightness(one).weights - own).flatten(1).norm(dim=1) for one in moved]
    torch.testing.assert_close(mean, torch.stack(each).mean(dim=0) / own.flatten(1).norm(dim=1))
    assert (mean <= found).all()


def test_noise_stays_within_its_bounds(generator):
    inputs = torch.zeros(4, 100)
    moved = uniform_noise(inputs, generator, radius=0.1)
    assert float(moved.abs().max()) <= 0.1 and float(moved.abs().mean()) == pytest.approx(0.05, 0.2)
    assert float(gaussian_noise(inputs, generator, deviation=0.3).std()) == pytest.approx(
        0.3, rel=0.1
    )


def test_stability_falls_with_noise(generator):
    images = torch.rand(20, 3, 4, 4, generator=generator)
    still = stability(attend_to_brightness, images, generator, lambda x, g: x)
    torch.testing.assert_close(still, torch.ones(20))
    little, much = (
        stability(
            attend_to_brightness, images, generator, lambda x, g, by=by: gaussian_noise(x, g, by)
        )
        for by in (0.02, 1.0)
    )
    assert 1 > float(little.mean()) > float(much.mean())
    apart = stability(attend_to_brightness, images, generator, compare=js)
    assert (apart >= 0).all()
    assert (
        stability(lambda x: uniform_map(attend_to_brightness(x)), images, generator).isnan().all()
    )
    with pytest.raises(ValueError, match="draws .* 0"):
        stability(attend_to_brightness, images, generator, draws=0)


def test_zero_draws_raise(case):
    _, _, maps = case
    with pytest.raises(ValueError, match="draws .* 0"):
        infidelity(lambda keep: keep[:, :2], maps, torch.Generator(), draws=0)
