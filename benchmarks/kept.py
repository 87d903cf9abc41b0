"""What is kept of the runs of a table, and how it is read: shared by the scripts that judge.

A folder holds `ROW/seed-N/results.json` as the run wrote it, and one `samples.npz` with the numbers
that rules ask of every item, as `ROW/seed-N/NAME`.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from overt.measure import bootstrap, two_level
from overt.measure.statistics import Interval

Results = dict[tuple[str, int], dict[str, Any]]
Wanted = Callable[[str, Any], Any | None]  # a name and its numbers -> what of them is kept


def read(folder: Path) -> tuple[Results, dict[str, Tensor]]:
    """The results by row and seed, and the numbers of items by their name."""
    results = {}
    for path in sorted(folder.glob("*/seed-*/results.json")):
        seed = int(path.parent.name.removeprefix("seed-"))
        results[path.parts[-3], seed] = json.loads(path.read_text())
    with np.load(folder / "samples.npz") as found:
        samples = {name: torch.from_numpy(found[name].astype("f8")) for name in found.files}
    return results, samples


def keep(
    runs: Path, folder: Path, wanted: Wanted, files: Sequence[str] = ("results.json",)
) -> None:
    """Copy these files of finished runs, and what is `wanted` of their items, beside what is there.

    Runs that were stopped are left out.
    """
    arrays: dict[str, Any] = {}
    if (folder / "samples.npz").is_file():
        with np.load(folder / "samples.npz") as before:
            arrays |= {name: before[name] for name in before.files}
    for place in sorted(path.parent for path in runs.glob("*/seed-*/samples.npz")):
        if json.loads((place / "results.json").read_text())["status"] != "done":
            continue
        key = f"{place.parent.name}/{place.name}"
        (folder / key).mkdir(parents=True, exist_ok=True)
        for name in files:
            if (place / name).is_file():
                (folder / key / name).write_bytes((place / name).read_bytes())
        with np.load(place / "samples.npz") as samples:
            for name in samples.files:
                values = wanted(name, samples[name])
                if values is not None:
                    arrays[f"{key}/{name}"] = values.astype("f2")
    np.savez_compressed(folder / "samples.npz", **arrays)


def over(values: Tensor) -> Interval:
    """The mean of numbers by seed and item, and its interval; one seed has one over items alone."""
    return two_level(values) if len(values) > 1 else bootstrap(values[0])


def in_points(found: Interval) -> str:
    """An interval in points of a hundred."""
    return f"{100 * found.mean:+.2f} ({100 * found.low:+.2f} to {100 * found.high:+.2f})"
