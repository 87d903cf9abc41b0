"""How far what is seen of timm models is from the weights they use, as JSON, one row a model.

    python tests/parity/timm_maps.py [FOLDER]

test_timm.py runs it in a process of its own. FOLDER holds timm and torchvision when the environment
does not: a torchvision that was built for another torch would take transformers down with it.
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
    """timm, also beside a torchvision whose kernels were built for another torch.

    Such a torchvision stops at two operators that are not there. Declared, they do no harm: nobody
    calls them.
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
def meeting_values(model: nn.Module) -> Iterator[list[Tensor]]:
    """The weights of each attention as they meet the values, when they are written out.

    timm takes a softmax and drops some of it out. What goes into the dropout counts, since CaiT
    mixes its heads in between; pooling has no dropout.
    """
    found: list[Tensor] = []
    softmax = Tensor.softmax

    def spying(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found.append(softmax(self, *args, **kwargs))
        return found[-1]

    def drop(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        found[-1] = inputs[0]

    drops = [module for name, module in model.named_modules() if name.endswith("attn_drop")]
    handles = [module.register_forward_pre_hook(drop) for module in drops]
    with mock.patch.object(Tensor, "softmax", spying):
        yield found
    for handle in handles:
        handle.remove()


def lively(model: nn.Module) -> nn.Module:
    """The same model with weights that make its attention far from even."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            noise = torch.randn(weight.shape, generator=draw)
            if weight.ndim > 1:
                weight.copy_(noise * (1.5 / weight[0].numel()) ** 0.5)
            elif "norm" not in name:
                weight.add_(noise * 0.2)
    return model.eval()


def mixed(maps: list[Tensor]) -> Tensor:
    """A number that every weight takes part in, to take a gradient of."""
    draw = torch.Generator().manual_seed(2)
    return sum((one * torch.randn(one.shape, generator=draw)).sum() for one in maps)


def compare(
    make: Callable[[], nn.Module], fused: Callable[[bool], None], on: bool
) -> dict[str, Any]:
    """One model with fused attention on or off, against its own weights with it off."""
    fused(False)
    image = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(3))
    reference, pixels = lively(make()), image.clone().requires_grad_()
    with meeting_values(reference) as own:
        logits = reference(pixels)
    (slope,) = torch.autograd.grad(mixed(own), pixels)
    fused(on)
    model, again = lively(make()), image.clone().requires_grad_()
    with watch(model) as seen:
        same = model(again)
    maps = [call.weights() for call in seen]
    (found,) = torch.autograd.grad(mixed(maps), again)
    own, maps = [one.detach() for one in own], [one.detach() for one in maps]
    return {
        "modules": list(attention_modules(model)),
        "seen": list(seen.names),
        "own": len(own),
        "routes": sorted({call.route.name for call in seen}),
        "kinds": {call.name: call.kind.name for call in seen},
        "difference": max(float((a - b).abs().max()) for a, b in zip(own, maps, strict=True)),
        "slope": float((slope - found).abs().max() / slope.abs().max()),
        "largest": max(float(one.max()) for one in maps),
        "lowest": min(float(one.min()) for one in maps),
        "output": float((logits - same).detach().abs().max()),
    }


def main(folder: str | None) -> dict[str, Any]:
    """All models, fused and not."""
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

            rows[f"{name}, {'fused' if on else 'written out'}"] = compare(make, fused, on)
    return rows


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1] if len(sys.argv) > 1 else None), indent=1))
