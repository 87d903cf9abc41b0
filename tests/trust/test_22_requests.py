"""Trust 22: requests to the inspector do not leak memory, files, threads or tensors."""

import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from overt.inspect.server.app import create_app
from overt.inspect.server.model_cache import ModelCache, find_models
from overt.inspect.server.request_queue import RequestQueue
from tests.inspect.server import conftest, http_load
from tests.inspect.server.live_server import QUEUE_TIMEOUT, live_server

KIB = 2**10
WARM, FEW, ROUND = 100, 100, 500  # requests
ROUNDS = 3
HOUR = 3600.0  # seconds
SHORT_LIMIT = 32 * KIB  # bytes per request: a few hundred requests do not resolve less
Message = MutableMapping[str, Any]


class LeakingApp:
    """A leaking server, which keeps an image per request."""

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
    """Return a request to a toy model."""
    return {"picture": conftest.encode_png(), "text": "what colour is the ball", **changes}


@pytest.fixture
def models(tmp_path: Path) -> ModelCache:
    """Models with each kind of input."""
    conftest.write_run(tmp_path / "average", attends=False)
    conftest.write_run(tmp_path / "soft")
    conftest.write_hard(tmp_path / "hard")
    return ModelCache(find_models([str(tmp_path)]))


@pytest.mark.long
def test_requests_do_not_leak_memory_files_threads_or_tensors(
    models: ModelCache, record_result, full: bool
) -> None:
    """Twice 500 requests of four clients; an hour of requests in the full version.

    Over an hour memory may grow by a kilobyte per request. A leak grows in every round, while the
    allocator may take a large piece once: a short round that exceeds the limit is repeated.
    """
    questions = http_load.mixed_requests(models.names, body)
    app = create_app(models, line=RequestQueue(patience=QUEUE_TIMEOUT))
    with live_server(app) as address:
        http_load.send_requests(address, questions, lambda count: count >= WARM)
        http_load.send_request(address, "/api/health")
        idle = http_load.measure_resources()
        allowed = replace(idle, files=idle.files + 2, threads=idle.threads + 2)
        http_load.send_requests(address, questions, lambda count: count >= ROUND)
        last, limit = http_load.wait_for_resources(allowed), KIB if full else SHORT_LIMIT
        for _ in range(1 if full else ROUNDS):
            middle, count, began = last, 0, time.monotonic()
            while count < ROUND or (full and time.monotonic() - began < HOUR):
                count += http_load.send_requests(address, questions, lambda count: count >= ROUND)
            last = http_load.wait_for_resources(allowed)
            assert last.files <= allowed.files and last.threads <= allowed.threads
            assert last.tensors <= allowed.tensors + 50  # one per request would be hundreds
            growth = (last.memory - middle.memory) / count
            if growth < limit:
                break
    assert growth < limit

    with live_server(
        LeakingApp(create_app(models, line=RequestQueue(patience=QUEUE_TIMEOUT)))
    ) as address:
        before = http_load.measure_resources()
        http_load.send_requests(address, questions, lambda count: count >= FEW)
        leaked = (http_load.measure_resources().memory - before.memory) / FEW
    assert leaked > SHORT_LIMIT  # the threshold detects a leak
    record_result(
        22,
        f"{'an hour of' if full else ROUND} requests to the inspector: memory grows by less than "
        f"{limit // KIB} KB per request, files, threads and tensors constant",
        f"{count:,} requests: {max(growth, 0) / KIB:.2f} KB per request, files, threads "
        "and tensors constant",
        f"kept images: {leaked / KIB:.0f} KB per request",
    )
