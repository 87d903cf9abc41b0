"""Thousands of requests leave nothing behind: no memory, no open file, no thread, no tensor."""

from dataclasses import replace
from pathlib import Path

import pytest

from overt.serve.app import make
from overt.serve.line import Line
from overt.serve.shelf import Shelf, offer
from tests.serve import soaking
from tests.serve.running import LONG, served

MIB = 2**20
WARM, ROUND = 100, 500  # requests


@pytest.mark.long
def test_what_is_held_does_not_grow_with_requests(demo: Path, kinds: Path, ask) -> None:
    shelf = Shelf(offer([str(demo), str(kinds / "hard")]))
    questions = soaking.mixed(shelf.names, ask)
    with served(make(shelf, line=Line(patience=LONG))) as address:
        soaking.ask(address, questions, lambda count: count >= WARM)
        soaking.once(address, "/api/health")
        idle = soaking.holding()
        first = replace(idle, files=idle.files + 2, threads=idle.threads + 2)
        seen = []
        for _ in range(2):
            assert soaking.ask(address, questions, lambda count: count >= ROUND) == ROUND
            seen.append(soaking.settled(first))
    middle, last = seen
    assert last.files <= first.files and last.threads <= first.threads
    assert last.tensors <= first.tensors + 50  # one a request would be a thousand
    assert last.memory - middle.memory < 16 * MIB  # a leak of 32 KiB a request would show
