"""Class activation maps and the variants of Grad-CAM: slow copies, unchanged models, errors.

tests/parity/test_grad_cam.py compares them with pytorch-grad-cam.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overt.attention import AttentionMap, Kind, grid, words
from overt.attribution.cam import (
    class_activation,
    grad_cam,
    grad_cam_plus_plus,
    hires_cam,
    layer_cam,
    score_cam,
)
from overt.attribution.target_scores import Contrast
from overt.geometry import PixelGeometry
from tests.attribution.networks import TARGET, Net, model_state


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


@pytest.fixture
def images() -> Tensor:
    return torch.randn(2, 3, 10, 12).double()


def map_functions() -> dict[str, Callable[[Net, Tensor], AttentionMap]]:
    return {
        "class activation": lambda net, x: class_activation(net, x, TARGET, net.act),
        "grad-cam": lambda net, x: grad_cam(net, x, TARGET, net.last),
        "grad-cam++": lambda net, x: grad_cam_plus_plus(net, x, TARGET, net.last),
        "hires-cam": lambda net, x: hires_cam(net, x, TARGET, net.last),
        "layer-cam": lambda net, x: layer_cam(net, x, TARGET, net.last),
        "score-cam": lambda net, x: score_cam(net, x, TARGET, net.last),
    }


@pytest.mark.parametrize("name", map_functions())
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_model_state_is_unchanged(
    name: str, training: bool, frozen: bool, net: Net, images: Tensor
) -> None:
    net.train(training).requires_grad_(not frozen)
    net.drop.train()  # one module in another mode
    before = model_state(net)
    found = map_functions()[name](net, images).check()
    assert model_state(net) == before
    with torch.no_grad():
        torch.testing.assert_close(map_functions()[name](net, images).values, found.values)
    with torch.inference_mode():
        torch.testing.assert_close(map_functions()[name](net, images.clone()).values, found.values)


@pytest.mark.parametrize("name", map_functions())
def test_model_state_is_unchanged_after_an_error(name: str, net: Net, images: Tensor) -> None:
    def fail(module: nn.Module, given: object) -> None:
        torch.rand(3)
        raise RuntimeError("in the middle")

    handle = net.head.register_forward_pre_hook(fail)
    before = model_state(net.train())
    with pytest.raises(RuntimeError, match="in the middle"):
        map_functions()[name](net, images)
    assert model_state(net) == before
    handle.remove()


# --- class activation


def test_class_activation_map_and_bias_sum_to_the_score(net: Net, images: Tensor) -> None:
    found = class_activation(net, images, TARGET, net.act).check()
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
    class_activation(net, images, TARGET, net.act).values.sum().backward()
    assert net.last.weight.grad is not None and net.last.weight.grad.any()


def test_class_activation_of_unsupported_networks_raises(net: Net, images: Tensor) -> None:
    for layer in (net.last, net.stem):  # a ReLU in between; further layers in between
        with pytest.raises(ValueError, match="use grad_cam"):
            class_activation(net, images, TARGET, layer)
    with pytest.raises(ValueError, match="no linear layer"):
        class_activation(net.stem, images, TARGET, net.stem)
    largest = nn.Sequential(nn.Conv2d(3, 8, 1), nn.AdaptiveMaxPool2d(1), nn.Flatten()).double()
    largest.append(nn.Linear(8, 4).double())
    with pytest.raises(ValueError, match="grad_cam"):
        class_activation(largest, images, TARGET, largest[0])


# --- Grad-CAM


@pytest.mark.parametrize("layer", ["last", "stem"])
def test_grad_cam_agrees_with_captum(layer: str, net: Net, images: Tensor) -> None:
    captum = pytest.importorskip("captum.attr")
    net.eval()
    net.act.inplace = False  # captum stores a tensor that the in-place ReLU would overwrite
    expected = captum.LayerGradCam(net, getattr(net, layer)).attribute(
        images, TARGET, relu_attributions=True
    )
    net.act.inplace = True
    found = grad_cam(net, images, TARGET, getattr(net, layer)).check()
    assert found.kind is Kind.AMOUNT
    torch.testing.assert_close(found.values.flatten(1), expected.flatten(1))


def test_grad_cam_by_hand(net: Net, images: Tensor) -> None:
    """Compute equations 1 and 2 channel by channel."""
    net.eval()
    features = net.last(net.stem(images).relu()).detach().requires_grad_()
    net.head(features.relu().mean(dim=(2, 3)))[torch.arange(2), TARGET].sum().backward()
    for sample in range(2):
        total = torch.zeros(5, 6).double()
        for channel in range(8):
            alpha = features.grad[sample, channel].sum() / 30
            total += alpha * features[sample, channel].detach()
        found = grad_cam(net, images, TARGET, net.last)
        torch.testing.assert_close(found.values[sample].flatten(), total.clamp(min=0).flatten())


def test_target_may_be_a_function_of_the_output(net: Net, images: Tensor) -> None:
    found = grad_cam(net, images, lambda out: out[:, 1] - out[:, 2], net.last)
    assert found.values.any() and not found.values.requires_grad
    with pytest.raises(ValueError, match="target function"):
        grad_cam(net, images, lambda out: out, net.last)


def test_grad_cam_has_a_gradient_with_create_graph(net: Net, images: Tensor) -> None:
    found = grad_cam(net, images, TARGET, net.last, create_graph=True)
    found.values.sum().backward()
    assert net.head.weight.grad is not None and net.head.weight.grad.any()


def test_unsupported_layers_raise_with_their_name(net: Net, images: Tensor) -> None:
    with pytest.raises(ValueError, match=r"Linear"):
        grad_cam(net, images, TARGET, net.head)
    with pytest.raises(ValueError, match=r"part.*model"):
        grad_cam(net, images, TARGET, nn.Conv2d(3, 3, 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxtyping.config.jaxtyping_disable", True)  # as for users
        with pytest.raises(TypeError, match=r"'last'.*submodule"):
            grad_cam(net, images, TARGET, "last")  # type: ignore[arg-type]
    twice = nn.Conv2d(3, 3, 1).double()
    again = nn.Sequential(twice, twice, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(ValueError, match="ran 2 times"):
        grad_cam(again, images, torch.tensor([0, 1]), twice)
    with pytest.raises(ValueError, match=r"a class as"):
        grad_cam(nn.Sequential(net.stem, net.last), images, TARGET, net.last)
    assert not net.last._forward_hooks and not twice._forward_hooks


def test_grad_cam_has_the_geometry_of_the_photo(net: Net, images: Tensor) -> None:
    geometry = PixelGeometry.identity(2, (10, 12))
    found = grad_cam(net, images, TARGET, net.last, geometry)
    span = found.keys.find("image")
    assert span.shape == (5, 6) and span.geometry is geometry
    painted = geometry.paint(found.values[:, 0, 0, 0], (5, 6))
    assert painted[0].shape == (10, 12)


def test_target_class_may_be_shared_or_per_sample(
    net: Net, images: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)  # as for users
    ways: list[Callable[[Any], AttentionMap]] = [
        lambda target: class_activation(net, images, target, net.act),
        lambda target: grad_cam(net, images, target, net.act),
        lambda target: score_cam(net, images, target, net.act),
    ]
    for ask in ways:
        assert torch.equal(ask(3).values, ask(torch.tensor([3, 3])).values)
        assert torch.equal(ask([1, 3]).values, ask(TARGET).values)
        for wrong in (4, -1, [0, 4]):
            with pytest.raises(ValueError, match="classes 0 to 3"):
                ask(wrong)
        with pytest.raises(ValueError, match="target .*shape"):
            ask(TARGET[:1])


def test_geometry_of_another_batch_size_raises(net: Net, images: Tensor) -> None:
    with pytest.raises(ValueError, match=r"1 image.* 2 sample"):
        grad_cam(net, images, 1, net.act, PixelGeometry.identity(1, (10, 12)))


# --- variants


def features_and_gradient(net: Net, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return the features of `net.last` and the gradient of the target by them."""
    net.eval()
    features = net.last(net.stem(images).relu()).detach().requires_grad_()
    net.head(features.relu().mean(dim=(2, 3)))[torch.arange(2), TARGET].sum().backward()
    assert features.grad is not None
    return features.detach(), features.grad


