"""Pairs of captions: which of the two describe the image?

The false caption describes a hard negative, the same scene with one attribute of one thing
changed. For two true captions, all pairs of their phrases have a known relation.
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
from overt.data.scenes.caption_templates import Construction, list_counts
from overt.data.scenes.captions import SceneCaption, join_pieces, make_caption
from overt.data.scenes.phrase_relations import encode_pair, phrase_relation
from overt.data.scenes.proposals import COUNT, Proposals
from overt.data.scenes.view_dataset import (
    GroundedView,
    balanced_class,
    link_regions,
    render_with_proposals,
)
from overt.data.scenes.world import Dice, Scene, hard_negative, random_scene, scene_rng
from overt.data.vocabulary import pad_texts

NEGATIVE, PAIRS, PAIR_REGIONS, PAIR_CLASS = 12, 13, 14, 15  # purposes in `world.scene_rng`
MAX_ATTEMPTS = 200


class MatchingCaption(IntEnum):
    """Which of two captions describe the image."""

    BOTH = 0
    FIRST = 1
    SECOND = 2


@dataclass(frozen=True)
class SceneCaptionPair:
    """Two captions and which of them describe the scene; a false one describes `other`."""

    scene: Scene
    other: Scene
    attribute: str  # in which the two scenes differ
    first: SceneCaption
    second: SceneCaption
    describes: MatchingCaption


def make_caption_pair(split: str, seed: int, index: int) -> SceneCaptionPair:
    """Return a scene, its hard negative and two captions, each true of one scene and false of the
    other.

    Captions of the scene and of the negative are drawn alike, so that a caption alone does not
    reveal whether it is false.
    """
    shown = random_scene(split, seed, index)
    other, changed, attribute = hard_negative(shown, scene_rng(split, seed, index, NEGATIVE))
    describes = MatchingCaption(
        balanced_class(len(MatchingCaption), split, seed, index, PAIR_CLASS)
    )
    dice = Dice(scene_rng(split, seed, index, PAIRS))
    first = _distinguishing_caption(shown, other, changed, attribute, dice)
    if describes is MatchingCaption.BOTH:
        second = first
        while second.text == first.text:
            second = _distinguishing_caption(shown, other, changed, attribute, dice)
    else:
        second = _distinguishing_caption(other, shown, changed, attribute, dice)
    if describes is MatchingCaption.SECOND:
        first, second = second, first
    return SceneCaptionPair(shown, other, attribute, first, second, describes)


def _distinguishing_caption(
    shown: Scene, other: Scene, changed: int, attribute: str, dice: Dice
) -> SceneCaption:
    """Return a caption that is true of one scene and false of the other."""
    for _ in range(MAX_ATTEMPTS):
        found = make_caption(shown, dice.pick(tuple(Construction)), dice)
        if not found.holds(other):
            return found
    value = getattr(shown.things[changed], attribute)  # the count of this value always differs
    pieces, claims = list_counts(shown, dice, attribute, value)
    return SceneCaption(*join_pieces(pieces), claims, Construction.LISTING)


@dataclass(frozen=True)
class CaptionPairItem:
    """A rendered caption pair with its proposals, tokens and the regions of each token."""

    pair: SceneCaptionPair
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


class CaptionPairScenes(GroundedView[CaptionPairItem]):
    """Which of two captions describe the image: `labels` are `MatchingCaption`.

    `tokens` are begin, the first caption, end, the second caption, end. `target` grounds the
    phrases of true captions only. `groups` are the attributes in which the two scenes differ.

    Args:
        split: `train`, `val` or `test`.
        seed: Seed of the items.
        count: Number of items.
        size: Side of the images in pixels.
        regions: Number of region proposals per image.

    Raises:
        UserError: A setting is invalid.

    Example:
        >>> data = CaptionPairScenes("train", seed=0, count=4, size=32)
        >>> data.batch(range(2)).images.shape
        torch.Size([2, 3, 32, 32])
    """

    name = "scenes-caption-pairs"

    def __init__(
        self, split: str, seed: int, count: int, size: int = 64, regions: int = COUNT
    ) -> None:
        super().__init__(split, seed, count, size, regions)
        self.classes = tuple(member.name.lower() for member in MatchingCaption)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the pairs at `indices`, one sample each."""
        ids, items = self._items(indices)
        return Batch(
            ids=tuple(ids),
            **self._grounded(
                [item.image for item in items],
                pad_texts([i.text for i in items], [(i.tokens, i.spans) for i in items]),
                [item.proposals for item in items],
                [item.linked for item in items],
            ),
            labels=torch.tensor([int(item.pair.describes) for item in items]),
            references=tuple((item.pair.first.text, item.pair.second.text) for item in items),
            groups=tuple(item.pair.attribute for item in items),
        )

    def phrases(self, indices: Sequence[int]) -> PhraseLinks:
        """Return every phrase of the first with every phrase of the second caption, if both are
        true.

        Phrases without a description ("six things", "a dark background") are left out.
        """
        found: list[tuple[int, int, int, int, int, int]] = []
        for row, item in enumerate(self._items(indices)[1]):
            pair = item.pair
            if pair.describes is not MatchingCaption.BOTH:
                continue
            skip = len(pair.first.words) + 2
            found += [
                (
                    *(row, a.start_word + 1, a.end_word + 1),
                    *(b.start_word + skip, b.end_word + skip, int(phrase_relation(a.what, b.what))),
                )
                for a in pair.first.phrases
                for b in pair.second.phrases
                if a.what and b.what
            ]
        table = torch.tensor(found, dtype=torch.long).reshape(len(found), 6)
        return PhraseLinks(table[:, 0], table[:, 1:3], table[:, 3:5], table[:, 5])

    def _make(self, index: int) -> CaptionPairItem:
        pair = make_caption_pair(self.split, self.seed, index)
        picture, found = render_with_proposals(pair.scene, self.size, self.regions, PAIR_REGIONS)
        text, tokens, spans, skip = encode_pair(self.vocabulary, pair.first.text, pair.second.text)
        marks = pair.first.links(1) if pair.describes is not MatchingCaption.SECOND else []
        if pair.describes is not MatchingCaption.FIRST:
            marks += pair.second.links(skip)
        return CaptionPairItem(
            pair,
            picture.image,
            found,
            text,
            tokens,
            spans,
            link_regions(marks, len(tokens), found.overlap),
        )
