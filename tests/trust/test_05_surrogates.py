"""Surrogate generation killed at 20 random points: it resumes to the same bytes."""

import hashlib
import json
import random
import shutil
import time
from collections import Counter
from pathlib import Path

import pytest

from overt import io
from overt.targets.surrogate.generate import generate_surrogates
from overt.targets.surrogate.masks import GridMasks, RemoveWords
from tests.targets.surrogate.toys import Planted, Toys
from tests.trust import child_process

ITEMS, KILLS = 60, 20


class LoggedItems(Toys):
    """Items that log their requested indices to a file."""

    def __init__(self, log: Path) -> None:
        super().__init__(ITEMS)
        self.log = log

    def batch(self, indices):
        line = "".join(f"{index}\n" for index in indices)
        with open(self.log, "a") as file:  # one short line is written in one call
            file.write(line)
        return super().batch(indices)


def generate(out: Path, log: Path) -> None:
    masks = [GridMasks(20, 2), RemoveWords()]
    generate_surrogates(
        Planted(), LoggedItems(log), out, masks=masks, shard=4, batch=2, weights="planted"
    )


def naive_generate(out: Path, log: Path) -> None:
    """Write all results again in place after each item."""
    out.mkdir(exist_ok=True)
    path, data, model = out / "surrogates.json", LoggedItems(log), Planted()
    found = json.loads(path.read_text()) if path.exists() else {}
    for index in range(len(found), ITEMS):
        maps = model(data.batch([index])).attention[0].weights
        found[str(index)] = maps.flatten().tolist()
        with open(path, "w") as file:
            json.dump(found, file)


def tree(out: Path) -> dict[str, str]:
    return {
        str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(out.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def finished(out: Path) -> set[int]:
    """Return the items of the finished shards."""
    descriptions = [io.read_json(shard / "shard.json") for shard in out.glob("shard-*")]
    return {
        item
        for description in descriptions
        for item in range(description["start"], description["stop"])
    }


def kill_repeatedly(generate, out: Path, log: Path, check) -> None:
    """Kill the generation 20 times at random points: after some items and some milliseconds.

    `check` gets the items that were finished before a process and those requested in it.
    """
    rng, kills = random.Random(0), 0
    while kills < KILLS:
        before, items = finished(out), rng.randrange(1, 30)
        log.write_text("")
        child = child_process.fork(lambda: generate(out, log))
        child_process.wait_for(lambda items=items: log.read_text().count("\n") >= items, child)
        time.sleep(rng.uniform(0, 0.01))
        if child_process.kill(child):
            kills += 1
            check(before, {int(line) for line in log.read_text().split()})
        else:  # finished before the kill: start again
            shutil.rmtree(out)


@pytest.mark.long
def test_killed_surrogate_generation_resumes_to_the_same_bytes(tmp_path, record_result) -> None:
    uninterrupted, out, log = tmp_path / "whole", tmp_path / "out", tmp_path / "requests"
    twice: list[int] = []

    def check(before: set[int], requested: set[int]) -> None:
        twice.extend(before & requested)
        for shard in out.glob("shard-*"):
            io.verify(shard)

    generate(uninterrupted, tmp_path / "once")
    kill_repeatedly(generate, out, log, check)
    generate(out, log)
    shards = [io.read_json(shard / "shard.json") for shard in out.glob("shard-*")]
    samples = Counter(name for description in shards for name in description["ids"])
    assert tree(out) == tree(uninterrupted)
    assert twice == [] and set(samples.values()) == {1} and child_process.temporary_files(out) == []

    naive, corrupt = tmp_path / "naive", []

    def check_naive(before: set[int], requested: set[int]) -> None:
        path = naive / "surrogates.json"
        corrupt.append(path.exists() and not is_json(path))
        if corrupt[-1]:
            path.unlink()

    while not any(corrupt):
        kill_repeatedly(naive_generate, naive, log, check_naive)
    record_result(
        5,
        "20 kills: resumes, output byte-identical, no sample computed twice",
        f"{KILLS} kills: {len(tree(out))} of {len(tree(out))} files the same, "
        f"{len(twice)} finished samples requested again",
        f"all results are lost after {sum(corrupt)} of {len(corrupt)} kills",
    )


def is_json(path: Path) -> bool:
    try:
        json.loads(path.read_text())
    except ValueError:
        return False
    return True
