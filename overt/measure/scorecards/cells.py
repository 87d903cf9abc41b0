"""Where a network keeps a picture as cells: its last features, and what the answer rests on there.

A network that attends to nothing still has maps: class activation, and gradient times features.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from overt.attention import AttentionMap
from overt.capture.derived.activations import grad_cam
from overt.geometry import PixelGeometry

Run = Callable[[], Float[Tensor, "b c"]]


def last_cells(model: nn.Module, run: Run, size: tuple[int, int]) -> nn.Module | None:
    """The last module of a run on pictures of `size` that gives out features (b, c, y, x) of cells.

    It has to run once: of a layer that is used again it could not be said which use is meant. The
    first such module is none: what cuts a picture into patches for a Transformer has seen nothing.
    Cells are as wide as they are high, up to rounding: heads of attention have four axes as well.
    """
    order: list[nn.Module] = []

    def note(module: nn.Module, given: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.ndim == 4 and _are_cells(output, size):
            order.append(module)
            shapes[module] = output.shape

    shapes: dict[nn.Module, torch.Size] = {}
    with ExitStack() as hooks, torch.no_grad():
        for module in model.modules():
            handle = module.register_forward_hook(note)
            hooks.callback(handle.remove)
        run()
    for module in reversed(order[1:]):
        if order.count(module) == 1 and shapes[module][2] * shapes[module][3] > 1:
            return module
    return None


def _are_cells(features: Tensor, size: tuple[int, int]) -> bool:
    high, wide = (side / cells for side, cells in zip(size, features.shape[-2:], strict=True))
    return features.is_floating_point() and min(high, wide) >= 0.5 and round(high) == round(wide)


class _Classifier(nn.Module):
    """A model of batches as one of images, for those who know nothing of batches."""

    def __init__(self, model: nn.Module, classify: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.classify = model, classify

    def forward(self, images: Tensor) -> Tensor:
        return self.classify(images)


def activation_map(
    model: nn.Module,
    layer: nn.Module,
    classify: Callable[[Tensor], Tensor],
    images: Tensor,
    geometry: PixelGeometry | None,
) -> AttentionMap:
    """Grad-CAM of the class that is chosen; up to its scale, class activation where that exists."""
    return grad_cam(_Classifier(model, classify), layer, images, _chosen, geometry)


def gradient_map(
    model: nn.Module, layer: nn.Module, run: Run, like: AttentionMap
) -> Float[Tensor, "b k"]:
    """Gradient times features of the class that is chosen, summed over channels, without its sign.

    To first order, how much of the score of the class each cell carries.
    """
    found: list[Tensor] = []

    def note(module: nn.Module, given: Any, output: Tensor) -> Tensor:
        kept = output if output.requires_grad else output.detach().requires_grad_()
        found.append(kept)
        return kept.clone()

    handle = layer.register_forward_hook(note)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            score = _chosen(run()).sum()
            (slope,) = torch.autograd.grad(score, found[0])
    finally:
        handle.remove()
    return (found[0] * slope).detach().sum(dim=1).abs().flatten(1)


def _chosen(logits: Float[Tensor, "b c"]) -> Float[Tensor, " b"]:
    return logits.amax(dim=-1)
