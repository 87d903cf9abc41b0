"""Features of one layer and their gradients, as cells of a grid.

A layer may return cells (b, c, y, x), cells with channels last as in Swin, or tokens (b, n, d), of
which a layout tells the cells.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from overt.attention import GLOBAL_QUERY, AttentionMap, Kind, Layout, Span, grid
from overt.attribution.target_scores import Target, score_target
from overt.capture.eval_mode import eval_mode_forked_rng
from overt.capture.layouts.patch_grids import vision_layout
from overt.geometry import PixelGeometry


@dataclass(frozen=True, eq=False)
class LayerGradient:
    """Features of a layer and the gradient of the score by them, as cells.

    Args:
        features: The features.
        gradient: The gradient of the score.
        geometry: The geometry of the cells, if known.
    """

    features: Float[Tensor, "b c y x"]
    gradient: Float[Tensor, "b c y x"]
    geometry: PixelGeometry | None


def layer_gradient(
    model: nn.Module,
    layer: nn.Module,
    images: Float[Tensor, "b c y x"],
    target: Target,
    geometry: PixelGeometry | None,
    layout: Layout | None,
    *,
    create_graph: bool = False,
) -> LayerGradient:
    """Compute the features of a layer and the gradient of the score by them."""
    with eval_mode_forked_rng(model), torch.inference_mode(False), torch.enable_grad():
        # Inference tensors cannot be saved for a backward pass.
        images = images.clone() if images.is_inference() else images
        with RecordedFeatures(model, layer) as features:
            score = score_target(model(images), target)
        found = features.only(tokens=True)
        if not score.requires_grad:
            raise ValueError(
                f"the target has no gradient to the features of {type(layer).__name__}: the model "
                "may detach them"
            )
        (gradient,) = torch.autograd.grad(
            score.sum(), found, create_graph=create_graph, allow_unused=True
        )
        if gradient is None:
            raise ValueError(f"the target does not depend on the layer {type(layer).__name__}")
        to_cells, geometry = cells_of(model, found, images, geometry, layout)
        cells = LayerGradient(to_cells(found), to_cells(gradient), geometry)
        if found.ndim == 3 and not bool((cells.gradient != 0).any()):
            raise ValueError(
                f"the target does not depend on the cells of {type(layer).__name__}: after the "
                "last attention only the class token is used. Choose the block before the last, "
                "such as model.blocks[-2], or, if blocks begin with a norm, model.blocks[-1].norm1"
            )
        return cells


def cells_of(
    model: nn.Module,
    found: Tensor,
    images: Tensor,
    geometry: PixelGeometry | None,
    layout: Layout | None,
) -> tuple[Callable[[Tensor], Tensor], PixelGeometry | None]:
    """Return a function from the output of a layer to cells, and the geometry of the cells."""
    if found.ndim == 4:
        return lambda one: channels_first(one, images.shape[-2:]), geometry
    span = find_grid(layout, model, found, images, geometry)
    where = span.geometry if isinstance(span.geometry, PixelGeometry) else None
    return lambda one: tokens_to_cells(one, span), where


class RecordedFeatures:
    """Record the output of one layer, with a gradient also in a frozen model."""

    def __init__(self, model: nn.Module, layer: nn.Module) -> None:
        if all(layer is not module for module in model.modules()):
            if not isinstance(layer, nn.Module):
                raise TypeError(
                    f"the layer must be a module of the model, got {layer!r}; "
                    "model.get_submodule(name) returns the module of a name"
                )
            raise ValueError(f"the layer {type(layer).__name__} is not part of the model")
        self.layer = layer
        self.found: list[Tensor] = []

    def __enter__(self) -> "RecordedFeatures":
        self.handle = self.layer.register_forward_hook(self._record)
        return self

    def __exit__(self, *_: object) -> None:
        self.handle.remove()

    def _record(self, module: nn.Module, given: Any, output: Any) -> Any:
        rest = output[1:] if isinstance(output, tuple) else ()
        first = output[0] if isinstance(output, tuple) and output else output
        if not isinstance(first, Tensor) or first.ndim not in (3, 4):
            raise ValueError(self._message())
        # In a frozen model on images without gradient, the features start the graph.
        if torch.is_grad_enabled() and not first.requires_grad:
            first = first.detach().requires_grad_()
        self.found.append(first)
        kept = first.clone()  # the next module may modify its input in place
        return (kept, *rest) if isinstance(output, tuple) else kept

    def _message(self) -> str:
        return (
            f"the layer {type(self.layer).__name__} does not return features (b, c, y, x); choose "
            "a convolution, a stage of the network, or a layer of tokens (b, n, d)"
        )

    def only(self, tokens: bool = False) -> Tensor:
        """Return the features of the only run of the layer: cells, or `tokens` (b, n, d)."""
        if len(self.found) == 1 and self.found[0].ndim == 3 and not tokens:
            raise ValueError(self._message())
        if len(self.found) != 1:
            raise ValueError(
                f"the layer {type(self.layer).__name__} ran {len(self.found)} times in one pass; "
                "choose one that runs once"
            )
        return self.found[0]


def channels_first(features: Tensor, canvas: Sequence[int]) -> Tensor:
    """Move the channels before the cells if they are last, as in Swin.

    Decided by the shape: the cells are square in only one of the two readings. 64 channels beside
    56 x 56 cells of 224 x 224 pixels are nearly square, so rows and columns are compared, not the
    sides of a cell.
    """
    if features.ndim != 4 or _are_square(features.shape[2:], canvas):
        return features
    return features.movedim(-1, 1) if _are_square(features.shape[1:3], canvas) else features


def _are_square(cells: Sequence[int], canvas: Sequence[int]) -> bool:
    """Return whether a grid has the proportions of the canvas, up to one row or column."""
    (height, width), (rows, columns) = canvas, cells
    if rows > 2 * height or columns > 2 * width:
        return False
    return abs(rows * width - columns * height) <= max(height, width)


def find_grid(
    layout: Layout | None,
    model: nn.Module,
    tokens: Float[Tensor, "b n d"],
    images: Tensor,
    geometry: PixelGeometry | None,
) -> Span:
    """Return the one span of a layout that is a grid of cells."""
    b, n, _ = tokens.shape
    remedy = 'name them with layout=, such as words(1, "class") + grid(rows, columns)'
    if geometry is not None and len(geometry) != b:
        raise ValueError(f"geometry has {len(geometry)} images, the batch has {b} samples")
    given = layout is not None
    if layout is None:
        height, width = images.shape[-2:]
        try:
            layout = vision_layout(model, (height, width), geometry)
        except ValueError as problem:
            raise ValueError(
                f"cannot find the cells among the tokens ({problem}): {remedy}"
            ) from None
    if len(layout) != n:
        found = "the layout" if given else "the layout found in the model"
        raise ValueError(f"{found} has {len(layout)} tokens, the layer returns {n}: {remedy}")
    grids = [span for span in layout.spans if len(span.shape) == 2]
    if len(grids) != 1:
        raise ValueError(f"the layout needs one grid of cells, got {len(grids)}: {remedy}")
    return grids[0]


def tokens_to_cells(tokens: Float[Tensor, "b n d"], span: Span) -> Float[Tensor, "b d y x"]:
    """Return the tokens of a grid as cells; a cell that a sample lacks is zero."""
    if isinstance(span.index, slice):
        cells = tokens[:, span.index]
    else:
        index = span.index.to(tokens.device)
        there = (index >= 0)[..., None]
        index = index.clamp_min(0)[..., None].expand(-1, -1, tokens.shape[-1])
        cells = torch.where(there, tokens.gather(1, index), 0)
    return cells.mT.unflatten(-1, span.shape)


def cell_map(
    values: Float[Tensor, "b y x"], kind: Kind, geometry: PixelGeometry | None
) -> AttentionMap:
    """Return the map of one value per cell."""
    if geometry is not None and len(geometry) != len(values):
        raise ValueError(
            f"geometry has {len(geometry)} images, the batch has {len(values)} samples"
        )
    keys = grid(values.shape[1], values.shape[2], geometry=geometry)
    return AttentionMap(values.flatten(1)[:, None, None, None], keys, GLOBAL_QUERY, None, kind)
