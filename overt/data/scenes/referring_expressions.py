"""Referring expressions: the shortest unique description of a thing, by attributes or by position.

Uniqueness is not assumed from the construction: `referents` evaluates the meaning on the scene, and
every expression is checked before it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from overt.data.batch import Batch
from overt.data.scenes.caption_templates import GroundedPiece, Piece
from overt.data.scenes.captions import CaptionPhrase, join_pieces
from overt.data.scenes.noun_phrases import (
    DIRECTIONS,
    descriptions,
    unique_descriptions,
    verbalize,
)
from overt.data.scenes.proposals import COUNT, ProposalFilter, Proposals, all_proposals
from overt.data.scenes.questions import Description, matching_things, signed_offset
from overt.data.scenes.view_dataset import (
    GroundedView,
    encode_texts,
    link_regions,
    render_with_proposals,
)
from overt.data.scenes.world import Dice, Scene, Thing, scene_rng
from overt.errors import UserError

STREAM, REGIONS = 18, 19  # purposes in `world.scene_rng`
# Smallest distance of the referent and of its rivals from the anchor, on opposite sides.
CLEAR = 0.08


@dataclass(frozen=True, slots=True)
class SceneExpression:
    """A text that refers to one thing, with its words, phrases and meaning.

    The meaning is a description and, if `relation` is given, a side of an anchor, which is the only
    thing of its own description.
    """

    text: str
    words: tuple[str, ...]
    spans: tuple[tuple[int, int], ...]
    phrases: tuple[CaptionPhrase, ...]
    thing: int
    what: Description
    relation: str | None = None
    anchor: Description = ()


def referents(
    things: Sequence[Thing],
    what: Description,
    relation: str | None = None,
    anchor: Description = (),
) -> tuple[int, ...]:
    """Return the things that a meaning matches."""
    found = matching_things(what, things)
    if relation is None:
        return found
    anchors = matching_things(anchor, things)
    if len(anchors) != 1:
        return ()
    (at,) = anchors
    return tuple(i for i in found if i != at and signed_offset(relation, things[i], things[at]) > 0)


def minimal_descriptions(things: Sequence[Thing], i: int) -> tuple[Description, ...]:
    """Return the shortest descriptions that match thing i only."""
    known = unique_descriptions(things, i)
    return tuple(what for what in known if len(what) == len(known[0]))


def minimal_spatial_descriptions(
    things: Sequence[Thing], i: int
) -> tuple[tuple[Description, str, Description], ...]:
    """Return the shortest (description, side, anchor) that match thing i only, where the side is
    needed.

    The thing is clearly on its side of the anchor and all others of its description on the other;
    the anchor has its shortest description.
    """
    shared = [
        (d, fit) for d in descriptions(things[i]) if len(fit := matching_things(d, things)) > 1
    ]
    found: list[tuple[Description, str, Description]] = []
    for j, anchor in enumerate(things):
        for relation in DIRECTIONS:
            if j == i or signed_offset(relation, things[i], anchor) < CLEAR:
                continue
            beyond = {
                n for n, t in enumerate(things) if signed_offset(relation, t, anchor) <= -CLEAR
            }
            unique = [d for d, fit in shared if (rivals := {*fit} - {i, j}) and rivals <= beyond]
            if unique:
                found += [
                    (d, relation, at) for at in minimal_descriptions(things, j) for d in unique
                ]
    least = min((len(what) + len(at) for what, _, at in found), default=0)
    return tuple(f for f in found if len(f[0]) + len(f[2]) == least)


def make_expression(scene: Scene, i: int, dice: Dice) -> SceneExpression | None:
    """Return an expression for thing i, half of the time spatial; None if there is none."""
    alone = minimal_descriptions(scene.things, i)
    placed = minimal_spatial_descriptions(scene.things, i)
    if placed and (not alone or dice.random() < 0.5):
        what, relation, anchor = dice.pick(placed)
        at = matching_things(anchor, scene.things)
        pieces: list[Piece] = [
            GroundedPiece(f"the {verbalize(what, dice)}", (i,), what),
            dice.pick(DIRECTIONS[relation]),
            GroundedPiece(f"the {verbalize(anchor, dice)}", at, anchor),
        ]
        made = SceneExpression(*join_pieces(pieces), i, what, relation, anchor)
    elif alone:
        what = dice.pick(alone)
        made = SceneExpression(
            *join_pieces([GroundedPiece(f"the {verbalize(what, dice)}", (i,), what)]), i, what
        )
    else:
        return None
    assert referents(scene.things, made.what, made.relation, made.anchor) == (i,)
    return made


def make_expressions(scene: Scene) -> tuple[SceneExpression, ...]:
    """Return one expression for each thing that has one, in random order."""
    dice = Dice(scene_rng(scene.split, scene.seed, scene.index, STREAM))
    order = dice.sample(range(len(scene.things)), len(scene.things))
    found = (make_expression(scene, i, dice) for i in order)
    return tuple(expression for expression in found if expression is not None)


@dataclass(frozen=True, slots=True)
class ReferringItem:
    """A rendered scene with expressions, proposals, and the regions of each token."""

    image: NDArray[np.uint8]
    expressions: tuple[SceneExpression, ...]
    proposals: Proposals
    linked: tuple[NDArray[np.bool_], ...]


class ReferringScenes(GroundedView[ReferringItem]):
    """Which region is meant? An item is a scene; each of its first `each` expressions is a sample.

    `labels` are the index of the true box among the proposals in `boxes`; `target` grounds the
    words of the referent and of its anchor; `groups` are `attributes` or `place`.

    Args:
        split: `train`, `val` or `test`.
        seed: Seed of the items.
        count: Number of items.
        size: Side of the images in pixels.
        regions: Number of region proposals per image.
        each: Largest number of expressions per scene.
        keep: Which proposals are candidates; the others are hidden by `region_mask` and have no
            target, while `labels` still index the true box.

    Raises:
        UserError: A setting is invalid.

    Example:
        >>> data = ReferringScenes("train", seed=0, count=2, size=32)
        >>> data.batch([0]).images.shape
        torch.Size([1, 3, 32, 32])
    """

    name = "scenes-referring"

    def __init__(
        self,
        split: str,
        seed: int,
        count: int,
        size: int = 64,
        regions: int = COUNT,
        each: int = 4,
        keep: ProposalFilter = all_proposals,
    ) -> None:
        super().__init__(split, seed, count, size, regions)
        if each < 1:
            raise UserError(f"each must be at least 1, got {each}.")
        self.each, self.keep = each, keep

    def _settings(self) -> tuple[object, ...]:
        kept = () if self.keep is all_proposals else (self.keep.__name__,)
        return *super()._settings(), self.each, *kept

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the scenes at `indices`, with one sample per expression."""
        ids, items = self._items(indices)
        said = [(n, e) for n, item in enumerate(items) for e in item.expressions]
        kept = [self.keep(item.proposals) for item in items]
        grounded = self._grounded(
            [item.image for item in items],
            encode_texts([e for _, e in said], self.vocabulary.encode),
            [items[n].proposals for n, _ in said],
            [one & kept[n] for n, item in enumerate(items) for one in item.linked],
        )
        grounded["region_mask"] = torch.from_numpy(np.stack([kept[n] for n, _ in said]))
        return Batch(
            ids=tuple(f"{ids[n]}-{e.thing}" for n, e in said),
            **grounded,
            image_of=torch.tensor([n for n, _ in said]),
            labels=torch.tensor([items[n].proposals.true_box(e.thing) for n, e in said]),
            groups=tuple("attributes" if e.relation is None else "place" for _, e in said),
        )

    def _make(self, index: int) -> ReferringItem:
        shown = self.scene(index)
        picture, found = render_with_proposals(shown, self.size, self.regions, REGIONS)
        said = make_expressions(shown)[: self.each]
        linked = (
            link_regions(
                [(p.start_word + 1, p.end_word + 1, p.things) for p in e.phrases],
                len(e.words) + 2,
                found.overlap,
            )
            for e in said
        )
        return ReferringItem(picture.image, said, found, tuple(linked))
