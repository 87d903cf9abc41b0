"""The tables of grounded supervision: their rows, and that smoke versions can be filled."""

from pathlib import Path

import pytest

from overt.recipes import tables
from overt.recipes.tables import run_table
from overt.recipes.vgp import recipe as vgp
from tests.recipes.vgp import small


def test_rows_and_columns_are_there() -> None:
    first, scenes, photos = map(tables.find, ("vgp-1", "vgp-scenes", "vgp-entities"))
    assert [row.label for row in first.rows] == [
        *("none", "indirect", "direct", "semi-direct", "original")
    ]
    assert all(row.home == "vgp-scenes" for row in first.rows)
    assert [row.label for row in scenes.rows] == list(vgp.ROWS)
    assert {"direct-distil", "direct-ewc"} <= {row.label for row in photos.rows}
    for table in (first, scenes, photos):
        for row in table.rows:
            assert tables.made(row, []).name in ("vgp-scenes", "vgp-entities")


def test_table_1_shows_the_paper_beside_ours_and_shares_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OVERT_CACHE", str(tmp_path / "cache"))
    options = {"seeds": 1, "device": "cpu", "sets": [*small.SETS], "show_progress": False}
    quiet = {"say": lambda line: None, "committed": tmp_path / "none"}
    out = tmp_path / "out"
    run_table(tables.find("vgp-scenes"), out, rows=["none"], **options, **quiet)  # type: ignore[arg-type]
    filled = run_table(tables.find("vgp-1"), out, rows=["none"], **options, **quiet)  # type: ignore[arg-type]
    assert {entry.source for entry in filled.entries} == {"reused"}
    cell = filled.cell("none", "answers")
    assert cell.mean is not None and cell.paper is not None
    assert cell.paper.value == pytest.approx(0.6673)
    assert "0.667" in (out / "vgp-1.md").read_text()
