"""Attending Self-Attention: pairs of captions to fine-tune on, and the downstream tasks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from overt.data.batch import Batch
from overt.data.scenes.caption_pairs import CaptionPairScenes
from overt.data.scenes.captions import CaptionScenes
from overt.data.scenes.dataset import Scenes as World
from overt.data.scenes.dataset import vocabulary as question_vocabulary
from overt.data.scenes.phrase_relations import PhraseRelation
from overt.data.scenes.proposals import all_proposals, only_detected, only_true
from overt.data.scenes.questions import ALL_FAMILIES
from overt.data.scenes.referring_expressions import ReferringScenes
from overt.data.vocabulary import BEGIN, END, MASK, SPECIAL, Tokenizer, Vocabulary
from overt.experiments.dataset_views import DatasetView
from overt.experiments.inference_spec import BackboneSpec
from overt.experiments.recipe import SPLITS
from overt.nn.vlbert.caption_tokens import add_mask_token, add_special_tokens
from overt.nn.vlbert.downstream import add_boxes
from overt.papers.vgp.config import VgpAnswerToken, VgpPretrain, VgpQuestions, VgpScenes, VgpWords
from overt.papers.vgp.in_memory import (
    PORTION,
    PhraseLinksInMemory,
    TextsInMemory,
    cached_texts,
    link_table,
)
from overt.papers.vgp.pretraining import PretrainingTexts

CANDIDATES = {"true": only_true, "all": all_proposals, "detected": only_detected}
TEST_SCENES = 500  # test scenes of the downstream tasks
PRETRAINING_WORLD = 1000  # added to the seed of the dataset: these scenes are not used elsewhere
ATTRIBUTE_QUESTIONS = ("query-color", "query-shape", "query-size", "query-texture")


@dataclass(frozen=True, eq=False)
class CaptionPairs:
    """The pairs of captions of one split, and the pairs of phrases in them."""

    texts: TextsInMemory
    links: PhraseLinksInMemory

    @classmethod
    def on(cls, texts: TextsInMemory, device: torch.device) -> "CaptionPairs":
        """Return the pairs in the memory of a device."""
        return cls(texts.to(device), PhraseLinksInMemory.of(texts).to(device))


@dataclass(frozen=True, eq=False)
class DownstreamTask:
    """A downstream task: its training data, and its test data by kind."""

    train: TextsInMemory
    tests: Mapping[str, TextsInMemory]
    classes: int = 0


@dataclass(frozen=True)
class VgpInput:
    """The tokenizer, the image size, and the backbone of box features, if any, for inference."""

    reader: Tokenizer
    pixels: tuple[int, int]
    backbone: BackboneSpec | None = None


@dataclass(frozen=True, eq=False)
class VgpData:
    """Three splits of pairs of captions, and the downstream tasks, created on demand.

    `shown` returns some test pairs with all display fields, or is None. `inputs` is what inference
    with the fine-tuned network needs. `captions` are single captions to pretrain on.
    """

    train: CaptionPairs
    val: CaptionPairs
    test: CaptionPairs
    relations: int
    vocabulary: int
    expressions: Callable[[], DownstreamTask] | None = None
    questions: Callable[[], DownstreamTask] | None = None
    shown: Callable[[], Batch] | None = None
    inputs: VgpInput | None = None
    captions: Callable[[], PretrainingTexts] | None = None


# --- scenes


def load_scenes(
    data: VgpScenes, device: torch.device, pretraining: int = VgpPretrain.scenes
) -> VgpData:
    """Generate pairs of captions, expressions, questions, and captions to pretrain on."""
    counts = {"train": data.train, "val": data.val, "test": data.test}
    train, val, test = (
        CaptionPairs.on(load_pairs(data, split, counts[split]), device) for split in SPLITS
    )
    words = scene_vocabulary(data)

    def shown() -> Batch:
        some = scene_pairs(data, "test", data.test)
        return some.batch(range(min(24, len(some))))

    return VgpData(
        *(train, val, test),
        relations=len(PhraseRelation),
        vocabulary=words.size,
        expressions=lambda: load_expressions(data, device),
        questions=lambda: load_questions(data, device),
        shown=shown,
        inputs=VgpInput(words, (data.size, data.size)),
        captions=lambda: load_captions(data, data.cap(pretraining), device),
    )


def load_captions(data: VgpScenes, count: int, device: torch.device) -> PretrainingTexts:
    """Generate scenes of another world, each with one caption."""
    world = data.world + PRETRAINING_WORLD
    source = CaptionScenes("train", world, count, data.size, data.regions, each=1)
    made = partial(TextsInMemory.of, source)
    texts = cached_texts(source.name, "train", source.digest(), made).to(device)
    return PretrainingTexts(texts, MASK, len(SPECIAL))


def scene_vocabulary(data: VgpScenes) -> Vocabulary:
    """Return the words of captions; with `shared` words, those of questions follow."""
    found = scene_pairs(data, "val", 1).vocabulary
    if data.words is VgpWords.SEPARATE:
        return found
    more = [word for word in question_vocabulary().words if word not in set(found.words)]
    return Vocabulary((*found.words, *more))


def scene_pairs(data: VgpScenes, split: str, count: int) -> CaptionPairScenes:
    """Return pairs of captions that are generated on access."""
    return CaptionPairScenes(split, data.world, data.cap(count), data.size, data.regions)


def load_pairs(data: VgpScenes, split: str, count: int) -> TextsInMemory:
    """Return the pairs of captions of a split with their phrases, generated once and cached."""
    source = scene_pairs(data, split, count)
    return cached_texts(source.name, split, source.digest(), partial(pairs_in_memory, source))


def pairs_in_memory(
    source: CaptionPairScenes, start: int = 0, stop: int | None = None
) -> TextsInMemory:
    """Return some pairs of captions as tensors; phrases are read while their scene is available."""
    end = len(source) if stop is None else stop
    batches, links = [], []
    for first in range(start, end, PORTION):
        rows = range(first, min(first + PORTION, end))
        batches.append(source.batch(rows))
        links.append(link_table(source.phrases(rows), first - start))
    found = TextsInMemory.joined(source.name, source.split, source.digest(), batches)
    return replace(found, links=torch.cat(links))


def load_expressions(data: VgpScenes, device: torch.device) -> DownstreamTask:
    """Load referring expressions: trained with all candidates, tested with three kinds of them."""

    def part(split: str, count: int, kind: str) -> TextsInMemory:
        source = referring_scenes(data, split, count, kind)
        make = partial(TextsInMemory.of, source)
        return cached_texts(f"{source.name}-{kind}", split, source.digest(), make).to(device)

    tests = {kind: part("test", TEST_SCENES, kind) for kind in CANDIDATES}
    return DownstreamTask(part("train", data.expressions, "all"), tests)


def referring_scenes(data: VgpScenes, split: str, count: int, kind: str) -> ReferringScenes:
    """Return expressions with one kind of candidates, generated on access."""
    size = (data.cap(count), data.size, data.regions)
    return ReferringScenes(split, data.world, *size, keep=CANDIDATES[kind])


def load_questions(data: VgpScenes, device: torch.device) -> DownstreamTask:
    """Load questions about scenes; regions are the boxes of all objects."""
    families = ALL_FAMILIES if data.asked is VgpQuestions.ALL else ATTRIBUTE_QUESTIONS
    shared = None if data.words is VgpWords.SEPARATE else scene_vocabulary(data)

    def part(split: str, count: int) -> TextsInMemory:
        world = World(split, data.world, data.cap(count), data.size, families=families)
        source = BoxedScenes(world, shared, data.answer is VgpAnswerToken.MASK)
        make = partial(TextsInMemory.of, source)
        return cached_texts(source.name, split, source.digest(), make).to(device)

    classes = len(World("val", data.world, 1, data.size).answers)
    tests = {"all": part("test", TEST_SCENES)}
    return DownstreamTask(part("train", data.questions), tests, classes)


class BoxedScenes(DatasetView[World]):
    """Questions about scenes between special tokens, with the boxes of objects as regions.

    Words have the ids of `vocabulary`, if given, instead of those of their own. With `masked` a
    mask token follows the question.
    """

    def __init__(
        self, data: World, vocabulary: Vocabulary | None = None, masked: bool = False
    ) -> None:
        super().__init__(data)
        self.name = "scenes-boxed"
        self.ids: Tensor | None = None
        if vocabulary is not None:
            # Special ids are the same in every vocabulary, and words follow.
            own = vocabulary.encode(data.vocabulary.words)
            self.name = "scenes-boxed-shared"
            self.ids = torch.tensor([*range(len(SPECIAL)), *own])
        self.masked = masked
        self.name += "-masked" * masked

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return all questions about these scenes."""
        found = super().batch(indices)
        if self.ids is not None and found.tokens is not None:
            found = replace(found, tokens=self.ids[found.tokens])
        if self.masked:
            found = add_mask_token(found, MASK)
        found = add_special_tokens(found, BEGIN, END)
        boxes = [self.data.boxes(int(place)) for place in indices]
        return add_boxes(found, [boxes[at] for at in found.image_index.tolist()])
