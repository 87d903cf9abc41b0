"""Learn to Pay Attention: training and evaluation of a recipe."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from overt.data import InMemoryImages
from overt.data.batch import Batch
from overt.data.catalog import data_root
from overt.data.dataset import Dataset
from overt.data.scenes.classification import DominantScenes
from overt.experiments.builders import augmentation_generator, classification_experiment
from overt.experiments.dataset_views import LimitedDataset, open_splits
from overt.experiments.evaluate import Evaluator
from overt.experiments.experiment import Evaluation, Experiment
from overt.experiments.recipe import RunContext, TrainConfig
from overt.papers.ltpa.analysis import MaskFn
from overt.papers.ltpa.config import (
    LtpaDataset,
    LtpaImages,
    LtpaRecipe,
    LtpaScenes,
    LtpaSchedule,
    LtpaSgd,
)
from overt.papers.ltpa.data import augmentation, first_pool_size, split_opener
from overt.papers.ltpa.evaluate import TransferSets, add_analysis, cap_evaluation, evaluate_model
from overt.papers.ltpa.model import build_network, load_start_weights, start_folder
from overt.train import ParameterSet, Reporter, processes, warmup_cosine

PORTION = 256  # images per evaluation batch
CELL = 4  # side of a cell of the last level in pixels
HALVINGS = 12  # in the paper, every 25 of 300 epochs


def build(recipe: LtpaRecipe, context: RunContext) -> Experiment:
    """Return the data, the network, one stage of training, and the evaluation."""
    match recipe.data:
        case LtpaImages() as data:
            return build_images(recipe, data, context)
        case LtpaScenes() as data:
            return build_scenes(recipe, data, context)


def build_images(recipe: LtpaRecipe, data: LtpaImages, context: RunContext) -> Experiment:
    """Build an experiment on CIFAR, SVHN or CUB, kept on the device."""
    open_split = split_opener(data.name, data_root(context.data_root))
    if data.held_out:
        train, val, test = open_splits(open_split, data.limit)
        return build_experiment(recipe, context, train, val, test, train.data.classes)
    train, test = (LimitedDataset(open_split(split), data.limit) for split in ("train+val", "test"))
    return build_experiment(recipe, context, train, None, test, train.data.classes)


def build_scenes(recipe: LtpaRecipe, data: LtpaScenes, context: RunContext) -> Experiment:
    """Build an experiment on scenes classified by the shape of their largest object."""
    side = -(-data.size // CELL)
    train, val, test = (
        DominantScenes(split, data.world, count, size=data.size, cells=(side, side))
        for split, count in data.counts().items()
    )

    def masks(rows: Sequence[int]) -> Tensor:
        return torch.stack([test.mask(row) for row in rows])

    return build_experiment(recipe, context, train, val, test, train.classes, masks)


def build_experiment(
    recipe: LtpaRecipe,
    context: RunContext,
    train: Dataset,
    val: Dataset | None,
    test: Dataset,
    classes: tuple[str, ...],
    masks: MaskFn | None = None,
) -> Experiment:
    """Build one stage of training on images in device memory, and the evaluation of every level.

    The datasets of the analyses are opened before training, so that missing files fail early.
    """
    device = processes(context.device).device
    change = augmentation(recipe.data)

    def moved(batch: Batch) -> Batch:
        return change(batch, augmentation_generator(batch, recipe.train.graph))

    model = build_network(recipe.model, len(classes), first_pool_size(recipe.data))
    if recipe.model.start is not None:
        load_start_weights(model, start_folder(recipe.model, context.seed))
    # `normalize_pixels` returns channels-last images: weights in the same format need no
    # conversions.
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if isinstance(recipe.data, LtpaImages) and recipe.data.name is LtpaDataset.CUB:
        # open photos once instead of at every validation
        val = None if val is None else InMemoryImages.from_dataset(val)
        test = InMemoryImages.from_dataset(test)
    evaluator = Evaluator(test, classes, batch_size=PORTION)
    built = classification_experiment(
        model,
        InMemoryImages.from_dataset(train, device),
        None if val is None else Evaluator(val, classes, batch_size=PORTION),
        evaluator,
        recipe.train,
        context,
        augment=moved if recipe.data.vary else lambda batch: batch,
        make_parameter_set=lambda net, plan: build_optimizer(net, plan, recipe.sgd),
    )
    settings = cap_evaluation(recipe.judge, recipe.data.limit)
    own = recipe.data.name if isinstance(recipe.data, LtpaImages) else "scenes"
    transfer = TransferSets.open(context, own, settings, device)

    def evaluate(reporter: Reporter) -> Evaluation:
        found = evaluate_model(evaluator, model, device)
        if not settings.items:
            return found
        return add_analysis(found, evaluator, model, device, settings, masks, transfer)

    return replace(built, evaluate=evaluate, sources=[*built.sources, *transfer.sources()])


def build_optimizer(model: nn.Module, plan: TrainConfig, options: LtpaSgd) -> ParameterSet:
    """Return SGD over all parameters, biases and norms too, with one rate and one decay."""
    optimizer = torch.optim.SGD(
        model.parameters(),
        plan.rate,
        momentum=options.momentum,
        dampening=options.dampening,
        weight_decay=plan.decay,
        nesterov=options.nesterov,
    )
    match options.fall:
        case LtpaSchedule.COSINE:
            schedule = warmup_cosine(plan.warmup)
        case LtpaSchedule.HALVES:
            schedule = warm_then_halving(plan.warmup)
    return ParameterSet(optimizer, schedule, plan.clip)


def warm_then_halving(warmup: float) -> Callable[[float], float]:
    """Return a schedule with a linear warm-up that is halved every twelfth of training (A.3)."""

    def factor(fraction: float) -> float:
        if fraction < warmup:
            # Not 0 at the first step, which would then not train.
            return max(fraction / warmup, 0.01)
        return 0.5 ** int(fraction * HALVINGS)

    return factor
