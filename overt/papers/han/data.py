"""Bootstrapping Hard Attention: datasets for training, validation and test."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from overt import data as datasets
from overt.data import wordnet
from overt.data.batch import Batch
from overt.data.catalog import data_root
from overt.data.clevr import rotate_images
from overt.data.dataset import Dataset
from overt.data.feature_cache import FeatureCache
from overt.data.images import stretch
from overt.data.in_memory import InMemoryDataset
from overt.data.sort_of_clevr import CELLS
from overt.data.sort_of_clevr_world import QUESTION_TEMPLATES, SIDE, TERNARY
from overt.data.vocabulary import Tokenizer
from overt.data.vqa_dataset import PhotoInput
from overt.errors import UserError
from overt.experiments.dataset_views import (
    DatasetView,
    LimitedDataset,
    evaluators,
    open_scenes,
    open_splits,
)
from overt.experiments.evaluate import Evaluator
from overt.experiments.inference_spec import BackboneSpec, Canvas
from overt.experiments.recipe import SPLITS, RunContext
from overt.papers.han.config import (
    HanCrowdedScenes,
    HanDataset,
    HanImageEncoder,
    HanModel,
    HanQuestions,
    HanRecipe,
    HanScenes,
    HanSelect,
    HanSoftAttention,
    HanSortOfClevr,
)
from overt.papers.han.evaluate import WordSimilarity
from overt.papers.han.features import PhotosWithFeatures, open_cache
from overt.papers.han.model import CellGrid
from overt.train import processes

# side of a cell
PIXELS = {HanImageEncoder.STRIDED: 32, HanImageEncoder.COARSE: 16, HanImageEncoder.FINE: 8}
PORTION = 256  # questions per evaluation batch
HELD_OUT = 10_000  # training questions of CLEVR used for validation
MARGIN = 8  # pixels by which CLEVR images are shifted in training
ANGLE = 0.05  # radians by which they are rotated
MAX_BYTES_IN_MEMORY = 2**31  # of features on the device while training
SPREAD = 8.0  # pixels around the center of a CLEVR object that count as the object

Augment = Callable[[Batch], Batch]


@dataclass(frozen=True)
class HanData:
    """Training, validation and test data of a run; `cached` is the grid of cached features, if any.

    `similarity` is the similarity of two words, where answers are also scored by meaning. The rest
    is for inference: the tokenizer, the backbone of the features, and how photos are resized.
    """

    train: Dataset
    val: Evaluator
    test: Evaluator
    vocabulary: int
    cached: CellGrid | None = None
    augment: Augment = lambda batch: batch
    similarity: WordSimilarity | None = None
    reader: Tokenizer | None = None
    backbone: BackboneSpec | None = None
    canvas: Canvas = Canvas.CROP
    pixels: tuple[int, int] | None = None


def load_data(recipe: HanRecipe, context: RunContext) -> HanData:
    """Load the three splits of the dataset of a recipe."""
    match recipe.data:
        case HanSortOfClevr() as data:
            return load_sort_of_clevr(
                data, recipe.model.eye, context, train_cells(recipe.model, SIDE)
            )
        case HanScenes() as data:
            return load_scenes(data, context)
        case HanCrowdedScenes() as data:
            return load_crowded_scenes(data, context)
        case HanQuestions(name=HanDataset.EASY_VQA) as data:
            return load_easy_vqa(data, context)
        case HanQuestions(name=HanDataset.CLEVR) as data:
            return load_clevr(data, recipe.model.eye, context, train_cells(recipe.model, data.size))
        case HanQuestions() as data:
            return load_photos(data, recipe.model.eye, context)


def grid_shape(eye: HanImageEncoder, side: int) -> tuple[int, int]:
    """Return the grid of cells that an encoder makes of a square image; strides round up."""
    cells = -(-side // PIXELS[eye])
    return cells, cells


def train_cells(model: HanModel, side: int) -> tuple[int, int] | None:
    """Return the grid on which training needs the deciding objects; None if it does not."""
    hard = model.soft is HanSoftAttention.NONE
    return grid_shape(model.eye, side) if hard and model.select is HanSelect.ORACLE else None


def load_sort_of_clevr(
    data: HanSortOfClevr,
    eye: HanImageEncoder,
    context: RunContext,
    oracle: tuple[int, int] | None = None,
) -> HanData:
    """Generate Sort-of-CLEVR; training images are rendered once and kept on the device.

    In training an item is an image with all of its questions. The CNN then runs once for all of
    them, which is most of the work where few cells are kept. The ground truth is on the grid of
    the encoder for validation and test; training uses it only with an oracle, on its grid.
    """
    relations = [name for name in QUESTION_TEMPLATES if data.ternary or name != TERNARY]
    # Ten questions of every type per image.
    each = 10 * len(relations)
    images = None if data.limit is None else -(-data.limit // each)
    counts = replace(data, limit=images).counts()

    def open_split(split: str) -> datasets.SortOfClevr:
        cells = oracle or CELLS if split == "train" else grid_shape(eye, SIDE)
        return datasets.SortOfClevr(split, data.world, counts[split], relations, cells)

    train, val, test = open_splits(open_split, data.limit)
    in_memory = InMemoryDataset.from_dataset(train, processes(context.device).device)
    return HanData(
        group_by_image(in_memory, each),
        *evaluators(val, test, train.data.classes, PORTION),
        train.data.reader.size,
        reader=train.data.reader,
    )


def group_by_image(held: InMemoryDataset, each: int) -> InMemoryDataset:
    """Group each run of `each` consecutive samples, which share an image, into one item.

    A remainder is dropped; with fewer than `each` samples all of them are one item.
    """
    if held.each != 1 or held.picture is None:
        raise ValueError(
            f"{held.name} must have one sample per item and images, got {held.each} per item"
        )
    each = min(each, len(held.ids))
    whole = len(held.ids) // each * each
    return replace(held, ids=held.ids[:whole], each=each, picture=held.picture[:whole:each])


def load_scenes(data: HanScenes, context: RunContext) -> HanData:
    """Generate questions about scenes, with the deciding cells."""
    train, val, test = open_scenes(data)
    return HanData(
        InMemoryDataset.from_dataset(train, processes(context.device).device),
        val,
        test,
        train.vocabulary.size,
        reader=train.vocabulary,
    )


def load_crowded_scenes(data: HanCrowdedScenes, context: RunContext) -> HanData:
    """Generate questions about crowded scenes, with the deciding cell."""
    train, val, test = (
        datasets.CrowdedScenes(split, data.world, count, data.questions, data.side)
        for split, count in data.counts().items()
    )
    portion = max(1, PORTION // data.questions)  # of scenes
    return HanData(
        InMemoryDataset.from_dataset(train, processes(context.device).device),
        *evaluators(val, test, train.answers, portion),
        train.vocabulary.size,
        reader=train.vocabulary,
    )


def load_easy_vqa(data: HanQuestions, context: RunContext) -> HanData:
    """Load easy-VQA, whose images have 64 x 64 pixels."""
    train, val, test = open_splits(
        lambda split: datasets.EasyVqa(context.data_root, split), data.limit
    )
    return HanData(
        InMemoryDataset.from_dataset(train, processes(context.device).device),
        *evaluators(val, test, train.data.classes, PORTION),
        train.data.reader.size,
        reader=train.data.reader,
    )


def load_clevr(
    data: HanQuestions,
    eye: HanImageEncoder,
    context: RunContext,
    oracle: tuple[int, int] | None = None,
) -> HanData:
    """Load CLEVR at 128 x 128 pixels; training images are shifted up to 8 pixels and rotated.

    With `oracle`, the grid of an oracle, they are not: the deciding objects would not move along.
    """
    root, look = data_root(context.data_root), PhotoInput((data.size, data.size), stretch)
    whole_train = datasets.Clevr(root, "train", photo_input=look)
    if oracle is not None:
        whole_train = datasets.Clevr(
            root, "train", cells=oracle, spread=SPREAD, photo_input=look, reader=whole_train.reader
        )
    cells = grid_shape(eye, data.size)
    test = datasets.Clevr(
        root, "val", cells=cells, spread=SPREAD, photo_input=look, reader=whole_train.reader
    )
    # Small subsets hold out an eighth of the questions.
    held = min(HELD_OUT, len(whole_train) // 8 or 1)

    def moved(batch: Batch) -> Batch:
        # The seed is drawn from the global RNG, whose state is in every checkpoint: a resumed run
        # moves the images in the same way.
        generator = torch.Generator().manual_seed(int(torch.randint(2**31, ())))
        shifted = datasets.random_shift(batch, generator, MARGIN)
        return rotate_images(shifted, generator, ANGLE)

    ends, classes = len(whole_train) - held, whole_train.classes
    val = DatasetSlice(whole_train, "val", ends, len(whole_train), data.limit)
    tested = DatasetSlice(test, "test", 0, len(test), data.limit)
    return HanData(
        DatasetSlice(whole_train, "train", 0, ends, data.limit),
        Evaluator(val, classes),
        Evaluator(tested, classes, batch_size=PORTION),
        whole_train.reader.size,
        augment=moved if oracle is None else lambda batch: batch,
        reader=whole_train.reader,
        canvas=Canvas.STRETCH,
    )


class DatasetSlice(DatasetView[Dataset]):
    """The items of a dataset from `start` to `stop`, or the first `limit` of them, as a split."""

    def __init__(
        self, data: Dataset, split: str, start: int, stop: int, limit: int | None = None
    ) -> None:
        super().__init__(data)
        # A split that is cut from another one says so in its name, for the dataset entry of the
        # results.
        if split != self.split:
            self.name = f"{data.name} {data.split}"
        self.split, self.start = split, start
        self.count = stop - start if limit is None else min(limit, stop - start)

    def __len__(self) -> int:
        return self.count

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the items at these indices of the slice."""
        return self.data.batch([self.start + int(place) for place in indices])


