"""The tables of Learn to Pay Attention: which rows, whose runs, which columns."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from overt.recipes import settings, tables
from overt.recipes.ltpa import recipe as ltpa
from overt.recipes.ltpa import tables as ltpa_tables
from overt.recipes.tables import made, run_table
from tests.recipes import tiny

TABLES = {one.name: one for one in ltpa_tables.tables()}
SHARED = ("ltpa-3", "ltpa-fig6", "ltpa-fig9", "ltpa-fig10")


def test_all_are_there() -> None:
    assert list(TABLES) == ["ltpa-1", "ltpa-2", *SHARED, "ltpa-scenes"]
    assert TABLES.items() <= tables.tables().items()
    stems = [one.stem for one in TABLES.values() if one.name != "ltpa-scenes"]
    assert len(set(stems)) == len(stems)  # they may share a folder


@pytest.mark.parametrize("name", SHARED)
def test_rows_of_other_tables_are_the_same_runs(name: str) -> None:
    """The same recipe with the same settings under the same label: a finished run is reused."""
    for row in TABLES[name].rows:
        if not row.home:
            assert row.label.endswith("additive")
            continue
        (theirs,) = (one for one in TABLES[row.home].rows if one.label == row.label)
        assert settings.to_json(made(row, [])) == settings.to_json(made(theirs, []))


def test_paper_figures_have_their_columns() -> None:
    stated = {
        "ltpa-1": {"error"},
        "ltpa-2": {"error"},
        "ltpa-3": {"stl10_train", "stl10_test", "transfer_event8", "transfer_scene67"},
        "ltpa-fig6": {"fooled_fgsm_1", "fooled_fgsm_16"},
        "ltpa-fig9": {"jaccard_airplane", "jaccard_car", "jaccard_horse"},
    }
    for name, wanted in stated.items():
        table = TABLES[name]
        found = {key for row in table.rows for key in made(row, []).paper}
        assert wanted <= found & set(table.columns)


def test_every_number_of_the_paper_stands_in_a_table() -> None:
    shown = {
        (row.label, column)
        for table in TABLES.values()
        for row in table.rows
        for column in table.columns
    }
    for name in ("ltpa-1", "ltpa-2"):
        for row in TABLES[name].rows:
            assert {(row.label, key) for key in made(row, []).paper} <= shown


def test_rows_that_are_controls_stand_beside_what_they_control() -> None:
    for name in ("ltpa-1", "ltpa-2", "ltpa-3", "ltpa-fig6", "ltpa-fig9"):
        labels = {row.label for row in TABLES[name].rows}
        for data in ("cifar10", "cifar100", "cub", "svhn"):
            for levels in ("att2", "att3"):
                if f"{data}-{levels}-concat-pc" in labels:
                    assert f"{data}-{levels}-mean" in labels


SMALL = ("data.limit=16", "model.width=0.05", "train.steps=1", "train.precision=fp32")


@pytest.fixture
def fill(few: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    tiny.expect_few(monkeypatch)

    def fill(name: str, *rows: str) -> Any:
        return run_table(
            TABLES[name],
            tmp_path / "ltpa",
            rows=rows,
            seeds=1,
            device="cpu",
            data_root=few,
            sets=SMALL,
            show_progress=False,
            say=lambda line: None,
            committed=tmp_path / "none",
        )

    return fill


def test_one_run_fills_several_tables(fill: Callable[..., Any], tmp_path: Path) -> None:
    row = "cifar10-att2-concat-pc"
    first = fill("ltpa-1", row)
    assert not first.failures and [one.source for one in first.entries] == ["run"]
    filled = {name: fill(name, row) for name in SHARED}
    for name, one in filled.items():
        assert [entry.source for entry in one.entries] == ["reused"]
        assert (tmp_path / "ltpa" / f"{name}.md").is_file()
    assert filled["ltpa-fig10"].cell(row, "moved_unlike_8x8").mean is not None
    assert filled["ltpa-fig6"].cell(row, "fooled_pgd_8").mean is not None
    cell = filled["ltpa-3"].cell(row, "transfer_event8")
    assert cell.mean is None and cell.paper is not None  # not on disk
    assert (tmp_path / "ltpa" / "table.md").read_text().startswith("# ltpa-1")
    assert not [one for one in (tmp_path / "ltpa").iterdir() if one.is_dir() and one.name != row]


@pytest.mark.parametrize("row", ["cub-att2-concat-pc", "svhn-vgg"])
def test_rows_of_the_second_table_run(fill: Callable[..., Any], row: str) -> None:
    filled = fill("ltpa-2", row)
    assert not filled.failures
    cell = filled.cell(row, "error")
    assert cell.mean is not None and cell.paper is not None
    assert ltpa.TABLE_1["vgg"].name == "VGG"
