"""SIGTERM and SIGINT: saved within the step, exit 143 or 130; a second SIGINT ends at once."""

import os
import signal
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest

from overt import cli, files
from overt.recipes import running
from overt.train import loop
from overt.train.report import Reporter
from tests.trust import lives

SETS = ["data.limit=24", "model.width=0.25", "train.epochs=1", "train.batch=4", "train.steps=6"]
AT = 3  # the step in which the signal comes


def run(out: Path, *signals: int, naive: bool = False) -> int:
    """`overt run`, which gets these signals in the forward pass after step 3."""
    patch, forward = pytest.MonkeyPatch(), loop._Run.forward

    def signalled(self, part, micro):
        if self.state.step == AT:
            for number in signals:
                os.kill(os.getpid(), number)
        return forward(self, part, micro)

    patch.setattr(loop._Run, "forward", signalled)
    if naive:  # a program that has never heard of signals
        patch.setattr(loop._Run, "signals", lambda self: nullcontext())
        patch.setattr(running, "ending", nullcontext)
    words = ["run", "scenes-soft", "--out", str(out), "--device", "cpu"]
    words += [word for one in SETS for word in ("--set", one)]
    return cli.main(words)


def checkpoints(out: Path) -> list[str]:
    return [path.name for path in lives.saved(out)]


@pytest.mark.long
def test_signals_save_within_the_step_and_a_second_one_does_not_wait(tmp_path, reached) -> None:
    patch = pytest.MonkeyPatch()
    patch.setattr(Reporter, "say", lambda self, text: None)
    codes = {}
    for name, numbers in {
        "SIGTERM": [signal.SIGTERM],
        "SIGINT": [signal.SIGINT],
        "SIGINT twice": [signal.SIGINT, signal.SIGINT],
    }.items():
        out = tmp_path / name
        codes[name] = lives.outcome(lives.forked(partial(run, out, *numbers)))
        waited = "twice" not in name
        assert checkpoints(out) == ([f"step-{AT + 1:09d}"] if waited else [])
        assert files.read_json(out / "results.json")["status"] == "stopped"
        assert lives.leftovers(out) == []
    patch.undo()
    assert codes == {"SIGTERM": 143, "SIGINT": 130, "SIGINT twice": 130}
    naive = lives.outcome(lives.forked(lambda: run(tmp_path / "naive", signal.SIGTERM, naive=True)))
    assert naive == -signal.SIGTERM and checkpoints(tmp_path / "naive") == []
    reached(
        3,
        "saved and exit 143 / 130 within a step; a second SIGINT ends at once",
        f"saved after the step itself, exit {codes['SIGTERM']} / {codes['SIGINT']}; "
        "the second within the step, nothing saved",
        f"exit {naive}, all {AT} steps lost",
    )
