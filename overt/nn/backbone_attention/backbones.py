"""Run external backbones on images, and rebuild them from plain values."""

import importlib
import inspect
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from overt import __version__
from overt.capture.layouts.patch_grids import Size
from overt.errors import UserError
from overt.io import read_json
from overt.nn.config_checks import check_processor
from overt.nn.image_backbones.efficientnet import EfficientNetLite
from overt.nn.network import SavableModule

TIMM_SETTINGS = {"num_classes", "img_size", "features_only", "out_indices"}  # that are saved
DEFAULT_SIZE: Size = (224, 224)  # of ImageNet backbones
# only networks of overt may be imported by the name in a config: it is untrusted input
_OWN_MODULE = re.compile(r"overt\.(nn|papers)(\.[a-z]\w*)+")
PROCESSOR = "preprocessor_config.json"  # of a Hugging Face image processor

PixelStats = tuple[tuple[float, ...], tuple[float, ...]]  # mean and std of each channel


def run_backbone(backbone: nn.Module, pixels: Float[Tensor, "i c y x"]) -> Any:
    """Run a backbone on images: as `pixel_values` if it takes them, else as the only argument.

    Position embeddings of another image size are interpolated where the model supports it.
    """
    takes = inspect.signature(backbone.forward).parameters
    if "pixel_values" not in takes:
        return backbone(pixels)
    if "interpolate_pos_encoding" in takes and tuple(pixels.shape[-2:]) != input_size(backbone):
        return backbone(pixel_values=pixels, interpolate_pos_encoding=True)
    return backbone(pixel_values=pixels)


def input_size(backbone: nn.Module) -> Size:
    """Return the (height, width) that a backbone was made for, or 224 x 224 if unknown."""
    config = getattr(backbone, "config", None)
    # sources in order of trust: the patch embedding, a Hugging Face config, timm's pretrained
    # config
    size = getattr(getattr(backbone, "patch_embed", None), "img_size", None)
    size = size or getattr(config, "image_size", None)
    size = size or _timm_settings(backbone).get("input_size")
    size = size or (backbone.size if isinstance(backbone, EfficientNetLite) else None)
    if isinstance(size, int):
        return size, size
    if isinstance(size, list | tuple) and len(size) >= 2:
        # the last two: timm has (channels, height, width)
        return int(size[-2]), int(size[-1])
    return DEFAULT_SIZE


def input_channels(backbone: nn.Module) -> int:
    """Return the number of channels of the images that a backbone was made for.

    That of its config, else that of its first convolution: 1 for grey images.
    """
    stated = getattr(getattr(backbone, "config", None), "num_channels", None)
    if isinstance(stated, int):
        return stated
    first = next((one for one in backbone.modules() if isinstance(one, nn.Conv2d)), None)
    return 3 if first is None else first.in_channels


def pixel_stats(backbone: nn.Module, processor: Any) -> PixelStats | None:
    """Return the mean and std of pixels in [0, 1] that a backbone expects, or None if unknown."""
    processor = getattr(processor, "image_processor", processor)
    if processor is None and isinstance(backbone, EfficientNetLite):
        processor = backbone  # it has the attributes of a processor
    mean, spread = (getattr(processor, name, None) for name in ("image_mean", "image_std"))
    if mean is None or spread is None:
        settings = _timm_settings(backbone)
        mean, spread = settings.get("mean"), settings.get("std")
    if mean is None or spread is None:
        return None
    return tuple(float(one) for one in mean), tuple(float(one) for one in spread)


def normalize_images(
    images: Shaped[Tensor, "i c y x"], kind: torch.dtype, numbers: PixelStats | None
) -> Float[Tensor, "i c y x"]:
    """Normalise uint8 images for a backbone; floating-point images are unchanged."""
    if images.is_floating_point():
        return images.to(kind)
    if numbers is None:
        raise ValueError(
            "the images are uint8 and the normalisation of the backbone is unknown; pass "
            "attach(backbone, processor=...) with image_mean and image_std"
        )
    mean, spread = (torch.tensor(one, device=images.device)[:, None, None] for one in numbers)
    return ((images.to(mean.dtype) / 255 - mean) / spread).to(kind)


# --- saving and loading


def describe_model(backbone: nn.Module) -> dict[str, Any]:
    """Describe how to build a model: its library, name and settings as plain values.

    Only the class name remains if the described model would have other weights, for example after
    its head was replaced, or if it is not a model of Hugging Face, timm or overt.
    """
    for describing in (_describe_transformers, _describe_timm, _describe_own):
        described = describing(backbone)
        # the description is tried out: a replaced head gives other shapes
        if described is not None and _described_shapes(described) == _weight_shapes(backbone):
            return described
    return {"library": None, "name": type(backbone).__name__, "settings": {}}


