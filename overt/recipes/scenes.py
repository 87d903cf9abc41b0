"""Questions about the embedded world: what attention adds, and what teaching it adds.

There is no paper behind these rows. They are the common ground on which the methods of all papers
are compared, because here the deciding evidence is known.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from overt.recipes.recipe import NO_FIGURES, Context, Figure, Train

if TYPE_CHECKING:
    from overt.recipes.experiment import Experiment


class Look(Enum):
    """How the model looks at the image."""

    BLIND = "blind"
    MEAN = "mean"
    SOFT = "soft"


class Target(Enum):
    """What attention is taught from."""

    NOTHING = "nothing"
    TRUTH = "truth"


@dataclass(frozen=True)
class Data:
    """Which part of the world: `world` is its seed, `limit` caps the scenes of every split.

    `train`, `val` and `test` are how many scenes each has, with four questions to a scene, and
    `size` the pixels of a side.
    `held_out` names a family of questions that is left out of training and asked in the test, whose
    scenes come in rounds of 24 (`posing.turns`): words give exactly nothing away in whole rounds.
    """

    limit: int | None = None
    world: int = 1
    train: int = 24000
    val: int = 200
    test: int = 2016
    size: int = 64
    held_out: str | None = None


@dataclass(frozen=True)
class Model:
    """How wide the network is and how it looks.

    `width` multiplies the features of every layer. `glimpses` is how many heads look at the image,
    and `dropout` that of the network.
    """

    width: float = 1.0
    look: Look = Look.SOFT
    glimpses: int = 2
    dropout: float = 0.0


@dataclass(frozen=True)
class Supervise:
    """What attention is taught, and with how much `weight` beside the task."""

    target: Target = Target.NOTHING
    weight: float = 1.0


LONG = Train(epochs=14, batch=32, rate=4e-3, decay=1e-3, save_every=1000)


@dataclass(frozen=True)
class ScenesRecipe:
    """A question-answering network on scenes."""

    name: str
    about: str
    data: Data = Data()
    model: Model = Model()
    supervise: Supervise = Supervise()
    train: Train = LONG
    paper: Mapping[str, Figure] = field(default_factory=lambda: NO_FIGURES)

    def build(self, context: Context) -> "Experiment":
        """The data, the network and one stage of training."""
        from overt.recipes import building

        return building.scenes(self, context)


def scenes_question() -> ScenesRecipe:
    """The question alone: what words give away, on test scenes nothing. No paper's number."""
    return ScenesRecipe(
        "scenes-question", "scenes, the question alone", model=Model(look=Look.BLIND)
    )


def scenes_none() -> ScenesRecipe:
    """All cells averaged: no attention. No paper's number."""
    return ScenesRecipe("scenes-none", "scenes, no attention", model=Model(look=Look.MEAN))


def scenes_soft() -> ScenesRecipe:
    """Soft attention that nobody teaches (Show, Ask, Attend and Answer). No paper's number."""
    return ScenesRecipe("scenes-soft", "scenes, soft attention")


def scenes_truth() -> ScenesRecipe:
    """Soft attention taught from the known evidence. No paper's number: an upper bound."""
    return ScenesRecipe(
        "scenes-truth", "scenes, attention taught the truth", supervise=Supervise(Target.TRUTH)
    )
