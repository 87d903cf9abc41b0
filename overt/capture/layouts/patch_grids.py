"""Layout of the tokens of an image encoder: cells, class token, registers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from overt.attention import Layout, Span
from overt.geometry import PixelGeometry

Size = tuple[int, int]

# Parameter names of the extra tokens in Hugging Face and timm.
CLASS = ("cls_token", "class_embedding")
DISTILLATION = ("distillation_token", "dist_token")
REGISTERS = ("register_tokens", "reg_token")
DETECTION = ("detection_tokens",)


@dataclass(frozen=True)
class PatchSpec:
    """Patch size of an image encoder, and its extra tokens before and after the cells."""

    patch: Size
    before: tuple[tuple[str, int], ...]
    after: tuple[tuple[str, int], ...] = ()

    def grid(self, canvas: Size) -> Size:
        """Return the rows and columns of whole patches on a canvas of (height, width)."""
        rows, columns = canvas[0] // self.patch[0], canvas[1] // self.patch[1]
        if not rows * columns:
            raise ValueError(f"a canvas of {canvas} pixels is smaller than a patch of {self.patch}")
        return rows, columns

    @property
    def lead(self) -> int:
        """Number of tokens before the first cell."""
        return sum(count for _, count in self.before)


def patch_spec(tower: nn.Module) -> PatchSpec:
    """Return the patches and extra tokens of a ViT-like image encoder.

    The patch size is that of its first convolution; extra tokens are recognized by parameter names:
    a class token, a distillation token (DeiT), registers (DINOv2, DINOv3), detection tokens
    (YOLOS).
    """
    convolution = next((m for m in tower.modules() if isinstance(m, nn.Conv2d | nn.Conv3d)), None)
    if convolution is None:
        raise ValueError(f"{type(tower).__name__} has no convolutional patch embedding; {_HAND}")
    patch, stride = convolution.kernel_size[-2:], convolution.stride[-2:]
    if patch != stride:
        raise ValueError(
            f"the patches of {type(tower).__name__} have size {patch} and stride {stride}, so its "
            f"tokens are not the cells of a grid; {_HAND}"
        )
    before = [("class", CLASS), ("distillation", DISTILLATION), ("registers", REGISTERS)]
    return PatchSpec(
        patch=(int(patch[0]), int(patch[1])),
        before=tuple((name, n) for name, known in before if (n := _count(tower, known))),
        after=tuple((name, n) for name, n in [("detection", _count(tower, DETECTION))] if n),
    )


_HAND = 'build the Layout by hand, from Span("image", (rows, columns), index, geometry)'


def _count(tower: nn.Module, names: tuple[str, ...]) -> int:
    """Number of tokens in the parameter of one of these names."""
    for name, parameter in tower.named_parameters():
        if name.rsplit(".", 1)[-1] in names and parameter is not None:
            return parameter.shape[-2] if parameter.ndim > 1 else 1
    return 0


def vision_layout(tower: nn.Module, canvas: Size, geometry: PixelGeometry | None = None) -> Layout:
    """Return the layout of an image encoder for a canvas of (height, width).

    Raises:
        ValueError: If its tokens are not one grid: patches that are selected at random (MAE), or
            merged in later stages (PVT).
    """
    patches = patch_spec(tower)
    _check_single_grid(tower)
    rows, columns = patches.grid(canvas)
    used = (rows * patches.patch[0], columns * patches.patch[1])
    spans, at = [], 0
    for name, count in patches.before:
        spans.append(Span(name, (count,), slice(at, at + count)))
        at += count
    stop = at + rows * columns
    spans.append(
        Span("image", (rows, columns), slice(at, stop), crop_to_grid(geometry, canvas, used))
    )
    for name, count in patches.after:
        spans.append(Span(name, (count,), slice(stop, stop + count)))
        stop += count
    return Layout(tuple(spans), stop)


def _check_single_grid(tower: nn.Module) -> None:
    kind = type(tower).__name__
    if getattr(getattr(tower, "config", None), "mask_ratio", None) is not None:
        raise ValueError(
            f"{kind} selects patches at random and changes their order (mask_ratio), so its tokens "
            f"are not the cells of a grid; {_HAND}"
        )
    # A second convolution with stride, besides the patch embedding.
    strided = [
        one
        for one in tower.modules()
        if isinstance(one, nn.Conv2d) and one.kernel_size == one.stride and max(one.stride) > 1
    ]
    if len(strided) > 1:
        raise ValueError(
            f"{kind} merges patches in {len(strided) - 1} later convolutions, so one grid does not "
            f"fit all of its maps; {_HAND}"
        )


def feature_layout(canvas: Size, stride: int, geometry: PixelGeometry | None = None) -> Layout:
    """Return the layout of a convolutional feature map that is used as tokens (DETR)."""
    rows, columns = (-(-side // stride) for side in canvas)
    used = (rows * stride, columns * stride)
    index = slice(0, rows * columns)
    span = Span("image", (rows, columns), index, crop_to_grid(geometry, canvas, used))
    return Layout((span,), rows * columns)


def stage_grids(canvas: Size, patch: int, stages: int) -> list[Size]:
    """Return the grids of a hierarchical encoder (Swin), whose stages merge 2 x 2 cells.

    Odd sides are padded, so sizes are rounded up.
    """
    grids = [(-(-canvas[0] // patch), -(-canvas[1] // patch))]
    for _ in range(stages - 1):
        rows, columns = grids[-1]
        grids.append((-(-rows // 2), -(-columns // 2)))
    return grids


def patch_positions(grid: Size, merge: int = 1) -> Int[Tensor, "r c"]:
    """Return the position of each cell of a grid if `merge` x `merge` neighbours are consecutive.

    This is the order in the image encoder of Qwen2-VL; merged cells are in row-major order.
    """
    rows, columns = grid
    if rows % merge or columns % merge:
        raise ValueError(f"a grid of {rows} x {columns} cells is not divisible by {merge}")
    # (block row, block column, row, column) -> (block row, row, block column, column).
    order = torch.arange(rows * columns).reshape(rows // merge, columns // merge, merge, merge)
    return order.transpose(1, 2).reshape(rows, columns)


# --- the token of each pixel, numbered through the batch


def pixel_owners(
    canvas: Size, images: int, grid: Size, cell: Size, lead: int = 0
) -> Int[Tensor, "m y x"]:
    """Return the token of each pixel of images with one grid of cells; -1 for no cell.

    Each image has `lead` tokens before its cells.
    """
    # Pixels beyond the last whole patch belong to no cell.
    owner = torch.full((images, *canvas), -1, dtype=torch.long)
    rows, columns = grid
    numbers = torch.arange(rows * columns).reshape(grid)
    spread = numbers.repeat_interleave(cell[0], 0).repeat_interleave(cell[1], 1)
    first = torch.arange(images)[:, None, None] * (lead + rows * columns) + lead
    owner[:, : rows * cell[0], : columns * cell[1]] = first + spread
    return owner


def patch_owners(grids: Sequence[Size], merge: int) -> Int[Tensor, " p"]:
    """Return the token of each patch, for images given as one sequence of patches.

    `merge` x `merge` neighbours are consecutive and form one token.
    """
    return torch.arange(sum(rows * columns for rows, columns in grids)) // merge**2


def cells_span(
    name: str,
    positions: Sequence[Int[Tensor, "_ _"] | None],
    geometry: PixelGeometry | None = None,
) -> Span:
    """Return the span of one image per sample.

    Args:
        name: Name of the span.
        positions: The positions of each sample's cells on its grid, None for a sample without the
            image. The span has the largest grid; missing cells are -1.
        geometry: Geometry with one row per sample.
    """
    there = [tuple(p.shape) for p in positions if p is not None]
    rows, columns = (max(shape[axis] for shape in there) for axis in (0, 1))
    index = torch.full((len(positions), rows, columns), -1, dtype=torch.long)
    for sample, places in enumerate(positions):
        if places is not None:
            index[sample, : places.shape[0], : places.shape[1]] = places
    return Span(name, (rows, columns), compact_index(index.flatten(1)), geometry)


def compact_index(index: Int[Tensor, "b n"]) -> slice | Int[Tensor, "b n"]:
    """Return the positions as a slice, if all samples share one contiguous range."""
    if index.numel() and (index == index[:1]).all() and index[0, 0] >= 0:
        start = int(index[0, 0])
        if (index[0] == torch.arange(start, start + index.shape[1])).all():
            return slice(start, start + index.shape[1])
    return index


def crop_to_grid(geometry: PixelGeometry | None, canvas: Size, used: Size) -> PixelGeometry | None:
    """Crop or extend the geometry to the part of the canvas that the cells cover."""
    if geometry is None:
        return None
    if geometry.canvas != canvas:
        raise ValueError(
            f"the inputs have a canvas of {canvas} pixels, but the geometry has {geometry.canvas}; "
            "use the same images and processor settings"
        )
    return geometry if used == canvas else geometry.crop(0, 0, *used)


def select_images(geometry: PixelGeometry, rows: Sequence[int | None]) -> PixelGeometry:
    """Select rows of a geometry; for None, a sample without the image, nothing is visible."""
    # A sample without the image gets the geometry of another one, with an empty window.
    taken = geometry[torch.tensor([row or 0 for row in rows])]
    kept = taken._window().clone()
    kept[[at for at, row in enumerate(rows) if row is None]] = 0
    return replace(taken, kept=kept)


def module_at(model: nn.Module, *paths: str) -> Any:
    """Return the first of the dotted `paths` that the model has, or None."""
    for path in paths:
        found: Any = model
        for name in path.split("."):
            found = getattr(found, name, None)
        if found is not None:
            return found
    return None
