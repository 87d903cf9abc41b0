"""Backbones: how they are given images, and built again from plain values."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from overt.errors import BadInput
from overt.models.attaching.backbones import (
    describe,
    normalised,
    numbers_of,
    processor_settings,
    read_processor,
    rebuild,
    run_backbone,
    usual_size,
)
from tests.models.hosts import Plain, host


def test_images_go_in_by_name_or_as_the_one_argument() -> None:
    pixels = torch.randn(2, 3, 32, 32)
    backbone, plain = host("resnet").eval(), Plain().eval()
    assert torch.equal(run_backbone(backbone, pixels).logits, backbone(pixel_values=pixels).logits)
    assert torch.equal(run_backbone(plain, pixels), plain(pixels))


def test_positions_are_interpolated_on_another_canvas() -> None:
    vit, pixels = host("vit").eval(), torch.randn(2, 3, 48, 32)
    expected = vit(pixel_values=pixels, interpolate_pos_encoding=True).last_hidden_state
    assert torch.equal(run_backbone(vit, pixels).last_hidden_state, expected)


def test_the_size_a_backbone_was_made_for() -> None:
    assert usual_size(host("vit")) == (32, 32)
    assert usual_size(Plain()) == (224, 224)
    told = Plain()
    told.pretrained_cfg = {"input_size": (3, 96, 128)}
    assert usual_size(told) == (96, 128)
    told.patch_embed = SimpleNamespace(img_size=(48, 64))
    assert usual_size(told) == (48, 64)


def test_the_numbers_a_backbone_wants() -> None:
    plain = Plain()
    assert numbers_of(plain, None) is None
    plain.pretrained_cfg = {"mean": [0.5, 0.4, 0.3], "std": [1, 2, 3]}
    assert numbers_of(plain, None) == ((0.5, 0.4, 0.3), (1.0, 2.0, 3.0))
    own = SimpleNamespace(image_mean=[0, 0, 0], image_std=[1, 1, 1])
    assert numbers_of(plain, own) == ((0, 0, 0), (1, 1, 1)), "the processor knows better"
    assert numbers_of(plain, SimpleNamespace(image_processor=own)) == ((0, 0, 0), (1, 1, 1))


def test_bytes_are_brought_there_and_numbers_left_alone() -> None:
    images = torch.tensor([0, 128, 255], dtype=torch.uint8).reshape(1, 3, 1, 1)
    made = normalised(images, torch.float64, ((0.5, 0.4, 0.3), (1.0, 2.0, 3.0)))
    assert made.dtype is torch.float64
    expected = [-0.5, (128 / 255 - 0.4) / 2, 0.7 / 3]
    assert made.flatten().tolist() == pytest.approx(expected, abs=1e-6)
    pixels = torch.randn(1, 3, 2, 2)
    assert torch.equal(normalised(pixels, torch.float32, None), pixels)
    with pytest.raises(ValueError, match="are bytes, and nothing says how"):
        normalised(images, torch.float32, None)


@pytest.mark.parametrize("name", ["resnet", "swin", "dino", "pyramid"])
def test_a_model_of_transformers_is_built_again(name: str) -> None:
    backbone = host(name).eval()
    described = json.loads(json.dumps(describe(backbone)))
    again = rebuild(described)
    assert type(again) is type(backbone)
    again.load_state_dict(backbone.state_dict())
    pixels = torch.randn(2, 3, 32, 32)
    ours, theirs = run_backbone(again.eval(), pixels), run_backbone(backbone, pixels)
    torch.testing.assert_close(ours.to_tuple()[0], theirs.to_tuple()[0])


def test_a_module_of_your_own_is_yours_to_build() -> None:
    described = describe(Plain())
    assert described == {"library": None, "name": "Plain", "settings": {}}
    with pytest.raises(BadInput, match=r"a Plain, which only you can build; .*backbone="):
        rebuild(described)


@pytest.mark.parametrize("name", ["pipeline", "os", "NoSuchModel"])
def test_nothing_but_a_model_is_built(name: str) -> None:
    with pytest.raises(BadInput, match=f"has no model {name}"):
        rebuild({"library": "transformers", "name": name, "settings": {}})


def test_a_class_made_from_one_of_transformers_is_not_theirs() -> None:
    kind: Any = type(host("vit"))

    class Mine(kind):  # type: ignore[misc]
        """Somebody's own."""

    assert describe(Mine(host("vit").config))["library"] is None


def test_a_processor_is_kept_as_plain_values(tmp_path: Path) -> None:
    from transformers import ViTImageProcessor

    processor = ViTImageProcessor(size={"height": 32, "width": 32}, image_mean=[0.1, 0.2, 0.3])
    settings = processor_settings(processor)
    assert settings is not None and settings["image_mean"] == [0.1, 0.2, 0.3]
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    again = read_processor(tmp_path)
    assert list(again.image_mean) == [0.1, 0.2, 0.3] and again.size["height"] == 32


def test_no_processor_is_none(tmp_path: Path) -> None:
    assert processor_settings(None) is None
    assert processor_settings(nn.Identity()) is None
    assert read_processor(tmp_path) is None
    (tmp_path / "preprocessor_config.json").write_text("{}")
    assert read_processor(tmp_path) is None
