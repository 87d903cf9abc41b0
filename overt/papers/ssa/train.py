"""Self Supervision for Attention Networks: build the experiment of a recipe."""

import copy
from dataclasses import replace

import torch

from overt import losses
from overt.data.batch import Batch
from overt.data.in_memory import InMemoryDataset
from overt.data.in_memory_images import random_shift_flip
from overt.errors import UserError
from overt.experiments.builders import augmentation_generator, dataset_info
from overt.experiments.dataset_views import example_of
from overt.experiments.experiment import Experiment
from overt.experiments.inference_spec import make_spec
from overt.experiments.recipe import RunContext
from overt.nn import Output
from overt.papers.ssa.config import (
    SsaImageModel,
    SsaImages,
    SsaPretrained,
    SsaQuestions,
    SsaRecipe,
    SsaScenes,
    SsaShapes,
    SsaSpan,
    SsaTextModel,
    SsaTexts,
    SsaVqaModel,
)
from overt.papers.ssa.data import load_images, load_questions, load_scenes, load_shapes, load_texts
from overt.papers.ssa.evaluate import evaluate_run
from overt.papers.ssa.stages import SsaStageInputs, SsaStages
from overt.papers.ssa.supervision import Augmentation, ExtraLosses

SPANS = {SsaSpan.IMAGE: ("image",), SsaSpan.QUESTION: ("text",), SsaSpan.BOTH: ("image", "text")}


def build(recipe: SsaRecipe, context: RunContext) -> Experiment:
    """Return the data, both networks and the stages that lead from one to the other."""
    match recipe.data, recipe.model:
        case SsaTexts() as data, SsaTextModel() | SsaPretrained() as model:
            loaded, make = load_texts(data, model, context)
        case SsaImages() as data, SsaImageModel() as model:
            loaded, make = load_images(data, model, context)
        case SsaQuestions() as data, SsaVqaModel() as model:
            loaded, make = load_questions(data, model, context)
        case SsaScenes() as data, SsaVqaModel() as model:
            loaded, make = load_scenes(data, model, context)
        case SsaShapes() as data, SsaImageModel() as model:
            loaded, make = load_shapes(data, model, context)
        case _:
            raise UserError(f"{recipe.name}: the settings of model do not fit those of data.")
    # so that all batches have the same shape
    if recipe.train.graph and isinstance(loaded.train, InMemoryDataset):
        loaded = replace(loaded, train=loaded.train.with_full_length())
    first = make()
    # A copy of the initial weights: rows with and without targets start from the same network.
    second = copy.deepcopy(first) if recipe.supervised else first
    names = supervised_spans(recipe)
    parts = SsaStageInputs(
        loaded.train,
        loaded.validation,
        first,
        second,
        names,
        extra_losses(recipe),
        loaded.shown,
        loaded.batch,
        augmentation(recipe),
    )
    stages = SsaStages(recipe, context, parts)
    evaluator = loaded.test
    splits = (loaded.train, loaded.validation.data, evaluator.data)
    example = example_of(evaluator.data)
    return Experiment(
        model=stages.model,
        sources=[dataset_info(data) for data in splits],
        stages=stages.all(),
        # The attention metrics are those of the first supervised span.
        evaluate=lambda reporter: evaluate_run(evaluator, stages, names[0], loaded.blank),
        example=example,
        inference_spec=make_spec(stages.model, evaluator.classes, loaded.reader, example),
        test_data=evaluator.data,
    )


def supervised_spans(recipe: SsaRecipe) -> tuple[str, ...]:
    """Return the spans whose attention is supervised: those of the settings, or the only one."""
    if isinstance(recipe.model, SsaVqaModel):
        return SPANS[recipe.supervise.over]
    return ("text",) if isinstance(recipe.data, SsaTexts) else ("image",)


def augmentation(recipe: SsaRecipe) -> Augmentation:
    """Return the random shift and flip of training images, or a function that changes nothing."""
    if not isinstance(recipe.data, SsaImages) or not recipe.data.vary:
        return lambda batch: batch
    return lambda batch: random_shift_flip(batch, augmentation_generator(batch, recipe.train.graph))


def extra_losses(recipe: SsaRecipe) -> ExtraLosses:
    """Return the penalty on redundant hops, for networks that have several."""
    plan = recipe.model

    def spread(output: Output, batch: Batch) -> dict[str, losses.Loss]:
        if not isinstance(plan, SsaTextModel) or not plan.penalty:
            return {}
        each = output.extras["redundancy"]
        count = torch.full((), float(len(batch)), device=each.device)
        return {"redundancy": plan.penalty * losses.Loss(each.sum(), count)}

    return spread
