"""Test images whose brightness encodes pixel positions, and their decoding.

The ramps have 8 bits, as images do. Each also rises a little along the other axis, so that rounding
differs from row to row and averages out.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, UInt8

Size = tuple[int, int]
Photo = UInt8[np.ndarray, "_ _ 3"]
Window = tuple[int, int, int, int]

DARK, BRIGHT = 30.0, 220.0
TILT = 0.125  # rise of a ramp along the other axis, relative to its own rise
RISE = (BRIGHT - DARK) / (1 + TILT)
GRAIN = 8.0  # grey levels of noise, uniform in each row and column


class NotAffineError(ValueError):
    """The transform does more to an image than scale, crop, pad and flip it."""


class ImageTooSmallError(NotAffineError):
    """The image has too few pixels to measure the transform."""


def dark_image(size: Size) -> Photo:
    """Return an image of one low value."""
    return np.full((*size, 3), int(DARK), np.uint8)


def bright_image(size: Size) -> Photo:
    """Return an image of one high value."""
    return np.full((*size, 3), int(BRIGHT), np.uint8)


@dataclass(frozen=True)
class RampImages:
    """Two images with a vertical and a horizontal ramp in a window, constant outside.

    `window` is (y0, x0, y1, x1) in whole pixels. The rise per pixel is a whole number of grey
    levels if possible, so that nothing is rounded; else the rounding is spread evenly.
    """

    size: Size
    window: Window

    @property
    def along(self) -> tuple[float, float]:
        """Grey levels per pixel of the vertical and the horizontal ramp."""
        return self._levels(RISE)

    @property
    def aside(self) -> tuple[float, float]:
        """Grey levels per pixel of the tilt along y and x."""
        return self._levels(RISE * TILT)

    def _levels(self, rise: float) -> tuple[float, float]:
        y0, x0, y1, x1 = self.window
        levels = (rise / max(1, y1 - y0 - 1), rise / max(1, x1 - x0 - 1))
        # A whole number of levels per pixel needs no rounding to 8 bits.
        return tuple(float(int(n)) if n >= 1 else n for n in levels)  # type: ignore[return-value]

    def picture(self, axis: int) -> Photo:
        """Return the ramp along `axis`, 0 for vertical."""
        y0, x0, y1, x1 = self.window
        rise = (self.along[0], self.aside[1]) if axis == 0 else (self.aside[0], self.along[1])
        y = rise[0] * (np.arange(self.size[0]).clip(y0, y1 - 1) - y0)
        x = rise[1] * (np.arange(self.size[1]).clip(x0, x1 - 1) - x0)
        level = np.add.outer(DARK + y, x, dtype=np.float32)
        if min(self.along) < 1:
            # else interpolation between equal or adjacent levels would be rounded to one of them
            level += GRAIN * (_low_discrepancy(self.size, 0.4656, 0.6823278) - 0.5)
        # dither: rounding thresholds are spread evenly over rows and columns
        # The steps are powers of 1 / plastic number (the R2 sequence), and above of 1 / 1.46557, so
        # the two patterns are unrelated.
        level += _low_discrepancy(self.size, 0.7548776662, 0.5698402910)
        return level.astype(np.uint8)[..., None].repeat(3, axis=2)

    def points(
        self, down: Float[np.ndarray, "y x"], across: Float[np.ndarray, "y x"]
    ) -> Float[np.ndarray, "2 y x"]:
        """Return the image points with levels `down` and `across` above dark in the two ramps."""
        (gy, gx), (ty, tx) = self.along, self.aside
        # Solves down = gy y + tx x, across = ty y + gx x; a pixel is measured at its centre.
        both = gy * gx - ty * tx
        y, x = (gx * down - tx * across) / both, (gy * across - ty * down) / both
        return np.stack([y + self.window[0] + 0.5, x + self.window[1] + 0.5])


def _low_discrepancy(size: Size, down: float, across: float) -> Float[np.ndarray, "y x"]:
    """Numbers from 0 to 1, evenly distributed along every row and column."""
    y, x = np.arange(size[0]) * down % 1, np.arange(size[1]) * across % 1
    both = np.add.outer(y, x, dtype=np.float32)
    both -= both >= 1
    return both


def decode_canvas(
    ramps: RampImages,
    low: Float[np.ndarray, "c y x"],
    high: Float[np.ndarray, "c y x"],
    down: Float[np.ndarray, "c y x"],
    across: Float[np.ndarray, "c y x"],
) -> "DecodedCanvas":
    """Decode the image point of each canvas pixel, independent of changes of the values."""
    gain = high - low
    power = (gain**2).sum(axis=0)
    if not power.any():
        return DecodedCanvas(ramps, np.full((2, *power.shape), np.nan), (slice(0, 0), slice(0, 0)))
    # the gain is constant over the image, 0 in padding, and in between at the border
    typical = np.median(np.sqrt(power[power > power.max() / 4]))
    level = np.sqrt(power) / typical
    shown = level > 0.5
    window = (_extent(shown.any(axis=1)), _extent(shown.any(axis=0)))
    if not shown[window].all():
        raise NotAffineError("the visible image is not a rectangle: it was rotated or warped")
    sure = np.abs(level - 1) < 0.02
    # Least squares over the channels: the way from dark to bright, whatever the normalisation.
    levels = [
        (gain * (ramped - low)).sum(axis=0) / np.where(sure, power, 1) * (BRIGHT - DARK)
        for ramped in (down, across)
    ]
    return DecodedCanvas(ramps, np.where(sure, ramps.points(*levels), np.nan), window)


def _extent(shown: Bool[np.ndarray, " n"]) -> slice:
    places = np.flatnonzero(shown)
    return slice(int(places[0]), int(places[-1]) + 1)


@dataclass(frozen=True)
class DecodedCanvas:
    """The image point (y, x) of each canvas pixel, NaN if uncertain.

    `window` is the rows and columns of the canvas that show the image.
    """

    ramps: RampImages
    points: Float[np.ndarray, "2 y x"]
    window: tuple[slice, slice]

    @property
    def area(self) -> int:
        """Number of canvas pixels that show the image."""
        down, across = self.window
        return (down.stop - down.start) * (across.stop - across.start)
