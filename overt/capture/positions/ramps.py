"""Test pictures whose brightness says where a pixel stands, and how to read them again.

The ramps have 8 bits, as photos do. Each rises a little across the other axis too, so that rounding
differs from row to row and averages out.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, UInt8

Size = tuple[int, int]
Photo = UInt8[np.ndarray, "_ _ 3"]
Window = tuple[int, int, int, int]

DARK, BRIGHT = 30.0, 220.0
TILT = 0.125  # how far a ramp rises across the other axis, as a share of its own rise
RISE = (BRIGHT - DARK) / (1 + TILT)
GRAIN = 8.0  # levels of noise, even in each row and column


class NotAffine(ValueError):
    """A transform that does more to a photo than stretch, cut, pad and mirror it."""


class TooSmall(NotAffine):
    """A photo of so few pixels that what a transform does to it cannot be told."""


def dark(size: Size) -> Photo:
    """A picture of one low value."""
    return np.full((*size, 3), int(DARK), np.uint8)


def bright(size: Size) -> Photo:
    """A picture of one high value."""
    return np.full((*size, 3), int(BRIGHT), np.uint8)


@dataclass(frozen=True)
class Ramps:
    """Two pictures that rise down and across a window of the photo, and stay level around it.

    `window` is (y0, x0, y1, x1) in whole pixels. Levels a pixel are whole where there is room for
    that, so that nothing is rounded; elsewhere the rounding is spread evenly.
    """

    size: Size
    window: Window

    @property
    def along(self) -> tuple[float, float]:
        """How many levels a picture rises with each pixel, down and across."""
        return self._levels(RISE)

    @property
    def aside(self) -> tuple[float, float]:
        """How many levels the other picture rises with each pixel, down and across."""
        return self._levels(RISE * TILT)

    def _levels(self, rise: float) -> tuple[float, float]:
        y0, x0, y1, x1 = self.window
        levels = (rise / max(1, y1 - y0 - 1), rise / max(1, x1 - x0 - 1))
        return tuple(float(int(n)) if n >= 1 else n for n in levels)  # type: ignore[return-value]

    def picture(self, axis: int) -> Photo:
        """The picture that rises along `axis`, 0 for down."""
        y0, x0, y1, x1 = self.window
        rise = (self.along[0], self.aside[1]) if axis == 0 else (self.aside[0], self.along[1])
        y = rise[0] * (np.arange(self.size[0]).clip(y0, y1 - 1) - y0)
        x = rise[1] * (np.arange(self.size[1]).clip(x0, x1 - 1) - x0)
        level = np.add.outer(DARK + y, x, dtype=np.float32)
        if min(self.along) < 1:
            # neighbours that differ by one level or none would be rounded to the nearest of them
            level += GRAIN * (_spread(self.size, 0.4656, 0.6823278) - 0.5)
        # thresholds spread evenly over rows and columns: no band of pixels is rounded one way
        level += _spread(self.size, 0.7548776662, 0.5698402910)
        return level.astype(np.uint8)[..., None].repeat(3, axis=2)

    def points(
        self, down: Float[np.ndarray, "y x"], across: Float[np.ndarray, "y x"]
    ) -> Float[np.ndarray, "2 y x"]:
        """The photo points whose levels above dark are `down` and `across` in the two pictures."""
        (gy, gx), (ty, tx) = self.along, self.aside
        both = gy * gx - ty * tx
        y, x = (gx * down - tx * across) / both, (gy * across - ty * down) / both
        return np.stack([y + self.window[0] + 0.5, x + self.window[1] + 0.5])


def _spread(size: Size, down: float, across: float) -> Float[np.ndarray, "y x"]:
    """Numbers from 0 to 1, spread evenly along every row and every column."""
    y, x = np.arange(size[0]) * down % 1, np.arange(size[1]) * across % 1
    both = np.add.outer(y, x, dtype=np.float32)
    both -= both >= 1
    return both


def decode(
    ramps: Ramps,
    low: Float[np.ndarray, "c y x"],
    high: Float[np.ndarray, "c y x"],
    down: Float[np.ndarray, "c y x"],
    across: Float[np.ndarray, "c y x"],
) -> "Decoded":
    """Which photo point each canvas pixel shows, whatever was done to the values."""
    gain = high - low
    power = (gain**2).sum(axis=0)
    if not power.any():
        return Decoded(ramps, np.full((2, *power.shape), np.nan), (slice(0, 0), slice(0, 0)))
    # the gain of a channel is one number; padding has none, and a rim half in the padding has half
    typical = np.median(np.sqrt(power[power > power.max() / 4]))
    level = np.sqrt(power) / typical
    shown = level > 0.5
    window = (_extent(shown.any(axis=1)), _extent(shown.any(axis=0)))
    if not shown[window].all():
        raise NotAffine("what is shown of the photo is not a rectangle, so it was turned or warped")
    sure = np.abs(level - 1) < 0.02
    levels = [
        (gain * (ramped - low)).sum(axis=0) / np.where(sure, power, 1) * (BRIGHT - DARK)
        for ramped in (down, across)
    ]
    return Decoded(ramps, np.where(sure, ramps.points(*levels), np.nan), window)


def _extent(shown: Bool[np.ndarray, " n"]) -> slice:
    places = np.flatnonzero(shown)
    return slice(int(places[0]), int(places[-1]) + 1)


@dataclass(frozen=True)
class Decoded:
    """The photo point (y, x) under each canvas pixel, NaN where that is not sure.

    `window` is the rows and the columns of the canvas that show some of the photo.
    """

    ramps: Ramps
    points: Float[np.ndarray, "2 y x"]
    window: tuple[slice, slice]

    @property
    def area(self) -> int:
        """Canvas pixels that show some of the photo."""
        down, across = self.window
        return (down.stop - down.start) * (across.stop - across.start)
