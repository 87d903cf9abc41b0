"""Read runs from the archive of a table: `TABLE.zip` with `ROW/seed-N/results.json`."""

import zipfile
from pathlib import Path
from typing import Any

from overt import io
from overt.errors import CorruptFileError
from overt.experiments.run_folder import RESULTS, ExistingRun, check_results

LARGEST = 16 * 2**20  # bytes of one results.json


def read_archived_run(archive: Path, row: str, seed: int) -> ExistingRun | None:
    """Read the results of one run from an archive; None if the archive does not have it.

    Args:
        archive: A zip file of runs.
        row: Label of the table's row.
        seed: Seed of the run.

    Returns:
        The run, with the place in the archive as its folder.

    Raises:
        CorruptFileError: The archive or the results in it cannot be read, or are too large.
    """
    name = f"{row}/seed-{seed}/{RESULTS}"
    place = archive / name
    try:
        with zipfile.ZipFile(archive) as opened:
            if name not in opened.namelist():
                return None
            with opened.open(name) as member:
                # A compressed file can expand to any size: read one byte more than allowed, and no
                # further.
                raw = member.read(LARGEST + 1)
    except (zipfile.BadZipFile, EOFError, NotImplementedError) as error:
        raise CorruptFileError(f"{archive} is not a readable zip file: {error}.") from error
    if len(raw) > LARGEST:
        raise CorruptFileError(f"{place} has more than {LARGEST} bytes.")
    results: Any = io.parse_json(raw, place)
    check_results(results, place)
    return ExistingRun(place.parent, results)
