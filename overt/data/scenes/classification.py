"""Scene classification: the class is that of the largest thing.

The deciding pixels are known: changing the shape of the largest thing changes the class; changing
or removing any other thing does not.
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
from overt.data.scenes.render import render
from overt.data.scenes.view_dataset import SceneView, balanced_class, check_items
from overt.data.scenes.world import (
    SHAPES,
    TEXTURES,
    Dice,
    Scene,
    Thing,
    make_thing,
    place_things,
    random_attributes,
    random_background,
    scene_rng,
)
from overt.errors import UserError
from overt.geometry import PixelGeometry

STREAM, CLASS = 20, 21  # purposes in `world.scene_rng`
TEXTURED = tuple(f"{texture} {shape}" for shape in SHAPES for texture in TEXTURES)
FEWEST, MOST = 3, 6  # distractors
DISTRACTOR_SIZES = ("tiny", "small", "medium")  # smaller than large


def dominant_thing(things: Sequence[Thing]) -> int:
    """Return the index of the largest thing; raise `UserError` if it is not unique."""
    largest = max(thing.radius for thing in things)
    found = [i for i, thing in enumerate(things) if thing.radius == largest]
    if len(found) != 1:
        raise UserError(f"Expected one largest thing, found {len(found)}.")
    return found[0]


def dominant_class(scene: Scene, classes: Sequence[str] = SHAPES) -> int | None:
    """Return the class of the largest thing of a scene, or None if it has none."""
    thing = scene.things[dominant_thing(scene.things)]
    words = {thing.shape, thing.texture}
    return next((n for n, name in enumerate(classes) if set(name.split()) <= words), None)


def check_classes(classes: Sequence[str]) -> None:
    """Raise `UserError` unless these are two or more of `SHAPES`, or of `TEXTURED`."""
    known = [set(classes) <= set(names) for names in (SHAPES, TEXTURED)]
    if len(set(classes)) < 2 or len(set(classes)) != len(classes) or not any(known):
        raise UserError(
            f"classes must be two or more of {', '.join(SHAPES)}, or of these with a texture "
            f"({TEXTURED[0]!r}), got {list(classes)}."
        )


def dominant_scene(split: str, seed: int, index: int, classes: Sequence[str] = SHAPES) -> Scene:
    """Generate a scene with one large thing and 3 to 6 smaller ones of other shapes.

    The large thing is drawn last, so that it is fully visible. Colours are uninformative, and so is
    the texture if it is not part of the class. Classes are balanced.
    """
    check_classes(classes)
    wanted = classes[balanced_class(len(classes), split, seed, index, CLASS)].split()
    dice = Dice(scene_rng(split, seed, index, STREAM))
    kind = random_attributes(dice) | {"shape": wanted[-1], "size": "large"}
    if len(wanted) > 1:
        kind["texture"] = wanted[0]
    shapes = [shape for shape in SHAPES if shape != kind["shape"]]
    while True:
        lesser = [
            random_attributes(dice)
            | {"shape": dice.pick(shapes), "size": dice.pick(DISTRACTOR_SIZES)}
            for _ in range(FEWEST + dice.below(MOST - FEWEST + 1))
        ]
        kinds = [kind, *lesser]
        spots = place_things(dice, [k["size"] for k in kinds])
        if spots is not None:
            first, *others = [
                make_thing(dice, k, spot) for k, spot in zip(kinds, spots, strict=True)
            ]
            return Scene(split, seed, index, (*others, first), random_background(dice))


@dataclass(frozen=True)
class DominantItem:
    """A rendered scene: its pixels, those that decide its class, and their cell coverage."""

    image: NDArray[np.uint8]
    mask: Bool[Tensor, "y x"]
    cover: Float[Tensor, " k"]
    label: int


class DominantScenes(SceneView[DominantItem]):
    """Scenes to classify by their largest thing; `target` is the share of each cell it covers.

    Args:
        split: `train`, `val` or `test`.
        seed: Seed of the items.
        count: Number of items.
        size: Side of the images in pixels.
        cells: Grid (rows, columns) of the target.
        classes: The six `SHAPES`, the twelve of `TEXTURED`, or some of either.

    Raises:
        UserError: A setting is invalid.

    Example:
        >>> data = DominantScenes("train", seed=0, count=4, size=32)
        >>> data.batch(range(4)).labels.shape
        torch.Size([4])
    """

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
        super().__init__(split, seed, count, size)
        check_classes(classes)
        if min(cells) < 1 or max(cells) > size:
            raise UserError(
                f"A grid of {cells[0]} x {cells[1]} cells does not fit into {size} pixels."
            )
        self.cells, self.classes = cells, tuple(classes)

    def _settings(self) -> tuple[object, ...]:
        return self.size, self.cells, self.classes

    def scene(self, index: int) -> Scene:
        """Return the scene of an item."""
        (row,) = check_items([index], self.count)
        return dominant_scene(self.split, self.seed, row, self.classes)

    def mask(self, index: int) -> Bool[Tensor, "y x"]:
        """Return the pixels that decide the class of an item."""
        return self._item(check_items([index], self.count)[0]).mask

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the scenes at `indices`, one sample each."""
        ids, items = self._items(indices)
        pixels = self._images([item.image for item in items])
        cover = torch.stack([item.cover for item in items])
        keys = grid(*self.cells, geometry=pixels["geometry"])
        return Batch(
            ids=tuple(ids),
            **pixels,
            labels=torch.tensor([item.label for item in items]),
            target=AttentionMap.from_coverage(cover, keys),
        )

    def _make(self, index: int) -> DominantItem:
        shown = self.scene(index)
        drawn = render(shown, self.size)
        label = dominant_class(shown, self.classes)
        assert label is not None
        mask = torch.from_numpy(drawn.masks[dominant_thing(shown.things)].copy())
        geometry = PixelGeometry.identity(1, (self.size, self.size))
        return DominantItem(drawn.image, mask, geometry.cover_masks([mask], self.cells)[0], label)
