"""Grounded supervision: pairs of captions to tune on, and the tasks that come afterwards."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from overt.data.batch import Batch
from overt.data.scenes.pairs import CaptionPairScenes
from overt.data.scenes.proposals import every, only_detected, only_true
from overt.data.scenes.referring import ReferringScenes
from overt.data.scenes.relations import Relation
from overt.data.scenes.store import Scenes as World
from overt.data.vocabulary import BEGIN, END, Reader
from overt.models.vlbert.downstream import boxed
from overt.models.vlbert.marks import marked
from overt.recipes.building import SPLITS
from overt.recipes.spoken import Backbone
from overt.recipes.vgp.held import PORTION, HeldLinks, HeldTexts, as_table, kept
from overt.recipes.vgp.recipe import Scenes

CANDIDATES = {"true": only_true, "all": every, "detected": only_detected}
JUDGED = 500  # scenes by which the tasks afterwards are judged


@dataclass(frozen=True, eq=False)
class Pairs:
    """The pairs of captions of one split, and the pairs of phrases in them."""

    texts: HeldTexts
    links: HeldLinks

    @classmethod
    def on(cls, texts: HeldTexts, device: torch.device) -> "Pairs":
        """The pairs, held on a device."""
        return cls(texts.to(device), HeldLinks.of(texts).to(device))


@dataclass(frozen=True, eq=False)
class Task:
    """What a network is tuned for afterwards, and what it is judged by, by kind."""

    train: HeldTexts
    tests: Mapping[str, HeldTexts]
    classes: int = 0


@dataclass(frozen=True)
class Asked:
    """How texts are read, the size of pictures, and what makes features of their boxes, if any."""

    reader: Reader
    pixels: tuple[int, int]
    backbone: Backbone | None = None


@dataclass(frozen=True, eq=False)
class Parts:
    """Three splits of pairs of captions, and the tasks afterwards, made when they are asked for.

    `shown` gives some pairs of the test with all that people see of them; None where that is not
    known. `asked` is what it takes to ask a network that was tuned on them.
    """

    train: Pairs
    val: Pairs
    test: Pairs
    relations: int
    vocabulary: int
    expressions: Callable[[], Task] | None = None
    questions: Callable[[], Task] | None = None
    shown: Callable[[], Batch] | None = None
    asked: Asked | None = None


# --- scenes


def scenes(data: Scenes, device: torch.device) -> Parts:
    """Pairs of captions, expressions and questions of the embedded world."""
    counts = dict(zip(SPLITS, (data.train, data.val, data.test), strict=True))
    train, held, test = (pairs_of(data, split, counts[split]) for split in SPLITS)
    words = drawn_pairs(data, "val", 1).vocabulary

    def shown() -> Batch:
        some = drawn_pairs(data, "test", counts["test"])
        return some.batch(range(min(24, len(some))))

    return Parts(
        Pairs.on(train, device),
        Pairs.on(held, device),
        Pairs.on(test, device),
        relations=len(Relation),
        vocabulary=words.size,
        expressions=lambda: expressions(data, device),
        questions=lambda: questions(data, device),
        shown=shown,
        asked=Asked(words, (data.size, data.size)),
    )


def limited(data: Scenes, count: int) -> int:
    """How many scenes there are of a part."""
    return count if data.limit is None else min(count, data.limit)


def drawn_pairs(data: Scenes, split: str, count: int) -> CaptionPairScenes:
    """Pairs of captions, drawn when they are asked for."""
    return CaptionPairScenes(split, data.world, limited(data, count), data.size, data.regions)


def pairs_of(data: Scenes, split: str, count: int) -> HeldTexts:
    """The pairs of captions of a split with their pairs of phrases, drawn once and kept."""
    source = drawn_pairs(data, split, count)
    return kept(source.name, split, source.digest(), partial(held_pairs, source))


def held_pairs(source: CaptionPairScenes, start: int = 0, stop: int | None = None) -> HeldTexts:
    """Some pairs of captions as tensors; phrases are read while their scene is at hand."""
    end = len(source) if stop is None else stop
    batches, links = [], []
    for first in range(start, end, PORTION):
        rows = range(first, min(first + PORTION, end))
        batches.append(source.batch(rows))
        links.append(as_table(source.phrases(rows), first - start))
    found = HeldTexts.joined(source.name, source.split, source.digest(), batches)
    return replace(found, links=torch.cat(links))


def expressions(data: Scenes, device: torch.device) -> Task:
    """Which region is meant? Learned with all candidates, judged with three kinds of them."""

    def part(split: str, count: int, kind: str) -> HeldTexts:
        source = referring(data, split, count, kind)
        make = partial(HeldTexts.of, source)
        return kept(f"{source.name}-{kind}", split, source.digest(), make).to(device)

    tests = {kind: part("test", JUDGED, kind) for kind in CANDIDATES}
    return Task(part("train", data.expressions, "all"), tests)


def referring(data: Scenes, split: str, count: int, kind: str) -> ReferringScenes:
    """Expressions with one kind of candidates, drawn when they are asked for."""
    size = (limited(data, count), data.size, data.regions)
    return ReferringScenes(split, data.world, *size, keep=CANDIDATES[kind])


def questions(data: Scenes, device: torch.device) -> Task:
    """Questions about scenes; regions are the boxes of all things."""

    def part(split: str, count: int) -> HeldTexts:
        source = BoxedScenes(World(split, data.world, limited(data, count), data.size))
        make = partial(HeldTexts.of, source)
        return kept(source.name, split, source.digest(), make).to(device)

    classes = len(World("val", data.world, 1, data.size).answers)
    tests = {"all": part("test", JUDGED)}
    return Task(part("train", data.questions), tests, classes)


class BoxedScenes:
    """Questions about scenes between marks, with the boxes of things for regions."""

    name = "scenes-boxed"

    def __init__(self, data: World) -> None:
        self.data, self.split = data, data.split

    def __len__(self) -> int:
        return len(self.data)

    def batch(self, indices: Sequence[int]) -> Batch:
        """All questions about these scenes."""
        found = marked(self.data.batch(indices), BEGIN, END)
        boxes = [self.data.boxes(int(place)) for place in indices]
        return boxed(found, [boxes[at] for at in found.image_index.tolist()])

    def digest(self) -> str:
        """The hash of the scenes."""
        return self.data.digest()
