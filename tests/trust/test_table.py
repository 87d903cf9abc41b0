"""The table of reliability tests: merged rows, short and full results, the page."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def trust() -> ModuleType:
    spec = importlib.util.spec_from_file_location("trust", ROOT / "results/trust.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(number: int, figure: str, full: bool, test: str = "test_a.py::test_b[c]") -> dict[str, Any]:
    common = {"number": number, "test": test, "mark": "0 | 1", "naive": ""}
    return {**common, "figure": figure, "full": full}


def test_a_short_result_never_replaces_a_full_one(trust: ModuleType) -> None:
    before = [row(9, "old", True), row(2, "old", False), row(3, "old", False)]
    now = [row(9, "new", False), row(2, "new", False), row(1, "new", True), row(3, "new", True)]
    found = [(one["number"], one["figure"]) for one in trust.merged(before, now)]
    assert found == [(1, "new"), (2, "new"), (3, "new"), (9, "old")]


def test_the_page_has_one_table_per_group_and_marks_short_results(trust: ModuleType) -> None:
    page = trust.laid_out([row(1, "a", True), row(8, "b", True), row(9, "c", False)])
    assert page.count("\n|---|") == 2 and page.count("## ") == 2
    assert "| 9 | [b[c]](../tests/trust/test_a.py) | 0 \\| 1 | c `short` |  |\n" in page
    assert "| a |" in page and "\n\n\n" not in page


def test_recorded_results_are_found_by_the_table(
    record_result: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    full: bool,
    trust: ModuleType,
) -> None:
    monkeypatch.setenv("OVERT_TRUST_FIGURES", str(tmp_path / "figures"))
    record_result(9, "0 silent", "0 of 5", "3 of 5")
    (path,) = (tmp_path / "figures").iterdir()
    found = json.loads(path.read_text())
    name = "test_table.py::test_recorded_results_are_found_by_the_table"
    assert found == row(9, "0 of 5", full, name) | {"mark": "0 silent", "naive": "3 of 5"}
    assert trust.there(found) and not trust.there(row(9, "", True))
    monkeypatch.setattr(trust, "FIGURES", tmp_path / "trust/figures.json")
    monkeypatch.setattr(trust, "TABLE", tmp_path / "trust.md")
    trust.main(tmp_path / "figures")
    assert json.loads((tmp_path / "trust/figures.json").read_text()) == [found]
    assert "| 0 silent | 0 of 5" in (tmp_path / "trust.md").read_text()


def test_the_committed_page_matches_the_results(trust: ModuleType) -> None:
    rows = json.loads(trust.FIGURES.read_text())
    assert trust.TABLE.read_text() == trust.laid_out(rows)
    assert [one["test"] for one in rows if not trust.there(one)] == []


def test_every_committed_row_has_a_counterpart(trust: ModuleType) -> None:
    rows = json.loads(trust.FIGURES.read_text())
    assert [one["test"] for one in rows if not trust.counterpart(one)] == []
    tests = {one["test"].partition("::")[2].partition("[")[0] for one in rows}
    common = {one for one in trust.COUNTERPARTS.values() if one.startswith("test_")}
    assert tests >= {*trust.COUNTERPARTS, *common}


def test_a_counterpart_can_be_another_test(trust: ModuleType) -> None:
    killed = row(1, "0", True, "test_01_kill.py::test_a_killed_run_resumes_to_the_same_bytes[2]")
    assert trust.counterpart(killed) == ("*a naive saver leaves unreadable checkpoints*")
    assert trust.counterpart({**killed, "naive": "34 of 50"}) == "34 of 50"
    assert trust.counterpart(row(1, "0", True)) == ""
