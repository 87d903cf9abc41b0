"""Where each pixel of a photo goes, found by putting test pictures through the transform itself.

A ramp is a picture whose brightness says where a pixel stands. What comes out of a transform then
says, pixel by pixel, where each output came from; two even pictures, dark and bright, undo whatever
is done to the values and show which pixels are padding. No rule of any processor is copied, so one
that rounds in its own way is still met exactly, and one that does more than stretch, cut, pad and
mirror is found out.

A line through hundreds of rows and columns is good to some hundredths of a pixel, and then the
whole numbers behind it (the size resized to, the pixels cut or padded) are known. Where they are
not, as for a photo of ten pixels or a crop that leaves a tenth, what was measured is within half a
canvas pixel of the truth.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from overt.capture.positions.lines import Axis, Line, fit, guess, kept, scale_of, slack
from overt.capture.positions.ramps import (
    Decoded,
    NotAffine,
    Photo,
    Ramps,
    Size,
    TooSmall,
    Window,
    bright,
    dark,
    decode,
)
from overt.geometry import PixelGeometry

NARROW = 24  # pixels: means over fewer are mostly noise, and so is what does not fit to them

Canvas = np.ndarray  # (channels, height, width), any kind of number
Canvases = Callable[[Photo], Sequence[Canvas]]


@dataclass(frozen=True)
class Placed:
    """Where one photo stands on one canvas: `canvas = photo * scale + offset`, in (y, x).

    `kept` is the part of the photo, as a box, that is on the canvas; empty when none is.
    """

    scale: tuple[float, float]
    offset: tuple[float, float]
    canvas: Size
    kept: tuple[float, float, float, float]


@dataclass(frozen=True, eq=False)
class Tiles:
    """The canvases that photos became: one each, or several for a transform that cuts tiles.

    `geometries[t]` has a row a photo; all its canvases are as large as the largest, with the rest
    below and to the right, where processors pad too. `canvases[b, t]` is the (height, width) of its
    own that tile t of photo b has, and (0, 0) where a photo has no such tile.
    """

    geometries: tuple[PixelGeometry, ...]
    canvases: Int[Tensor, "b t 2"]

    @property
    def present(self) -> Bool[Tensor, "b t"]:
        """Which tiles each photo has."""
        return self.canvases[..., 0] > 0


def measure(canvases: Canvases, sizes: Sequence[Size], repeats: int = 1) -> Tiles:
    """What `canvases` does to photos of each (height, width), by its answers to test pictures.

    One of the pictures is shown `repeats` times more, and has to come out the same each time.
    Anything drawn at random meanwhile leaves the generators as they were.
    """
    if not sizes or min(min(size) for size in sizes) < 1:
        raise ValueError(f"photos of sizes {list(sizes)} cannot be placed on a canvas")
    with _same_random():
        known = {size: _place(canvases, size, repeats) for size in dict.fromkeys(sizes)}
    return _stack([known[size] for size in sizes], sizes)


def _place(canvases: Canvases, size: Size, repeats: int) -> list[Placed]:
    """The placing of a photo of one size on each canvas it becomes."""
    whole = Ramps(size, (0, 0, *size))
    rising = whole.picture(1)
    low, high, across = (_made(canvases, p) for p in (dark(size), bright(size), rising))
    for _ in range(repeats):
        again = _made(canvases, rising)
        if not all(map(np.array_equal, across, again)):
            raise NotAffine("the same photo came out differently twice, so something is random")
    try:
        return _nearer(canvases, whole, low, high, across)
    except NotAffine as problem:
        if min(size) >= NARROW:
            raise
        raise TooSmall(
            f"it has {size[0]} x {size[1]} pixels, too few to measure what is done to them"
        ) from problem


def _nearer(
    canvases: Canvases,
    whole: Ramps,
    low: list[Float[np.ndarray, "c y x"]],
    high: list[Float[np.ndarray, "c y x"]],
    across: list[Float[np.ndarray, "c y x"]],
) -> list[Placed]:
    """What the pictures say; what little a crop leaves is measured again with steeper ramps."""
    size = whole.size
    placed = _explain(whole, low, high, _made(canvases, whole.picture(0)), across)
    if len(placed) == 1:
        nearer = Ramps(size, _around(placed[0], size))
        if _smaller(nearer.window, whole.window):
            down, across = (_made(canvases, nearer.picture(axis)) for axis in (0, 1))
            placed = _explain(nearer, low, high, down, across)
    return placed


def _made(canvases: Canvases, picture: Photo) -> list[Float[np.ndarray, "c y x"]]:
    return [_numbers(canvas) for canvas in canvases(picture)]


def _around(placed: Placed, size: Size) -> Window:
    """The whole pixels of the photo that can be seen on the canvas, and those a filter mixes in."""
    x0, y0, x1, y1 = placed.kept
    down, across = (math.ceil(4 * max(1.0, 1 / abs(scale))) for scale in placed.scale)
    return (
        max(0, int(y0) - down),
        max(0, int(x0) - across),
        min(size[0], math.ceil(y1) + down),
        min(size[1], math.ceil(x1) + across),
    )


def _smaller(window: Window, whole: Window) -> bool:
    sides = [(w[2] - w[0], w[3] - w[1]) for w in (window, whole)]
    return any(part < 0.75 * of for part, of in zip(*sides, strict=True))


def _explain(
    ramps: Ramps,
    low: list[Float[np.ndarray, "c y x"]],
    high: list[Float[np.ndarray, "c y x"]],
    down: list[Float[np.ndarray, "c y x"]],
    across: list[Float[np.ndarray, "c y x"]],
) -> list[Placed]:
    """The placing that each canvas shows."""
    shapes = [[canvas.shape for canvas in of_one] for of_one in (low, high, down, across)]
    if any(shape != shapes[0] for shape in shapes):
        raise NotAffine(f"photos of {ramps.size} pixels became canvases of different sizes")
    decoded = [decode(ramps, *four) for four in zip(low, high, down, across, strict=True)]
    # the canvases that show most of the photo first: a strip at the rim of a tile borrows its scale
    order = sorted(range(len(decoded)), key=lambda at: -decoded[at].area)
    placed: dict[int, Placed] = {}
    for at in order:
        borrowed = [placed[a].scale for a in placed] if _strip(decoded[at]) else []
        placed[at] = _located(decoded[at], borrowed)
    if len(placed) > 1:  # what the tiles of one picture say of its size, taken together
        well = [placed[at] for at in order if 2 * decoded[at].area >= decoded[order[0]].area]
        scales = list(dict.fromkeys(_agreed(tile, well, ramps.size) for tile in well))
        placed = {at: _located(decoded[at], scales) for at in order}
    return [placed[at] for at in range(len(decoded))]


def _strip(seen: Decoded) -> bool:
    """Whether too little is shown along an axis to measure it alone."""
    return any(side.stop - side.start < NARROW for side in seen.window)


def _agreed(tile: Placed, tiles: Sequence[Placed], size: Size) -> tuple[float, float]:
    """The scale by which the picture was resized that `tile` and its neighbours were cut from.

    Where tiles stand beside each other, the way from one to the next is known to the pixel.
    """
    near = [
        other
        for other in tiles
        if all(abs(a / b - 1) < 0.01 for a, b in zip(other.scale, tile.scale, strict=True))
    ]
    found = []
    for axis, side in enumerate(tile.canvas):
        scale = float(np.median([one.scale[axis] for one in near]))
        centres = np.array([(side / 2 - one.offset[axis]) / one.scale[axis] for one in near])
        steps = np.round((centres - centres[0]) * scale / side)
        if np.ptp(steps):
            measured = float(np.polyfit(centres, steps * side, 1)[0])
            scale = measured if abs(measured / scale - 1) < 0.01 else scale  # or with gaps between
        found.append((round(scale * size[axis]) or scale * size[axis]) / size[axis])
    return found[0], found[1]


def _numbers(canvas: Canvas) -> Float[np.ndarray, "c y x"]:
    numbers = np.asarray(canvas, dtype=np.float64)
    if numbers.ndim != 3:
        raise NotAffine(f"a canvas of shape {numbers.shape} is not (channels, height, width)")
    return numbers


def _located(seen: Decoded, scales: Sequence[tuple[float, float]]) -> Placed:
    """The scale and offset that explain every point."""
    canvas = (seen.points.shape[1], seen.points.shape[2])
    if not seen.area:
        return Placed((1.0, 1.0), (0.0, 0.0), canvas, (0.0, 0.0, 0.0, 0.0))
    axes = [_axis(seen, axis) for axis in (0, 1)]
    known = [[scale[axis] for scale in scales] for axis in (0, 1)]
    found = [fit(axis, hints) for axis, hints in zip(axes, known, strict=True)]
    lines = [
        # few pixels along one axis: photos are mostly resized alike along both
        line or guess(axes[at], known[at] + [scale_of(axes[1 - at], found[1 - at])])
        for at, line in enumerate(found)
    ]
    low, high = zip(*(kept(a, line) for a, line in zip(axes, lines, strict=True)), strict=True)
    for axis, line in enumerate(lines):
        _check(seen, axis, line)
    return Placed(
        scale=(lines[0][0], lines[1][0]),
        offset=(lines[0][1], lines[1][1]),
        canvas=canvas,
        kept=(low[1], low[0], high[1], high[0]),
    )


def _axis(seen: Decoded, axis: int) -> Axis:
    inside = seen.points[axis][seen.window]
    known = np.isfinite(inside)
    counts = known.sum(axis=1 - axis)
    means = np.where(known, inside, 0).sum(axis=1 - axis) / np.maximum(counts, 1)
    window = seen.window[axis]
    sure = counts > 0
    return Axis(
        size=seen.ramps.size[axis],
        step=1 / seen.ramps.along[axis],
        length=seen.points.shape[1 + axis],
        start=window.start,
        stop=window.stop,
        at=np.arange(window.start, window.stop)[sure] + 0.5,
        photo=means[sure],
    )


def _check(seen: Decoded, axis: int, line: Line) -> None:
    """Nothing is left unexplained: each row says the same of x, each column of y."""
    scale, offset = line
    shown = np.moveaxis(seen.points[axis], axis, -1)  # (the other axis, this axis)
    expected = (np.arange(shown.shape[1]) + 0.5 - offset) / scale
    inside = (expected > 0) & (expected < seen.ramps.size[axis])
    wrong = np.where(inside, shown - expected, np.nan)
    known = np.isfinite(wrong)
    counts = known.sum(axis=1)
    means = np.where(known, wrong, 0).sum(axis=1) / np.maximum(counts, 1)
    counts = np.where(counts < NARROW, 0, counts)  # the mean of a strip is mostly noise
    # a row's mean is free of most rounding; the rim of a photo is drawn inwards by the filter
    room = slack(1 / seen.ramps.along[axis]) + 0.25 / abs(scale)
    if counts.any() and np.abs(means - np.median(means[counts > 0]))[counts > 0].max() > room:
        raise NotAffine(
            "the columns of the photo did not stay upright, or its rows level: it was turned, "
            "sheared or warped"
        )


def _stack(placed: Sequence[Sequence[Placed]], sizes: Sequence[Size]) -> Tiles:
    most = max(len(tiles) for tiles in placed)
    nothing = Placed((1.0, 1.0), (0.0, 0.0), (0, 0), (0.0, 0.0, 0.0, 0.0))
    rows = [[*tiles, *[nothing] * (most - len(tiles))] for tiles in placed]
    canvases = torch.tensor([[one.canvas for one in row] for row in rows], dtype=torch.long)
    height, width = canvases.flatten(0, 1).amax(dim=0).tolist()
    size = torch.tensor(sizes, dtype=torch.long)
    geometries = tuple(
        PixelGeometry(
            size=size,
            scale=torch.tensor([row[tile].scale for row in rows], dtype=torch.float64),
            offset=torch.tensor([row[tile].offset for row in rows], dtype=torch.float64),
            canvas=(height, width),
            kept=torch.tensor([row[tile].kept for row in rows], dtype=torch.float64),
        )
        for tile in range(most)
    )
    return Tiles(geometries, canvases)


@contextmanager
def _same_random() -> Iterator[None]:
    """Random numbers drawn inside are drawn again afterwards."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
