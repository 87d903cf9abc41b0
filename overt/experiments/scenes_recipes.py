"""Recipes of VQA on the generated scenes: the effect of attention and of supervising it.

These recipes are from no paper. The methods of all papers are compared on scenes because the
evidence for each answer is known there.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from overt.experiments.recipe import (
    NO_PUBLISHED_VALUES,
    GeneratedScenes,
    PublishedValue,
    TrainConfig,
)


class ImagePooling(Enum):
    """How image features are pooled: not at all, by their mean, or by soft attention."""

    BLIND = "blind"
    MEAN = "mean"
    SOFT = "soft"


class ScenesVqaTarget(Enum):
    """The target that supervises attention."""

    NOTHING = "nothing"
    TRUTH = "truth"


@dataclass(frozen=True)
class ScenesVqaData(GeneratedScenes):
    """The scenes: `world` is the seed of the generator, `limit` caps the scenes of every split.

    `train`, `val` and `test` are the numbers of scenes, with four questions per scene; `size` is
    the side of an image in pixels. `held_out` names a family of questions that is left out of
    training and kept in the test. Test scenes come in rounds of 24: in whole rounds a question
    alone says nothing about its answer.
    """

    held_out: str | None = None


@dataclass(frozen=True)
class ScenesVqaModel:
    """Size and image pooling of the VQA model.

    `width` multiplies the features of every layer. `glimpses` is the number of attention heads over
    the image; `dropout` is a probability.
    """

    width: float = 1.0
    look: ImagePooling = ImagePooling.SOFT
    glimpses: int = 2
    dropout: float = 0.0


@dataclass(frozen=True)
class ScenesVqaSupervision:
    """The target of the attention loss and its `weight` relative to the task loss."""

    target: ScenesVqaTarget = ScenesVqaTarget.NOTHING
    weight: float = 1.0


TRAIN = TrainConfig(epochs=14, batch=32, rate=4e-3, decay=1e-3, save_every=1000)


@dataclass(frozen=True)
class ScenesRecipe:
    """A VQA model on scenes."""

    name: str
    about: str
    data: ScenesVqaData = ScenesVqaData()
    model: ScenesVqaModel = ScenesVqaModel()
    supervise: ScenesVqaSupervision = ScenesVqaSupervision()
    train: TrainConfig = TRAIN
    paper: Mapping[str, PublishedValue] = field(default_factory=lambda: NO_PUBLISHED_VALUES)


def scenes_question() -> ScenesRecipe:
    """Train on the question alone: chance level on test scenes. No published number."""
    return ScenesRecipe(
        "scenes-question",
        "scenes, the question alone",
        model=ScenesVqaModel(look=ImagePooling.BLIND),
    )


def scenes_none() -> ScenesRecipe:
    """Train with the mean of all cells, without attention. No published number."""
    return ScenesRecipe(
        "scenes-none", "scenes, no attention", model=ScenesVqaModel(look=ImagePooling.MEAN)
    )


def scenes_soft() -> ScenesRecipe:
    """Train unsupervised soft attention (Show, Ask, Attend and Answer). No published number."""
    return ScenesRecipe("scenes-soft", "scenes, soft attention")


def scenes_truth() -> ScenesRecipe:
    """Train soft attention on the known evidence, an upper bound. No published number."""
    return ScenesRecipe(
        "scenes-truth",
        "scenes, attention supervised with the truth",
        supervise=ScenesVqaSupervision(ScenesVqaTarget.TRUTH),
    )


RECIPES = (scenes_question, scenes_none, scenes_soft, scenes_truth)