def load_photos(data: HanQuestions, eye: HanImageEncoder, context: RunContext) -> HanData:
    """Load questions about photos, with cached features or end to end."""
    root, look = data_root(context.data_root), PhotoInput((data.size, data.size))
    device = processes(context.device).device
    reader = split_opener(data, root)
    cache = open_cache(data, root, reader, device) if eye is HanImageEncoder.CACHED else None
    seen = look if cache is None else replace(look, features=cache)
    train, val, test = (reader(split, seen) for split in SPLITS)
    tested: Any = test
    # The COCO photos may be missing where only features were cached.
    if cache is not None and data.name is HanDataset.DAQUAR:
        tested = PhotosWithFeatures(reader("test", look), cache)
    train_data: Dataset = LimitedDataset(train, data.limit)
    # Features that fit stay on the device; others are read for every batch.
    if cache is not None and cache_bytes(cache) <= MAX_BYTES_IN_MEMORY:
        whole = InMemoryDataset.from_dataset(train_data, device)
        train_data = whole.with_features(train.photo_ids(range(len(whole))), cache.get)
    elif cache is None and data.name is HanDataset.DAQUAR:
        train_data = InMemoryDataset.from_dataset(train_data, device)
    return HanData(
        train_data,
        *evaluators(
            LimitedDataset(val, data.limit),
            LimitedDataset(tested, data.limit),
            train.classes,
            PORTION,
        ),
        train.reader.size,
        None if cache is None else cached_grid(cache),
        similarity=wordnet_similarity(root) if data.name is HanDataset.DAQUAR else None,
        reader=train.reader,
        backbone=None if cache is None else cache_backbone(cache, data),
        pixels=(data.size, data.size),
    )


