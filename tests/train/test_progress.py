"""Training log, TensorBoard events, and progress output on a terminal or in a file."""

import builtins
import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from overt.errors import RunError
from overt.train import progress
from overt.train.progress import Reporter, TrainLog


def line(step: int, stage: str = "train", **more: Any) -> dict[str, Any]:
    return {"stage": stage, "step": step, "split": "train", "losses": {"task": step / 3}, **more}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


@pytest.fixture
def no_tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without TensorBoard."""
    real = builtins.__import__

    def failing_import(name: str, *rest: Any) -> Any:
        if "tensorboard" in name:
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", failing_import)


# --- the log


@pytest.mark.usefixtures("no_tensorboard")
def test_log_lines_are_written_at_once_and_read_back_exactly(tmp_path: Path) -> None:
    log = TrainLog(tmp_path / "deep" / "run")
    log.open(0)
    log.write(line(1))
    assert lines(log.path) == [line(1)]
    log.write(line(2, measures={"é": 0.1 + 0.2}))
    assert log.size() == len(log.path.read_bytes())
    log.close()
    log.close()
    assert lines(log.path) == [line(1), line(2, measures={"é": 0.1 + 0.2})]
    assert sorted(path.name for path in log.path.parent.iterdir()) == ["log.jsonl"]


@pytest.mark.usefixtures("no_tensorboard")
def test_log_lines_after_the_last_checkpoint_are_cut_off(tmp_path: Path) -> None:
    log = TrainLog(tmp_path)
    log.open(0)
    log.write(line(1))
    size = log.size()
    content = log.path.read_bytes()
    log.write(line(2))
    log.close()
    with log.path.open("ab") as file:
        file.write(b'{"stage": "tr')  # killed in the middle of a line
    again = TrainLog(tmp_path)
    again.open(size)
    assert again.path.read_bytes() == content
    again.write(line(2))
    again.close()
    assert lines(log.path) == [line(1), line(2)]
    TrainLog(tmp_path).open(10**9)  # a log that is shorter than expected does not grow
    assert lines(log.path) == [line(1), line(2)]


@pytest.mark.usefixtures("no_tensorboard")
def test_a_stage_appends_to_the_log_and_drops_its_earlier_attempt(
    tmp_path: Path,
) -> None:
    log = TrainLog(tmp_path)
    assert log.size_before("first") == 0
    log.open(log.size_before("first"))
    log.write(line(1, "first"))
    log.close()
    size = log.path.stat().st_size
    for _ in range(2):
        assert log.size_before("second") == size
        log.open(log.size_before("second"))
        log.write(line(1, "second"))
        log.close()
    assert lines(log.path) == [line(1, "first"), line(1, "second")]
    assert log.size_before("first") == 0
    assert log.size_before("third") == log.path.stat().st_size
    for invalid in (b"[]\n", b"null\n", b'{"step": 1}\n', b"\xff\n", b'{"stage": "first"'):
        content = log.path.read_bytes()
        log.path.write_bytes(content + invalid)
        assert log.size_before("third") == len(content)
        log.path.write_bytes(content)


def test_a_disabled_log_writes_nothing(tmp_path: Path) -> None:
    log = TrainLog(tmp_path / "none", enabled=False)
    log.open(0)
    log.write(line(1))
    assert log.size() == 0
    log.close()
    assert not (tmp_path / "none").exists()


@pytest.mark.usefixtures("no_tensorboard")
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_raises_with_the_path_and_close_does_not_raise(tmp_path: Path) -> None:
    log = TrainLog(tmp_path)
    log.open(0)
    assert log.file is not None
    log.file.close()
    log.file = open("/dev/full", "w")  # noqa: SIM115
    with pytest.raises(RunError, match=r"log.jsonl.*No space"):
        log.write(line(1))
    log.close()  # closing tries to write the same line again and does not raise


def test_a_folder_that_cannot_be_created_raises_with_the_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"log\.jsonl"):
        TrainLog(tmp_path / "file" / "run").open(0)


# --- TensorBoard


def read_scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Read the scalars in a folder with TensorBoard."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_tensorboard_has_the_logged_values_and_purges_later_steps_on_resume(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    log = TrainLog(tmp_path)
    log.open(0)
    for step in (1, 2, 3):
        log.write(line(step))
    log.write({"stage": "train", "step": 3, "split": "val", "measures": {"score": 0.5}})
    log.close()
    assert log.board is None
    folder = tmp_path / "tensorboard" / "train"
    expected = [(step, pytest.approx(step / 3)) for step in (1, 2, 3)]
    assert read_scalars(folder) == {"train/task": expected, "val/score": [(3, 0.5)]}
    again = TrainLog(tmp_path)  # resumed after step 1: later events are purged
    again.open(0)
    again.write(line(2))
    again.close()
    assert read_scalars(folder)["train/task"] == expected[:2]


@pytest.mark.usefixtures("no_tensorboard")
def test_without_tensorboard_the_log_is_the_same(tmp_path: Path) -> None:
    log = TrainLog(tmp_path)
    log.open(0)
    log.write(line(1))
    assert log.board is False
    log.write(line(2))
    log.close()
    assert lines(log.path) == [line(1), line(2)]
    assert not (tmp_path / "tensorboard").exists()


# --- terminal and plain output


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A fake clock: `clock[0] = 5.0` sets the time."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_without_a_terminal_plain_lines_are_printed_at_intervals(
    capsys: pytest.CaptureFixture[str], clock: list[float]
) -> None:
    reporter = Reporter(every=10.0)
    with reporter.stage("train", steps=100, done=20):
        for step in range(21, 41):
            clock[0] += 1
            reporter.step(step, {"task": 0.25})
        reporter.validated(1, {"accuracy": 0.5})
    err = capsys.readouterr().err.splitlines()
    assert err == [
        "train: step 30/100, 1.0 steps/s, 70 s left, task 0.250",
        "train: step 40/100, 1.0 steps/s, 60 s left, task 0.250",
        "train: after epoch 1: accuracy 0.500",
    ]


def test_a_terminal_shows_a_progress_bar_and_removes_it(
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
    assert "checkpoint [red]/tmp/a[0][/red] was passed over" in text  # a path is not markup
    assert reporter.bar is None
    reporter.say("after")
    assert terminal.getvalue().endswith("after\n")


def test_the_progress_bar_is_removed_when_the_stage_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    reporter = Reporter()
    with pytest.raises(ZeroDivisionError), reporter.stage("train", steps=10, done=0):
        raise ZeroDivisionError
    assert reporter.bar is None


def test_a_disabled_reporter_prints_nothing(
    monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    reporter = Reporter(enabled=False, every=0.0)
    with reporter.stage("train", steps=10, done=0):
        clock[0] += 60
        reporter.step(1, {"task": 1.0})
        reporter.validated(1, {"accuracy": 1.0})
        reporter.say("hello")
    assert terminal.getvalue() == ""


CHILD = """
import sys
from pathlib import Path
from overt.train.progress import Reporter
reporter = Reporter(every=0.0)
with reporter.stage("fit", 200, 0):
    for step in range(200):
        reporter.step(step, {"loss": 1.0})
    reporter.validated(1, {"accuracy": 0.5})
reporter.say("saved")
Path(sys.argv[1]).write_text("done")
"""


@pytest.mark.long
@pytest.mark.parametrize("redirection", ["| head -1", "2>/dev/full", "2>&-", "2>&1 | true"])
def test_a_lost_stderr_does_not_end_a_run(tmp_path: Path, redirection: str) -> None:
    (tmp_path / "child.py").write_text(CHILD)
    command = f'"{sys.executable}" "{tmp_path}/child.py" "{tmp_path}/end"'
    command += f" 2>&1 {redirection}" if redirection.startswith("|") else f" {redirection}"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(progress.__file__).parents[2])},
    )
    assert (tmp_path / "end").read_text() == "done", done.stderr
    assert done.returncode == 0 and "Traceback" not in done.stderr


class ClosedTerminal(io.StringIO):
    """A closed terminal."""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


def test_a_closed_terminal_does_not_end_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", ClosedTerminal())
    monkeypatch.setenv("TERM", "xterm")
    reporter = Reporter(every=0.0)
    with reporter.stage("fit", 3, 0):
        for step in range(3):
            reporter.step(step, {"loss": 1.0})
        reporter.say("still here")
    reporter.say("and here")
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    with reporter.stage("fit", 3, 0):
        reporter.say("here too")
