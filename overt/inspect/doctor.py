"""Checks of this machine (packages, GPUs, datasets) and of run folders.

Each finding is one line. A finding with `wrong` needs action; advice alone is a hint.
"""

import importlib
import itertools
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from overt import io, system
from overt.errors import CorruptFileError, UserError
from overt.experiments import preflight, repair, settings
from overt.experiments import run_folder as run_folder_module

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "firefox", "xdg-open", "open")


@dataclass(frozen=True)
class Finding:
    """Result of one check."""

    what: str
    found: str
    advice: str = ""
    wrong: bool = False


def check_machine(given: Path | None = None) -> list[Finding]:
    """Check versions, devices, datasets and folders of this machine.

    Problems come first, then versions, devices and folders, and the datasets last.
    """
    packages, devices = list(_packages()), list(_devices())
    leading = [one for one in packages if one.what == "torch"]
    found = [
        Finding("overt", _version("overt") or "not installed", wrong=False),
        Finding("python", f"{platform.python_version()} on {platform.platform()}"),
        *leading,
        *devices,
        *(one for one in packages if one not in leading),
        _cache(),
        _browser(),
        *_data(given),
    ]
    return sorted(found, key=lambda one: not one.wrong)  # a stable sort


def brief_findings(found: Sequence[Finding]) -> list[Finding]:
    """Replace the datasets that are not there by one line with their names.

    >>> lines = [Finding("data a", "not found", "download a"), Finding("data b", "found")]
    >>> [one.found for one in brief_findings(lines)]
    ['found', '1: a']
    """
    absent = [one for one in found if one.what.startswith("data ") and one.found == "not found"]
    kept = [one for one in found if one not in absent]
    if not absent:
        return kept
    names = ", ".join(one.what.removeprefix("data ") for one in absent)
    advice = "`overt data list` says how to get them"
    return [*kept, Finding("data not found", f"{len(absent)}: {names}", advice)]


def check_run_folder(path: Path) -> list[Finding]:
    """Check the contents and integrity of a run folder or a folder of shards, without changes.

    Raises:
        UserError: if the folder is neither.
    """
    require_run(path)
    if not _is_run(path):
        return [*_stores(path), _lock(path), *_repairs(path)]
    found = [
        *_results(path),
        _manifest(path),
        *_subfolders(path),
        *_checkpoints(path),
        *_stores(path),
    ]
    return [*found, *_log(path), _lock(path), *_repairs(path)]


def require_run(path: Path) -> None:
    """Raise `UserError` unless this is a run folder or a folder of shards."""
    if not path.is_dir():
        raise UserError(f"{path} is not a folder: give a run, a model, hf:NAME or timm:NAME.")
    if not _is_run(path) and not repair.is_store(path):
        raise UserError(f"{path} is not a run folder: it has no results.json, log or checkpoints.")


def _is_run(path: Path) -> bool:
    return any(
        (path / name).exists() for name in (run_folder_module.RESULTS, "log.jsonl", "checkpoints")
    )


# This machine


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _packages() -> Iterator[Finding]:
    """Check the required packages and those of the extras, from overt's package metadata."""
    extras: dict[str, list[str]] = {}
    for line in requires("overt") or []:
        wanted = line.split(";")[0].replace(" ", "").strip("()")
        extra = line.partition("extra ==")[2].strip(" '\")")
        if not wanted.startswith("overt["):
            extras.setdefault(extra, []).append(wanted)
    for wanted in extras.pop("", []):
        name, lacks = _version_problem(wanted)
        if lacks:
            yield Finding(name, f"{lacks}.", f"pip install '{wanted}'", wrong=True)
        else:
            yield Finding(name, _version(name) or "")
    for extra, lines in sorted(extras.items()):
        found = {wanted: _version_problem(wanted) for wanted in lines}
        short = {wanted: f"{name} {lacks}" for wanted, (name, lacks) in found.items() if lacks}
        missing = list(short.values())
        few = missing if len(missing) <= 4 else [*missing[:3], f"{len(missing) - 3} more"]
        names = " ".join(f"'{wanted}'" for wanted in short)
        if len(short) > 4:
            names = f"'.[{extra}]' in the checkout"
        advice = f"pip install {names} if needed" if short else ""
        yield Finding(f"extra {extra}", ", ".join(few) or "installed", advice)


