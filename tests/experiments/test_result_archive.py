"""Results of runs in the ZIP archive of a table."""

import json
import zipfile
from pathlib import Path

import pytest

from overt.errors import CorruptFileError
from overt.experiments.result_archive import read_archived_run

RESULTS = {"status": "done", "recipe": "toy", "settings": {}, "seed": 3}


def write_archive(place: Path, content: str) -> Path:
    path = place / "table.zip"
    with zipfile.ZipFile(path, "w") as opened:
        opened.writestr("row/seed-3/results.json", content)
    return path


def test_a_run_is_read_from_its_archive(tmp_path: Path) -> None:
    path = write_archive(tmp_path, json.dumps(RESULTS))
    found = read_archived_run(path, "row", 3)
    assert found is not None and found.results == RESULTS and found.has_final_results
    assert read_archived_run(path, "row", 4) is None and read_archived_run(path, "other", 3) is None


@pytest.mark.parametrize("content", ["[]", "{", '{"status": "done"}', '{"a": NaN}'])
def test_invalid_content_raises(tmp_path: Path, content: str) -> None:
    with pytest.raises(CorruptFileError, match=r"results\.json"):
        read_archived_run(write_archive(tmp_path, content), "row", 3)


def test_an_invalid_zip_file_raises(tmp_path: Path) -> None:
    (tmp_path / "table.zip").write_bytes(b"not a zip")
    with pytest.raises(CorruptFileError, match=r"table\.zip"):
        read_archived_run(tmp_path / "table.zip", "row", 3)
