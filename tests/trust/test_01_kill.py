"""SIGKILL at 50 random moments of a run: checkpoints stay readable, the result is the same."""

import random
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from overt import io
from overt.train import checkpoint
from tests.trust import child_process, naive

RNG = random.Random(0)
Readable = Callable[[Path], bool]


def kill_repeatedly(out: Path, train: Callable[[], object], readable: Readable, count: int) -> int:
    """Kill a run at `count` random moments; return how often its newest checkpoint is unreadable.

    A third of the kills comes within milliseconds of the start, a third when a new file appears
    beside the checkpoints, that is during a save, a third some time after it. A run that finishes
    before the kill is started again.
    """
    kills = unreadable = 0
    while kills < count:
        before = checkpoint_names(out)
        child = child_process.fork(train)
        moment = RNG.randrange(3)
        if moment:
            child_process.wait_for(
                lambda before=before: bool(checkpoint_names(out) - before), child
            )
        time.sleep(RNG.uniform(0, (0.03, 0.003, 0.05)[moment]))
        if not child_process.kill(child):
            shutil.rmtree(out)
            continue
        kills += 1
        if child_process.checkpoint_folders(out) and not readable(out):
            unreadable += 1
            shutil.rmtree(child_process.checkpoint_folders(out)[-1])  # as a user would do to resume
    return unreadable


def checkpoint_names(out: Path) -> set[str]:
    parent = out / "checkpoints" / "train"
    return {path.name for path in parent.iterdir()} if parent.is_dir() else set()


def ours_is_readable(out: Path) -> bool:
    """Every checkpoint passes `verify`, and the newest loads."""
    found, broken = io.newest(out / "checkpoints" / "train", checkpoint.PREFIX)
    if found is None or broken:
        return False
    net, sets = child_process.make()
    state = checkpoint.load(found, net, {name: one.optimizer for name, one in sets.items()})
    return found.name == f"step-{state.step:09d}"


def naive_is_readable(out: Path) -> bool:
    try:
        naive.read(child_process.checkpoint_folders(out)[-1])
    except Exception:
        return False
    return True


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 2])
def test_a_killed_run_resumes_to_the_same_bytes(tmp_path, record_result, full, workers) -> None:
    config, count = replace(child_process.CONFIG, workers=workers), 50 if full else 8
    uninterrupted, killed = tmp_path / "whole", tmp_path / "killed"
    assert (
        child_process.exit_code(
            child_process.fork(lambda: child_process.train(uninterrupted, config))
        )
        == 0
    )
    unreadable = kill_repeatedly(
        killed, lambda: child_process.train(killed, config), ours_is_readable, count
    )
    assert (
        child_process.exit_code(child_process.fork(lambda: child_process.train(killed, config)))
        == 0
    )
    assert unreadable == 0
    found, expected = child_process.fingerprint(killed), child_process.fingerprint(uninterrupted)
    assert found == expected and len(expected) == 7
    assert child_process.temporary_files(killed) == []
    record_result(
        1,
        "50 SIGKILLs: 0 unreadable; weights, optimizers and log end in the same SHA-256",
        f"{count} SIGKILLs: {unreadable} unreadable; all same",
    )


@pytest.mark.long
def test_a_naive_saver_leaves_unreadable_checkpoints(tmp_path, record_result, full) -> None:
    def train() -> None:
        naive.patch_checkpoints()
        child_process.train(tmp_path, buffer_size=10**7)

    unreadable = kills = 0
    while not unreadable or (full and kills < 50):
        unreadable += kill_repeatedly(tmp_path, train, naive_is_readable, 1)
        kills += 1
        assert kills <= 200
    record_result(1, "must fail", "fails", f"{kills} SIGKILLs: {unreadable} unreadable")
