"""Five true captions per scene, one per construction, with phrases linked to things.

The meaning of a caption is kept beside its words (`claims`), so that it can be tested on any
scene: the one it was made for, and a negative that it must not fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from overt.data.batch import Batch
from overt.data.scenes.caption_templates import Construction, GroundedPiece, Piece, fill_template
from overt.data.scenes.claims import Claim
from overt.data.scenes.proposals import COUNT, Proposals
from overt.data.scenes.questions import Description
from overt.data.scenes.view_dataset import (
    GroundedView,
    encode_texts,
    link_regions,
    render_with_proposals,
)
from overt.data.scenes.world import Dice, Scene, scene_rng
from overt.data.vocabulary import tokenize
from overt.errors import UserError

STREAM = 10  # purpose of captions in `world.scene_rng`
REGIONS = 11  # purpose of the proposals
CAPTIONS_PER_SCENE = len(Construction)


@dataclass(frozen=True, slots=True)
class CaptionPhrase:
    """Words start_word..end_word-1 refer to these things; to none if they describe the background.

    `what` is the description in the phrase, empty if there is none ("six things").
    """

    start_word: int
    end_word: int
    things: tuple[int, ...]
    what: Description = ()


@dataclass(frozen=True, slots=True)
class SceneCaption:
    """A sentence, its words with the characters of each, its phrases, and its claims."""

    text: str
    words: tuple[str, ...]
    spans: tuple[tuple[int, int], ...]
    phrases: tuple[CaptionPhrase, ...]
    claims: tuple[Claim, ...]
    construction: Construction

    def holds(self, scene: Scene) -> bool:
        """Return whether all claims are true in a scene."""
        return all(claim.holds(scene) for claim in self.claims)

    def links(self, shift: int) -> list[tuple[int, int, tuple[int, ...]]]:
        """Return (start, end, things) of each phrase, with words shifted by `shift`."""
        return [(p.start_word + shift, p.end_word + shift, p.things) for p in self.phrases]


def make_captions(scene: Scene) -> tuple[SceneCaption, ...]:
    """Return five captions, one per construction, in random order.

    Args:
        scene: The scene.

    Returns:
        The captions.

    Example:
        >>> from overt.data.scenes.world import random_scene
        >>> scene = random_scene("train", seed=0, index=0)
        >>> len(make_captions(scene))
        5
    """
    dice = Dice(scene_rng(scene.split, scene.seed, scene.index, STREAM))
    return tuple(
        make_caption(scene, how, dice)
        for how in dice.sample(tuple(Construction), CAPTIONS_PER_SCENE)
    )


def make_caption(scene: Scene, how: Construction, dice: Dice) -> SceneCaption:
    """Return one true caption in the given construction."""
    pieces, claims = fill_template(scene, how, dice)
    return SceneCaption(*join_pieces(pieces), claims, how)


def join_pieces(
    pieces: Sequence[Piece],
) -> tuple[str, tuple[str, ...], tuple[tuple[int, int], ...], tuple[CaptionPhrase, ...]]:
    """Return pieces as a text, its words, their characters, and the phrases."""
    text = ""
    marks: list[tuple[int, int, GroundedPiece]] = []
    for piece in pieces:
        said = piece if isinstance(piece, str) else piece.text
        text += "" if not text or said == "," else " "
        if isinstance(piece, GroundedPiece):
            marks.append((len(text), len(text) + len(said), piece))
        text += said
    found = tokenize(text)
    phrases = []
    for start, end, piece in marks:
        inside = [n for n, (_, low, high) in enumerate(found) if start <= low and high <= end]
        phrases.append(CaptionPhrase(inside[0], inside[-1] + 1, piece.things, piece.what))
    words = tuple(word for word, _, _ in found)
    return text, words, tuple((low, high) for _, low, high in found), tuple(phrases)


@dataclass(frozen=True, slots=True)
class CaptionedScene:
    """A rendered scene with captions, proposals, and the regions of each token."""

    image: NDArray[np.uint8]
    captions: tuple[SceneCaption, ...]
    proposals: Proposals
    linked: tuple[NDArray[np.bool_], ...]


class CaptionScenes(GroundedView[CaptionedScene]):
    """Scenes to caption; an item is a scene, and each of its first `each` captions is a sample.

    `tokens` begin and end with the special ids; `references` are all five captions of the scene;
    `boxes` are its proposals; `target` has the regions of every word, in the row of the word
    itself.

    Args:
        split: `train`, `val` or `test`.
        seed: Seed of the items.
        count: Number of items.
        size: Side of the images in pixels.
        regions: Number of region proposals per image.
        each: Number of captions per scene, 1 to 5.

    Raises:
        UserError: A setting is invalid.

    Example:
        >>> data = CaptionScenes("train", seed=0, count=2, size=32)
        >>> data.batch([0]).images.shape
        torch.Size([1, 3, 32, 32])
    """

    name = "scenes-captions"

    def __init__(
        self,
        split: str,
        seed: int,
        count: int,
        size: int = 64,
        regions: int = COUNT,
        each: int = CAPTIONS_PER_SCENE,
    ) -> None:
        super().__init__(split, seed, count, size, regions)
        if not 1 <= each <= CAPTIONS_PER_SCENE:
            raise UserError(f"each must be 1 to {CAPTIONS_PER_SCENE}, got {each}.")
        self.each = each

    def _settings(self) -> tuple[object, ...]:
        return *super()._settings(), self.each

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the scenes at `indices`, with one sample per caption."""
        ids, items = self._items(indices)
        said = [(n, item.captions[row]) for n, item in enumerate(items) for row in range(self.each)]
        return Batch(
            ids=tuple(f"{name}-{n}" for name in ids for n in range(self.each)),
            **self._grounded(
                [item.image for item in items],
                encode_texts([caption for _, caption in said], self.vocabulary.encode),
                [items[n].proposals for n, _ in said],
                [item.linked[row] for item in items for row in range(self.each)],
            ),
            image_of=torch.tensor([n for n, _ in said]),
            references=tuple(tuple(c.text for c in items[n].captions) for n, _ in said),
            groups=tuple(caption.construction.value for _, caption in said),
        )

    def _make(self, index: int) -> CaptionedScene:
        shown = self.scene(index)
        picture, found = render_with_proposals(shown, self.size, self.regions, REGIONS)
        said = make_captions(shown)
        linked = (link_regions(c.links(1), len(c.words) + 2, found.overlap) for c in said)
        return CaptionedScene(picture.image, said, found, tuple(linked))
