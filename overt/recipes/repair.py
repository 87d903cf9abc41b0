"""Mending the folder of a run: what is good stays, what is broken is set aside for a resume.

Nothing is deleted but the temporaries of writers that are no more. What does not pass `verify` is
moved to `set-aside/` under its own path, and `--resume` makes it again: a checkpoint from the one
before it, a shard of a store from its model and data, the files of a finished run from its
checkpoints. What is whole is not touched.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from overt import files
from overt.errors import BadInput, Damaged
from overt.recipes import folder

STORES = ("surrogates.json", "cache.json")  # what a folder of shards is told by
STEP, BEST, SHARD = "step-", "best", "shard-"


@dataclass(frozen=True)
class Repair:
    """One thing to mend: a sentence that says what, and the deed."""

    sentence: str
    act: Callable[[], object]


def repairs(path: Path) -> list[Repair]:
    """What `repair` would do, in that order; nothing is touched."""
    return [*_locks(path), *_mending(path)]


def repair(path: Path) -> list[str]:
    """Mend the folder of a run or a store of shards, and say what was done.

    Refused where a process is at work in it. A second repair finds nothing to do.
    """
    locks = list(_locks(path))
    with files.lock(path):
        done = list(_mending(path))
        for one in done:
            one.act()
    for one in locks:
        one.act()
    return [one.sentence for one in (*locks, *done)]


def why_broken(path: Path) -> str:
    """What is wrong with a folder that has a manifest, or "" where it is whole."""
    try:
        files.verify(path)
    except Damaged as error:
        return str(error).rstrip(".")
    return ""


def stores(path: Path) -> list[Path]:
    """The folders of shards below a folder, itself included."""
    found = {one.parent for name in STORES for one in path.rglob(name)}
    found |= {one.parent.parent for one in path.rglob(f"{SHARD}*/shard.json")}
    return sorted(one for one in found if not _is_aside(one, path))


def is_store(path: Path) -> bool:
    """Whether a folder itself is one of shards; what is below it is not looked at."""
    return any((path / name).exists() for name in STORES) or any(path.glob(f"{SHARD}*/shard.json"))


def stages(path: Path) -> list[Path]:
    """The folders of checkpoints, one a stage."""
    parent = path / "checkpoints"
    return sorted({one.parent for one in parent.rglob(f"{STEP}*") if one.is_dir()})


def parts(path: Path) -> list[Path]:
    """The folders that a run ends with, each whole in itself: its model, its gallery."""
    others = {path / files.ASIDE, *stores(path)}
    found = [one for one in sorted(path.iterdir()) if (one / files.MANIFEST).exists()]
    return [one for one in found if one not in others]


def _mending(path: Path) -> Iterator[Repair]:
    yield from _leftovers(path)
    for stage in stages(path):
        yield from _checkpoints(path, stage)
    for store in stores(path):
        yield from _shards(path, store)
    yield from _finished(path)


def _locks(path: Path) -> Iterator[Repair]:
    for lock in sorted(one for one in path.rglob(".lock") if not _is_aside(one, path)):
        name, held = files.holder(lock.parent)
        if held:
            raise BadInput(f"{lock.parent} is in use by {name}; wait for it to end, then repair.")
        if name:
            sentence = f"clear the lock of {name}, which is no more, in {lock.parent}"
            yield Repair(sentence, partial(folder.try_writing, lock.parent))


def _leftovers(path: Path) -> Iterator[Repair]:
    for parent, below, _ in os.walk(path):
        below[:] = [name for name in below if not name.startswith((".tmp-", ".old-", files.ASIDE))]
        for one in files.leftovers(Path(parent)):
            old = one.name.startswith(".old-")
            what = f"put back {one}, unless its successor is whole" if old else f"clear away {one}"
            sentence = f"{what}: its writer is no more"
            yield Repair(sentence, partial(files.sweep, one.parent))


def _checkpoints(path: Path, stage: Path) -> Iterator[Repair]:
    found = [one for one in stage.glob(f"{STEP}*") if one.is_dir() and ".replaced-" not in one.name]
    broken = {one: why for one in sorted(found) if (why := why_broken(one))}
    whole = sorted(one for one in found if one not in broken)
    then = f"--resume goes on from {whole[-1].name}" if whole else "--resume begins the stage again"
    for one, why in broken.items():
        yield Repair(f"set aside {one}: {why}; {then}", partial(files.set_aside, one, path))
    best = stage / BEST
    if best.exists() and (why := why_broken(best)) and whole:
        state = files.read_json(whole[-1] / "state.json")
        source = stage / f"{STEP}{state.get('best_step', 0):09d}"
        if source in whole:
            sentence = f"set aside {best}: {why}; its weights are those of {source.name}"
            yield Repair(sentence, partial(_best_again, best, source, path))


def _best_again(best: Path, source: Path, path: Path) -> None:
    files.set_aside(best, path)
    with files.writing(best) as temporary:
        weights = files.read_tensors(source / "model.safetensors")
        files.write_tensors(temporary / "model.safetensors", weights)


def _shards(path: Path, store: Path) -> Iterator[Repair]:
    made = "the next run makes it again and keeps the whole ones"
    for shard in sorted(one for one in store.glob(f"{SHARD}*") if one.is_dir()):
        why = "" if ".replaced-" in shard.name else why_broken(shard)
        if why:
            yield Repair(f"set aside {shard}: {why}; {made}", partial(files.set_aside, shard, path))
    why = why_broken(store)
    if not why or (store == path and (path / folder.RESULTS).exists()):
        return
    for name in (*STORES, files.MANIFEST):
        if (store / name).exists():
            sentence = f"set aside {store / name}: {why}; the next run writes it again"
            yield Repair(sentence, partial(files.set_aside, store / name, path))


def _finished(path: Path) -> Iterator[Repair]:
    """The files of a run that has come to its end, or was about to."""
    if is_store(path):
        return
    again = "--resume judges the trained model again and writes it anew"
    wrong = {one: why for one in parts(path) if (why := why_broken(one))}
    sealed = (path / files.MANIFEST).exists() and (path / folder.RESULTS).exists()
    if sealed and _is_good(path / folder.RESULTS):
        wrong |= dict(_unlike(path))
    for one, why in wrong.items():
        yield Repair(f"set aside {one}: {why}; {again}", partial(files.set_aside, one, path))
    if wrong and sealed:
        sentence = f"set aside {path / files.MANIFEST}: the run is not finished without the rest"
        if path / files.MANIFEST not in wrong:
            yield Repair(sentence, partial(files.set_aside, path / files.MANIFEST, path))


def _unlike(path: Path) -> Iterator[tuple[Path, str]]:
    """The sealed files of a run that are not what was written."""
    try:
        names = files.listed(path)
    except Damaged as error:
        yield path / files.MANIFEST, str(error).rstrip(".")
        return
    for name in names:
        try:
            files.check(path / name)
        except Damaged as error:
            if os.path.lexists(path / name):
                yield path / name, str(error).rstrip(".")
            else:
                yield path / files.MANIFEST, f"{name} is missing"


def _is_good(results: Path) -> bool:
    """Whether a run can be told by its results: without them there is nothing to resume."""
    try:
        folder.look(results.parent)
    except Damaged as error:
        return files.MANIFEST in str(error)
    return True


def _is_aside(one: Path, path: Path) -> bool:
    parts = one.relative_to(path).parts
    return any(part == files.ASIDE or part.startswith((".tmp-", ".old-")) for part in parts)
