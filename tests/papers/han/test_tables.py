"""Tables of hard attention: shared rows, published numbers, and a small filled table."""

from dataclasses import replace
from pathlib import Path

import pytest

from overt.experiments import table_runner
from overt.papers import catalog
from overt.papers.han.config import HanInit, HanRecipe, HanSelect
from tests.experiments import tiny

RESULTS = Path(__file__).resolve().parents[3] / "results"


def test_rows_shared_by_two_tables_are_run_once() -> None:
    second, third = catalog.find_table("han-2"), catalog.find_table("han-3")
    assert {row.label for row in second.rows if row.home == "han-1"} == {
        *("han-sum-32", "han-sum-48", "han-pairwise-32", "han-pairwise-48")
    }
    assert {row.label for row in third.rows if row.home == "han-1"} == {
        *("han-sum-16", "han-sum-32", "han-sum-48")
    }
    assert all(row.home == "han-sortclevr" for row in catalog.find_table("han-fig3").rows)


def test_rows_of_the_paper_have_published_numbers() -> None:
    for name in ("han-1", "han-2", "han-3", "han-simple"):
        for row in catalog.find_table(name).rows:
            stated = table_runner.row_recipe(row, []).paper
            assert ("accuracy" in stated) is (row.label != "san1"), row.label


def test_figure_3a_trains_every_row_at_full_length() -> None:
    rows = {row.label: row for row in catalog.find_table("han-fig3a").rows}
    recipes = {label: table_runner.row_recipe(row, []) for label, row in rows.items()}
    for label, recipe in recipes.items():
        assert isinstance(recipe, HanRecipe)
        steps = 9000 if label == "rn-santoro" else 36_000
        assert recipe.train.steps == steps and recipe.train.graph, label
        assert recipe.train.steps * recipe.train.batch == 288_000  # images
        assert recipe.model.init is (
            HanInit.TORCH if label in ("rn", "rn-santoro") else HanInit.FAN_IN
        )
    seconds, aligned = recipes["rn-aligned-seconds"], recipes["rn-aligned"]
    assert isinstance(seconds, HanRecipe) and isinstance(aligned, HanRecipe)
    assert seconds.model == aligned.model and seconds.train == aligned.train
    assert seconds.adam.length == pytest.approx(1.87 / 3.02, abs=0.01) and aligned.adam.length == 1
    one, other = recipes["han-rn"], recipes["rn-aligned"]
    assert isinstance(one, HanRecipe) and isinstance(other, HanRecipe)
    assert replace(one.model, select=HanSelect.ALL) == replace(other.model, cells=one.model.cells)


def test_figure_3a_reuses_the_runs_that_are_in_the_archive(tmp_path: Path) -> None:
    """Runs made before settings were added are recognised by their defaults."""
    table = catalog.find_table("han-fig3a")
    finished = table_runner._FinishedRuns(table, tmp_path, RESULTS)
    found = {}
    for row in table.rows:
        recipe = table_runner.row_recipe(row, [])
        runs = [finished.find(table_runner._Job(row, recipe, seed)) for seed in range(5)]
        found[row.label] = sum(run is not None for run in runs)
    assert {label: count for label, count in found.items() if count} == {
        "rn": 3,
        "han-rn-fine": 3,
    }


def test_scene_runs_that_are_in_the_archive_are_reused(tmp_path: Path) -> None:
    sets = ["data.train=24000", "train.epochs=16", "train.batch=64", "train.card=0"]
    table = catalog.find_table("han-scenes")
    finished = table_runner._FinishedRuns(table, tmp_path, RESULTS)
    kept = 0
    for row in table.rows:
        recipe = table_runner.row_recipe(row, [*sets, "train.graph=true"])
        kept += sum(
            finished.find(table_runner._Job(row, recipe, seed)) is not None for seed in range(3)
        )
    assert kept == 65


@pytest.mark.long
def test_a_table_has_columns_for_cells_flops_and_seconds(tmp_path: Path) -> None:
    """Figure 3 and its table are filled from the same folder of small runs."""
    sets = [*tiny.SETS, "train.steps=1"]
    tiny.fill(catalog.find_table("han-sortclevr"), tmp_path, "han-rn", "rn", sets=sets)
    text = (tmp_path / "table.md").read_text()
    for column in ("cells_kept", "flops ↓ (operations)", "seconds ↓ (seconds)", "covered ↑"):
        assert column in text
    filled = tiny.fill(catalog.find_table("han-fig3"), tmp_path, "han-rn", "rn", sets=sets)
    assert {entry.source for entry in filled.runs} == {"reused"}
    assert filled.cell("han-rn", "training").mean is not None
    assert filled.cell("han-rn", "flops").mean < filled.cell("rn", "flops").mean
    assert (tmp_path / "han-fig3.md").is_file()
