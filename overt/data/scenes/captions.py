"""Five true captions a scene, each in a construction of its own, phrases tied to their things.

The meaning of a caption is kept beside its words (`claims`), so that it can be checked against any
scene: the one it was made for, and the one it must not fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from overt.data.batch import Batch
from overt.data.scenes.claims import Claim
from overt.data.scenes.constructions import Construction, Linked, Piece, express
from overt.data.scenes.language import vocabulary
from overt.data.scenes.proposals import COUNT, Proposals
from overt.data.scenes.questions import Description
from overt.data.scenes.render import check_size
from overt.data.scenes.views import (
    PROBES,
    Kept,
    check,
    drawn,
    fingerprint,
    framed,
    grounding,
    link,
    pictures,
    room_for,
    rows,
)
from overt.data.scenes.world import Dice, Scene, key, scene
from overt.data.vocabulary import tokenize
from overt.errors import BadInput
from overt.geometry import PixelGeometry

STREAM = 10  # the purpose of captions in `world.key`
REGIONS = 11  # and that of the proposals beside them
CAPTIONS = len(Construction)


@dataclass(frozen=True, slots=True)
class Phrase:
    """Words start_word..end_word-1 speak of these things; of none where they name the background.

    `what` is the description the phrase gives, empty where it gives none ("six things").
    """

    start_word: int
    end_word: int
    things: tuple[int, ...]
    what: Description = ()


@dataclass(frozen=True, slots=True)
class Caption:
    """A sentence, its words with the characters of each, its phrases, and what it claims."""

    text: str
    words: tuple[str, ...]
    spans: tuple[tuple[int, int], ...]
    phrases: tuple[Phrase, ...]
    claims: tuple[Claim, ...]
    construction: Construction

    def holds(self, scene: Scene) -> bool:
        """Whether everything it claims is so in a scene."""
        return all(claim.holds(scene) for claim in self.claims)

    def links(self, shift: int) -> list[tuple[int, int, tuple[int, ...]]]:
        """(start, end, things) of each phrase, when the first word stands at place `shift`."""
        return [(p.start_word + shift, p.end_word + shift, p.things) for p in self.phrases]


def captions(scene: Scene) -> tuple[Caption, ...]:
    """Five captions, one of each construction, in an order of the scene's own."""
    dice = Dice(key(scene.split, scene.seed, scene.index, STREAM))
    return tuple(caption(scene, how, dice) for how in dice.sample(tuple(Construction), CAPTIONS))


def caption(scene: Scene, how: Construction, dice: Dice) -> Caption:
    """One true caption in the construction asked for; other dice, other words."""
    pieces, claims = express(scene, how, dice)
    return Caption(*compose(pieces), claims, how)


def compose(
    pieces: Sequence[Piece],
) -> tuple[str, tuple[str, ...], tuple[tuple[int, int], ...], tuple[Phrase, ...]]:
    """Pieces as one text, its words, their characters, and the words of each linked piece."""
    text = ""
    marks: list[tuple[int, int, Linked]] = []
    for piece in pieces:
        said = piece if isinstance(piece, str) else piece.text
        text += "" if not text or said == "," else " "
        if isinstance(piece, Linked):
            marks.append((len(text), len(text) + len(said), piece))
        text += said
    found = tokenize(text)
    phrases = []
    for start, end, piece in marks:
        inside = [n for n, (_, low, high) in enumerate(found) if start <= low and high <= end]
        phrases.append(Phrase(inside[0], inside[-1] + 1, piece.things, piece.what))
    words = tuple(word for word, _, _ in found)
    return text, words, tuple((low, high) for _, low, high in found), tuple(phrases)


@dataclass(frozen=True, slots=True)
class Captioned:
    """One scene drawn, with its captions, its proposals, and which regions each token speaks of."""

    image: NDArray[np.uint8]
    captions: tuple[Caption, ...]
    proposals: Proposals
    linked: tuple[NDArray[np.bool_], ...]


class CaptionScenes:
    """Scenes to caption. An item is a scene; each of its first `each` captions is a sample.

    `tokens` begin and end with the special ids; `references` are all five captions of the scene;
    `boxes` are its proposals; `target` says for every word which regions it speaks of, in the row
    where the word itself stands.
    """

    name = "scenes-captions"

    def __init__(
        self,
        split: str,
        seed: int,
        count: int,
        size: int = 64,
        regions: int = COUNT,
        each: int = CAPTIONS,
    ) -> None:
        check(split, seed, count)
        check_size(size)
        if not 1 <= each <= CAPTIONS:
            raise BadInput(f"each scene has 1 to {CAPTIONS} captions, not {each}")
        self.split, self.seed, self.count = str(split), seed, count
        self.size, self.regions, self.each = size, regions, each
        self.vocabulary = vocabulary()
        self._item = Kept(self._make, room_for(size))

    def __len__(self) -> int:
        return self.count

    def digest(self) -> str:
        """A hash of every setting and of the first items."""
        settings = (
            self.name,
            self.split,
            self.seed,
            self.count,
            self.size,
            self.regions,
            self.each,
        )
        return fingerprint(self.batch(range(min(PROBES, self.count))), *settings)

    def scene(self, index: int) -> Scene:
        """The scene behind an item."""
        return scene(self.split, self.seed, rows([index], self.count)[0])

    def batch(self, indices: Sequence[int]) -> Batch:
        """The scenes named, with one sample a caption."""
        chosen = rows(indices, self.count)
        items = [self._item(index) for index in chosen]
        said = [(n, item.captions[row]) for n, item in enumerate(items) for row in range(self.each)]
        tokens, mask, text = framed([caption for _, caption in said], self.vocabulary.encode)
        boxes = torch.from_numpy(np.stack([items[n].proposals.boxes for n, _ in said]))
        linked = [item.linked[row] for item in items for row in range(self.each)]
        return Batch(
            ids=tuple(
                f"{self.name}-{self.split}-{self.seed}-{index:06d}-{n}"
                for index in chosen
                for n in range(self.each)
            ),
            images=pictures([item.image for item in items]),
            image_of=torch.tensor([n for n, _ in said]),
            geometry=PixelGeometry.identity(len(items), (self.size, self.size)),
            tokens=tokens,
            token_mask=mask,
            text=text,
            boxes=boxes,
            region_mask=torch.ones(boxes.shape[:2], dtype=torch.bool),
            references=tuple(tuple(c.text for c in items[n].captions) for n, _ in said),
            groups=tuple(caption.construction.value for _, caption in said),
            target=grounding(linked, boxes, text),
        )

    def _make(self, index: int) -> Captioned:
        shown = self.scene(index)
        picture, found = drawn(shown, self.size, self.regions, REGIONS)
        said = captions(shown)
        linked = (link(c.links(1), len(c.words) + 2, found.overlap) for c in said)
        return Captioned(picture.image, said, found, tuple(linked))
