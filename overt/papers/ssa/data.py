"""Self Supervision for Attention Networks: datasets, each with the network it needs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from overt import data as datasets
from overt.data.catalog import data_root
from overt.data.dataset import Dataset
from overt.data.feature_cache import FeatureCache
from overt.data.in_memory import InMemoryDataset
from overt.data.vocabulary import HubTokenizer, Tokenizer
from overt.data.vqa import vqa1
from overt.data.vqa_dataset import PhotoInput
from overt.data.vqa_hat import VqaHat
from overt.errors import UserError
from overt.experiments.baselines import build_vqa_model
from overt.experiments.dataset_views import LimitedDataset, evaluators, open_scenes, open_splits
from overt.experiments.evaluate import Evaluator
from overt.experiments.recipe import RunContext, scale_width
from overt.experiments.scenes_recipes import ScenesVqaModel
from overt.nn import AttentiveCNN
from overt.nn.vqa.image_encoders import CachedImageEncoder, CNNEncoder, ImageEncoder
from overt.nn.vqa.show_ask_attend import ShowAskAttend, ShowAskAttendSizes
from overt.papers.ssa.config import (
    SsaDataset,
    SsaImageModel,
    SsaImages,
    SsaPretrained,
    SsaQuestions,
    SsaScenes,
    SsaShapes,
    SsaTextModel,
    SsaTexts,
    SsaVqaModel,
    SsaVqaNetwork,
)
from overt.papers.ssa.model import encoder_factory, text_classifier
from overt.train import processes

TEXTS_PER_BATCH = 128  # of an evaluation
CNN_CELL = 4  # side of a feature cell of the network for CIFAR-10, in pixels
CNN = ((64, 128, 256, 256), (2, 2, 2, 2))  # channels and strides: a grid of 1/16 of the side


@dataclass(frozen=True)
class SsaData:
    """The three splits of a dataset; `shown` is the training split as it is on disk.

    `batch` items are searched at a time; `reader` tokenizes texts; `blank` is the mask token.
    """

    train: Dataset
    validation: Evaluator
    test: Evaluator
    shown: Dataset
    batch: int = 256
    reader: Tokenizer | None = None
    blank: int | None = None


DataAndModel = tuple[SsaData, Callable[[], nn.Module]]


def device_of(context: RunContext) -> torch.device:
    """Return the device of the run, where small datasets are kept."""
    return processes(context.device).device


# --- texts


def load_texts(
    data: SsaTexts, model: SsaTextModel | SsaPretrained, context: RunContext
) -> DataAndModel:
    """Load questions of TREC, or reviews of Yelp-HAT with human rationales."""
    root = data_root(context.data_root)
    make_encoder = encoder_factory(model) if isinstance(model, SsaPretrained) else None
    reader = None if make_encoder is None else HubTokenizer(make_encoder(2).tokenizer)
    kind: Any = datasets.Trec if data.name is SsaDataset.TREC else datasets.YelpHat
    train, val, test = open_splits(lambda split: kind(root, split, reader=reader), data.limit)
    classes = train.data.classes
    tests = evaluators(val, test, classes, TEXTS_PER_BATCH)
    blank = train.data.reader.mask
    if make_encoder is not None:  # words are located by their characters
        return SsaData(train, *tests, train, blank=blank), lambda: make_encoder(len(classes))
    train_data: Dataset = train
    if data.name is not SsaDataset.YELP:  # its rationales refer to words, which are not in memory
        train_data = InMemoryDataset.from_dataset(train, device_of(context))
    loaded = SsaData(train_data, *tests, train, reader=train.data.reader, blank=blank)
    assert isinstance(model, SsaTextModel)
    return loaded, lambda: text_classifier(model, train.data.reader.size, len(classes))


# --- images


def load_images(data: SsaImages, model: SsaImageModel, context: RunContext) -> DataAndModel:
    """Load CIFAR-10 into device memory."""
    root, device = data_root(context.data_root), device_of(context)
    whole = open_splits(lambda split: datasets.Cifar10(root, split), data.limit)
    classes = whole[0].data.classes
    train, val, test = (datasets.InMemoryImages.from_dataset(one, device) for one in whole)
    loaded = SsaData(train, *evaluators(val, test, classes, 512), train, batch=1024)
    return loaded, lambda: _attentive_cnn(model, len(classes))


def load_shapes(data: SsaShapes, model: SsaImageModel, context: RunContext) -> DataAndModel:
    """Generate scenes classified by the shape of their largest object, with its pixels."""
    side = -(-data.size // CNN_CELL)
    train, val, test = (
        datasets.DominantScenes(split, data.world, count, size=data.size, cells=(side, side))
        for split, count in data.counts().items()
    )
    resident = datasets.InMemoryImages.from_dataset(train, device_of(context))
    loaded = SsaData(resident, *evaluators(val, test, train.classes, 512), train, batch=1024)
    return loaded, lambda: _attentive_cnn(model, len(train.classes))


def _attentive_cnn(model: SsaImageModel, classes: int) -> nn.Module:
    wide, last = scale_width(64, model.width), scale_width(32, model.width)
    return AttentiveCNN(classes, (wide, wide, wide, last), last, model.dropout)


# --- questions about images


def load_questions(data: SsaQuestions, model: SsaVqaModel, context: RunContext) -> DataAndModel:
    """Load easy-VQA, DAQUAR or VQA v1; the test split of VQA v1 is that with human attention."""
    if data.name is SsaDataset.EASY_VQA:
        easy = open_splits(lambda split: datasets.EasyVqa(context.data_root, split), data.limit)
        resident = InMemoryDataset.from_dataset(easy[0], device_of(context))
        return _vqa_data(easy, model, None, resident)
    root = data_root(context.data_root)
    cache = None if data.features is None else FeatureCache(Path(data.features))
    look = PhotoInput((data.size, data.size), features=cache)
    if data.name is SsaDataset.DAQUAR:
        rooms = open_splits(
            lambda split: datasets.Daquar(root, split, limit=data.answers, photo_input=look),
            data.limit,
        )
        # labels of answers outside the classes are only valid with `answers`, so keep them on disk
        if cache is not None or data.answers is not None:
            return _vqa_data(rooms, model, cache)
        return _vqa_data(
            rooms, model, None, InMemoryDataset.from_dataset(rooms[0], device_of(context))
        )
    train = vqa1(root, "train", limit=data.answers, photo_input=look)
    shared: dict[str, Any] = {"reader": train.reader, "classes": train.classes, "photo_input": look}
    cells = (14, 14) if cache is not None else (data.size // 16, data.size // 16)
    val = vqa1(root, "val", **shared)
    test = VqaHat(root, "val", cells=cells, **shared)
    return _vqa_data([LimitedDataset(one, data.limit) for one in (train, val, test)], model, cache)


def _vqa_data(
    parts: Sequence[LimitedDataset[Any]],
    model: SsaVqaModel,
    cache: Any,
    resident: InMemoryDataset | None = None,
) -> DataAndModel:
    train, val, test = parts
    classes = train.data.classes
    tests = evaluators(val, test, classes, TEXTS_PER_BATCH)
    many = 256 if resident is None else 1024
    shown = train if resident is None else resident
    loaded = SsaData(shown, *tests, train, batch=many, reader=train.data.reader)

    def make() -> nn.Module:
        vocabulary = train.data.reader.size
        if model.net is SsaVqaNetwork.SMALL:
            return _small_network(model, vocabulary, len(classes))
        eye: ImageEncoder = (
            CNNEncoder(*CNN) if cache is None else CachedImageEncoder(cache.shape[1])
        )
        sizes = {"word": 300, "question": 1024, "hidden": 512, "joint": 1024}
        scaled = {name: scale_width(size, model.width) for name, size in sizes.items()}
        return ShowAskAttend(
            ShowAskAttendSizes(
                *(vocabulary, len(classes)),
                glimpses=model.glimpses,
                dropout=model.dropout,
                **scaled,
            ),
            eye,
        )

    return loaded, make


def _small_network(model: SsaVqaModel, vocabulary: int, answers: int) -> nn.Module:
    sizes = ScenesVqaModel(model.width, glimpses=model.glimpses, dropout=model.dropout)
    return build_vqa_model(sizes, vocabulary, answers)


def load_scenes(data: SsaScenes, model: SsaVqaModel, context: RunContext) -> DataAndModel:
    """Generate questions about scenes, with the deciding objects."""
    train, val, test = open_scenes(data)
    resident = InMemoryDataset.from_dataset(train, device_of(context))
    loaded = SsaData(resident, val, test, train, batch=256, reader=train.vocabulary)
    if model.net is not SsaVqaNetwork.SMALL:
        raise UserError("ssa-scenes needs model.net=small.")
    return loaded, lambda: _small_network(model, train.vocabulary.size, len(train.answers))