def test_grad_cam_plus_plus_by_hand(net: Net, images: Tensor) -> None:
    """Compute equations 19 and 5 cell by cell."""
    features, gradient = features_and_gradient(net, images)
    found = grad_cam_plus_plus(net, images, TARGET, net.last).check().values
    for sample in range(2):
        total = torch.zeros(5, 6).double()
        for channel in range(8):
            weight = 0.0
            whole = float(features[sample, channel].sum())
            for slope in gradient[sample, channel].flatten().tolist():
                if slope != 0:
                    share = slope**2 / (2 * slope**2 + whole * slope**3)
                    weight += share * max(slope, 0)
            total += weight * features[sample, channel]
        torch.testing.assert_close(found[sample].flatten(), total.clamp(min=0).flatten())


def test_hires_cam_and_layer_cam_by_hand(net: Net, images: Tensor) -> None:
    features, gradient = features_and_gradient(net, images)
    found = hires_cam(net, images, TARGET, net.last).check()
    assert found.kind is Kind.SIGNED
    torch.testing.assert_close(found.values.flatten(1), (features * gradient).sum(1).flatten(1))
    positive = (features * gradient.clamp(min=0)).sum(1).clamp(min=0)
    found = layer_cam(net, images, TARGET, net.last).check()
    torch.testing.assert_close(found.values.flatten(1), positive.flatten(1))


