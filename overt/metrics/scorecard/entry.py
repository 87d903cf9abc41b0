"""Entries of a scorecard: a metric, what it requires, and what it cannot show."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from overt.metrics.metric import MetricInfo, SampleScores

if TYPE_CHECKING:
    from overt.metrics.scorecard.metric_context import MetricContext

ComputeMetric = Callable[["MetricContext", str], SampleScores]  # context, name of a map


class MetricQuestion(Enum):
    """The question that a metric answers."""

    AGREEMENT = "Does it agree with the annotation?"
    LOCATION = "Is it on the object?"
    FAITHFULNESS = "Does it show what drives the answer?"
    INTERVENTION = "Does the answer change with other attention weights?"
    STABILITY = "Is it stable, and does it depend on the learned weights?"
    SHAPE = "How concentrated is it?"
    TASK = "Is the answer right?"


class Requirement(Enum):
    """What a metric needs from the model and the dataset."""

    TRUTH = "a target: human attention, marked words, or known evidence"
    REGION = "a target region: boxes, masks, marked words, known evidence"
    FIXATIONS = "single fixations, on this and on other images"
    WORDS = "a text"
    MODEL = "a model that can be run with parts removed"
    GRADIENTS = "a model with a gradient by its input"
    ATTENTION = "attention weights inside the model that can be edited"
    PIXELS = "images that can be changed, and a model with attention"
    LABELS = "labels"


@dataclass(frozen=True)
class ScorecardMetric:
    """A metric of a scorecard.

    Args:
        key: Name on the command line and in files: the metric's key, and after an @ how keys are
            removed.
        info: What the score means.
        question: The question that the metric answers.
        needs: What the metric requires.
        limitation: What the score does not show, with the paper that demonstrates it.
        compute: Computes the scores of a map, given a `MetricContext` and the map's name.
        each_map: False for a metric of the model, which is computed once and not for control maps.
    """

    key: str
    info: MetricInfo
    question: MetricQuestion
    needs: tuple[Requirement, ...]
    limitation: str
    compute: ComputeMetric
    each_map: bool = True

    @property
    def name(self) -> str:
        """The key without the removal after the @."""
        return self.key.partition("@")[0]

    @property
    def direction(self) -> str:
        """The better direction: "higher", "lower" or "neither"."""
        return self.info.direction

    def about(self) -> dict[str, Any]:
        """Return the entry as JSON values; an infinite bound is None."""
        low, high = self.info.low, self.info.high
        return {
            "key": self.key,
            "name": self.info.name,
            "unit": self.info.unit,
            "direction": self.direction,
            "low": low if abs(low) < float("inf") else None,
            "high": high if abs(high) < float("inf") else None,
            "question": self.question.name.lower(),
            "needs": [need.name.lower() for need in self.needs],
            "cannot_say": self.limitation,
            "version": self.info.version,
        }
