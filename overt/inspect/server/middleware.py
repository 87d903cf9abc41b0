"""ASGI middleware: checks requests, limits their size, and cancels those of absent clients."""

import asyncio
import sys
import traceback
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any

from fastapi.responses import JSONResponse

from overt.inspect.server import json_limits
from overt.inspect.server.address import Address
from overt.inspect.server.request_schema import MAX_BODY

MAX_HELD = 256 * 2**20  # bytes of all requests in progress
BODY_TIMEOUT = 60.0  # seconds for a whole body to arrive
DISCARD_TIMEOUT = 5.0  # seconds for discarding the rest of a rejected body
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")

# The page has inline styles, images as data, and a script of this server; nothing else is loaded.
POLICY = (
    "default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; script-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
}

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class RejectedRequest(Exception):
    """A request that does not reach the app: status and message for the client."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class _ClientDisconnected(Exception):
    """The client closed the connection before its request was complete."""


class _BodyReader:
    """Parts of a body as they arrive."""

    def __init__(self, receive: Receive) -> None:
        self.receive, self.ended = receive, False

    async def part(self) -> bytes:
        """Return the next part; `ended` is set with the last."""
        message = await self.receive()
        self.ended = not message.get("more_body")
        if message["type"] == "http.disconnect":
            raise _ClientDisconnected
        return bytes(message.get("body", b""))

    async def discard(self, most: int, within: float) -> None:
        """Read on for a moment: a client that is still sending would not see the response."""
        taken = 0
        with suppress(TimeoutError, _ClientDisconnected):
            async with asyncio.timeout(within):
                while not self.ended and taken <= most:
                    taken += len(await self.part())


class RequestGuard:
    """Reject foreign and oversized requests, and cancel requests of absent clients.

    None of this depends on the version of the web framework:

    - the Host must be one of `address` (against DNS rebinding), status 400;
    - `/api/` only accepts pages of this server: another Origin or Sec-Fetch-Site is rejected
      (against cross-site request forgery), status 403;
    - other methods than GET need `application/json`, status 415;
    - a body must arrive within `within` seconds (408), with at most `most` bytes (413) and a
      bounded structure (413), before it is parsed;
    - all requests together have at most `held` bytes, status 503;
    - if a client closes its connection, the work on its request is cancelled.

    Every response gets the security headers `HEADERS`. An exception of the app is printed to stderr
    and answered with status 500, without its message.
    """

    def __init__(
        self,
        app: Any,
        address: Address,
        most: int = MAX_BODY,
        held: int = MAX_HELD,
        within: float = BODY_TIMEOUT,
    ) -> None:
        self.app, self.address = app, address
        self.most, self.held, self.within = most, held, within
        self.holding = 0  # bytes of the requests in progress

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Check one request, read its body, and pass it to the app."""
        # The start and the end of the server; WebSockets are turned off in `server_config`.
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        body, begun, incoming = bytearray(), False, _BodyReader(receive)

        async def sent(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            self._check_headers(scope)
            await self._read(incoming, body)
            if scope["method"] not in SAFE_METHODS:
                _check_json(body)
            await _run_until_disconnect(
                self.app, scope, bytes(body), receive, _with_security_headers(sent)
            )
        except RejectedRequest as refused:
            # A client that was too slow once is not waited for again.
            if refused.status != 408:
                await incoming.discard(8 * self.most, DISCARD_TIMEOUT)
            closing = {"Connection": "close"}  # the rest of the request is not read
            await error_response(refused.status, str(refused), closing)(scope, receive, send)
        except _ClientDisconnected:
            pass
        except Exception as error:  # uvicorn would print it unescaped
            _log(error)
            # The status is sent already: only a broken connection tells the client.
            if begun:
                raise ConnectionAbortedError("a response could not be finished") from None
            await _server_error(error)(scope, receive, send)
        finally:
            self.holding -= len(body)

    def _check_headers(self, scope: Message) -> None:
        """Reject a request by its headers."""
        # A repeated Host is ambiguous: a proxy may have checked the other one.
        host = _single_header(scope, b"host")
        if host is None or not self.address.accepts(host):
            raise RejectedRequest(
                400, "the Host header is not a name of this server: open the URL it printed."
            )
        # The page itself may be opened by a link on another page; the API may not.
        if scope["method"] not in SAFE_METHODS or scope["path"].startswith("/api/"):
            self._check_origin(scope, host)
        if scope["method"] not in SAFE_METHODS:
            # A form on another page cannot send this type, and a script there has to ask first
            # (CORS).
            kind = (_single_header(scope, b"content-type") or "").partition(";")[0].strip().lower()
            if kind != "application/json":
                raise RejectedRequest(415, "expected Content-Type: application/json.")
        # A repeated Content-Length is rejected too: a proxy may have used the other one.
        length = _single_header(scope, b"content-length")
        if _header_values(scope, b"content-length") and not (length or "").isdecimal():
            raise RejectedRequest(413, "Content-Length is not a number.")
        # The digits are counted before the conversion, whose time grows with their square.
        if length is not None and (len(length) > 12 or int(length) > self.most):
            raise RejectedRequest(413, self._too_large())

    def _check_origin(self, scope: Message, host: str) -> None:
        """Reject requests of pages of other origins; programs send neither header."""
        site, origin = _header_values(scope, b"sec-fetch-site"), _header_values(scope, b"origin")
        # `none`: the user opened the URL, for example by a bookmark.
        foreign = bool(site) and site not in (["same-origin"], ["none"])
        if origin and (len(origin) > 1 or not self.address.same_origin(origin[0], host)):
            foreign = True
        if foreign:
            raise RejectedRequest(
                403,
                "requests from pages of another origin are not allowed: open this server's page.",
            )

    async def _read(self, incoming: _BodyReader, body: bytearray) -> None:
        """Read the whole body, counting its bytes."""
        try:
            async with asyncio.timeout(self.within):
                # The bytes are counted as they arrive: a chunked body has no Content-Length.
                while not incoming.ended:
                    self._take(body, await incoming.part())
        except TimeoutError as error:
            raise RejectedRequest(
                408, f"the request did not arrive within {self.within:.0f} s; send it again."
            ) from error

    def _take(self, body: bytearray, part: bytes) -> None:
        if len(body) + len(part) > self.most:
            raise RejectedRequest(413, self._too_large())
        if self.holding + len(part) > self.held:
            raise RejectedRequest(503, "the server has too many requests: try again in a moment.")
        self.holding += len(part)
        body += part

    def _too_large(self) -> str:
        return f"the request is larger than {self.most // 2**20} MiB: send a smaller image."


def error_response(
    status: int, sentence: str, headers: dict[str, str] | None = None
) -> JSONResponse:
    """Return an error as JSON, {"error": ...}: one line without control characters."""
    line = "".join(one if one.isprintable() else " " for one in sentence)
    return JSONResponse({"error": " ".join(line.split())}, status, {**HEADERS, **(headers or {})})


def _server_error(error: Exception) -> JSONResponse:
    """Return the response to an internal error, without its message."""
    memory = isinstance(error, MemoryError)
    cause = "out of memory" if memory else "internal error"
    return error_response(500, f"{cause}; see the terminal of the server.")


def _log(error: Exception) -> None:
    """Print a traceback with control characters escaped, since it may contain client data."""
    lines = "".join(traceback.format_exception(error))
    text = "".join(one if one.isprintable() or one == "\n" else ascii(one)[1:-1] for one in lines)
    with suppress(OSError, ValueError):  # respond even if the terminal is closed
        print(text, end="", file=sys.stderr, flush=True)


def _check_json(body: bytes | bytearray) -> None:
    """Reject JSON that exceeds the limits, or in an encoding in which they were not checked."""
    # Zero bytes at the start mean UTF-16 or UTF-32, which `json.loads` would detect and accept.
    if b"\0" in body[:4] or body.startswith((b"\xff\xfe", b"\xfe\xff", b"\xef\xbb\xbf")):
        raise RejectedRequest(415, "expected JSON in UTF-8 without a byte-order mark.")
    wrong = json_limits.check_json(body)
    if wrong is not None:
        raise RejectedRequest(413, wrong)


async def _run_until_disconnect(
    app: Any, scope: Message, body: bytes, receive: Receive, send: Send
) -> None:
    """Run the app on a complete body, and cancel it if the client closes the connection."""
    gone, whole, first = asyncio.Event(), False, True

    # The app gets the complete body as one message, and later the end of the connection.
    async def replayed() -> Message:
        nonlocal first
        if first:
            first = False
            return {"type": "http.request", "body": body, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def noted(message: Message) -> None:
        nonlocal whole
        await send(message)
        whole = message["type"] == "http.response.body" and not message.get("more_body")

    answering = asyncio.ensure_future(app(scope, replayed, noted))
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        gone.set()
        # The client left before the response was complete.
        if not answering.done() and not whole:
            answering.cancel()
        await asyncio.wait({answering})
        if not answering.cancelled():
            answering.result()  # raises the exception of the app
    finally:
        for task in (answering, leaving):
            task.cancel()
        await asyncio.gather(answering, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        await asyncio.sleep(0)


def _with_security_headers(send: Send) -> Send:
    """Add the security headers that a response lacks."""

    async def secured(message: Message) -> None:
        if message["type"] == "http.response.start":
            there = {name.lower() for name, _ in message.get("headers", ())}
            more = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
            message["headers"] = [
                *message.get("headers", ()),
                *(one for one in more if one[0] not in there),
            ]
        await send(message)

    return secured


def _header_values(scope: Message, name: bytes) -> list[str]:
    """Return all values of a header."""
    return [value.decode("latin-1").strip() for key, value in scope["headers"] if key == name]


def _single_header(scope: Message, name: bytes) -> str | None:
    """Return the value of a header that occurs once; None if it is missing or repeated."""
    found = _header_values(scope, name)
    return found[0] if len(found) == 1 else None
