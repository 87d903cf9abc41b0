"""Where the levels of a backbone are: which of its modules return cells, and how these lie there.

A backbone is any module that is given images. What a module in it returns is a map of features,
channels first or channels last, or a sequence of tokens, of which some stand for no cell. Shapes on
a known canvas tell them apart, once, in a trial run; from then on only the grid may change.
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

from overt.capture.positions.grids import Patches, Size, patches_of
from overt.capture.resting import still

MOST_LEADING = 16  # tokens that may stand before the cells of a sequence of unknown make
_NAME = re.compile(r"(?P<path>.*?)(\[(?P<which>\d+)\])?")

Run = Callable[[nn.Module, Float[Tensor, "i 3 y x"]], Any]  # how a backbone is given its images


class Order(StrEnum):
    """How the cells lie in a tensor."""

    FIRST = "channels first"  # (image, feature, row, column)
    LAST = "channels last"  # (image, row, column, feature)
    TOKENS = "tokens"  # (image, token, feature)


@dataclass(frozen=True)
class Level:
    """What a module returns, as cells.

    `name` is the path of the module, as in `get_submodule`; the backbone's own output has the empty
    one. Where a module returns several tensors, the first is meant, or that with the number in
    brackets: "neck[2]". `width` is the number of features and `stride` the pixels from one cell to
    the next, None where the canvas is divided evenly. What a later module changes in place, as some
    activations do, is read as it then is. `before` and `after` are tokens around the
    cells that stand for none; the first of those before is the class token.
    """

    name: str
    order: Order
    width: int
    stride: Size | None = None
    before: int = 0
    after: int = 0

    @property
    def path(self) -> str:
        """The path of the module."""
        return _parsed(self.name)[0]

    def read(self, returned: Any, canvas: Size) -> "Features":
        """The cells in what the module returned for images of this (height, width)."""
        found = tensor_in(returned, self.name)
        if found.ndim != (3 if self.order is Order.TOKENS else 4):
            raise ValueError(
                f"level {self.name!r} gave a tensor of shape {tuple(found.shape)}, which is not "
                f"{self.order.value}"
            )
        width = found.shape[1 if self.order is Order.FIRST else -1]
        if width != self.width:
            raise ValueError(
                f"level {self.name!r} gave {width} features a cell, and {self.width} before"
            )
        if self.order is Order.FIRST:
            return Features(found, None)
        if self.order is Order.LAST:
            return Features(rearrange(found, "i y x d -> i d y x"), None)
        cells = found[:, self.before : found.shape[1] - self.after]
        rows, columns = self._grid(cells.shape[1], canvas)
        picture = rearrange(cells, "i (y x) d -> i d y x", y=rows, x=columns)
        return Features(picture, found[:, 0] if self.before else None)

    def covered(self, grid: Size, canvas: Size) -> Size:
        """The pixels under a grid: less than the canvas where its rest is left out, or more."""
        if self.stride is None:
            return canvas
        used = (grid[0] * self.stride[0], grid[1] * self.stride[1])
        near = all(
            abs(one - side) < step
            for one, side, step in zip(used, canvas, self.stride, strict=True)
        )
        return used if near else canvas

    def _grid(self, count: int, canvas: Size) -> Size:
        """Rows and columns of a number of cells on a canvas."""
        if self.stride is not None:
            down, across = self.stride
            for grid in (
                (canvas[0] // down, canvas[1] // across),
                (-(-canvas[0] // down), -(-canvas[1] // across)),
            ):
                if grid[0] * grid[1] == count:
                    return grid
        found = square(count, canvas)
        if found is None:
            raise ValueError(
                f"level {self.name!r} gave {count} cells for a canvas of {canvas} pixels, which "
                "are the cells of no grid of that shape"
            )
        return found


@dataclass(frozen=True, eq=False)
class Features:
    """The cells of one level, and the class token beside them where there is one."""

    cells: Float[Tensor, "i d y x"]
    token: Float[Tensor, "i d"] | None

    @property
    def grid(self) -> Size:
        """Rows and columns."""
        rows, columns = self.cells.shape[-2:]
        return rows, columns

    def to(self, kind: torch.dtype) -> "Features":
        """The same in another number format."""
        token = None if self.token is None else self.token.to(kind)
        return Features(self.cells.to(kind), token)


# --- what modules return


@contextmanager
def returning(backbone: nn.Module, paths: Sequence[str]) -> Iterator[dict[str, Any]]:
    """What the modules at these paths return while the block runs, the last time they are called.

    The hooks are gone afterwards, whatever happens inside. What other threads do with the same
    modules meanwhile is theirs.
    """
    kept: dict[str, Any] = {}
    compiling = torch.compiler.is_compiling  # a graph cannot ask for its thread
    thread = None if compiling() else get_ident()

    def keeping(path: str) -> Callable[[nn.Module, Any, Any], None]:
        def keep(module: nn.Module, inputs: Any, returned: Any) -> None:
            if compiling() or thread in (None, get_ident()):
                kept.pop(path, None)  # so that entries are in the order in which modules end
                kept[path] = returned

        return keep

    modules = {path: submodule(backbone, path) for path in paths}
    handles = [one.register_forward_hook(keeping(path)) for path, one in modules.items()]
    try:
        yield kept
    finally:
        for handle in handles:
            handle.remove()


def submodule(backbone: nn.Module, path: str) -> nn.Module:
    """The module at a path; a wrong one is answered with those near it."""
    try:
        return backbone.get_submodule(path)
    except AttributeError as error:
        known = [name for name, _ in backbone.named_modules() if name]
        near = difflib.get_close_matches(path, known, n=3, cutoff=0.5) or known[:3]
        raise ValueError(
            f"{type(backbone).__name__} has no module {path!r}; near it: {', '.join(near)}"
        ) from error


def tensors(returned: Any) -> list[Tensor]:
    """All tensors in what a module returned, in order: of tuples, lists and mappings too."""
    if isinstance(returned, Tensor):
        return [returned]
    if isinstance(returned, Mapping):
        returned = list(returned.values())
    if not isinstance(returned, list | tuple):
        return []
    return [found for part in returned for found in tensors(part)]


def tensor_in(returned: Any, name: str) -> Tensor:
    """The tensor of a level in what its module returned."""
    _, which = _parsed(name)
    found = tensors(returned)
    if which >= len(found):
        raise ValueError(f"level {name!r}: the module returns {len(found)} tensors")
    return found[which]


def _parsed(name: str) -> tuple[str, int]:
    found = _NAME.fullmatch(name)
    assert found is not None  # any text fits
    return found["path"], int(found["which"] or 0)


# --- what a tensor is


def recognise(
    found: Tensor, name: str, samples: int, canvas: Size, patches: Patches | None
) -> tuple[Level, Size] | None:
    """A tensor as a level, with its grid, on a canvas of (height, width); None if it has no cells.

    A tensor whose features could be columns as well is read with channels first; the levels beside
    it may know better.
    """
    if not found.is_floating_point() or found.ndim not in (3, 4) or len(found) != samples:
        return None
    shape = tuple(found.shape)
    if found.ndim == 3:
        return _tokens(name, shape[1], shape[2], canvas, patches)
    for order, grid, width in (
        (Order.FIRST, (shape[2], shape[3]), shape[1]),
        (Order.LAST, (shape[1], shape[2]), shape[3]),
    ):
        if _fits(grid, canvas):
            return Level(name, order, width, _stride(grid, canvas)), grid
    return None


def _tokens(
    name: str, count: int, width: int, canvas: Size, patches: Patches | None
) -> tuple[Level, Size] | None:
    level = Level(name, Order.TOKENS, width)
    if patches is not None:
        grid = patches.grid(canvas)
        after = sum(number for _, number in patches.after)
        if grid[0] * grid[1] + patches.lead + after == count:
            return replace(level, stride=patches.patch, before=patches.lead, after=after), grid
    for before in range(min(MOST_LEADING, count - 1) + 1):
        found = square(count - before, canvas)
        if found is not None:
            return replace(level, stride=_stride(found, canvas), before=before), found
    return None


def square(count: int, canvas: Size) -> Size | None:
    """The grid of this many cells that has the shape of the canvas, if there is one."""
    rows = max(1, round((count * canvas[0] / canvas[1]) ** 0.5))
    grid = (rows, count // rows)
    return grid if grid[0] * grid[1] == count and _fits(grid, canvas) else None


def _fits(grid: Size, canvas: Size) -> bool:
    """Whether cells of this grid are squares of the canvas, but for what rounding does to one."""
    inside = all(1 <= count <= side for count, side in zip(grid, canvas, strict=True))
    return inside and abs(grid[0] * canvas[1] - grid[1] * canvas[0]) < max(canvas)


def _stride(grid: Size, canvas: Size) -> Size | None:
    if canvas[0] % grid[0] or canvas[1] % grid[1]:
        return None
    return canvas[0] // grid[0], canvas[1] // grid[1]


# --- finding levels in a trial run


def named_levels(
    backbone: nn.Module, run: Run, canvas: Size, names: Sequence[str | Level]
) -> tuple[Level, ...]:
    """The levels of these names, as a trial run on a blank canvas shows them.

    A `Level` in the place of a name is taken at its word.
    """
    paths = [_parsed(one)[0] for one in names if isinstance(one, str)]
    kept = _trial(backbone, run, canvas, paths) if paths else {}
    patches = _patches(backbone)
    found = []
    for one in names:
        if isinstance(one, Level):
            submodule(backbone, one.path)
            found.append(one)
            continue
        path, _ = _parsed(one)
        if path not in kept:
            raise ValueError(f"the module {path!r} was not called when the backbone ran")
        tensor = tensor_in(kept[path], one)
        level = recognise(tensor, one, TRIAL, canvas, patches)
        if level is None:
            raise ValueError(
                f"level {one!r} gave a tensor of shape {tuple(tensor.shape)} for {TRIAL} images of "
                f"{canvas} pixels, which are the cells of no grid; say what it is with a Level"
            )
        if level[1] == (1, 1):
            raise ValueError(
                f"level {one!r} has one cell for {canvas} pixels, and attention nothing to choose; "
                "name an earlier module, or give the size of your images with size="
            )
        found.append(level[0])
    return _agreed(tuple(found), canvas)


def find_levels(backbone: nn.Module, run: Run, canvas: Size, most: int = 3) -> tuple[Level, ...]:
    """The last levels of a backbone, the finest first: one a resolution, `most` resolutions.

    A backbone that returns several maps, such as a feature pyramid, has said itself what they are.
    In any other, of all modules that stand side by side, those that go through the most of the
    coarsest resolutions are its stages, and the last one at each resolution is taken. Where all are
    of one resolution, as in a ViT, they are blocks, and `most` of them are taken, evenly spaced, up
    to the last.
    """
    paths = [path for path, _ in backbone.named_modules()]
    kept = _trial(backbone, run, canvas, paths)
    patches = _patches(backbone)
    families: dict[str, list[tuple[Level, Size]]] = {}
    for path, returned in kept.items():
        seen: dict[Size, Level] = {}
        for which, tensor in enumerate(tensors(returned)):
            name = f"{path}[{which}]" if which else path
            level = recognise(tensor, name, TRIAL, canvas, patches)
            # what divides the canvas unevenly may be anything: weights of queries on keys, too
            if level is not None and level[0].stride is not None and level[1] != (1, 1):
                seen.setdefault(level[1], level[0])
        if path == "" and len(seen) > 1:
            return _agreed(_last(list(zip(seen.values(), seen, strict=True)), most), canvas)
        parent = path.rpartition(".")[0] if path else None
        if parent is not None:
            found = families.setdefault(parent, [])
            found.extend((level, grid) for grid, level in seen.items())
    families = {path: found for path, found in families.items() if found}
    if not families:
        raise ValueError(
            f"no module of {type(backbone).__name__} returns the cells of a grid of {canvas} "
            "pixels; name the levels, or give the size of your images with size="
        )

    grids = {grid for found in families.values() for _, grid in found}
    coarsest = set(sorted(grids, key=lambda grid: grid[0] * grid[1])[:most])

    def richness(path: str) -> tuple[int, int, bool, int, int]:
        found = families[path]
        own = {grid for _, grid in found}
        listed = isinstance(submodule(backbone, path), nn.ModuleList | nn.Sequential)
        return len(own & coarsest), len(own), listed, len(found), -path.count(".")

    return _agreed(_last(families[max(families, key=richness)], most), canvas)


def _agreed(levels: tuple[Level, ...], canvas: Size) -> tuple[Level, ...]:
    """The levels with those that could be read either way read as all the others are."""

    def either(level: Level) -> bool:
        sides = (level.width * step for step in level.stride or ())
        return level.order is Order.FIRST and tuple(sides) == canvas

    if {level.order for level in levels if not either(level)} != {Order.LAST}:
        return levels
    return tuple(replace(level, order=Order.LAST) for level in levels)


def _last(found: Sequence[tuple[Level, Size]], most: int) -> tuple[Level, ...]:
    by_grid = {grid: level for level, grid in found}  # the last one at each
    if len(by_grid) > 1:
        finest = sorted(by_grid, key=lambda grid: -grid[0] * grid[1])
        return tuple(by_grid[grid] for grid in finest[-most:])
    blocks = [level for level, _ in found]
    count = min(most, len(blocks))
    return tuple(blocks[len(blocks) * (at + 1) // count - 1] for at in range(count))


TRIAL = 2  # images: windows of one would be taken for images


def _trial(backbone: nn.Module, run: Run, canvas: Size, paths: Sequence[str]) -> dict[str, Any]:
    device = next((one.device for one in backbone.parameters()), None)
    blank = torch.zeros(TRIAL, 3, *canvas, dtype=number_format(backbone), device=device)
    kept: dict[str, Any]
    with (
        torch.no_grad(),
        torch.random.fork_rng(devices=[]),
        still(backbone),
        returning(backbone, list(dict.fromkeys(paths))) as kept,
    ):
        run(backbone, blank)
    return kept


def _patches(backbone: nn.Module) -> Patches | None:
    try:
        return patches_of(backbone)
    except ValueError:
        return None


def number_format(module: nn.Module) -> torch.dtype:
    """The number format that a module takes: that of its first parameter with fractions."""
    kinds = (one.dtype for one in module.parameters() if one.is_floating_point())
    return next(kinds, torch.get_default_dtype())
