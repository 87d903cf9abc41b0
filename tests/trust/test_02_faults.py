"""Faults inside a save: at every call of the system the previous checkpoint stays loadable."""

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

from overt import files
from overt.errors import Failed
from overt.train import checkpoint
from overt.train.checkpoint import State
from tests.train import toys
from tests.trust import lives, naive

# writing by Python and by safetensors, flushing, renaming, pruning
CALLS = [
    (os, "mkdir"), (io, "open"), (builtins, "open"), (os, "open"), (safetensors, "serialize_file"),
    (os, "fsync"), (os, "replace"), (os, "chmod"), (shutil, "rmtree"), (os, "unlink"),
]  # fmt: skip


class Saved:
    """A small run that has saved twice and is about to save, and prune, a third time."""

    def __init__(self, parent: Path, save) -> None:
        self.parent, self.before, self.save = parent / "now", parent / "before", save
        self.net, sets = toys.make()
        self.optimizers = {name: one.optimizer for name, one in sets.items()}
        for step in (1, 2):
            save(self.before, State("train", 0, step), self.net, self.optimizers)

    def again(self) -> None:
        shutil.rmtree(self.parent, ignore_errors=True)
        shutil.copytree(self.before, self.parent)

    def third(self) -> None:
        self.save(self.parent, State("train", 0, 3), self.net, self.optimizers)

    def newest(self) -> int:
        """The step that a resume takes up; 0 where there is none."""
        found, _ = files.newest(self.parent, checkpoint.PREFIX)
        if found is None:
            return 0
        net, sets = toys.make(seed=1)
        state = checkpoint.load(found, net, {n: one.optimizer for n, one in sets.items()})
        assert lives.weights(net) == lives.weights(self.net)
        return state.step

    def naive_newest(self) -> int:
        """The same without a look at any manifest: the last by name."""
        try:
            return naive.read(naive.by_name(self.parent)[-1])["state"]["step"]
        except Exception:
            return 0


def counted(patch: pytest.MonkeyPatch, module, call: str, work: Callable[[], object]) -> int:
    """How often `work` makes a call."""
    true, made = getattr(module, call), []
    with patch.context() as inner:
        inner.setattr(module, call, lambda *a, **k: made.append(a) or true(*a, **k))
        work()
    return len(made)


def break_at(patch: pytest.MonkeyPatch, module, call: str, number: int, act) -> None:
    """Let the `number`-th call do `act` first."""
    true, made = getattr(module, call), [0]

    def broken(*arguments, **options):
        made[0] += 1
        if made[0] == number:
            act()
        return true(*arguments, **options)

    patch.setattr(module, call, broken)


def no_space() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def each_point(run: Saved, patch: pytest.MonkeyPatch, newest):
    """Each call of a save, broken and deadly: (kind, call, what a resume then takes up)."""
    for module, call in CALLS:
        run.again()
        for number in range(1, counted(patch, module, call, run.third) + 1):
            run.again()
            with patch.context() as inner:
                break_at(inner, module, call, number, no_space)
                with suppress(Failed, OSError):
                    run.third()
            yield "error", call, newest()
            run.again()

            def die(number=number, module=module, call=call) -> None:
                break_at(pytest.MonkeyPatch(), module, call, number, lambda: os._exit(9))
                run.third()

            assert lives.outcome(lives.forked(die)) == 9
            yield "death", call, newest()


@pytest.mark.long
def test_at_every_fault_inside_a_save_a_checkpoint_stays(tmp_path, monkeypatch, reached) -> None:
    run = Saved(tmp_path / "ours", checkpoint.save)
    found = list(each_point(run, monkeypatch, run.newest))
    assert all(step in (2, 3) for _, _, step in found), found
    calls = {call for _, call, _ in found}
    assert {"open", "serialize_file", "fsync", "replace", "rmtree"} <= calls
    assert len(found) >= 60
    files.sweep(run.parent)
    assert lives.leftovers(tmp_path) == []

    theirs = Saved(tmp_path / "naive", naive.save)
    lost = [step for *_, step in each_point(theirs, monkeypatch, theirs.naive_newest)]
    assert lost.count(0) > 0
    reached(
        2,
        "at >= 6 fault points the previous checkpoint stays loadable",
        f"loadable at {len(found)} of {len(found)} points of {len(calls)} calls, "
        "an error and a death at each",
        f"lost at {lost.count(0)} of {len(lost)}",
    )
