"""Running tables: reuse of results, failures, resume and written files."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from overt import io
from overt.errors import CorruptFileError, RunError, RunInterrupted, UserError
from overt.experiments import data_versions, run_folder, settings
from overt.experiments.table import TableResults, TableSpec
from overt.experiments.table_runner import row_recipe, run_table, select_rows
from overt.papers import catalog
from overt.papers.catalog import build, recipes
from tests.toys import HOLD_LOCKS

RunCalls = list[tuple[str, float, int, bool]]
WriteRun = Callable[..., dict[str, Any]]
RunTable = Callable[..., TableResults]


@pytest.fixture
def run_toys(toy_table: TableSpec, tmp_path: Path) -> RunTable:
    def run_toys(**options: Any) -> TableResults:
        options = {"seeds": 2, "say": lambda line: None, "reuse": tmp_path / "none", **options}
        return run_table(toy_table, tmp_path / "out", build, **options)

    return run_toys


@pytest.fixture
def reuse_folder(toy_table: TableSpec, tmp_path: Path, write_run: WriteRun) -> Path:
    """Make a folder of results to reuse, with the row `plain` of seed 0."""
    write_run(tmp_path / "kept" / "toys" / "plain" / "seed-0", toy_table.rows[0].recipe())
    return tmp_path / "kept"


def sources(results: TableResults) -> dict[str, list[str]]:
    return {label: [one.source for one in results.runs_of_row(label)] for label in results.recipes}


def test_every_row_runs_once_per_seed(run_toys: RunTable, run_calls: RunCalls) -> None:
    results = run_toys()
    assert run_calls == [
        ("toy", 1.0, 0, False),
        ("toy", 1.0, 1, False),
        ("toy", 2.0, 0, False),
        ("toy", 2.0, 1, False),
        ("toy-stated", 1.0, 0, False),
        ("toy-stated", 1.0, 1, False),
    ]
    assert not results.failures
    cell = results.cell("wide", "accuracy")
    assert cell.mean == pytest.approx(0.505)
    assert cell.deviation == pytest.approx(0.01 / 2**0.5)  # of .50 and .51, with n - 1


def test_finished_rows_are_reused(run_toys: RunTable, run_calls: RunCalls) -> None:
    run_toys(rows=["wide"])
    run_calls.clear()
    results = run_toys()
    assert [name for name, width, *_ in run_calls if width == 2] == []
    assert sources(results)["wide"] == ["reused", "reused"]
    run_calls.clear()
    run_toys()
    assert run_calls == []


def test_more_seeds_run_only_the_new_ones(run_toys: RunTable, run_calls: RunCalls) -> None:
    run_toys(rows=["plain"], seeds=1)
    results = run_toys(rows=["plain"], seeds=3)
    assert [seed for _, _, seed, _ in run_calls] == [0, 1, 2]
    assert sources(results) == {"plain": ["reused", "run", "run"]}


def test_seeds_begin_at_the_first_one(run_toys: RunTable, run_calls: RunCalls) -> None:
    run_toys(rows=["wide"], seeds=2, first_seed=20)
    results = run_toys(rows=["plain"], seeds=3, first_seed=21)
    assert [seed for _, _, seed, _ in run_calls] == [20, 21, 21, 22, 23]
    # rows that were not selected show their runs of the same seeds
    assert [(run.row, run.seed) for run in results.runs] == [
        *(("plain", seed) for seed in (21, 22, 23)),
        ("wide", 21),
    ]


def test_committed_results_are_reused(
    run_toys: RunTable, run_calls: RunCalls, reuse_folder: Path
) -> None:
    (reuse_folder / "toys/plain/seed-0" / io.MANIFEST).unlink()  # results.json alone is committed
    results = run_toys(rows=["plain"], reuse=reuse_folder)
    assert sources(results) == {"plain": ["committed", "run"]}


@pytest.mark.parametrize("outdated", ["metric", "data"])
def test_kept_runs_of_older_versions_are_not_mixed_with_new_ones(
    run_toys: RunTable,
    run_calls: RunCalls,
    reuse_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    outdated: str,
) -> None:
    if outdated == "metric":
        monkeypatch.setattr("overt.metrics.versions.current_version", lambda name: 2)
    else:
        place = reuse_folder / "toys/plain/seed-0"
        io.write_json(
            place / "results.json",
            {**io.read_json(place / "results.json"), "data": [{"name": "dots"}]},
        )
        io.write_manifest(place, ["results.json"])
        monkeypatch.setitem(data_versions.VERSIONS, "dots", 2)
    lines: list[str] = []
    options: dict[str, Any] = {"rows": ["plain"], "reuse": reuse_folder, "say": lines.append}
    # alone they are shown, with their version
    assert sources(run_toys(**options, seeds=1)) == {"plain": ["committed"]}
    assert sources(run_toys(**options, seeds=2)) == {"plain": ["run", "run"]}
    assert [seed for _, _, seed, _ in run_calls] == [0, 1]
    assert any("has older versions of" in line and outdated in line for line in lines)


def test_results_without_a_new_setting_are_reused_at_its_default(
    run_toys: RunTable, run_calls: RunCalls, reuse_folder: Path
) -> None:
    place = reuse_folder / "toys" / "plain" / "seed-0"
    results = io.read_json(place / "results.json")
    del results["settings"]["train.patience"]
    io.write_json(place / "results.json", results)
    io.write_manifest(place, ["results.json"])
    assert sources(run_toys(rows=["plain"], reuse=reuse_folder, seeds=1)) == {
        "plain": ["committed"]
    }
    other = run_toys(rows=["plain"], reuse=reuse_folder, seeds=1, sets=["train.patience=3"])
    assert sources(other) == {"plain": ["run"]}


def test_rows_of_another_table_reuse_its_runs(
    run_calls: RunCalls, toy_table: TableSpec, tmp_path: Path, reuse_folder: Path
) -> None:
    out = tmp_path / "out"
    rows = tuple(replace(row, home="toys") for row in toy_table.rows)
    other = TableSpec("other", "The same runs, another column.", rows, ("error",), stem="other")
    options: dict[str, Any] = {"seeds": 1, "say": lambda line: None, "reuse": reuse_folder}
    run_table(toy_table, out, build, rows=["wide"], **options)
    run_calls.clear()
    results = run_table(other, out, build, **options)
    assert sources(results) == {"plain": ["committed"], "wide": ["reused"], "stated": ["run"]}
    assert [name for name, *_ in run_calls] == ["toy-stated"]
    assert (out / "other.md").read_text().startswith("# other")
    assert json.loads((out / "other.json").read_text())["table"] == "other"
    assert (out / "table.md").read_text().startswith("# toys")
    mine = replace(
        other, rows=toy_table.rows[:1]
    )  # rows of the table itself are not searched elsewhere
    run_calls.clear()
    run_table(mine, tmp_path / "alone", build, **options)
    assert [name for name, *_ in run_calls] == ["toy"]


def test_results_of_another_schedule_are_stored_separately(
    run_toys: RunTable,
    run_calls: RunCalls,
    toy_table: TableSpec,
    reuse_folder: Path,
    write_run: WriteRun,
) -> None:
    sets = ["data.limit=3"]
    write_run(reuse_folder / "toys-short/plain/seed-0", row_recipe(toy_table.rows[0], sets))
    results = run_toys(rows=["plain"], reuse=reuse_folder, sets=sets, seeds=1)
    assert [one.folder.parts[-3] for one in results.runs] == ["toys-short"]
    results = run_toys(rows=["plain"], reuse=reuse_folder, seeds=1)
    assert [one.folder.parts[-3] for one in results.runs] == ["toys"]
    assert run_calls == []


def test_committed_results_of_other_settings_are_not_reused(
    run_toys: RunTable, run_calls: RunCalls, reuse_folder: Path
) -> None:
    results = run_toys(rows=["plain"], reuse=reuse_folder, sets=["data.limit=3"], seeds=1)
    assert sources(results) == {"plain": ["run"]}


def test_other_settings_raise_before_anything_runs(run_toys: RunTable, run_calls: RunCalls) -> None:
    run_toys(rows=["stated"])
    run_calls.clear()
    with pytest.raises(UserError, match="finished run"):
        run_toys(sets=["data.limit=5"])
    with pytest.raises(UserError, match=r"data.limit.*5.*none"):
        run_toys(sets=["data.limit=5"], resume=True)
    assert run_calls == []


def test_unfinished_rows_need_resume(
    run_toys: RunTable,
    run_calls: RunCalls,
    toy_table: TableSpec,
    tmp_path: Path,
    write_run: WriteRun,
) -> None:
    write_run(tmp_path / "out/wide/seed-0", row_recipe(toy_table.rows[1], []), status="stopped")
    with pytest.raises(UserError, match=r"toy.* 0.* --resume"):
        run_toys()
    assert run_calls == []
    run_toys(rows=["plain", "wide"], resume=True)
    assert [resume for _, _, _, resume in run_calls] == [False, False, True, False]


def test_rows_that_failed_before_saving_restart(
    run_toys: RunTable,
    run_calls: RunCalls,
    toy_table: TableSpec,
    tmp_path: Path,
    write_run: WriteRun,
) -> None:
    write_run(tmp_path / "out/plain/seed-0", row_recipe(toy_table.rows[0], []), status="failed")
    results = run_toys(rows=["plain"], seeds=1, sets=["data.limit=5"])
    assert sources(results) == {"plain": ["run"]}
    assert [resume for _, _, _, resume in run_calls] == [False]


@pytest.mark.parametrize(
    "error",
    [
        *(RunError("no space."), UserError("no data.")),
        *(CorruptFileError("no file."), ZeroDivisionError("x")),
    ],
)
def test_a_failed_row_does_not_stop_the_others(
    run_toys: RunTable,
    run_calls: RunCalls,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    error: Exception,
) -> None:
    from overt.experiments import runner as runner_module

    working = runner_module.run

    def run(recipe: Any, out: Path, build: Any, **options: Any) -> dict[str, Any]:
        if out.name == "seed-0" and out.parent.name == "wide":
            raise error
        return working(recipe, out, **options)

    monkeypatch.setattr(runner_module, "run", run)
    results = run_toys()
    assert sources(results)["wide"] == ["failed", "run"]
    assert [entry.row for entry in results.failures] == ["wide"]
    assert str(error).rstrip(".") in results.failures[0].error
    assert results.cell("wide", "accuracy").seeds == 1
    assert len(run_calls) == 5
    assert "wide, seed 0 failed: " in (tmp_path / "out/table.md").read_text()
    monkeypatch.setattr(runner_module, "run", working)
    assert sources(run_toys())["wide"] == ["run", "reused"]


def test_a_stopped_table_keeps_finished_rows(
    run_toys: RunTable, run_calls: RunCalls, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from overt.experiments import runner as runner_module

    working = runner_module.run

    def run(recipe: Any, out: Path, build: Any, **options: Any) -> dict[str, Any]:
        if out.parent.name == "wide":
            raise RunInterrupted("stopped.", 2)
        return working(recipe, out, **options)

    monkeypatch.setattr(runner_module, "run", run)
    with pytest.raises(RunInterrupted):
        run_toys()
    written = json.loads((tmp_path / "out/table.json").read_text())
    assert [row["row"] for row in written["rows"]] == ["plain"]


def test_a_corrupt_finished_run_is_reported_and_unchanged(
    run_toys: RunTable, run_calls: RunCalls, tmp_path: Path
) -> None:
    run_toys(rows=["plain"])
    path = tmp_path / "out/plain/seed-0" / run_folder.RESULTS
    path.write_text(path.read_text().replace("0.25", "0.95"))
    before = path.read_bytes()
    results = run_toys(rows=["plain"], resume=True)
    assert sources(results) == {"plain": ["failed", "reused"]}
    assert str(path) in results.failures[0].error
    assert path.read_bytes() == before


def test_the_written_table_includes_rows_of_earlier_calls(
    run_toys: RunTable, run_calls: RunCalls, tmp_path: Path
) -> None:
    run_toys(rows=["stated"])
    run_toys(rows=["plain"])
    written = json.loads((tmp_path / "out/table.json").read_text())
    assert [row["row"] for row in written["rows"]] == ["plain", "stated"]
    assert written["rows"][1]["ours"]["accuracy"]["paper"] == 0.75


def test_rows_are_selected_by_name(toy_table: TableSpec) -> None:
    assert select_rows(toy_table, ["stated", "plain"]) == (toy_table.rows[0], toy_table.rows[2])
    assert select_rows(toy_table, []) == select_rows(toy_table, ["all"]) == toy_table.rows
    with pytest.raises(UserError, match=r"toys .*'wid'.* wide"):
        select_rows(toy_table, ["wid"])
    with pytest.raises(UserError, match="plain, wide, stated"):
        select_rows(toy_table, ["?"])


def test_user_settings_override_row_settings(toy_table: TableSpec) -> None:
    assert row_recipe(toy_table.rows[1], []).model.width == 2
    assert row_recipe(toy_table.rows[1], ["model.width=3"]).model.width == 3


def test_two_processes_cannot_run_one_table(
    run_toys: RunTable, run_calls: RunCalls, tmp_path: Path
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD_LOCKS, str(tmp_path / "out")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=str(other.pid)):
            run_toys()
        other.communicate("")
    assert run_calls == []


# Shipped tables


@pytest.mark.long
@pytest.mark.parametrize("name", list(catalog.tables()))
def test_every_shipped_table_matches_its_recipes(name: str) -> None:
    table = catalog.find_table(name)
    assert table.name == name
    labels = [row.label for row in table.rows]
    assert len(set(labels)) == len(labels)
    for row in table.rows:
        assert row.recipe().name in recipes()
        assert row.label == row.label.lower() and "/" not in row.label
        for key in ("data.limit=8", "train.epochs=1", "train.steps=2"):
            settings.apply(row_recipe(row, []), [key])


def test_unknown_tables_raise_with_the_nearest_name(
    toy_table: TableSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "tables", lambda: {"toys": toy_table})
    assert catalog.find_table("toys") is toy_table
    with pytest.raises(UserError, match=r"table 'toy'.* toys"):
        catalog.find_table("toy")
    with pytest.raises(UserError, match="table '!'.* toys"):
        catalog.find_table("!")


def test_a_table_inside_a_run_raises(tmp_path: Path, toy_table: TableSpec) -> None:
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(UserError, match=r"run.*saved model"):
        run_table(toy_table, tmp_path, build)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["results.json"]