def cache_bytes(cache: FeatureCache) -> int:
    """Return the memory of all cached features in bytes."""
    cells, width = cache.shape
    return len(cache) * cells * width * torch.finfo(torch.float32).bits // 8


def cache_backbone(cache: FeatureCache, data: HanQuestions) -> BackboneSpec:
    """Return the backbone of cached features; for a given folder, the name stored there."""
    name = data.backbone if data.features is None else cache.key.backbone
    return BackboneSpec(name, cache.key.weights)


def wordnet_similarity(root: Path) -> WordSimilarity | None:
    """Return the WordNet similarity of two words, or None without its files below `root`."""
    if not all((root / wordnet.FOLDER / name).is_file() for name in wordnet.FILES):
        return None
    return wordnet.WordNet(root).wup_similarity


def split_opener(data: HanQuestions, root: Path) -> Callable[[str, Any], Any]:
    """Return a function that opens a split of a photo dataset."""
    kind: Any = datasets.Daquar if data.name is HanDataset.DAQUAR else datasets.vqacp2
    return lambda split, look: kind(root, split, limit=data.answers, photo_input=look)


def cached_grid(cache: FeatureCache) -> CellGrid:
    """Return the width and the grid of cached cells, which must be square."""
    cells, width = cache.shape
    side = round(cells**0.5)
    if side * side != cells:
        raise UserError(f"{cache.folder} has {cells} cells per photo: a square grid is needed.")
    return width, (side, side)
