"""From the plain values of hard attention to an experiment: one training, and a test."""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch import nn

from overt import models, supervise
from overt.data.batch import Batch
from overt.data.held import Held
from overt.errors import BadInput
from overt.models.hard.attention import HardAttention
from overt.models.hard.selection import masked
from overt.recipes.building import limits, source, watching
from overt.recipes.experiment import Evaluation, Experiment, Stage
from overt.recipes.han.clock import Clock
from overt.recipes.han.data import Parts, opened
from overt.recipes.han.evaluation import evaluated, validated
from overt.recipes.han.networks import network
from overt.recipes.han.recipe import HanRecipe, Schedule
from overt.recipes.recipe import Context, Train
from overt.recipes.spoken import Mute, Sees, Spoken, spoken
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

FEW = 4096  # items up to which validation makes its batches once and keeps them on the device
START = 0.01  # of the rate, before it is doubled for the first time


def build(recipe: HanRecipe, context: Context) -> Experiment:
    """The data, the network and one stage of training."""
    parts = opened(recipe, context)
    model = network(recipe.model, parts.vocabulary, len(parts.test.classes), parts.cached)
    if recipe.model.start is not None:
        begin(model, Path(recipe.model.start))
    return trained(recipe, context, parts, model)


def begin(model: nn.Module, folder: Path) -> None:
    """Give a network the weights of a saved one that has the same layers."""
    saved = type(model).from_pretrained(folder)  # type: ignore[attr-defined]
    try:
        model.load_state_dict(saved.state_dict())
    except RuntimeError as problem:
        raise BadInput(
            f"The network in {folder} has other layers than this one, so model.start cannot be it."
        ) from problem


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

    A question whose answer is no class teaches nothing, and is wrong in the test. Where steps are
    recorded, batches have all words, and cells are left out by a weight of 0 where their number is
    not known beforehand.
    """
    ranks = processes(context.device)
    clock = Clock(context.out, ranks.first)
    attends = getattr(model, "attend", None)
    learned = parts.train
    if recipe.train.graph:
        learned = learned.uncut() if isinstance(learned, Held) else learned
        if isinstance(attends, HardAttention) and not attends.recordable():
            attends.collect = masked

    def before(progress: Progress) -> Hashable:
        clock.at(progress.step)
        return attends.advance(progress.fraction) if isinstance(attends, HardAttention) else None

    def step(net: nn.Module, batch: Batch, progress: Progress) -> Losses:
        output = net(parts.vary(batch))
        assert batch.labels is not None
        return {"model": {"task": classification(output.prediction, batch.labels)}}

    kept: list[Batch] = []

    def judged() -> Iterable[Batch]:
        if len(parts.held.data) > FEW:
            return parts.held.batches(ranks.device)
        if not kept:
            kept.extend(parts.held.batches(ranks.device))
        return kept

    def validate(net: nn.Module) -> dict[str, float]:
        with clock.stopped():
            found = validated(judged(), cast(models.Model, net))
        clock.note(found)
        return found

    sets = {"model": adam(model, recipe.train, recipe)}

    def run(resume: bool, reporter: Reporter) -> Fitted:
        clock.start(resume)
        return fit(
            model,
            learned,
            step,
            sets,
            limits(recipe.train),
            out=context.out,
            seed=context.seed,
            device=context.device,
            monitor=Monitor(validate, "accuracy"),
            before=before,
            attention=watching(recipe.train),
            resume=resume,
            reporter=reporter,
        )

    def evaluate(reporter: Reporter) -> Evaluation:
        found = evaluated(parts.test, cast(models.Model, model), ranks.device, parts.alike)
        return replace(found, clock=clock.marks())

    def example() -> Batch:
        return parts.test.data.batch(range(min(8, len(parts.test.data))))

    return Experiment(
        model=model,
        sources=[source(parts.train), source(parts.held.data), source(parts.test.data)],
        stages=[Stage("train", run)],
        evaluate=evaluate,
        example=example,
        spoken=asked(model, parts, example),
        judged=parts.test.data,
    )


def asked(model: nn.Module, parts: Parts, example: Callable[[], Batch]) -> Spoken | Mute | None:
    """How the network is asked: on pixels, or on what a frozen CNN makes of them."""
    return spoken(
        model,
        parts.test.classes,
        parts.reader,
        example,
        Sees.PIXELS if parts.backbone is None else Sees.CELLS,
        parts.canvas,
        parts.backbone,
        parts.pixels,
    )


def classification(prediction: torch.Tensor, labels: torch.Tensor) -> supervise.Loss:
    """Cross-entropy over the questions whose answer is a class; others have the label -1."""
    precise = prediction.to(torch.promote_types(prediction.dtype, torch.float32))
    total = nn.functional.cross_entropy(precise, labels, ignore_index=-1, reduction="sum")
    return supervise.Loss(total, (labels >= 0).sum())
