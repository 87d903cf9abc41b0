"""From the plain values of hard attention to data, network and training."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from overt import models, supervise
from overt.data.batch import Batch
from overt.data.features import FeatureCache
from overt.data.held import Held
from overt.data.source import Source as DataSet
from overt.errors import BadInput
from overt.models.aggregate import Aggregate as Joining
from overt.models.aggregate import Mean, Pairwise, Relation, Sum
from overt.models.eyes import CachedEye, PlacedEye, TrainedEye
from overt.models.eyes import Eye as Sees
from overt.models.han import HAN, Decision
from overt.models.hard import HardAttention, Score, asked, unasked, unplaced
from overt.models.questions import Backwards, Bag, QuestionReader, Recurrent
from overt.models.selection import (
    Selection,
    drawn,
    keep_above_uniform,
    keep_all,
    keep_share,
    keep_top,
    randomly,
    softened,
    straight_through,
)
from overt.models.sight import NORMS, NormedEye, StridedEye
from overt.models.stacked import StackedAttention, StackSizes
from overt.recipes.building import CELL, SPLITS, First, limits, source
from overt.recipes.evaluation import Judge
from overt.recipes.experiment import Evaluation, Experiment, Stage
from overt.recipes.han import (
    Aggregate,
    Eye,
    Files,
    HanRecipe,
    Model,
    Norm,
    Questions,
    Reader,
    Scenes,
    Schedule,
    Select,
    Soft,
    SortOfClevr,
)
from overt.recipes.han_clock import Clock
from overt.recipes.han_evaluation import evaluated, validated
from overt.recipes.recipe import Context, Train
from overt.train import (
    Fitted,
    Losses,
    Monitor,
    ParameterSet,
    Progress,
    Reporter,
    doubling,
    fit,
    processes,
    warm_then_cosine,
)

PORTION = 256  # questions that are judged at a time
HELD_OUT = 10_000  # training questions of CLEVR that validate
START = 0.01  # of the rate, before it is doubled for the first time
MARGIN = 8  # pixels by which pictures of CLEVR are moved in training

Grid = tuple[int, tuple[int, int]]  # numbers a cell, and rows and columns of cells
Vary = Callable[[Batch], Batch]


@dataclass(frozen=True)
class Parts:
    """What a network is trained, validated and tested on; `cached` if it looks at features."""

    train: DataSet
    held: Judge
    test: Judge
    vocabulary: int
    cached: Grid | None = None
    vary: Vary = lambda batch: batch


def build(recipe: HanRecipe, context: Context) -> Experiment:
    """The data, the network and one stage of training."""
    parts = opened(recipe, context)
    model = network(recipe.model, parts.vocabulary, len(parts.test.classes), parts.cached)
    return trained(recipe, context, parts, model)


# --- data


def opened(recipe: HanRecipe, context: Context) -> Parts:
    """The three parts of the data set that a recipe is about."""
    match recipe.data:
        case SortOfClevr() as data:
            return sort_of_clevr(data, context)
        case Scenes() as data:
            return scenes(data, context)
        case Questions(name=Files.EASY_VQA) as data:
            return easy_questions(data, context)
        case Questions(name=Files.CLEVR) as data:
            return clevr(data, context)
        case Questions() as data:
            return photos(data, recipe.model.eye, context)


def sort_of_clevr(data: SortOfClevr, context: Context) -> Parts:
    """Drawn pictures; those of training are drawn once and held on the device."""
    from overt.data import SortOfClevr as Drawn
    from overt.data.sortclevr import ASKED, TERNARY

    relations = [name for name in ASKED if data.ternary or name != TERNARY]
    each = 10 * len(relations)

    def part(split: str, count: int) -> First[Drawn]:
        most = count if data.limit is None else min(count, -(-data.limit // each))
        return First(Drawn(split, data.world, most, relations), data.limit)

    train, held, test = (
        part(split, count)
        for split, count in zip(SPLITS, (data.train, data.val, data.test), strict=True)
    )
    kept = Held.of(train, processes(context.device).device)
    classes = train.data.classes
    return Parts(
        kept,
        Judge(held, classes, portion=PORTION),
        Judge(test, classes, portion=PORTION),
        train.data.reader.size,
    )


def scenes(data: Scenes, context: Context) -> Parts:
    """Questions about the embedded world, with the cells that decide."""
    from overt.data.scenes.questions import chance
    from overt.data.scenes.store import Scenes as World

    side = -(-data.size // CELL)

    def part(split: str, count: int) -> World:
        most = count if data.limit is None else min(count, data.limit)
        return World(split, data.world, most, size=data.size, cells=(side, side))

    train, held, test = (
        part(split, count)
        for split, count in zip(SPLITS, (data.train, data.val, data.test), strict=True)
    )
    return Parts(
        Held.of(train, processes(context.device).device),
        Judge(held, train.answers),
        Judge(test, train.answers, chance),
        train.vocabulary.size,
    )


def easy_questions(data: Questions, context: Context) -> Parts:
    """easy-VQA, whose pictures have 64 x 64 pixels."""
    from overt.data import EasyVqa

    train, held, test = (First(EasyVqa(context.data_root, one), data.limit) for one in SPLITS)
    classes = train.data.classes
    return Parts(
        Held.of(train, processes(context.device).device),
        Judge(held, classes, portion=PORTION),
        Judge(test, classes, portion=PORTION),
        train.data.reader.size,
    )


def clevr(data: Questions, context: Context) -> Parts:
    """CLEVR at 128 x 128 pixels, moved by up to 8 in training.

    Public relation networks also turn pictures by up to .05 radians; ours does not.
    """
    from overt.data import Clevr
    from overt.data.asked import Look
    from overt.data.images import stretch
    from overt.data.resident import shift
    from overt.data.sets import root_of

    root, look = root_of(context.data_root), Look((data.size, data.size), stretch)
    learnt = Clevr(root, "train", look=look)
    test = Clevr(root, "val", spread=SPREAD, look=look, reader=learnt.reader)
    held = min(HELD_OUT, len(learnt) // 8 or 1)

    def moved(batch: Batch) -> Batch:
        generator = torch.Generator().manual_seed(int(torch.randint(2**31, ())))
        return shift(batch, generator, MARGIN)

    ends = len(learnt) - held
    return Parts(
        Portion(learnt, "train", 0, ends, data.limit),
        Judge(Portion(learnt, "val", ends, len(learnt), data.limit), learnt.classes),
        Judge(Portion(test, "test", 0, len(test), data.limit), learnt.classes, portion=PORTION),
        learnt.reader.size,
        vary=moved,
    )


SPREAD = 8.0  # pixels around the middle of a thing of CLEVR that count as it


class Portion:
    """The items of a data set from `start` to `stop`, or the first `limit` of them, as a split."""

    def __init__(
        self, data: DataSet, split: str, start: int, stop: int, limit: int | None = None
    ) -> None:
        self.data, self.split, self.start = data, split, start
        self.name = data.name if split == str(data.split) else f"{data.name} {data.split}"
        self.count = stop - start if limit is None else min(limit, stop - start)

    def __len__(self) -> int:
        return self.count

    def batch(self, indices: Sequence[int]) -> Batch:
        """The items at these places of the portion."""
        return self.data.batch([self.start + int(place) for place in indices])

    def digest(self) -> str:
        """The hash of the whole."""
        return self.data.digest()


def photos(data: Questions, eye: Eye, context: Context) -> Parts:
    """Questions that people asked about photos; with cached features, or end to end."""
    from overt.data.asked import Look
    from overt.data.sets import root_of
    from overt.recipes.han_features import Pictured, cache_of

    root, look = root_of(context.data_root), Look((data.size, data.size))
    reader = reader_of(data, root)
    cache: FeatureCache | None = None
    if eye is Eye.CACHED:
        cache = cache_of(data, root, reader, processes(context.device).device)
    seen = look if cache is None else replace(look, features=cache)
    train, held, test = (reader(split, seen) for split in SPLITS)
    tested: Any = test
    if cache is not None and data.name is Files.DAQUAR:  # COCO is not at hand for those who cached
        tested = Pictured(reader("test", look), cache)
    classes = train.classes
    return Parts(
        First(train, data.limit),
        Judge(First(held, data.limit), classes, portion=PORTION),
        Judge(First(tested, data.limit), classes, portion=PORTION),
        train.reader.size,
        None if cache is None else grid_of(cache),
    )


def reader_of(data: Questions, root: Path) -> Callable[[str, Any], Any]:
    """What opens a split of a set of photos, looked at in a given way."""
    from overt import data as sets

    if data.name is Files.DAQUAR:
        return lambda split, look: sets.Daquar(root, split, limit=data.answers, look=look)
    return lambda split, look: sets.vqacp2(root, split, limit=data.answers, look=look)


def grid_of(cache: FeatureCache) -> Grid:
    """The width and the grid of cached cells, which have to be a square."""
    cells, width = cache.shape
    side = round(cells**0.5)
    if side * side != cells:
        raise BadInput(f"{cache.folder} has {cells} cells a photo, which are no square grid.")
    return width, (side, side)


# --- the network


def network(model: Model, vocabulary: int, answers: int, cached: Grid | None = None) -> nn.Module:
    """The network of a row, on cached cells or on its own."""
    eye = eye_of(model, cached)
    if model.soft is not Soft.NONE:
        sizes = StackSizes(
            vocabulary,
            answers,
            word=_times(model.width, 300),
            question=_times(model.width, model.state),
            joint=_times(model.width, min(1024, model.joint)),
            hidden=_times(model.width, min(512, model.joint)),
            hops=1 if model.soft is Soft.SAN1 else 2,
            word_hops=0,
            dropout=model.dropout,
        )
        return StackedAttention(sizes, eye)
    reads = question_reader(model, vocabulary)
    joint = _times(model.width, model.joint)
    width = joint if model.depth else eye.width
    attend = HardAttention(
        eye.width,
        reads.width,
        None if model.depth is None else joint,
        model.depth,
        selection_of(model),
        joining_of(model, width, reads.width),
        score_of(model),
    )
    hidden = tuple(_times(model.width, one) for one in model.hidden)
    return HAN(eye, reads, attend, Decision(hidden, answers, model.dropout))


def eye_of(model: Model, cached: Grid | None = None) -> Sees:
    """Where the cells of a network come from."""
    eye: Sees
    match model.eye:
        case Eye.CACHED:
            if cached is None:
                raise BadInput("model.eye=cached needs features of photos, and there are none.")
            eye = CachedEye(*cached)
            if model.norm is not Norm.NONE:
                eye = NormedEye(eye, NORMS[model.norm.value])
        case Eye.STRIDED:
            eye = StridedEye(model.width)
        case Eye.COARSE:
            eye = TrainedEye([_times(model.width, 24)] * 4, [2] * 4)
        case Eye.FINE:
            wide = _times(model.width, 64)
            eye = TrainedEye([max(4, wide // 2), wide, wide, wide], [2, 2, 2, 1])
    placed = model.placed if model.soft is Soft.NONE else model.soft is Soft.SAN2_POS
    return PlacedEye(eye) if placed else eye


def question_reader(model: Model, vocabulary: int) -> QuestionReader:
    """How a network reads; relation networks have embedded words of a quarter of the state."""
    state = _times(model.width, model.state)
    match model.reader:
        case Reader.FORWARD:
            return Recurrent(vocabulary, _times(model.width, 300), state)
        case Reader.BACKWARD:
            return Backwards(vocabulary, _times(model.width, model.state // 4), state)
        case Reader.BAG:
            return Bag(vocabulary)


def selection_of(model: Model) -> Selection:
    """How the cells of a row are chosen."""
    top = partial(keep_top, count=model.cells)
    match model.select:
        case Select.ALL:
            return Selection(keep_all)
        case Select.TOP | Select.BLIND:
            return Selection(top)
        case Select.SHARE:
            return Selection(partial(keep_share, share=model.share))
        case Select.ABOVE_UNIFORM:
            if model.temperature == 1:
                return Selection(keep_above_uniform)
            return Selection(partial(keep_above_uniform, temperature=model.temperature))
        case Select.STRAIGHT_THROUGH:
            return Selection(top, weigh=straight_through)
        case Select.SOFT_TO_HARD:
            return Selection(top, weigh=softened)
        case Select.GUMBEL:
            return drawn(model.cells, model.temperature)
        case Select.RANDOM:
            return randomly(model.cells)


def score_of(model: Model) -> Score:
    """What cells are chosen by: joined with the question, or the image alone."""
    if model.depth is None:
        return unplaced if model.placed else asked
    return unasked if model.select is Select.BLIND else asked


def joining_of(model: Model, cell: int, question: int) -> Joining:
    """What is made of the kept cells."""
    match model.aggregate:
        case Aggregate.SUM:
            return Sum(cell)
        case Aggregate.MEAN:
            return Mean(cell)
        case Aggregate.PAIRWISE:
            size = 2 * _times(model.width, min(256, model.joint // 2))
            return Pairwise(cell, size, heads=2)
        case Aggregate.RELATION:
            return Relation(cell, question, _times(model.width, 256))


def _times(width: float, features: int) -> int:
    return max(4, round(width * features))


# --- training


def adam(model: nn.Module, plan: Train, recipe: HanRecipe) -> ParameterSet:
    """All parameters under AdamW, with the rate that the recipe says."""
    optimizer = torch.optim.AdamW(model.parameters(), plan.rate, weight_decay=plan.decay)
    match recipe.adam.schedule:
        case Schedule.COSINE:
            return ParameterSet(optimizer, warm_then_cosine(plan.warmup), plan.clip)
        case Schedule.FIXED:
            return ParameterSet(optimizer, clip=plan.clip)
        case Schedule.DOUBLING:
            every = recipe.adam.every / plan.epochs
            return ParameterSet(optimizer, doubling(START, every), plan.clip)


def trained(recipe: HanRecipe, context: Context, parts: Parts, model: nn.Module) -> Experiment:
    """One stage of training with cross-entropy, validated by kind of question, then a test.

    A question whose answer is no class teaches nothing, and is wrong in the test.
    """
    ranks = processes(context.device)
    clock = Clock(context.out, ranks.first)
    attends = getattr(model, "attend", None)

    def step(net: nn.Module, batch: Batch, progress: Progress) -> Losses:
        clock.at(progress.step)
        if isinstance(attends, HardAttention):
            attends.progress = progress.fraction
        output = net(parts.vary(batch))
        assert batch.labels is not None
        return {"model": {"task": classification(output.prediction, batch.labels)}}

    def validate(net: nn.Module) -> dict[str, float]:
        with clock.stopped():
            found = validated(parts.held, cast(models.Model, net), ranks.device)
        clock.note(found)
        return found

    sets = {"model": adam(model, recipe.train, recipe)}

    def run(resume: bool, reporter: Reporter) -> Fitted:
        clock.start(resume)
        return fit(
            model,
            parts.train,
            step,
            sets,
            limits(recipe.train),
            out=context.out,
            seed=context.seed,
            device=context.device,
            monitor=Monitor(validate, "accuracy"),
            resume=resume,
            reporter=reporter,
        )

    def evaluate(reporter: Reporter) -> Evaluation:
        found = evaluated(parts.test, cast(models.Model, model), ranks.device)
        return replace(found, clock=clock.marks())

    return Experiment(
        model=model,
        sources=[source(parts.train), source(parts.held.data), source(parts.test.data)],
        stages=[Stage("train", run)],
        evaluate=evaluate,
        example=lambda: parts.test.data.batch(range(min(8, len(parts.test.data)))),
    )


def classification(prediction: torch.Tensor, labels: torch.Tensor) -> supervise.Loss:
    """Cross-entropy over the questions whose answer is a class; others have the label -1."""
    precise = prediction.to(torch.promote_types(prediction.dtype, torch.float32))
    total = nn.functional.cross_entropy(precise, labels, ignore_index=-1, reduction="sum")
    return supervise.Loss(total, (labels >= 0).sum())
