"""Measure where an image transform puts each pixel, by applying it to test images.

The brightness of a ramp image encodes the position of each pixel, so its output shows for every
pixel where it came from. Two uniform images, dark and bright, undo changes of the values and show
which pixels are padding. No rule of any processor is copied, so processors with their own rounding
are matched exactly, and transforms that do more than scale, crop, pad and flip are detected.

A line through hundreds of rows and columns is accurate to some hundredths of a pixel, which
determines the whole numbers behind it (size after resizing, pixels cropped or padded). If it does
not, as for an image of ten pixels or a crop of a tenth, the error is at most half a canvas pixel.
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

from overt.capture.layouts.axis_fit import (
    AxisSamples,
    Line,
    fit_line,
    guess_line,
    scale_of,
    tolerance,
    visible_range,
)
from overt.capture.layouts.ramp_images import (
    DecodedCanvas,
    ImageTooSmallError,
    NotAffineError,
    Photo,
    RampImages,
    Size,
    Window,
    bright_image,
    dark_image,
    decode_canvas,
)
from overt.geometry import PixelGeometry

NARROW = 24  # pixels: means over fewer are mostly noise

Canvas = np.ndarray  # (channels, height, width), any dtype
Canvases = Callable[[Photo], Sequence[Canvas]]


@dataclass(frozen=True)
class ImagePlacement:
    """Position of an image on a canvas: `canvas = image * scale + offset`, in (y, x).

    `kept` is the box of the image that is on the canvas; empty if none is.
    """

    scale: tuple[float, float]
    offset: tuple[float, float]
    canvas: Size
    kept: tuple[float, float, float, float]


@dataclass(frozen=True, eq=False)
class Tiles:
    """The canvases of images: one per image, or several tiles.

    Attributes:
        geometries: The geometry of each tile, with one row per image. All canvases are padded below
            and on the right to the largest one, as processors do.
        canvases: (height, width) of tile t of image b, (0, 0) if the image has no such tile.
    """

    geometries: tuple[PixelGeometry, ...]
    canvases: Int[Tensor, "b t 2"]

    @property
    def present(self) -> Bool[Tensor, "b t"]:
        """Which tiles each image has."""
        return self.canvases[..., 0] > 0


def measure_placement(canvases: Canvases, sizes: Sequence[Size], repeats: int = 1) -> Tiles:
    """Measure what the transform `canvases` does to images of each (height, width).

    One test image is transformed `repeats` more times and must give the same result. The states of
    random generators are restored.
    """
    if not sizes or min(min(size) for size in sizes) < 1:
        raise ValueError(f"expected at least one image with positive sizes, got {list(sizes)}")
    with preserve_rng():
        known = {size: _place(canvases, size, repeats) for size in dict.fromkeys(sizes)}
    return _stack([known[size] for size in sizes], sizes)


def _place(canvases: Canvases, size: Size, repeats: int) -> list[ImagePlacement]:
    """Return the placement of an image of one size on each of its canvases."""
    whole = RampImages(size, (0, 0, *size))
    rising = whole.picture(1)
    # Two constant images and one ramp; the other ramp follows once the transform is known not to be
    # random.
    low, high, across = (_run(canvases, p) for p in (dark_image(size), bright_image(size), rising))
    for _ in range(repeats):
        again = _run(canvases, rising)
        if not all(map(np.array_equal, across, again)):
            raise NotAffineError("two runs on the same image differ, so the transform is random")
    try:
        return _refine(canvases, whole, low, high, across)
    except NotAffineError as problem:
        if min(size) >= NARROW:
            raise
        raise ImageTooSmallError(
            f"it has {size[0]} x {size[1]} pixels, too few to measure the transform"
        ) from problem


def _refine(
    canvases: Canvases,
    whole: RampImages,
    low: list[Float[np.ndarray, "c y x"]],
    high: list[Float[np.ndarray, "c y x"]],
    across: list[Float[np.ndarray, "c y x"]],
) -> list[ImagePlacement]:
    """Placements from the test images; a small crop is measured again with steeper ramps."""
    size = whole.size
    placed = place_canvases(whole, low, high, _run(canvases, whole.picture(0)), across)
    if len(placed) == 1:
        # A ramp over the visible part alone has more grey levels per pixel.
        nearer = RampImages(size, _visible_window(placed[0], size))
        if _is_smaller(nearer.window, whole.window):
            down, across = (_run(canvases, nearer.picture(axis)) for axis in (0, 1))
            placed = place_canvases(nearer, low, high, down, across)
    return placed


def _run(canvases: Canvases, picture: Photo) -> list[Float[np.ndarray, "c y x"]]:
    return [_to_float(canvas) for canvas in canvases(picture)]


def _visible_window(placed: ImagePlacement, size: Size) -> Window:
    """Return the image pixels that are visible on the canvas, plus those that a filter mixes in."""
    x0, y0, x1, y1 = placed.kept
    down, across = (math.ceil(4 * max(1.0, 1 / abs(scale))) for scale in placed.scale)
    return (
        max(0, int(y0) - down),
        max(0, int(x0) - across),
        min(size[0], math.ceil(y1) + down),
        min(size[1], math.ceil(x1) + across),
    )


def _is_smaller(window: Window, whole: Window) -> bool:
    sides = [(w[2] - w[0], w[3] - w[1]) for w in (window, whole)]
    return any(part < 0.75 * of for part, of in zip(*sides, strict=True))


def place_canvases(
    ramps: RampImages,
    low: list[Float[np.ndarray, "c y x"]],
    high: list[Float[np.ndarray, "c y x"]],
    down: list[Float[np.ndarray, "c y x"]],
    across: list[Float[np.ndarray, "c y x"]],
) -> list[ImagePlacement]:
    """Return the placement of an image on each of its canvases.

    Args:
        ramps: The ramps.
        low: The canvases of the dark image.
        high: Those of the bright image.
        down: Those of the vertical ramp.
        across: Those of the horizontal ramp.

    Raises:
        NotAffineError: If the transform does more than scale, crop, pad and flip.
    """
    shapes = [[canvas.shape for canvas in of_one] for of_one in (low, high, down, across)]
    if any(shape != shapes[0] for shape in shapes):
        raise NotAffineError(f"images of {ramps.size} pixels became canvases of different sizes")
    decoded = [decode_canvas(ramps, *four) for four in zip(low, high, down, across, strict=True)]
    # largest visible area first: a narrow strip in a border tile uses the scale of other tiles
    order = sorted(range(len(decoded)), key=lambda at: -decoded[at].area)
    placed: dict[int, ImagePlacement] = {}
    for at in order:
        borrowed = [placed[a].scale for a in placed] if _is_strip(decoded[at]) else []
        placed[at] = _fit_placement(decoded[at], borrowed)
    if len(placed) > 1:  # combine the tiles of one image to measure its scale
        well = [placed[at] for at in order if 2 * decoded[at].area >= decoded[order[0]].area]
        scales = list(dict.fromkeys(_common_scale(tile, well, ramps.size) for tile in well))
        placed = {at: _fit_placement(decoded[at], scales) for at in order}
    return [placed[at] for at in range(len(decoded))]


def _is_strip(seen: DecodedCanvas) -> bool:
    """Return whether too little is visible along an axis to measure it alone."""
    return any(side.stop - side.start < NARROW for side in seen.window)


def _common_scale(
    tile: ImagePlacement, tiles: Sequence[ImagePlacement], size: Size
) -> tuple[float, float]:
    """Return the scale of the resized image that `tile` and its neighbours were cut from.

    The distance between adjacent tiles is known to the pixel.
    """
    # Tiles of the same resized image; another one, such as a thumbnail, has another scale.
    near = [
        other
        for other in tiles
        if all(abs(a / b - 1) < 0.01 for a, b in zip(other.scale, tile.scale, strict=True))
    ]
    found = []
    for axis, side in enumerate(tile.canvas):
        scale = float(np.median([one.scale[axis] for one in near]))
        centres = np.array([(side / 2 - one.offset[axis]) / one.scale[axis] for one in near])
        # Adjacent tiles are one canvas side apart, so the slope from image to canvas is measured
        # over the whole image.
        steps = np.round((centres - centres[0]) * scale / side)
        if np.ptp(steps):
            measured = float(np.polyfit(centres, steps * side, 1)[0])
            scale = measured if abs(measured / scale - 1) < 0.01 else scale  # else tiles have gaps
        found.append((round(scale * size[axis]) or scale * size[axis]) / size[axis])
    return found[0], found[1]


def _to_float(canvas: Canvas) -> Float[np.ndarray, "c y x"]:
    numbers = np.asarray(canvas, dtype=np.float64)
    if numbers.ndim != 3:
        raise NotAffineError(f"a canvas of shape {numbers.shape} is not (channels, height, width)")
    return numbers


def _fit_placement(seen: DecodedCanvas, scales: Sequence[tuple[float, float]]) -> ImagePlacement:
    """Fit scale and offset to the decoded points of a canvas."""
    canvas = (seen.points.shape[1], seen.points.shape[2])
    if not seen.area:
        return ImagePlacement((1.0, 1.0), (0.0, 0.0), canvas, (0.0, 0.0, 0.0, 0.0))
    axes = [_axis_samples(seen, axis) for axis in (0, 1)]
    known = [[scale[axis] for scale in scales] for axis in (0, 1)]
    found = [fit_line(axis, hints) for axis, hints in zip(axes, known, strict=True)]
    lines = [
        # few pixels along one axis: most transforms scale both axes equally
        line or guess_line(axes[at], known[at] + [scale_of(axes[1 - at], found[1 - at])])
        for at, line in enumerate(found)
    ]
    low, high = zip(
        *(visible_range(a, line) for a, line in zip(axes, lines, strict=True)), strict=True
    )
    for axis, line in enumerate(lines):
        _check_straight(seen, axis, line)
    return ImagePlacement(
        scale=(lines[0][0], lines[1][0]),
        offset=(lines[0][1], lines[1][1]),
        canvas=canvas,
        kept=(low[1], low[0], high[1], high[0]),
    )


def _axis_samples(seen: DecodedCanvas, axis: int) -> AxisSamples:
    inside = seen.points[axis][seen.window]
    # Mean over the other axis, of the certain pixels.
    known = np.isfinite(inside)
    counts = known.sum(axis=1 - axis)
    means = np.where(known, inside, 0).sum(axis=1 - axis) / np.maximum(counts, 1)
    window = seen.window[axis]
    sure = counts > 0
    return AxisSamples(
        size=seen.ramps.size[axis],
        step=1 / seen.ramps.along[axis],
        length=seen.points.shape[1 + axis],
        start=window.start,
        stop=window.stop,
        at=np.arange(window.start, window.stop)[sure] + 0.5,
        photo=means[sure],
    )


def _check_straight(seen: DecodedCanvas, axis: int, line: Line) -> None:
    """Raise unless every row gives the same x and every column the same y."""
    scale, offset = line
    shown = np.moveaxis(seen.points[axis], axis, -1)  # (the other axis, this axis)
    expected = (np.arange(shown.shape[1]) + 0.5 - offset) / scale
    inside = (expected > 0) & (expected < seen.ramps.size[axis])
    wrong = np.where(inside, shown - expected, np.nan)
    known = np.isfinite(wrong)
    counts = known.sum(axis=1)
    means = np.where(known, wrong, 0).sum(axis=1) / np.maximum(counts, 1)
    counts = np.where(counts < NARROW, 0, counts)  # the mean of a strip is mostly noise
    # row means average out rounding; filters shift the border of an image inwards
    room = tolerance(1 / seen.ramps.along[axis]) + 0.25 / abs(scale)
    if counts.any() and np.abs(means - np.median(means[counts > 0]))[counts > 0].max() > room:
        raise NotAffineError(
            "rows or columns of the image are not straight: it was rotated, sheared or warped"
        )


def _stack(placed: Sequence[Sequence[ImagePlacement]], sizes: Sequence[Size]) -> Tiles:
    most = max(len(tiles) for tiles in placed)
    # An image with fewer tiles has tiles without a canvas.
    nothing = ImagePlacement((1.0, 1.0), (0.0, 0.0), (0, 0), (0.0, 0.0, 0.0, 0.0))
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
def preserve_rng() -> Iterator[None]:
    """Restore the states of the random generators afterwards."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
