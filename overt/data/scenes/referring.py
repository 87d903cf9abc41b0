"""Referring expressions: the shortest words for one thing alone, by what it is or where it lies.

That an expression fits one thing only is not by construction: `referents` evaluates its meaning on
the scene, and every expression is checked with it before it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from overt.data.batch import Batch
from overt.data.scenes.captions import Phrase, compose
from overt.data.scenes.claims import step
from overt.data.scenes.constructions import Linked, Piece
from overt.data.scenes.language import DIRECTIONS, descriptions, say, singling, vocabulary
from overt.data.scenes.proposals import COUNT, Keep, Proposals, every
from overt.data.scenes.questions import Description, fitting_things
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
from overt.data.scenes.world import Dice, Scene, Thing, key, scene
from overt.errors import BadInput
from overt.geometry import PixelGeometry

STREAM, REGIONS = 18, 19  # purposes in `world.key`
CLEAR = 0.08  # how far on its side lies what is meant by its place, and all else on the other


@dataclass(frozen=True, slots=True)
class Expression:
    """A text that singles out one thing, with its words, its phrases and its meaning.

    The meaning is a description and, where `relation` is given, a side of an anchor, which is the
    only thing of its own description.
    """

    text: str
    words: tuple[str, ...]
    spans: tuple[tuple[int, int], ...]
    phrases: tuple[Phrase, ...]
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
    """The things a meaning fits: those of the description, on that side of the only anchor."""
    found = fitting_things(what, things)
    if relation is None:
        return found
    anchors = fitting_things(anchor, things)
    if len(anchors) != 1:
        return ()
    (at,) = anchors
    return tuple(i for i in found if i != at and step(relation, things[i], things[at]) > 0)


def by_attributes(things: Sequence[Thing], i: int) -> tuple[Description, ...]:
    """The descriptions of thing i alone that no shorter one could replace."""
    known = singling(things, i)
    return tuple(what for what in known if len(what) == len(known[0]))


def by_place(things: Sequence[Thing], i: int) -> tuple[tuple[Description, str, Description], ...]:
    """The shortest (description, side, anchor) that fit thing i alone, where the side is needed.

    The thing lies clearly on its side of the anchor and all others of its description on the other;
    the anchor is told by its shortest description.
    """
    shared = [
        (d, fit) for d in descriptions(things[i]) if len(fit := fitting_things(d, things)) > 1
    ]
    found: list[tuple[Description, str, Description]] = []
    for j, anchor in enumerate(things):
        for relation in DIRECTIONS:
            if j == i or step(relation, things[i], anchor) < CLEAR:
                continue
            beyond = {n for n, t in enumerate(things) if step(relation, t, anchor) <= -CLEAR}
            told = [d for d, fit in shared if (rivals := {*fit} - {i, j}) and rivals <= beyond]
            if told:
                found += [(d, relation, at) for at in by_attributes(things, j) for d in told]
    least = min((len(what) + len(at) for what, _, at in found), default=0)
    return tuple(f for f in found if len(f[0]) + len(f[2]) == least)


def refer(scene: Scene, i: int, dice: Dice) -> Expression | None:
    """An expression for thing i, half of the time by its place; None where nothing will do."""
    alone, placed = by_attributes(scene.things, i), by_place(scene.things, i)
    if placed and (not alone or dice.random() < 0.5):
        what, relation, anchor = dice.pick(placed)
        at = fitting_things(anchor, scene.things)
        pieces: list[Piece] = [
            Linked(f"the {say(what, dice)}", (i,), what),
            dice.pick(DIRECTIONS[relation]),
            Linked(f"the {say(anchor, dice)}", at, anchor),
        ]
        made = Expression(*compose(pieces), i, what, relation, anchor)
    elif alone:
        what = dice.pick(alone)
        made = Expression(*compose([Linked(f"the {say(what, dice)}", (i,), what)]), i, what)
    else:
        return None
    assert referents(scene.things, made.what, made.relation, made.anchor) == (i,)
    return made


def expressions(scene: Scene) -> tuple[Expression, ...]:
    """One expression for each thing that can be singled out, in an order of the scene's own."""
    dice = Dice(key(scene.split, scene.seed, scene.index, STREAM))
    order = dice.sample(range(len(scene.things)), len(scene.things))
    found = (refer(scene, i, dice) for i in order)
    return tuple(expression for expression in found if expression is not None)


