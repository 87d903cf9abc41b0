"""How a filled table reads: hand-made results in, known text out."""

from pathlib import Path
from typing import Any

import pytest

from overt.recipes import comparison
from overt.recipes.comparison import Entry, Filled, Table


def entry(row: str, seed: int, source: str = "run", **ours: Any) -> Entry:
    return Entry(row, seed, Path(row, f"seed-{seed}"), source, results={"ours": ours})


@pytest.fixture
def filled(toy_table: Table) -> Filled:
    recipes = {row.label: row.recipe() for row in toy_table.rows}
    share = {"unit": "share", "higher_is_better": True}
    entries = (
        entry("plain", 0, accuracy={"value": 0.5, **share}, error={"value": 50, "unit": "%"}),
        entry("plain", 1, "reused", accuracy={"value": 0.7, **share}, error={"value": None}),
        entry("wide", 0, "committed", accuracy={"value": 0.8, **share}),
        Entry("wide", 1, Path("w"), "failed", error="no space."),
        entry("stated", 0, accuracy={"value": 0.123456, **share}),
    )
    return Filled(toy_table, recipes, entries)


def test_mean_and_sample_deviation_over_the_seeds(filled: Filled) -> None:
    cell = filled.cell("plain", "accuracy")
    assert (cell.mean, cell.seeds) == (pytest.approx(0.6), 2)
    assert cell.deviation == pytest.approx(0.02**0.5)  # (.1^2 + .1^2) / (2 - 1)
    alone = filled.cell("wide", "accuracy")
    assert (alone.mean, alone.deviation, alone.seeds) == (0.8, None, 1)
    missing = filled.cell("wide", "error")
    assert (missing.mean, missing.seeds) == (None, 0)


def test_what_a_run_cost_can_be_a_column(toy_table: Table) -> None:
    """Facts and clock times of a run, where no measure has their name."""
    ours = {"flops": {"value": 7, "unit": "operations", "direction": "lower"}}
    facts = {"ours": ours, "seconds": 12.5, "flops": 99, "clock": {"seconds_to_90": 3.5}}
    one = Entry("plain", 0, Path("p"), "run", results=facts)
    made = Filled(toy_table, {"plain": toy_table.rows[0].recipe()}, (one,))
    for column, value in (("seconds", 12.5), ("seconds_to_90", 3.5), ("flops", 7)):
        cell = made.cell("plain", column)
        assert cell.mean == value and cell.higher_is_better is False
    assert made.cell("plain", "seconds").unit == "seconds"
    for column in ("seconds_to_94", "parameters", "seed"):
        assert made.cell("plain", column).mean is None


def test_the_text_has_ours_beside_the_papers(filled: Filled) -> None:
    header, lines = comparison.as_text(filled)
    assert header == ["row", "accuracy ↑ (share)", "paper", "error (%)", "seeds", "from"]
    assert lines == [
        ["plain", "0.600 ± 0.141", "", "50.00", "2", "1 run, 1 reused"],
        ["wide", "0.800", "", "–", "1", "1 committed, 1 failed"],
        ["stated", "0.123", "0.750", "–", "1", "1 run"],
    ]


def test_what_is_written_can_be_read_by_people_and_programs(filled: Filled, tmp_path: Path) -> None:
    import json

    comparison.write(filled, tmp_path)
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


@pytest.mark.parametrize(
    ("ours", "arrow"),
    [
        ({"value": 1.0, "higher_is_better": False}, " ↓"),
        ({"value": 1.0, "direction": "lower"}, " ↓"),
        ({"value": 1.0, "direction": "higher"}, " ↑"),
        ({"value": 1.0}, ""),
    ],
)
def test_the_arrow_points_to_better(toy_table: Table, ours: dict[str, Any], arrow: str) -> None:
    recipes = {"plain": toy_table.rows[0].recipe()}
    header, _ = comparison.as_text(Filled(toy_table, recipes, (entry("plain", 0, error=ours),)))
    assert header[2] == f"error{arrow}"
