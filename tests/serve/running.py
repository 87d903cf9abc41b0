"""A server in a thread of this process, for tests that need a real connection."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from overt.serve.running import listen

PATIENCE = 120  # seconds that a test waits for what should come at once
LONG = 600.0  # seconds that a question may wait on a machine with much else to do


@contextmanager
def served(app: Any) -> Iterator[str]:
    """The address at which the app answers, until the block ends."""
    begun = threading.Event()

    class Server(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            begun.set()

    with listen("127.0.0.1", 0) as taken:
        server = Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=PATIENCE))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [taken]})
        thread.start()
        try:
            assert begun.wait(PATIENCE), "the server has not begun to answer"
            yield f"http://127.0.0.1:{taken.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(PATIENCE)
            assert not thread.is_alive(), "the server has not ended"
