"""Rendering of scenes: the image, and the pixels that show each thing.

Only products, sums, roots and comparisons are used, no sine and no matrix product, so that pixels
do not depend on the rounding of a machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from overt.data.scenes.world import REACH, Background, Scene, Thing
from overt.errors import UserError

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
DARK = 0.36  # brightness of a dark stripe
SHADOW = 0.012  # width of the shadow that separates a thing from one of its own colour
STROKE = 0.014  # width of a stroke of clutter
GRAIN = 64  # the grain is a field of 64 x 64 for every image size

Field = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class RenderedScene:
    """An image, the visible pixels of each thing, and the box around them."""

    image: NDArray[np.uint8]  # [h, w, 3]
    masks: NDArray[np.bool_]  # [n, h, w]; no two share a pixel
    boxes: NDArray[np.float32]  # [n, 4]: x0 y0 x1 y1 in pixels, the far edge outside
    owners: NDArray[np.int8]  # [h, w]: the thing each pixel shows, -1 for none


def render(scene: Scene, size: int) -> RenderedScene:
    """Render a scene at size x size pixels; the result is deterministic.

    Args:
        scene: The scene.
        size: The side of the image in pixels.

    Returns:
        The image, and the mask and box of each thing.

    Example:
        >>> from overt.data.scenes.world import random_scene
        >>> scene = random_scene("train", seed=0, index=0)
        >>> rendered = render(scene, 64)
        >>> rendered.image.shape, len(rendered.masks) == len(scene.things)
        ((64, 64, 3), True)
    """
    check_size(size)
    canvas = _draw_background(scene.background, size)
    owner = np.full((size, size), -1, np.int8)
    for i, thing in enumerate(scene.things):
        _draw(canvas, owner, i, thing)
    masks = owner[None] == np.arange(len(scene.things), dtype=np.int8)[:, None, None]
    image = (canvas + np.float32(0.5)).clip(0, 255).astype(np.uint8)
    return RenderedScene(image, masks, mask_boxes(masks), owner)


def check_size(size: int) -> None:
    """Raise `UserError` for an unsupported size."""
    if not SMALLEST <= size <= LARGEST:
        raise UserError(f"size must be {SMALLEST} to {LARGEST} pixels, got {size}.")


def mask_boxes(masks: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Return the box around each mask, x0 y0 x1 y1; zeros for an empty one."""
    boxes = np.zeros((len(masks), 4), np.float32)
    for axis, low, high in ((1, 0, 2), (2, 1, 3)):
        line = np.asarray(masks.any(axis=axis))
        boxes[:, low] = line.argmax(axis=1)
        boxes[:, high] = line.shape[1] - line[:, ::-1].argmax(axis=1)
        boxes[~line.any(axis=1)] = 0
    return boxes


@lru_cache(maxsize=8)
def _centres(size: int) -> Field:
    """Return the unit coordinate of each pixel's centre along one side."""
    return ((np.arange(size) + 0.5) / size).astype(np.float32)


@lru_cache(maxsize=8)
def _stretch(size: int) -> tuple[NDArray[np.intp], NDArray[np.intp], Field]:
    """Return for each pixel of a line its two neighbours in the grain, and the weight of the
    second.
    """
    at = ((np.arange(size) + 0.5) * GRAIN / size - 0.5).clip(0, GRAIN - 1)
    left = np.floor(at).astype(np.intp)
    return left, np.minimum(left + 1, GRAIN - 1), (at - left).astype(np.float32)


@lru_cache(maxsize=8)
def _dots(size: int) -> tuple[Field, Field]:
    """Return steps along a stroke, and offsets across it, dense enough to leave no gap."""
    along = np.linspace(0, 1, max(2, int(0.2 * size)), dtype=np.float32)
    return along, np.arange(max(1, round(STROKE * size)), dtype=np.float32) / np.float32(size)


def _draw_background(background: Background, size: int) -> Field:
    """Return the wave of two colours with grain and clutter: [h, w, 3]."""
    across_x, across_y, phase = background.wave
    unit = _centres(size)
    turn = (unit * across_x + phase)[None, :] + (unit * across_y)[:, None]
    turn = np.abs(turn - np.floor(turn) - np.float32(0.5)) * np.float32(2)
    near, far = np.array(background.near, np.float32), np.array(background.far, np.float32)
    canvas = turn[:, :, None] * (far - near) + near
    canvas += _grain(background, size)[:, :, None]
    _draw_clutter(canvas, background)
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


def _draw_clutter(canvas: Field, background: Background) -> None:
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
    """Paint one thing with soft edges inside its bounding box, and record the pixels it owns."""
    size = len(canvas)
    reach = thing.radius * REACH + SHADOW + 1 / size
    x0, x1 = max(0, int((thing.x - reach) * size)), min(size, int((thing.x + reach) * size) + 1)
    y0, y1 = max(0, int((thing.y - reach) * size)), min(size, int((thing.y + reach) * size) + 1)
    unit = _centres(size)
    dx, dy = unit[x0:x1] - np.float32(thing.x), unit[y0:y1] - np.float32(thing.y)
    outside = signed_distance(thing.shape, dx[None, :], dy[:, None], thing.radius)
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
    """Return the brightness of each pixel of a texture, or None for a solid one."""
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


def signed_distance(shape: str, dx: Field, dy: Field, radius: float) -> Field:
    """Return how far each offset is outside a shape of this radius; negative inside."""
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
            raise UserError(f"Unknown shape {shape!r}.")
