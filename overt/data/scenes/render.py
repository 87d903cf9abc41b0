"""Scenes as pixels: the image, and which pixels of it show each thing.

Only products, sums, roots and comparisons are used, no sine and no matrix product, so that the
pixels do not depend on how a machine rounds them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from overt.data.scenes.world import REACH, Background, Scene, Thing
from overt.errors import BadInput

PAINT = {
    "red": (224, 44, 44),
    "green": (40, 176, 62),
    "blue": (48, 84, 236),
    "yellow": (246, 222, 40),
    "purple": (158, 54, 206),
    "cyan": (60, 208, 220),
    "orange": (246, 136, 32),
    "white": (244, 244, 244),
    "gray": (128, 128, 128),
}
SMALLEST, LARGEST = 32, 1024
STRIPE = 0.0625  # one light and one dark stripe, in unit coordinates: four pixels of sixty-four
DARK = 0.36  # how bright a dark stripe is
SHADOW = 0.012  # the width of the shadow that sets a thing off against one of its own colour
STROKE = 0.014  # the width of a stroke of clutter
GRAIN = 64  # the grain is a field of 64 x 64 whatever the size of the image

Field = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Rendered:
    """An image with what it shows: the visible pixels of each thing, and the box around them."""

    image: NDArray[np.uint8]  # [h, w, 3]
    masks: NDArray[np.bool_]  # [n, h, w]; no two share a pixel
    boxes: NDArray[np.float32]  # [n, 4]: x0 y0 x1 y1 in pixels, the far edge outside
    owners: NDArray[np.int8]  # [h, w]: the thing each pixel shows, -1 for none


def render(scene: Scene, size: int) -> Rendered:
    """Draw a scene at size x size pixels; the same scene gives the same pixels, always."""
    check_size(size)
    canvas = _ground(scene.background, size)
    owner = np.full((size, size), -1, np.int8)
    for i, thing in enumerate(scene.things):
        _draw(canvas, owner, i, thing)
    masks = owner[None] == np.arange(len(scene.things), dtype=np.int8)[:, None, None]
    image = (canvas + np.float32(0.5)).clip(0, 255).astype(np.uint8)
    return Rendered(image, masks, boxes_of(masks), owner)


def check_size(size: int) -> None:
    """BadInput for a size at which scenes are not drawn."""
    if not SMALLEST <= size <= LARGEST:
        raise BadInput(f"a scene is drawn at {SMALLEST} to {LARGEST} pixels a side, not {size}")


def boxes_of(masks: NDArray[np.bool_]) -> NDArray[np.float32]:
    """The box around each mask, x0 y0 x1 y1; zeros for an empty one."""
    boxes = np.zeros((len(masks), 4), np.float32)
    for axis, low, high in ((1, 0, 2), (2, 1, 3)):
        line = np.asarray(masks.any(axis=axis))
        boxes[:, low] = line.argmax(axis=1)
        boxes[:, high] = line.shape[1] - line[:, ::-1].argmax(axis=1)
        boxes[~line.any(axis=1)] = 0
    return boxes


@lru_cache(maxsize=8)
def _centres(size: int) -> Field:
    """The unit coordinate of each pixel's centre along one side."""
    return ((np.arange(size) + 0.5) / size).astype(np.float32)


@lru_cache(maxsize=8)
def _stretch(size: int) -> tuple[NDArray[np.intp], NDArray[np.intp], Field]:
    """For each pixel of a line: its two neighbours in the grain, and the share of the second."""
    at = ((np.arange(size) + 0.5) * GRAIN / size - 0.5).clip(0, GRAIN - 1)
    left = np.floor(at).astype(np.intp)
    return left, np.minimum(left + 1, GRAIN - 1), (at - left).astype(np.float32)


@lru_cache(maxsize=8)
def _dots(size: int) -> tuple[Field, Field]:
    """Steps along a stroke, and offsets across it, dense enough to leave no gap."""
    along = np.linspace(0, 1, max(2, int(0.2 * size)), dtype=np.float32)
    return along, np.arange(max(1, round(STROKE * size)), dtype=np.float32) / np.float32(size)


def _ground(background: Background, size: int) -> Field:
    """The wave of two colours, the grain over it and the clutter on top: [h, w, 3]."""
    across_x, across_y, phase = background.wave
    unit = _centres(size)
    turn = (unit * across_x + phase)[None, :] + (unit * across_y)[:, None]
    turn = np.abs(turn - np.floor(turn) - np.float32(0.5)) * np.float32(2)
    near, far = np.array(background.near, np.float32), np.array(background.far, np.float32)
    canvas = turn[:, :, None] * (far - near) + near
    canvas += _grain(background, size)[:, :, None]
    _scatter(canvas, background)
    return canvas


