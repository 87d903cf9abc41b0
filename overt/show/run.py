"""A run folder as a reader finds it: whole, unfinished or in parts.

A page about runs must open for the run that failed too, so what is missing becomes a sentence.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from overt import files
from overt.errors import BadInput, Damaged
from overt.measure.scorecards.card import Scorecard
from overt.show.sample import Sample, load_gallery

_UNFINISHED = {
    "running": "has not ended: it is still going, or was killed; run it again with --resume",
    "stopped": "was stopped before its end; run it again with --resume",
    "failed": "failed before its end",
}


@dataclass(frozen=True)
class Run:
    """What a run left behind. `notes` are sentences on what is missing or cannot be read.

    `samples` are its numbers of each test sample by measure, and `card` its scorecard, if any.
    """

    folder: Path
    name: str
    results: Mapping[str, Any]
    log: tuple[Mapping[str, Any], ...]
    gallery: tuple[Sample, ...]
    notes: tuple[str, ...]
    samples: Mapping[str, np.ndarray] = field(default_factory=dict)
    card: Scorecard | None = None

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

    A run is called by the `title` in its results, or by its folder; its seed is added where two
    are the same, or its parent. A folder that holds nothing of a run is answered with `BadInput`.
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
    names = _apart(titles, paths, [results.get("seed") for results, _ in parts])
    for path, (results, notes), name in zip(paths, parts, names, strict=True):
        log, on_log = _log(path)
        gallery, on_gallery = _gallery(path)
        samples, on_samples = _samples(path)
        card, on_card = _card(path)
        said = (*notes, *on_log, *on_gallery, *on_samples, *on_card)
        runs.append(Run(path, name, results, log, gallery, said, samples, card))
    return runs


def _check(folder: Path) -> None:
    if not folder.is_dir():
        raise BadInput(f"{folder} is not a folder; name the folder a run was written to.")
    if not any((folder / name).exists() for name in ("results.json", "log.jsonl", "gallery")):
        raise BadInput(
            f"{folder} holds no run: neither results.json nor log.jsonl nor gallery; "
            "name the folder that `--out` named."
        )


def _apart(titles: Sequence[str], folders: Sequence[Path], seeds: Sequence[Any]) -> list[str]:
    """Titles; where some are equal, with what tells them apart: seed, parent, folder, a number."""
    names = list(titles)
    for title in {title for title in titles if titles.count(title) > 1}:
        alike = [place for place, one in enumerate(titles) if one == title]
        others = {name for name in names if name != title}
        ways = (
            [title if seeds[place] is None else f"{title}, seed {seeds[place]}" for place in alike],
            [f"{folders[place].parent.name}/{title}" for place in alike],
            [f"{folders[place].parent.name}/{folders[place].name}" for place in alike],
            [f"{folders[place].parent.name}/{title} ({n + 1})" for n, place in enumerate(alike)],
        )
        found = (way for way in ways if len(set(way) - others) == len(way))
        told = next(found, ways[-1])
        for place, name in zip(alike, told, strict=True):
            names[place] = name
    return names


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


def _samples(folder: Path) -> tuple[Mapping[str, np.ndarray], list[str]]:
    """One number a sample by measure; a run that has not ended has none, and that is no wonder."""
    path = folder / "samples.npz"
    if not path.exists():
        return {}, []
    try:
        found = files.read_arrays(path)
    except Damaged as error:
        return {}, [f"has numbers of samples that cannot be read: {error}"]
    lengths = {array.shape for array in found.values()}
    if "id" not in found or len(lengths) != 1 or found["id"].ndim != 1:
        return {}, [f"has numbers of samples that cannot be read: {path} has no row for each id."]
    return found, []


def _card(folder: Path) -> tuple[Scorecard | None, list[str]]:
    place = folder / "scorecard"
    if not place.exists():
        return None, []
    try:
        files.verify(place)
        return Scorecard.load(place), []
    except (BadInput, Damaged) as error:
        return None, [f"has a scorecard that cannot be read: {error}"]
