"""What is here, what is missing and how to get it; and what is wrong with a run folder.

Each finding is one line. A finding that is `wrong` needs the user; one with advice alone is a hint.
"""

import importlib
import itertools
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from overt import files
from overt.errors import BadInput, Damaged
from overt.recipes import checks, folder, repair, settings

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "firefox", "xdg-open", "open")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    what: str
    found: str
    advice: str = ""
    wrong: bool = False


def machine(given: Path | None = None) -> list[Finding]:
    """Versions, devices, data sets and folders of this machine."""
    return [
        Finding("overt", _version("overt") or "not installed", wrong=False),
        Finding("python", f"{platform.python_version()} on {platform.platform()}"),
        *_packages(),
        *_devices(),
        *_data(given),
        _cache(),
        _browser(),
    ]


def run_folder(path: Path) -> list[Finding]:
    """What a run folder holds and whether it is whole; a folder without a run is `BadInput`.

    A folder of shards, such as a cache of features, is looked at too. Nothing is changed: what
    `repair` would do is told.
    """
    check_run(path)
    if not _is_run(path):
        return [*_stores(path), _lock(path), *_repairs(path)]
    found = [*_results(path), _whole(path), *_parts(path), *_checkpoints(path), *_stores(path)]
    return [*found, *_log(path), _lock(path), *_repairs(path)]


def check_run(path: Path) -> None:
    """Refuse what is neither the folder of a run nor a store of shards."""
    if not path.is_dir():
        raise BadInput(
            f"{path} is not a folder; name that of a run or a model, or say hf:NAME or timm:NAME."
        )
    if not _is_run(path) and not repair.is_store(path):
        raise BadInput(f"{path} holds no run: it has no results.json, log or checkpoints.")


def _is_run(path: Path) -> bool:
    return any((path / name).exists() for name in (folder.RESULTS, "log.jsonl", "checkpoints"))


# This machine


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _packages() -> Iterator[Finding]:
    """What overt needs, then what its extras add, as its own package data lists them."""
    extras: dict[str, list[str]] = {}
    for line in requires("overt") or []:
        wanted = line.split(";")[0].replace(" ", "").strip("()")
        extra = line.partition("extra ==")[2].strip(" '\")")
        if not wanted.startswith("overt["):
            extras.setdefault(extra, []).append(wanted)
    for wanted in extras.pop("", []):
        name, lacks = _lacking(wanted)
        if lacks:
            yield Finding(name, f"{lacks}.", f"pip install '{wanted}'", wrong=True)
        else:
            yield Finding(name, _version(name) or "")
    for extra, lines in sorted(extras.items()):
        found = {wanted: _lacking(wanted) for wanted in lines}
        short = {wanted: f"{name} {lacks}" for wanted, (name, lacks) in found.items() if lacks}
        told = list(short.values())
        few = told if len(told) <= 4 else [*told[:3], f"{len(told) - 3} more"]
        names = " ".join(f"'{wanted}'" for wanted in short)
        if len(short) > 4:
            names = f"'.[{extra}]' in the checkout"
        advice = f"pip install {names} if you want it" if short else ""
        yield Finding(f"extra {extra}", ", ".join(few) or "installed", advice)


def _lacking(wanted: str) -> tuple[str, str]:
    """The package of a line like `torch>=2.11`, and what is wrong with ours; "" if nothing is."""
    name, _, least = wanted.partition(">=")
    found = _version(name)
    if found is None:
        return name, "missing"
    if _numbers(found) < _numbers(least):
        return name, f"{found} is older than {least}"
    return name, ""


def _numbers(release: str) -> list[int]:
    """`2.13.0+cpu` as [2, 13, 0]; what is no number ends it."""
    parts = itertools.takewhile(str.isdecimal, re.split(r"[.+a-z]", release))
    return [int(part) for part in parts]


def _devices() -> Iterator[Finding]:
    try:
        torch = importlib.import_module("torch")
    except Exception as error:  # a broken installation can fail in any way
        said = " ".join(str(error).split())[:200]
        yield Finding("torch", f"cannot be imported: {said}.", "install torch again", wrong=True)
        return
    cores = checks.cores()
    yield Finding("cpu", f"{cores} cores, {torch.get_num_threads()} threads for torch")
    cards = range(torch.cuda.device_count())
    for number in cards:
        about = torch.cuda.get_device_properties(number)
        yield Finding(f"cuda:{number}", f"{about.name}, {about.total_memory / 2**30:.0f} GiB")
    if not cards:
        built = torch.version.cuda
        yield Finding("cuda", "no card found" if built else "this torch is built without it")
    if torch.backends.mps.is_available():
        yield Finding("mps", "available")


def _data(given: Path | None) -> Iterator[Finding]:
    from overt.data import sets

    try:
        root = checks.data_root(given)
    except BadInput as error:
        yield Finding("data folder", str(error), wrong=True)
        return
    advice = "" if root else "give --data or set OVERT_DATA to use data sets from disk"
    yield Finding("data folder", str(root) if root else "none", advice)
    here = sets.present(root or Path(os.devnull))
    for each in sets.SETS:
        found = each.name in here
        yield Finding(
            f"data {each.name}", "here" if found else "not here", "" if found else each.how
        )


