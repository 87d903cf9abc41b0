"""Repair the folder of a run: set damaged files aside so that the run can be resumed.

Nothing is deleted except temporary files of processes that no longer exist. Files that are proven
to be damaged are moved to `set-aside/` under their own path, and `--resume` creates them again: a
checkpoint from the one before it, a shard of a store from its model and data, the files of a
finished run from its checkpoints. Intact files are not touched. If a file cannot be read for lack
of memory or file descriptors, or because the disk fails, the repair ends before it moves anything.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from overt import io
from overt.errors import CorruptFileError, UserError
from overt.experiments import run_folder

STORES = ("surrogates.json", "cache.json")  # files that mark a folder of shards
STEP, BEST, SHARD = "step-", "best", "shard-"


@dataclass(frozen=True)
class Repair:
    """One repair: its description and the function that does it."""

    description: str
    apply: Callable[[], object]


def plan_repairs(path: Path) -> list[Repair]:
    """Return what `repair` would do, in that order, without doing it."""
    return [*_lock_repairs(path), *_folder_repairs(path)]


def repair(path: Path) -> list[str]:
    """Repair the folder of a run or a store of shards, and return what was done.

    A second repair finds nothing to do.

    Raises:
        UserError: Another process uses the folder.
    """
    # Before locking: the lock of this process would count as held.
    locks = list(_lock_repairs(path))
    with io.lock(path):
        done = list(_folder_repairs(path))
        for one in done:
            one.apply()
    for one in locks:
        one.apply()
    return [one.description for one in (*locks, *done)]


def find_damage(path: Path) -> str:
    """Return what is wrong with a folder that has a manifest, or "" if it is intact.

    Raises:
        RunError: The folder cannot be read, so its state is unknown.
    """
    try:
        io.verify(path)
    except CorruptFileError as error:
        return str(error).rstrip(".")
    return ""


def _set_aside(path: Path, root: Path) -> None:
    """Set a folder aside if it is still damaged when checked again."""
    if find_damage(path):
        io.set_aside(path, root)


def shard_stores(path: Path) -> list[Path]:
    """Return the folders of shards below a folder, including itself."""
    found = {one.parent for name in STORES for one in path.rglob(name)}
    found |= {one.parent.parent for one in path.rglob(f"{SHARD}*/shard.json")}
    return sorted(one for one in found if not _is_set_aside(one, path))


def is_store(path: Path) -> bool:
    """Return whether a folder itself has shards; subfolders are not searched."""
    return any((path / name).exists() for name in STORES) or any(path.glob(f"{SHARD}*/shard.json"))


def checkpoint_folders(path: Path) -> list[Path]:
    """Return the folders of checkpoints, one per stage."""
    parent = path / "checkpoints"
    return sorted({one.parent for one in parent.rglob(f"{STEP}*") if one.is_dir()})


def output_folders(path: Path) -> list[Path]:
    """Return the output folders of a run that have a manifest, such as model and gallery."""
    others = {path / io.SET_ASIDE, *shard_stores(path)}
    found = [one for one in sorted(path.iterdir()) if (one / io.MANIFEST).exists()]
    return [one for one in found if one not in others]


def _folder_repairs(path: Path) -> Iterator[Repair]:
    yield from _leftover_repairs(path)
    for stage in checkpoint_folders(path):
        yield from _checkpoint_repairs(path, stage)
    for store in shard_stores(path):
        yield from _shard_repairs(path, store)
    yield from _output_repairs(path)


def _lock_repairs(path: Path) -> Iterator[Repair]:
    for lock in sorted(one for one in path.rglob(".lock") if not _is_set_aside(one, path)):
        name, held = io.lock_holder(lock.parent)
        if held:
            raise UserError(f"{lock.parent} is in use by {name}: wait until it ends, then repair.")
        if name:
            description = f"remove the lock of {name}, which no longer exists, in {lock.parent}"
            yield Repair(description, partial(run_folder.check_writable, lock.parent))


def _leftover_repairs(path: Path) -> Iterator[Repair]:
    for parent, below, _ in os.walk(path):
        below[:] = [name for name in below if not name.startswith((".tmp-", ".old-", io.SET_ASIDE))]
        for one in io.stale_temporaries(Path(parent)):
            old = one.name.startswith(".old-")
            what = f"restore {one}, unless its successor is intact" if old else f"remove {one}"
            description = f"{what}: its process no longer exists"
            yield Repair(description, partial(io.remove_stale_temporaries, one.parent))


def _checkpoint_repairs(path: Path, stage: Path) -> Iterator[Repair]:
    found = [one for one in stage.glob(f"{STEP}*") if one.is_dir() and ".replaced-" not in one.name]
    broken = {one: why for one in sorted(found) if (why := find_damage(one))}
    intact = sorted(one for one in found if one not in broken)
    then = f"--resume continues from {intact[-1].name}" if intact else "--resume restarts the stage"
    for one, why in broken.items():
        yield Repair(f"set aside {one}: {why}; {then}", partial(_set_aside, one, path))
    best = stage / BEST
    if best.exists() and (why := find_damage(best)) and intact:
        # The best weights are those of one checkpoint. If that one is still kept, they can be
        # restored.
        state = io.read_json(intact[-1] / "state.json")
        at = state.get("best_step", 0) if isinstance(state, dict) else 0
        source = stage / f"{STEP}{at if isinstance(at, int) else 0:09d}"
        if source in intact:
            description = f"set aside {best}: {why}; restore its weights from {source.name}"
            yield Repair(description, partial(_restore_best, best, source, path))


def _restore_best(best: Path, source: Path, path: Path) -> None:
    if not find_damage(best):
        return
    io.set_aside(best, path)
    with io.atomic_folder(best) as temporary:
        weights = io.read_tensors(source / "model.safetensors")
        io.write_tensors(temporary / "model.safetensors", weights)


def _shard_repairs(path: Path, store: Path) -> Iterator[Repair]:
    then = "the next run creates it again and keeps the intact ones"
    for shard in sorted(one for one in store.glob(f"{SHARD}*") if one.is_dir()):
        why = "" if ".replaced-" in shard.name else find_damage(shard)
        if why:
            yield Repair(f"set aside {shard}: {why}; {then}", partial(_set_aside, shard, path))
    why = find_damage(store)
    if not why or (store == path and (path / run_folder.RESULTS).exists()):
        return
    for name in (*STORES, io.MANIFEST):
        if (store / name).exists():
            description = f"set aside {store / name}: {why}; the next run writes it again"
            yield Repair(description, partial(io.set_aside, store / name, path))


def _output_repairs(path: Path) -> Iterator[Repair]:
    """Yield the repairs of the outputs of a run that is finished or was about to finish."""
    if is_store(path):
        return
    again = "--resume evaluates the trained model again and writes it"
    wrong = {one: why for one in output_folders(path) if (why := find_damage(one))}
    sealed = (path / io.MANIFEST).exists() and (path / run_folder.RESULTS).exists()
    if sealed and _results_readable(path / run_folder.RESULTS):
        wrong |= dict(_changed_files(path))
    for one, why in wrong.items():
        yield Repair(f"set aside {one}: {why}; {again}", partial(io.set_aside, one, path))
    if wrong and sealed:
        description = (
            f"set aside {path / io.MANIFEST}: without the other files the run is not finished"
        )
        if path / io.MANIFEST not in wrong:
            yield Repair(description, partial(io.set_aside, path / io.MANIFEST, path))


def _changed_files(path: Path) -> Iterator[tuple[Path, str]]:
    """Yield the files of a run that differ from its manifest."""
    try:
        names = io.manifest_names(path)
    except CorruptFileError as error:
        yield path / io.MANIFEST, str(error).rstrip(".")
        return
    for name in names:
        try:
            io.verify_file(path / name)
        except CorruptFileError as error:
            # A missing file cannot be moved: then the manifest is wrong.
            if os.path.lexists(path / name):
                yield path / name, str(error).rstrip(".")
            else:
                yield path / io.MANIFEST, f"{name} is missing"


def _results_readable(results: Path) -> bool:
    """Return whether results.json can be read: without it a run cannot be resumed."""
    try:
        run_folder.read_run(results.parent)
    except CorruptFileError as error:
        # An error about the manifest says nothing about results.json itself.
        return io.MANIFEST in str(error)
    return True


def _is_set_aside(one: Path, path: Path) -> bool:
    parts = one.relative_to(path).parts
    return any(part == io.SET_ASIDE or part.startswith((".tmp-", ".old-")) for part in parts)
