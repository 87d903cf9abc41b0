"""Frozen CNN backbones that compute grid features of images once, for a feature cache."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from einops import rearrange
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from overt import io
from overt.errors import UserError
from overt.nn.backbone_attention.backbones import (
    normalize_images,
    pixel_stats,
    read_processor,
    run_backbone,
)
from overt.nn.config_checks import check_config, limit_allocations, tensor_sizes
from overt.nn.image_backbones.efficientnet import MEAN, STD, efficientnet_lite

ExtractFeatures = Callable[[Shaped[Tensor, "i 3 y x"]], Float[Tensor, "i d gy gx"]]


@dataclass(frozen=True)
class FrozenBackbone:
    """Frozen backbone for uint8 images.

    Args:
        name: name of the model.
        weights: digest of its weights.
        pixels: its normalisation, as text.
        extract: computes the feature map of uint8 images.
    """

    name: str
    weights: str
    pixels: str
    extract: ExtractFeatures

    def cells(self, images: Shaped[Tensor, "i 3 y x"]) -> Float[Tensor, "i k d"]:
        """Compute the grid cells of images, row by row, with all channels."""
        # features go into a cache: nothing is trained through them
        with torch.no_grad():
            features = self.extract(images)
        if features.ndim != 4:
            raise UserError(
                f"{self.name} returned features of shape {tuple(features.shape)}, expected a grid "
                "with four axes; use a CNN."
            )
        return rearrange(features, "i d y x -> i (y x) d")


def frozen_efficientnet(variant: str, device: torch.device | str = "cpu") -> FrozenBackbone:
    """Load an EfficientNet-Lite with ImageNet weights."""
    model = efficientnet_lite(variant).to(device)
    return FrozenBackbone(
        variant, weights_digest(model), f"(x - {MEAN:g}) / {STD:g}", model.features
    )


def frozen_from_folder(folder: Path, device: torch.device | str = "cpu") -> FrozenBackbone:
    """Load a Hugging Face CNN, such as a ResNet, with its processor from a local folder.

    Nothing is downloaded, and no code of the folder is run.
    """
    from transformers import AutoModel

    if (folder / "config.json").is_file():
        check_config(folder / "config.json", io.read_json(folder / "config.json"))
    try:
        with limit_allocations(str(folder), tensor_sizes(folder)):
            model = AutoModel.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False, use_safetensors=True
            )
    except (OSError, ValueError, KeyError) as problem:
        why = " ".join(str(problem).split())[:200]
        raise UserError(f"{folder} is not a Hugging Face model: {why}") from problem
    return frozen_module(model.eval().to(device), folder.name, read_processor(folder))


def frozen_timm(name: str, device: torch.device | str = "cpu") -> FrozenBackbone:
    """Load a pretrained CNN of timm by its name."""
    try:
        import timm

        model = timm.create_model(name, pretrained=True, num_classes=0)
    except (ImportError, RuntimeError, OSError, ValueError) as problem:
        why = " ".join(str(problem).split())[:200]
        raise UserError(f"cannot load {name!r} from timm: {why}") from problem
    model = model.eval().to(device)
    return frozen_module(model, name, None, model.forward_features)


def frozen_module(
    model: nn.Module,
    name: str,
    processor: object = None,
    run: Callable[[Tensor], object] | None = None,
) -> FrozenBackbone:
    """Wrap any module that returns a feature map; `processor` gives its normalisation."""
    numbers = pixel_stats(model, processor)
    if numbers is None:
        raise UserError(f"the normalisation of {name} is unknown; save its processor with it.")
    kind = next(model.parameters()).dtype

    def extract(images: Tensor) -> Tensor:
        pixels = normalize_images(images, kind, numbers)
        output = run_backbone(model, pixels) if run is None else run(pixels)
        found = output if isinstance(output, Tensor) else getattr(output, "last_hidden_state", None)
        if not isinstance(found, Tensor):
            raise UserError(f"{name} returns no last_hidden_state; use a CNN without a head.")
        return found

    mean, spread = numbers
    return FrozenBackbone(
        name, weights_digest(model), f"(x / 255 - {list(mean)}) / {list(spread)}", extract
    )


def weights_digest(model: nn.Module) -> str:
    """Compute a hash of all tensors of a module with their names."""
    whole = hashlib.sha256()
    for name, value in model.state_dict().items():
        # names, dtypes and shapes are part of the hash: the same bytes may be other weights
        whole.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        whole.update(
            # as bytes: NumPy has no bfloat16
            value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        )
    return whole.hexdigest()
