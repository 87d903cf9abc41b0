"""Pack the runs of a table into one file, and unpack all of them for the scripts that judge them.

    python results/archive.py pack FOLDER [FOLDER ...]   # results/FOLDER.zip for each
    python results/archive.py unpack OUT                 # every archive as a folder below OUT

An archive holds the files as the runs wrote them: `ROW/seed-N/results.json`, and `samples.npz` with
the per-sample values as `ROW/seed-N/NAME`. The bytes depend on the files alone, not on time. All
its runs have one version of each metric and of each dataset: new runs of another version are not
packed beside older ones.
"""

import atexit
import json
import os
import shutil
import sys
import tempfile
import zipfile
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
EPOCH = (1980, 1, 1, 0, 0, 0)  # the same bytes each time


def pack(folder: Path, out: Path | None = None) -> Path:
    """Write `results/<folder>.zip` from a folder of runs; existing runs in it are replaced.

    Exits with a sentence, and leaves an existing archive as it is, if versions are mixed.
    """
    place = (HERE / folder.name if out is None else out).with_suffix(".zip")
    mixed = mixed_versions(folder)
    if mixed:
        sys.exit(
            f"{place.name} was not written: its runs must have one version of each metric and "
            f"dataset, got {'; '.join(mixed)}. Remove {place.name} to keep the new runs only, or "
            "evaluate the older runs again"
        )
    partial = place.with_suffix(".partial")
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            entry = zipfile.ZipInfo(path.relative_to(folder).as_posix(), EPOCH)
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(entry, path.read_bytes())
    os.replace(partial, place)
    return place


def mixed_versions(folder: Path) -> list[str]:
    """Describe each metric and dataset of which the runs in a folder have several versions."""
    found: dict[str, dict[int, str]] = defaultdict(dict)
    for path in sorted(folder.rglob("results.json")):
        run = path.parent.relative_to(folder).as_posix()
        for what, version in _versions(json.loads(path.read_text())):
            found[what].setdefault(version, run)
    return [
        f"{what} in " + " and ".join(f"version {one} ({seen[one]})" for one in sorted(seen))
        for what, seen in sorted(found.items())
        if len(seen) > 1
    ]


def _versions(results: dict[str, Any]) -> list[tuple[str, int]]:
    """Return the versions of the metrics and datasets of a run; 1 where none is written."""
    ours = results.get("ours") or {}
    # the pointing game of phrase grounding has another definition, see `overt.metrics.versions`
    phrases = " of phrases" if "grounding_accuracy" in ours else ""
    metrics = [
        (f"metric {name}{phrases if name == 'pointing' else ''}", int(entry.get("version", 1)))
        for name, entry in ours.items()
    ]
    data = results.get("data") or []
    return metrics + [(f"dataset {one['name']}", int(one.get("version", 1))) for one in data]


def unpack(out: Path) -> Path:
    """Extract every archive into a folder of its name below `out`."""
    for path in sorted(HERE.glob("*.zip")):
        with zipfile.ZipFile(path) as archive:
            archive.extractall(out / path.stem)
    return out


@cache
def unpacked() -> Path:
    """Return a temporary folder with all archives unpacked; it is removed when Python ends."""
    place = Path(tempfile.mkdtemp(prefix="overt-results-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    return unpack(place)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["pack", *folders] if folders:
            for one in folders:
                print(pack(Path(one)))
        case ["unpack", place]:
            print(unpack(Path(place)))
        case _:
            sys.exit(__doc__)
