"""Scenes to classify: the class is that of the largest thing, whatever else lies about.

The deciding pixels are known: change the shape of the largest thing and the class changes; change
or take away any other thing and it does not.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor

from overt.attention import AttentionMap, grid
from overt.data.batch import Batch
from overt.data.scenes.render import check_size, render
from overt.data.scenes.views import (
    PROBES,
    Kept,
    check,
    even,
    fingerprint,
    pictures,
    room_for,
    rows,
)
from overt.data.scenes.world import (
    SHAPES,
    TEXTURES,
    VALUES,
    Dice,
    Scene,
    Thing,
    background,
    key,
    places,
    put,
)
from overt.errors import BadInput
from overt.geometry import PixelGeometry

STREAM, CLASS = 20, 21  # purposes in `world.key`
TEXTURED = tuple(f"{texture} {shape}" for shape in SHAPES for texture in TEXTURES)
FEWEST, MOST = 3, 6  # distractors
LESSER = ("tiny", "small", "medium")  # sizes of distractors: less than large


def dominant(things: Sequence[Thing]) -> int:
    """The index of the largest thing; BadInput where there is not just one."""
    largest = max(thing.radius for thing in things)
    found = [i for i, thing in enumerate(things) if thing.radius == largest]
    if len(found) != 1:
        raise BadInput(f"{len(found)} things are the largest; one must dominate")
    return found[0]


def class_of(scene: Scene, classes: Sequence[str] = SHAPES) -> int | None:
    """The class of a scene: that of its largest thing; None where that is of no class."""
    thing = scene.things[dominant(scene.things)]
    words = {thing.shape, thing.texture}
    return next((n for n, name in enumerate(classes) if set(name.split()) <= words), None)


def check_classes(classes: Sequence[str]) -> None:
    """BadInput unless these are two or more of `SHAPES`, or two or more of `TEXTURED`."""
    known = [set(classes) <= set(names) for names in (SHAPES, TEXTURED)]
    if len(set(classes)) < 2 or len(set(classes)) != len(classes) or not any(known):
        raise BadInput(
            f"classes are two or more of {', '.join(SHAPES)}, or of these with a texture each "
            f"({TEXTURED[0]!r}), not {list(classes)}"
        )


def dominant_scene(split: str, seed: int, index: int, classes: Sequence[str] = SHAPES) -> Scene:
    """A scene with one large thing over 3 to 6 lesser ones of other shapes.

    The large thing is drawn last, so that all of it is seen. Colours tell nothing; nor does the
    texture, where it is not part of the class. Classes are even.
    """
    check_classes(classes)
    wanted = classes[even(len(classes), split, seed, index, CLASS)].split()
    dice = Dice(key(split, seed, index, STREAM))
    kind = {name: dice.pick(values) for name, values in VALUES.items()}
    kind |= {"shape": wanted[-1], "size": "large"}
    if len(wanted) > 1:
        kind["texture"] = wanted[0]
    shapes = [shape for shape in SHAPES if shape != kind["shape"]]
    while True:
        lesser = [
            {name: dice.pick(values) for name, values in VALUES.items()}
            | {"shape": dice.pick(shapes), "size": dice.pick(LESSER)}
            for _ in range(FEWEST + dice.below(MOST - FEWEST + 1))
        ]
        kinds = [kind, *lesser]
        spots = places(dice, [k["size"] for k in kinds])
        if spots is not None:
            first, *others = [put(dice, k, spot) for k, spot in zip(kinds, spots, strict=True)]
            return Scene(split, seed, index, (*others, first), background(dice))


@dataclass(frozen=True)
class Drawn:
    """One scene drawn: its pixels, those that decide its class, and how they cover the cells."""

    image: NDArray[np.uint8]
    mask: Bool[Tensor, "y x"]
    cover: Float[Tensor, " k"]
    label: int


class DominantScenes:
    """Scenes to classify by their largest thing; `target` is the share of each cell it covers."""

    name = "scenes-dominant"

    def __init__(
        self,
        split: str,
        seed: int,
        count: int,
        size: int = 64,
        cells: tuple[int, int] = (8, 8),
        classes: Sequence[str] = SHAPES,
    ) -> None:
        """`classes` are the six `SHAPES`, the twelve of `TEXTURED`, or a choice of either."""
        check(split, seed, count)
        check_size(size)
        check_classes(classes)
        if min(cells) < 1 or max(cells) > size:
            raise BadInput(f"a grid of {cells[0]} x {cells[1]} cells does not fit {size} pixels")
        self.split, self.seed, self.count = str(split), seed, count
        self.size, self.cells, self.classes = size, cells, tuple(classes)
        self._item = Kept(self._make, room_for(size))

    def __len__(self) -> int:
        return self.count

    def digest(self) -> str:
        """A hash of every setting and of the first items."""
        settings = (self.name, self.split, self.seed, self.count, self.size, self.cells)
        first = self.batch(range(min(PROBES, self.count)))
        return fingerprint(first, *settings, self.classes)

    def scene(self, index: int) -> Scene:
        """The scene behind an item."""
        (row,) = rows([index], self.count)
        return dominant_scene(self.split, self.seed, row, self.classes)

    def mask(self, index: int) -> Bool[Tensor, "y x"]:
        """The pixels that decide the class of an item."""
        return self._item(rows([index], self.count)[0]).mask

    def batch(self, indices: Sequence[int]) -> Batch:
        """The scenes named, one sample each."""
        chosen = rows(indices, self.count)
        items = [self._item(index) for index in chosen]
        geometry = PixelGeometry.identity(len(items), (self.size, self.size))
        cover = torch.stack([item.cover for item in items])
        return Batch(
            ids=tuple(f"{self.name}-{self.split}-{self.seed}-{index:06d}" for index in chosen),
            images=pictures([item.image for item in items]),
            geometry=geometry,
            labels=torch.tensor([item.label for item in items]),
            target=AttentionMap.from_cells(cover, grid(*self.cells, geometry=geometry)).normalize(),
        )

    def _make(self, index: int) -> Drawn:
        shown = self.scene(index)
        drawn = render(shown, self.size)
        label = class_of(shown, self.classes)
        assert label is not None
        mask = torch.from_numpy(drawn.masks[dominant(shown.things)].copy())
        geometry = PixelGeometry.identity(1, (self.size, self.size))
        return Drawn(drawn.image, mask, geometry.cover_masks([mask], self.cells)[0], label)
