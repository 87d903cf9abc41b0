"""Print results of attention attached to timm models as JSON, one row per model.

    python -m tests.parity.timm_attached [FOLDER]

test_timm_attached.py runs it in a subprocess; FOLDER is as in timm_maps.py.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from overt.data import Batch
from overt.geometry import PixelGeometry
from overt.inspect.inputs import ModelInput
from overt.inspect.load_model import load_model
from overt.inspect.look import view_model
from overt.nn.backbone_attention.attached_model import AttachedAttention, attach
from overt.testing import check_model
from tests.parity.timm_maps import load

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 3}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "ResNet": ("test_resnet", {}),
    "ConvNeXt": ("test_convnext", {}),
    "EfficientNet": ("test_efficientnet", {}),
    "ViT": ("test_vit", {"img_size": 32}),
    "ViT with registers": (
        "vit_tiny_patch16_224",
        {**SMALL, "reg_tokens": 4, "dynamic_img_size": True},
    ),
    "DeiT": ("deit_tiny_distilled_patch16_224", SMALL),
    "Swin": (
        "swin_tiny_patch4_window7_224",
        {
            "img_size": 64, "embed_dim": 16, "depths": (1, 1, 1), "num_heads": (2, 4, 4),
            "window_size": 4,
        },
    ),
    "pyramid": ("test_resnet", {"features_only": True}),
}  # fmt: skip


def row(timm: Any, name: str, settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return levels, outputs and the restored model of one model."""

    def make() -> AttachedAttention:
        torch.manual_seed(0)
        return attach(timm.create_model(name, pretrained=False, **settings), classes=3)

    net = make().eval()
    side = settings.get("img_size", 64)
    images = torch.randint(0, 256, (3, 3, side, side), dtype=torch.uint8)
    batch = Batch(("a", "b", "c"), images, geometry=PixelGeometry.identity(3, (side, side)))
    check_model(lambda: make().freeze(), batch, tolerance=1e-4)
    with torch.no_grad():
        output = net(batch)
        own = getattr(net.backbone, "forward_intermediates", None)
        difference = None if own is None else _intermediate_difference(net, batch, own)
    net.save_pretrained(folder)
    described = net.config()["backbone"]["library"]
    backbone = None if described else timm.create_model(name, pretrained=False, **settings)
    with torch.no_grad():
        again = AttachedAttention.from_pretrained(folder, backbone)(batch).prediction
    found = {
        "levels": [[one.name, one.order.value, one.before] for one in net.levels],
        "grids": [list(one.keys.find("image").shape) for one in output.attention],
        "library": described,
        "saved": float((again - output.prediction).abs().max()),
        "intermediates": difference,
        "panels": None,
    }
    if described:
        viewed = view_model(
            load_model(folder), ModelInput(photo=images[0].permute(1, 2, 0).numpy())
        )
        found["panels"] = len(viewed.panels)
    return found


def _intermediate_difference(net: AttachedAttention, batch: Batch, own: Any) -> float:
    """Return the difference of the last level and the last intermediate features of timm."""
    from overt.nn.backbone_attention.backbones import normalize_images

    pixels = normalize_images(batch.images, torch.float32, net.numbers)
    expected = own(pixels, indices=1, intermediates_only=True, norm=False)[-1]
    return float((net.backbone_features(batch.images)[-1].cells - expected).abs().max())


def main(folder: str | None) -> dict[str, Any]:
    """Return the rows of all models."""
    if folder is not None:
        sys.path.append(folder)
    timm = load()
    with tempfile.TemporaryDirectory() as place:
        return {
            label: row(timm, name, settings, Path(place) / name / label)
            for label, (name, settings) in MODELS.items()
        }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1] if len(sys.argv) > 1 else None)))
