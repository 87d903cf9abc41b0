"""The log on disk, TensorBoard beside it, and what people see on a terminal or elsewhere."""

import builtins
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from overt.errors import Failed
from overt.train import report
from overt.train.report import Log, Reporter


def line(step: int, stage: str = "train", **more: Any) -> dict[str, Any]:
    return {"stage": stage, "step": step, "split": "train", "losses": {"task": step / 3}, **more}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without TensorBoard."""
    real = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if "tensorboard" in name:
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)


# --- the log


@pytest.mark.usefixtures("bare")
def test_lines_can_be_read_at_once_and_come_back_exactly(tmp_path: Path) -> None:
    log = Log(tmp_path / "deep" / "run")
    log.open(0)
    log.write(line(1))
    assert lines(log.path) == [line(1)]
    log.write(line(2, measures={"é": 0.1 + 0.2}))
    assert log.size() == len(log.path.read_bytes())
    log.close()
    log.close()
    assert lines(log.path) == [line(1), line(2, measures={"é": 0.1 + 0.2})]
    assert sorted(path.name for path in log.path.parent.iterdir()) == ["log.jsonl"]


@pytest.mark.usefixtures("bare")
def test_what_no_checkpoint_knows_of_is_cut_off(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.open(0)
    log.write(line(1))
    size = log.size()
    whole = log.path.read_bytes()
    log.write(line(2))
    log.close()
    with log.path.open("ab") as file:
        file.write(b'{"stage": "tr')  # killed in the middle of a line
    again = Log(tmp_path)
    again.open(size)
    assert again.path.read_bytes() == whole
    again.write(line(2))
    again.close()
    assert lines(log.path) == [line(1), line(2)]
    Log(tmp_path).open(10**9)  # a log that was deleted, or cut by hand, does not grow
    assert lines(log.path) == [line(1), line(2)]


@pytest.mark.usefixtures("bare")
def test_a_new_stage_goes_on_after_the_others_and_drops_its_own_earlier_attempt(
    tmp_path: Path,
) -> None:
    log = Log(tmp_path)
    assert log.before("first") == 0
    log.open(log.before("first"))
    log.write(line(1, "first"))
    log.close()
    size = log.path.stat().st_size
    for _ in range(2):
        assert log.before("second") == size
        log.open(log.before("second"))
        log.write(line(1, "second"))
        log.close()
    assert lines(log.path) == [line(1, "first"), line(1, "second")]
    assert log.before("first") == 0
    assert log.before("third") == log.path.stat().st_size
    for junk in (b"[]\n", b"null\n", b'{"step": 1}\n', b"\xff\n", b'{"stage": "first"'):
        whole = log.path.read_bytes()
        log.path.write_bytes(whole + junk)
        assert log.before("third") == len(whole)
        log.path.write_bytes(whole)


def test_a_log_that_is_off_touches_nothing(tmp_path: Path) -> None:
    log = Log(tmp_path / "none", enabled=False)
    log.open(0)
    log.write(line(1))
    assert log.size() == 0
    log.close()
    assert not (tmp_path / "none").exists()


@pytest.mark.usefixtures("bare")
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_is_told_with_the_path_and_stays_the_reason(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.open(0)
    assert log.file is not None
    log.file.close()
    log.file = open("/dev/full", "w")  # noqa: SIM115
    with pytest.raises(Failed, match=r"log\.jsonl cannot be written: No space left on device"):
        log.write(line(1))
    log.close()  # what could not be written then cannot be written now, which is no news


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Failed, match=r"file/run/log\.jsonl cannot be written"):
        Log(tmp_path / "file" / "run").open(0)


# --- TensorBoard


def charted(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard itself reads from a folder."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_tensorboard_shows_the_same_numbers_and_no_lost_steps(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    log = Log(tmp_path)
    log.open(0)
    for step in (1, 2, 3):
        log.write(line(step))
    log.write({"stage": "train", "step": 3, "split": "val", "measures": {"score": 0.5}})
    log.close()
    assert log.board is None
    folder = tmp_path / "tensorboard" / "train"
    expected = [(step, pytest.approx(step / 3)) for step in (1, 2, 3)]
    assert charted(folder) == {"train/task": expected, "val/score": [(3, 0.5)]}
    again = Log(tmp_path)  # resumed after step 1: what was charted later is not shown twice
    again.open(0)
    again.write(line(2))
    again.close()
    assert charted(folder)["train/task"] == expected[:2]


@pytest.mark.usefixtures("bare")
def test_without_tensorboard_the_log_is_the_same(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.open(0)
    log.write(line(1))
    assert log.board is False
    log.write(line(2))
    log.close()
    assert lines(log.path) == [line(1), line(2)]
    assert not (tmp_path / "tensorboard").exists()


# --- people


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that a test sets: `clock[0] = 5.0`."""
    now = [100.0]
    monkeypatch.setattr(report.time, "monotonic", lambda: now[0])
    return now


def test_elsewhere_plain_lines_come_now_and_then(
    capsys: pytest.CaptureFixture[str], clock: list[float]
) -> None:
    reporter = Reporter(every=10.0)
    with reporter.stage("train", steps=100, done=20):
        for step in range(21, 41):
            clock[0] += 1
            reporter.step(step, {"task": 0.25})
        reporter.measured(1, {"accuracy": 0.5})
    err = capsys.readouterr().err.splitlines()
    assert err == [
        "train: step 30/100, 1.0 steps/s, 70 s left, task 0.250",
        "train: step 40/100, 1.0 steps/s, 60 s left, task 0.250",
        "train: after epoch 1: accuracy 0.500",
    ]


def test_a_terminal_shows_a_bar_that_goes_away(
    monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    reporter = Reporter()
    with reporter.stage("train", steps=10, done=2):
        clock[0] += 2
        reporter.step(6, {"task": 0.125})
        reporter.bar.refresh()
        reporter.say("checkpoint [red]/tmp/a[0][/red] was passed over")
    text = terminal.getvalue()
    assert "train" in text and "6/10" in text and "2.0 steps/s  task 0.125" in text
    assert "checkpoint [red]/tmp/a[0][/red] was passed over" in text  # a path is no markup
    assert reporter.bar is None
    reporter.say("after")
    assert terminal.getvalue().endswith("after\n")


def test_the_bar_goes_away_when_the_stage_breaks_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    reporter = Reporter()
    with pytest.raises(ZeroDivisionError), reporter.stage("train", steps=10, done=0):
        raise ZeroDivisionError
    assert reporter.bar is None


def test_a_reporter_that_is_off_says_nothing(
    monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    reporter = Reporter(enabled=False, every=0.0)
    with reporter.stage("train", steps=10, done=0):
        clock[0] += 60
        reporter.step(1, {"task": 1.0})
        reporter.measured(1, {"accuracy": 1.0})
        reporter.say("hello")
    assert terminal.getvalue() == ""