def test_hires_cam_and_bias_add_up_to_the_score_before_one_linear_layer() -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 4, 3, padding=1)
    net = nn.Sequential(conv, nn.Flatten(), nn.Linear(4 * 5 * 6, 3)).eval()
    images = torch.randn(2, 3, 5, 6)
    found = hires_cam(net, images, 1, conv)
    expected = net(images)[:, 1] - net[2].bias[1]
    torch.testing.assert_close(found.values.flatten(1).sum(dim=1), expected.detach())


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_score_cam_by_hand(chunk: int, net: Net, images: Tensor) -> None:
    """Run each image through each channel separately."""
    features, _ = features_and_gradient(net, images)
    found = score_cam(net, images, TARGET, net.last, chunk=chunk).check()
    for sample in range(2):
        scores = []
        for channel in features[sample]:
            large = nn.functional.interpolate(channel[None, None], (10, 12), mode="bilinear")
            large = (large - large.min()) / (large.max() - large.min())
            scores.append(net(images[[sample]] * large)[0, TARGET[sample]])
        weights = torch.stack(scores).softmax(dim=0).detach()
        total = (weights[:, None, None] * features[sample]).sum(dim=0).clamp(min=0)
        torch.testing.assert_close(found.values[sample].flatten(), total.flatten(), atol=1e-5,
                                   rtol=1e-4)  # fmt: skip


def test_score_cam_of_constant_channels_is_finite(net: Net) -> None:
    nn.init.zeros_(net.last.weight)
    score_cam(net, torch.randn(1, 3, 10, 12).double(), 0, net.last).check()
    with pytest.raises(ValueError, match="chunk"):
        score_cam(net, torch.randn(1, 3, 10, 12).double(), 0, net.last, chunk=0)


def test_contrast_is_the_difference_of_two_classes(net: Net, images: Tensor) -> None:
    contrast = Contrast(TARGET, 2)
    expected = hires_cam(net, images, TARGET, net.last).values
    expected = expected - hires_cam(net, images, 2, net.last).values
    torch.testing.assert_close(hires_cam(net, images, contrast, net.last).values, expected)


# --- tokens


@pytest.fixture(scope="module")
def vit():
    transformers = pytest.importorskip("transformers", reason="no transformers")
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        image_size=32, patch_size=8, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=16, num_labels=3, initializer_range=0.3,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config).eval()


