"""Fit the scale and offset of an image along one axis of a canvas, in whole pixels if possible."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float

from overt.capture.layouts.ramp_images import NotAffineError

SMALLEST = 6  # image pixels along an axis: with fewer, an upsampling filter mixes all of them
WHOLE = 0.25  # an offset this close to a whole number of pixels is rounded

Line = tuple[float, float]  # scale and offset: canvas = image * scale + offset


@dataclass(frozen=True)
class AxisSamples:
    """Measurements along one axis of a canvas.

    Attributes:
        size: Image pixels along the axis.
        step: Image pixels per grey level of the ramp.
        length: Canvas pixels along the axis.
        start: First canvas pixel that shows the image.
        stop: End of the canvas pixels that show the image.
        at: Canvas coordinates of the measurements.
        photo: Image coordinate measured at each of them.
    """

    size: int
    step: float
    length: int
    start: int
    stop: int
    at: Float[np.ndarray, " n"]
    photo: Float[np.ndarray, " n"]


def tolerance(step: float) -> float:
    """Return the possible error of a row mean in image pixels.

    One step of the ramp, plus the error of nearest-neighbour resizing.
    """
    return 0.6 + step


def fit_line(axis: AxisSamples, scales: Sequence[float]) -> Line | None:
    """Fit the line through the measurements away from borders; None if there are too few."""
    count = len(axis.at)
    if count < 12:
        return None
    # Filters mix in padding at the borders. So: a first line through the middle half, then twice a
    # line through all measurements that are far enough from the borders of the image it implies.
    middle = slice(count // 4, count - count // 4)
    line = _through(axis.at[middle], axis.photo[middle])
    if line is None:
        raise NotAffineError("the image is not aligned with the axes: it was rotated or shuffled")
    for reach in (3, 2):  # image pixels on each side that the widest filters use
        found, inner = line, None
        for _ in range(2):
            inner = _inner(axis, found, reach)
            if inner is None:
                break
            found = _through(axis.at[inner], axis.photo[inner]) or found
        if inner is not None:
            scale, offset = found
            wrong = np.abs(axis.photo[inner] - (axis.at[inner] - offset) / scale).max()
            if wrong > tolerance(axis.step):
                raise NotAffineError(
                    f"measurements differ by up to {wrong:.1f} image pixels from a uniform scaling"
                )
            return _whole(axis, found, inner, scales)
    return None


def _inner(axis: AxisSamples, line: Line, reach: int) -> Bool[np.ndarray, " n"] | None:
    """Return the measurements not affected by borders of the image; None if too few for a fit."""
    scale, offset = line
    expected = (axis.at - offset) / scale
    away = reach * max(1.0, 1 / abs(scale))
    inner = (expected > away) & (expected < axis.size - away)
    return inner if inner.sum() >= 8 and np.ptp(expected[inner]) >= 1.5 else None


def _through(at: np.ndarray, photo: np.ndarray) -> Line | None:
    # photo = slope * at + start, so canvas = image / slope - start / slope. A flat line has no
    # scale.
    slope, start = np.polyfit(at, photo, 1)
    if abs(slope) < 1e-6 or abs(slope) * len(at) < 0.02:
        return None
    return 1 / slope, -start / slope


def _whole(
    axis: AxisSamples, line: Line, inner: Bool[np.ndarray, " n"], scales: Sequence[float]
) -> Line:
    """Round a measured line to whole pixels, if possible.

    Either the image was resized to a whole number of pixels and shifted by whole pixels, or cropped
    or padded by whole pixels and then resized to the canvas; else the measured line is returned.
    Tiles of one image share its scale, one of `scales`.
    """
    at, photo = (
        float(axis.at[inner].mean()),
        float(axis.photo[inner].mean()),
    )  # most accurate at the mean
    measured = line[0]
    reach = float(np.ptp(axis.at[inner])) / 2

    def departs(scale: float) -> float:  # difference from the measured scale, in image pixels
        return abs(1 / scale - 1 / measured) * reach

    # Case 1: resized to whole pixels (by the scale of the other tiles, if it fits), then shifted.
    shared = min(scales, key=departs, default=0.0)
    agrees = bool(shared) and departs(shared) < 0.1 + 0.25 * axis.step
    resized = shared * axis.size if agrees else float(round(measured * axis.size))
    moved = at - photo * resized / axis.size
    whole = agrees or abs(measured * axis.size - resized) < 0.4
    if resized and whole and abs(moved - round(moved)) < (0.5 if agrees else WHOLE):
        return resized / axis.size, float(round(moved))
    # Case 2: a window of whole image pixels, then resized to the canvas.
    window = round(axis.length / measured)  # image pixels under the canvas, negative if flipped
    room = WHOLE / max(1.0, abs(measured))
    if window and abs(axis.length / measured - window) < room:
        scale = axis.length / window
        start = photo - at / scale  # image coordinate at the canvas edge
        if abs(start - round(start)) < room:
            return scale, -round(start) * scale
    return line


def scale_of(axis: AxisSamples, line: Line | None) -> float:
    """Return the measured scale, or that of an image shown from end to end."""
    return abs(line[0]) if line else (axis.stop - axis.start) / axis.size


def guess_line(axis: AxisSamples, scales: Sequence[float]) -> Line:
    """Return the likeliest line if there are few measurements: the whole image, or `scales`."""
    extent = axis.stop - axis.start
    if axis.size < SMALLEST and extent > axis.size:
        raise NotAffineError(
            f"{axis.size} image pixels along an axis are too few to measure the transform"
        )
    # The whole image, upright or flipped; or a known scale, placed by its middle or by its ends.
    tries = [(extent / axis.size, float(axis.start)), (-extent / axis.size, float(axis.stop))]
    for scale in scales:
        resized = round(scale * axis.size)
        if not resized:
            continue
        exact = resized / axis.size
        middle = float(np.median(axis.at - axis.photo * exact)) if len(axis.at) else 0.0
        tries += [(exact, float(o)) for o in (round(middle), axis.start, axis.stop - resized)]
    wrong = [_misses(axis, *line) for line in tries]
    close = 0.2 + 0.55 * min(1.0, axis.size / extent) + axis.step
    # Earlier tries win against equal ones.
    best = int(np.argmin([w + 1e-3 * n for n, w in enumerate(wrong)]))
    if not len(axis.at) or wrong[best] > close:
        raise NotAffineError(
            f"{extent} canvas pixels along an axis of {axis.size} image pixels are too few to "
            "measure the transform"
        )
    return tries[best]


def _misses(axis: AxisSamples, scale: float, offset: float) -> float:
    if not len(axis.at):
        return 0.0
    # an image cannot show less than a pixel centre
    expected = ((axis.at - offset) / scale).clip(0.5, axis.size - 0.5)
    return float(np.sqrt(np.mean((axis.photo - expected) ** 2)))


def visible_range(axis: AxisSamples, line: Line) -> tuple[float, float]:
    """Return the range of the image along one axis that is on the canvas."""
    scale, offset = line
    ends = sorted(((axis.start - offset) / scale, (axis.stop - offset) / scale))
    near = 0.75 / abs(scale)  # a border pixel that is half padding
    low = 0.0 if ends[0] < near else ends[0]
    high = float(axis.size) if ends[1] > axis.size - near else ends[1]
    return low, max(low, high)
