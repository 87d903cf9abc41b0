"""Reading run folders, also of unfinished or damaged runs.

A report must open for a failed run, so missing parts become notes.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from overt import io
from overt.errors import CorruptFileError, UserError
from overt.metrics.scorecard.result import Scorecard
from overt.viz.gallery_sample import GallerySample, load_gallery

_UNFINISHED = {
    "running": "has not finished: it is still running or was killed; resume it with --resume",
    "stopped": "was stopped; resume it with --resume",
    "failed": "failed",
}


@dataclass(frozen=True)
class Run:
    """Contents of a run folder; `notes` describe missing or unreadable parts.

    `samples` are per-sample results by metric, `elsewhere` those of other items with their names
    under `<metric>.id`, and `scorecard` is its scorecard, if any.
    """

    folder: Path
    name: str
    results: Mapping[str, Any]
    log: tuple[Mapping[str, Any], ...]
    gallery: tuple[GallerySample, ...]
    notes: tuple[str, ...]
    samples: Mapping[str, np.ndarray] = field(default_factory=dict)
    scorecard: Scorecard | None = None
    elsewhere: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def status(self) -> str:
        """Status of the run in one word."""
        return str(self.results.get("status", "unknown"))

    @property
    def finished(self) -> bool:
        """Whether the run finished."""
        return bool(self.results) and self.status not in _UNFINISHED


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read run folders, each with a unique name.

    The name is the `title` of the results or the folder name; seed or parent folder are added to
    equal names.

    Raises:
        UserError: if a folder is not a run.
    """
    if not folders:
        raise UserError("Give at least one run folder.")
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
    names = _unique_names(titles, paths, [results.get("seed") for results, _ in parts])
    for path, (results, notes), name in zip(paths, parts, names, strict=True):
        log, on_log = _log(path)
        gallery, on_gallery = _gallery(path)
        samples, on_samples = _samples(path)
        card, on_card = _scorecard(path)
        elsewhere, on_elsewhere = _elsewhere(path)
        all_notes = (*notes, *on_log, *on_gallery, *on_samples, *on_card, *on_elsewhere)
        runs.append(Run(path, name, results, log, gallery, all_notes, samples, card, elsewhere))
    return runs


def _check(folder: Path) -> None:
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder: give a run folder.")
    if not any((folder / name).exists() for name in ("results.json", "log.jsonl", "gallery")):
        raise UserError(
            f"{folder} is not a run folder: it has no results.json, log.jsonl or gallery; "
            "give the folder of `--out`."
        )


def _unique_names(
    titles: Sequence[str], folders: Sequence[Path], seeds: Sequence[Any]
) -> list[str]:
    """Make equal titles unique by seed, parent folder, folder or a number."""
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
        unique = next(found, ways[-1])
        for place, name in zip(alike, unique, strict=True):
            names[place] = name
    return names


def _results(folder: Path) -> tuple[Mapping[str, Any], list[str]]:
    path = folder / "results.json"
    if not path.exists():
        return {}, ["has no results.json: it has not finished or was never started"]
    try:
        results = io.read_json(path)
    except CorruptFileError as error:
        return {}, [f"has results that cannot be read: {error}"]
    if not isinstance(results, dict):
        return {}, [f"has results that cannot be read: {path} is not a JSON object."]
    status = results.get("status")
    notes = [_UNFINISHED[status]] if isinstance(status, str) and status in _UNFINISHED else []
    if notes and results.get("reason"):
        notes[0] += f": {str(results['reason']).rstrip('.')}"
    return results, notes


def _log(folder: Path) -> tuple[tuple[Mapping[str, Any], ...], list[str]]:
    """Read the log rows; a killed run may leave its last line incomplete."""
    path = folder / "log.jsonl"
    if not path.exists():
        return (), ["has no log.jsonl and therefore no curves"]
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


def _gallery(folder: Path) -> tuple[tuple[GallerySample, ...], list[str]]:
    if not (folder / "gallery").exists():
        return (), ["has no gallery"]
    try:
        return tuple(load_gallery(folder / "gallery")), []
    except CorruptFileError as error:
        return (), [f"has a gallery that cannot be read: {error}"]


def _samples(folder: Path) -> tuple[Mapping[str, np.ndarray], list[str]]:
    """Read the per-sample results; an unfinished run has none."""
    path = folder / "samples.npz"
    if not path.exists():
        return {}, []
    try:
        found = io.read_arrays(path)
    except CorruptFileError as error:
        return {}, [f"has per-sample results that cannot be read: {error}"]
    lengths = {array.shape for array in found.values()}
    if "id" not in found or len(lengths) != 1 or found["id"].ndim != 1:
        return {}, [f"has per-sample results that cannot be read: {path} needs one row per id."]
    return found, []


def _elsewhere(folder: Path) -> tuple[Mapping[str, np.ndarray], list[str]]:
    """Read the results of items that are not test samples; most runs have none."""
    path = folder / "elsewhere.npz"
    if not path.exists():
        return {}, []
    try:
        return io.read_arrays(path), []
    except CorruptFileError as error:
        return {}, [f"has results of other items that cannot be read: {error}"]


def _scorecard(folder: Path) -> tuple[Scorecard | None, list[str]]:
    place = folder / "scorecard"
    if not place.exists():
        return None, []
    try:
        io.verify(place)
        return Scorecard.load(place), []
    except (UserError, CorruptFileError) as error:
        return None, [f"has a scorecard that cannot be read: {error}"]
