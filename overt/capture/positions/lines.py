"""One axis of a photo on a canvas: the line through what was seen, in whole pixels if any fit."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float

from overt.capture.positions.ramps import NotAffine

SMALLEST = 6  # photo pixels along an axis: of fewer, a filter that enlarges mixes all at once
WHOLE = 0.25  # an offset this near to a whole number of pixels is that number

Line = tuple[float, float]  # scale and offset: canvas = photo * scale + offset


@dataclass(frozen=True)
class Axis:
    """One axis of one canvas: the photo coordinate `photo` that was seen at each place `at`.

    `step` is how many photo pixels one level of a ramp stands for; `start` and `stop` enclose what
    is shown of the photo on the `length` pixels of the canvas.
    """

    size: int
    step: float
    length: int
    start: int
    stop: int
    at: Float[np.ndarray, " n"]
    photo: Float[np.ndarray, " n"]


def slack(step: float) -> float:
    """How far, in photo pixels, a mean over a row may be from the truth.

    One step of the ramp, and what a filter that takes the nearest pixel is off by.
    """
    return 0.6 + step


def fit(axis: Axis, scales: Sequence[float]) -> Line | None:
    """The line through what was seen away from any rim; None where too little was."""
    count = len(axis.at)
    if count < 12:
        return None
    middle = slice(count // 4, count - count // 4)
    line = _through(axis.at[middle], axis.photo[middle])
    if line is None:
        raise NotAffine("the photo does not run along its axes any more: it was turned or mixed up")
    for reach in (3, 2):  # photo pixels on each side that the widest filters mix in
        found, inner = line, None
        for _ in range(2):
            inner = _inner(axis, found, reach)
            if inner is None:
                break
            found = _through(axis.at[inner], axis.photo[inner]) or found
        if inner is not None:
            scale, offset = found
            wrong = np.abs(axis.photo[inner] - (axis.at[inner] - offset) / scale).max()
            if wrong > slack(axis.step):
                raise NotAffine(
                    f"what was seen is up to {wrong:.1f} photo pixels from any one stretching"
                )
            return _whole(axis, found, inner, scales)
    return None


def _inner(axis: Axis, line: Line, reach: int) -> Bool[np.ndarray, " n"] | None:
    """The places that no rim of the photo reaches, if they are enough to draw a line through."""
    scale, offset = line
    expected = (axis.at - offset) / scale
    away = reach * max(1.0, 1 / abs(scale))
    inner = (expected > away) & (expected < axis.size - away)
    return inner if inner.sum() >= 8 and np.ptp(expected[inner]) >= 1.5 else None


def _through(at: np.ndarray, photo: np.ndarray) -> Line | None:
    slope, start = np.polyfit(at, photo, 1)
    if abs(slope) < 1e-6 or abs(slope) * len(at) < 0.02:
        return None
    return 1 / slope, -start / slope


def _whole(axis: Axis, line: Line, inner: Bool[np.ndarray, " n"], scales: Sequence[float]) -> Line:
    """The line of whole pixels next to a measured one, if there is one.

    A photo resized to a whole number of pixels and moved by whole pixels; or first cut or padded
    by whole pixels and then resized to the canvas; else what was measured. Tiles of one picture
    share its scale, one of `scales`.
    """
    at, photo = float(axis.at[inner].mean()), float(axis.photo[inner].mean())  # surest here
    measured = line[0]
    reach = float(np.ptp(axis.at[inner])) / 2

    def departs(scale: float) -> float:  # in photo pixels, from what was measured
        return abs(1 / scale - 1 / measured) * reach

    shared = min(scales, key=departs, default=0.0)
    agrees = bool(shared) and departs(shared) < 0.1 + 0.25 * axis.step
    resized = shared * axis.size if agrees else float(round(measured * axis.size))
    moved = at - photo * resized / axis.size
    whole = agrees or abs(measured * axis.size - resized) < 0.4
    if resized and whole and abs(moved - round(moved)) < (0.5 if agrees else WHOLE):
        return resized / axis.size, float(round(moved))
    window = round(axis.length / measured)  # photo pixels under the canvas, negative if mirrored
    room = WHOLE / max(1.0, abs(measured))
    if window and abs(axis.length / measured - window) < room:
        scale = axis.length / window
        start = photo - at / scale  # the photo coordinate at the canvas's edge
        if abs(start - round(start)) < room:
            return scale, -round(start) * scale
    return line


def scale_of(axis: Axis, line: Line | None) -> float:
    """The scale that was measured, or that of a photo shown from end to end."""
    return abs(line[0]) if line else (axis.stop - axis.start) / axis.size


def guess(axis: Axis, scales: Sequence[float]) -> Line:
    """The likeliest line where little was seen: all of the photo, or a scale seen elsewhere."""
    extent = axis.stop - axis.start
    if axis.size < SMALLEST and extent > axis.size:
        raise NotAffine(
            f"{axis.size} photo pixels along an axis are too few to measure what is done to them"
        )
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
    best = int(np.argmin([w + 1e-3 * n for n, w in enumerate(wrong)]))
    if not len(axis.at) or wrong[best] > close:
        raise NotAffine(
            f"{extent} canvas pixels along an axis of {axis.size} photo pixels are too few to say "
            "what was done to the photo"
        )
    return tries[best]


def _misses(axis: Axis, scale: float, offset: float) -> float:
    if not len(axis.at):
        return 0.0
    # a pixel centre is the least a picture can show
    expected = ((axis.at - offset) / scale).clip(0.5, axis.size - 0.5)
    return float(np.sqrt(np.mean((axis.photo - expected) ** 2)))


def kept(axis: Axis, line: Line) -> tuple[float, float]:
    """The part of the photo along one axis that is on the canvas."""
    scale, offset = line
    ends = sorted(((axis.start - offset) / scale, (axis.stop - offset) / scale))
    near = 0.75 / abs(scale)  # a rim that is half padding counts as shown or not by a hair
    low = 0.0 if ends[0] < near else ends[0]
    high = float(axis.size) if ends[1] > axis.size - near else ends[1]
    return low, max(low, high)
