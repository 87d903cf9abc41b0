"""Surrogate generation that is killed at 20 random points resumes, byte for byte, none twice."""

import hashlib
import json
import random
import shutil
import time
from collections import Counter
from pathlib import Path

import pytest

from overt import files
from overt.supervise.surrogate.making import surrogates
from overt.supervise.surrogate.masks import Grids, WithoutWords
from tests.supervise.surrogate.toys import Planted, Toys
from tests.trust import lives

ITEMS, KILLS = 60, 20


class Told(Toys):
    """Items that write down, past any death, which of them were asked for."""

    def __init__(self, told: Path) -> None:
        super().__init__(ITEMS)
        self.told = told

    def batch(self, indices):
        line = "".join(f"{index}\n" for index in indices)
        with open(self.told, "a") as file:  # one short line is written in one call
            file.write(line)
        return super().batch(indices)


def make(out: Path, told: Path) -> None:
    masks = [Grids(20, 2), WithoutWords()]
    surrogates(Planted(), Told(told), out, masks=masks, shard=4, batch=2, weights="planted")


def naive_make(out: Path, told: Path) -> None:
    """All that was found so far is written after each item, where it belongs."""
    out.mkdir(exist_ok=True)
    path, data, model = out / "surrogates.json", Told(told), Planted()
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
    """The items of the shards that are done."""
    abouts = [files.read_json(shard / "shard.json") for shard in out.glob("shard-*")]
    return {item for about in abouts for item in range(about["start"], about["stop"])}


def end_lives(make, out: Path, told: Path, check) -> None:
    """End the making 20 times at random points: after some items, and some milliseconds.

    `check` hears what was done before a life and what was asked for in it.
    """
    chance, kills = random.Random(0), 0
    while kills < KILLS:
        before, items = finished(out), chance.randrange(1, 30)
        told.write_text("")
        child = lives.forked(lambda: make(out, told))
        lives.wait_for(lambda items=items: told.read_text().count("\n") >= items, child)
        time.sleep(chance.uniform(0, 0.01))
        if lives.kill(child):
            kills += 1
            check(before, {int(line) for line in told.read_text().split()})
        else:  # done before its time: begin anew
            shutil.rmtree(out)


@pytest.mark.long
def test_surrogates_whose_making_is_killed_end_in_the_same_bytes(tmp_path, reached) -> None:
    whole, out, told = tmp_path / "whole", tmp_path / "out", tmp_path / "told"
    twice: list[int] = []

    def check(before: set[int], asked: set[int]) -> None:
        twice.extend(before & asked)
        for shard in out.glob("shard-*"):
            files.verify(shard)

    make(whole, tmp_path / "once")
    end_lives(make, out, told, check)
    make(out, told)
    shards = [files.read_json(shard / "shard.json") for shard in out.glob("shard-*")]
    samples = Counter(name for about in shards for name in about["ids"])
    assert tree(out) == tree(whole)
    assert twice == [] and set(samples.values()) == {1} and lives.leftovers(out) == []

    naive, torn = tmp_path / "naive", []

    def check_naive(before: set[int], asked: set[int]) -> None:
        path = naive / "surrogates.json"
        torn.append(path.exists() and not is_json(path))
        if torn[-1]:
            path.unlink()

    while not any(torn):
        end_lives(naive_make, naive, told, check_naive)
    reached(
        5,
        "20 kills: resumes, output byte-identical, no sample done twice",
        f"{KILLS} kills: {len(tree(out))} of {len(tree(out))} files the same, "
        f"{len(twice)} finished samples asked for again",
        f"all that was found is lost after {sum(torn)} of {len(torn)} kills",
    )


def is_json(path: Path) -> bool:
    try:
        json.loads(path.read_text())
    except ValueError:
        return False
    return True
