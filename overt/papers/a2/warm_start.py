"""Attention-Aligned Transformer: start the self-critical stage from a finished run of the table.

In the folder of a table, OUT/<row>/seed-<n>, two rows that differ only in the critic have a bitwise
identical first stage. The run loads that captioner after verifying its files, and records the
folder in `ground.json`. Without such a run it trains its own.
"""

from pathlib import Path

from overt import io
from overt.experiments import settings
from overt.experiments.recipe import RunContext
from overt.experiments.warm_start import finished_siblings, recorded_folders, same_settings
from overt.papers.a2.config import A2Recipe

FIRST = "first"


def find_warm_start(recipe: A2Recipe, context: RunContext) -> Path | None:
    """Return the `model/` folder this run starts from: as recorded, or a finished sibling run."""
    if not recipe.critic.epochs:
        return None
    return recorded_folders(context, lambda: {FIRST: _finished_sibling(recipe, context)}).get(FIRST)


def _finished_sibling(recipe: A2Recipe, context: RunContext) -> Path | None:
    """Return the model of a finished run of the same seed that differs only in the critic."""
    ours = settings.to_json(recipe)
    for run in finished_siblings(context):
        theirs = run.results["settings"]
        # Without a critic, the network of a sibling is exactly the first stage of this run.
        if (
            run.results["recipe"] == recipe.name
            and same_settings(theirs, ours, lambda key: not key.startswith("critic."))
            and theirs["critic.epochs"] == 0
        ):
            io.verify(run.folder)
            return run.folder / "model"
    return None