def slow_token_grad_cam(model: nn.Module, layer: nn.Module, images: Tensor, target: int) -> Tensor:
    """Compute equations 1 and 2 sample by sample on the 4 x 4 cells after one class token."""
    found: list[Tensor] = []

    def note(module, given, output):
        first = output[0] if isinstance(output, tuple) else output
        first.retain_grad()
        found.append(first)

    handle = layer.register_forward_hook(note)
    model(images).logits[:, target].sum().backward()
    handle.remove()
    cells, slope = found[0][:, 1:].detach(), found[0].grad[:, 1:]
    maps = [(cells[b] @ slope[b].mean(dim=0)).clamp_min(0) for b in range(len(images))]
    model.zero_grad(set_to_none=True)
    return torch.stack(maps)


@pytest.mark.parametrize("where", ["layernorm_before", "layer"])
def test_grad_cam_of_vit_tokens_is_a_grid(vit, where):
    images = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    layers = vit.vit.layers if hasattr(vit.vit, "layers") else vit.vit.encoder.layer
    layer = layers[0] if where == "layer" else layers[-1].layernorm_before
    geometry = PixelGeometry.identity(3, (32, 32))
    found = grad_cam(vit, images, lambda out: out.logits[:, 2], layer, geometry).check()
    assert (
        found.keys.find("image").shape == (4, 4) and found.keys.find("image").geometry is not None
    )
    torch.testing.assert_close(found.weights.flatten(1), slow_token_grad_cam(vit, layer, images, 2))
    by_class = grad_cam(vit, images, 2, layer, geometry)
    torch.testing.assert_close(by_class.weights, found.weights)
    given = words(1, "class") + grid(4, 4)
    again = grad_cam(vit, images, lambda out: out.logits[:, 2], layer, layout=given)
    torch.testing.assert_close(again.weights, found.weights)


def test_unused_tokens_and_unknown_layouts_raise(vit):
    images = torch.randn(2, 3, 32, 32)
    score = lambda out: out.logits[:, 0]  # noqa: E731
    with pytest.raises(ValueError, match="norm1"):
        grad_cam(vit, images, score, vit.vit.layernorm)
    layer = (vit.vit.layers if hasattr(vit.vit, "layers") else vit.vit.encoder.layer)[0]
    with pytest.raises(ValueError, match="16 tokens.* 17"):
        grad_cam(vit, images, score, layer, layout=grid(4, 4))
    with pytest.raises(ValueError, match="one grid.* 0"):
        grad_cam(vit, images, score, layer, layout=words(17))
    with pytest.raises(ValueError, match=r"1 image.* 2 sample"):
        grad_cam(vit, images, score, layer, PixelGeometry.identity(1, (32, 32)))
    plain = nn.Sequential(nn.Flatten(2), nn.Linear(16, 4), nn.Flatten(), nn.Linear(12, 2))
    with pytest.raises(ValueError, match=r"layout=.*grid\("):
        grad_cam(plain, torch.rand(2, 3, 4, 4), 1, plain[1])


@pytest.mark.parametrize("method", [grad_cam_plus_plus, hires_cam, layer_cam, score_cam])
def test_variants_find_the_tokens_of_a_vit(vit, method):
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    layers = vit.vit.layers if hasattr(vit.vit, "layers") else vit.vit.encoder.layer
    found = method(vit, images, 1, layers[-1].layernorm_before).check()
    assert found.keys.find("image").shape == (4, 4) and found.values.any()
    given = words(1, "class") + grid(4, 4)
    again = method(vit, images, 1, layers[-1].layernorm_before, layout=given)
    assert torch.equal(again.values, found.values)


def test_grad_cam_supports_channels_last_layers():
    """Swin returns channels last, which was once read as rows of cells."""
    torch.manual_seed(0)

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.mark = nn.Conv2d(3, 5, 4, 4), nn.Identity()
            self.head = nn.Linear(5, 3)

        def forward(self, images: Tensor) -> Tensor:
            return self.head(self.mark(self.conv(images).tanh().movedim(1, -1)).mean(dim=(1, 2)))

    net, images = Last().eval(), torch.randn(2, 3, 16, 24)
    found = grad_cam(net, images, 1, net.mark)
    assert found.keys.find("image").shape == (4, 6)
    cells = net.conv(images).tanh()
    expected = torch.einsum("bcyx,c->byx", cells, net.head.weight[1] / 24).clamp_min(0)
    torch.testing.assert_close(found.weights.flatten(1), expected.flatten(1))