def _describe_transformers(backbone: nn.Module) -> dict[str, Any] | None:
    kind = type(backbone)
    if kind.__module__.split(".")[0] != "transformers" or not hasattr(backbone, "config"):
        return None  # also for user-defined subclasses
    config: Any = backbone.config
    # the whole config, not the difference to the defaults, which may change with the version
    settings = json.loads(config.to_json_string(use_diff=False))
    described = {"library": "transformers", "name": kind.__name__, "settings": settings}
    takes = inspect.signature(kind.__init__).parameters
    if "add_pooling_layer" in takes and getattr(backbone, "pooler", None) is None:
        described["arguments"] = {"add_pooling_layer": False}  # not part of the config
    return described


def _describe_own(backbone: nn.Module) -> dict[str, Any] | None:
    """Describe a network of overt by its class and config."""
    kind = type(backbone)
    if not isinstance(backbone, SavableModule) or not _OWN_MODULE.fullmatch(kind.__module__):
        return None  # also for user-defined subclasses
    name = f"{kind.__module__}.{kind.__qualname__}"
    return {"library": "overt", "name": name, "settings": backbone.config()}


def _describe_timm(backbone: nn.Module) -> dict[str, Any] | None:
    """Describe a timm model by its name and the settings that can be recovered."""
    name = _timm_settings(backbone).get("architecture")
    if not name:
        return None
    layers = getattr(getattr(backbone, "feature_info", None), "out_indices", None)
    known = {
        "num_classes": None if layers else getattr(backbone, "num_classes", None),
        "img_size": getattr(getattr(backbone, "patch_embed", None), "img_size", None),
        "features_only": layers and True,
        "out_indices": layers and list(layers),
    }
    settings = {key: value for key, value in known.items() if value is not None}
    return {"library": "timm", "name": str(name), "settings": settings}


def _described_shapes(described: Mapping[str, Any]) -> dict[str, torch.Size] | None:
    """Return the weight shapes of a model with this description, or None if it cannot be built."""
    try:
        # building a model draws initial weights: the caller's random stream must not move
        with torch.random.fork_rng(devices=[]):
            return _weight_shapes(build_model(described))
    except (UserError, ImportError, RuntimeError, TypeError, ValueError):
        return None


def _weight_shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in module.state_dict().items()}


def build_model(described: Mapping[str, Any]) -> nn.Module:
    """Build a model from its description, with random weights; no code of a folder is run."""
    name, settings = str(described["name"]), described["settings"]
    match described["library"]:
        case "transformers":
            import transformers

            kind = getattr(transformers, name, None)
            # the name comes from a file: it must not reach any other attribute of the library
            if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
                raise UserError(f"transformers {transformers.__version__} has no model {name}.")
            assert kind.config_class is not None
            made = kind.config_class.from_dict(settings)
            return kind(made, **described.get("arguments", {}))
        case "timm":
            import timm

            # create_model also takes names such as "hf-hub:...", which would download
            if not re.fullmatch(r"[\w.]+", name) or not settings.keys() <= TIMM_SETTINGS:
                raise UserError(f"the description of the timm model {name[:60]!r} is not valid.")
            return timm.create_model(name, pretrained=False, **settings)
        case "overt":
            return _own_class(name).from_config(settings)
    raise UserError(
        f"the backbone is a custom {name}, whose code is not saved; load it in Python, and pass it "
        "to AttachedAttention.from_pretrained(folder, backbone=...)."
    )


def _own_class(name: str) -> type[SavableModule]:
    module, _, kind = name.rpartition(".")
    found: Any = None
    if _OWN_MODULE.fullmatch(module):
        try:
            found = getattr(importlib.import_module(module), kind, None)
        except ImportError:
            found = None
    if not isinstance(found, type) or not issubclass(found, SavableModule):
        raise UserError(f"overt {__version__} has no network {name[:80]!r}.")
    return found


def processor_settings(processor: Any) -> dict[str, Any] | None:
    """Return the settings of a Hugging Face image processor as plain values."""
    processor = getattr(processor, "image_processor", processor)
    written: Callable[[], str] | None = getattr(processor, "to_json_string", None)
    return None if written is None else json.loads(written())


def read_processor(folder: Path) -> Any:
    """Load the image processor saved in a folder; None if there is none or it cannot be loaded."""
    if not (folder / PROCESSOR).is_file():
        return None
    check_processor(folder / PROCESSOR, read_json(folder / PROCESSOR))
    try:
        from transformers import AutoImageProcessor

        return AutoImageProcessor.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
    except (ImportError, OSError, ValueError, KeyError):
        return None


def _timm_settings(backbone: nn.Module) -> dict[str, Any]:
    """Return the settings of a timm model: size, mean and std of its images."""
    settings = getattr(backbone, "pretrained_cfg", None)
    return settings if isinstance(settings, dict) else {}
