"""From the plain values of Learn to Pay Attention to data, network and training."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from overt import files, models
from overt.data.batch import Batch
from overt.data.source import Source as DataSet
from overt.errors import BadInput
from overt.models.paying.attention import DECISIONS, SCORES
from overt.models.paying.resnet import Depth
from overt.models.paying.vgg import Dropout, Sizes
from overt.recipes.building import SPLITS, First, dice, experiment
from overt.recipes.evaluation import Judge
from overt.recipes.experiment import Evaluation, Experiment
from overt.recipes.ltpa.evaluation import Others, capped, evaluated, judged_further
from overt.recipes.ltpa.judging import Masks
from overt.recipes.ltpa.recipe import (
    Fall,
    Files,
    LtpaRecipe,
    Model,
    Net,
    Pictures,
    Scenes,
    Sgd,
    label_of,
)
from overt.recipes.recipe import Context, Train
from overt.train import ParameterSet, Reporter, processes, warm_then_cosine

PORTION = 256  # images that are judged at a time
CELL = 4  # pixels a side of a cell of the last level
WEIGHTS = "model.safetensors"
HALVINGS = 12  # the published 300 epochs halve the rate every 25


def pictures(recipe: LtpaRecipe, data: Pictures, context: Context) -> Experiment:
    """CIFAR, SVHN or birds, held on the device."""
    from overt.data import sets

    reader = reader_of(data.name, sets.root_of(context.data_root))

    def part(split: str) -> First[Labelled]:
        return First(reader(split), data.limit)

    if data.held_out:
        train, held, test = map(part, SPLITS)
        return trained(recipe, context, train, held, test, train.data.classes)
    train, test = part("train+val"), part("test")
    return trained(recipe, context, train, None, test, train.data.classes)


@runtime_checkable
class Labelled(DataSet, Protocol):
    """A data set that names its classes."""

    @property
    def classes(self) -> tuple[str, ...]: ...


def reader_of(name: Files, root: Path) -> Callable[[str], Labelled]:
    """What opens a split of one of the paper's sets."""
    from overt import data

    match name:
        case Files.CIFAR10:
            return lambda split: data.Cifar10(root, split)
        case Files.CIFAR100:
            return lambda split: data.Cifar100(root, split)
        case Files.SVHN:
            return lambda split: data.Svhn(root, split)
        case Files.CUB:
            return lambda split: data.Cub(root, split)