def _version_problem(wanted: str) -> tuple[str, str]:
    """Return the package of a requirement like `torch>=2.6`, and its problem or ""."""
    name, _, least = wanted.partition(">=")
    found = _version(name)
    if found is None:
        return name, "missing"
    if _numbers(found) < _numbers(least):
        return name, f"{found} is older than {least}"
    return name, ""


def _numbers(release: str) -> list[int]:
    """Parse `2.13.0+cpu` to [2, 13, 0]; stop at the first part that is not a number."""
    parts = itertools.takewhile(str.isdecimal, re.split(r"[.+a-z]", release))
    return [int(part) for part in parts]


def _devices() -> Iterator[Finding]:
    try:
        torch = importlib.import_module("torch")
    except Exception as error:  # a broken installation can fail in any way
        message = " ".join(str(error).split())[:200]
        yield Finding("torch", f"cannot be imported: {message}.", "install torch again", wrong=True)
        return
    cores = system.available_cores()
    yield Finding("cpu", f"{cores} cores; threads of torch: {torch.get_num_threads()}")
    gpus = range(torch.cuda.device_count())
    for number in gpus:
        about = torch.cuda.get_device_properties(number)
        yield Finding(f"cuda:{number}", f"{about.name}, {about.total_memory / 2**30:.0f} GiB")
    if not gpus:
        built = torch.version.cuda
        yield Finding("cuda", "no GPU found" if built else "torch is built without CUDA")
    if torch.backends.mps.is_available():
        yield Finding("mps", "available")


def _data(given: Path | None) -> Iterator[Finding]:
    from overt.data import catalog

    try:
        root = preflight.resolve_data_root(given)
    except UserError as error:
        yield Finding("data folder", str(error), wrong=True)
        return
    advice = "" if root else "give --data or set OVERT_DATA to use datasets from disk"
    yield Finding("data folder", str(root) if root else "none", advice)
    here = catalog.available_datasets(root or Path(os.devnull))
    for each in catalog.DATASETS:
        found = each.name in here
        yield Finding(
            f"data {each.name}",
            "found" if found else "not found",
            "" if found else each.instructions,
        )


def _cache() -> Finding:
    path = Path(os.environ.get("OVERT_CACHE") or Path.home() / ".cache" / "overt")
    there = next((one for one in (path, *path.parents) if one.is_dir()), Path("/"))
    free = f"{shutil.disk_usage(there).free / 2**30:.1f} GiB free"
    if not os.access(there, os.W_OK):
        advice = "set OVERT_CACHE to a writable folder"
        return Finding("cache folder", f"{path} is not writable.", advice, wrong=True)
    return Finding("cache folder", f"{path}, {free}")


def _browser() -> Finding:
    found = next((name for name in BROWSERS if shutil.which(name)), None)
    if found or sys.platform in ("darwin", "win32"):
        return Finding("browser", found or "system default")
    return Finding(
        "browser", "none found", "open report pages on another machine; each is one file"
    )


# A run folder


def _results(path: Path) -> Iterator[Finding]:
    try:
        held = run_folder_module.read_run(path)
    except CorruptFileError as error:
        yield Finding("results", str(error), wrong=True)
        return
    if held is None:
        yield Finding(
            "results", "none: the run was killed before it wrote any", "continue with --resume"
        )
        return
    about = f"{held}, {held.results['status']}"
    if held.is_finished:
        yield Finding("results", about)
    else:
        reason = held.results.get("reason")
        yield Finding(
            "results", about + (f": {reason}" if reason else ""),
            "continue with the same command and --resume",
        )  # fmt: skip
    changed = ", ".join(f"{key}={settings.format_value(value)}" for key, value in _changed(held))
    yield Finding("settings", changed or "defaults of the recipe")


