"""Backbones: input conventions, pixel statistics, and rebuilding from a saved description."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from overt.errors import UserError
from overt.nn.backbone_attention.backbones import (
    build_model,
    describe_model,
    input_size,
    normalize_images,
    pixel_stats,
    processor_settings,
    read_processor,
    run_backbone,
)
from tests.nn.hosts import Plain, host


def test_images_are_passed_as_pixel_values_or_as_the_only_argument() -> None:
    pixels = torch.randn(2, 3, 32, 32)
    backbone, plain = host("resnet").eval(), Plain().eval()
    assert torch.equal(run_backbone(backbone, pixels).logits, backbone(pixel_values=pixels).logits)
    assert torch.equal(run_backbone(plain, pixels), plain(pixels))


def test_position_embeddings_are_interpolated_for_another_image_size() -> None:
    vit, pixels = host("vit").eval(), torch.randn(2, 3, 48, 32)
    expected = vit(pixel_values=pixels, interpolate_pos_encoding=True).last_hidden_state
    assert torch.equal(run_backbone(vit, pixels).last_hidden_state, expected)


def test_input_size_is_read_from_the_backbone() -> None:
    assert input_size(host("vit")) == (32, 32)
    assert input_size(Plain()) == (224, 224)
    configured = Plain()
    configured.pretrained_cfg = {"input_size": (3, 96, 128)}
    assert input_size(configured) == (96, 128)
    configured.patch_embed = SimpleNamespace(img_size=(48, 64))
    assert input_size(configured) == (48, 64)


def test_pixel_stats_come_from_the_processor_or_the_backbone() -> None:
    plain = Plain()
    assert pixel_stats(plain, None) is None
    plain.pretrained_cfg = {"mean": [0.5, 0.4, 0.3], "std": [1, 2, 3]}
    assert pixel_stats(plain, None) == ((0.5, 0.4, 0.3), (1.0, 2.0, 3.0))
    own = SimpleNamespace(image_mean=[0, 0, 0], image_std=[1, 1, 1])
    assert pixel_stats(plain, own) == ((0, 0, 0), (1, 1, 1)), "the processor comes first"
    assert pixel_stats(plain, SimpleNamespace(image_processor=own)) == ((0, 0, 0), (1, 1, 1))


def test_uint8_images_are_normalized_and_floats_are_unchanged() -> None:
    images = torch.tensor([0, 128, 255], dtype=torch.uint8).reshape(1, 3, 1, 1)
    made = normalize_images(images, torch.float64, ((0.5, 0.4, 0.3), (1.0, 2.0, 3.0)))
    assert made.dtype is torch.float64
    expected = [-0.5, (128 / 255 - 0.4) / 2, 0.7 / 3]
    assert made.flatten().tolist() == pytest.approx(expected, abs=1e-6)
    pixels = torch.randn(1, 3, 2, 2)
    assert torch.equal(normalize_images(pixels, torch.float32, None), pixels)
    with pytest.raises(ValueError, match=r"uint8.*processor="):
        normalize_images(images, torch.float32, None)


@pytest.mark.parametrize("name", ["resnet", "swin", "dino", "pyramid"])
def test_transformers_model_is_rebuilt_from_its_description(name: str) -> None:
    backbone = host(name).eval()
    described = json.loads(json.dumps(describe_model(backbone)))
    again = build_model(described)
    assert type(again) is type(backbone)
    again.load_state_dict(backbone.state_dict())
    pixels = torch.randn(2, 3, 32, 32)
    ours, theirs = run_backbone(again.eval(), pixels), run_backbone(backbone, pixels)
    torch.testing.assert_close(ours.to_tuple()[0], theirs.to_tuple()[0])


def test_rebuilding_a_custom_module_raises() -> None:
    described = describe_model(Plain())
    assert described == {"library": None, "name": "Plain", "settings": {}}
    with pytest.raises(UserError, match=r"Plain.*backbone="):
        build_model(described)


@pytest.mark.parametrize("name", ["pipeline", "os", "NoSuchModel"])
def test_names_that_are_not_models_raise(name: str) -> None:
    with pytest.raises(UserError, match=f"has no model {name}"):
        build_model({"library": "transformers", "name": name, "settings": {}})


def test_subclass_of_a_transformers_class_counts_as_custom() -> None:
    kind: Any = type(host("vit"))

    class Mine(kind):  # type: ignore[misc]
        """A custom subclass."""

    assert describe_model(Mine(host("vit").config))["library"] is None


def test_processor_settings_are_saved_as_json(tmp_path: Path) -> None:
    from transformers import ViTImageProcessor

    processor = ViTImageProcessor(size={"height": 32, "width": 32}, image_mean=[0.1, 0.2, 0.3])
    settings = processor_settings(processor)
    assert settings is not None and settings["image_mean"] == [0.1, 0.2, 0.3]
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    again = read_processor(tmp_path)
    assert list(again.image_mean) == [0.1, 0.2, 0.3] and again.size["height"] == 32


def test_missing_processor_gives_none(tmp_path: Path) -> None:
    assert processor_settings(None) is None
    assert processor_settings(nn.Identity()) is None
    assert read_processor(tmp_path) is None
    (tmp_path / "preprocessor_config.json").write_text("{}")
    assert read_processor(tmp_path) is None
