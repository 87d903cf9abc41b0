"""A run folder as a reader finds it: whole, unfinished or in parts.

A page about runs must open for the run that failed too, so what is missing becomes a sentence.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overt import files
from overt.errors import BadInput, Damaged
from overt.show.sample import Sample, load_gallery

_UNFINISHED = {
    "running": "has not ended: it is still going, or was killed; run it again with --resume",
    "stopped": "was stopped before its end; run it again with --resume",
    "failed": "failed before its end",
}


@dataclass(frozen=True)
class Run:
    """What a run left behind. `notes` are sentences on what is missing or cannot be read."""

    folder: Path
    name: str
    results: Mapping[str, Any]
    log: tuple[Mapping[str, Any], ...]
    gallery: tuple[Sample, ...]
    notes: tuple[str, ...]

    @property
    def status(self) -> str:
        """What the run says of itself, in one word."""
        return str(self.results.get("status", "unknown"))

    @property
    def finished(self) -> bool:
        """Whether the run says that it came to its end."""
        return bool(self.results) and self.status not in _UNFINISHED


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs in these folders, each under a name of its own.

    A run is called by the `title` in its results, or by its folder; parents are added where two
    are the same. A folder that holds nothing of a run is answered with `BadInput`.
    """
    if not folders:
        raise BadInput("no run was named; give at least one run folder.")
    paths = [Path(folder).absolute() for folder in folders]
    for path in paths:
        _check(path)
    paths = list(dict.fromkeys(path.resolve() for path in paths))
    parts = [_results(path) for path in paths]
    titles = [
        str(results.get("title") or path.name)
        for path, (results, _) in zip(paths, parts, strict=True)
    ]
    runs = []
    for path, (results, notes), name in zip(paths, parts, _apart(titles, paths), strict=True):
        log, on_log = _log(path)
        gallery, on_gallery = _gallery(path)
        runs.append(Run(path, name, results, log, gallery, (*notes, *on_log, *on_gallery)))
    return runs


def _check(folder: Path) -> None:
    if not folder.is_dir():
        raise BadInput(f"{folder} is not a folder; name the folder a run was written to.")
    if not any((folder / name).exists() for name in ("results.json", "log.jsonl", "gallery")):
        raise BadInput(
            f"{folder} holds no run: neither results.json nor log.jsonl nor gallery; "
            "name the folder that `--out` named."
        )


def _apart(titles: Sequence[str], folders: Sequence[Path]) -> list[str]:
    """Titles, with the parent folder where two are equal, and a number where that does not help."""
    names = [
        title if titles.count(title) == 1 else f"{folder.parent.name}/{title}"
        for title, folder in zip(titles, folders, strict=True)
    ]
    return [
        name if names.count(name) == 1 else f"{name} ({names[: i + 1].count(name)})"
        for i, name in enumerate(names)
    ]


def _results(folder: Path) -> tuple[Mapping[str, Any], list[str]]:
    path = folder / "results.json"
    if not path.exists():
        return {}, ["has no results.json: it has not ended, or was never started"]
    try:
        results = files.read_json(path)
    except Damaged as error:
        return {}, [f"has results that cannot be read: {error}"]
    if not isinstance(results, dict):
        return {}, [f"has results that cannot be read: {path} is not a table of results."]
    status = results.get("status")
    notes = [_UNFINISHED[status]] if isinstance(status, str) and status in _UNFINISHED else []
    if notes and results.get("reason"):
        notes[0] += f": {str(results['reason']).rstrip('.')}"
    return results, notes


def _log(folder: Path) -> tuple[tuple[Mapping[str, Any], ...], list[str]]:
    """The rows of the log. A run that is killed may leave its last line half written."""
    path = folder / "log.jsonl"
    if not path.exists():
        return (), ["has no log.jsonl, so it has no curves"]
    rows, broken = [], 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            rows.append(row)
        elif line.strip():
            broken += 1
    lines = "one line" if broken == 1 else f"{broken} lines"
    return tuple(rows), [f"has {lines} in log.jsonl that cannot be read"] if broken else []


def _gallery(folder: Path) -> tuple[tuple[Sample, ...], list[str]]:
    if not (folder / "gallery").exists():
        return (), ["has no gallery, so none of its samples are shown"]
    try:
        return tuple(load_gallery(folder / "gallery")), []
    except Damaged as error:
        return (), [f"has a gallery that cannot be read: {error}"]
