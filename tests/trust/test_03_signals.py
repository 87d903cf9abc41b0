"""SIGTERM and SIGINT: saved after the step, exit 143 or 130; a second SIGINT stops at once."""

import os
import shlex
import signal
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest

from overt import cli, io
from overt.experiments import runner
from overt.train import loop
from overt.train.progress import Reporter
from tests.trust import child_process

SETS = ["data.limit=24", "model.width=0.25", "train.epochs=1", "train.batch=4", "train.steps=6"]
SIGNAL_STEP = 3  # the step of the signal


def run(out: Path, *signals: int, naive: bool = False) -> int:
    """Run `overt run`, which receives the signals in the forward pass after step 3."""
    patch, forward = pytest.MonkeyPatch(), loop._FitLoop.forward

    def signalled(self, part, micro):
        if self.state.step == SIGNAL_STEP:
            for number in signals:
                os.kill(os.getpid(), number)
        return forward(self, part, micro)

    patch.setattr(loop._FitLoop, "forward", signalled)
    if naive:  # without signal handlers
        patch.setattr(loop._FitLoop, "signals", lambda self: nullcontext())
        patch.setattr(runner, "stop_on_sigterm", nullcontext)
    arguments = ["run", "scenes-soft", "--out", str(out), "--device", "cpu"]
    arguments += [word for one in SETS for word in ("--set", one)]
    return cli.main(arguments)


def checkpoints(out: Path) -> list[str]:
    return [path.name for path in child_process.checkpoint_folders(out)]


@pytest.mark.long
def test_signals_save_after_the_step_and_a_second_one_stops_at_once(
    tmp_path, record_result
) -> None:
    patch = pytest.MonkeyPatch()
    patch.setattr(Reporter, "say", lambda self, text: None)
    codes = {}
    for name, numbers in {
        "SIGTERM": [signal.SIGTERM],
        "SIGINT": [signal.SIGINT],
        "SIGINT twice": [signal.SIGINT, signal.SIGINT],
    }.items():
        out = tmp_path / name
        codes[name] = child_process.exit_code(child_process.fork(partial(run, out, *numbers)))
        saved = "twice" not in name
        assert checkpoints(out) == ([f"step-{SIGNAL_STEP + 1:09d}"] if saved else [])
        assert io.read_json(out / "results.json")["status"] == "stopped"
        assert child_process.temporary_files(out) == []
    patch.undo()
    assert codes == {"SIGTERM": 143, "SIGINT": 130, "SIGINT twice": 130}
    naive = child_process.exit_code(
        child_process.fork(lambda: run(tmp_path / "naive", signal.SIGTERM, naive=True))
    )
    assert naive == -signal.SIGTERM and checkpoints(tmp_path / "naive") == []
    record_result(
        3,
        "saved and exit 143 / 130 within one step; a second SIGINT stops at once",
        f"saved after the step, exit {codes['SIGTERM']} / {codes['SIGINT']}; "
        "the second stops within the step without a save",
        f"exit {naive}, all {SIGNAL_STEP} steps lost",
    )


@pytest.mark.long
@pytest.mark.parametrize("redirection", ["2>&1 | head -1", "2>/dev/full", "2>&-"])
def test_a_run_with_a_lost_stderr_finishes(tmp_path: Path, redirection: str) -> None:
    arguments = [
        "-m",
        "overt",
        "run",
        "scenes-soft",
        "--out",
        str(tmp_path / "a"),
        "--device",
        "cpu",
    ]
    arguments += [word for one in SETS for word in ("--set", one)]
    command = f"{shlex.join([sys.executable, *arguments])} {redirection}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert io.read_json(tmp_path / "a" / "results.json")["status"] == "done", done.stdout
    io.verify(tmp_path / "a")
