"""Run folders: read the run in a folder and check paths, before heavy imports."""

import errno
import os
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from overt import io
from overt.errors import CorruptFileError, UserError
from overt.experiments import settings
from overt.experiments.preflight import is_folder
from overt.experiments.recipe import Recipe

R = TypeVar("R", bound=Recipe)
RESULTS = "results.json"
ROWS = "rows.json"  # of a folder with one run per row, as the demo writes it
DONE, FAILED = "done", "failed"


@dataclass(frozen=True)
class ExistingRun:
    """The run in a folder, from its results.json."""

    folder: Path
    results: Mapping[str, Any]

    @property
    def has_final_results(self) -> bool:
        """Whether results.json has the status "done"."""
        return bool(self.results["status"] == DONE)

    @property
    def is_finished(self) -> bool:
        """Whether the run is complete, with its manifest, which is written last."""
        return self.has_final_results and (self.folder / io.MANIFEST).exists()

    @property
    def is_empty(self) -> bool:
        """Whether the run failed before it saved anything worth keeping."""
        # A run that failed early has left only these.
        left = set(visible_names(self.folder)) - {RESULTS, "log.jsonl", "tensorboard"}
        return self.results["status"] == FAILED and not left

    def differences(self, recipe: Recipe, seed: int) -> list[str]:
        """List how this recipe and seed differ from the run in the folder.

        A setting that the recipe has gained since then does not differ if it has its default.
        """
        if self.results["recipe"] != recipe.name:
            return [
                f"the recipe is {recipe.name}, was {settings.format_value(self.results['recipe'])}"
            ]
        theirs = settings.fill_defaults(self.results["settings"], recipe)
        found = settings.describe_changes(theirs, settings.to_json(recipe))
        if self.results["seed"] != seed:
            found.append(f"the seed is {seed}, was {self.results['seed']}")
        return found

    def restore(self, recipe: R, changes: Sequence[str] = ()) -> R:
        """Return a recipe with the settings of this run, after `changes` as for `--set`.

        A change to another value than that of the run is kept; `differences` then names it.
        """
        values = settings.fill_defaults(self.results["settings"], recipe)
        return settings.apply(settings.restore(recipe, values), changes)

    def __str__(self) -> str:
        state = "a finished" if self.is_finished else "an unfinished"
        return f"{state} run of {self.results['recipe']} with seed {self.results['seed']}"


def read_run(folder: Path) -> ExistingRun | None:
    """Read the run in a folder; None where there is none.

    The results of a finished run are checked against its manifest.

    Raises:
        CorruptFileError: results.json cannot be read.
    """
    path = folder / RESULTS
    if not path.exists():
        return None
    io.verify_file(path)
    results = io.read_json(path)
    check_results(results, path)
    return ExistingRun(folder, results)


def check_results(results: Any, path: Path) -> None:
    """Raise `CorruptFileError` unless these are the results of a run."""
    wanted = {"status": str, "recipe": str, "settings": dict, "seed": int}
    # The callers use these four without further checks.
    for name, kind in wanted.items():
        if not isinstance(results, dict) or not isinstance(results.get(name), kind):
            raise CorruptFileError(
                f"{path} is not the results of a run ({name!r} is missing or is not a "
                f"{kind.__name__}): move it away, or choose another folder."
            )


def recipe_name(existing: ExistingRun | None, folder: Path, known: Container[str]) -> str:
    """Return the name of the recipe of a run to resume, which must be one of `known`."""
    if existing is None:
        raise UserError(
            "Missing argument 'RECIPE': give the name of a recipe, see `overt list`, or "
            "FILE.py:NAME; only --resume with the folder of a run needs none."
        )
    name = str(existing.results["recipe"])
    if name not in known:
        raise UserError(
            f"{folder} has a run of {name[:60]!r}, which is not a recipe of overt: name the Python "
            f"file that defines it, `overt run FILE.py:NAME --out {folder} --resume`; code is "
            "never read from the folder of a run."
        )
    return name


def has_progress(folder: Path) -> bool:
    """Return whether a folder has a run that is finished or can be resumed."""
    existing = read_run(folder)
    return existing is not None and not existing.is_empty


def check_claim(
    out: Path, recipe: Recipe, seed: int, *, resume: bool, locked: bool = False
) -> ExistingRun | None:
    """Check that a run may use the folder `out`, and return the run to resume, if any.

    A run that failed before it saved anything does not keep its folder. Another process may change
    the folder before it is locked, so a run checks again once it has the lock (`locked`). Of the
    processes of one run only the main one checks.

    Raises:
        UserError: The folder has another run or other files; it has this run and `resume` is not
            set; `resume` is set and there is no run; another process uses the folder.
    """
    # Under torchrun all processes start at once: to the others, the files that the main one writes
    # would look like another run.
    if os.environ.get("RANK", "0") != "0":
        return read_run(out) if resume else None
    existing = read_run(check_folder_path(out))
    if existing is None:
        if resume:
            raise UserError(
                f"cannot resume: {out} has no run. Leave out --resume to start one there."
            )
        names = visible_names(out)
        if names:
            raise UserError(
                f"{out} is not empty (it has {names[0]}): choose a new or an empty folder."
            )
        return None
    # Fail now, not after the build, if the folder is read-only or locked.
    if not existing.is_finished and not locked:
        check_writable(out)
    if not resume and existing.is_empty:
        return None
    differences = existing.differences(recipe, seed)
    if not resume:
        report = f"show it with `overt report {out}`"
        advice = report if existing.is_finished else "add --resume to continue it"
        unlike = f" Its settings differ: {'; '.join(differences)}." if differences else ""
        raise UserError(
            f"{out} already has {existing}: {advice}, or choose another folder.{unlike}"
        )
    if differences:
        raise UserError(
            f"cannot resume {existing} in {out} with different settings: {'; '.join(differences)}."
        )
    return existing