def scenes(recipe: LtpaRecipe, data: Scenes, context: Context) -> Experiment:
    """Scenes to be told apart by the shape of their largest thing, drawn once."""
    from overt.data.scenes.classify import DominantScenes

    side = -(-data.size // CELL)

    def part(split: str, count: int) -> DominantScenes:
        most = count if data.limit is None else min(count, data.limit)
        return DominantScenes(split, data.world, most, size=data.size, cells=(side, side))

    train, held, test = (
        part(split, count)
        for split, count in zip(SPLITS, (data.train, data.val, data.test), strict=True)
    )

    def masks(rows: Sequence[int]) -> Tensor:
        return torch.stack([test.mask(row) for row in rows])

    return trained(recipe, context, train, held, test, train.classes, masks)


def trained(
    recipe: LtpaRecipe,
    context: Context,
    train: DataSet,
    held: DataSet | None,
    test: DataSet,
    classes: tuple[str, ...],
    masks: Masks | None = None,
) -> Experiment:
    """One stage of training on images that lie on the device, and a test of every level.

    What the network is to be judged by is opened before it is trained.
    """
    from overt.data import Resident

    device = processes(context.device).device
    change = changed_by(recipe.data)

    def moved(batch: Batch) -> Batch:
        return change(batch, dice(batch, recipe.train.graph))

    model = network(recipe.model, len(classes), first_pool(recipe.data))
    if recipe.model.start is not None:
        begin_from(model, start_of(recipe.model, context.seed))
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if isinstance(recipe.data, Pictures) and recipe.data.name is Files.CUB:
        # photos are opened once, not at every validation
        held = None if held is None else Resident.of(held)
        test = Resident.of(test)
    judge = Judge(test, classes, portion=PORTION)
    built = experiment(
        model,
        Resident.of(train, device),
        None if held is None else Judge(held, classes, portion=PORTION),
        judge,
        recipe.train,
        context,
        vary=moved if recipe.data.vary else lambda batch: batch,
        learn=lambda net, plan: sgd(net, plan, recipe.sgd),
    )
    asked = capped(recipe.judge, recipe.data.limit)
    own = recipe.data.name if isinstance(recipe.data, Pictures) else "scenes"
    others = Others.opened(context, own, asked, device)

    def evaluate(reporter: Reporter) -> Evaluation:
        found = evaluated(judge, model, device)
        if not asked.items:
            return found
        return judged_further(found, judge, model, device, asked, masks, others)

    return replace(built, evaluate=evaluate, sources=[*built.sources, *others.sources()])


def changed_by(data: Pictures | Scenes) -> Callable[[Batch, torch.Generator], Batch]:
    """How training pictures are changed: cropped and flipped, but for digits, which are cropped."""
    from overt.data import shift, vary

    return shift if isinstance(data, Pictures) and data.name is Files.SVHN else vary


def first_pool(data: Pictures | Scenes) -> int:
    """The side of the first pooling: 5 for birds of 80 x 80 pixels, else 2 (A.2)."""
    return 5 if isinstance(data, Pictures) and data.name is Files.CUB else 2


def start_of(model: Model, seed: int) -> Path:
    """The folder that `model.start` names, for this row and this seed."""
    assert model.start is not None
    named = model.start.replace("{seed}", str(seed))
    if "{row}" not in named:
        return Path(named)
    label = label_of(replace(model, start=None))
    if label is None:
        raise BadInput("model.start has {row} in it, and this network is no row of Table 1.")
    return Path(named.replace("{row}", label))


def network(model: Model, classes: int, pool: int = 2) -> nn.Module:
    """The network of a row; `pool` is the side of the first pooling of a VGG."""
    dropout = Dropout(model.first_dropout, model.inside_dropout, model.dropout)
    sizes = Sizes(classes, model.width, dropout, pool)
    depth = Depth(classes, model.width, model.blocks)
    score, decision = SCORES[model.score.value], DECISIONS[model.decision.value]
    match model.net:
        case Net.VGG:
            return models.VGG(sizes)
        case Net.GAP:
            return models.VGGGap(sizes)
        case Net.PAN:
            return models.VGGProgressive(sizes)
        case Net.RESNET:
            return models.ResNet(depth)
        case Net.VGG_ATTENTION:
            return models.VGGAttention(sizes, model.levels, score, decision)
        case Net.RESNET_ATTENTION:
            return models.ResNetAttention(depth, model.levels, score, decision)


def begin_from(model: nn.Module, folder: Path) -> None:
    """Give a network what another of its kind has learned, but for the classifier (CUB, A.3)."""
    place = folder / "model" if (folder / "model").is_dir() else folder
    if not (place / WEIGHTS).is_file():
        raise BadInput(f"model.start={folder} holds no network; name the folder of a finished run.")
    files.verify(place)
    theirs, own = files.read_tensors(place / WEIGHTS), model.state_dict()
    taken = {name: one for name, one in own.items() if "decision" not in name.split(".")}
    for name, one in taken.items():
        if name not in theirs or theirs[name].shape != one.shape:
            raise BadInput(
                f"model.start={folder} holds another network: its {name} is not one of "
                f"{tuple(one.shape)}; the kind, the levels and the width must be the same."
            )
    model.load_state_dict({**own, **{name: theirs[name] for name in taken}})


def sgd(model: nn.Module, plan: Train, options: Sgd) -> ParameterSet:
    """All parameters, biases and norms too, under SGD with one rate and one decay."""
    optimizer = torch.optim.SGD(
        model.parameters(),
        plan.rate,
        momentum=options.momentum,
        dampening=options.dampening,
        weight_decay=plan.decay,
        nesterov=options.nesterov,
    )
    match options.fall:
        case Fall.COSINE:
            schedule = warm_then_cosine(plan.warmup)
        case Fall.HALVES:
            schedule = warm_then_halves(plan.warmup)
    return ParameterSet(optimizer, schedule, plan.clip)


def warm_then_halves(warmup: float) -> Callable[[float], float]:
    """A rate that climbs over the first `warmup` of training, and is halved every twelfth of it."""

    def factor(fraction: float) -> float:
        if fraction < warmup:
            return max(fraction / warmup, 0.01)
        return 0.5 ** int(fraction * HALVINGS)

    return factor
