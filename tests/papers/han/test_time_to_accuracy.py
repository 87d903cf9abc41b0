"""Time to accuracy: only training time counts, and it continues on resume."""

import time
from pathlib import Path

import pytest

from overt import io
from overt.papers.han import time_to_accuracy as han_clock
from overt.papers.han.time_to_accuracy import FILE, AccuracyTimer


class ManualClock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def manual_clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    made = ManualClock()
    monkeypatch.setattr(han_clock, "time", made)
    return made


def run_epoch(
    clock: AccuracyTimer,
    manual_clock: ManualClock,
    step: int,
    accuracy: float,
    evaluation_seconds: float = 50.0,
) -> None:
    """Train for ten seconds, then validate."""
    clock.begin_step(step)
    manual_clock.now += 10
    with clock.paused():
        manual_clock.now += evaluation_seconds
    clock.record({"accuracy": accuracy, "accuracy_relational": accuracy / 2})


def test_evaluation_time_does_not_count(tmp_path: Path, manual_clock: ManualClock) -> None:
    clock = AccuracyTimer(tmp_path)
    clock.start(False)
    for step, accuracy in ((0, 0.4), (1, 0.75), (2, 0.7), (3, 0.91)):
        run_epoch(clock, manual_clock, step, accuracy)
    rows = io.read_json(tmp_path / FILE)["rows"]
    assert [(row["step"], row["seconds"]) for row in rows] == [(1, 10), (2, 20), (3, 30), (4, 40)]
    summary = clock.summary()
    assert summary["training"] == 40
    assert (summary["seconds_to_70"], summary["seconds_to_90"]) == (20, 40)
    assert "seconds_to_94" not in summary and "seconds_to_50_relational" not in summary


def test_a_resumed_run_drops_rows_after_its_checkpoint(
    tmp_path: Path, manual_clock: ManualClock
) -> None:
    first = AccuracyTimer(tmp_path)
    first.start(False)
    for step in range(3):
        run_epoch(first, manual_clock, step, 0.5 + step / 10)
    manual_clock.now += 1000
    again = AccuracyTimer(tmp_path)
    again.start(True)
    manual_clock.now += 1000  # loading data before the first step does not count
    run_epoch(
        again, manual_clock, 2, 0.95
    )  # the checkpoint is from step 2: row 3 is measured again
    assert [row["seconds"] for row in again.rows] == [10, 20, 30]
    assert again.summary()["seconds_to_90"] == 30


def test_a_finished_run_keeps_its_summary(tmp_path: Path, manual_clock: ManualClock) -> None:
    first = AccuracyTimer(tmp_path)
    first.start(False)
    run_epoch(first, manual_clock, 0, 0.8)
    again = AccuracyTimer(tmp_path)
    again.start(True)
    assert again.summary() == first.summary() != {}


def test_a_new_run_starts_empty_and_a_non_writing_timer_writes_no_file(tmp_path: Path) -> None:
    io.write_json(tmp_path / FILE, {"rows": [{"step": 1, "seconds": 5.0, "accuracy": 1.0}]})
    clock = AccuracyTimer(tmp_path, writes=False)
    clock.start(False)
    assert clock.summary() == {}
    clock.begin_step(0)
    with clock.paused():
        time.sleep(0)
    clock.record({"accuracy": 0.2})
    assert clock.rows[0]["seconds"] >= 0
    assert io.read_json(tmp_path / FILE)["rows"][0]["accuracy"] == 1.0
