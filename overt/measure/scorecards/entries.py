"""What a scorecard can ask: a measure, what it needs to be asked, and what it cannot say."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from overt.measure.measured import Measure, Measured

if TYPE_CHECKING:
    from overt.measure.scorecards.sight import Sight

Ask = Callable[["Sight", str], Measured]  # of the map of this name, for the samples in sight


class Question(Enum):
    """What a measure is an answer to."""

    AGREEMENT = "Does it look where people look?"
    LOCATION = "Is it on the thing?"
    FAITHFULNESS = "Does it say what drives the answer?"
    INTERVENTION = "What if the attention were another?"
    STABILITY = "Does it hold still, and does it depend on what was learned?"
    SHAPE = "How wide is it?"
    TASK = "Is the answer right?"


class Need(Enum):
    """What must be there for a measure to be asked."""

    TRUTH = "a truth: where people looked, what they marked, or what decides"
    REGION = "a truth with an edge: boxes, masks, marked words, known evidence"
    FIXATIONS = "single fixations, and those on other images"
    WORDS = "a text"
    MODEL = "a model that can be asked with parts removed"
    GRADIENTS = "a model whose answer has a gradient"
    ATTENTION = "attention inside the model that can be changed in flight"
    PIXELS = "pictures that can be changed, and a model that attends"
    LABELS = "the right answers"


@dataclass(frozen=True)
class Entry:
    """One measure of a scorecard.

    `key` is its name on a command line: the function's, and behind an @ what stands in the place of
    what is removed. `each_map` is False for what is asked of the model alone, once: there is no
    uniform or random map of it to compare with. `cannot` says what the number does not mean, with
    the paper that shows it.
    """

    key: str
    measure: Measure
    question: Question
    needs: tuple[Need, ...]
    cannot: str
    ask: Ask
    each_map: bool = True

    @property
    def name(self) -> str:
        """The name without what stands behind the @."""
        return self.key.partition("@")[0]

    @property
    def direction(self) -> str:
        """Where better is, in a word."""
        better = self.measure.higher_is_better
        return {True: "higher", False: "lower", None: "neither"}[better]

    def about(self) -> dict[str, Any]:
        """The entry as plain values; a bound that there is not is None."""
        low, high = self.measure.low, self.measure.high
        return {
            "key": self.key,
            "name": self.measure.name,
            "unit": self.measure.unit,
            "direction": self.direction,
            "low": low if abs(low) < float("inf") else None,
            "high": high if abs(high) < float("inf") else None,
            "question": self.question.name.lower(),
            "needs": [need.name.lower() for need in self.needs],
            "cannot_say": self.cannot,
        }


class Unasked(ValueError):
    """A measure cannot be asked of this model and this data; the message says why."""
