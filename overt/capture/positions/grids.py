"""What the tokens of an image encoder are, read from its modules: cells, class token, registers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from overt.attention import Layout, Span
from overt.geometry import PixelGeometry

Size = tuple[int, int]

# What the extra tokens before and after the cells are called in Hugging Face and timm.
CLASS = ("cls_token", "class_embedding")
DISTILLATION = ("distillation_token", "dist_token")
REGISTERS = ("register_tokens", "reg_token")
DETECTION = ("detection_tokens",)


@dataclass(frozen=True)
class Patches:
    """How an image encoder cuts its canvas, and the tokens it puts around the cells, in order."""

    patch: Size
    before: tuple[tuple[str, int], ...]
    after: tuple[tuple[str, int], ...] = ()

    def grid(self, canvas: Size) -> Size:
        """Rows and columns of whole patches on a canvas of (height, width)."""
        rows, columns = canvas[0] // self.patch[0], canvas[1] // self.patch[1]
        if not rows * columns:
            raise ValueError(f"a canvas of {canvas} pixels holds no patch of {self.patch}")
        return rows, columns

    @property
    def lead(self) -> int:
        """How many tokens stand before the first cell."""
        return sum(count for _, count in self.before)


def patches_of(tower: nn.Module) -> Patches:
    """The patches and extra tokens of an image encoder of the ViT kind.

    Its first convolution says how it cuts, and its parameters which tokens it adds: a class token,
    a distillation token (DeiT), registers (DINOv2, DINOv3), detection tokens (YOLOS).
    """
    convolution = next((m for m in tower.modules() if isinstance(m, nn.Conv2d | nn.Conv3d)), None)
    if convolution is None:
        raise ValueError(f"{type(tower).__name__} has no patch embedding by convolution; {_HAND}")
    patch, stride = convolution.kernel_size[-2:], convolution.stride[-2:]
    if patch != stride:
        raise ValueError(
            f"the patches of {type(tower).__name__} are {patch} pixels large and {stride} apart, "
            f"so cells overlap or are not its tokens; {_HAND}"
        )
    before = [("class", CLASS), ("distillation", DISTILLATION), ("registers", REGISTERS)]
    return Patches(
        patch=(int(patch[0]), int(patch[1])),
        before=tuple((name, n) for name, known in before if (n := _count(tower, known))),
        after=tuple((name, n) for name, n in [("detection", _count(tower, DETECTION))] if n),
    )


_HAND = 'build the Layout by hand, from Span("image", (rows, columns), index, geometry)'


def _count(tower: nn.Module, names: tuple[str, ...]) -> int:
    """How many tokens the parameter of one of these names stands for."""
    for name, parameter in tower.named_parameters():
        if name.rsplit(".", 1)[-1] in names and parameter is not None:
            return parameter.shape[-2] if parameter.ndim > 1 else 1
    return 0


def vision_layout(tower: nn.Module, canvas: Size, geometry: PixelGeometry | None = None) -> Layout:
    """The tokens of an image encoder on a canvas of (height, width), in their order."""
    patches = patches_of(tower)
    rows, columns = patches.grid(canvas)
    used = (rows * patches.patch[0], columns * patches.patch[1])
    spans, at = [], 0
    for name, count in patches.before:
        spans.append(Span(name, (count,), slice(at, at + count)))
        at += count
    stop = at + rows * columns
    spans.append(Span("image", (rows, columns), slice(at, stop), fitted(geometry, canvas, used)))
    for name, count in patches.after:
        spans.append(Span(name, (count,), slice(stop, stop + count)))
        stop += count
    return Layout(tuple(spans), stop)


def feature_layout(canvas: Size, stride: int, geometry: PixelGeometry | None = None) -> Layout:
    """The cells of a convolutional feature map that a transformer reads as tokens (DETR)."""
    rows, columns = (-(-side // stride) for side in canvas)
    used = (rows * stride, columns * stride)
    index = slice(0, rows * columns)
    span = Span("image", (rows, columns), index, fitted(geometry, canvas, used))
    return Layout((span,), rows * columns)


def stage_grids(canvas: Size, patch: int, stages: int) -> list[Size]:
    """The grids of the stages of a hierarchical encoder (Swin): each merges 2 x 2 of the last.

    Sides that do not divide are padded, so a stage has the ceiling.
    """
    grids = [(-(-canvas[0] // patch), -(-canvas[1] // patch))]
    for _ in range(stages - 1):
        rows, columns = grids[-1]
        grids.append((-(-rows // 2), -(-columns // 2)))
    return grids


def patch_positions(grid: Size, merge: int = 1) -> Int[Tensor, "r c"]:
    """Where each cell of a grid stands when `merge` x `merge` neighbours follow each other.

    So Qwen2-VL orders the patches in its image encoder; after its merge, cells go row by row.
    """
    rows, columns = grid
    if rows % merge or columns % merge:
        raise ValueError(f"a grid of {rows} x {columns} does not merge {merge} by {merge}")
    order = torch.arange(rows * columns).reshape(rows // merge, columns // merge, merge, merge)
    return order.transpose(1, 2).reshape(rows, columns)


def cells_span(
    name: str,
    positions: Sequence[Int[Tensor, "_ _"] | None],
    geometry: PixelGeometry | None = None,
) -> Span:
    """The cells of one image a sample, each sample's at its own positions on a grid of its own.

    The grid of the span is the largest; a cell that a sample does not have is -1, and None is a
    sample without the image. `geometry` has a row a sample.
    """
    there = [tuple(p.shape) for p in positions if p is not None]
    rows, columns = (max(shape[axis] for shape in there) for axis in (0, 1))
    index = torch.full((len(positions), rows, columns), -1, dtype=torch.long)
    for sample, places in enumerate(positions):
        if places is not None:
            index[sample, : places.shape[0], : places.shape[1]] = places
    return Span(name, (rows, columns), compact(index.flatten(1)), geometry)


def compact(index: Int[Tensor, "b n"]) -> slice | Int[Tensor, "b n"]:
    """The same positions as a slice, where every sample has the same unbroken run of them."""
    if index.numel() and (index == index[:1]).all() and index[0, 0] >= 0:
        start = int(index[0, 0])
        if (index[0] == torch.arange(start, start + index.shape[1])).all():
            return slice(start, start + index.shape[1])
    return index


def fitted(geometry: PixelGeometry | None, canvas: Size, used: Size) -> PixelGeometry | None:
    """The geometry on the part of the canvas that the cells cover, or beyond it."""
    if geometry is None:
        return None
    if geometry.canvas != canvas:
        raise ValueError(
            f"the model was given a canvas of {canvas} pixels, and the geometry leads to one of "
            f"{geometry.canvas}; were the photos, or the settings of the processor, others?"
        )
    return geometry if used == canvas else geometry.crop(0, 0, *used)


def empty(geometry: PixelGeometry, rows: Sequence[int | None]) -> PixelGeometry:
    """The rows of a geometry in this order; a sample without a photo (None) shows nothing."""
    taken = geometry[torch.tensor([row or 0 for row in rows])]
    kept = taken._window().clone()
    kept[[at for at, row in enumerate(rows) if row is None]] = 0
    return replace(taken, kept=kept)


def module_at(model: nn.Module, *paths: str) -> Any:
    """The first of the dotted `paths` that the model has, or None."""
    for path in paths:
        found: Any = model
        for name in path.split("."):
            found = getattr(found, name, None)
        if found is not None:
            return found
    return None