def check_folder_path(out: Path, option: str = "--out") -> Path:
    """Return the path if it is a folder or can become one; `option` is named in errors.

    Raises:
        UserError: It is a file or below one, or it is inside a run or a saved model.
    """
    # `Path` accepts a NUL; the first system call with it raises a ValueError.
    if "\0" in str(out):
        raise UserError(f"{option} has a NUL character: {str(out)!r} cannot be a path.")
    try:
        # The closest parent that exists must be a folder.
        for part in (out, *out.parents):
            if part.is_dir():
                break
            if part.exists() or part.is_symlink():
                what = "a file" if part.is_file() else "not a folder"
                raise UserError(f"{option} needs a folder, but {part} is {what}: choose another.")
    except OSError as error:  # for example, the name is too long
        raise UserError(f"{option} cannot be {str(out)[:80]!r}: {error.strerror}.") from None
    # Through `realpath`: a symbolic link must not lead into a finished run either.
    for parent in Path(os.path.realpath(out)).parents:
        begun = all(os.path.lexists(parent / name) for name in (RESULTS, "log.jsonl"))
        if begun or is_sealed(parent):
            raise UserError(
                f"{option} is inside {parent}, a run or a saved model that must not change: "
                "choose another folder."
            )
    return out


def is_sealed(folder: Path) -> bool:
    """Return whether a folder has a manifest of overt, so that it must not get other files.

    The manifest.json of another program, such as a web page, does not count.
    """
    if not os.path.lexists(folder / io.MANIFEST):
        return False
    if os.path.lexists(folder / RESULTS):
        return True
    try:
        io.manifest_names(folder)
    except CorruptFileError:
        return False
    return True


def refuse_run_folder(out: Path) -> None:
    """Raise `UserError` if a folder is a run, a saved model or a store.

    All of them have a manifest; an unfinished run has results or a log.
    """
    for name in (RESULTS, io.MANIFEST, "log.jsonl"):
        if os.path.lexists(out / name):
            raise UserError(f"{out} is a run or a saved model: choose another folder for --out.")


def check_output_file(out: Path, file: Path | None = None) -> Path:
    """Return the path of a file to write; its folder must exist and must not be a finished run.

    If `out` is the folder of `file`, that folder may be missing; its parent must exist.
    """
    file = file or out
    check_folder_path(file.parent)
    if not out.parent.is_dir():
        raise UserError(
            f"the folder {out.parent} does not exist: create it, or choose another --out."
        )
    if is_sealed(file.parent):
        what = "run" if os.path.lexists(file.parent / RESULTS) else "folder of overt"
        raise UserError(
            f"{file.parent} is a finished {what} and must not change: choose another --out."
        )
    return file


def find_runs(path: Path) -> list[Path]:
    """Return the folder itself if it is a run, else all runs below it (a table or the demo)."""
    if not is_folder(path):
        raise UserError(f"expected the folder of a run, got {str(path)!r}, which is not a folder.")
    if any((path / name).exists() for name in (RESULTS, "log.jsonl")):
        return [path]
    below = (f"*/{RESULTS}", f"*/*/{RESULTS}")  # DIR/<row> of the demo, DIR/<row>/seed-0 of a table
    found = sorted(one.parent for pattern in below for one in path.glob(pattern))
    if not found:
        raise UserError(f"{path} has no run: there is no {RESULTS} in it or below it.")
    return found


def listed_rows(folder: Path) -> list[str]:
    """Return the rows that a folder with one run per row lists in `rows.json`; else none."""
    path = folder / ROWS
    if not path.is_file():
        return []
    saved = io.read_json(path)
    rows = saved.get("rows") if isinstance(saved, dict) else None
    if not isinstance(rows, list) or any(row != Path(str(row)).name for row in rows):
        raise CorruptFileError(f'{path} is not {{"rows": [names of folders]}}: delete it.')
    return rows


def visible_names(folder: Path) -> list[str]:
    """List the names in a folder, without hidden ones."""
    if not folder.is_dir():
        return []
    try:
        return sorted(one.name for one in folder.iterdir() if not one.name.startswith("."))
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error.strerror}.") from None


def check_writable(out: Path) -> None:
    """Create the folder and lock it briefly, to fail early without permission or with a lock."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        # A full disk says nothing about the folder: the write that needs space reports it.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"{out} cannot be created: {error.strerror}; choose another folder for --out."
            ) from None
    with io.lock(out):
        pass
