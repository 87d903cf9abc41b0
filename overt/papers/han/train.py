"""Bootstrapping Hard Attention: training and evaluation of a recipe."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import cast

import torch
from torch import nn

from overt import losses
from overt.data.batch import Batch
from overt.data.dataset import Dataset
from overt.data.in_memory import InMemoryDataset
from overt.errors import UserError
from overt.experiments.builders import dataset_info, fit_stage
from overt.experiments.dataset_views import DatasetView, example_of
from overt.experiments.experiment import Evaluation, Experiment, Stage
from overt.experiments.inference_spec import ImageInput, InferenceSpec, NotInteractive, make_spec
from overt.experiments.recipe import RunContext, TrainConfig
from overt.nn import AttentionModel
from overt.nn.hard_attention.attention import HardAttention
from overt.nn.hard_attention.selection import mask_cells
from overt.papers.han.config import HanRecipe, HanSchedule
from overt.papers.han.data import HanData, load_data
from overt.papers.han.evaluate import evaluate_model, validation_accuracy
from overt.papers.han.model import build_model
from overt.papers.han.networks import HAN
from overt.papers.han.time_to_accuracy import AccuracyTimer
from overt.train import (
    FitResult,
    Losses,
    Monitor,
    ParameterSet,
    Progress,
    Reporter,
    doubling_warmup,
    processes,
    warmup_cosine,
)

MAX_CACHED_ITEMS = 4096  # items up to which validation batches are kept on the device
START = 0.01  # initial share of the rate under `doubling`


def build(recipe: HanRecipe, context: RunContext) -> Experiment:
    """Return the data, the network, one stage of training, and the evaluation."""
    parts = load_data(recipe, context)
    model = build_model(recipe.model, parts.vocabulary, len(parts.test.classes), parts.cached)
    if recipe.model.start is not None:
        load_start_weights(model, Path(recipe.model.start))
    return build_experiment(recipe, context, parts, model)


def load_start_weights(model: nn.Module, folder: Path) -> None:
    """Load the weights of a saved network that has the same layers."""
    saved = type(model).from_pretrained(folder)  # type: ignore[attr-defined]
    try:
        model.load_state_dict(saved.state_dict())
    except RuntimeError as problem:
        raise UserError(
            f"model.start={folder} has other layers than this network: use the same model settings."
        ) from problem


def build_optimizer(model: nn.Module, plan: TrainConfig, recipe: HanRecipe) -> ParameterSet:
    """Return AdamW over all parameters, with the schedule of the recipe."""
    optimizer = torch.optim.AdamW(model.parameters(), plan.rate, weight_decay=plan.decay)
    match recipe.adam.schedule:
        case HanSchedule.COSINE:
            return ParameterSet(optimizer, warmup_cosine(plan.warmup), plan.clip)
        case HanSchedule.FIXED:
            return ParameterSet(optimizer, clip=plan.clip)
        case HanSchedule.DOUBLING:
            # Schedules get the completed share of training instead of a number of epochs.
            every = recipe.adam.every / plan.epochs
            return ParameterSet(optimizer, doubling_warmup(START, every), plan.clip)


def training_plan(recipe: HanRecipe, items: int) -> TrainConfig:
    """Return the training of a recipe on this many items, with `adam.length` times the steps.

    Args:
        recipe: the recipe.
        items: number of training items.

    Returns:
        The plan; that of the recipe for a length of 1.

    Example:
        >>> from overt.experiments import settings
        >>> from overt.papers.han.config import han_sortclevr
        >>> recipe = settings.apply(han_sortclevr(), ["train.steps=100", "adam.length=0.62"])
        >>> training_plan(recipe, items=9800).steps
        62
    """
    plan, length = recipe.train, recipe.adam.length
    if length == 1:
        return plan
    batches = -(-items // plan.batch)
    steps = plan.epochs * -(-batches // plan.accumulate)
    if plan.steps is not None:
        steps = min(steps, plan.steps)
    # More steps need more epochs, which end a run too.
    epochs = max(plan.epochs, ceil(plan.epochs * length))
    return replace(plan, steps=max(1, round(steps * length)), epochs=epochs)


def build_experiment(
    recipe: HanRecipe, context: RunContext, parts: HanData, model: nn.Module
) -> Experiment:
    """Train with cross-entropy, validate by question type, then evaluate on the test split.

    A question whose answer is not a class is ignored in training, and wrong in the test. When
    steps are captured in a CUDA graph, batches have a fixed width, and a selection rule with a
    variable number of cells drops cells by a weight of 0.
    """
    ranks = processes(context.device)
    timer = AccuracyTimer(context.out, ranks.is_main)
    # Stacked attention has no selection rule.
    attention = getattr(model, "attend", None)
    train_data = parts.train
    if recipe.train.graph:
        if isinstance(train_data, InMemoryDataset):
            train_data = train_data.with_full_length()
        if isinstance(attention, HardAttention) and not attention.cuda_graph_safe():
            attention.collect = mask_cells

    def before(progress: Progress) -> Hashable:
        timer.begin_step(progress.step)
        if isinstance(attention, HardAttention):
            # The result is the key of the CUDA graph: when the rule keeps another number of cells,
            # the step is captured again.
            return attention.advance(progress.fraction)
        return None

    def step(net: nn.Module, batch: Batch, progress: Progress) -> Losses:
        output = net(parts.augment(batch))
        assert batch.labels is not None
        return {"model": {"task": answer_loss(output.prediction, batch.labels)}}

    validation = parts.val
    if len(validation.data) <= MAX_CACHED_ITEMS:
        validation = replace(validation, data=BatchesOnDevice(validation.data, ranks.device))

    def validate(net: nn.Module) -> dict[str, float]:
        with timer.paused():
            found = validation_accuracy(validation, cast(AttentionModel, net), ranks.device)
        timer.record(found)
        return found

    plan = training_plan(recipe, len(train_data))
    sets = {"model": build_optimizer(model, plan, recipe)}

    def run(resume: bool, reporter: Reporter) -> FitResult:
        timer.start(resume)
        return fit_stage(
            *(model, train_data, step, sets, plan, context, resume, reporter),
            monitor=Monitor(validate, "accuracy"),
            before_step=before,
        )

    def evaluate(reporter: Reporter) -> Evaluation:
        found = evaluate_model(
            parts.test, cast(AttentionModel, model), ranks.device, parts.similarity
        )
        return replace(found, clock=timer.summary())

    splits = (parts.train, parts.val.data, parts.test.data)
    example = example_of(parts.test.data)
    return Experiment(
        model=model,
        sources=[dataset_info(data) for data in splits],
        stages=[Stage("train", run)],
        evaluate=evaluate,
        example=example,
        inference_spec=inference_spec_of(model, parts, example),
        test_data=parts.test.data,
    )


class BatchesOnDevice(DatasetView[Dataset]):
    """A small dataset whose batches are moved to a device once."""

    def __init__(self, data: Dataset, device: torch.device) -> None:
        super().__init__(data)
        self.device = device
        self.batches: dict[tuple[int, ...], Batch] = {}

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the batch of these items, as it was returned before."""
        key = tuple(indices)
        if key not in self.batches:
            self.batches[key] = self.data.batch(indices).to(self.device)
        return self.batches[key]


def inference_spec_of(
    model: nn.Module, parts: HanData, example: Callable[[], Batch]
) -> InferenceSpec | NotInteractive | None:
    """Return how the network is used interactively: on pixels, or on features of a frozen CNN."""
    if isinstance(model, HAN) and model.oracle:
        return NotInteractive("its cells are selected by the ground truth of a dataset")
    return make_spec(
        model,
        parts.test.classes,
        parts.reader,
        example,
        ImageInput.PIXELS if parts.backbone is None else ImageInput.CELLS,
        parts.canvas,
        parts.backbone,
        parts.pixels,
    )


def answer_loss(prediction: torch.Tensor, labels: torch.Tensor) -> losses.Loss:
    """Compute cross-entropy over questions whose answer is a class; others have the label -1."""
    # In bfloat16 the log-softmax over many answers would be too coarse.
    precise = prediction.to(torch.promote_types(prediction.dtype, torch.float32))
    total = nn.functional.cross_entropy(precise, labels, ignore_index=-1, reduction="sum")
    return losses.Loss(total, (labels >= 0).sum())
