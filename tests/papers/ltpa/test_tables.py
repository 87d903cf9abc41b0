"""Tables of Learn to Pay Attention: rows, shared runs, and columns."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from overt.experiments import settings, table_runner
from overt.experiments.table_runner import row_recipe
from overt.papers.ltpa import tables as ltpa_tables
from overt.papers.ltpa.config import LtpaRecipe
from tests.experiments import tiny

TABLES = {one.name: one for one in ltpa_tables.tables()}
RESULTS = Path(__file__).resolve().parents[3] / "results"
SHARED = ("ltpa-3", "ltpa-fig6", "ltpa-fig9", "ltpa-fig10")


@pytest.mark.parametrize("name", SHARED)
def test_rows_shared_with_other_tables_are_the_same_runs(name: str) -> None:
    """Recipe, settings and label are equal, so a finished run is reused."""
    for row in TABLES[name].rows:
        if not row.home:
            assert row.label.endswith("additive")
            continue
        (theirs,) = (one for one in TABLES[row.home].rows if one.label == row.label)
        assert settings.to_json(row_recipe(row, [])) == settings.to_json(row_recipe(theirs, []))


def test_published_numbers_have_columns() -> None:
    published = {
        "ltpa-1": {"error"},
        "ltpa-2": {"error"},
        "ltpa-3": {"stl10_train", "stl10_test", "transfer_event8", "transfer_scene67"},
        "ltpa-fig6": {"fooled_fgsm_1", "fooled_fgsm_16"},
        "ltpa-fig9": {"jaccard_airplane", "jaccard_car", "jaccard_horse"},
    }
    for name, wanted in published.items():
        table = TABLES[name]
        found = {key for row in table.rows for key in row_recipe(row, []).paper}
        assert wanted <= found & set(table.columns)


def test_every_published_number_is_in_a_table() -> None:
    shown = {
        (row.label, column)
        for table in TABLES.values()
        for row in table.rows
        for column in table.columns
    }
    for name in ("ltpa-1", "ltpa-2"):
        for row in TABLES[name].rows:
            assert {(row.label, key) for key in row_recipe(row, []).paper} <= shown


def test_tables_with_an_attention_row_have_its_control() -> None:
    for name in ("ltpa-1", "ltpa-2", "ltpa-3", "ltpa-fig6", "ltpa-fig9"):
        labels = {row.label for row in TABLES[name].rows}
        for data in ("cifar10", "cifar100", "cub", "svhn"):
            for levels in ("att2", "att3"):
                if f"{data}-{levels}-concat-pc" in labels:
                    assert f"{data}-{levels}-mean" in labels


def test_parts_are_run_on_both_datasets_and_share_the_runs_of_table_1() -> None:
    rows = {row.label: row for row in TABLES["ltpa-parts"].rows}
    first = {row.label: row for row in TABLES["ltpa-1"].rows}
    shared = {label for label, row in rows.items() if row.home}
    assert shared == rows.keys() & first.keys() and len(shared) == 8
    for label in shared:
        assert row_recipe(rows[label], []) == row_recipe(first[label], [])
    published = row_recipe(rows["cifar100-att2-concat-pc-published"], [])
    assert isinstance(published, LtpaRecipe)
    assert published.train.rate == 1 and published.sgd.dampening == 0.9
    assert "cifar100-att2-concat-additive" in rows  # a row of figure 10, with the same settings
    figure = {row.label: row for row in TABLES["ltpa-fig10"].rows}
    one, other = (table["cifar100-att2-concat-additive"] for table in (rows, figure))
    assert row_recipe(one, []) == row_recipe(other, [])


@pytest.mark.parametrize(
    ("name", "sets", "seeds", "rows", "runs"),
    [
        ("ltpa-1", ("train.epochs=6", "data.held_out=false"), 1, 28, 28),
        ("ltpa-parts", ("train.epochs=6", "data.held_out=false"), 1, 8, 8),
        ("ltpa-scenes", (), 3, 6, 18),
        ("ltpa-scenes-parts", (), 3, 3, 9),
    ],
)
def test_runs_that_are_in_the_archives_are_reused(
    name: str, sets: tuple[str, ...], seeds: int, rows: int, runs: int, tmp_path: Path
) -> None:
    """Runs made before settings were added are recognised by their defaults."""
    finished = table_runner._FinishedRuns(TABLES[name], tmp_path, RESULTS)
    found = [
        row.label
        for row in TABLES[name].rows
        for seed in range(seeds)
        if finished.find(table_runner._Job(row, row_recipe(row, sets), seed)) is not None
    ]
    assert (len(set(found)), len(found)) == (rows, runs)


SMALL = ("data.limit=16", "model.width=0.05", "train.steps=1", "train.precision=fp32")


@pytest.fixture
def fill(few: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    tiny.use_small_readers(monkeypatch)

    def fill(name: str, *rows: str) -> Any:
        return tiny.fill(TABLES[name], tmp_path / "ltpa", *rows, sets=SMALL, data_root=few)

    return fill


@pytest.mark.long
def test_one_run_fills_several_tables(fill: Callable[..., Any], tmp_path: Path) -> None:
    row = "cifar10-att2-concat-pc"
    first = fill("ltpa-1", row)
    assert not first.failures and [one.source for one in first.runs] == ["run"]
    filled = {name: fill(name, row) for name in SHARED}
    for name, one in filled.items():
        assert [entry.source for entry in one.runs] == ["reused"]
        assert (tmp_path / "ltpa" / f"{name}.md").is_file()
    assert filled["ltpa-fig10"].cell(row, "moved_unlike_8x8").mean is not None
    assert filled["ltpa-fig6"].cell(row, "fooled_pgd_8").mean is not None
    cell = filled["ltpa-3"].cell(row, "transfer_event8")
    assert cell.mean is None and cell.paper is not None  # not on disk
    assert (tmp_path / "ltpa" / "table.md").read_text().startswith("# ltpa-1")
    assert not [one for one in (tmp_path / "ltpa").iterdir() if one.is_dir() and one.name != row]


@pytest.mark.long
@pytest.mark.parametrize("row", ["cub-att2-concat-pc", "svhn-vgg"])
def test_rows_of_table_2_run(fill: Callable[..., Any], row: str) -> None:
    filled = fill("ltpa-2", row)
    assert not filled.failures
    cell = filled.cell(row, "error")
    assert cell.mean is not None and cell.paper is not None
