"""Recipes: plain values that describe the data, the model and the training of an experiment.

A recipe is a function that returns one of these frozen dataclasses; its docstring states the
published value. Nothing here imports torch, so listing recipes, checking `--set` and reading the
settings of an old run are fast. `papers.catalog.build` turns a recipe into an experiment.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from overt.experiments.experiment import Experiment


SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class PublishedValue:
    """A number stated in a paper; `source` names its table and row."""

    value: float
    unit: str
    higher_is_better: bool
    source: str

    @classmethod
    def from_percent(
        cls, percent: float, source: str, higher_is_better: bool = True
    ) -> "PublishedValue":
        """Return a percentage as a share."""
        return cls(percent / 100, "share", higher_is_better, source)


class Precision(Enum):
    """Number format of the forward pass; weights and losses stay in float32."""

    FP32 = "fp32"
    BF16 = "bf16"


@dataclass(frozen=True)
class TrainConfig:
    """Length and speed of training; `steps` ends the run before `epochs` are complete.

    A step accumulates the gradients of `accumulate` batches of `batch` items. The learning rate
    rises to `rate` over the first `warmup` (a fraction) of training, then follows a cosine to 0;
    `decay` is the weight decay and `clip` the maximum gradient norm. `precision` is the number
    format of the forward pass. `patience` stops the run after more than that many validations
    without a new best. A checkpoint is saved every `save_every` steps. `workers` is the number of
    data-loading processes; 0 loads in the main process. `card` is the number of test samples of
    the scorecard at the end; 0 writes none. `graph` captures training steps in a CUDA graph, which
    makes small models several times faster; on other devices it has no effect. Every `watch` steps
    the attention statistics of each layer are logged; 0 logs none.

    Args:
        epochs: Passes over the training set.
        steps: Largest number of steps.
        batch: Items per batch.
        accumulate: Batches per step.
        rate: Highest learning rate.
        decay: Weight decay.
        clip: Largest gradient norm; None does not clip.
        warmup: Fraction of training in which the learning rate rises.
        precision: Number format of the forward pass.
        patience: Validations without a new best before the run stops; None never stops.
        save_every: Steps between checkpoints.
        workers: Processes that load data.
        card: Test samples of the scorecard.
        graph: Whether to capture steps in a CUDA graph.
        watch: Steps between attention statistics.

    Example:
        >>> TrainConfig(epochs=3, rate=3e-4).batch
        64
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
class GeneratedSplits:
    """Base of the settings of generated datasets; `world` is the seed of the dataset.

    `train`, `val` and `test` are the numbers of items per split; `limit` caps all three.
    """

    limit: int | None = None
    world: int = 1
    train: int = 24000
    val: int = 200
    test: int = 2016

    def cap(self, count: int) -> int:
        """Return a number of items, at most `limit`."""
        return count if self.limit is None else min(count, self.limit)

    def counts(self) -> dict[str, int]:
        """Return the number of items of each split, at most `limit`."""
        return {split: self.cap(getattr(self, split)) for split in SPLITS}


@dataclass(frozen=True)
class GeneratedScenes(GeneratedSplits):
    """Base of the settings of scenes; `size` is the side of an image in pixels."""

    size: int = 64


@dataclass(frozen=True)
class RunContext:
    """Output folder, seed, device and data folder of a run."""

    out: Path
    seed: int = 0
    device: str = "auto"
    data_root: Path | None = None


@runtime_checkable
class Recipe(Protocol):
    """Interface of all recipes; each paper defines its own frozen dataclass.

    The sections hold plain JSON values and enums. All recipes have the keys `data.limit`,
    `model.width`, `train.epochs`, `train.steps`.
    """

    @property
    def name(self) -> str: ...
    @property
    def about(self) -> str: ...
    @property
    def paper(self) -> Mapping[str, PublishedValue]: ...
    @property
    def data(self) -> Any: ...
    @property
    def model(self) -> Any: ...
    @property
    def train(self) -> TrainConfig: ...


Build = Callable[[Any, RunContext], "Experiment"]  # turns a recipe into its data, model and stages

NO_PUBLISHED_VALUES: Mapping[str, PublishedValue] = {}


@dataclass(frozen=True)
class ItemLimit:
    """Maximum number of items per split, `limit`; none is all of them."""

    limit: int | None = None


@dataclass(frozen=True)
class WidthFactor:
    """Factor on the number of features of each layer, `width`."""

    width: float = 1.0


@dataclass(frozen=True)
class CustomRecipe:
    """Describe an experiment of your own, for `overt run FILE.py:NAME` and `runner.run`.

    The settings of `--set` are the fields of the sections `data`, `model` and `train`; a section of
    your own is a frozen dataclass of plain values with defaults.

    Args:
        name: Name in results; letters, digits, `.`, `_` and `-`.
        about: One line of description.
        make_experiment: Function `(recipe, context) -> Experiment`, such as one that calls
            `builders.classification_experiment`. Nothing before its call needs torch.
        data: Settings of the data.
        model: Settings of the model.
        train: Length and speed of training.
        paper: Published values by metric.

    Example:
        >>> def make_experiment(recipe, context):
        ...     return f"a model of width {recipe.model.width}, seed {context.seed}"
        >>> recipe = CustomRecipe("dots", "find the dot", make_experiment)
        >>> recipe.build(RunContext(Path("runs/dots"), seed=1))
        'a model of width 1.0, seed 1'
    """

    name: str
    about: str
    make_experiment: Callable[[Any, RunContext], Any]
    data: Any = ItemLimit()
    model: Any = WidthFactor()
    train: TrainConfig = TrainConfig()
    paper: Mapping[str, PublishedValue] = field(default_factory=dict)

    def build(self, context: RunContext) -> Any:
        """Return the experiment of these settings: `make_experiment(self, context)`."""
        return self.make_experiment(self, context)


def check_data_name(recipe: str, data: Any, names: Mapping[str, str]) -> None:
    """Raise `ValueError` if a recipe that is named after a dataset is used with another one."""
    own = names.get(recipe)
    if own is not None and getattr(data, "name", None) is not own:
        raise ValueError(f"{recipe} needs data.name={own}")


def scale_width(size: int, width: float) -> int:
    """Multiply a number of features by `model.width`; the result is at least 4."""
    return max(4, round(size * width))
