"""Pack the runs of a table into one file, and unpack all of them for the scripts that judge them.

    python results/archive.py pack FOLDER [FOLDER ...]   # results/FOLDER.zip for each
    python results/archive.py unpack OUT                 # every archive as a folder below OUT

An archive holds the files as the runs wrote them: `ROW/seed-N/results.json`, and `samples.npz` with
the per-sample values as `ROW/seed-N/NAME`. The bytes depend on the files alone, not on time.
"""

import atexit
import shutil
import sys
import tempfile
import zipfile
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
EPOCH = (1980, 1, 1, 0, 0, 0)  # the same bytes each time


def pack(folder: Path, out: Path | None = None) -> Path:
    """Write `results/<folder>.zip` from a folder of runs; existing runs in it are replaced."""
    place = (HERE / folder.name if out is None else out).with_suffix(".zip")
    with zipfile.ZipFile(place, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            entry = zipfile.ZipInfo(path.relative_to(folder).as_posix(), EPOCH)
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(entry, path.read_bytes())
    return place


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
