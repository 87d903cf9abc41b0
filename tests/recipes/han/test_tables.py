"""The tables of hard attention: which rows they share, and that smoke versions can be filled."""

from pathlib import Path

from overt.recipes import tables
from overt.recipes.han import recipe as han
from overt.recipes.han.tables import FIGURE_3
from overt.recipes.tables import run_table
from tests.recipes import tiny

NAMES = (
    *("han-1", "han-2", "han-3", "han-simple", "han-clevr", "han-fig3"),
    *("han-sortclevr", "han-scenes", "han-easyvqa", "han-daquar"),
)


def test_all_of_them_are_there() -> None:
    assert [name for name in tables.tables() if name.startswith("han-")] == sorted(
        NAMES, key=list(tables.tables()).index
    )
    stems = [tables.find(name).stem for name in ("han-1", "han-2", "han-3", "han-simple")]
    assert len(set(stems)) == len(stems)


def test_rows_that_two_tables_show_are_run_once() -> None:
    second, third = tables.find("han-2"), tables.find("han-3")
    assert {row.label for row in second.rows if row.home == "han-1"} == {
        *("han-sum-32", "han-sum-48", "han-pairwise-32", "han-pairwise-48")
    }
    assert {row.label for row in third.rows if row.home == "han-1"} == {
        *("han-sum-16", "han-sum-32", "han-sum-48")
    }
    assert all(row.home == "han-sortclevr" for row in tables.find("han-fig3").rows)


def test_figures_stand_in_the_tables_of_the_paper() -> None:
    for name in ("han-1", "han-2", "han-3", "han-simple"):
        for row in tables.find(name).rows:
            stated = tables.made(row, []).paper
            assert ("accuracy" in stated) is (row.label != "san1"), row.label


def test_a_table_shows_cells_operations_and_seconds(tmp_path: Path) -> None:
    """Figure 3 and the table behind it, tiny, from one folder."""
    sets = [*tiny.SETS, "train.steps=1"]
    options = {"seeds": 1, "device": "cpu", "sets": sets, "show_progress": False}
    quiet = {"say": lambda line: None, "committed": tmp_path / "none"}
    chosen = ["han-rn", "rn"]
    run_table(tables.find("han-sortclevr"), tmp_path, rows=chosen, **options, **quiet)  # type: ignore[arg-type]
    text = (tmp_path / "table.md").read_text()
    for column in ("cells_kept", "flops ↓ (operations)", "seconds ↓ (seconds)", "covered ↑"):
        assert column in text
    filled = run_table(tables.find("han-fig3"), tmp_path, rows=chosen, **options, **quiet)  # type: ignore[arg-type]
    assert {entry.source for entry in filled.entries} == {"reused"}
    assert filled.cell("han-rn", "training").mean is not None
    assert filled.cell("han-rn", "flops").mean < filled.cell("rn", "flops").mean  # type: ignore[operator]
    assert (tmp_path / "han-fig3.md").is_file()


def test_figure_3_is_of_rows_that_there_are() -> None:
    assert set(FIGURE_3) <= set(han.rows_of("sortclevr"))
