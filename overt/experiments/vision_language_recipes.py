"""Recipes of a small vision-language model on the generated scenes: fewer image tokens, boxes.

These recipes are from no paper. Rules for image tokens of published methods are compared with
controls on one model, and attention supervised by boxes with a placebo.
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


class PruningRule(Enum):
    """How image tokens are removed when the model is evaluated."""

    NONE = "none"
    LAST_QUERY = "last-query"  # FastV
    PYRAMID = "pyramid"  # PyramidDrop
    IMAGE_ENCODER = "image-encoder"  # dominant tokens of VisionZip
    ZIP = "zip"  # VisionZip
    ADAPTIVE = "adaptive"  # AdaHAN
    MERGE = "merge"  # ToMe
    RANDOM = "random"
    GRID = "grid"
    CENTRE = "centre"


class BoxTarget(Enum):
    """What supervises the attention of the token before the answer."""

    NOTHING = "nothing"
    TRUTH = "truth"
    SWAPPED = "swapped"  # the placebo: the evidence of another scene


@dataclass(frozen=True)
class VisionLanguageScenes(GeneratedScenes):
    """The scenes, with four questions each: `world` is the seed of the generator.

    `train`, `val` and `test` are the numbers of scenes, and `limit` caps all three; `size` is the
    side of an image in pixels.
    """


@dataclass(frozen=True)
class VisionLanguageModel:
    """Size of the model: `width` multiplies the features of every layer, 128 by default.

    `vision_layers` are those of the image encoder, `layers` and `heads` those of the decoder.
    """

    width: float = 1.0
    vision_layers: int = 3
    layers: int = 6
    heads: int = 4


@dataclass(frozen=True)
class EncoderPretraining:
    """Training of the image encoder before the decoder, as LLaVA starts from a pretrained one.

    Each image token predicts shape, color, size and texture of the thing it covers, for `epochs`
    passes over the training scenes in batches of `batch`, with a peak learning rate of `rate`; 0
    epochs train everything from answers.
    """

    epochs: int = 8
    batch: int = 64
    rate: float = 2e-3


@dataclass(frozen=True)
class ImageTokenPruning:
    """Which image tokens are removed in evaluation: a `share` stays, from decoder layer `layer` on.

    `adaptive` ignores the share; `image-encoder` and `zip` always act before the decoder.
    """

    rule: PruningRule = PruningRule.NONE
    share: float = 0.25
    layer: int = 2


@dataclass(frozen=True)
class BoxSupervision:
    """The target of the attention loss, its `weight`, and `first_layer`, where it begins."""

    target: BoxTarget = BoxTarget.NOTHING
    weight: float = 1.0
    first_layer: int = 3


TRAIN = TrainConfig(epochs=14, batch=32, rate=1e-3, decay=1e-2, save_every=1000, card=0)


@dataclass(frozen=True)
class VisionLanguageRecipe:
    """A vision-language model on questions about scenes."""

    name: str
    about: str
    data: VisionLanguageScenes = VisionLanguageScenes()
    model: VisionLanguageModel = VisionLanguageModel()
    pretrain: EncoderPretraining = EncoderPretraining()
    prune: ImageTokenPruning = ImageTokenPruning()
    supervise: BoxSupervision = BoxSupervision()
    train: TrainConfig = TRAIN
    paper: Mapping[str, PublishedValue] = field(default_factory=lambda: NO_PUBLISHED_VALUES)


def scenes_vlm() -> VisionLanguageRecipe:
    """Train a small vision-language model in the architecture of LLaVA. No published number."""
    return VisionLanguageRecipe("scenes-vlm", "scenes, a small vision-language model")


RECIPES = (scenes_vlm,)
