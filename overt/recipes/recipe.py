"""What a recipe is: plain values that say which data, which model and how it is trained.

A recipe is a function that returns one of these frozen dataclasses, and its docstring states the
paper's number. Nothing here imports torch: listing recipes, checking `--set` and reading the
settings of an old run stay instant. `build` is the one place where a name becomes code.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from overt.recipes.experiment import Experiment


@dataclass(frozen=True)
class Figure:
    """A number a paper states: `source` says which table and row."""

    value: float
    unit: str
    higher_is_better: bool
    source: str


class Precision(Enum):
    """The number format of the forward pass; weights and losses stay in 32 bits."""

    FP32 = "fp32"
    BF16 = "bf16"


@dataclass(frozen=True)
class Train:
    """How long and how fast: `steps` ends the run earlier than `epochs` would.

    A step takes `accumulate` portions of `batch` items. The learning rate climbs to `rate` over the
    first `warmup` of training, a share, and falls along a cosine; `decay` is that of the weights,
    and `clip` the largest length of a gradient. `precision` is the number format of the forward
    pass. With `patience` a run ends after more than so many validations without a new best. Every
    `save_every` steps a checkpoint is kept; `workers` processes read the data, 0 reads it here.
    `card` is how many test samples the scorecard at the end is made of; 0 makes none. With `graph`
    steps are recorded and replayed on a CUDA card, which a small network is several times as quick
    with; elsewhere it changes nothing. Every `watch` steps the log tells how the attention of each
    layer does; 0 never does.
    """

    epochs: int = 1
    steps: int | None = None
    batch: int = 64
    accumulate: int = 1
    rate: float = 1e-3
    decay: float = 1e-4
    clip: float | None = 1.0
    warmup: float = 0.1
    precision: Precision = Precision.FP32
    patience: int | None = None
    save_every: int = 200
    workers: int = 0
    card: int = 64
    graph: bool = False
    watch: int = 0


@dataclass(frozen=True)
class Context:
    """What a run is given besides its recipe."""

    out: Path
    seed: int = 0
    device: str = "auto"
    data_root: Path | None = None


@runtime_checkable
class Recipe(Protocol):
    """The face every recipe has; each paper's file defines its own frozen dataclass with it.

    The sections hold plain JSON values and enums. Common keys on every recipe: `data.limit`,
    `model.width`, `train.epochs`, `train.steps`.
    """

    @property
    def name(self) -> str: ...
    @property
    def about(self) -> str: ...
    @property
    def paper(self) -> Mapping[str, Figure]: ...
    @property
    def data(self) -> Any: ...
    @property
    def model(self) -> Any: ...
    @property
    def train(self) -> Train: ...

    def build(self, context: Context) -> "Experiment":
        """The data, the model and the stages behind these values."""
        ...


NO_FIGURES: Mapping[str, Figure] = {}
