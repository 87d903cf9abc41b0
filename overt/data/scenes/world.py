"""The things of a scene, where they lie, and the interventions that change one of them.

Everything is in unit coordinates (x to the right, y down, both in 0..1), so that one scene can be
drawn at any size. A scene follows from (split, seed, index) alone; the split is part of the random
key, so that no training scene can ever be a test scene.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np

from overt.errors import BadInput

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
# One value an attribute that no word names: a thing changed to it leaves every description.
NEUTRAL = {"shape": "hexagon", "color": "gray", "size": "tiny", "texture": "dotted"}
RADII = {"tiny": 0.05, "small": 0.075, "medium": 0.11, "large": 0.155}
SPLITS = {"train": 0, "val": 1, "test": 2}
FEWEST, MOST = 4, 8

REACH = 1.1  # the tip of the furthest reaching shape (the diamond), in radii
EDGE = 0.01  # the least gap between a thing and the border
OVERLAP = 0.2  # how far a thing may overlap others, in sums of radii
TRIES = 24

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Thing:
    """One thing: four attributes as words, its centre, and how brightly it is lit."""

    shape: str
    color: str
    size: str
    texture: str
    x: float
    y: float
    shade: float = 1.0

    @property
    def radius(self) -> float:
        """The radius in unit coordinates, which follows from the size."""
        return RADII[self.size]


class Stroke(NamedTuple):
    """One stroke of clutter from (x, y) along (dx, dy); a speck when that is short."""

    x: float
    y: float
    dx: float
    dy: float
    red: int
    green: int
    blue: int


@dataclass(frozen=True, slots=True)
class Background:
    """Two colours that alternate in a slanted wave, grain, and clutter that belongs to no thing."""

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
    """Single draws from a numpy generator, taken in blocks because calls are slow."""

    def __init__(self, rng: np.random.Generator, block: int = 256) -> None:
        self.rng = rng
        self.block = block
        self._left: list[float] = []

    def random(self) -> float:
        """A number in [0, 1)."""
        if not self._left:
            self._left = self.rng.random(self.block).tolist()
        return self._left.pop()

    def uniform(self, low: float | int, high: float | int) -> float:
        """A number in [low, high)."""
        return low + (high - low) * self.random()

    def below(self, count: int) -> int:
        """A whole number in 0..count-1."""
        return int(self.random() * count)

    def pick(self, items: Sequence[Item]) -> Item:
        """One of the items, all equally likely."""
        return items[int(self.random() * len(items))]

    def sample(self, items: Sequence[Item], count: int) -> list[Item]:
        """`count` different items in random order."""
        pool = list(items)
        return [pool.pop(int(self.random() * len(pool))) for _ in range(count)]


def key(split: str, seed: int, index: int, *purpose: int) -> np.random.Generator:
    """The generator of one scene; another split, seed, index or purpose is another stream."""
    if split not in SPLITS:
        raise BadInput(f"no split {split!r} of scenes: choose one of {', '.join(SPLITS)}")
    if seed < 0 or index < 0:
        raise BadInput(f"seed {seed} and index {index} of a scene must not be negative")
    return np.random.default_rng([SPLITS[split], seed, index, *purpose])


def scene(split: str, seed: int, index: int) -> Scene:
    """A scene of 4 to 8 random things, without any question in mind."""
    dice = Dice(key(split, seed, index, 0))
    while True:
        count = FEWEST + dice.below(MOST - FEWEST + 1)
        kinds = [random_kind(dice) for _ in range(count)]
        spots = places(dice, [kind["size"] for kind in kinds])
        if spots is not None:
            things = tuple(put(dice, kind, spot) for kind, spot in zip(kinds, spots, strict=True))
            return Scene(split, seed, index, things, background(dice))


def random_kind(dice: Dice) -> dict[str, str]:
    """Every attribute drawn alone and evenly."""
    return {name: dice.pick(values) for name, values in VALUES.items()}


def put(dice: Dice, kind: dict[str, str], spot: tuple[float, float]) -> Thing:
    """A thing of this kind at this spot, lit at random."""
    return Thing(**kind, x=spot[0], y=spot[1], shade=dice.uniform(0.84, 1.0))


def background(dice: Dice) -> Background:
    """A muted two-coloured texture with 6 to 14 strokes and specks of any colour."""
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
    strokes = tuple(stroke(dice) for _ in range(6 + dice.below(9)))
    grain_seed = int(dice.random() * 2**48)
    return Background(near, far, wave, dice.uniform(8.0, 20.0), grain_seed, strokes)


def stroke(dice: Dice) -> Stroke:
    """A short stroke, or a speck one time in three."""
    long = 0.006 if dice.random() < 1 / 3 else dice.uniform(0.03, 0.12)
    slant, turn = dice.uniform(-1.0, 1.0), dice.random() < 0.5
    dx, dy = (long, long * slant) if turn else (long * slant, long)
    x, y = dice.uniform(0.01, 0.99), dice.uniform(0.01, 0.99)
    return Stroke(x, y, dx, dy, dice.below(256), dice.below(256), dice.below(256))


# --- where things may lie -------------------------------------------------------------------------


def places(
    dice: Dice,
    sizes: Sequence[str],
    apart: Sequence[tuple[int, int, int, float]] = (),
) -> list[tuple[float, float]] | None:
    """A spot for each thing, or None when there was no room.

    Things may overlap a little, as `fits` says, which keeps at least 55 % of each visible. `apart`
    holds (i, j, axis, gap): thing j lies further along the axis (0 for x, 1 for y) than thing i by
    at least the gap. The largest are placed first, where there is still room for them.
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


def fits(things: Sequence[Thing]) -> bool:
    """Whether all things lie inside the frame, and overlap no more than is allowed.

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
    """Between which x and which y thing j may lie; a partner not yet placed is left its room."""
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
    """Whether thing j may lie at (x, y); if so, its overlap with the others is added to `load`."""
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


# --- descriptions and interventions ---------------------------------------------------------------


def described(things: Sequence[Thing], **attributes: str) -> tuple[int, ...]:
    """The indices of the things that have all these attributes."""
    wanted = attributes.items()
    return tuple(
        i for i, thing in enumerate(things) if all(getattr(thing, n) == v for n, v in wanted)
    )


def without(scene: Scene, i: int) -> Scene:
    """The scene with thing i taken away; all else stays, to the pixel."""
    return replace(scene, things=scene.things[:i] + scene.things[i + 1 :])


def changed(scene: Scene, i: int, **attributes: str) -> Scene:
    """The scene with some attributes of thing i changed; all else stays, to the pixel."""
    new = replace(scene.things[i], **attributes)  # type: ignore[arg-type]
    return replace(scene, things=(*scene.things[:i], new, *scene.things[i + 1 :]))


def hard_negative(scene: Scene, rng: np.random.Generator) -> tuple[Scene, int, str]:
    """A scene that differs in exactly one attribute of one thing: (scene, which thing, attribute).

    The thing and the attribute are drawn evenly; a new size for which there is no room is not used.
    """
    dice = Dice(rng)
    while True:
        i, name = dice.below(len(scene.things)), dice.pick(ATTRIBUTES)
        old = getattr(scene.things[i], name)
        other = changed(scene, i, **{name: dice.pick([v for v in VALUES[name] if v != old])})
        if name != "size" or fits(other.things):
            return other, i, name
