"""Find the feature levels of a backbone: modules that return grid cells, and their axis order.

A backbone is any module that takes images. The output of a module in it is a feature map,
channels first or channels last, or a sequence of tokens, some of which are not cells. A trial run
on a known canvas distinguishes them by shape; later only the grid size may change.
"""

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from threading import get_ident
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from overt.capture.eval_mode import eval_mode
from overt.capture.layouts.patch_grids import PatchSpec, Size, patch_spec
from overt.nn.backbone_attention.backbones import input_channels

MAX_LEADING_TOKENS = 16  # before the cells of an unknown token sequence
_NAME = re.compile(r"(?P<path>.*?)(\[(?P<which>\d+)\])?")

RunBackbone = Callable[[nn.Module, Float[Tensor, "i c y x"]], Any]  # runs a backbone on images


class AxisOrder(StrEnum):
    """Axis order of a feature tensor."""

    FIRST = "channels first"  # (image, feature, row, column)
    LAST = "channels last"  # (image, row, column, feature)
    TOKENS = "tokens"  # (image, token, feature)


@dataclass(frozen=True)
class FeatureLevel:
    """Output of a module, read as grid cells.

    Modules that later modify the tensor in place, such as some activations, change what is read.

    Args:
        name: path of the module, as in `get_submodule`; empty for the output of the backbone. Where
            a module returns several tensors, the first, or the one in brackets: "neck[2]".
        order: axis order of the tensor.
        width: number of features.
        stride: pixels from one cell to the next; None where the canvas is divided evenly.
        before: number of tokens before the cells; the first of them is the class token.
        after: number of tokens after the cells.

    Example:
        >>> level = FeatureLevel("blocks.11", AxisOrder.TOKENS, width=8, stride=(16, 16), before=1)
        >>> returned = torch.rand(2, 1 + 6, 8)  # a class token and 2 x 3 cells of 16 pixels
        >>> level.read(returned, canvas=(32, 48)).cells.shape
        torch.Size([2, 8, 2, 3])
    """

    name: str
    order: AxisOrder
    width: int
    stride: Size | None = None
    before: int = 0
    after: int = 0

    @property
    def path(self) -> str:
        """The path of the module."""
        return _parse_name(self.name)[0]

    def read(self, returned: Any, canvas: Size) -> "LevelFeatures":
        """Read the cells from the output of the module for images of this (height, width)."""
        found = level_tensor(returned, self.name)
        if found.ndim != (3 if self.order is AxisOrder.TOKENS else 4):
            raise ValueError(
                f"level {self.name!r} returned shape {tuple(found.shape)}, expected "
                f"{self.order.value}"
            )
        width = found.shape[1 if self.order is AxisOrder.FIRST else -1]
        if width != self.width:
            raise ValueError(
                f"level {self.name!r} returned {width} features per cell, expected {self.width}"
            )
        if self.order is AxisOrder.FIRST:
            return LevelFeatures(found, None)
        if self.order is AxisOrder.LAST:
            return LevelFeatures(rearrange(found, "i y x d -> i d y x"), None)
        cells = found[:, self.before : found.shape[1] - self.after]
        rows, columns = self._grid(cells.shape[1], canvas)
        picture = rearrange(cells, "i (y x) d -> i d y x", y=rows, x=columns)
        return LevelFeatures(picture, found[:, 0] if self.before else None)

    def covered(self, grid: Size, canvas: Size) -> Size:
        """Return the pixels under a grid: fewer or more than the canvas if it does not divide."""
        if self.stride is None:
            return canvas
        used = (grid[0] * self.stride[0], grid[1] * self.stride[1])
        # a level with padding or windows may not cover the canvas: allow less than one cell per
        # side
        near = all(
            abs(one - side) < step
            for one, side, step in zip(used, canvas, self.stride, strict=True)
        )
        return used if near else canvas

    def _grid(self, count: int, canvas: Size) -> Size:
        """Return the rows and columns of a number of cells on a canvas."""
        if self.stride is not None:
            down, across = self.stride
            for grid in (
                (canvas[0] // down, canvas[1] // across),
                # models round the grid down or, with padding, up
                (-(-canvas[0] // down), -(-canvas[1] // across)),
            ):
                if grid[0] * grid[1] == count:
                    return grid
        found = grid_for_count(count, canvas)
        if found is None:
            raise ValueError(
                f"level {self.name!r} returned {count} cells for images of {canvas} pixels, which "
                "do not form a grid of that aspect ratio"
            )
        return found


@dataclass(frozen=True, eq=False)
class LevelFeatures:
    """Cells of one level, and the class token if there is one."""

    cells: Float[Tensor, "i d y x"]
    token: Float[Tensor, "i d"] | None

    @property
    def grid(self) -> Size:
        """Rows and columns."""
        rows, columns = self.cells.shape[-2:]
        return rows, columns

    def to(self, kind: torch.dtype) -> "LevelFeatures":
        """Convert to another dtype."""
        token = None if self.token is None else self.token.to(kind)
        return LevelFeatures(self.cells.to(kind), token)


# --- module outputs


@contextmanager
def capture_outputs(backbone: nn.Module, paths: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Capture the outputs of the modules at these paths while the block runs (their last call).

    Hooks are removed afterwards, also on errors. Calls from other threads are ignored.
    """
    # --- hooks that keep the last output of each module
    kept: dict[str, Any] = {}
    compiling = torch.compiler.is_compiling  # a graph cannot query its thread
    thread = None if compiling() else get_ident()

    def keeping(path: str) -> Callable[[nn.Module, Any, Any], None]:
        def keep(module: nn.Module, inputs: Any, returned: Any) -> None:
            if compiling() or thread in (None, get_ident()):
                kept.pop(path, None)  # keep entries in the order in which modules finish
                kept[path] = returned

        return keep

    modules = {path: find_module(backbone, path) for path in paths}
    handles = [one.register_forward_hook(keeping(path)) for path, one in modules.items()]
    try:
        yield kept
    finally:
        for handle in handles:
            handle.remove()


def find_module(backbone: nn.Module, path: str) -> nn.Module:
    """Return the module at a path; the error for a wrong path suggests similar ones."""
    try:
        return backbone.get_submodule(path)
    except AttributeError as error:
        known = [name for name, _ in backbone.named_modules() if name]
        near = difflib.get_close_matches(path, known, n=3, cutoff=0.5) or known[:3]
        raise ValueError(
            f"{type(backbone).__name__} has no module {path!r}; similar: {', '.join(near)}"
        ) from error


def find_tensors(returned: Any) -> list[Tensor]:
    """Return all tensors in a nested output, in order."""
    if isinstance(returned, Tensor):
        return [returned]
    if isinstance(returned, Mapping):
        returned = list(returned.values())
    if not isinstance(returned, list | tuple):
        return []
    return [found for part in returned for found in find_tensors(part)]


def level_tensor(returned: Any, name: str) -> Tensor:
    """Return the tensor of a level from the output of its module."""
    _, which = _parse_name(name)
    found = find_tensors(returned)
    if which >= len(found):
        raise ValueError(f"level {name!r}: the module returns only {len(found)} tensors")
    return found[which]


def _parse_name(name: str) -> tuple[str, int]:
    found = _NAME.fullmatch(name)
    assert found is not None  # the pattern matches any text
    return found["path"], int(found["which"] or 0)


# --- recognising tensors


def recognise_level(
    found: Tensor, name: str, samples: int, canvas: Size, patches: PatchSpec | None
) -> tuple[FeatureLevel, Size] | None:
    """Return a tensor as a level with its grid, or None if it has no cells.

    An ambiguous tensor, whose features could also be columns, is read as channels first; the other
    levels may correct this.
    """
    if not found.is_floating_point() or found.ndim not in (3, 4) or len(found) != samples:
        return None
    shape = tuple(found.shape)
    if found.ndim == 3:
        return _recognise_tokens(name, shape[1], shape[2], canvas, patches)
    # channels first is tried first: most convolutional models are
    for order, grid, width in (
        (AxisOrder.FIRST, (shape[2], shape[3]), shape[1]),
        (AxisOrder.LAST, (shape[1], shape[2]), shape[3]),
    ):
        if _has_square_cells(grid, canvas):
            return FeatureLevel(name, order, width, _stride(grid, canvas)), grid
    return None


def _recognise_tokens(
    name: str, count: int, width: int, canvas: Size, patches: PatchSpec | None
) -> tuple[FeatureLevel, Size] | None:
    level = FeatureLevel(name, AxisOrder.TOKENS, width)
    if patches is not None:
        grid = patches.grid(canvas)
        after = sum(number for _, number in patches.after)
        if grid[0] * grid[1] + patches.lead + after == count:
            return replace(level, stride=patches.patch, before=patches.lead, after=after), grid
    # an unknown model: take the fewest leading tokens that leave a full grid
    for before in range(min(MAX_LEADING_TOKENS, count - 1) + 1):
        found = grid_for_count(count - before, canvas)
        if found is not None:
            return replace(level, stride=_stride(found, canvas), before=before), found
    return None


def grid_for_count(count: int, canvas: Size) -> Size | None:
    """Return the grid of `count` square cells on the canvas, if there is one."""
    rows = max(1, round((count * canvas[0] / canvas[1]) ** 0.5))
    grid = (rows, count // rows)
    return grid if grid[0] * grid[1] == count and _has_square_cells(grid, canvas) else None


def _has_square_cells(grid: Size, canvas: Size) -> bool:
    """Return whether the cells of this grid are squares, up to rounding of one side."""
    inside = all(1 <= count <= side for count, side in zip(grid, canvas, strict=True))
    # rows / columns = height / width without a division, off by less than one cell
    return inside and abs(grid[0] * canvas[1] - grid[1] * canvas[0]) < max(canvas)


def _stride(grid: Size, canvas: Size) -> Size | None:
    if canvas[0] % grid[0] or canvas[1] % grid[1]:
        return None
    return canvas[0] // grid[0], canvas[1] // grid[1]


# --- trial run


def named_levels(
    backbone: nn.Module, run: RunBackbone, canvas: Size, names: Sequence[str | FeatureLevel]
) -> tuple[FeatureLevel, ...]:
    """Find the levels of these names by a trial run on a blank canvas.

    A `FeatureLevel` in place of a name is used unchanged.
    """
    paths = [_parse_name(one)[0] for one in names if isinstance(one, str)]
    kept = _trial_run(backbone, run, canvas, paths) if paths else {}
    patches = _patches(backbone)
    found = []
    for one in names:
        if isinstance(one, FeatureLevel):
            find_module(backbone, one.path)
            found.append(one)
            continue
        path, _ = _parse_name(one)
        if path not in kept:
            raise ValueError(f"the module {path!r} did not run in the forward pass of the backbone")
        tensor = level_tensor(kept[path], one)
        level = recognise_level(tensor, one, TRIAL_IMAGES, canvas, patches)
        if level is None:
            raise ValueError(
                f"level {one!r} returned shape {tuple(tensor.shape)} for {TRIAL_IMAGES} images of "
                f"{canvas} pixels, which is not a grid of cells; describe it with a FeatureLevel"
            )
        if level[1] == (1, 1):
            raise ValueError(
                f"level {one!r} has only one cell for images of {canvas} pixels; name an earlier "
                "module, or pass the size of your images with size="
            )
        found.append(level[0])
    return _resolve_axis_order(tuple(found), canvas)


def find_levels(
    backbone: nn.Module, run: RunBackbone, canvas: Size, most: int = 3
) -> tuple[FeatureLevel, ...]:
    """Find the last levels of a backbone, finest first: one per resolution, `most` resolutions.

    If the backbone itself returns several maps, such as a feature pyramid, these are the levels.
    Otherwise, among all groups of sibling modules, the one that covers most of the coarsest
    resolutions is taken as the stages, and the last module at each resolution as a level. If all
    have the same resolution, as in a ViT, they are blocks: `most` of them, evenly spaced up to the
    last.
    """
    paths = [path for path, _ in backbone.named_modules()]
    kept = _trial_run(backbone, run, canvas, paths)
    patches = _patches(backbone)
    # candidates by parent module: stages of a backbone are siblings
    families: dict[str, list[tuple[FeatureLevel, Size]]] = {}
    for path, returned in kept.items():
        seen: dict[Size, FeatureLevel] = {}
        for which, tensor in enumerate(find_tensors(returned)):
            name = f"{path}[{which}]" if which else path
            level = recognise_level(tensor, name, TRIAL_IMAGES, canvas, patches)
            # a grid that does not divide the canvas may be anything, such as attention weights
            if level is not None and level[0].stride is not None and level[1] != (1, 1):
                seen.setdefault(level[1], level[0])
        # the root finishes last, so `seen` holds the outputs of the backbone itself
        if path == "" and len(seen) > 1:
            return _resolve_axis_order(
                _last_levels(list(zip(seen.values(), seen, strict=True)), most), canvas
            )
        parent = path.rpartition(".")[0] if path else None
        if parent is not None:
            found = families.setdefault(parent, [])
            found.extend((level, grid) for grid, level in seen.items())
    families = {path: found for path, found in families.items() if found}
    if not families:
        raise ValueError(
            f"no module of {type(backbone).__name__} returns a grid of cells for images of "
            f"{canvas} pixels; pass levels=, or the size of your images with size="
        )

    # --- choose the family that covers the coarsest resolutions
    grids = {grid for found in families.values() for _, grid in found}
    coarsest = set(sorted(grids, key=lambda grid: grid[0] * grid[1])[:most])

    def richness(path: str) -> tuple[int, int, bool, int, int]:
        found = families[path]
        own = {grid for _, grid in found}
        listed = isinstance(find_module(backbone, path), nn.ModuleList | nn.Sequential)
        # ties: more resolutions, then a plain list of stages, then more levels, then nearer to the
        # root
        return len(own & coarsest), len(own), listed, len(found), -path.count(".")

    return _resolve_axis_order(_last_levels(families[max(families, key=richness)], most), canvas)


def _resolve_axis_order(levels: tuple[FeatureLevel, ...], canvas: Size) -> tuple[FeatureLevel, ...]:
    """Read ambiguous levels with the axis order of all the others."""

    def either(level: FeatureLevel) -> bool:
        # as many features as columns: the axes could be either
        sides = (level.width * step for step in level.stride or ())
        return level.order is AxisOrder.FIRST and tuple(sides) == canvas

    if {level.order for level in levels if not either(level)} != {AxisOrder.LAST}:
        return levels
    return tuple(replace(level, order=AxisOrder.LAST) for level in levels)


def _last_levels(found: Sequence[tuple[FeatureLevel, Size]], most: int) -> tuple[FeatureLevel, ...]:
    by_grid = {grid: level for level, grid in found}  # the last one at each
    if len(by_grid) > 1:
        finest = sorted(by_grid, key=lambda grid: -grid[0] * grid[1])
        return tuple(by_grid[grid] for grid in finest[-most:])
    blocks = [level for level, _ in found]
    count = min(most, len(blocks))
    # evenly spaced, ending with the last block
    return tuple(blocks[len(blocks) * (at + 1) // count - 1] for at in range(count))


TRIAL_IMAGES = 2  # with one image, windows could be mistaken for images


def _trial_run(
    backbone: nn.Module, run: RunBackbone, canvas: Size, paths: Sequence[str]
) -> dict[str, Any]:
    device = next((one.device for one in backbone.parameters()), None)
    channels = input_channels(backbone)
    kind = parameter_dtype(backbone)
    blank = torch.zeros(TRIAL_IMAGES, channels, *canvas, dtype=kind, device=device)
    kept: dict[str, Any]
    with (
        torch.no_grad(),
        # the trial run leaves the model as it was: no gradient, no dropout, the same random stream
        torch.random.fork_rng(devices=[]),
        eval_mode(backbone),
        capture_outputs(backbone, list(dict.fromkeys(paths))) as kept,
    ):
        run(backbone, blank)
    return kept


def _patches(backbone: nn.Module) -> PatchSpec | None:
    try:
        return patch_spec(backbone)
    except ValueError:
        return None


def parameter_dtype(module: nn.Module) -> torch.dtype:
    """Return the dtype of the first floating-point parameter of a module."""
    kinds = (one.dtype for one in module.parameters() if one.is_floating_point())
    return next(kinds, torch.get_default_dtype())
