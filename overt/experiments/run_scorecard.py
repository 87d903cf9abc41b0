"""The small scorecard at the end of every run: its attention beside uninformed control maps.

It uses few test samples, so it takes seconds, and is shown in the run's report. `overt measure RUN`
computes a large one with every metric.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overt import io
from overt.errors import CorruptFileError, UserError
from overt.experiments.experiment import Experiment

FOLDER = "scorecard"
METRICS = (
    "accuracy",
    "spearman",
    "pointing_game",
    "mass_inside",
    "deletion_area@mask",
    "insertion_area@mask",
    "effective_support",
)
FORWARD_PASSES = 200  # per sample, about: all maps and both curves
MAX_FLOPS = 2e12  # in total: about ten seconds on one core
MIN_SAMPLES = 4  # for models of any size


@dataclass(frozen=True)
class ScorecardOutcome:
    """The number of samples of a scorecard, or the reason why there is none."""

    n: int = 0
    reason: str = ""


def write_scorecard(
    experiment: Experiment, out: Path, wanted: int, flops: float, seed: int, name: str = ""
) -> ScorecardOutcome:
    """Write the scorecard of about `wanted` test samples to `out / "scorecard"`.

    `flops` are the operations of one sample: large models are tested on fewer samples, to stay
    within `MAX_FLOPS`. Time is not measured, so repeated runs have equal scorecards. A run does
    not fail because of its scorecard: errors become the reason of the outcome.
    """
    import torch

    from overt import metrics
    from overt.targets.surrogate.generate import WorkerShare

    if wanted < 1:
        return ScorecardOutcome(reason="it was turned off: train.card is 0")
    data = experiment.test_data
    if data is None or not len(data):
        return ScorecardOutcome(reason="this recipe has no test data with one map per sample")
    fitting = int(MAX_FLOPS / (FORWARD_PASSES * flops)) if flops > 0 else wanted
    samples = min(wanted, max(MIN_SAMPLES, fitting))
    try:
        each = len(data.batch([0]))  # an item may be several samples, such as questions
        items = min(len(data), -(-samples // max(1, each)))
        with torch.enable_grad():
            card = metrics.scorecard(
                experiment.evaluated_model or experiment.model,
                data,
                METRICS,
                name=name or None,
                seed=seed,
                limit=items,
                portion=max(1, 32 // max(1, each)),
                # The main process computes all samples: the others have finished.
                share=WorkerShare(),
            )
    except (
        UserError,
        CorruptFileError,
        ValueError,
        RuntimeError,
        IndexError,
        KeyError,
        TypeError,
    ) as error:
        lines = str(error).strip().splitlines()
        return ScorecardOutcome(
            reason=lines[0].rstrip(".")[:300] if lines else type(error).__name__
        )
    with io.atomic_folder(out / FOLDER) as new:
        card.save(new)
        (new / "clock.json").unlink()  # a resumed run must write the same bytes
    return ScorecardOutcome(len(card))


def results_entry(outcome: ScorecardOutcome) -> dict[str, Any]:
    """Return the entry of results.json."""
    entry = {"n": outcome.n, "why": outcome.reason}
    return {name: value for name, value in entry.items() if value}