def _changed(held: run_folder_module.ExistingRun) -> Iterator[tuple[str, object]]:
    """Yield the settings in which a run differs from its recipe."""
    from overt.papers.catalog import find_recipe

    try:
        usual = settings.to_json(find_recipe(held.results["recipe"]))
    except UserError:
        usual = {}
    for key, value in held.results["settings"].items():
        if key not in usual or usual[key] != value:
            yield key, value


def _manifest(path: Path) -> Finding:
    if not (path / io.MANIFEST).exists():
        return Finding("manifest", "none yet: written when the run finishes")
    try:
        manifest = io.verify(path)
    except CorruptFileError as error:
        return Finding("files", str(error), wrong=True)
    return Finding("files", f"{len(manifest['files'])} files are unchanged")


def _subfolders(path: Path) -> Iterator[Finding]:
    """Check the subfolders of a finished run: model and gallery."""
    for one in repair.output_folders(path):
        why = repair.find_damage(one)
        yield Finding(one.name, f"{why}." if why else "valid", wrong=bool(why))


def _checkpoints(path: Path) -> Iterator[Finding]:
    """Check the checkpoints of each stage: the newest valid one, and the corrupt ones."""
    parent = path / "checkpoints"
    stages = repair.checkpoint_folders(path)
    if not stages:
        yield Finding("checkpoints", "none: --resume starts from scratch")
    for stage in stages:
        name = "checkpoints" if stage == parent else f"checkpoints of {stage.relative_to(parent)}"
        newest, broken = io.newest(stage, repair.STEP)
        for one in broken:
            yield Finding(
                name, f"{one} is corrupt: {repair.find_damage(one)}.",
                "An older one is used." if newest else "The stage restarts after a repair.",
                wrong=True,
            )  # fmt: skip
        if newest is not None:
            yield Finding(name, f"the newest valid one is {newest.name}")
        best = stage / repair.BEST
        if best.exists() and (why := repair.find_damage(best)):
            yield Finding(f"best of {stage.name}", f"{why}.", wrong=True)


def _stores(path: Path) -> Iterator[Finding]:
    """Check surrogate targets and feature caches: how many shards are valid."""
    for store in repair.shard_stores(path):
        name = "shards" if store == path else f"shards of {store.relative_to(path)}"
        shards = [one for one in sorted(store.glob(f"{repair.SHARD}*")) if one.is_dir()]
        reasons = [why for one in (store, *shards) if (why := repair.find_damage(one))]
        for why in reasons:
            yield Finding(name, f"{why}.", wrong=True)
        if not reasons:
            yield Finding(name, f"{len(shards)} are valid")


def _repairs(path: Path) -> Iterator[Finding]:
    """List what a repair would do, without doing it."""
    try:
        planned = repair.plan_repairs(path)
    except UserError as error:
        yield Finding("repair", str(error))
        return
    for one in planned:
        yield Finding("repair", f"would {one.description}", f"overt doctor --repair {path}")
    if not planned:
        yield Finding("repair", "nothing to do")


def _log(path: Path) -> Iterator[Finding]:
    log = path / "log.jsonl"
    if not log.is_file():
        yield Finding("log", "none yet")
        return
    lines = log.read_bytes().splitlines()
    broken = [number for number, line in enumerate(lines, start=1) if not _is_json(line)]
    if broken:
        cut = broken == [len(lines)]
        where = "the last line is truncated" if cut else f"line {broken[0]} is not JSON"
        advice = "--resume repairs it" if cut else ""
        yield Finding("log", f"{len(lines)} lines; {where}", advice)
    else:
        yield Finding("log", f"{len(lines)} lines")


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _lock(path: Path) -> Finding:
    name, held = io.lock_holder(path)
    if held:
        return Finding("lock", f"{path} is in use by {name}", "wait for it to end")
    left = f"; {name} left a stale lock" if name else ""
    return Finding("lock", f"free: no process uses this folder{left}")
