"""Trust of metrics: known successes and failures, and the committed table."""

import sys
from pathlib import Path

import pytest

from overt import io
from overt.errors import UserError
from overt.metrics.scorecard.trust import FILE
from overt.testing import rank_truthful_maps

ROOT = Path(__file__).resolve().parents[2]


def shares(names: list[str], repeats: int = 2, samples: int = 16) -> dict[tuple[str, str], float]:
    rows = rank_truthful_maps(names, repeats, samples)
    assert {row.repeats for row in rows} == {repeats}
    return {(row.key, row.rule): row.first / row.repeats for row in rows}


def test_agreement_with_people_fails_where_people_mark_another_cell() -> None:
    found = shares(["mass_inside"])
    assert found["mass_inside", "one cell"] == found["mass_inside", "or"] == 1
    assert found["mass_inside", "shortcut"] == found["mass_inside", "random labels"] == 0


def test_redundant_and_joint_evidence_mislead_metrics_of_removal() -> None:
    """Either of two cells suffices: no single one has an effect. Both are needed: one is enough."""
    names = ["leave_one_out_agreement@mask", "deletion_area@mask", "insertion_area@mask"]
    found = shares(names, 1, 8)
    assert found["leave_one_out_agreement@mask", "or"] == 0
    assert found["leave_one_out_agreement@mask", "and"] == 1
    assert found["insertion_area@mask", "or"] == 0
    assert found["deletion_area@mask", "and"] == 0
    assert all(found[key, "distractor"] == 1 for key, _ in found)


def test_rows_name_the_maps_that_won() -> None:
    rows = {row.rule: row for row in rank_truthful_maps(["pointing_game"], 2)}
    assert rows["and"].lost_to["one of two"] == 2 and rows["and"].first == 0
    assert rows["one cell"].lost_to == {} and rows["one cell"].first == 2


def test_metrics_without_a_direction_or_requirements_have_no_rows() -> None:
    assert rank_truthful_maps(["entropy", "accuracy", "nss"], 1) == []
    with pytest.raises(UserError, match="cat"):
        rank_truthful_maps(["cat"])
    with pytest.raises(ValueError, match="0 and 16"):
        rank_truthful_maps(["cc"], 0)


def test_the_committed_table_is_that_of_the_file() -> None:
    sys.path.insert(0, str(ROOT / "results"))
    try:
        import metric_trust
    finally:
        sys.path.remove(str(ROOT / "results"))
    page = metric_trust.PAGE.read_text()
    assert metric_trust.filled(page) == page, "run: python results/metric_trust.py --table"
    assert "`deletion_area@mask`" in metric_trust.table()


@pytest.mark.long
def test_the_committed_counts_are_computed_again() -> None:
    held = io.read_json(FILE)
    names = ["cc", "deletion_area@mask", "gradient_agreement@mask"]
    given = {**held["settings"], "names": names}
    wanted = {(row["key"], row["rule"]): row["first"] for row in held["rows"]}
    rows = rank_truthful_maps(**given)
    assert len(rows) == 18
    for row in rows:
        assert abs(row.first - wanted[row.key, row.rule]) <= 1, row  # rounding may decide a tie
