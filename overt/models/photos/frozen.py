"""Frozen backbones: a CNN of others, ImageNet's or yours, that makes cells of photos once."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from einops import rearrange
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from overt.errors import BadInput
from overt.models.attaching.backbones import normalised, numbers_of, read_processor, run_backbone
from overt.models.photos.efficientnet import MEAN, SPREAD, efficientnet_lite

See = Callable[[Shaped[Tensor, "i 3 y x"]], Float[Tensor, "i d gy gx"]]


@dataclass(frozen=True)
class Frozen:
    """A backbone that sees bytes: its name, a hash of its weights, and how it wants pixels."""

    name: str
    weights: str
    pixels: str
    see: See

    def cells(self, images: Shaped[Tensor, "i 3 y x"]) -> Float[Tensor, "i k d"]:
        """The cells of photos, row by row, each with all of its features."""
        with torch.no_grad():
            found = self.see(images)
        if found.ndim != 4:
            raise BadInput(
                f"{self.name} gives features of shape {tuple(found.shape)}, which are no grid of "
                "cells; take a CNN."
            )
        return rearrange(found, "i d y x -> i (y x) d")


def of_efficientnet(variant: str, device: torch.device | str = "cpu") -> Frozen:
    """The EfficientNet-Lite whose weights a package carries."""
    model = efficientnet_lite(variant).to(device)
    return Frozen(variant, digest(model), f"(x - {MEAN:g}) / {SPREAD:g}", model.features)


def of_folder(folder: Path, device: torch.device | str = "cpu") -> Frozen:
    """A CNN as Hugging Face writes it, such as a ResNet, with the processor beside it.

    Nothing is fetched, and no code of the folder is run.
    """
    from transformers import AutoModel

    try:
        model = AutoModel.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as problem:
        said = " ".join(str(problem).split())[:200]
        raise BadInput(f"{folder} holds no model of Hugging Face: {said}") from problem
    return of_module(model.eval().to(device), folder.name, read_processor(folder))


def of_timm(name: str, device: torch.device | str = "cpu") -> Frozen:
    """A pretrained CNN of timm, by its name there."""
    try:
        import timm

        model = timm.create_model(name, pretrained=True, num_classes=0)
    except (ImportError, RuntimeError, OSError, ValueError) as problem:
        said = " ".join(str(problem).split())[:200]
        raise BadInput(f"timm has no weights of {name!r} for us: {said}") from problem
    model = model.eval().to(device)
    return of_module(model, name, None, model.forward_features)


def of_module(
    model: nn.Module,
    name: str,
    processor: object = None,
    run: Callable[[Tensor], object] | None = None,
) -> Frozen:
    """Any module that gives a grid of features, with what says how it wants pixels."""
    numbers = numbers_of(model, processor)
    if numbers is None:
        raise BadInput(f"nothing says how {name} wants its pixels; save its processor beside it.")
    kind = next(model.parameters()).dtype

    def see(images: Tensor) -> Tensor:
        pixels = normalised(images, kind, numbers)
        output = run_backbone(model, pixels) if run is None else run(pixels)
        found = output if isinstance(output, Tensor) else getattr(output, "last_hidden_state", None)
        if not isinstance(found, Tensor):
            raise BadInput(f"{name} gives no last_hidden_state; take a CNN without a head.")
        return found

    mean, spread = numbers
    return Frozen(name, digest(model), f"(x / 255 - {list(mean)}) / {list(spread)}", see)


def digest(model: nn.Module) -> str:
    """A hash of every tensor of a module, with its name."""
    whole = hashlib.sha256()
    for name, value in model.state_dict().items():
        whole.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        whole.update(
            value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        )
    return whole.hexdigest()
