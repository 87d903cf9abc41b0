"""The table of trust: test, pass mark, figure reached, and what the naive way came to.

    OVERT_TRUST=full python -m pytest tests/trust -m "long or not long"
    python benchmarks/trust.py

Every trust test writes what it reached under build/trust. This program adds those rows to
benchmarks/trust/figures.json and lays all of them out in benchmarks/trust.md. A figure of the full
form of a test is never replaced by one of its short form; rows of tests that are gone are dropped.
"""

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FIGURES, TABLE = ROOT / "benchmarks/trust/figures.json", ROOT / "benchmarks/trust.md"
GROUPS = {
    1: "Resume and crash",
    9: "Hostile and broken input",
    15: "Numbers",
    18: "Many processes",
    20: "Determinism",
    21: "Contract",
    22: "Soak",
}
HEAD = """# What survives: test, pass mark, figure reached

Made by `python benchmarks/trust.py` out of what the tests under [tests/trust](../tests/trust) wrote
down; not written by hand. What each promise means for a run is told on
[its page](../docs/trust.md). The last column is what the usual way of doing it came to on the same
test, or names the test that shows it: every test can fail. Rows marked `short` are from a form with
smaller numbers, as the tests run every day; `OVERT_TRUST=full` asks for the others.
"""

# Tests whose counterpart is a test of its own, and what nothing is destroyed in.
COUNTERPARTS = {
    "test_a_run_that_is_killed_ends_in_the_same_bytes": (
        "test_a_naive_saver_leaves_checkpoints_that_cannot_be_read"
    ),
    "test_interrupted_training_goes_on_bit_for_bit": (
        "test_a_loop_that_draws_anew_on_resume_fails_the_same_test"
    ),
    "test_every_attention_module_shipped_keeps_every_promise": (
        "test_for_every_promise_a_module_that_breaks_it_and_no_other"
    ),
    "test_for_every_promise_a_module_that_breaks_it_and_no_other": "the broken modules are it",
    "test_a_slurm_job_of_two_machines_comes_to_its_end": "nothing is destroyed here",
}

Row = Mapping[str, Any]


def merged(before: Iterable[Row], now: Iterable[Row]) -> list[Row]:
    """All rows by number and test: new ones replace old ones, short ones never full ones."""
    rows = {(row["number"], row["test"]): row for row in before}
    for row in now:
        key = row["number"], row["test"]
        if row["full"] or key not in rows or not rows[key]["full"]:
            rows[key] = row
    return [rows[key] for key in sorted(rows)]


def words_of(name: str) -> str:
    """The name of a test as words."""
    return name.removeprefix("test_").replace("_", " ")


def counterpart(row: Row) -> str:
    """What the usual way came to, or the test that says it."""
    if row["naive"]:
        return str(row["naive"])
    other = COUNTERPARTS.get(row["test"].partition("::")[2].partition("[")[0], "")
    return f"*{words_of(other)}*" if other.startswith("test_") else other


def laid_out(rows: Iterable[Row]) -> str:
    """The page: one table a group of tests."""
    lines = [HEAD]
    group = 0
    for row in rows:
        number, (path, _, name) = row["number"], row["test"].partition("::")
        first = max(start for start in GROUPS if number >= start)
        if first != group:
            lines += [f"\n## {GROUPS[first]}\n"]
            lines += [
                "| | test | pass mark | figure reached | the naive way |",
                "|---|---|---|---|---|",
            ]
            group = first
        figure = row["figure"] if row["full"] else f"{row['figure']} `short`"
        link = f"[{words_of(name)}](../tests/trust/{path})"
        cells = (str(number), link, row["mark"], figure, counterpart(row))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


def there(row: Row) -> bool:
    """Whether the test of a row still exists."""
    path, _, name = row["test"].partition("::")
    file = ROOT / "tests/trust" / path
    return file.is_file() and f"def {name.partition('[')[0]}(" in file.read_text()


def main(folder: Path) -> None:
    """Take up the rows under `folder` and write the figures and the table."""
    before = json.loads(FIGURES.read_text()) if FIGURES.exists() else []
    now = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    rows = [row for row in merged(before, now) if there(row)]
    FIGURES.parent.mkdir(exist_ok=True)
    FIGURES.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
    TABLE.write_text(laid_out(rows))
    missing = sorted(set(range(1, 23)) - {row["number"] for row in rows})
    print(
        f"{len(rows)} rows; no row for {missing}" if missing else f"{len(rows)} rows, all of 1-22"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build/trust")
