"""What networks of hard attention are trained, validated and tested on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from overt.data.batch import Batch
from overt.data.clevr import turned
from overt.data.features import FeatureCache
from overt.data.held import Held
from overt.data.source import Source as DataSet
from overt.data.vocabulary import Reader
from overt.errors import BadInput
from overt.recipes.building import CELL, SPLITS, First
from overt.recipes.evaluation import Judge
from overt.recipes.han.evaluation import Alike
from overt.recipes.han.networks import Grid
from overt.recipes.han.recipe import Eye, Files, HanRecipe, Questions, Scenes, SortOfClevr
from overt.recipes.recipe import Context
from overt.recipes.spoken import Backbone, Canvas
from overt.train import processes

PIXELS = {Eye.STRIDED: 32, Eye.COARSE: 16, Eye.FINE: 8}  # of a cell's side
PORTION = 256  # questions that are judged at a time
HELD_OUT = 10_000  # training questions of CLEVR that validate
MARGIN = 8  # pixels by which pictures of CLEVR are moved in training
ANGLE = 0.05  # radians by which they are turned
MOST_HELD = 2**31  # bytes of features that are held on the device while training
SPREAD = 8.0  # pixels around the middle of a thing of CLEVR that count as it

Vary = Callable[[Batch], Batch]


@dataclass(frozen=True)
class Parts:
    """What a network is trained, validated and tested on; `cached` if it looks at features.

    `alike` says how alike two words are, where answers are scored by meaning as well. The rest is
    for whoever asks the network later: how it reads, what makes its features, and how photos are
    brought to the size it sees.
    """

    train: DataSet
    held: Judge
    test: Judge
    vocabulary: int
    cached: Grid | None = None
    vary: Vary = lambda batch: batch
    alike: Alike | None = None
    reader: Reader | None = None
    backbone: Backbone | None = None
    canvas: Canvas = Canvas.CROP
    pixels: tuple[int, int] | None = None


def opened(recipe: HanRecipe, context: Context) -> Parts:
    """The three parts of the data set that a recipe is about."""
    match recipe.data:
        case SortOfClevr() as data:
            return sort_of_clevr(data, recipe.model.eye, context)
        case Scenes() as data:
            return scenes(data, context)
        case Questions(name=Files.EASY_VQA) as data:
            return easy_questions(data, context)
        case Questions(name=Files.CLEVR) as data:
            return clevr(data, recipe.model.eye, context)
        case Questions() as data:
            return photos(data, recipe.model.eye, context)


def grid_seen(eye: Eye, side: int) -> tuple[int, int]:
    """The rows and columns of cells that an eye makes of a square picture: strides round up."""
    cells = -(-side // PIXELS[eye])
    return cells, cells


def sort_of_clevr(data: SortOfClevr, eye: Eye, context: Context) -> Parts:
    """Drawn pictures; those of training are drawn once and held on the device.

    In training an item is a picture with all of its questions. Its CNN then runs once for all of
    them, which is most of the work where few cells are kept. What decides is told on the grid of
    the eye where networks are judged by it; training does not ask.
    """
    from overt.data import SortOfClevr as Drawn
    from overt.data.shapes import SIDE
    from overt.data.sortclevr import ASKED, CELLS, TERNARY

    relations = [name for name in ASKED if data.ternary or name != TERNARY]
    each = 10 * len(relations)

    def part(split: str, count: int) -> First[Drawn]:
        most = count if data.limit is None else min(count, -(-data.limit // each))
        cells = CELLS if split == "train" else grid_seen(eye, SIDE)
        return First(Drawn(split, data.world, most, relations, cells), data.limit)

    train, held, test = (
        part(split, count)
        for split, count in zip(SPLITS, (data.train, data.val, data.test), strict=True)
    )
    kept = Held.of(train, processes(context.device).device)
    classes = train.data.classes
    return Parts(
        together(kept, each),
        Judge(held, classes, portion=PORTION),
        Judge(test, classes, portion=PORTION),
        train.data.reader.size,
        reader=train.data.reader,
    )


def together(held: Held, each: int) -> Held:
    """The same samples with `each` that follow one another as one item, about one picture.

    What is left over is left out; where there are fewer than `each` they are one item.
    """
    if held.each != 1 or held.picture is None:
        raise ValueError(f"{held.name} already has {held.each} samples in an item, or no pictures")
    each = min(each, len(held.ids))
    whole = len(held.ids) // each * each
    return replace(held, ids=held.ids[:whole], each=each, picture=held.picture[:whole:each])


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
        reader=train.vocabulary,
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
        reader=train.data.reader,
    )


def clevr(data: Questions, eye: Eye, context: Context) -> Parts:
    """CLEVR at 128 x 128 pixels, in training moved by up to 8 and turned by up to .05 radians."""
    from overt.data import Clevr
    from overt.data.asked import Look
    from overt.data.images import stretch
    from overt.data.resident import shift
    from overt.data.sets import root_of

    root, look = root_of(context.data_root), Look((data.size, data.size), stretch)
    learnt = Clevr(root, "train", look=look)
    cells = grid_seen(eye, data.size)
    test = Clevr(root, "val", cells=cells, spread=SPREAD, look=look, reader=learnt.reader)
    held = min(HELD_OUT, len(learnt) // 8 or 1)

    def moved(batch: Batch) -> Batch:
        generator = torch.Generator().manual_seed(int(torch.randint(2**31, ())))
        return turned(shift(batch, generator, MARGIN), generator, ANGLE)

    ends = len(learnt) - held
    return Parts(
        Portion(learnt, "train", 0, ends, data.limit),
        Judge(Portion(learnt, "val", ends, len(learnt), data.limit), learnt.classes),
        Judge(Portion(test, "test", 0, len(test), data.limit), learnt.classes, portion=PORTION),
        learnt.reader.size,
        vary=moved,
        reader=learnt.reader,
        canvas=Canvas.STRETCH,
    )


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
    from overt.recipes.han.features import Pictured, cache_of

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
    learned: DataSet = First(train, data.limit)
    device = processes(context.device).device
    if cache is not None and bytes_of(cache) <= MOST_HELD:
        whole = Held.of(learned, device)
        learned = whole.seen(train.photo_ids(range(len(whole))), cache.get)
    elif cache is None and data.name is Files.DAQUAR:
        learned = Held.of(learned, device)
    return Parts(
        learned,
        Judge(First(held, data.limit), classes, portion=PORTION),
        Judge(First(tested, data.limit), classes, portion=PORTION),
        train.reader.size,
        None if cache is None else grid_of(cache),
        alike=nouns(root) if data.name is Files.DAQUAR else None,
        reader=train.reader,
        backbone=None if cache is None else backbone_of(cache, data),
        pixels=(data.size, data.size),
    )


def bytes_of(cache: FeatureCache) -> int:
    """How much memory the features of all pictures take."""
    cells, width = cache.shape
    return len(cache) * cells * width * torch.finfo(torch.float32).bits // 8


def backbone_of(cache: FeatureCache, data: Questions) -> Backbone:
    """What made the features; those of a folder that is named go by the name they have there."""
    name = data.backbone if data.features is None else cache.key.backbone
    return Backbone(name, cache.key.weights)


def nouns(root: Path) -> Alike | None:
    """How alike two words are by WordNet, where its files lie below `root`; else None."""
    from overt.data.wordnet import FILES, FOLDER, WordNet

    if not all((root / FOLDER / name).is_file() for name in FILES):
        return None
    return WordNet(root).alike


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
