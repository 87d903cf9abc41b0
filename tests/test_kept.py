"""What is kept of runs: each says how it came about, and each folder is named on the first page."""

import json
import re
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
PAGE = (BENCHMARKS / "README.md").read_text()
FOLDERS = sorted(
    path.name for path in BENCHMARKS.iterdir() if path.is_dir() and path.name[0] not in "._"
)
RUNS = sorted(BENCHMARKS.glob("**/seed-*/results.json"))
NOT_WRITTEN = ("a2", "a2-scenes-small")  # the first page says so; no other may be added
SAID = ("command", "settings", "versions", "device", "data", "ours")


def lines_about(folder: str) -> list[str]:
    """The lines of the first page that name a folder."""
    return [line for line in PAGE.splitlines() if f"`{folder}/" in line]


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_folder_is_named_on_the_first_page(folder: str) -> None:
    named = lines_about(folder) or [line for line in PAGE.splitlines() if f"[{folder}]" in line]
    assert named, f"benchmarks/README.md does not say what benchmarks/{folder} is"


def test_every_run_says_how_it_came_about() -> None:
    """The command, the seed, the settings, the versions, the data by their hash, and that it ended.

    The commit stands in the file or, for runs whose code had no history beside it, on the first
    page, which also says where none was written down.
    """
    assert RUNS
    wrong = []
    for path in RUNS:
        name = path.relative_to(BENCHMARKS)
        told = json.loads(path.read_text())
        wrong += [f"{name}: no {key}" for key in SAID if not told.get(key)]
        wrong += [f"{name}: no seed"] * (not isinstance(told.get("seed"), int))
        wrong += [f"{name}: {told.get('status')}"] * (told.get("status") != "done")
        wrong += [f"{name}: data without a hash"] * any(not one["hash"] for one in told["data"])
        page = " ".join(lines_about(name.parts[0]))
        known = told.get("commit") or re.search(r"\b(commit|at) [0-9a-f]{7}\b", page)
        assert "not written down" not in page or name.parts[0] in NOT_WRITTEN, name
        wrong += [f"{name}: no commit, here or on the first page"] * (not known)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", ["a2", "han", "ltpa", "measure", "ssa", "vgp"])
def test_a_page_begins_with_what_was_found(page: str) -> None:
    """A table of questions and answers stands before the first section."""
    before = (BENCHMARKS / f"{page}.md").read_text().split("\n## ")[0]
    head = [line for line in before.splitlines() if line.startswith("| question |")]
    assert head, f"benchmarks/{page}.md has no table of questions before its first section"
