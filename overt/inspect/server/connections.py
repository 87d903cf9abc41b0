"""HTTP/1.1 connections with a limit on their number, and timeouts for reading and writing."""

import asyncio
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class BoundedConnection(H11Protocol):
    """A connection that is closed if its client is too slow or there are too many connections.

    uvicorn waits without limit for headers, for a body and for a client that does not read. Above
    `most` connections, the one that has waited longest for its headers is closed, or else for its
    body; if all connections are processing requests, the new one is closed.
    """

    most: ClassVar[int] = 128
    head_within: ClassVar[float] = (
        15.0  # seconds until the headers are complete, including idle time
    )
    body_within: ClassVar[float] = 75.0  # the middleware responds with 408 before
    upload_within: ClassVar[float] = 5.0  # for a body, if there are too many connections
    write_within: ClassVar[float] = 120.0  # for the client to read a response
    every: ClassVar[float] = 1.0  # seconds between two checks

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.reading: tuple[Any, ...] = ()
        self.reading_since = self.empty_since = self.loop.time()
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection if there is room, and start checking its progress."""
        super().connection_made(transport)
        self.reading_since = self.empty_since = self.loop.time()
        if len(self.connections) > self.most:
            self._make_room()
        self._timer = self.loop.call_later(self.every, self._check)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop checking."""
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def _make_room(self) -> None:
        """Close the connection that has waited longest for a request, or this one if none waits."""
        others = [one for one in self.connections if isinstance(one, BoundedConnection)]
        for state, patience in ((h11.IDLE, 0.0), (h11.SEND_BODY, self.upload_within)):
            waiting = [
                one
                for one in others
                if one is not self
                and one.conn.their_state is state
                and not one.transport.is_closing()
                and self.loop.time() - one.reading_since >= patience
            ]
            if waiting:
                min(waiting, key=lambda one: one.reading_since).transport.abort()
                return
        self.transport.abort()

    def _check(self) -> None:
        """Close the connection if it timed out; else check again later."""
        now = self.loop.time()
        # Only a new phase or a new request is progress: single bytes would keep a connection
        # forever.
        phase = (self.conn.their_state, self.cycle)
        if phase != self.reading:
            self.reading, self.reading_since = phase, now
        # An empty buffer: the client has read what was sent.
        if not self.transport.get_write_buffer_size():
            self.empty_since = now
        limits = {h11.IDLE: self.head_within, h11.SEND_BODY: self.body_within}
        limit = limits.get(self.conn.their_state, float("inf"))
        if now - self.reading_since > limit or now - self.empty_since > self.write_within:
            self.transport.abort()
            return
        self._timer = self.loop.call_later(self.every, self._check)
