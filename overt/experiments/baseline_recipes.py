"""Recipes of baselines: standard models on public datasets, to compare the papers' methods with."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from overt.experiments.recipe import NO_PUBLISHED_VALUES, PublishedValue, TrainConfig

SSA_TITLE = "Self Supervision for Attention Networks"
TRAIN = TrainConfig(epochs=20, batch=128, rate=3e-3, decay=1e-3)


class BaselineDataset(StrEnum):
    """Datasets of the baseline recipes."""

    CIFAR10 = "cifar10"
    CIFAR100 = "cifar100"
    TREC = "trec6"
    EASY_VQA = "easyvqa"


RECIPE_OF_DATASET = {
    BaselineDataset.CIFAR10: "cifar10-cnn",
    BaselineDataset.CIFAR100: "cifar100-cnn",
    BaselineDataset.TREC: "trec-attention",
    BaselineDataset.EASY_VQA: "easyvqa-soft",
}


@dataclass(frozen=True)
class BaselineData:
    """The dataset; `limit` caps the items of every split, `vary` adds random crops and flips."""

    name: BaselineDataset
    limit: int | None = None
    vary: bool = True


@dataclass(frozen=True)
class BaselineModel:
    """Size and dropout of the model.

    `width` multiplies the features of every layer; `dropout` is a probability.
    """

    width: float = 1.0
    dropout: float = 0.1


@dataclass(frozen=True)
class TextBaselineModel:
    """Size and dropout of a text model with structured self-attention.

    `width` multiplies the features of every layer; `dropout` is a probability. `hops` is the
    number of attention maps over the words; `penalty` weights a loss on similar maps.
    """

    width: float = 1.0
    dropout: float = 0.4
    hops: int = 4
    penalty: float = 0.01


@dataclass(frozen=True)
class BaselineRecipe:
    """A classifier of images or texts, or a VQA model."""

    name: str
    about: str
    data: BaselineData
    model: BaselineModel | TextBaselineModel = BaselineModel()
    train: TrainConfig = TRAIN
    paper: Mapping[str, PublishedValue] = field(default_factory=lambda: NO_PUBLISHED_VALUES)

    def __post_init__(self) -> None:
        own = RECIPE_OF_DATASET[self.data.name]
        if own != self.name:  # else results would be shown beside the published value of other data
            raise ValueError(
                f"data.name={self.data.name} belongs to the recipe {own}, not to {self.name}"
            )


def cifar10_cnn() -> BaselineRecipe:
    """Train a small CNN without attention on CIFAR-10.

    The paper's baseline (Self Supervision for Attention Networks, Table 2) reaches 69.59 % with
    self-attention over 32 x 8 x 8 features of a CNN that is not specified; ours averages the cells.
    """
    figure = PublishedValue(0.6959, "share", True, f"{SSA_TITLE}, Table 2, baseline")
    return BaselineRecipe(
        "cifar10-cnn",
        "CIFAR-10, a small CNN without attention",
        BaselineData(BaselineDataset.CIFAR10),
        paper={"accuracy": figure},
    )


def cifar100_cnn() -> BaselineRecipe:
    """Train the same CNN on the 100 fine classes of CIFAR-100. No published number."""
    return BaselineRecipe(
        "cifar100-cnn",
        "CIFAR-100, a small CNN without attention",
        BaselineData(BaselineDataset.CIFAR100),
    )


def trec_attention() -> BaselineRecipe:
    """Train a BiLSTM with structured self-attention on TREC-6.

    The paper's baseline (Self Supervision for Attention Networks, Table 1) reaches 81.20 %.
    """
    figure = PublishedValue(0.8120, "share", True, f"{SSA_TITLE}, Table 1, baseline")
    return BaselineRecipe(
        "trec-attention",
        "TREC-6, a BiLSTM with structured self-attention",
        BaselineData(BaselineDataset.TREC),
        TextBaselineModel(),
        TrainConfig(epochs=12, batch=32, rate=2e-3, decay=1e-2),
        {"accuracy": figure},
    )


def easyvqa_soft() -> BaselineRecipe:
    """Train a VQA model with soft attention on easy-VQA. No published number.

    After 4 epochs it names shapes and colours, but still answers yes/no questions from the question
    alone.
    """
    return BaselineRecipe(
        "easyvqa-soft",
        "easy-VQA, soft attention",
        BaselineData(BaselineDataset.EASY_VQA),
        train=TrainConfig(epochs=16, batch=128, rate=3e-3, decay=1e-3),
    )


RECIPES = (cifar10_cnn, cifar100_cnn, trec_attention, easyvqa_soft)
