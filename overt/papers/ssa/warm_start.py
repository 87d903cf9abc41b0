"""Self Supervision for Attention Networks: share the first network and its targets between rows.

    DIR/baseline/        the first network, if the run has a second one
    DIR/surrogates/      the surrogate target of every training sample
    DIR/ground.json      where the first network and the targets came from: null for this run's own
    DIR/search.json      how long the search took

In the folder of a table, OUT/<row>/seed-<n>, a run reuses those of a finished sibling with the same
data, network, training and seed, after verifying its files. The choice is recorded first, so that a
resumed run uses the same files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overt import io
from overt.experiments import settings
from overt.experiments import warm_start as shared
from overt.experiments.recipe import RunContext
from overt.papers.ssa.config import SsaRecipe, SsaSpan, SsaStart, SsaTarget

BASELINE, SURROGATES, TIME = "baseline", "surrogates", "search.json"
OF_BASELINE = ("data.", "model.", "train.")


@dataclass(frozen=True)
class WarmStart:
    """The folders of the first network and the targets; None if they are this run's own."""

    baseline: Path | None = None
    surrogates: Path | None = None


def find_warm_start(recipe: SsaRecipe, context: RunContext) -> WarmStart:
    """Return the warm start of a run: as recorded, or from finished sibling runs."""
    found = shared.recorded_folders(context, lambda: vars(_find_siblings(recipe, context)))
    return WarmStart(found.get(BASELINE), found.get(SURROGATES))


def _find_siblings(recipe: SsaRecipe, context: RunContext) -> WarmStart:
    if not recipe.supervised:
        return WarmStart()
    baseline = surrogates = None
    for run in shared.finished_siblings(context):
        # Verify first: a damaged sibling must raise instead of starting this run from wrong
        # weights.
        io.verify(run.folder)
        theirs = run.results["settings"]
        if run.results["recipe"] != recipe.name or not same_settings(theirs, recipe, OF_BASELINE):
            continue
        untaught = theirs["supervise.target"] == SsaTarget.NONE.value
        # else it was trained for longer
        alone = untaught and theirs["supervise.start"] == SsaStart.SCRATCH.value
        trained = run.folder / ("model" if alone else BASELINE)
        # else its first network was loaded from another run
        if baseline is None and trained.is_dir():
            baseline = trained
        searched = run.folder / SURROGATES
        if surrogates is None and searched.is_dir() and _same_search(theirs, recipe):
            surrogates = searched
    if surrogates is not None:  # take both from one run, so that they belong together
        kept = surrogates.parent / shared.WARM_START_FILE
        other = shared.saved_path(io.read_json(kept).get(BASELINE)) if kept.is_file() else None
        baseline = other or surrogates.parent / BASELINE
    return WarmStart(baseline, surrogates)


def same_settings(theirs: Mapping[str, Any], recipe: SsaRecipe, sections: Sequence[str]) -> bool:
    """Return whether the settings of a run equal those of a recipe in these sections."""
    filled = settings.fill_defaults(theirs, recipe)
    ours = settings.to_json(recipe)
    return shared.same_settings(filled, ours, lambda key: key.startswith(tuple(sections)))


def _same_search(theirs: dict[str, Any], recipe: SsaRecipe) -> bool:
    """Return whether targets were searched for with the same spans and masks."""
    own = recipe.supervise
    unmasked = theirs["supervise.target"] == SsaTarget.OWN.value
    # A search over both spans has the targets of each.
    spans = own.over.value, SsaSpan.BOTH.value
    return (
        recipe.needs_search
        and unmasked is (own.target is SsaTarget.OWN)
        and theirs["supervise.over"] in spans
        and same_settings(theirs, recipe, ("surrogate.",))
    )
