"""Pairs of captions: which of the two describe the image?

The false caption describes a hard negative, the same scene with one attribute of one thing
changed. Beside it stand all pairs of phrases of two true captions, with the relation of each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from overt.data.batch import Batch
from overt.data.scenes.captions import Caption, caption, compose
from overt.data.scenes.constructions import Construction, listing
from overt.data.scenes.language import vocabulary
from overt.data.scenes.proposals import COUNT, Proposals
from overt.data.scenes.relations import relation, side_by_side
from overt.data.scenes.render import check_size
from overt.data.scenes.views import (
    PROBES,
    Kept,
    check,
    drawn,
    even,
    fingerprint,
    grounding,
    link,
    pictures,
    room_for,
    rows,
)
from overt.data.scenes.world import Dice, Scene, hard_negative, key, scene
from overt.data.vocabulary import pad
from overt.geometry import PixelGeometry, TextGeometry

NEGATIVE, PAIRS, PAIR_REGIONS, PAIR_CLASS = 12, 13, 14, 15  # purposes in `world.key`
PATIENCE = 200


class Describes(IntEnum):
    """Which of two captions describe the image."""

    BOTH = 0
    FIRST = 1
    SECOND = 2


@dataclass(frozen=True)
class CaptionPair:
    """Two captions and which of them describe the scene; the other describes `other`."""

    scene: Scene
    other: Scene
    attribute: str  # the one in which the two scenes differ
    first: Caption
    second: Caption
    describes: Describes


def caption_pair(split: str, seed: int, index: int) -> CaptionPair:
    """A scene, its hard negative and two captions, each true of one scene and false of the other.

    Captions of the scene and of the negative are chosen alike, so that a caption alone does not
    tell whether it is the false one.
    """
    shown = scene(split, seed, index)
    other, changed, attribute = hard_negative(shown, key(split, seed, index, NEGATIVE))
    describes = Describes(even(len(Describes), split, seed, index, PAIR_CLASS))
    dice = Dice(key(split, seed, index, PAIRS))
    first = _telling(shown, other, changed, attribute, dice)
    if describes is Describes.BOTH:
        second = first
        while second.text == first.text:
            second = _telling(shown, other, changed, attribute, dice)
    else:
        second = _telling(other, shown, changed, attribute, dice)
    if describes is Describes.SECOND:
        first, second = second, first
    return CaptionPair(shown, other, attribute, first, second, describes)


def _telling(shown: Scene, other: Scene, changed: int, attribute: str, dice: Dice) -> Caption:
    """A caption that is true of one scene and false of the other."""
    for _ in range(PATIENCE):
        found = caption(shown, dice.pick(tuple(Construction)), dice)
        if not found.holds(other):
            return found
    value = getattr(shown.things[changed], attribute)  # how many have it always tells the two apart
    pieces, claims = listing(shown, dice, attribute, value)
    return Caption(*compose(pieces), claims, Construction.LISTING)


@dataclass(frozen=True)
class Described:
    """A caption pair drawn, with its proposals, its tokens and the regions each speaks of."""

    pair: CaptionPair
    image: NDArray[np.uint8]
    proposals: Proposals
    text: str
    tokens: list[int]
    spans: list[tuple[int, int]]
    linked: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class PhraseLinks:
    """p pairs of phrases in a batch: the sample, the tokens (from, to) of each, the relation."""

    sample: Int[Tensor, " p"]
    first: Int[Tensor, "p 2"]
    second: Int[Tensor, "p 2"]
    relation: Int[Tensor, " p"]


class CaptionPairScenes:
    """Which of two captions describe the image: `labels` are `Describes`.

    `tokens` are begin, the first caption, end, the second caption, end. `target` grounds the
    phrases of captions that describe the image, and no others. `groups` name the attribute in
    which the two images differ.
    """

    name = "scenes-caption-pairs"

    def __init__(
        self, split: str, seed: int, count: int, size: int = 64, regions: int = COUNT
    ) -> None:
        check(split, seed, count)
        check_size(size)
        self.split, self.seed, self.count = str(split), seed, count
        self.size, self.regions = size, regions
        self.vocabulary = vocabulary()
        self.classes = tuple(member.name.lower() for member in Describes)
        self._item = Kept(self._make, room_for(size))

    def __len__(self) -> int:
        return self.count

    def digest(self) -> str:
        """A hash of every setting and of the first items."""
        settings = (self.name, self.split, self.seed, self.count, self.size, self.regions)
        return fingerprint(self.batch(range(min(PROBES, self.count))), *settings)

    def batch(self, indices: Sequence[int]) -> Batch:
        """The pairs named, one sample each."""
        chosen = rows(indices, self.count)
        items = [self._item(index) for index in chosen]
        tokens, mask, ranges = pad([i.tokens for i in items], [i.spans for i in items])
        both = [(item.pair.first.text, item.pair.second.text) for item in items]
        text = TextGeometry(tuple(item.text for item in items), ranges)
        boxes = torch.from_numpy(np.stack([item.proposals.boxes for item in items]))
        return Batch(
            ids=tuple(f"{self.name}-{self.split}-{self.seed}-{index:06d}" for index in chosen),
            images=pictures([item.image for item in items]),
            geometry=PixelGeometry.identity(len(items), (self.size, self.size)),
            tokens=tokens,
            token_mask=mask,
            text=text,
            boxes=boxes,
            region_mask=torch.ones(boxes.shape[:2], dtype=torch.bool),
            labels=torch.tensor([int(item.pair.describes) for item in items]),
            references=tuple(both),
            groups=tuple(item.pair.attribute for item in items),
            target=grounding([item.linked for item in items], boxes, text),
        )

    def phrases(self, indices: Sequence[int]) -> PhraseLinks:
        """Every phrase of the first with every phrase of the second, where both captions are true.

        Phrases without a description ("six things", "a dark background") take no part.
        """
        found: list[tuple[int, int, int, int, int, int]] = []
        for row, index in enumerate(rows(indices, self.count)):
            pair = self._item(index).pair
            if pair.describes is not Describes.BOTH:
                continue
            skip = len(pair.first.words) + 2
            found += [
                (
                    *(row, a.start_word + 1, a.end_word + 1),
                    *(b.start_word + skip, b.end_word + skip, int(relation(a.what, b.what))),
                )
                for a in pair.first.phrases
                for b in pair.second.phrases
                if a.what and b.what
            ]
        table = torch.tensor(found, dtype=torch.long).reshape(len(found), 6)
        return PhraseLinks(table[:, 0], table[:, 1:3], table[:, 3:5], table[:, 5])

    def _make(self, index: int) -> Described:
        pair = caption_pair(self.split, self.seed, index)
        picture, found = drawn(pair.scene, self.size, self.regions, PAIR_REGIONS)
        text, tokens, spans, skip = side_by_side(self.vocabulary, pair.first.text, pair.second.text)
        marks = pair.first.links(1) if pair.describes is not Describes.SECOND else []
        if pair.describes is not Describes.FIRST:
            marks += pair.second.links(skip)
        return Described(
            pair, picture.image, found, text, tokens, spans, link(marks, len(tokens), found.overlap)
        )
