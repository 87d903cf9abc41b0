"""Synthetic region proposals: the true boxes, perturbed boxes, and boxes of background.

They are shuffled and come with their IoU with every thing, so that the right region is known
exactly and its index is uninformative.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from overt.data.scenes.world import Dice
from overt.errors import UserError

COUNT = 16
PERTURBED_IOU = (0.3, 0.8)  # IoU of a perturbed box with the true one
MAX_BACKGROUND_IOU = 0.2  # largest IoU of a background box with any true one
TRIES = 50

Boxes = NDArray[np.float32]


class ProposalSource(StrEnum):
    """Origin of a proposal."""

    TRUE = "true"
    OFF = "off"
    BACKGROUND = "background"


@dataclass(frozen=True, slots=True)
class Proposals:
    """m boxes, their sources, the thing of each (-1: none), and the IoU with all n things."""

    boxes: Boxes  # [m, 4]: x0 y0 x1 y1 in pixels
    sources: tuple[ProposalSource, ...]
    things: NDArray[np.int64]  # [m]
    overlap: NDArray[np.float32]  # [m, n]

    def true_box(self, thing: int) -> int:
        """Return the index of the true box of a thing."""
        return next(
            row
            for row, source in enumerate(self.sources)
            if source is ProposalSource.TRUE and self.things[row] == thing
        )


# --- candidates

ProposalFilter = Callable[[Proposals], NDArray[np.bool_]]


def all_proposals(proposals: Proposals) -> NDArray[np.bool_]:
    """Keep all proposals."""
    return np.ones(len(proposals.boxes), dtype=bool)


def only_true(proposals: Proposals) -> NDArray[np.bool_]:
    """Keep the true boxes, as if all things had been annotated."""
    return np.array([source is ProposalSource.TRUE for source in proposals.sources])


def only_detected(proposals: Proposals) -> NDArray[np.bool_]:
    """Keep all but the true boxes, like an imperfect detector."""
    return ~only_true(proposals)


# --- generation


def make_proposals(
    boxes: Boxes, size: int, rng: np.random.Generator, count: int = COUNT
) -> Proposals:
    """Return `count` shuffled proposals for the true boxes of an image of size x size pixels.

    Besides the true boxes, half of the rest are perturbed boxes, at most one per thing, and the
    others are boxes of background.
    """
    if not len(boxes) <= count:
        raise UserError(
            f"count must be at least {len(boxes)}, the number of true boxes, got {count}."
        )
    dice = Dice(rng)
    spare = count - len(boxes)
    off = dice.sample(range(len(boxes)), min(len(boxes), (spare + 1) // 2))
    made = [*boxes, *(_perturbed_box(boxes[i], size, dice) for i in off)]
    made += [_background_box(boxes, size, dice) for _ in range(count - len(made))]
    sources = [ProposalSource.TRUE] * len(boxes) + [ProposalSource.OFF] * len(off)
    sources += [ProposalSource.BACKGROUND] * (count - len(sources))
    things = [*range(len(boxes)), *off, *([-1] * (count - len(boxes) - len(off)))]
    order = dice.sample(range(count), count)
    shuffled = np.array([made[n] for n in order], np.float32).reshape(count, 4)
    return Proposals(
        shuffled,
        tuple(sources[n] for n in order),
        np.array([things[n] for n in order], np.int64),
        box_iou(shuffled, boxes),
    )


def box_iou(ours: Boxes, theirs: Boxes) -> NDArray[np.float32]:
    """Return the IoU of each of our boxes with each of theirs; 0 where both are empty."""
    a, b = ours[:, None].astype(np.float64), theirs[None].astype(np.float64)
    low, high = np.maximum(a[..., :2], b[..., :2]), np.minimum(a[..., 2:], b[..., 2:])
    shared = (high - low).clip(0).prod(axis=-1)
    either = _area(a) + _area(b) - shared
    return (shared / np.where(either > 0, either, 1)).astype(np.float32)


def _area(boxes: NDArray[np.float64]) -> NDArray[np.float64]:
    area: NDArray[np.float64] = (boxes[..., 2:] - boxes[..., :2]).clip(0).prod(axis=-1)
    return area


def _perturbed_box(box: Boxes, size: int, dice: Dice) -> Boxes:
    """Move and stretch a box until its IoU with the true one is in `PERTURBED_IOU`."""
    low, high = PERTURBED_IOU
    side = box[2:] - box[:2]
    while True:
        moved = box + np.tile(side, 2) * [dice.uniform(-0.35, 0.35) for _ in range(4)]
        moved = moved.clip(0, size).astype(np.float32)
        if low <= box_iou(moved[None], box[None])[0, 0] <= high:
            return moved


def _background_box(boxes: Boxes, size: int, dice: Dice) -> Boxes:
    """Draw a box of the size of a thing with a small IoU with all things, if possible."""
    best, least = np.zeros(4, np.float32), 2.0
    for _ in range(TRIES):
        wide, tall = dice.uniform(0.12, 0.3) * size, dice.uniform(0.12, 0.3) * size
        x, y = dice.uniform(0.0, size - wide), dice.uniform(0.0, size - tall)
        box = np.array([x, y, x + wide, y + tall], np.float32)
        found = float(box_iou(box[None], boxes).max(initial=0.0))
        if found < least:
            best, least = box, found
        if least < MAX_BACKGROUND_IOU:
            break
    return best
