"""Tables of grounded supervision: rows, columns, and a small filled table."""

from pathlib import Path

import pytest

from overt.experiments import table_runner
from overt.experiments.result_archive import read_archived_run
from overt.papers import catalog
from overt.papers.vgp import config as vgp
from tests.experiments import tiny
from tests.papers.vgp import small

RESULTS = Path(__file__).resolve().parents[3] / "results"


def test_tables_have_their_rows_and_recipes() -> None:
    first, scenes, photos = map(catalog.find_table, ("vgp-1", "vgp-scenes", "vgp-entities"))
    assert [row.label for row in first.rows] == [
        *("none", "indirect", "direct", "semi-direct", "original")
    ]
    assert all(row.home == "vgp-scenes" for row in first.rows)
    assert [row.label for row in scenes.rows] == [*vgp.ROWS, *vgp.MATCHER_ROWS]
    more = {"direct-distil", "direct-ewc", *vgp.MATCHER_ROWS, *vgp.PUBLISHED_CODE_ROWS}
    assert more <= {row.label for row in photos.rows}
    for name in ("vgp-scenes-pretrained", "vgp-entities-pretrained"):
        assert [row.label for row in catalog.find_table(name).rows] == list(vgp.PRETRAINED_ROWS)
    for table in (first, scenes, photos):
        for row in table.rows:
            assert table_runner.row_recipe(row, []).name in ("vgp-scenes", "vgp-entities")


@pytest.mark.parametrize(
    ("name", "row", "seeds", "sets"),
    [
        *(("vgp-scenes", row, 3, ()) for row in ("original", "none", "indirect", "direct")),
        *(("vgp-scenes", row, 3, ()) for row in ("chosen-heads", "direct-shuffled")),
        ("vgp-1", "semi-direct", 3, ()),
        ("vgp-entities", "direct", 5, ("train.card=0",)),
        ("vgp-entities", "indirect", 5, ("train.card=0",)),
    ],
)
def test_archived_runs_are_those_of_the_recipe_with_its_defaults(
    name: str, row: str, seeds: int, sets: tuple[str, ...]
) -> None:
    """Settings that were added later have the defaults of the archived runs."""
    spec = next(one for one in catalog.find_table(name).rows if one.label == row)
    recipe = table_runner.row_recipe(spec, sets)
    for seed in range(seeds):
        held = read_archived_run(RESULTS / f"{spec.home or name}.zip", row, seed)
        assert held is not None and held.differences(recipe, seed) == []


@pytest.mark.long
def test_table_1_reuses_runs_and_has_published_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OVERT_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "out"
    tiny.fill(catalog.find_table("vgp-scenes"), out, "none", sets=small.SETS)
    filled = tiny.fill(catalog.find_table("vgp-1"), out, "none", sets=small.SETS)
    assert {entry.source for entry in filled.runs} == {"reused"}
    cell = filled.cell("none", "answers")
    assert cell.mean is not None and cell.paper is not None
    assert cell.paper.value == pytest.approx(0.6673)
    assert "0.667" in (out / "vgp-1.md").read_text()
