"""Print differences of pruned timm models and masked ones as JSON, one row per model.

    python -m tests.parity.timm_pruning [FOLDER]

test_timm_pruning.py runs it in a subprocess, as test_timm.py does with timm_maps.py.
"""

import json
import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from overt.capture import watch
from overt.capture.call import Call
from overt.capture.edits import Bias
from overt.nn import (
    PrunedModel,
    by_class_attention,
    fuse_tokens,
    keep_above_uniform,
    keep_all,
    keep_share,
    merge_tokens,
    prune_tokens,
)
from tests.parity.timm_maps import load, randomize_weights

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 3}
TOKEN = {**SMALL, "global_pool": "token"}
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
    "BEiT (position bias)": ("beit_base_patch16_224", TOKEN),
    "EVA-02 (rotated)": ("eva02_tiny_patch14_224", TOKEN),
}
HALF = partial(keep_share, share=0.5)


def run_masked(model: nn.Module, pruned: PrunedModel, image: Tensor) -> Tensor:
    """Return the output with removed tokens masked in later layers and in the head."""
    layers = enumerate(pruned.layers)
    at = {module: number for number, layer in layers for module in layer.modules()}

    def make(call: Call) -> Tensor | None:
        number = at.get(call.module, len(pruned.layers))
        gone = [one.kept.values[:, 0, 0, 0] == 0 for one in pruned.steps if one.after <= number]
        if not gone:
            return None
        return torch.zeros(gone[-1].shape).masked_fill(gone[-1], -torch.inf)[:, None, None]

    with watch(model, edit=Bias(make)):
        return model(image)


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


@torch.no_grad()
def compare(model: nn.Module) -> dict[str, Any]:
    """Compare one model under every way of pruning and merging."""
    image = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(3))
    alone = model(image)
    row: dict[str, Any] = {}
    with prune_tokens(model, (1, 2), keep_all):
        row["all"] = distance(model(image), alone)
    with merge_tokens(model, 0):
        row["merge none"] = distance(model(image), alone)
    for name, keep in (("half", HALF), ("adaptive", partial(keep_above_uniform, temperature=2.0))):
        with prune_tokens(model, (1, 2), keep) as pruned:
            found = model(image)
        row[name] = distance(found, run_masked(model, pruned, image))
        row[f"{name} moved"] = distance(found, alone)
        row[f"{name} lengths"] = pruned.lengths
        row[f"{name} kept"] = pruned.kept.values.sum(-1)[:, -1].flatten().tolist()
        row["spans"] = [span.name for span in pruned.kept.keys.spans]
    with merge_tokens(model, 3) as pruned:
        row["merged"] = bool(model(image).isfinite().all())
    row["merged lengths"] = pruned.lengths
    try:
        with prune_tokens(model, (1, 2), HALF, by_class_attention, fuse_tokens):
            row["fused"] = bool(model(image).isfinite().all())
    except ValueError as problem:
        row["fused"] = str(problem)
    row["after"] = distance(model(image), alone)
    return row


@torch.no_grad()
def compare_explicit(model: nn.Module) -> float:
    """Return the difference of a ragged batch and masking, with explicit attention."""
    image = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(3))
    with prune_tokens(model, (1, 2), partial(keep_above_uniform, temperature=2.0)) as pruned:
        found = model(image)
    return distance(found, run_masked(model, pruned, image))


def rejection_message(model: nn.Module) -> str:
    """Return the error message for a model that cannot be pruned."""
    try:
        with prune_tokens(model, (1,), HALF):
            return ""
    except ValueError as problem:
        return str(problem)


def main(folder: str | None) -> dict[str, Any]:
    """Return the rows of all models with fused attention, and of two without."""
    if folder is not None:
        sys.path.append(folder)
    timm = load()

    def make(name: str) -> nn.Module:
        torch.manual_seed(0)
        kind, settings = MODELS[name]
        return randomize_weights(
            timm.create_model(kind, pretrained=False, num_classes=5, **settings)
        )

    timm.layers.set_fused_attn(True)
    rows: dict[str, Any] = {name: compare(make(name)) for name in MODELS}
    timm.layers.set_fused_attn(False)
    rows["explicit"] = compare_explicit(make("ViT"))
    rows["rejected"] = rejection_message(make("BEiT (position bias)"))
    return rows


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1] if len(sys.argv) > 1 else None)))
