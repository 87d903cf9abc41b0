"""Maps for convolutional networks, which attend to nothing: what their decision rests on.

Each takes any module and gives an `AttentionMap` over a grid, with one global query. The model is
asked in evaluation mode and left as it was found: hooks, mode, gradients, random numbers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from overt.attention import POINT, AttentionMap, Kind, grid
from overt.capture.resting import resting
from overt.geometry import PixelGeometry

Classes = int | Sequence[int] | Int[Tensor, " b"]  # of all samples, or one a sample
# Classes, or what to explain: (the model's output) -> one score a sample.
Target = Classes | Callable[[Any], Float[Tensor, " b"]]


def class_activation(
    model: nn.Module,
    layer: nn.Module,
    images: Float[Tensor, "b c y x"],
    target: Classes,
    geometry: PixelGeometry | None = None,
    head: nn.Linear | None = None,
) -> AttentionMap:
    """What each cell adds to the score of a class: features weighed by the head (Zhou et al. 2016).

    "Learning Deep Features for Discriminative Localization", CVPR 2016,
    https://arxiv.org/abs/1512.04150, eq. 2. Exact where `layer` is followed by the mean over cells
    and one linear layer `head`, by default the last of the model: the mean over the map, and the
    bias of the class, are its score. This is checked; for all other networks there is `grad_cam`.
    """
    head = head or _last_linear(model)
    with resting(model), _Features(model, layer) as features:
        scores = model(images)
    found = features.only()
    if found.shape[1] != head.in_features or not _follows(found, head, scores):
        raise ValueError(
            "class activation needs the mean over the layer's cells and one linear layer after it, "
            "and this model does something else; use grad_cam"
        )
    chosen = _among(_each(target, len(found)), len(found), head.out_features)
    values = torch.einsum("bcyx,bc->byx", found, head.weight[chosen.to(found.device)])
    return _over_cells(values, Kind.SIGNED, geometry)


def grad_cam(
    model: nn.Module,
    layer: nn.Module,
    images: Float[Tensor, "b c y x"],
    target: Target,
    geometry: PixelGeometry | None = None,
    *,
    create_graph: bool = False,
) -> AttentionMap:
    """Features weighed by the mean of their gradient, the positive part (Selvaraju et al. 2017).

    "Grad-CAM: Visual Explanations from Deep Networks via Gradient-based Localization", ICCV 2017,
    https://arxiv.org/abs/1610.02391, eq. 1 and 2. `target` is a class, of all samples or one a
    sample, or a function of the model's output. The result has no history unless `create_graph`
    asks for it, as in `torch.autograd.grad`.
    """
    with resting(model), torch.inference_mode(False), torch.enable_grad():
        images = images.clone() if images.is_inference() else images
        with _Features(model, layer) as features:
            score = _scores(model(images), target)
        found = features.only()
        if not score.requires_grad:
            raise ValueError(
                f"the target has no gradient to the features of {type(layer).__name__}; "
                "does the model detach them?"
            )
        (slope,) = torch.autograd.grad(
            score.sum(), found, create_graph=create_graph, allow_unused=True
        )
        if slope is None:
            raise ValueError(f"the target does not depend on the layer {type(layer).__name__}")
        values = torch.einsum("bcyx,bc->byx", found, slope.mean(dim=(2, 3))).clamp_min(0)
    return _over_cells(values if create_graph else values.detach(), Kind.AMOUNT, geometry)


def rise(
    model: Callable[[Tensor], Any],
    images: Float[Tensor, "b c y x"],
    target: Target,
    generator: torch.Generator,
    masks: int = 4000,
    cells: int = 7,
    keep: float = 0.5,
    chunk: int = 32,
    geometry: PixelGeometry | None = None,
) -> AttentionMap:
    """What a score is on average when a pixel is shown (Petsiuk, Das and Saenko 2018).

    "RISE: Randomized Input Sampling for Explanation of Black-box Models", BMVC 2018,
    https://arxiv.org/abs/1806.07421, eq. 6. The model is any function of images. A class as
    `target` means its probability, the softmax of the model's output; a function of the output is
    taken as it is. Each mask shows a share `keep` of a grid of `cells` x `cells`, made smooth and
    shifted. All images see the same masks, `chunk` at a time, and sums run along: memory does not
    depend on the number of masks. A pixel is one cell of the map. Hidden is what is multiplied by
    zero: images should be centred on zero, as normalised ones are.
    """
    if masks < 1 or cells < 1 or chunk < 1 or not 0 < keep <= 1:
        raise ValueError(
            f"masks, cells and chunk are at least 1 and keep above 0 and at most 1, not {masks}, "
            f"{cells}, {chunk} and {keep}"
        )
    b, _, height, width = images.shape
    values = torch.zeros(b, height, width, dtype=torch.float64, device=images.device)
    with resting(model), torch.no_grad():
        for start in range(0, masks, chunk):
            count = min(chunk, masks - start)
            shown = rise_masks(count, (height, width), cells, keep, generator).to(images)
            hidden = images[None] * shown[:, None, None]
            wanted = target if callable(target) else _each(target, b).repeat(count)
            score = _scores(model(hidden.flatten(0, 1)), wanted, torch.softmax)
            score = score.reshape(count, b).double()
            values += torch.einsum("nb,nyx->byx", score, shown.double())
    kind = Kind.AMOUNT if isinstance(target, Tensor) else Kind.SIGNED
    return _over_cells((values / (masks * keep)).to(images.dtype), kind, geometry)


def rise_masks(
    count: int, size: tuple[int, int], cells: int, keep: float, generator: torch.Generator
) -> Float[Tensor, "n y x"]:
    """Random grids of zeros and ones, stretched smoothly over more than the image, then shifted.

    The grid covers one cell more than the image in each direction, and each mask begins at a random
    pixel of the first. Made as two products of small matrices, for all masks at once.
    """
    device = generator.device
    # one row of draws a mask, so that masks do not depend on how many are made at a time
    draws = torch.rand(count, cells * cells + 2, generator=generator, device=device)
    grids = (draws[:, :-2] < keep).float().unflatten(1, (cells, cells))
    lines = []
    for length, draw in zip(size, draws[:, -2:].unbind(1), strict=True):
        step = -(-length // cells)  # pixels of a cell, rounded up
        pixel = torch.arange(length, device=device) + (draw * step).floor()[:, None]
        place = (pixel + 0.5) * cells / ((cells + 1) * step) - 0.5
        centres = torch.arange(cells, device=device)
        distance = (place.clamp(0, cells - 1)[..., None] - centres).abs()
        lines.append((1 - distance).clamp_min(0))  # a pixel is a mean of the two centres around it
    return lines[0] @ grids @ lines[1].mT


# --- asking a model and leaving it as it was


class _Features:
    """What one layer gives out while the block runs, with a gradient even in a frozen model."""

    def __init__(self, model: nn.Module, layer: nn.Module) -> None:
        if all(layer is not module for module in model.modules()):
            raise ValueError(f"the layer {type(layer).__name__} is not part of the model")
        self.layer = layer
        self.found: list[Tensor] = []

    def __enter__(self) -> "_Features":
        self.handle = self.layer.register_forward_hook(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self.handle.remove()

    def _note(self, module: nn.Module, given: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or output.ndim != 4:
            raise ValueError(
                f"the layer {type(module).__name__} gives out no features (b, c, y, x); name a "
                "convolution or a stage of the network"
            )
        if torch.is_grad_enabled() and not output.requires_grad:
            output = output.detach().requires_grad_()
        self.found.append(output)
        return output.clone()  # what follows may write into its input

    def only(self) -> Float[Tensor, "b c y x"]:
        """The features of the one time the layer ran."""
        if len(self.found) != 1:
            raise ValueError(
                f"the layer {type(self.layer).__name__} ran {len(self.found)} times in one pass; "
                "name one that runs once"
            )
        return self.found[0]


def _scores(
    output: Any, target: Target, squash: Callable[..., Tensor] | None = None
) -> Float[Tensor, " b"]:
    """One score a sample: of its class, or what a function makes of the output."""
    if callable(target):
        scores = target(output)
        if not isinstance(scores, Tensor) or scores.ndim != 1:
            raise ValueError("the target function gives one score a sample, a tensor of one axis")
        return scores
    if not isinstance(output, Tensor) or output.ndim != 2:
        raise ValueError(
            "classes need scores (b, classes); for another output give a function of it as target"
        )
    b, classes = output.shape
    chosen = _among(_each(target, b), b, classes).to(output.device)
    output = output if squash is None else squash(output, dim=-1)
    return output.gather(1, chosen[:, None])[:, 0]


def _each(target: Classes, b: int) -> Int[Tensor, " b"]:
    return torch.as_tensor([target] * b if isinstance(target, int) else target)


def _among(chosen: Int[Tensor, " n"], b: int, classes: int) -> Int[Tensor, " n"]:
    """The classes, checked; those that lie on a card are not asked for, which would be to wait."""
    if tuple(chosen.shape) != (b,):
        raise ValueError(f"a class a sample is {(b,)}, not {tuple(chosen.shape)}")
    if chosen.device.type == "cpu" and bool(((chosen < 0) | (chosen >= classes)).any()):
        raise ValueError(f"there are classes 0 to {classes - 1}, not all of {chosen.tolist()}")
    return chosen


def _last_linear(model: nn.Module) -> nn.Linear:
    found = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not found:
        raise ValueError("the model has no linear layer to weigh features by; use grad_cam")
    return found[-1]


def _follows(features: Tensor, head: nn.Linear, scores: Any) -> bool:
    if not isinstance(scores, Tensor):
        return False
    expected = torch.nn.functional.linear(features.mean(dim=(2, 3)), head.weight, head.bias)
    return scores.shape == expected.shape and torch.allclose(scores, expected, rtol=1e-3, atol=1e-4)


def _over_cells(
    values: Float[Tensor, "b y x"], kind: Kind, geometry: PixelGeometry | None
) -> AttentionMap:
    if geometry is not None and len(geometry) != len(values):
        raise ValueError(f"a geometry of {len(geometry)} photos for {len(values)} samples")
    keys = grid(values.shape[1], values.shape[2], geometry=geometry)
    return AttentionMap(values.flatten(1)[:, None, None, None], keys, POINT, None, kind)
