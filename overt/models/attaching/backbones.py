"""Backbones of others: how they are given images, and how one is built again from plain values."""

import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from overt.capture.positions.grids import Size
from overt.errors import BadInput

USUAL: Size = (224, 224)  # what most backbones were trained on
PROCESSOR = "preprocessor_config.json"  # where Hugging Face keeps an image processor

Numbers = tuple[tuple[float, ...], tuple[float, ...]]  # mean and deviation of each channel


def run_backbone(backbone: nn.Module, pixels: Float[Tensor, "i 3 y x"]) -> Any:
    """Give images to a backbone: by the name of Hugging Face's inputs, else as the one argument.

    Positions of a model that was made for another size are interpolated, where it offers that.
    """
    takes = inspect.signature(backbone.forward).parameters
    if "pixel_values" not in takes:
        return backbone(pixels)
    if "interpolate_pos_encoding" in takes and tuple(pixels.shape[-2:]) != usual_size(backbone):
        return backbone(pixel_values=pixels, interpolate_pos_encoding=True)
    return backbone(pixel_values=pixels)


def usual_size(backbone: nn.Module) -> Size:
    """The (height, width) a backbone was made for, where it says so; else 224 x 224."""
    config = getattr(backbone, "config", None)
    told = getattr(getattr(backbone, "patch_embed", None), "img_size", None)
    told = told or getattr(config, "image_size", None)
    told = told or _timm_settings(backbone).get("input_size")
    if isinstance(told, int):
        return told, told
    if isinstance(told, list | tuple) and len(told) >= 2:
        return int(told[-2]), int(told[-1])
    return USUAL


def numbers_of(backbone: nn.Module, processor: Any) -> Numbers | None:
    """The mean and deviation of pixels from 0 to 1 that a backbone wants, if anything says so."""
    processor = getattr(processor, "image_processor", processor)
    mean, spread = (getattr(processor, name, None) for name in ("image_mean", "image_std"))
    if mean is None or spread is None:
        settings = _timm_settings(backbone)
        mean, spread = settings.get("mean"), settings.get("std")
    if mean is None or spread is None:
        return None
    return tuple(float(one) for one in mean), tuple(float(one) for one in spread)


def normalised(
    images: Shaped[Tensor, "i 3 y x"], kind: torch.dtype, numbers: Numbers | None
) -> Float[Tensor, "i 3 y x"]:
    """Images as a backbone wants them; numbers are taken as they are, bytes are brought there."""
    if images.is_floating_point():
        return images.to(kind)
    if numbers is None:
        raise ValueError(
            "the images of the batch are bytes, and nothing says how the backbone wants them; "
            "give attach(backbone, processor=...) something with image_mean and image_std"
        )
    mean, spread = (torch.tensor(one, device=images.device)[:, None, None] for one in numbers)
    return ((images.to(mean.dtype) / 255 - mean) / spread).to(kind)


# --- on disk


def describe(backbone: nn.Module) -> dict[str, Any]:
    """What is needed to build a backbone again: its library and its settings, in plain values.

    Where a module built from these would have other weights, as when its head was exchanged, and
    for a module of neither Hugging Face nor timm, there is its name alone.
    """
    for described in (_described_by_transformers(backbone), _described_by_timm(backbone)):
        if described is not None and _shapes_of(described) == _shapes(backbone):
            return described
    return {"library": None, "name": type(backbone).__name__, "settings": {}}


def _described_by_transformers(backbone: nn.Module) -> dict[str, Any] | None:
    kind = type(backbone)
    if kind.__module__.split(".")[0] != "transformers" or not hasattr(backbone, "config"):
        return None  # also a class that somebody made from one of theirs
    config: Any = backbone.config
    settings = json.loads(config.to_json_string(use_diff=False))
    described = {"library": "transformers", "name": kind.__name__, "settings": settings}
    takes = inspect.signature(kind.__init__).parameters
    if "add_pooling_layer" in takes and getattr(backbone, "pooler", None) is None:
        described["arguments"] = {"add_pooling_layer": False}  # the one thing no config has
    return described


def _described_by_timm(backbone: nn.Module) -> dict[str, Any] | None:
    """The name of a timm model and what can be told of its settings: timm does not keep them."""
    name = _timm_settings(backbone).get("architecture")
    if not name:
        return None
    layers = getattr(getattr(backbone, "feature_info", None), "out_indices", None)
    told = {
        "num_classes": None if layers else getattr(backbone, "num_classes", None),
        "img_size": getattr(getattr(backbone, "patch_embed", None), "img_size", None),
        "features_only": layers and True,
        "out_indices": layers and list(layers),
    }
    settings = {key: value for key, value in told.items() if value is not None}
    return {"library": "timm", "name": str(name), "settings": settings}


def _shapes_of(described: Mapping[str, Any]) -> dict[str, torch.Size] | None:
    """The weights that a module of this description would have; None if none can be built."""
    try:
        with torch.random.fork_rng(devices=[]):
            return _shapes(rebuild(described))
    except (BadInput, ImportError, RuntimeError, TypeError, ValueError):
        return None


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in module.state_dict().items()}


def rebuild(described: Mapping[str, Any]) -> nn.Module:
    """A backbone from its description, with weights of no meaning; no code of a folder is run."""
    name, settings = str(described["name"]), described["settings"]
    match described["library"]:
        case "transformers":
            import transformers

            kind = getattr(transformers, name, None)
            if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
                raise BadInput(f"transformers {transformers.__version__} has no model {name}.")
            assert kind.config_class is not None
            made = kind.config_class.from_dict(settings)
            return kind(made, **described.get("arguments", {}))
        case "timm":
            import timm

            return timm.create_model(name, pretrained=False, **settings)
    raise BadInput(
        f"the backbone is a {name}, which only you can build; give it to "
        "from_pretrained(folder, backbone=...)."
    )


def processor_settings(processor: Any) -> dict[str, Any] | None:
    """The settings of a Hugging Face image processor, in plain values."""
    processor = getattr(processor, "image_processor", processor)
    written: Callable[[], str] | None = getattr(processor, "to_json_string", None)
    return None if written is None else json.loads(written())


def read_processor(folder: Path) -> Any:
    """The image processor that was saved beside a model; None if there is none to be had here."""
    if not (folder / PROCESSOR).is_file():
        return None
    try:
        from transformers import AutoImageProcessor

        return AutoImageProcessor.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
    except (ImportError, OSError, ValueError, KeyError):
        return None


def _timm_settings(backbone: nn.Module) -> dict[str, Any]:
    """What timm knows of a model of its own: the size, mean and deviation of its images."""
    settings = getattr(backbone, "pretrained_cfg", None)
    return settings if isinstance(settings, dict) else {}
