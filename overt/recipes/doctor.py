"""What is here, what is missing and how to get it; and what is wrong with a run folder.

Each finding is one line. A finding that is `wrong` needs the user; one with advice alone is a hint.
"""

import importlib
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from overt import files
from overt.errors import BadInput, Damaged
from overt.recipes import checks, folder, settings

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
    """What a run folder holds and whether it is whole; a folder without a run is `BadInput`."""
    if not path.is_dir():
        raise BadInput(f"{path} is not a folder; name the folder of a run.")
    begun = [
        name for name in (folder.RESULTS, "log.jsonl", "checkpoints") if (path / name).exists()
    ]
    if not begun:
        raise BadInput(f"{path} holds no run: it has no results.json, log or checkpoints.")
    return [*_results(path), _whole(path), *_checkpoints(path), *_log(path), _lock(path)]


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
        name = line.split(";")[0].strip()
        for mark in "<>=!~[ (":
            name = name.split(mark)[0]
        extra = line.partition("extra ==")[2].strip(" '\")")
        extras.setdefault(extra, []).append(name)
    for name in extras.pop("", []):
        found = _version(name)
        if found is None:
            yield Finding(name, "missing.", f"pip install {name}", wrong=True)
        else:
            yield Finding(name, found)
    for extra, names in sorted(extras.items()):
        missing = [name for name in names if name != "overt" and _version(name) is None]
        state = f"{', '.join(missing)} not installed" if missing else "installed"
        advice = f"pip install 'overt[{extra}]' if you want it" if missing else ""
        yield Finding(f"extra {extra}", state, advice)


def _devices() -> Iterator[Finding]:
    try:
        torch = importlib.import_module("torch")
    except Exception as error:  # a broken installation can fail in any way
        said = " ".join(str(error).split())[:200]
        yield Finding("torch", f"cannot be imported: {said}.", "install torch again", wrong=True)
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
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
        return Finding(
            "files", str(error), "Restore the file, or run it again elsewhere.", wrong=True
        )
    return Finding("files", f"{len(manifest['files'])} files are as they were written")


def _checkpoints(path: Path) -> Iterator[Finding]:
    """Each stage's checkpoints: the newest whole one, and those that are broken."""
    parent = path / "checkpoints"
    stages = sorted({one.parent for one in parent.rglob("step-*") if one.is_dir()})
    if not stages:
        yield Finding("checkpoints", "none: --resume starts from the beginning")
    for stage in stages:
        name = "checkpoints" if stage == parent else f"checkpoints of {stage.relative_to(parent)}"
        newest, broken = files.newest(stage, "step-")
        for one in broken:
            yield Finding(
                name, f"{one} is broken.",
                "Remove it; an older one is used." if newest else "Start again elsewhere.",
                wrong=True,
            )  # fmt: skip
        if newest is not None:
            yield Finding(name, f"the newest whole one is {newest.name}")


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
    try:
        folder.try_writing(path)
    except BadInput as error:
        return Finding("lock", str(error))
    return Finding("lock", "free: no process is at work here")
