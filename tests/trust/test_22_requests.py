"""Trust 22: requests to the inspector leave memory, files, threads and tensors as they were."""

import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from overt.serve.app import make
from overt.serve.line import Line
from overt.serve.shelf import Shelf, offer
from tests.serve import conftest, soaking
from tests.serve.running import LONG, served

KIB = 2**10
WARM, FEW, ROUND = 100, 100, 500  # requests
HOUR = 3600.0  # seconds
LEAKS = 32 * KIB  # bytes a request: a few hundred requests tell no less from what a heap breathes
Message = MutableMapping[str, Any]


class Keeping:
    """The usual way to leak: a server that keeps a picture of each request, without a bound."""

    def __init__(self, app: Any) -> None:
        self.app, self.kept = app, []

    async def __call__(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        self.kept.append(conftest.PHOTO.repeat(12, axis=0).repeat(12, axis=1))  # a megabyte
        await self.app(scope, receive, send)


def body(**changes: Any) -> dict[str, Any]:
    """A question about a toy network."""
    return {"picture": conftest.encoded(), "text": "what colour is the ball", **changes}


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    """Models of each kind that is asked in its own way."""
    conftest.write_run(tmp_path / "average", attends=False)
    conftest.write_run(tmp_path / "soft")
    conftest.write_hard(tmp_path / "hard")
    return Shelf(offer([str(tmp_path)]))


@pytest.mark.long
def test_requests_leave_nothing_behind(shelf: Shelf, reached, full: bool) -> None:
    """Twice 500 requests of four clients; in the full form those of an hour.

    Over an hour memory may grow by a kilobyte a request, as it may by a step of training.
    """
    questions = soaking.mixed(shelf.names, body)
    app = make(shelf, line=Line(patience=LONG))
    with served(app) as address:
        soaking.ask(address, questions, lambda count: count >= WARM)
        soaking.once(address, "/api/health")
        idle = soaking.holding()
        most = replace(idle, files=idle.files + 2, threads=idle.threads + 2)
        soaking.ask(address, questions, lambda count: count >= ROUND)
        middle, count, began = soaking.settled(most), 0, time.monotonic()
        while count < ROUND or (full and time.monotonic() - began < HOUR):
            count += soaking.ask(address, questions, lambda count: count >= ROUND)
        last = soaking.settled(most)
    assert last.files <= most.files and last.threads <= most.threads
    assert last.tensors <= most.tensors + 50  # one a request would be hundreds
    grown = (last.memory - middle.memory) / count
    mark = KIB if full else LEAKS
    assert grown < mark

    with served(Keeping(make(shelf, line=Line(patience=LONG)))) as address:
        before = soaking.holding()
        soaking.ask(address, questions, lambda count: count >= FEW)
        leaked = (soaking.holding().memory - before.memory) / FEW
    assert leaked > LEAKS  # so that the mark can be missed
    reached(
        22,
        f"{'an hour of' if full else ROUND} requests to the inspector: memory grows by less than "
        f"{mark // KIB} KB a request, files, threads and tensors constant",
        f"{count:,} requests: {max(grown, 0) / KIB:.2f} KB a request, files, threads and tensors "
        "constant",
        f"pictures that are kept: {leaked / KIB:.0f} KB a request",
    )
