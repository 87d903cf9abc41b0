"""How far what pytorch-grad-cam says is from what `overt` says of the same network, as JSON.

    python -m tests.parity.grad_cams [FOLDER]

test_grad_cam.py runs it in a process of its own. FOLDER holds pytorch-grad-cam and torchvision when
the environment does not, for the reason that timm_maps.py gives.
"""

import json
import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from overt import PixelGeometry, measure
from overt.capture import grad_cam
from tests.parity.timm_maps import load

CLASSES = torch.tensor([1, 4])


def network() -> nn.Sequential:
    """A small CNN whose layers are of 8 x 12 and of 4 x 6 cells."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=4, padding=1), nn.Tanh(), nn.Conv2d(8, 6, 3, 2, 1), nn.Tanh(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5),
    ).eval()  # fmt: skip


def relative(found: Tensor, expected: Tensor) -> float:
    """The largest difference, as a share of the largest number there should be."""
    return float((found - expected).abs().max() / expected.abs().max())


def heat(net: nn.Sequential, layer: nn.Module, photos: Tensor) -> dict[str, Any]:
    """Grad-CAM of a layer: its cells, and the picture that is made of them."""
    from pytorch_grad_cam import GradCAM
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    targets = [ClassifierOutputTarget(int(one)) for one in CLASSES]
    where = PixelGeometry.identity(2, (32, 48))
    ours = grad_cam(net, layer, photos, CLASSES, where)
    shape = ours.keys.find("image").shape
    with GradCAM(model=net, target_layers=[layer]) as cam:
        shown = torch.from_numpy(cam(input_tensor=photos, targets=targets))
        seen = cam.activations_and_grads
        cells = cam.get_cam_image(
            photos, layer, targets, seen.activations[0].numpy(), seen.gradients[0].numpy()
        )
    expected = torch.from_numpy(np.maximum(cells, 0))
    # their picture is of cells less the least of them, as a share of the largest
    amounts = expected.flatten(1) - expected.flatten(1).amin(dim=1, keepdim=True)
    painted = torch.stack(where.paint(amounts, shape))
    painted = painted - painted.amin(dim=(1, 2), keepdim=True)
    return {
        "shape": shape,
        "cells": relative(ours.weights.reshape(expected.shape), expected),
        "picture": relative(painted / painted.amax(dim=(1, 2), keepdim=True), shown),
    }


def imputed() -> float:
    """What is put in the place of removed pixels (ROAD), without its noise."""
    from pytorch_grad_cam.metrics.road import NoisyLinearImputer

    draw = torch.Generator().manual_seed(1)
    photos = torch.rand(3, 3, 9, 11, generator=draw)
    removed = torch.rand(3, 9, 11, generator=draw) < torch.tensor([0.2, 0.6, 0.9])[:, None, None]
    everything = torch.ones_like(removed)
    found = measure.imputed(photos, removed, everything, draw, noise=0.0, tolerance=1e-9)
    filled = NoisyLinearImputer(noise=0.0)
    expected = [filled(one, (~gone).float()) for one, gone in zip(photos, removed, strict=True)]
    return relative(found, torch.stack(expected))


def main() -> None:
    """Print the differences."""
    if len(sys.argv) > 1:
        sys.path.append(sys.argv[1])
    load()  # makes torchvision one that can be imported
    photos = torch.rand(2, 3, 32, 48, generator=torch.Generator().manual_seed(2))
    net = network()
    rows = {
        "fine": heat(net, net[1], photos),
        "coarse": heat(net, net[3], photos),
        "imputed": imputed(),
    }
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
