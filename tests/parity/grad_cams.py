"""Print the differences of Grad-CAM between pytorch-grad-cam and `overt` as JSON.

    python -m tests.parity.grad_cams [FOLDER]

test_grad_cam.py runs it in a subprocess. FOLDER holds pytorch-grad-cam and torchvision when
the environment does not, for the reason that timm_maps.py gives.
"""

import json
import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from overt import PixelGeometry, metrics
from overt.attribution import (
    grad_cam,
    grad_cam_plus_plus,
    hires_cam,
    layer_cam,
    score_cam,
)
from tests.parity.timm_maps import load

CLASSES = torch.tensor([1, 4])
TRANSFORMERS = (
    *("vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"),
    *("vit_small_patch14_reg4_dinov2", "swin_tiny_patch4_window7_224"),
)


def make_network() -> nn.Sequential:
    """Make a small CNN whose layers have 8 x 12 and 4 x 6 cells."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=4, padding=1), nn.Tanh(), nn.Conv2d(8, 6, 3, 2, 1), nn.Tanh(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5),
    ).eval()  # fmt: skip


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest expected value."""
    return float((found - expected).abs().max() / expected.abs().max())


def compare_layer(net: nn.Sequential, layer: nn.Module, photos: Tensor) -> dict[str, Any]:
    """Compare Grad-CAM of a layer: its cells, and the image painted from them."""
    from pytorch_grad_cam import GradCAM
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    targets = [ClassifierOutputTarget(int(one)) for one in CLASSES]
    where = PixelGeometry.identity(2, (32, 48))
    ours = grad_cam(net, photos, CLASSES, layer, where)
    shape = ours.keys.find("image").shape
    with GradCAM(model=net, target_layers=[layer]) as cam:
        shown = torch.from_numpy(cam(input_tensor=photos, targets=targets))
        recorded = cam.activations_and_grads
        cells = cam.get_cam_image(
            photos, layer, targets, recorded.activations[0].numpy(), recorded.gradients[0].numpy()
        )
    expected = torch.from_numpy(np.maximum(cells, 0))
    # their image is min-max normalized
    amounts = expected.flatten(1) - expected.flatten(1).amin(dim=1, keepdim=True)
    painted = torch.stack(where.paint(amounts, shape))
    painted = painted - painted.amin(dim=(1, 2), keepdim=True)
    return {
        "shape": shape,
        "cells": relative_error(ours.weights.reshape(expected.shape), expected),
        "picture": relative_error(painted / painted.amax(dim=(1, 2), keepdim=True), shown),
    }


def compare_transformer(name: str) -> dict[str, Any]:
    """Compare Grad-CAM of a timm transformer; theirs needs a function to reshape tokens."""
    import timm
    from pytorch_grad_cam import GradCAM
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    torch.manual_seed(0)
    net = timm.create_model(name, pretrained=False, num_classes=5, img_size=(64, 96)).eval()
    photos = torch.randn(2, 3, 64, 96, generator=torch.Generator().manual_seed(3))
    targets = [ClassifierOutputTarget(int(one)) for one in CLASSES]
    swin = name.startswith("swin")
    layer = net.layers[-1] if swin else net.blocks[-1].norm1
    ours = grad_cam(net, photos, CLASSES, layer, PixelGeometry.identity(2, (64, 96)))
    shape = ours.keys.find("image").shape

    def reshape(given: Tensor) -> Tensor:
        if given.ndim == 4:
            return given.permute(0, 3, 1, 2)
        cells = given[:, net.num_prefix_tokens :]
        return cells.reshape(len(given), *shape, -1).permute(0, 3, 1, 2)

    with GradCAM(model=net, target_layers=[layer], reshape_transform=reshape) as cam:
        cam(input_tensor=photos, targets=targets)
        recorded = cam.activations_and_grads
        cells = cam.get_cam_image(
            photos, layer, targets, recorded.activations[0].numpy(), recorded.gradients[0].numpy()
        )
    expected = torch.from_numpy(np.maximum(cells, 0))
    return {"shape": shape, "cells": relative_error(ours.weights.reshape(expected.shape), expected)}


