"""Feature maps of a network: its last spatial layer, class activation and gradient times input.

They give maps also for a network without attention.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from overt.attention import AttentionMap
from overt.attribution.cam import grad_cam
from overt.geometry import PixelGeometry

Run = Callable[[], Float[Tensor, "b c"]]


def last_feature_layer(model: nn.Module, run: Run, size: tuple[int, int]) -> nn.Module | None:
    """Return the last module whose output is a feature map (b, c, y, x) of images of `size`.

    The module has to run exactly once: for a reused layer it is not clear which use is meant. The
    first such module does not count: the patch embedding of a Transformer has no context. Cells
    must be square up to rounding, because attention heads also have four axes.
    """
    order: list[nn.Module] = []

    def note(module: nn.Module, given: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.ndim == 4 and _is_feature_grid(output, size):
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


def _is_feature_grid(features: Tensor, size: tuple[int, int]) -> bool:
    high, wide = (side / cells for side, cells in zip(size, features.shape[-2:], strict=True))
    return features.is_floating_point() and min(high, wide) >= 0.5 and round(high) == round(wide)


class _ImageClassifier(nn.Module):
    """Wrap a model of batches as a model of images."""

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
    """Compute Grad-CAM of the predicted class; equal to CAM up to scale where CAM exists."""
    return grad_cam(_ImageClassifier(model, classify), images, _top_logit, layer, geometry)


def gradient_map(
    model: nn.Module, layer: nn.Module, run: Run, like: AttentionMap
) -> Float[Tensor, "b k"]:
    """Compute the absolute gradient times features of the predicted class, summed over channels.

    To first order, the contribution of each cell to the score of the class.
    """
    found: list[Tensor] = []

    def note(module: nn.Module, given: Any, output: Tensor) -> Tensor:
        kept = output if output.requires_grad else output.detach().requires_grad_()
        found.append(kept)
        return kept.clone()

    handle = layer.register_forward_hook(note)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            score = _top_logit(run()).sum()
            (slope,) = torch.autograd.grad(score, found[0])
    finally:
        handle.remove()
    return (found[0] * slope).detach().sum(dim=1).abs().flatten(1)


def _top_logit(logits: Float[Tensor, "b c"]) -> Float[Tensor, " b"]:
    return logits.amax(dim=-1)
