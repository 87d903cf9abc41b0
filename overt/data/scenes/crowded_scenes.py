"""Crowded scenes: a thing in every cell of a grid, and questions about one of them.

All things look equally important, so which cell holds the evidence cannot be told from the image.
Whatever `k` of the `n` cells are chosen without the question, they hold the evidence of `k / n` of
all questions about that image: exactly chance.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from overt.attention import AttentionMap, grid
from overt.data.batch import Batch
from overt.data.scenes.dataset import vocabulary
from overt.data.scenes.questions import QuestionProgram, SceneQuestion, make_question
from overt.data.scenes.render import render
from overt.data.scenes.view_dataset import SceneView, check_items
from overt.data.scenes.world import (
    COLORS,
    RADII,
    REACH,
    SHAPES,
    TEXTURES,
    Dice,
    Scene,
    make_thing,
    random_background,
    scene_rng,
)
from overt.data.vocabulary import pad_texts
from overt.errors import UserError

STREAM = 24  # purpose in `world.scene_rng`
CELL = 16  # side of a cell in pixels
NAMES = tuple(product(COLORS, SHAPES))  # 48 names; each thing of a scene has one of its own
SIZE = "small"
FEWEST_SIDE, LARGEST_SIDE = 2, 6  # of the grid; there are no names for more things


def crowded_scene(split: str, seed: int, index: int, side: int = 6) -> Scene:
    """Generate a scene with one thing in each of `side` x `side` cells, row by row.

    Color and shape name a thing, and no two things share both. Textures are independent of all
    else. A thing lies within its cell.
    """
    dice = Dice(scene_rng(split, seed, index, STREAM))
    names = dice.sample(NAMES, side * side)
    room = 1 / (2 * side) - REACH * RADII[SIZE]  # from the center of a cell
    things = []
    for place, (color, shape) in enumerate(names):
        kind = {"color": color, "shape": shape, "size": SIZE, "texture": dice.pick(TEXTURES)}
        x, y = (
            (at + 0.5) / side + dice.uniform(-room, room) for at in (place % side, place // side)
        )
        things.append(make_thing(dice, kind, (x, y)))
    return Scene(split, seed, index, tuple(things), random_background(dice))


def crowded_questions(scene: Scene, count: int) -> tuple[SceneQuestion, ...]:
    """Return `count` questions about different things of a scene, drawn uniformly.

    A question names a thing by color and shape and asks for its texture.
    """
    dice = Dice(scene_rng(scene.split, scene.seed, scene.index, STREAM, 1))
    return tuple(
        make_question(texture_question(scene, thing), scene)
        for thing in dice.sample(range(len(scene.things)), count)
    )


def texture_question(scene: Scene, thing: int) -> QuestionProgram:
    """Return the question for the texture of a thing, named by its color and shape."""
    named = scene.things[thing]
    description = (("color", named.color), ("shape", named.shape))
    return QuestionProgram("query-texture", (description,), "texture")


@dataclass(frozen=True)
class CrowdedItem:
    """A rendered scene, its questions, and the cell coverage of the evidence of each."""

    image: NDArray[np.uint8]
    questions: tuple[SceneQuestion, ...]
    cover: Float[Tensor, "q k"]


class CrowdedScenes(SceneView[CrowdedItem]):
    """Questions about one thing of a scene that has a thing in every cell.

    An item is one scene with all its questions, a sample one question. `target` is the share of
    each cell that the asked thing covers. Without the question no choice of cells covers the
    evidence more often than chance; a dataset for models that choose cells.

    Args:
        split: `train`, `val` or `test`.
        seed: Seed of the scenes.
        count: Number of scenes.
        questions: Number of questions per scene, about different things.
        side: Cells along each side; an image has 16 times as many pixels.

    Raises:
        UserError: A setting is invalid.

    Example:
        >>> data = CrowdedScenes("train", seed=0, count=2, questions=3)
        >>> batch = data.batch([0, 1])
        >>> batch.images.shape, batch.target.shape
        (torch.Size([2, 3, 96, 96]), (6, 1, 1, 1, 36))
    """

    name = "scenes-crowded"

    def __init__(
        self, split: str, seed: int, count: int, questions: int = 8, side: int = LARGEST_SIDE
    ) -> None:
        if not FEWEST_SIDE <= side <= LARGEST_SIDE:
            raise UserError(f"side must be {FEWEST_SIDE} to {LARGEST_SIDE} cells, got {side}.")
        if not 1 <= questions <= side * side:
            raise UserError(
                f"questions must be 1 to {side * side}, the number of things, got {questions}."
            )
        super().__init__(split, seed, count, side * CELL)
        self.questions, self.side = questions, side
        self.vocabulary, self.answers = vocabulary(), TEXTURES

    def _settings(self) -> tuple[object, ...]:
        return self.questions, self.side

    def scene(self, index: int) -> Scene:
        """Return the scene of an item."""
        (row,) = check_items([index], self.count)
        return crowded_scene(self.split, self.seed, row, self.side)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return all questions about these scenes; each image once."""
        names, items = self._items(indices)
        asked = [question for item in items for question in item.questions]
        texts = [" ".join(question.words) for question in asked]
        read = [self.vocabulary.read(text) for text in texts]
        tokens, mask, text = pad_texts(texts, read, self.vocabulary.padding)
        pixels = self._images([item.image for item in items])
        image_of = torch.arange(len(items)).repeat_interleave(self.questions)
        keys = grid(self.side, self.side, geometry=pixels["geometry"][image_of])
        return Batch(
            ids=tuple(f"{name}-{j}" for name in names for j in range(self.questions)),
            **pixels,
            image_of=image_of,
            tokens=tokens,
            token_mask=mask,
            text=text,
            labels=torch.tensor([self.answers.index(question.answer) for question in asked]),
            groups=tuple(question.family for question in asked),
            target=AttentionMap.from_coverage(torch.cat([item.cover for item in items]), keys),
        )

    def _make(self, index: int) -> CrowdedItem:
        shown = self.scene(index)
        questions = crowded_questions(shown, self.questions)
        drawn = render(shown, self.size)
        evidence = [list(question.evidence) for question in questions]
        masks = np.stack([drawn.masks[things].any(axis=0) for things in evidence])
        cells = masks.reshape(-1, self.side, CELL, self.side, CELL).mean(axis=(2, 4))
        cover = torch.from_numpy(cells.astype(np.float32)).flatten(1)
        return CrowdedItem(drawn.image, questions, cover)
