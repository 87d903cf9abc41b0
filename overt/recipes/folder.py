"""What a run folder holds, and whether a run may have it: asked before heavy imports."""

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overt import files
from overt.errors import BadInput, Damaged
from overt.recipes import settings
from overt.recipes.recipe import Recipe

RESULTS = "results.json"
DONE, FAILED = "done", "failed"


@dataclass(frozen=True)
class Held:
    """The run in a folder, as its results.json tells it."""

    folder: Path
    results: Mapping[str, Any]

    @property
    def says_done(self) -> bool:
        """Whether the results are final."""
        return bool(self.results["status"] == DONE)

    @property
    def done(self) -> bool:
        """Whether the run came to its very end: the manifest is what it writes last."""
        return self.says_done and (self.folder / files.MANIFEST).exists()

    @property
    def blank(self) -> bool:
        """Whether the run failed before it saved anything that could be lost."""
        left = set(strangers(self.folder)) - {RESULTS, "log.jsonl", "tensorboard"}
        return self.results["status"] == FAILED and not left

    def differences(self, recipe: Recipe, seed: int) -> list[str]:
        """How a run with this recipe and seed would differ from the one in the folder.

        A setting that the recipe did not have then and that stands at its default is no difference.
        """
        if self.results["recipe"] != recipe.name:
            return [f"the recipe is {recipe.name}, was {settings.shown(self.results['recipe'])}"]
        theirs = settings.completed(self.results["settings"], recipe)
        found = settings.changes(theirs, settings.to_json(recipe))
        if self.results["seed"] != seed:
            found.append(f"the seed is {seed}, was {self.results['seed']}")
        return found

    def __str__(self) -> str:
        state = "a finished" if self.done else "an unfinished"
        return f"{state} run of {self.results['recipe']} with seed {self.results['seed']}"


def look(folder: Path) -> Held | None:
    """The run in a folder; None where there is none; `Damaged` where its results are unreadable.

    Those of a finished run are held against its manifest.
    """
    path = folder / RESULTS
    if not path.exists():
        return None
    files.check(path)
    results = files.read_json(path)
    wanted = {"status": str, "recipe": str, "settings": dict, "seed": int}
    for name, kind in wanted.items():
        if not isinstance(results, dict) or not isinstance(results.get(name), kind):
            raise Damaged(
                f"{path} does not hold the results of a run (its {name!r} is not what is written "
                "there); move it away, or choose another folder."
            )
    return Held(folder, results)


def begun(folder: Path) -> bool:
    """Whether there is a run in a folder that has something to go on with, or is finished."""
    held = look(folder)
    return held is not None and not held.blank


def claim(out: Path, recipe: Recipe, seed: int, *, resume: bool) -> Held | None:
    """Whether this run may have the folder `out`, and the run in it that goes on, if any.

    Refused are a folder with a run or with files of another kind in it, unless it is this very run
    and `resume` says so; a `resume` where there is nothing to resume; and a run that another
    process is busy with. A run that failed before it saved anything does not keep its folder.
    Of several processes of one run only the first judges.
    """
    if os.environ.get("RANK", "0") != "0":
        return look(out) if resume else None
    held = look(usable(out))
    if held is None:
        if resume:
            raise BadInput(
                f"there is no run to resume in {out}; leave --resume out to start one there."
            )
        strange = strangers(out)
        if strange:
            raise BadInput(
                f"{out} is not empty (it holds {strange[0]}); choose a new or an empty folder."
            )
        return None
    if not held.done:
        try_writing(out)
    if not resume and held.blank:
        return None
    differences = held.differences(recipe, seed)
    if not resume:
        look_at = f"look at it with `overt report {out}`"
        other = look_at if held.done else "add --resume to go on with it"
        unlike = f" It is not this one: {'; '.join(differences)}." if differences else ""
        raise BadInput(f"{out} holds {held}; {other}, or choose another folder.{unlike}")
    if differences:
        raise BadInput(
            f"{out} holds {held}, and a run goes on only as it began: {'; '.join(differences)}."
        )
    return held


def usable(out: Path) -> Path:
    """The path, if it is a folder or could be made one."""
    if "\0" in str(out):
        raise BadInput(f"{str(out)!r} holds a NUL character and cannot be a path.")
    try:
        for part in (out, *out.parents):
            if part.is_dir():
                break
            if part.exists() or part.is_symlink():
                what = "a file" if part.is_file() else "not a folder"
                raise BadInput(f"{part} is {what}; choose another folder for --out.")
    except OSError as error:  # such as a name that is too long
        raise BadInput(f"{str(out)[:80]!r} cannot be a folder: {error.strerror}.") from None
    return out


def runs_below(path: Path) -> list[Path]:
    """The run in a folder, or all the runs below it: those of a table, or of the demo."""
    if not _is_folder(path):
        raise BadInput(f"{str(path)!r} is not a folder; name the folder of a run.")
    if any((path / name).exists() for name in (RESULTS, "log.jsonl")):
        return [path]
    below = (f"*/{RESULTS}", f"*/*/{RESULTS}")  # DIR/<row> of the demo, DIR/<row>/seed-0 of a table
    found = sorted(one.parent for pattern in below for one in path.glob(pattern))
    if not found:
        raise BadInput(f"{path} holds no run: there is no {RESULTS} in it or below it.")
    return found


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def strangers(folder: Path) -> list[str]:
    """The names in a folder, but for hidden ones."""
    if not folder.is_dir():
        return []
    try:
        return sorted(one.name for one in folder.iterdir() if not one.name.startswith("."))
    except OSError as error:
        raise BadInput(f"{folder} cannot be read: {error.strerror}.") from None


def try_writing(out: Path) -> None:
    """Make the folder and hold it for a moment: no permission, or another process, shows now."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise BadInput(
                f"{out} cannot be made: {error.strerror}; choose another folder for --out."
            ) from None
    with files.lock(out):
        pass
