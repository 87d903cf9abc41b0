"""What the rows of one seed share: the first network and the targets it found.

    DIR/baseline/        the first network, where the run has a second one
    DIR/surrogates/      what was found for every training sample
    DIR/ground.json      whose first network and whose targets this run uses: its own, or another's
    DIR/search.json      how long the search took

A run in the folder of a table, OUT/<row>/seed-<n>, stands on a finished one beside it whose data,
network, training and seed are the same; its files are checked before they are used. The choice is
written down before anything is made, so that a run that goes on stands where it stood.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from overt import files
from overt.errors import BadInput, Damaged
from overt.recipes import folder, settings
from overt.recipes.recipe import Context
from overt.recipes.ssa.recipe import Over, SsaRecipe, Start, Target

GROUND, BASELINE, SURROGATES, TIME = "ground.json", "baseline", "surrogates", "search.json"
WEIGHTS = "model.safetensors"
OF_BASELINE = ("data.", "model.", "train.")


@dataclass(frozen=True)
class Ground:
    """The folders that hold the first network and the targets; None is this run's own."""

    baseline: Path | None = None
    surrogates: Path | None = None


def ground_of(recipe: SsaRecipe, context: Context) -> Ground:
    """What a run stands on: what it stood on before, or what is finished beside it by now."""
    written = context.out / GROUND
    if written.is_file():
        said = files.read_json(written)
        found = Ground(*(_path(said.get(name)) for name in (BASELINE, SURROGATES)))
    else:
        found = _look_around(recipe, context)
        files.write_json(
            written,
            {BASELINE: _name(found.baseline), SURROGATES: _name(found.surrogates)},
        )
    for place in (found.baseline, found.surrogates):
        if place is not None and not place.is_dir():
            raise Damaged(f"{context.out} stands on {place}, which is gone; run it again.")
    return found


def _look_around(recipe: SsaRecipe, context: Context) -> Ground:
    if not recipe.taught:
        return Ground()
    baseline = surrogates = None
    for place, held in _beside(context):
        theirs = held.results["settings"]
        if held.results["recipe"] != recipe.name or not alike(theirs, recipe, OF_BASELINE):
            continue
        untaught = theirs["supervise.target"] == Target.NONE.value
        alone = untaught and theirs["supervise.start"] == Start.SCRATCH.value  # else it went on
        trained = place / ("model" if alone else BASELINE)
        if baseline is None and trained.is_dir():  # else its first network was another's
            baseline = trained
        searched = place / SURROGATES
        if surrogates is None and searched.is_dir() and _same_search(theirs, recipe):
            surrogates = searched
    if surrogates is not None:  # both of one run, so that one is of the other
        kept = surrogates.parent / GROUND
        other = _path(files.read_json(kept).get(BASELINE)) if kept.is_file() else None
        baseline = other or surrogates.parent / BASELINE
    return Ground(baseline, surrogates)


def _beside(context: Context) -> Iterator[tuple[Path, folder.Held]]:
    """The finished runs of the same seed in the other rows of a table."""
    if context.out.name != f"seed-{context.seed}":
        return
    for place in sorted(context.out.parent.parent.glob(f"*/{context.out.name}")):
        if place == context.out:
            continue
        held = folder.look(place)
        if held is not None and held.done and held.results["seed"] == context.seed:
            files.verify(place)
            yield place, held


def alike(theirs: Mapping[str, Any], recipe: SsaRecipe, sections: Sequence[str]) -> bool:
    """Whether settings, as a run wrote them, are those of a recipe in these sections."""
    ours, theirs = settings.to_json(recipe), settings.completed(theirs, recipe)
    names = [key for key in {*ours, *theirs} if key.startswith(tuple(sections))]
    return all(key in ours and key in theirs and ours[key] == theirs[key] for key in names)


def _same_search(theirs: dict[str, Any], recipe: SsaRecipe) -> bool:
    """Whether targets were searched for alike: over the same spans, with the same masks or none."""
    own = recipe.supervise
    unmasked = theirs["supervise.target"] == Target.OWN.value
    spans = own.over.value, Over.BOTH.value
    return (
        recipe.searched
        and unmasked is (own.target is Target.OWN)
        and theirs["supervise.over"] in spans
        and alike(theirs, recipe, ("surrogate.",))
    )


def load(model: nn.Module, place: Path) -> None:
    """Give a network the weights of a finished one of its kind."""
    files.verify(place)
    theirs, own = files.read_tensors(place / WEIGHTS), _plain(model)
    wrong = [
        name
        for name in {*own, *theirs}
        if name not in theirs or theirs[name].shape != own[name].shape
    ]
    if wrong:
        raise BadInput(f"{place} holds another network: its {sorted(wrong)[0]} is not ours.")
    model.load_state_dict({_outer(model) + name: one for name, one in theirs.items()})


def _outer(model: nn.Module) -> str:
    """What stands before the names of weights in a network that is kept by what is inside it."""
    from overt.models.finetuned import TextTransformer

    return "adopted.model." if isinstance(model, TextTransformer) else ""


def _plain(model: nn.Module) -> dict[str, Any]:
    before = _outer(model)
    return {name.removeprefix(before): one for name, one in model.state_dict().items()}


def _path(said: Any) -> Path | None:
    return None if said is None else Path(said)


def _name(place: Path | None) -> str | None:
    return None if place is None else str(place)
