"""Build the experiments that are from no paper: VQA on scenes and the baselines."""

import torch

from overt import data as datasets
from overt import losses
from overt import nn as overt_nn
from overt.data.batch import Batch
from overt.data.catalog import data_root
from overt.data.scenes.questions import ALL_FAMILIES
from overt.errors import UserError
from overt.experiments.baseline_recipes import BaselineDataset, BaselineRecipe, TextBaselineModel
from overt.experiments.builders import (
    ExtraLosses,
    augmentation_generator,
    classification_experiment,
    no_extra_losses,
)
from overt.experiments.dataset_views import evaluators, open_scenes, open_splits
from overt.experiments.experiment import Experiment
from overt.experiments.recipe import RunContext, scale_width
from overt.experiments.scenes_recipes import (
    ImagePooling,
    ScenesRecipe,
    ScenesVqaModel,
    ScenesVqaTarget,
)


def build_scenes(recipe: ScenesRecipe, context: RunContext) -> Experiment:
    """Build VQA on the generated scenes."""
    data = recipe.data
    if data.held_out is not None and data.held_out not in ALL_FAMILIES:
        raise UserError(
            f"data.held_out must be a family of questions, got {data.held_out!r}; choose one of "
            f"{', '.join(ALL_FAMILIES)}"
        )
    train, validation, test = open_scenes(data, data.held_out)
    model = build_vqa_model(recipe.model, train.vocabulary.size, len(train.answers))
    weight = recipe.supervise.weight

    def evidence_loss(output: overt_nn.Output, batch: Batch) -> dict[str, losses.Loss]:
        assert batch.target is not None
        attention = output.attention_to("image").over_heads()
        return {"attention": weight * losses.cross_entropy(attention, batch.target)}

    match recipe.supervise.target:
        case ScenesVqaTarget.NOTHING:
            extra: ExtraLosses = no_extra_losses
        case ScenesVqaTarget.TRUTH if recipe.model.look is ImagePooling.SOFT:
            extra = evidence_loss
        case ScenesVqaTarget.TRUTH:
            look = recipe.model.look.value
            raise UserError(
                f"supervise.target=truth needs a model with attention, got model.look={look}: "
                "set model.look=soft"
            )
    reader = train.vocabulary
    return classification_experiment(
        model, train, validation, test, recipe.train, context, extra, reader=reader
    )


def build_cifar(recipe: BaselineRecipe, context: RunContext) -> Experiment:
    """Build a small CNN on CIFAR-10 or CIFAR-100, with random crops and flips."""
    root = data_root(context.data_root)
    cifar10 = recipe.data.name is BaselineDataset.CIFAR10
    kind = datasets.Cifar10 if cifar10 else datasets.Cifar100
    train, val, test = open_splits(lambda split: kind(root, split), recipe.data.limit)
    classes = train.data.classes
    model = overt_nn.SmallCNN(len(classes), recipe.model.width, recipe.model.dropout)

    def augment(batch: Batch) -> Batch:
        generator = augmentation_generator(batch, recipe.train.graph)
        return datasets.random_shift_flip(batch, generator)

    return classification_experiment(
        model,
        train,
        *evaluators(val, test, classes, batch_size=256),
        recipe.train,
        context,
        augment=augment if recipe.data.vary else lambda batch: batch,
    )


def build_trec(recipe: BaselineRecipe, context: RunContext) -> Experiment:
    """Build a BiLSTM with self-attention that classifies TREC questions."""
    assert isinstance(recipe.model, TextBaselineModel)
    root = data_root(context.data_root)
    train, val, test = open_splits(lambda split: datasets.Trec(root, split), recipe.data.limit)
    classes, reader = train.data.classes, train.data.reader
    plan = recipe.model
    model = overt_nn.TextClassifier(reader.size, len(classes), plan.width, plan.hops, plan.dropout)

    def redundancy_loss(output: overt_nn.Output, batch: Batch) -> dict[str, losses.Loss]:
        each = output.extras["redundancy"]
        count = torch.tensor(float(len(batch)), device=each.device)
        return {"redundancy": plan.penalty * losses.Loss(each.sum(), count)}

    validation, final = evaluators(val, test, classes, batch_size=128)
    return classification_experiment(
        model, train, validation, final, recipe.train, context, redundancy_loss, reader=reader
    )


def build_easy_vqa(recipe: BaselineRecipe, context: RunContext) -> Experiment:
    """Build VQA with soft attention on easy-VQA."""
    train, val, test = open_splits(
        lambda split: datasets.EasyVqa(context.data_root, split), recipe.data.limit
    )
    classes, reader = train.data.classes, train.data.reader
    settings = ScenesVqaModel(width=recipe.model.width, dropout=recipe.model.dropout)
    model = build_vqa_model(settings, reader.size, len(classes))
    validation, final = evaluators(val, test, classes, batch_size=128)
    return classification_experiment(
        model, train, validation, final, recipe.train, context, reader=reader
    )


def build_vqa_model(model: ScenesVqaModel, vocabulary: int, answers: int) -> overt_nn.VQA:
    """Build a VQA model of the width and image pooling in the settings."""
    sizes = overt_nn.VQASizes(
        vocabulary=vocabulary,
        answers=answers,
        cell=scale_width(64, model.width),
        word=scale_width(48, model.width),
        question=scale_width(96, model.width),
        hidden=scale_width(192, model.width),
        dropout=model.dropout,
    )
    match model.look:
        case ImagePooling.BLIND:
            return overt_nn.VQA(sizes, overt_nn.QuestionOnly())
        case ImagePooling.MEAN:
            return overt_nn.VQA(sizes, overt_nn.MeanPooling())
        case ImagePooling.SOFT:
            hidden = scale_width(128, model.width)
            look = overt_nn.SoftAttention(sizes.seen, sizes.question, hidden, model.glimpses)
            return overt_nn.VQA(sizes, look)


def build_baseline(recipe: BaselineRecipe, context: RunContext) -> Experiment:
    """Build the experiment of a baseline recipe."""
    match recipe.data.name:
        case BaselineDataset.CIFAR10 | BaselineDataset.CIFAR100:
            return build_cifar(recipe, context)
        case BaselineDataset.TREC:
            return build_trec(recipe, context)
        case BaselineDataset.EASY_VQA:
            return build_easy_vqa(recipe, context)
