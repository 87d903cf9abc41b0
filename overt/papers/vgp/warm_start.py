"""Attending Self-Attention: rows of a table start from one pretrained network.

In the folder of a table, OUT/<row>/seed-<n>, a run whose first training is pretraining loads the
network of the finished row "original" of the same seed, if its data, network, training and
pretraining are the same. That row goes to the downstream tasks without fine-tuning, so the network
that it saves is the pretrained one. The choice is recorded in `ground.json`.
"""

from pathlib import Path

from overt import io
from overt.experiments import settings
from overt.experiments import warm_start as shared
from overt.experiments.recipe import RunContext
from overt.papers.vgp.config import VgpMethod, VgpPretraining, VgpRecipe

PRETRAINED = "pretrained"
SECTIONS = ("data.", "model.", "train.", "first.")


def find_pretrained(recipe: VgpRecipe, context: RunContext) -> Path | None:
    """Return the folder of the pretrained network of a sibling run; None to pretrain."""
    if recipe.first.tasks is not VgpPretraining.MASKED:
        return None
    if recipe.supervise.way is VgpMethod.ORIGINAL:  # others start from this run
        return None
    found = shared.recorded_folders(context, lambda: {PRETRAINED: _find_sibling(recipe, context)})
    return found.get(PRETRAINED)


def _find_sibling(recipe: VgpRecipe, context: RunContext) -> Path | None:
    ours = settings.to_json(recipe)
    for run in shared.finished_siblings(context):
        theirs = settings.fill_defaults(run.results["settings"], recipe)
        if (
            run.results["recipe"] == recipe.name
            and theirs["supervise.way"] == VgpMethod.ORIGINAL.value
            and shared.same_settings(theirs, ours, lambda key: key.startswith(SECTIONS))
        ):
            # A damaged sibling must raise instead of starting this run from wrong weights.
            io.verify(run.folder)
            return run.folder / "model"
    return None
