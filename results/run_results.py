"""Read stored results of runs and compute intervals: shared by the verdict scripts.

A folder contains `ROW/seed-N/results.json` as written by the run, and one `samples.npz` with the
per-item numbers that the rules need, as `ROW/seed-N/NAME`.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from archive import pack, unpacked
from torch import Tensor

from overt.experiments.table import FOR_A_VERDICT
from overt.metrics import two_level_interval
from overt.metrics.statistics import Interval

HERE = unpacked()
PROVISIONAL = 3  # seeds; with fewer there are numbers only
EACH = {
    "han-sortclevr": 20,
    "han-fig3a": 20,
    "han-hardened": 20,
    "han-crowded": 8,
    "han-scenes": 4,
    "ssa-scenes": 4,
    "vlm-": 4,
    "a2-scenes": 5,
}
SHARED = {9673: "easyvqa", 5076: "daquar"}  # pictures.npz, by the number of test questions
Results = dict[tuple[str, int], dict[str, Any]]
Wanted = Callable[[str, Any], Any | None]  # name and numbers -> stored numbers


def read(folder: Path) -> tuple[Results, dict[str, Tensor]]:
    """Return the results by row and seed, and the per-item numbers by name."""
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
    """Copy these files of finished runs, and the `wanted` per-item numbers, into a folder.

    Existing content is preserved; stopped runs are skipped.
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
    pack(folder)


def pictures(folder: str, count: int) -> list[str] | None:
    """Return the image of each item, None if each item has its own.

    Questions and captions are ordered by image; Sort-of-CLEVR has 20 per image, scenes have four
    questions or five captions. CIDEr-D is one number per image.
    """
    if count in SHARED:
        with np.load(Path(__file__).parent / "pictures.npz") as found:
            return [str(at) for at in found[SHARED[count]].tolist()]
    each = next((n for start, n in EACH.items() if folder.startswith(start)), 1)
    if each == 1 or (folder.startswith("a2-") and count in (200, 1000)):
        return None
    assert count % each == 0, (folder, count)
    return [str(at // each) for at in range(count)]


def over(values: Tensor, folder: str = "") -> Interval:
    """Compute the interval over seeds and images of numbers by seed and item.

    With one seed the interval is over images alone. `folder` determines which items share an image.
    """
    return two_level_interval(values, clusters=pictures(folder, values.shape[1]))


def judged(found: Interval, verdict: str) -> str:
    """Give the verdict from five seeds on; provisional for three or four, none for fewer."""
    return judged_by(found.runs, verdict)


def judged_by(seeds: int, verdict: str) -> str:
    """Give a verdict that rests on so many seeds, as `judged` does."""
    if seeds >= FOR_A_VERDICT:
        return verdict
    if seeds >= PROVISIONAL:
        return f"{verdict} (provisional)"
    return "numbers only"


def in_points(found: Interval) -> str:
    """Format an interval in percentage points."""
    if np.isnan(found.low):
        return f"{100 * found.mean:+.2f} (no interval)"
    return f"{100 * found.mean:+.2f} ({100 * found.low:+.2f} to {100 * found.high:+.2f})"
