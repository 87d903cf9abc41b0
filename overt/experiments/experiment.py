"""An experiment: a model, its data, its training stages and its evaluation."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from overt import system
from overt.data.batch import Batch
from overt.data.dataset import Dataset
from overt.experiments.inference_spec import InferenceSpec, NotInteractive
from overt.train import FitResult, Reporter
from overt.viz.gallery_sample import GallerySample


@dataclass(frozen=True)
class DatasetInfo:
    """A dataset of a run: its name, split, content hash, number of items, and version."""

    name: str
    split: str
    hash: str
    n: int
    version: int = 1


@dataclass(frozen=True)
class MetricValue:
    """A metric of a run: the mean over `n` samples with its 95 % confidence interval.

    The interval is Student's t over images, or Wilson's for a proportion. `low` and `high` are None
    where no interval is defined, such as for one sample. `direction` is "higher" or "lower" where
    that is better, else "neither". `version` is that of the metric's definition; results written
    before versions existed have 1.
    """

    value: float
    unit: str
    direction: str
    split: str
    n: int
    low: float | None = None
    high: float | None = None
    version: int = 1


@dataclass(frozen=True)
class Evaluation:
    """All results of a finished run.

    `ours` holds the metrics by name. `samples` holds the values of every metric per sample, for
    paired statistics and galleries. `groups` holds metrics per group of samples, with the chance
    level. `elsewhere` holds values per item of other datasets by metric, with the item names under
    `<metric>.id`. `clock` holds measured seconds by name.
    """

    ours: Mapping[str, MetricValue]
    samples: Mapping[str, np.ndarray]
    groups: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)
    gallery: Sequence[GallerySample] = ()
    elsewhere: Mapping[str, np.ndarray] = field(default_factory=dict)
    clock: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Stage:
    """One stage of an experiment: training, or building an artifact.

    `run(resume, reporter)` runs the stage; with `resume` it continues from the last checkpoint, and
    does nothing if the stage is complete. Training stages return a `FitResult`.
    """

    name: str
    run: Callable[[bool, Reporter], FitResult | None]


@dataclass(frozen=True)
class Experiment:
    """Everything that a recipe builds, ready to run: first the stages, then `evaluate`.

    `example` returns a batch for counting operations. `inference_spec` describes the inputs of the
    saved model for `overt look` and `overt serve`, or why it cannot be used there. `test_data` is
    the test split; `evaluated_model` is the model that predicts on it, where it is not `model`.
    """

    model: nn.Module
    sources: Sequence[DatasetInfo]
    stages: Sequence[Stage]
    evaluate: Callable[[Reporter], Evaluation]
    example: Callable[[], Batch]
    inference_spec: InferenceSpec | NotInteractive | None = None
    test_data: Dataset | None = None
    evaluated_model: nn.Module | None = None


def direction_word(higher_is_better: bool | None) -> str:
    """Return "higher", "lower" or "neither"."""
    return {True: "higher", False: "lower", None: "neither"}[higher_is_better]


def count_parameters(model: nn.Module) -> int:
    """Count the trainable parameters."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def count_flops(model: nn.Module, batch: Batch) -> float:
    """Count the floating-point operations of one forward pass per sample, with torch's counter."""
    from torch.utils.flop_counter import FlopCounterMode

    training = model.training
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model.eval()(batch)
    model.train(training)
    return counter.get_total_flops() / len(batch)


def peak_memory(device: torch.device) -> int:
    """Return the peak memory in bytes: of the GPU, or of this process on other devices.

    It is 0 on Windows, which does not report it this way.
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return system.peak_memory()


def to_json_value(value: Any) -> Any:
    """Convert dataclasses, numpy numbers and enums to JSON values; NaN and infinity become null."""
    from dataclasses import asdict, is_dataclass
    from enum import Enum

    if is_dataclass(value) and not isinstance(value, type):
        return to_json_value(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): to_json_value(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(one) for one in value]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
