"""A server in a thread of this process, for tests that need a real connection."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import uvicorn

from overt.inspect.server.run_server import listen, server_config

TIMEOUT = 120  # seconds that a test waits for an immediate response
QUEUE_TIMEOUT = 600.0  # seconds that a request may wait on a loaded machine


@contextmanager
def live_server(app: Any, at: socket.socket | None = None) -> Iterator[str]:
    """Serve the app until the block ends; yield its address."""
    started = threading.Event()

    class Server(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            started.set()

    with nullcontext(at) if at else listen("127.0.0.1", 0) as taken:
        config = server_config(app)
        config.timeout_graceful_shutdown = TIMEOUT
        server = Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [taken]})
        thread.start()
        try:
            assert started.wait(TIMEOUT), "the server has not started"
            yield f"http://127.0.0.1:{taken.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(TIMEOUT)
            assert not thread.is_alive(), "the server has not ended"
