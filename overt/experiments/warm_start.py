"""Warm starts: a run begins with the files of a finished run beside it.

In the folder of a table, OUT/<row>/seed-<n>, rows that share their first stages train them once;
so do the rows OUT/<row> that are listed in OUT/rows.json, as in the demo. The choice is recorded in
`ground.json` first, so that a resumed run uses the same files.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from overt import io
from overt.errors import CorruptFileError, UserError
from overt.experiments import run_folder
from overt.experiments.recipe import RunContext

WARM_START_FILE, WEIGHTS = "ground.json", "model.safetensors"

StartFolders = Mapping[str, Path | None]  # by name; None for what the run makes itself


def finished_siblings(context: RunContext) -> Iterator[run_folder.ExistingRun]:
    """Yield the finished runs of the same seed in the other rows of a table or a demo."""
    # Only runs of a table are in folders with this name.
    if context.out.name == f"seed-{context.seed}":
        places = sorted(context.out.parent.parent.glob(f"*/{context.out.name}"))
    else:
        places = [context.out.parent / row for row in run_folder.listed_rows(context.out.parent)]
    for place in places:
        run = None if place == context.out else run_folder.read_run(place)
        if run is not None and run.is_finished and run.results["seed"] == context.seed:
            yield run


def same_settings(
    theirs: Mapping[str, Any], ours: Mapping[str, Any], compares: Callable[[str], bool]
) -> bool:
    """Return whether two runs have the same settings, of those that `compares` selects by key."""
    keys = [key for key in {*ours, *theirs} if compares(key)]
    return all(key in ours and key in theirs and ours[key] == theirs[key] for key in keys)


def recorded_folders(context: RunContext, find: Callable[[], StartFolders]) -> StartFolders:
    """Return the folders that a run starts from: as recorded, or those of `find`, then recorded.

    Raises:
        CorruptFileError: A recorded folder no longer exists.
    """
    written = context.out / WARM_START_FILE
    if written.is_file():
        saved = io.read_json(written)
        found: StartFolders = {name: saved_path(one) for name, one in saved.items()}
    else:
        found = find()
        names = {name: None if place is None else str(place) for name, place in found.items()}
        io.write_json(written, names)
    for place in found.values():
        if place is not None and not place.is_dir():
            raise CorruptFileError(
                f"{context.out} started from {place}, which no longer exists: run it again."
            )
    return found


def saved_path(saved: Any) -> Path | None:
    """Return a path from JSON, or None."""
    return None if saved is None else Path(saved)


def load_weights(model: nn.Module, place: Path) -> None:
    """Load the weights of a finished network of the same kind, after verifying its files."""
    io.verify(place)
    prefix = _weight_prefix(model)
    own = {name.removeprefix(prefix): one for name, one in model.state_dict().items()}
    theirs = io.read_tensors(place / WEIGHTS)
    wrong = [
        name
        for name in {*own, *theirs}
        if name not in own or name not in theirs or theirs[name].shape != own[name].shape
    ]
    if wrong:
        raise UserError(f"{place} has another network: {sorted(wrong)[0]} does not fit.")
    model.load_state_dict({prefix + name: one for name, one in theirs.items()})


def _weight_prefix(model: nn.Module) -> str:
    """Return the prefix of weight names of a network that is saved by its inner model."""
    from overt.nn.text_transformer import TextTransformer

    return "adopted.model." if isinstance(model, TextTransformer) else ""