def compare_variants() -> dict[str, float]:
    """Compare the variants of Grad-CAM on a layer of a CNN and on the tokens of a ViT.

    Theirs adds 1e-6 to a denominator of Grad-CAM++, so that the scores are scaled up here. Their
    Score-CAM aligns corners when it upsamples, so that its layer has as many cells as pixels.
    """
    from pytorch_grad_cam import GradCAMPlusPlus, HiResCAM, LayerCAM, ScoreCAM
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    targets = [ClassifierOutputTarget(int(one)) for one in CLASSES]
    torch.manual_seed(0)
    cnn = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.Softplus(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 5),
    ).eval()  # fmt: skip
    vit, photos, reshape = make_vit()
    small = torch.randn(2, 3, 8, 12, generator=torch.Generator().manual_seed(3))
    methods = {
        "grad-cam++": (grad_cam_plus_plus, GradCAMPlusPlus),
        "hires-cam": (hires_cam, HiResCAM),
        "layer-cam": (layer_cam, LayerCAM),
        "score-cam": (score_cam, ScoreCAM),
    }
    rows = {}
    for name, (ours, kind) in methods.items():
        cases = [("cnn", cnn, cnn[1], small, None)]
        if name != "score-cam":
            cases.append(("vit", vit, vit.blocks[-1].norm1, photos, reshape))
        for where, net, layer, images, shape in cases:
            head = net[4] if where == "cnn" else net.head
            head.weight.data *= 1e5 if name == "grad-cam++" else 1.0
            found = ours(net, images, CLASSES, layer).positive()
            with kind(model=net, target_layers=[layer], reshape_transform=shape) as cam:
                cam(input_tensor=images, targets=targets)
                recorded = cam.activations_and_grads
                slopes = recorded.gradients[0].numpy() if recorded.gradients else None
                cells = cam.get_cam_image(
                    images, layer, targets, recorded.activations[0].numpy(), slopes, False
                )
            expected = torch.from_numpy(np.maximum(cells, 0))
            head.weight.data /= 1e5 if name == "grad-cam++" else 1.0
            rows[f"{name} {where}"] = relative_error(
                found.weights.reshape(expected.shape), expected
            )
    return rows


def make_vit() -> tuple[nn.Module, Tensor, Any]:
    """Make a ViT, its images, and the function that theirs needs."""
    import timm

    torch.manual_seed(0)
    net = timm.create_model(
        "vit_tiny_patch16_224", pretrained=False, num_classes=5, img_size=(64, 96)
    ).eval()
    photos = torch.randn(2, 3, 64, 96, generator=torch.Generator().manual_seed(3))

    def reshape(given: Tensor) -> Tensor:
        return given[:, 1:].reshape(len(given), 4, 6, -1).permute(0, 3, 1, 2)

    return net, photos, reshape


def compare_imputation() -> float:
    """Compare the imputation of removed pixels (ROAD), without its noise."""
    from pytorch_grad_cam.metrics.road import NoisyLinearImputer

    draw = torch.Generator().manual_seed(1)
    photos = torch.rand(3, 3, 9, 11, generator=draw)
    removed = torch.rand(3, 9, 11, generator=draw) < torch.tensor([0.2, 0.6, 0.9])[:, None, None]
    everything = torch.ones_like(removed)
    found = metrics.linear_imputation(photos, removed, everything, draw, noise=0.0, tolerance=1e-9)
    filled = NoisyLinearImputer(noise=0.0)
    expected = [filled(one, (~gone).float()) for one, gone in zip(photos, removed, strict=True)]
    return relative_error(found, torch.stack(expected))


def main() -> None:
    """Print the differences."""
    if len(sys.argv) > 1:
        sys.path.append(sys.argv[1])
    load()  # makes torchvision importable
    photos = torch.rand(2, 3, 32, 48, generator=torch.Generator().manual_seed(2))
    net = make_network()
    rows = {
        "fine": compare_layer(net, net[1], photos),
        "coarse": compare_layer(net, net[3], photos),
        "imputed": compare_imputation(),
        "variants": compare_variants(),
        **{name: compare_transformer(name) for name in TRANSFORMERS},
    }
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
