"""Plain models on data sets from disk: what the methods of the papers are measured against."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from overt.recipes.recipe import NO_FIGURES, Context, Figure, Train

if TYPE_CHECKING:
    from overt.recipes.experiment import Experiment

SSA = "Self Supervision for Attention Networks"
LONG = Train(epochs=20, batch=128, rate=3e-3, decay=1e-3)


class Files(StrEnum):
    """The data sets of this file."""

    CIFAR10 = "cifar10"
    CIFAR100 = "cifar100"
    TREC = "trec6"
    EASY_VQA = "easyvqa"


RECIPES = {
    Files.CIFAR10: "cifar10-cnn",
    Files.CIFAR100: "cifar100-cnn",
    Files.TREC: "trec-attention",
    Files.EASY_VQA: "easyvqa-soft",
}


@dataclass(frozen=True)
class Data:
    """Which data set; `limit` caps the items of every split, `vary` crops and flips pictures."""

    name: Files
    limit: int | None = None
    vary: bool = True


@dataclass(frozen=True)
class Model:
    """How wide the network is, and how much of it is dropped while it learns.

    `width` multiplies the features of every layer; `dropout` is a share, 0 to 1.
    """

    width: float = 1.0
    dropout: float = 0.1


@dataclass(frozen=True)
class TextModel:
    """The same, with structured self-attention.

    `width` multiplies the features of every layer; `dropout` is a share, 0 to 1. `hops` is how many
    maps of the words there are, and `penalty` the weight of a loss on maps that are alike.
    """

    width: float = 1.0
    dropout: float = 0.4
    hops: int = 4
    penalty: float = 0.01


@dataclass(frozen=True)
class BaselineRecipe:
    """A classifier of images or of texts, or one that answers questions."""

    name: str
    about: str
    data: Data
    model: Model | TextModel = Model()
    train: Train = LONG
    paper: Mapping[str, Figure] = field(default_factory=lambda: NO_FIGURES)

    def __post_init__(self) -> None:
        own = RECIPES[self.data.name]
        if own != self.name:  # its paper's figure would stand beside numbers of other data
            raise ValueError(f"{self.name} is not about {self.data.name}; {own} is.")

    def build(self, context: Context) -> "Experiment":
        """The data, the network and one stage of training."""
        from overt.recipes import building

        match self.data.name:
            case Files.CIFAR10 | Files.CIFAR100:
                return building.images(self, context)
            case Files.TREC:
                return building.texts(self, context)
            case Files.EASY_VQA:
                return building.easy_questions(self, context)


def cifar10_cnn() -> BaselineRecipe:
    """A small CNN without attention on CIFAR-10.

    The paper's baseline (Self Supervision for Attention Networks, Table 2) reaches 69.59 % with a
    self-attention over 32 x 8 x 8 features of an unstated CNN; ours averages the cells.
    """
    figure = Figure(0.6959, "share", True, f"{SSA}, Table 2, baseline")
    return BaselineRecipe(
        "cifar10-cnn",
        "CIFAR-10, a small CNN without attention",
        Data(Files.CIFAR10),
        paper={"accuracy": figure},
    )


def cifar100_cnn() -> BaselineRecipe:
    """The same small CNN on the 100 fine classes of CIFAR-100. No paper's number."""
    return BaselineRecipe(
        "cifar100-cnn", "CIFAR-100, a small CNN without attention", Data(Files.CIFAR100)
    )


def trec_attention() -> BaselineRecipe:
    """A BiLSTM with structured self-attention on TREC-6.

    The paper's baseline (Self Supervision for Attention Networks, Table 1) reaches 81.20 %.
    """
    figure = Figure(0.8120, "share", True, f"{SSA}, Table 1, baseline")
    return BaselineRecipe(
        "trec-attention",
        "TREC-6, a BiLSTM with structured self-attention",
        Data(Files.TREC),
        TextModel(),
        Train(epochs=12, batch=32, rate=2e-3, decay=1e-2),
        {"accuracy": figure},
    )


def easyvqa_soft() -> BaselineRecipe:
    """Soft attention on easy-VQA. No paper's number.

    After 4 epochs it names what is there, and still answers yes or no by the words alone.
    """
    return BaselineRecipe(
        "easyvqa-soft",
        "easy-VQA, soft attention",
        Data(Files.EASY_VQA),
        train=Train(epochs=16, batch=128, rate=3e-3, decay=1e-3),
    )
