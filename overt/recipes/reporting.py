"""The small scorecard at the end of every run: is its attention better than maps that know nothing?

It is made of few samples of the test, so that it costs seconds, and stands on the page of the run.
`overt measure RUN` makes a large one with every measure.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from overt import files
from overt.errors import BadInput, Damaged
from overt.recipes.experiment import Experiment, plain

FOLDER = "scorecard"
MEASURES = (
    "accuracy",
    "spearman",
    "pointing_game",
    "mass_inside",
    "deletion_area@mask",
    "insertion_area@mask",
    "effective_support",
)
ASKS = 200  # about how often each sample is put to the network, by all maps and both curves
OPERATIONS = 2e12  # in all: some ten seconds of one core
LEAST = 4  # samples, however large the network is


@dataclass(frozen=True)
class Scored:
    """What became of it: how many samples it is of, or the sentence that says why there is none."""

    n: int = 0
    why: str = ""


def scored(
    experiment: Experiment, out: Path, wanted: int, flops: float, seed: int, name: str = ""
) -> Scored:
    """Write the scorecard of about `wanted` test samples to `out / "scorecard"`.

    Of a network so large that it would take longer than `OPERATIONS`, fewer samples are asked, as
    `flops`, the operations of one, tell: never by the clock, so the same run has the same card. A
    run does not fail for its scorecard: what stands in the way is said.
    """
    import torch

    from overt import measure
    from overt.supervise.surrogate.making import Share

    if wanted < 1:
        return Scored(why="it was turned off: train.card is 0")
    data = experiment.judged
    if data is None or not len(data):
        return Scored(why="this recipe has no test with one map a sample, which a scorecard reads")
    fitting = int(OPERATIONS / (ASKS * flops)) if flops > 0 else wanted
    samples = min(wanted, max(LEAST, fitting))
    try:
        each = len(data.batch([0]))  # an item may be several samples, such as questions
        items = min(len(data), -(-samples // max(1, each)))
        with torch.enable_grad():
            card = measure.scorecard(
                experiment.answers or experiment.model,
                data,
                MEASURES,
                name=name or None,
                seed=seed,
                limit=items,
                portion=max(1, 32 // max(1, each)),
                share=Share(),
            )
    except (BadInput, Damaged, ValueError, RuntimeError, IndexError, KeyError, TypeError) as error:
        lines = str(error).strip().splitlines()
        return Scored(why=lines[0].rstrip(".")[:300] if lines else type(error).__name__)
    with files.writing(out / FOLDER) as new:
        card.save(new)
        (new / "clock.json").unlink()  # a run that goes on has the same bytes
    return Scored(len(card))


def told(found: Scored) -> dict[str, Any]:
    """What results.json says of it."""
    return dict(plain({name: value for name, value in asdict(found).items() if value}))
