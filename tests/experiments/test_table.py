"""Tables of results: cells, text, Markdown, JSON and metric versions."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from overt.experiments import table as table_module
from overt.experiments.table import TableResults, TableRun, TableSpec


def make_run(row: str, seed: int, source: str = "run", **ours: Any) -> TableRun:
    return TableRun(row, seed, Path(row, f"seed-{seed}"), source, results={"ours": ours})


@pytest.fixture
def results(toy_table: TableSpec) -> TableResults:
    recipes = {row.label: row.recipe() for row in toy_table.rows}
    share = {"unit": "share", "higher_is_better": True}
    entries = (
        make_run("plain", 0, accuracy={"value": 0.5, **share}, error={"value": 50, "unit": "%"}),
        make_run("plain", 1, "reused", accuracy={"value": 0.7, **share}, error={"value": None}),
        make_run("wide", 0, "committed", accuracy={"value": 0.8, **share}),
        TableRun("wide", 1, Path("w"), "failed", error="no space."),
        make_run("stated", 0, accuracy={"value": 0.123456, **share}),
    )
    return TableResults(toy_table, recipes, entries)


def test_mean_and_sample_deviation_over_the_seeds(results: TableResults) -> None:
    cell = results.cell("plain", "accuracy")
    assert (cell.mean, cell.seeds) == (pytest.approx(0.6), 2)
    assert cell.deviation == pytest.approx(0.02**0.5)  # (.1^2 + .1^2) / (2 - 1)
    alone = results.cell("wide", "accuracy")
    assert (alone.mean, alone.deviation, alone.seeds) == (0.8, None, 1)
    missing = results.cell("wide", "error")
    assert (missing.mean, missing.seeds) == (None, 0)


def test_times_and_facts_of_a_run_can_be_columns(toy_table: TableSpec) -> None:
    """Facts and times of a run are columns if no metric has their name."""
    ours = {"flops": {"value": 7, "unit": "operations", "direction": "lower"}}
    facts = {"ours": ours, "seconds": 12.5, "flops": 99, "clock": {"seconds_to_90": 3.5}}
    one = TableRun("plain", 0, Path("p"), "run", results=facts)
    made = TableResults(toy_table, {"plain": toy_table.rows[0].recipe()}, (one,))
    for column, value in (("seconds", 12.5), ("seconds_to_90", 3.5), ("flops", 7)):
        cell = made.cell("plain", column)
        assert cell.mean == value and cell.higher_is_better is False
    assert made.cell("plain", "seconds").unit == "seconds"
    for column in ("seconds_to_94", "parameters", "seed"):
        assert made.cell("plain", column).mean is None


def test_text_has_published_values_next_to_results(results: TableResults) -> None:
    header, lines = table_module.as_text(results)
    assert header == ["row", "accuracy ↑ (share)", "paper", "error (%)", "seeds", "from"]
    assert lines == [
        ["plain", "0.600 ± 0.141", "", "50.00", "2", "1 run, 1 reused"],
        ["wide", "0.800", "", "–", "1", "1 committed, 1 failed"],
        ["stated", "0.123", "0.750", "–", "1", "1 run"],
    ]


def test_write_table_writes_markdown_and_json(results: TableResults, tmp_path: Path) -> None:
    import json

    table_module.write_table(results, tmp_path)
    text = (tmp_path / "table.md").read_text()
    assert "| stated | 0.123 | 0.750 | – | 1 | 1 run |" in text
    assert "wide, seed 1 failed: no space." in text
    rows = json.loads((tmp_path / "table.json").read_text())["rows"]
    assert rows[2]["ours"]["accuracy"] == {
        "mean": 0.123456,
        "deviation": None,
        "seeds": 1,
        "unit": "share",
        "higher_is_better": True,
        "paper": 0.75,
        "source": "Table 1, row 2",
    }
    assert [run["source"] for run in rows[1]["runs"]] == ["committed", "failed"]


def test_a_table_notes_rows_with_fewer_than_five_seeds(
    toy_table: TableSpec, results: TableResults, tmp_path: Path
) -> None:
    (note,) = table_module.table_notes(results)
    assert note.startswith("Fewer than 5 seeds: plain (2), wide (1), stated (1). A difference over")
    table_module.write_table(results, tmp_path)
    assert note in (tmp_path / "table.md").read_text()
    runs = tuple(make_run("plain", seed, error={"value": 1.0}) for seed in range(5))
    recipes = {"plain": toy_table.rows[0].recipe()}
    assert not list(table_module.table_notes(TableResults(toy_table, recipes, runs)))


@pytest.mark.parametrize(
    ("ours", "arrow"),
    [
        ({"value": 1.0, "higher_is_better": False}, " ↓"),
        ({"value": 1.0, "direction": "lower"}, " ↓"),
        ({"value": 1.0, "direction": "higher"}, " ↑"),
        ({"value": 1.0}, ""),
    ],
)
def test_the_arrow_shows_the_better_direction(
    toy_table: TableSpec, ours: dict[str, Any], arrow: str
) -> None:
    recipes = {"plain": toy_table.rows[0].recipe()}
    header, _ = table_module.as_text(
        TableResults(toy_table, recipes, (make_run("plain", 0, error=ours),))
    )
    assert header[2] == f"error{arrow}"


def test_a_column_has_one_metric_version(toy_table: TableSpec) -> None:
    """Runs of an older version are left out and listed; a column of old runs is labelled."""
    recipes = {row.label: row.recipe() for row in toy_table.rows}
    table = replace(toy_table, columns=("pointing",))
    old = make_run("plain", 0, pointing={"value": 0.9})
    new = make_run("plain", 1, pointing={"value": 0.5, "version": 2})
    mixed = TableResults(table, recipes, (old, new, make_run("wide", 0, pointing={"value": 0.8})))
    assert mixed.cell("plain", "pointing").mean == 0.5
    assert mixed.cell("plain", "pointing").seeds == 1
    assert mixed.cell("wide", "pointing").mean is None
    (note,) = table_module.outdated_notes(mixed)
    assert note.startswith("pointing has version 2") and "plain (seed 0), wide (seed 0)" in note
    assert table_module.as_json(mixed)["versions"] == {"pointing": 2}
    assert table_module.as_text(mixed)[0][1] == "pointing"
    alone = TableResults(table, recipes, (old,))
    assert table_module.as_text(alone)[0][1] == "pointing (definition 1)"
    assert not list(table_module.outdated_notes(alone))
