"""Regions a detector might propose: the true boxes, boxes a little off, and boxes of nothing.

They come shuffled, with their overlap with every thing, so that which region is right is known
exactly and where it stands tells nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from overt.data.scenes.world import Dice
from overt.errors import BadInput

COUNT = 16
OFF = (0.3, 0.8)  # how much a box that is a little off overlaps with the true one
NOTHING = 0.2  # how little a box of nothing overlaps with any true one
TRIES = 50

Boxes = NDArray[np.float32]


class Source(StrEnum):
    """How a proposal came about."""

    TRUE = "true"
    OFF = "off"
    BACKGROUND = "background"


@dataclass(frozen=True, slots=True)
class Proposals:
    """m boxes, their sources, the thing each is of (-1: of none), and the overlap with all n."""

    boxes: Boxes  # [m, 4]: x0 y0 x1 y1 in pixels
    sources: tuple[Source, ...]
    things: NDArray[np.int64]  # [m]
    overlap: NDArray[np.float32]  # [m, n]

    def place(self, thing: int) -> int:
        """The index of the true box of a thing."""
        return next(
            row
            for row, source in enumerate(self.sources)
            if source is Source.TRUE and self.things[row] == thing
        )


# --- which of them are candidates

Keep = Callable[[Proposals], NDArray[np.bool_]]


def every(proposals: Proposals) -> NDArray[np.bool_]:
    """All of them: true boxes among others."""
    return np.ones(len(proposals.boxes), dtype=bool)


def only_true(proposals: Proposals) -> NDArray[np.bool_]:
    """The true boxes alone, as if all things had been annotated."""
    return np.array([source is Source.TRUE for source in proposals.sources])


def only_detected(proposals: Proposals) -> NDArray[np.bool_]:
    """All but the true boxes: what a detector finds is never quite right, and some is missing."""
    return ~only_true(proposals)


# --- making them


def propose(boxes: Boxes, size: int, rng: np.random.Generator, count: int = COUNT) -> Proposals:
    """`count` shuffled proposals for the true boxes of an image of size x size pixels.

    Besides the true boxes, half of the room goes to boxes that are a little off, at most one a
    thing, and the rest to boxes that show next to nothing of any thing.
    """
    if not len(boxes) <= count:
        raise BadInput(f"{count} proposals cannot hold the {len(boxes)} true boxes; ask for more")
    dice = Dice(rng)
    spare = count - len(boxes)
    off = dice.sample(range(len(boxes)), min(len(boxes), (spare + 1) // 2))
    made = [*boxes, *(_off(boxes[i], size, dice) for i in off)]
    made += [_nothing(boxes, size, dice) for _ in range(count - len(made))]
    sources = [Source.TRUE] * len(boxes) + [Source.OFF] * len(off)
    sources += [Source.BACKGROUND] * (count - len(sources))
    things = [*range(len(boxes)), *off, *([-1] * (count - len(boxes) - len(off)))]
    order = dice.sample(range(count), count)
    shuffled = np.array([made[n] for n in order], np.float32).reshape(count, 4)
    return Proposals(
        shuffled,
        tuple(sources[n] for n in order),
        np.array([things[n] for n in order], np.int64),
        overlaps(shuffled, boxes),
    )


def overlaps(ours: Boxes, theirs: Boxes) -> NDArray[np.float32]:
    """Intersection over union of each of our boxes with each of theirs; 0 where both are empty."""
    a, b = ours[:, None].astype(np.float64), theirs[None].astype(np.float64)
    low, high = np.maximum(a[..., :2], b[..., :2]), np.minimum(a[..., 2:], b[..., 2:])
    shared = (high - low).clip(0).prod(axis=-1)
    either = _area(a) + _area(b) - shared
    return (shared / np.where(either > 0, either, 1)).astype(np.float32)


def _area(boxes: NDArray[np.float64]) -> NDArray[np.float64]:
    area: NDArray[np.float64] = (boxes[..., 2:] - boxes[..., :2]).clip(0).prod(axis=-1)
    return area


def _off(box: Boxes, size: int, dice: Dice) -> Boxes:
    """A box moved and stretched until its overlap with the true one lies in the range `OFF`."""
    low, high = OFF
    side = box[2:] - box[:2]
    while True:
        moved = box + np.tile(side, 2) * [dice.uniform(-0.35, 0.35) for _ in range(4)]
        moved = moved.clip(0, size).astype(np.float32)
        if low <= overlaps(moved[None], box[None])[0, 0] <= high:
            return moved


def _nothing(boxes: Boxes, size: int, dice: Dice) -> Boxes:
    """A box of the size of a thing that overlaps with none; the least overlapping where all do."""
    best, least = np.zeros(4, np.float32), 2.0
    for _ in range(TRIES):
        wide, tall = dice.uniform(0.12, 0.3) * size, dice.uniform(0.12, 0.3) * size
        x, y = dice.uniform(0.0, size - wide), dice.uniform(0.0, size - tall)
        box = np.array([x, y, x + wide, y + tall], np.float32)
        found = float(overlaps(box[None], boxes).max(initial=0.0))
        if found < least:
            best, least = box, found
        if least < NOTHING:
            break
    return best
