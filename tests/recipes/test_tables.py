"""Filling a table: what runs, what is reused, what a failure costs, and what is written."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from overt import files
from overt.errors import BadInput, Damaged, Failed, Stopped
from overt.recipes import folder, recipes, settings, tables
from overt.recipes.comparison import Filled, Table
from overt.recipes.tables import made, pick, run_table
from tests.toys import HOLD

Asked = list[tuple[str, float, int, bool]]
Write = Callable[..., dict[str, Any]]


@pytest.fixture
def fill(toy_table: Table, tmp_path: Path) -> Callable[..., Filled]:
    def fill(**options: Any) -> Filled:
        options = {"seeds": 2, "say": lambda line: None, "committed": tmp_path / "none", **options}
        return run_table(toy_table, tmp_path / "out", **options)

    return fill


def sources(filled: Filled) -> dict[str, list[str]]:
    return {label: [one.source for one in filled.of_row(label)] for label in filled.recipes}


def test_every_row_runs_once_a_seed(fill: Callable[..., Filled], runner: Asked) -> None:
    filled = fill()
    assert runner == [
        ("toy", 1.0, 0, False),
        ("toy", 1.0, 1, False),
        ("toy", 2.0, 0, False),
        ("toy", 2.0, 1, False),
        ("toy-stated", 1.0, 0, False),
        ("toy-stated", 1.0, 1, False),
    ]
    assert not filled.failures
    cell = filled.cell("wide", "accuracy")
    assert cell.mean == pytest.approx(0.505)
    assert cell.deviation == pytest.approx(0.01 / 2**0.5)  # of .50 and .51, n - 1 below


def test_finished_rows_are_reused(fill: Callable[..., Filled], runner: Asked) -> None:
    fill(rows=["wide"])
    runner.clear()
    filled = fill()
    assert [name for name, width, *_ in runner if width == 2] == []
    assert sources(filled)["wide"] == ["reused", "reused"]
    runner.clear()
    fill()
    assert runner == []


def test_more_seeds_run_only_the_new_ones(fill: Callable[..., Filled], runner: Asked) -> None:
    fill(rows=["plain"], seeds=1)
    filled = fill(rows=["plain"], seeds=3)
    assert [seed for _, _, seed, _ in runner] == [0, 1, 2]
    assert sources(filled) == {"plain": ["reused", "run", "run"]}


def test_committed_results_are_reused(
    fill: Callable[..., Filled], runner: Asked, toy_table: Table, tmp_path: Path, write_run: Write
) -> None:
    kept = tmp_path / "benchmarks"
    place = kept / "toys" / "plain" / "seed-1"
    write_run(place, toy_table.rows[0].recipe(), 1)
    (place / files.MANIFEST).unlink()  # results.json alone is committed
    filled = fill(rows=["plain"], committed=kept)
    assert sources(filled) == {"plain": ["run", "committed"]}


def test_results_from_before_a_setting_are_reused_where_it_stands_at_its_default(
    fill: Callable[..., Filled], runner: Asked, toy_table: Table, tmp_path: Path, write_run: Write
) -> None:
    kept = tmp_path / "benchmarks"
    place = kept / "toys" / "plain" / "seed-0"
    write_run(place, toy_table.rows[0].recipe())
    results = files.read_json(place / "results.json")
    del results["settings"]["train.patience"]
    files.write_json(place / "results.json", results)
    files.seal(place, ["results.json"])
    assert sources(fill(rows=["plain"], committed=kept, seeds=1)) == {"plain": ["committed"]}
    other = fill(rows=["plain"], committed=kept, seeds=1, sets=["train.patience=3"])
    assert sources(other) == {"plain": ["run"]}


def test_rows_of_another_table_are_its_runs(
    runner: Asked, toy_table: Table, tmp_path: Path, write_run: Write
) -> None:
    kept, out = tmp_path / "benchmarks", tmp_path / "out"
    write_run(kept / "toys" / "plain" / "seed-0", toy_table.rows[0].recipe())
    rows = tuple(replace(row, home="toys") for row in toy_table.rows)
    other = Table("other", "The same runs, another column.", rows, ("error",), stem="other")
    options: dict[str, Any] = {"seeds": 1, "say": lambda line: None, "committed": kept}
    run_table(toy_table, out, rows=["wide"], **options)
    runner.clear()
    filled = run_table(other, out, **options)
    assert sources(filled) == {"plain": ["committed"], "wide": ["reused"], "stated": ["run"]}
    assert [name for name, *_ in runner] == ["toy-stated"]
    assert (out / "other.md").read_text().startswith("# other")
    assert json.loads((out / "other.json").read_text())["table"] == "other"
    assert (out / "table.md").read_text().startswith("# toys")
    mine = replace(other, rows=toy_table.rows[:1])  # its own row is not looked for elsewhere
    runner.clear()
    run_table(mine, tmp_path / "alone", **options)
    assert [name for name, *_ in runner] == ["toy"]


def test_results_of_another_schedule_are_kept_beside(
    fill: Callable[..., Filled], runner: Asked, toy_table: Table, tmp_path: Path, write_run: Write
) -> None:
    kept, sets = tmp_path / "benchmarks", ["data.limit=3"]
    row = toy_table.rows[0]
    write_run(kept / "toys" / "plain" / "seed-0", row.recipe())
    write_run(kept / "toys-short" / "plain" / "seed-0", made(row, sets))
    filled = fill(rows=["plain"], committed=kept, sets=sets, seeds=1)
    assert [one.place.parts[-3] for one in filled.entries] == ["toys-short"]
    filled = fill(rows=["plain"], committed=kept, seeds=1)
    assert [one.place.parts[-3] for one in filled.entries] == ["toys"]
    assert runner == []


def test_committed_results_of_other_settings_are_not(
    fill: Callable[..., Filled], runner: Asked, toy_table: Table, tmp_path: Path, write_run: Write
) -> None:
    kept = tmp_path / "benchmarks"
    write_run(kept / "toys" / "plain" / "seed-0", toy_table.rows[0].recipe())
    filled = fill(rows=["plain"], committed=kept, sets=["data.limit=3"], seeds=1)
    assert sources(filled) == {"plain": ["run"]}


def test_other_settings_are_refused_before_anything_runs(
    fill: Callable[..., Filled], runner: Asked
) -> None:
    fill(rows=["stated"])
    runner.clear()
    with pytest.raises(BadInput, match="holds a finished run"):
        fill(sets=["data.limit=5"])
    with pytest.raises(BadInput, match=r"data\.limit is 5, was none"):
        fill(sets=["data.limit=5"], resume=True)
    assert runner == []


def test_unfinished_rows_wait_for_resume(
    fill: Callable[..., Filled], runner: Asked, toy_table: Table, tmp_path: Path, write_run: Write
) -> None:
    write_run(tmp_path / "out/wide/seed-0", made(toy_table.rows[1], []), status="stopped")
    with pytest.raises(BadInput, match="unfinished run of toy with seed 0; add --resume"):
        fill()
    assert runner == []
    fill(rows=["plain", "wide"], resume=True)
    assert [resume for _, _, _, resume in runner] == [False, False, True, False]


def test_rows_that_failed_before_they_saved_start_again(
    fill: Callable[..., Filled], runner: Asked, toy_table: Table, tmp_path: Path, write_run: Write
) -> None:
    write_run(tmp_path / "out/plain/seed-0", made(toy_table.rows[0], []), status="failed")
    filled = fill(rows=["plain"], seeds=1, sets=["data.limit=5"])
    assert sources(filled) == {"plain": ["run"]}
    assert [resume for _, _, _, resume in runner] == [False]


@pytest.mark.parametrize(
    "error",
    [Failed("no space."), BadInput("no data."), Damaged("no file."), ZeroDivisionError("x")],
)
def test_a_failed_row_does_not_lose_the_others(
    fill: Callable[..., Filled],
    runner: Asked,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    error: Exception,
) -> None:
    from overt.recipes import running

    working = running.run

    def run(recipe: Any, out: Path, **options: Any) -> dict[str, Any]:
        if out.name == "seed-0" and out.parent.name == "wide":
            raise error
        return working(recipe, out, **options)

    monkeypatch.setattr(running, "run", run)
    filled = fill()
    assert sources(filled)["wide"] == ["failed", "run"]
    assert [entry.row for entry in filled.failures] == ["wide"]
    assert str(error).rstrip(".") in filled.failures[0].error
    assert filled.cell("wide", "accuracy").seeds == 1
    assert len(runner) == 5
    assert "wide, seed 0 failed: " in (tmp_path / "out/table.md").read_text()
    monkeypatch.setattr(running, "run", working)
    assert sources(fill())["wide"] == ["run", "reused"]


def test_a_stopped_table_keeps_what_is_done(
    fill: Callable[..., Filled], runner: Asked, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from overt.recipes import running

    working = running.run

    def run(recipe: Any, out: Path, **options: Any) -> dict[str, Any]:
        if out.parent.name == "wide":
            raise Stopped("stopped.", 2)
        return working(recipe, out, **options)

    monkeypatch.setattr(running, "run", run)
    with pytest.raises(Stopped):
        fill()
    written = json.loads((tmp_path / "out/table.json").read_text())
    assert [row["row"] for row in written["rows"]] == ["plain"]


def test_a_damaged_finished_run_is_reported_and_left_alone(
    fill: Callable[..., Filled], runner: Asked, tmp_path: Path
) -> None:
    fill(rows=["plain"])
    path = tmp_path / "out/plain/seed-0" / folder.RESULTS
    path.write_text(path.read_text().replace("0.25", "0.95"))
    before = path.read_bytes()
    filled = fill(rows=["plain"], resume=True)
    assert sources(filled) == {"plain": ["failed", "reused"]}
    assert str(path) in filled.failures[0].error
    assert path.read_bytes() == before


def test_the_written_table_also_shows_rows_of_an_earlier_day(
    fill: Callable[..., Filled], runner: Asked, tmp_path: Path
) -> None:
    fill(rows=["stated"])
    fill(rows=["plain"])
    written = json.loads((tmp_path / "out/table.json").read_text())
    assert [row["row"] for row in written["rows"]] == ["plain", "stated"]
    assert written["rows"][1]["ours"]["accuracy"]["paper"] == 0.75


def test_rows_are_picked_by_name(toy_table: Table) -> None:
    assert pick(toy_table, ["stated", "plain"]) == (toy_table.rows[0], toy_table.rows[2])
    assert pick(toy_table, []) == pick(toy_table, ["all"]) == toy_table.rows
    with pytest.raises(BadInput, match="table toys has no row 'wid'; the nearest is wide"):
        pick(toy_table, ["wid"])
    with pytest.raises(BadInput, match="there are plain, wide, stated"):
        pick(toy_table, ["?"])


def test_the_users_changes_come_after_the_rows(toy_table: Table) -> None:
    assert made(toy_table.rows[1], []).model.width == 2
    assert made(toy_table.rows[1], ["model.width=3"]).model.width == 3


def test_two_processes_do_not_fill_one_table(
    fill: Callable[..., Filled], runner: Asked, tmp_path: Path
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "out")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(BadInput, match=str(other.pid)):
            fill()
        other.communicate("")
    assert runner == []


# The tables that are shipped


@pytest.mark.parametrize("name", list(tables.tables()))
def test_every_shipped_table_fits_its_recipes(name: str) -> None:
    table = tables.find(name)
    assert table.name == name
    labels = [row.label for row in table.rows]
    assert len(set(labels)) == len(labels)
    for row in table.rows:
        assert row.recipe().name in recipes()
        assert row.label == row.label.lower() and "/" not in row.label
        for key in ("data.limit=8", "train.epochs=1", "train.steps=2"):
            settings.apply(made(row, []), [key])


def test_unknown_tables_are_answered_with_the_nearest(
    toy_table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "tables", lambda: {"toys": toy_table})
    assert tables.find("toys") is toy_table
    with pytest.raises(BadInput, match="there is no table 'toy'; the nearest is toys"):
        tables.find("toy")
    with pytest.raises(BadInput, match="there is no table '!'; there is toys"):
        tables.find("!")
