"""Faults inside a save: at every system call the previous checkpoint stays loadable."""

import builtins
import errno
import io
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import safetensors.torch as safetensors

from overt import io as overt_io
from overt.errors import RunError
from overt.train import checkpoint
from overt.train.checkpoint import TrainState
from tests.train import toys
from tests.trust import child_process, naive

# writing by Python and by safetensors, flushing, renaming, pruning
CALLS = [
    (os, "mkdir"), (io, "open"), (builtins, "open"), (os, "open"), (safetensors, "serialize_file"),
    (os, "fsync"), (os, "replace"), (os, "chmod"), (shutil, "rmtree"), (os, "unlink"),
]  # fmt: skip


class SaveScenario:
    """A small run with two checkpoints, before the save and the pruning of the third."""

    def __init__(self, parent: Path, save) -> None:
        self.parent, self.before, self.save = parent / "now", parent / "before", save
        self.net, sets = toys.make()
        self.optimizers = {name: one.optimizer for name, one in sets.items()}
        for step in (1, 2):
            save(self.before, TrainState("train", 0, step), self.net, self.optimizers)

    def reset(self) -> None:
        shutil.rmtree(self.parent, ignore_errors=True)
        shutil.copytree(self.before, self.parent)

    def save_third(self) -> None:
        self.save(self.parent, TrainState("train", 0, 3), self.net, self.optimizers)

    def newest(self) -> int:
        """Return the step of the checkpoint that a resume loads, or 0."""
        found, _ = overt_io.newest(self.parent, checkpoint.PREFIX)
        if found is None:
            return 0
        net, sets = toys.make(seed=1)
        state = checkpoint.load(found, net, {n: one.optimizer for n, one in sets.items()})
        assert child_process.weights(net) == child_process.weights(self.net)
        return state.step

    def naive_newest(self) -> int:
        """The same without verification: the last by name."""
        try:
            return naive.read(naive.list_by_name(self.parent)[-1])["state"]["step"]
        except Exception:
            return 0


def count_calls(patch: pytest.MonkeyPatch, module, call: str, work: Callable[[], object]) -> int:
    """Count how often `work` makes a call."""
    original, calls = getattr(module, call), []
    with patch.context() as inner:
        inner.setattr(module, call, lambda *a, **k: calls.append(a) or original(*a, **k))
        work()
    return len(calls)


def break_at(patch: pytest.MonkeyPatch, module, call: str, number: int, act) -> None:
    """Run `act` before the `number`-th call."""
    original, calls = getattr(module, call), [0]

    def broken(*arguments, **options):
        calls[0] += 1
        if calls[0] == number:
            act()
        return original(*arguments, **options)

    patch.setattr(module, call, broken)


def no_space() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def inject_faults(run: SaveScenario, patch: pytest.MonkeyPatch, newest):
    """Yield for each call of a save, with an error or an exit: (kind, call, step that loads)."""
    for module, call in CALLS:
        run.reset()
        for number in range(1, count_calls(patch, module, call, run.save_third) + 1):
            run.reset()
            with patch.context() as inner:
                break_at(inner, module, call, number, no_space)
                with suppress(RunError, OSError):
                    run.save_third()
            yield "error", call, newest()
            run.reset()

            def exit_at_call(number=number, module=module, call=call) -> None:
                break_at(pytest.MonkeyPatch(), module, call, number, lambda: os._exit(9))
                run.save_third()

            assert child_process.exit_code(child_process.fork(exit_at_call)) == 9
            yield "death", call, newest()


@pytest.mark.long
def test_a_fault_at_any_call_of_a_save_keeps_a_loadable_checkpoint(
    tmp_path, monkeypatch, record_result
) -> None:
    run = SaveScenario(tmp_path / "ours", checkpoint.save)
    found = list(inject_faults(run, monkeypatch, run.newest))
    assert all(step in (2, 3) for _, _, step in found), found
    calls = {call for _, call, _ in found}
    assert {"open", "serialize_file", "fsync", "replace", "rmtree"} <= calls
    assert len(found) >= 60
    overt_io.remove_stale_temporaries(run.parent)
    assert child_process.temporary_files(tmp_path) == []

    naive_run = SaveScenario(tmp_path / "naive", naive.save)
    lost = [step for *_, step in inject_faults(naive_run, monkeypatch, naive_run.naive_newest)]
    assert lost.count(0) > 0
    record_result(
        2,
        "at >= 6 fault points the previous checkpoint stays loadable",
        f"loadable at {len(found)} of {len(found)} points of {len(calls)} calls, "
        "an error and a death at each",
        f"lost at {lost.count(0)} of {len(lost)}",
    )