def _cache() -> Finding:
    path = Path(os.environ.get("OVERT_CACHE") or Path.home() / ".cache" / "overt")
    there = next((one for one in (path, *path.parents) if one.is_dir()), Path("/"))
    free = f"{shutil.disk_usage(there).free / 2**30:.1f} GiB free"
    if not os.access(there, os.W_OK):
        advice = "set OVERT_CACHE to a folder that can be written"
        return Finding("cache folder", f"{path} cannot be written.", advice, wrong=True)
    return Finding("cache folder", f"{path}, {free}")


def _browser() -> Finding:
    found = next((name for name in BROWSERS if shutil.which(name)), None)
    if found or sys.platform in ("darwin", "win32"):
        return Finding("browser", found or "the system's")
    return Finding(
        "browser", "none found", "copy report pages to where there is one; each is one file"
    )


# A run folder


def _results(path: Path) -> Iterator[Finding]:
    try:
        held = folder.look(path)
    except Damaged as error:
        yield Finding("results", str(error), wrong=True)
        return
    if held is None:
        yield Finding("results", "none: the run was killed before it wrote any", "--resume goes on")
        return
    about = f"{held}, {held.results['status']}"
    if held.done:
        yield Finding("results", about)
    else:
        reason = held.results.get("reason")
        yield Finding(
            "results", about + (f": {reason}" if reason else ""),
            "the same command with --resume goes on",
        )  # fmt: skip
    changed = ", ".join(f"{key}={settings.shown(value)}" for key, value in _changed(held))
    yield Finding("settings", changed or "those of the recipe")


def _changed(held: folder.Held) -> Iterator[tuple[str, object]]:
    """The settings in which a run differs from its recipe as it is now."""
    from overt.recipes import find

    try:
        usual = settings.to_json(find(held.results["recipe"]))
    except BadInput:
        usual = {}
    for key, value in held.results["settings"].items():
        if key not in usual or usual[key] != value:
            yield key, value


def _whole(path: Path) -> Finding:
    if not (path / files.MANIFEST).exists():
        return Finding("manifest", "none yet: it is written at the end of a run")
    try:
        manifest = files.verify(path)
    except Damaged as error:
        return Finding("files", str(error), wrong=True)
    return Finding("files", f"{len(manifest['files'])} files are as they were written")


def _parts(path: Path) -> Iterator[Finding]:
    """The folders of a finished run: its model, its gallery."""
    for one in repair.parts(path):
        why = repair.why_broken(one)
        yield Finding(one.name, f"{why}." if why else "whole", wrong=bool(why))


def _checkpoints(path: Path) -> Iterator[Finding]:
    """Each stage's checkpoints: the newest whole one, and those that are broken."""
    parent = path / "checkpoints"
    stages = repair.stages(path)
    if not stages:
        yield Finding("checkpoints", "none: --resume starts from the beginning")
    for stage in stages:
        name = "checkpoints" if stage == parent else f"checkpoints of {stage.relative_to(parent)}"
        newest, broken = files.newest(stage, repair.STEP)
        for one in broken:
            yield Finding(
                name, f"{one} is broken: {repair.why_broken(one)}.",
                "An older one is used." if newest else "The stage begins again after a repair.",
                wrong=True,
            )  # fmt: skip
        if newest is not None:
            yield Finding(name, f"the newest whole one is {newest.name}")
        best = stage / repair.BEST
        if best.exists() and (why := repair.why_broken(best)):
            yield Finding(f"best of {stage.name}", f"{why}.", wrong=True)


def _stores(path: Path) -> Iterator[Finding]:
    """Surrogates and caches of features: how many shards are whole."""
    for store in repair.stores(path):
        name = "shards" if store == path else f"shards of {store.relative_to(path)}"
        shards = [one for one in sorted(store.glob(f"{repair.SHARD}*")) if one.is_dir()]
        reasons = [why for one in (store, *shards) if (why := repair.why_broken(one))]
        for why in reasons:
            yield Finding(name, f"{why}.", wrong=True)
        if not reasons:
            yield Finding(name, f"{len(shards)} are whole")


def _repairs(path: Path) -> Iterator[Finding]:
    """What a repair would do; it is not done here."""
    try:
        planned = repair.repairs(path)
    except BadInput as error:
        yield Finding("repair", str(error))
        return
    for one in planned:
        yield Finding("repair", f"would {one.sentence}", f"overt doctor --repair {path}")
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
        where = "its last line is cut off" if cut else f"line {broken[0]} is not JSON"
        advice = "--resume mends it" if cut else ""
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
    name, held = files.holder(path)
    if held:
        return Finding("lock", f"{path} is in use by {name}", "wait for it to end")
    left = f"; {name} has left its name and is no more" if name else ""
    return Finding("lock", f"free: no process is at work here{left}")
