"""SIGKILL at 50 random moments of one run: nothing unreadable, and the end is the same."""

import random
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from overt import files
from overt.train import checkpoint
from tests.trust import lives, naive

CHANCE = random.Random(0)
Readable = Callable[[Path], bool]


def end_lives(out: Path, live: Callable[[], object], readable: Readable, count: int) -> int:
    """Kill a run at `count` random moments; how often its newest checkpoint cannot be read.

    A third of the lives ends within milliseconds of their start, a third as soon as something new
    appears beside the checkpoints, and so in the midst of a save, a third some time after it. A run
    that ends before its time, on a machine that is busy, begins again.
    """
    kills = unreadable = 0
    while kills < count:
        before = names(out)
        child = lives.forked(live)
        kind = CHANCE.randrange(3)
        if kind:
            lives.wait_for(lambda before=before: bool(names(out) - before), child)
        time.sleep(CHANCE.uniform(0, (0.03, 0.003, 0.05)[kind]))
        if not lives.kill(child):
            shutil.rmtree(out)
            continue
        kills += 1
        if lives.saved(out) and not readable(out):
            unreadable += 1
            shutil.rmtree(lives.saved(out)[-1])  # as a user would, to go on at all
    return unreadable


def names(out: Path) -> set[str]:
    parent = out / "checkpoints" / "train"
    return {path.name for path in parent.iterdir()} if parent.is_dir() else set()


def ours_is_readable(out: Path) -> bool:
    """Every checkpoint there is passes `verify`, and the newest loads."""
    found, broken = files.newest(out / "checkpoints" / "train", checkpoint.PREFIX)
    if found is None or broken:
        return False
    net, sets = lives.make()
    state = checkpoint.load(found, net, {name: one.optimizer for name, one in sets.items()})
    return found.name == f"step-{state.step:09d}"


def naive_is_readable(out: Path) -> bool:
    try:
        naive.read(lives.saved(out)[-1])
    except Exception:
        return False
    return True


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_that_is_killed_ends_in_the_same_bytes(tmp_path, reached, full, workers) -> None:
    limits, count = replace(lives.LIMITS, workers=workers), 50 if full else 8
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert lives.outcome(lives.forked(lambda: lives.live(whole, limits))) == 0
    unreadable = end_lives(killed, lambda: lives.live(killed, limits), ours_is_readable, count)
    assert lives.outcome(lives.forked(lambda: lives.live(killed, limits))) == 0
    assert unreadable == 0
    same, wanted = lives.fingerprint(killed), lives.fingerprint(whole)
    assert same == wanted and len(wanted) == 7
    assert lives.leftovers(killed) == []
    reached(
        1,
        "50 SIGKILLs: 0 unreadable; weights, optimizers and log end in the same SHA-256",
        f"{count} SIGKILLs: {unreadable} unreadable; all same",
    )


@pytest.mark.long
def test_a_naive_saver_leaves_checkpoints_that_cannot_be_read(tmp_path, reached, full) -> None:
    def live() -> None:
        naive.take_over()
        lives.live(tmp_path, ballast=10**7)

    unreadable = kills = 0
    while not unreadable or (full and kills < 50):
        unreadable += end_lives(tmp_path, live, naive_is_readable, 1)
        kills += 1
        assert kills <= 200
    reached(1, "must fail", "fails", f"{kills} SIGKILLs: {unreadable} unreadable")
