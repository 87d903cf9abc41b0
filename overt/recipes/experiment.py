"""What a recipe builds: a model, its data, the stages of its training and how it is judged."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from overt.data.batch import Batch
from overt.data.source import Source as DataSet
from overt.recipes.spoken import Mute, Spoken
from overt.show.sample import Sample
from overt.train import Fitted, Reporter


@dataclass(frozen=True)
class Source:
    """A data set that a run used, and a hash of what was in it."""

    name: str
    split: str
    hash: str
    n: int


@dataclass(frozen=True)
class Value:
    """One number a run reached: the mean over `n` samples, with a 95 % bootstrap interval.

    `direction` is "higher" or "lower" where that is better, else "neither".
    """

    value: float
    unit: str
    direction: str
    split: str
    n: int
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Evaluation:
    """All numbers of a finished run.

    `samples` holds one row a sample of every measure, by id: paired statistics and galleries come
    from it. `groups` holds the numbers of each kind of sample, with the chance level. `elsewhere`
    holds one number an item of other data sets, by the name of the measure, with the items' names
    under `<measure>.id`. `clock` holds seconds by name, where a recipe takes the time.
    """

    ours: Mapping[str, Value]
    samples: Mapping[str, np.ndarray]
    groups: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)
    gallery: Sequence[Sample] = ()
    elsewhere: Mapping[str, np.ndarray] = field(default_factory=dict)
    clock: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Stage:
    """One step of a recipe: train, build an artefact, train again.

    `run(resume, reporter)` does its work or, with `resume`, what is left of it; a stage that is
    already done does nothing. Training stages return what they came to.
    """

    name: str
    run: Callable[[bool, Reporter], Fitted | None]


@dataclass(frozen=True)
class Experiment:
    """Everything behind a recipe, ready to run: stages first, then `evaluate`.

    `spoken` says how people can ask the model, or why they cannot. `judged` is what it is judged
    on, and `answers` the model as it answers that, where it is another than the model itself.
    """

    model: nn.Module
    sources: Sequence[Source]
    stages: Sequence[Stage]
    evaluate: Callable[[Reporter], Evaluation]
    example: Callable[[], Batch]
    spoken: Spoken | Mute | None = None
    judged: DataSet | None = None
    answers: nn.Module | None = None


def direction(higher_is_better: bool | None) -> str:
    """Where better is, in a word."""
    return {True: "higher", False: "lower", None: "neither"}[higher_is_better]


def parameters(model: nn.Module) -> int:
    """How many numbers the model learns."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def flops(model: nn.Module, batch: Batch) -> float:
    """Floating-point operations of one forward pass, a sample, as torch counts them."""
    from torch.utils.flop_counter import FlopCounterMode

    training = model.training
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model.eval()(batch)
    model.train(training)
    return counter.get_total_flops() / len(batch)


def peak_memory(device: torch.device) -> int:
    """The most bytes in use so far: of the card where there is one, else of this process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    import resource
    import sys

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def plain(value: Any) -> Any:
    """Dataclasses, numpy numbers and enums as JSON values; what is not finite becomes null."""
    from dataclasses import asdict, is_dataclass
    from enum import Enum

    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
