"""Print differences of captured and used weights of timm models as JSON, one row per model.

    python -m tests.parity.timm_maps [FOLDER]

test_timm.py runs it in a subprocess. FOLDER holds timm and torchvision when the environment does
not: with a torchvision built for another torch, transformers cannot be imported either.
"""

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from overt.capture import attention_modules, watch

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
WINDOWS = {"img_size": 32, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4)}
TORCHVISION = torch.library.Library("torchvision", "FRAGMENT")
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "ViT": ("vit_tiny_patch16_224", SMALL),
    "ViT with registers, normed queries": (
        "vit_tiny_patch16_224",
        {**SMALL, "reg_tokens": 4, "qk_norm": True},
    ),
    "ViT with pooling by attention": (
        "vit_tiny_patch16_224",
        {**SMALL, "class_token": False, "global_pool": "map"},
    ),
    "DeiT": ("deit_tiny_distilled_patch16_224", SMALL),
    "BEiT (position bias)": ("beit_base_patch16_224", SMALL),
    "EVA-02 (rotated)": ("eva02_tiny_patch14_224", SMALL),
    "CaiT (talking heads)": ("cait_xxs24_224", SMALL),
    "Swin (shifted windows)": ("swin_tiny_patch4_window7_224", {**WINDOWS, "window_size": 4}),
    "Swin v2 (cosine)": ("swinv2_tiny_window8_256", {**WINDOWS, "window_size": 4}),
}


def load() -> ModuleType:
    """Import timm, even with a torchvision whose kernels were built for another torch.

    Such a torchvision fails on two missing operators. It is enough to declare them, as they are not
    called.
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        for name in ("nms", "qnms"):
            TORCHVISION.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return importlib.import_module("timm")


@contextmanager
def record_weights(model: nn.Module) -> Iterator[list[Tensor]]:
    """Record the weights of each explicit attention as they multiply the values.

    timm applies softmax and dropout. The input of the dropout is recorded, since CaiT mixes its
    heads in between; pooling has no dropout.
    """
    found: list[Tensor] = []
    softmax = Tensor.softmax

    def recorded_softmax(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found.append(softmax(self, *args, **kwargs))
        return found[-1]

    def drop(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        found[-1] = inputs[0]

    drops = [module for name, module in model.named_modules() if name.endswith("attn_drop")]
    handles = [module.register_forward_pre_hook(drop) for module in drops]
    with mock.patch.object(Tensor, "softmax", recorded_softmax):
        yield found
    for handle in handles:
        handle.remove()


def randomize_weights(model: nn.Module) -> nn.Module:
    """Set random weights that make the attention far from uniform."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            noise = torch.randn(weight.shape, generator=draw)
            if weight.ndim > 1:
                weight.copy_(noise * (1.5 / weight[0].numel()) ** 0.5)
            elif "norm" not in name:
                weight.add_(noise * 0.2)
    return model.eval()


def random_projection(maps: list[Tensor]) -> Tensor:
    """Return a scalar that depends on every weight, to differentiate."""
    draw = torch.Generator().manual_seed(2)
    return sum((one * torch.randn(one.shape, generator=draw)).sum() for one in maps)


def compare(
    make: Callable[[], nn.Module], fused: Callable[[bool], None], on: bool
) -> dict[str, Any]:
    """Compare one model, with fused attention on or off, with its explicit weights."""
    fused(False)
    image = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(3))
    reference, pixels = randomize_weights(make()), image.clone().requires_grad_()
    with record_weights(reference) as own:
        logits = reference(pixels)
    (slope,) = torch.autograd.grad(random_projection(own), pixels)
    fused(on)
    model, again = randomize_weights(make()), image.clone().requires_grad_()
    with watch(model) as trace:
        same = model(again)
    maps = [call.weights() for call in trace]
    (found,) = torch.autograd.grad(random_projection(maps), again)
    own, maps = [one.detach() for one in own], [one.detach() for one in maps]
    return {
        "modules": list(attention_modules(model)),
        "captured": list(trace.names),
        "own": len(own),
        "routes": sorted({call.route.name for call in trace}),
        "kinds": {call.name: call.kind.name for call in trace},
        "difference": max(float((a - b).abs().max()) for a, b in zip(own, maps, strict=True)),
        "slope": float((slope - found).abs().max() / slope.abs().max()),
        "largest": max(float(one.max()) for one in maps),
        "lowest": min(float(one.min()) for one in maps),
        "output": float((logits - same).detach().abs().max()),
    }


def main(folder: str | None) -> dict[str, Any]:
    """Return the rows of all models, with and without fused attention."""
    if folder is not None:
        sys.path.append(folder)
    timm = load()

    def fused(on: bool) -> None:
        timm.layers.set_fused_attn(on, experimental=True)

    rows: dict[str, Any] = {"timm": timm.__version__}
    for name, (kind, settings) in MODELS.items():
        for on in (True, False):

            def make(kind: str = kind, settings: dict[str, Any] = settings) -> nn.Module:
                torch.manual_seed(0)
                return timm.create_model(kind, pretrained=False, num_classes=5, **settings)

            rows[f"{name}, {'fused' if on else 'explicit'}"] = compare(make, fused, on)
    return rows


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1] if len(sys.argv) > 1 else None)))