def _grain(background: Background, size: int) -> Field:
    raw = np.random.default_rng(background.grain_seed).bytes(GRAIN * GRAIN)
    field = np.frombuffer(raw, np.uint8).reshape(GRAIN, GRAIN).astype(np.float32)
    field = (field - np.float32(127.5)) * np.float32(background.grain / 127.5)
    if size == GRAIN:
        return field
    low, high, share = _stretch(size)
    field = field[low] + (field[high] - field[low]) * share[:, None]
    return field[:, low] + (field[:, high] - field[:, low]) * share


def _scatter(canvas: Field, background: Background) -> None:
    """Draw all strokes at once, as dense rows of dots."""
    if not background.clutter:
        return
    size = len(canvas)
    strokes = np.array(background.clutter, np.float32)
    along, thick = _dots(size)
    x = strokes[:, 0, None] + strokes[:, 2, None] * along
    y = strokes[:, 1, None] + strokes[:, 3, None] * along
    column = ((x[:, :, None, None] + thick) * size).astype(np.intp).clip(0, size - 1)
    row = ((y[:, :, None, None] + thick[:, None]) * size).astype(np.intp).clip(0, size - 1)
    canvas[row, column] = strokes[:, None, None, None, 4:]


def _draw(canvas: Field, owner: NDArray[np.int8], i: int, thing: Thing) -> None:
    """Paint one thing with soft edges inside its bounding box, and note the pixels it now owns."""
    size = len(canvas)
    reach = thing.radius * REACH + SHADOW + 1 / size
    x0, x1 = max(0, int((thing.x - reach) * size)), min(size, int((thing.x + reach) * size) + 1)
    y0, y1 = max(0, int((thing.y - reach) * size)), min(size, int((thing.y + reach) * size) + 1)
    unit = _centres(size)
    dx, dy = unit[x0:x1] - np.float32(thing.x), unit[y0:y1] - np.float32(thing.y)
    outside = distance(thing.shape, dx[None, :], dy[:, None], thing.radius)
    inside = np.float32(0.5) - outside * np.float32(size)
    cover = inside.clip(0, 1)
    shadow = (inside + np.float32(SHADOW * size)).clip(0, 1) * np.float32(0.4)
    paint = np.array(PAINT[thing.color], np.float32) * np.float32(thing.shade)
    light = _texture(thing.texture, dx, dy)
    patch = canvas[y0:y1, x0:x1]
    colour = paint if light is None else light[:, :, None] * paint
    patch -= patch * shadow[:, :, None]
    patch += cover[:, :, None] * (colour - patch)
    owner[y0:y1, x0:x1][cover > 0.5] = i


def _texture(texture: str, dx: Field, dy: Field) -> Field | None:
    """How bright each pixel of a texture is, or None when it is plain."""
    if texture == "solid":
        return None
    rows = np.abs(dy / np.float32(STRIPE) - np.floor(dy / np.float32(STRIPE)) - np.float32(0.5))
    bright = (rows - np.float32(0.25)) * np.float32(5) + np.float32(0.5)  # 1 at the middle row
    bright = bright.clip(0, 1)[:, None] * np.ones_like(dx)
    if texture == "dotted":
        columns = np.abs(
            dx / np.float32(STRIPE) - np.floor(dx / np.float32(STRIPE)) - np.float32(0.5)
        )
        bright = np.minimum(bright, (columns[None, :] > 0.25).astype(np.float32))
    return np.float32(DARK) + np.float32(1 - DARK) * bright


def distance(shape: str, dx: Field, dy: Field, radius: float) -> Field:
    """How far each offset lies outside a shape of this radius, negative inside (near the edge)."""
    r = np.float32(radius)
    ax, ay = np.abs(dx), np.abs(dy)
    match shape:
        case "circle":
            return np.sqrt(dx * dx + dy * dy) - r
        case "square":
            return np.maximum(ax, ay) - np.float32(0.86) * r
        case "triangle":
            side = (ax - np.float32(0.56) * (dy + r)) * np.float32(0.8725)
            return np.maximum(side, dy - np.float32(0.78) * r)
        case "cross":
            arm = np.float32(0.34) * r
            return np.minimum(np.maximum(ax - arm, ay - r), np.maximum(ay - arm, ax - r))
        case "ring":
            middle, half = np.float32(0.75) * r, np.float32(0.25) * r
            return np.abs(np.sqrt(dx * dx + dy * dy) - middle) - half
        case "diamond":
            return (ax + ay - np.float32(REACH) * r) * np.float32(0.70710678)
        case "hexagon":
            slope = ax * np.float32(0.5) + ay * np.float32(0.8660254)
            return np.maximum(ax, slope) - np.float32(0.92) * r
        case _:
            raise BadInput(f"no shape {shape!r} to draw")
