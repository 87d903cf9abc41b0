"""Scenes of the synthetic world: things, their layout, and interventions on them.

Coordinates are in the unit square (x to the right, y down), so that a scene can be rendered at any
size. A scene follows from (split, seed, index) alone; the split is part of the random key, so that
no training scene can be a test scene.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np

from overt.errors import UserError

SHAPES = ("circle", "square", "triangle", "cross", "ring", "diamond")
COLORS = ("red", "green", "blue", "yellow", "purple", "cyan", "orange", "white")
SIZES = ("small", "medium", "large")
TEXTURES = ("solid", "striped")
VALUES: dict[str, tuple[str, ...]] = {
    "shape": SHAPES,
    "color": COLORS,
    "size": SIZES,
    "texture": TEXTURES,
}
ATTRIBUTES = tuple(VALUES)
# Values without a word: a thing changed to one no longer fits any description.
NEUTRAL = {"shape": "hexagon", "color": "gray", "size": "tiny", "texture": "dotted"}
RADII = {"tiny": 0.05, "small": 0.075, "medium": 0.11, "large": 0.155}
SPLITS = {"train": 0, "val": 1, "test": 2}
FEWEST, MOST = 4, 8

REACH = 1.1  # extent of the largest shape (the diamond), in radii
EDGE = 0.01  # smallest gap between a thing and the border
OVERLAP = 0.2  # largest overlap of a thing with others, in sums of radii
TRIES = 24

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Thing:
    """A thing: four attributes as words, its centre, and its brightness."""

    shape: str
    color: str
    size: str
    texture: str
    x: float
    y: float
    shade: float = 1.0

    @property
    def radius(self) -> float:
        """Radius in unit coordinates, which follows from the size."""
        return RADII[self.size]


class Stroke(NamedTuple):
    """A stroke of clutter from (x, y) along (dx, dy); a short one is a speck."""

    x: float
    y: float
    dx: float
    dy: float
    red: int
    green: int
    blue: int


@dataclass(frozen=True, slots=True)
class Background:
    """Two colours that alternate in a slanted wave, grain, and clutter."""

    near: tuple[float, float, float]
    far: tuple[float, float, float]
    wave: tuple[float, float, float]  # periods across x, across y, and the phase
    grain: float
    grain_seed: int
    clutter: tuple[Stroke, ...]


@dataclass(frozen=True, slots=True)
class Scene:
    """Things in drawing order (later ones occlude earlier ones) on a background."""

    split: str
    seed: int
    index: int
    things: tuple[Thing, ...]
    background: Background


class Dice:
    """Single random draws from a NumPy generator, buffered in blocks because calls are slow."""

    def __init__(self, rng: np.random.Generator, block: int = 256) -> None:
        self.rng = rng
        self.block = block
        self._left: list[float] = []

    def random(self) -> float:
        """Return a number in [0, 1)."""
        if not self._left:
            self._left = self.rng.random(self.block).tolist()
        return self._left.pop()

    def uniform(self, low: float | int, high: float | int) -> float:
        """Return a number in [low, high)."""
        return low + (high - low) * self.random()

    def below(self, count: int) -> int:
        """Return an integer in 0..count-1."""
        return int(self.random() * count)

    def pick(self, items: Sequence[Item]) -> Item:
        """Return one of the items, uniformly."""
        return items[int(self.random() * len(items))]

    def sample(self, items: Sequence[Item], count: int) -> list[Item]:
        """Return `count` different items in random order."""
        pool = list(items)
        return [pool.pop(int(self.random() * len(pool))) for _ in range(count)]


def scene_rng(split: str, seed: int, index: int, *purpose: int) -> np.random.Generator:
    """Return the random generator of a scene; each `purpose` has a stream of its own.

    Args:
        split: Train, val or test.
        seed: The seed of the scenes.
        index: The index of the scene.
        purpose: Numbers of a stream.

    Returns:
        The generator.

    Raises:
        UserError: The split is unknown, or the seed or index is negative.

    Example:
        >>> one, same = scene_rng("train", 0, 7), scene_rng("train", 0, 7)
        >>> int(one.integers(100)) == int(same.integers(100))
        True
    """
    if split not in SPLITS:
        raise UserError(f"Unknown split {split!r} of scenes: choose from {', '.join(SPLITS)}.")
    if seed < 0 or index < 0:
        raise UserError(f"seed and index of a scene must not be negative, got {seed} and {index}.")
    return np.random.default_rng([SPLITS[split], seed, index, *purpose])


def random_scene(split: str, seed: int, index: int) -> Scene:
    """Generate a scene of 4 to 8 random things, independent of any question.

    Args:
        split: Train, val or test.
        seed: The seed of the scenes.
        index: The index of the scene.

    Returns:
        The scene.

    Example:
        >>> 4 <= len(random_scene("train", seed=0, index=0).things) <= 8
        True
    """
    dice = Dice(scene_rng(split, seed, index, 0))
    while True:
        count = FEWEST + dice.below(MOST - FEWEST + 1)
        kinds = [random_attributes(dice) for _ in range(count)]
        spots = place_things(dice, [kind["size"] for kind in kinds])
        if spots is not None:
            things = tuple(
                make_thing(dice, kind, spot) for kind, spot in zip(kinds, spots, strict=True)
            )
            return Scene(split, seed, index, things, random_background(dice))


def random_attributes(dice: Dice) -> dict[str, str]:
    """Draw every attribute independently and uniformly."""
    return {name: dice.pick(values) for name, values in VALUES.items()}


def make_thing(dice: Dice, kind: dict[str, str], spot: tuple[float, float]) -> Thing:
    """Return a thing with these attributes at this position, with random brightness."""
    return Thing(**kind, x=spot[0], y=spot[1], shade=dice.uniform(0.84, 1.0))


def random_background(dice: Dice) -> Background:
    """Draw a muted two-coloured texture with 6 to 14 strokes and specks of any colour."""
    level = dice.uniform(45.0, 115.0)
    near, far = (
        (
            level + dice.uniform(-22.0, 22.0),
            level + dice.uniform(-22.0, 22.0),
            level + dice.uniform(-22.0, 22.0),
        )
        for _ in range(2)
    )
    wave = (dice.uniform(-6.0, 6.0), dice.uniform(-6.0, 6.0), dice.random())
    strokes = tuple(random_stroke(dice) for _ in range(6 + dice.below(9)))
    grain_seed = int(dice.random() * 2**48)
    return Background(near, far, wave, dice.uniform(8.0, 20.0), grain_seed, strokes)


def random_stroke(dice: Dice) -> Stroke:
    """Draw a short stroke, or a speck one time in three."""
    long = 0.006 if dice.random() < 1 / 3 else dice.uniform(0.03, 0.12)
    slant, turn = dice.uniform(-1.0, 1.0), dice.random() < 0.5
    dx, dy = (long, long * slant) if turn else (long * slant, long)
    x, y = dice.uniform(0.01, 0.99), dice.uniform(0.01, 0.99)
    return Stroke(x, y, dx, dy, dice.below(256), dice.below(256), dice.below(256))


# --- layout -------------------------------------------------------------------------


def place_things(
    dice: Dice,
    sizes: Sequence[str],
    apart: Sequence[tuple[int, int, int, float]] = (),
) -> list[tuple[float, float]] | None:
    """Return a position for each thing, or None if there was no room.

    Things may overlap a little, see `is_valid_layout`, which keeps at least 55 % of each visible.
    `apart` holds (i, j, axis, gap): thing j is further along the axis (0 for x, 1 for y) than thing
    i by at least the gap. The largest things are placed first, while there is room for them.
    """
    lows = [REACH * RADII[size] + EDGE for size in sizes]
    spots: list[tuple[float, float]] = [(-9.0, -9.0)] * len(sizes)
    placed: list[int] = []
    load = [0.0] * len(sizes)
    for j in sorted(range(len(sizes)), key=lambda j: -lows[j]):
        x0, x1, y0, y1 = _range(j, lows, spots, apart)
        if x0 >= x1 or y0 >= y1:
            return None
        for _ in range(TRIES):
            x, y = dice.uniform(x0, x1), dice.uniform(y0, y1)
            if _add_load(x, y, RADII[sizes[j]], j, placed, spots, sizes, load):
                spots[j] = (x, y)
                placed.append(j)
                break
        else:
            return None
    return spots


def is_valid_layout(things: Sequence[Thing]) -> bool:
    """Return whether all things are inside the frame and overlap no more than allowed.

    Two things overlap by 1 - distance / sum of radii; for each thing this may add up to 0.2.
    """
    spots, sizes = [(thing.x, thing.y) for thing in things], [thing.size for thing in things]
    load = [0.0] * len(things)
    for j, thing in enumerate(things):
        low = REACH * thing.radius + EDGE - 1e-9
        if not (low <= thing.x <= 1 - low and low <= thing.y <= 1 - low):
            return False
        if not _add_load(thing.x, thing.y, thing.radius, j, range(j), spots, sizes, load):
            return False
    return True


def _range(
    j: int,
    lows: Sequence[float],
    spots: Sequence[tuple[float, float]],
    apart: Sequence[tuple[int, int, int, float]],
) -> tuple[float, float, float, float]:
    """Return the limits of x and y for thing j, leaving room for partners not yet placed."""
    ends = [[lows[j], 1 - lows[j]], [lows[j], 1 - lows[j]]]
    for first, second, axis, gap in apart:
        if j == first:
            there = spots[second][axis]
            ends[axis][1] = min(ends[axis][1], (there if there > 0 else 1 - lows[second]) - gap)
        elif j == second:
            there = spots[first][axis]
            ends[axis][0] = max(ends[axis][0], (there if there > 0 else lows[first]) + gap)
    return ends[0][0], ends[0][1], ends[1][0], ends[1][1]


def _add_load(
    x: float,
    y: float,
    radius: float,
    j: int,
    others: Sequence[int],
    spots: Sequence[tuple[float, float]],
    sizes: Sequence[str],
    load: list[float],
) -> bool:
    """Return whether thing j fits at (x, y); if so, add its overlaps to `load`."""
    total, hits = 0.0, []
    for i in others:
        dx, dy = x - spots[i][0], y - spots[i][1]
        square, reach = dx * dx + dy * dy, radius + RADII[sizes[i]]
        if square < reach * reach:
            overlap = 1 - square**0.5 / reach
            total += overlap
            if total > OVERLAP or load[i] + overlap > OVERLAP:
                return False
            hits.append((i, overlap))
    load[j] = total
    for i, overlap in hits:
        load[i] += overlap
    return True


# --- interventions --------------------------------------------------------------------------------


def remove_thing(scene: Scene, i: int) -> Scene:
    """Return the scene without thing i; everything else stays the same.

    Args:
        scene: The scene.
        i: The index of the thing.

    Returns:
        The changed scene.

    Example:
        >>> scene = random_scene("train", seed=0, index=0)
        >>> len(scene.things) - len(remove_thing(scene, 0).things)
        1
    """
    return replace(scene, things=scene.things[:i] + scene.things[i + 1 :])


def change_thing(scene: Scene, i: int, **attributes: str) -> Scene:
    """Return the scene with some attributes of thing i changed; everything else stays the same."""
    new = replace(scene.things[i], **attributes)  # type: ignore[arg-type]
    return replace(scene, things=(*scene.things[:i], new, *scene.things[i + 1 :]))


def hard_negative(scene: Scene, rng: np.random.Generator) -> tuple[Scene, int, str]:
    """Return a scene that differs in one attribute of one thing: (scene, index, attribute).

    The thing and the attribute are drawn uniformly; a new size for which there is no room is not
    used.

    Args:
        scene: The scene.
        rng: The random generator.

    Returns:
        The changed scene, the index of the changed thing, and the name of the attribute.

    Example:
        >>> scene = random_scene("train", seed=0, index=0)
        >>> other, i, attribute = hard_negative(scene, np.random.default_rng(0))
        >>> getattr(other.things[i], attribute) != getattr(scene.things[i], attribute)
        True
    """
    dice = Dice(rng)
    while True:
        i, name = dice.below(len(scene.things)), dice.pick(ATTRIBUTES)
        old = getattr(scene.things[i], name)
        other = change_thing(scene, i, **{name: dice.pick([v for v in VALUES[name] if v != old])})
        if name != "size" or is_valid_layout(other.things):
            return other, i, name
