import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from overt.attention import AttentionMap, Kind
from overt.capture.derived.activations import class_activation, grad_cam, rise, rise_masks
from overt.geometry import PixelGeometry


class Net(nn.Module):
    """Convolutions, the mean over cells, one linear layer; norms and dropout would show a mode."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6))
        self.last = nn.Conv2d(6, 8, 3, stride=2, padding=1)
        self.act = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.last(self.stem(x).relu()))
        return self.head(self.drop(x.mean(dim=(2, 3))))


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


@pytest.fixture
def images() -> Tensor:
    return torch.randn(2, 3, 10, 12).double()


TARGET = torch.tensor([1, 3])


def state(net: Net) -> dict[str, Any]:
    """All that must be as it was."""
    return {
        "modes": [module.training for module in net.modules()],
        "hooks": [
            (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks))
            for m in net.modules()
        ],
        "gradients": [one.grad for one in net.parameters()],
        "wanting": [one.requires_grad for one in net.parameters()],
        "numbers": [one.clone().tolist() for one in (*net.parameters(), *net.buffers())],
        "random": torch.get_rng_state().tolist(),
    }


def maps() -> dict[str, Callable[[Net, Tensor], AttentionMap]]:
    return {
        "class activation": lambda net, x: class_activation(net, net.act, x, TARGET),
        "grad-cam": lambda net, x: grad_cam(net, net.last, x, TARGET),
        "rise": lambda net, x: rise(net, x, TARGET, torch.Generator().manual_seed(1), masks=3),
    }


@pytest.mark.parametrize("name", maps())
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_the_model_is_left_as_it_was_found(
    name: str, training: bool, frozen: bool, net: Net, images: Tensor
) -> None:
    net.train(training).requires_grad_(not frozen)
    net.drop.train()  # a module in another mode than the rest
    before = state(net)
    found = maps()[name](net, images).check()
    assert state(net) == before
    with torch.no_grad():
        torch.testing.assert_close(maps()[name](net, images).values, found.values)
    with torch.inference_mode():
        torch.testing.assert_close(maps()[name](net, images.clone()).values, found.values)


@pytest.mark.parametrize("name", maps())
def test_also_after_an_error(name: str, net: Net, images: Tensor) -> None:
    def fail(module: nn.Module, given: object) -> None:
        torch.rand(3)
        raise RuntimeError("in the middle")

    handle = net.head.register_forward_pre_hook(fail)
    before = state(net.train())
    with pytest.raises(RuntimeError, match="in the middle"):
        maps()[name](net, images)
    assert state(net) == before
    handle.remove()


# --- class activation


def test_a_map_and_the_bias_are_the_score(net: Net, images: Tensor) -> None:
    found = class_activation(net, net.act, images, TARGET).check()
    scores = net.eval()(images)[torch.arange(2), TARGET]
    expected = found.values.mean(dim=(1, 2, 3, 4)) + net.head.bias[TARGET]
    torch.testing.assert_close(expected, scores)
    assert found.kind is Kind.SIGNED
    features = net.act(net.last(net.stem(images).relu()))
    for y in range(5):
        for x in range(6):
            cell = features[0, :, y, x] @ net.head.weight[1]
            torch.testing.assert_close(found.values[0, 0, 0, 0, y * 6 + x], cell)


def test_class_activation_has_a_gradient(net: Net, images: Tensor) -> None:
    class_activation(net, net.act, images, TARGET).values.sum().backward()
    assert net.last.weight.grad is not None and net.last.weight.grad.any()


def test_other_networks_are_refused(net: Net, images: Tensor) -> None:
    for layer in (net.last, net.stem):  # a ReLU in between; further layers in between
        with pytest.raises(ValueError, match="use grad_cam"):
            class_activation(net, layer, images, TARGET)
    with pytest.raises(ValueError, match="no linear layer"):
        class_activation(net.stem, net.stem, images, TARGET)
    largest = nn.Sequential(nn.Conv2d(3, 8, 1), nn.AdaptiveMaxPool2d(1), nn.Flatten()).double()
    largest.append(nn.Linear(8, 4).double())
    with pytest.raises(ValueError, match="this model does something else"):
        class_activation(largest, largest[0], images, TARGET)


# --- Grad-CAM


@pytest.mark.parametrize("layer", ["last", "stem"])
def test_grad_cam_is_that_of_captum(layer: str, net: Net, images: Tensor) -> None:
    captum = pytest.importorskip("captum.attr")
    net.eval()
    net.act.inplace = False  # captum keeps what the next layer would overwrite
    expected = captum.LayerGradCam(net, getattr(net, layer)).attribute(
        images, TARGET, relu_attributions=True
    )
    net.act.inplace = True
    found = grad_cam(net, getattr(net, layer), images, TARGET).check()
    assert found.kind is Kind.AMOUNT
    torch.testing.assert_close(found.values.flatten(1), expected.flatten(1))


def test_grad_cam_by_hand(net: Net, images: Tensor) -> None:
    """Equations 1 and 2, channel by channel."""
    net.eval()
    features = net.last(net.stem(images).relu()).detach().requires_grad_()
    net.head(features.relu().mean(dim=(2, 3)))[torch.arange(2), TARGET].sum().backward()
    for sample in range(2):
        total = torch.zeros(5, 6).double()
        for channel in range(8):
            alpha = features.grad[sample, channel].sum() / 30
            total += alpha * features[sample, channel].detach()
        found = grad_cam(net, net.last, images, TARGET)
        torch.testing.assert_close(found.values[sample].flatten(), total.clamp(min=0).flatten())


def test_any_score_can_be_explained(net: Net, images: Tensor) -> None:
    found = grad_cam(net, net.last, images, lambda out: out[:, 1] - out[:, 2])
    assert found.values.any() and not found.values.requires_grad
    with pytest.raises(ValueError, match="one score a sample"):
        grad_cam(net, net.last, images, lambda out: out)


def test_grad_cam_has_a_gradient_when_asked(net: Net, images: Tensor) -> None:
    found = grad_cam(net, net.last, images, TARGET, create_graph=True)
    found.values.sum().backward()
    assert net.head.weight.grad is not None and net.head.weight.grad.any()


def test_layers_that_give_no_features_are_named(net: Net, images: Tensor) -> None:
    with pytest.raises(ValueError, match=r"Linear gives out no features"):
        grad_cam(net, net.head, images, TARGET)
    with pytest.raises(ValueError, match="is not part of the model"):
        grad_cam(net, nn.Conv2d(3, 3, 1), images, TARGET)
    twice = nn.Conv2d(3, 3, 1).double()
    again = nn.Sequential(twice, twice, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(ValueError, match="ran 2 times"):
        grad_cam(again, twice, images, torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"give a function of it as target"):
        grad_cam(nn.Sequential(net.stem, net.last), net.last, images, TARGET)
    assert not net.last._forward_hooks and not twice._forward_hooks


# --- RISE


def slow_masks(
    count: int, size: tuple[int, int], cells: int, keep: float, generator: torch.Generator
) -> Tensor:
    """The same draws, each mask stretched by PyTorch and cut out by itself."""
    steps = [math.ceil(length / cells) for length in size]
    found = []
    for _ in range(count):
        draws = torch.rand(cells * cells + 2, generator=generator)
        small = (draws[:-2] < keep).float().reshape(1, 1, cells, cells)
        large = [(cells + 1) * step for step in steps]
        mask = F.interpolate(small, large, mode="bilinear", align_corners=False)
        y, x = (int(draw * step) for draw, step in zip(draws[-2:], steps, strict=True))
        found.append(mask[0, 0, y : y + size[0], x : x + size[1]])
    return torch.stack(found)


@pytest.mark.parametrize(
    ("size", "cells"), [((10, 12), 3), ((14, 14), 7), ((5, 9), 4), ((6, 6), 1)]
)
def test_masks_are_stretched_and_shifted_grids(size: tuple[int, int], cells: int) -> None:
    found = rise_masks(20, size, cells, 0.4, torch.Generator().manual_seed(3))
    expected = slow_masks(20, size, cells, 0.4, torch.Generator().manual_seed(3))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_pixel_is_shown_as_often_as_asked() -> None:
    found = rise_masks(4000, (8, 8), 4, 0.3, torch.Generator().manual_seed(0))
    assert (found.mean(dim=0) - 0.3).abs().max() < 0.04


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_rise_is_the_slow_loop(chunk: int, net: Net, images: Tensor) -> None:
    found = rise(net, images, TARGET, torch.Generator().manual_seed(5), 10, 3, 0.4, chunk).check()
    stream = torch.Generator().manual_seed(5)
    total = torch.zeros(2, 10, 12).double()
    net.eval()
    for mask in slow_masks(10, (10, 12), 3, 0.4, stream).double():
        for sample in range(2):
            scores = net(images[sample : sample + 1] * mask).detach().softmax(-1)
            total[sample] += scores[0, TARGET[sample]] * mask
    torch.testing.assert_close(
        found.values.flatten(1), (total / 10 / 0.4).flatten(1), rtol=1e-5, atol=1e-6
    )
    assert found.kind is Kind.AMOUNT


def test_rise_finds_the_pixels_that_decide() -> None:
    """The score is the brightness of one corner, known by hand."""
    images = torch.ones(1, 3, 12, 12)

    def corner(x: Tensor) -> Tensor:
        return x[:, 0, :3, :3].mean(dim=(1, 2))

    stream = torch.Generator().manual_seed(0)
    found = rise(corner, images, lambda out: out, stream, masks=600, cells=4)
    values = found.values.reshape(12, 12)
    assert found.kind is Kind.SIGNED
    assert values[:3, :3].min() > values[6:, 6:].max()


class Largest(TorchDispatchMode):
    """The size of the largest tensor that was made."""

    found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.found = max(self.found, out.numel())
        return out


def test_memory_does_not_depend_on_the_number_of_masks(images: Tensor) -> None:
    sizes = []
    for masks in (8, 40):
        with Largest() as largest:
            rise(
                lambda x: x.mean(dim=(1, 2, 3)),
                images,
                lambda out: out,
                torch.Generator(),
                masks,
                3,
                0.5,
                4,
            )
        sizes.append(largest.found)
    assert sizes[0] == sizes[1] == 4 * images.numel()


def test_bad_numbers_are_refused(images: Tensor) -> None:
    with pytest.raises(ValueError, match="masks, cells and chunk are at least 1"):
        rise(lambda x: x, images, lambda out: out, torch.Generator(), masks=0)


def test_geometry_leads_back_to_the_photo(net: Net, images: Tensor) -> None:
    geometry = PixelGeometry.identity(2, (10, 12))
    found = grad_cam(net, net.last, images, TARGET, geometry)
    span = found.keys.find("image")
    assert span.shape == (5, 6) and span.geometry is geometry
    painted = geometry.paint(found.values[:, 0, 0, 0], (5, 6))
    assert painted[0].shape == (10, 12)


def test_a_class_is_one_for_all_or_one_a_sample(
    net: Net, images: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)  # as for users
    random = torch.Generator().manual_seed(0)
    ways: list[Callable[[Any], AttentionMap]] = [
        lambda target: class_activation(net, net.act, images, target),
        lambda target: grad_cam(net, net.act, images, target),
        lambda target: rise(net, images, target, random.manual_seed(0), masks=3, cells=2),
    ]
    for ask in ways:
        assert torch.equal(ask(3).values, ask(torch.tensor([3, 3])).values)
        assert torch.equal(ask([1, 3]).values, ask(TARGET).values)
        for wrong in (4, -1, [0, 4]):
            with pytest.raises(ValueError, match="there are classes 0 to 3, not all of"):
                ask(wrong)
        with pytest.raises(ValueError, match=r"a class a sample is \(."):
            ask(TARGET[:1])


def test_the_photos_of_a_map_are_as_many_as_its_samples(net: Net, images: Tensor) -> None:
    with pytest.raises(ValueError, match="a geometry of 1 photos for 2 samples"):
        grad_cam(net, net.act, images, 1, PixelGeometry.identity(1, (10, 12)))