@dataclass(frozen=True, slots=True)
class Referred:
    """One scene drawn, with its expressions, its proposals, and what each token speaks of."""

    image: NDArray[np.uint8]
    expressions: tuple[Expression, ...]
    proposals: Proposals
    linked: tuple[NDArray[np.bool_], ...]


class ReferringScenes:
    """Which region is meant? An item is a scene; each of its first `each` expressions is a sample.

    `labels` name the true box of the thing among the proposals in `boxes`; `target` grounds the
    words of the thing and of its anchor; `groups` say whether a place is in the words. `keep` says
    which proposals are candidates: the others are hidden by `region_mask` and have no target, and
    what is meant is named by `labels` still.
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
        keep: Keep = every,
    ) -> None:
        check(split, seed, count)
        check_size(size)
        if each < 1:
            raise BadInput(f"each scene needs at least 1 expression, not {each}")
        self.split, self.seed, self.count = str(split), seed, count
        self.size, self.regions, self.each, self.keep = size, regions, each, keep
        self.vocabulary = vocabulary()
        self._item = Kept(self._make, room_for(size))

    def __len__(self) -> int:
        return self.count

    def digest(self) -> str:
        """A hash of every setting and of the first items."""
        settings: tuple[object, ...] = (
            self.name,
            self.split,
            self.seed,
            self.count,
            self.size,
            self.regions,
            self.each,
        )
        if self.keep is not every:
            settings += (self.keep.__name__,)
        return fingerprint(self.batch(range(min(PROBES, self.count))), *settings)

    def scene(self, index: int) -> Scene:
        """The scene behind an item."""
        return scene(self.split, self.seed, rows([index], self.count)[0])

    def batch(self, indices: Sequence[int]) -> Batch:
        """The scenes named, with one sample an expression."""
        chosen = rows(indices, self.count)
        items = [self._item(index) for index in chosen]
        said = [(n, e) for n, item in enumerate(items) for e in item.expressions]
        tokens, mask, text = framed([e for _, e in said], self.vocabulary.encode)
        boxes = torch.from_numpy(np.stack([items[n].proposals.boxes for n, _ in said]))
        kept = [self.keep(item.proposals) for item in items]
        linked = [one & kept[n] for n, item in enumerate(items) for one in item.linked]
        return Batch(
            ids=tuple(
                f"{self.name}-{self.split}-{self.seed}-{chosen[n]:06d}-{e.thing}" for n, e in said
            ),
            images=pictures([item.image for item in items]),
            image_of=torch.tensor([n for n, _ in said]),
            geometry=PixelGeometry.identity(len(items), (self.size, self.size)),
            tokens=tokens,
            token_mask=mask,
            text=text,
            boxes=boxes,
            region_mask=torch.from_numpy(np.stack([kept[n] for n, _ in said])),
            labels=torch.tensor([items[n].proposals.place(e.thing) for n, e in said]),
            groups=tuple("attributes" if e.relation is None else "place" for _, e in said),
            target=grounding(linked, boxes, text),
        )

    def _make(self, index: int) -> Referred:
        shown = self.scene(index)
        picture, found = drawn(shown, self.size, self.regions, REGIONS)
        said = expressions(shown)[: self.each]
        linked = (
            link(
                [(p.start_word + 1, p.end_word + 1, p.things) for p in e.phrases],
                len(e.words) + 2,
                found.overlap,
            )
            for e in said
        )
        return Referred(picture.image, said, found, tuple(linked))
