"""Time goes by in training alone, and goes on where a run does."""

import time
from pathlib import Path

import pytest

from overt import files
from overt.recipes.han import clock as han_clock
from overt.recipes.han.clock import FILE, Clock


class Hand:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def hand(monkeypatch: pytest.MonkeyPatch) -> Hand:
    made = Hand()
    monkeypatch.setattr(han_clock, "time", made)
    return made


def epoch(clock: Clock, hand: Hand, step: int, accuracy: float, judging: float = 50.0) -> None:
    """Ten seconds of training, then a validation."""
    clock.at(step)
    hand.now += 10
    with clock.stopped():
        hand.now += judging
    clock.note({"accuracy": accuracy, "accuracy_relational": accuracy / 2})


def test_judging_does_not_count(tmp_path: Path, hand: Hand) -> None:
    clock = Clock(tmp_path)
    clock.start(False)
    for step, accuracy in ((0, 0.4), (1, 0.75), (2, 0.7), (3, 0.91)):
        epoch(clock, hand, step, accuracy)
    rows = files.read_json(tmp_path / FILE)["rows"]
    assert [(row["step"], row["seconds"]) for row in rows] == [(1, 10), (2, 20), (3, 30), (4, 40)]
    marks = clock.marks()
    assert marks["training"] == 40
    assert (marks["seconds_to_70"], marks["seconds_to_90"]) == (20, 40)
    assert "seconds_to_94" not in marks and "seconds_to_50_relational" not in marks


def test_a_run_that_goes_on_forgets_what_was_lost(tmp_path: Path, hand: Hand) -> None:
    first = Clock(tmp_path)
    first.start(False)
    for step in range(3):
        epoch(first, hand, step, 0.5 + step / 10)
    hand.now += 1000
    again = Clock(tmp_path)
    again.start(True)
    hand.now += 1000  # data are opened before the first step
    epoch(again, hand, 2, 0.95)  # the checkpoint was that of step 2: row 3 is done again
    assert [row["seconds"] for row in again.rows] == [10, 20, 30]
    assert again.marks()["seconds_to_90"] == 30


def test_a_run_that_was_done_keeps_its_marks(tmp_path: Path, hand: Hand) -> None:
    first = Clock(tmp_path)
    first.start(False)
    epoch(first, hand, 0, 0.8)
    again = Clock(tmp_path)
    again.start(True)
    assert again.marks() == first.marks() != {}


def test_a_new_run_starts_anew_and_others_write_nothing(tmp_path: Path) -> None:
    files.write_json(tmp_path / FILE, {"rows": [{"step": 1, "seconds": 5.0, "accuracy": 1.0}]})
    clock = Clock(tmp_path, writes=False)
    clock.start(False)
    assert clock.marks() == {}
    clock.at(0)
    with clock.stopped():
        time.sleep(0)
    clock.note({"accuracy": 0.2})
    assert clock.rows[0]["seconds"] >= 0
    assert files.read_json(tmp_path / FILE)["rows"][0]["accuracy"] == 1.0
