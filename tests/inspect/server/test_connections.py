"""Connection limits against a real socket: slow clients, idle clients, and too many of them."""

import http.client
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from overt.inspect.server import app as serving
from overt.inspect.server.app import create_app
from overt.inspect.server.connections import BoundedConnection
from overt.inspect.server.model_cache import ModelCache, find_models
from overt.inspect.server.request_queue import RequestQueue
from tests.inspect.server import http_load
from tests.inspect.server.live_server import TIMEOUT, live_server

HEAD = b"POST /api/ask HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"


@pytest.fixture
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set short limits that are checked often."""
    for name, value in (("head_within", 0.4), ("body_within", 0.4), ("write_within", 0.4)):
        monkeypatch.setattr(BoundedConnection, name, value)
    monkeypatch.setattr(BoundedConnection, "every", 0.05)


@pytest.fixture
def line() -> RequestQueue:
    return RequestQueue(patience=600.0)


@pytest.fixture
def address(demo: Path, line: RequestQueue) -> Iterator[str]:
    with live_server(create_app(ModelCache(find_models([str(demo)])), line=line)) as at:
        yield at


@contextmanager
def open_connection(address: str, sent: bytes = b"") -> Iterator[socket.socket]:
    place = urlsplit(address)
    with socket.create_connection((str(place.hostname), int(place.port or 0)), TIMEOUT) as opened:
        opened.sendall(sent)
        yield opened


def is_closed(opened: socket.socket) -> bool:
    """Wait for the server to close the connection; return whether it did."""
    try:
        while opened.recv(2**16):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


def wait_until(condition, patience: float = TIMEOUT) -> None:
    end = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < end, "the condition was never true"
        time.sleep(0.01)


def is_healthy(address: str) -> bool:
    try:
        return http_load.send_request(address, "/api/health")[0] == 200
    except (OSError, http.client.HTTPException):
        return False


@pytest.mark.long
@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: 127.",
        HEAD + b"Content-Length: 1000\r\n\r\n{",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{",
        b"GET /api/health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nGET / HT",
    ],
    ids=["nothing", "half a head", "half a body", "half a chunk", "a second half head"],
)
def test_a_client_that_stops_sending_is_closed(short_limits: None, address: str, sent: bytes):
    with open_connection(address, sent) as opened:
        assert is_closed(opened)


def test_a_client_with_slow_headers_is_closed(short_limits: None, address: str):
    with open_connection(address, b"GET / HTTP/1.1\r\n") as opened:
        closed = False
        for n in range(400):
            try:
                opened.sendall(b"X-%d: 1\r\n" % n)
            except OSError:
                closed = True
                break
            time.sleep(0.02)
        assert closed


def test_a_client_that_does_not_read_is_closed(short_limits: None, address: str, monkeypatch):
    large = {"answered": "x" * 2**24}
    monkeypatch.setattr(serving, "build_response", lambda *given: large)
    closed, lost = threading.Event(), BoundedConnection.connection_lost

    def connection_lost(connection: BoundedConnection, problem: Exception | None) -> None:
        lost(connection, problem)
        closed.set()

    monkeypatch.setattr(BoundedConnection, "connection_lost", connection_lost)
    body = b'{"model": "soft", "text": "a"}'
    place = urlsplit(address)
    with socket.socket() as opened:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        opened.settimeout(TIMEOUT)
        opened.connect((place.hostname, place.port))
        opened.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert closed.wait(TIMEOUT)
        taken = 0
        try:
            while part := opened.recv(2**16):
                taken += len(part)
        except ConnectionError:
            pass
        assert taken < 2**24


@pytest.mark.long
def test_a_response_may_take_longer_than_the_limits(
    short_limits: None, address: str, monkeypatch, ask
):
    for name in ("head_within", "body_within", "write_within"):  # a loaded machine sends in time
        monkeypatch.setattr(BoundedConnection, name, 2.0)
    monkeypatch.setattr(
        serving, "build_response", lambda *given: time.sleep(3.0) or {"answered": True}
    )
    assert http_load.send_request(address, "/api/ask", ask()) == (200, b'{"answered":true}')


def test_idle_connections_are_closed_for_new_ones(address: str, monkeypatch):
    monkeypatch.setattr(BoundedConnection, "most", 5)
    with ExitStack() as many:
        idle = [many.enter_context(open_connection(address)) for _ in range(20)]
        assert http_load.send_request(address, "/api/health")[0] == 200
        for one in idle[:15]:
            assert is_closed(one)


def test_slow_uploads_are_closed_for_new_ones(address: str, monkeypatch):
    monkeypatch.setattr(BoundedConnection, "most", 5)
    monkeypatch.setattr(BoundedConnection, "every", 0.05)
    monkeypatch.setattr(BoundedConnection, "upload_within", 0.3)
    with ExitStack() as many:
        sent = HEAD + b"Content-Length: 1000\r\n\r\n{"
        slow = [many.enter_context(open_connection(address, sent)) for _ in range(5)]
        wait_until(lambda: is_healthy(address))  # once the uploads have taken long enough
        slow[0].settimeout(0.5)
        assert any(is_closed(one) for one in slow)


def test_requests_in_progress_are_not_closed_for_new_ones(address: str, monkeypatch, ask):
    started, go = threading.Event(), threading.Event()

    def slow(*given: object) -> dict[str, bool]:
        started.set()
        assert go.wait(TIMEOUT)
        return {"answered": True}

    monkeypatch.setattr(serving, "build_response", slow)
    monkeypatch.setattr(BoundedConnection, "most", 3)
    statuses: list[int] = []
    threads = [
        threading.Thread(
            target=lambda: statuses.append(http_load.send_request(address, "/api/ask", ask())[0])
        )
        for _ in range(3)
    ]
    for one in threads:
        one.start()
    assert started.wait(TIMEOUT)
    time.sleep(0.3)
    with open_connection(address) as late:
        assert is_closed(late)
    go.set()
    for one in threads:
        one.join(TIMEOUT)
    assert statuses == [200] * 3


def test_abandoned_questions_leave_the_queue(address: str, line: RequestQueue, monkeypatch, ask):
    """Requests queue behind a slow one; those with a closed connection are not processed."""
    started, go, processed = threading.Event(), threading.Event(), []

    def slow(loaded: object, folder: str, question) -> dict[str, bool]:
        processed.append(question.text)
        started.set()
        assert go.wait(TIMEOUT)
        return {"answered": True}

    monkeypatch.setattr(serving, "build_response", slow)
    statuses: list[int] = []

    def wait() -> None:
        statuses.append(http_load.send_request(address, "/api/ask", ask(text="first"))[0])

    first = threading.Thread(target=wait)
    first.start()
    assert started.wait(TIMEOUT)
    with ExitStack() as many:
        for _ in range(10):
            body = b'{"model": "soft", "text": "gone"}'
            many.enter_context(
                open_connection(address, HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            )
        wait_until(lambda: line.length == 11)
    wait_until(lambda: line.length == 1)  # while the first is still in progress
    go.set()
    first.join(TIMEOUT)
    assert statuses == [200] and processed == ["first"]


def test_an_error_is_printed_once_and_escaped(address: str, monkeypatch, ask, capfd):
    def broken(*given: object) -> None:
        raise RuntimeError("sent \x1b]0;owned")

    monkeypatch.setattr(serving, "build_response", broken)
    assert http_load.send_request(address, "/api/ask", ask())[0] == 500
    printed = capfd.readouterr().err
    assert printed.count("RuntimeError: sent ") == 1 and "\x1b" not in printed


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(
    ("count", "kind", "status"),
    [(12_000_000, "application/json", 413), (2_000_000, "text/plain", 415)],
)
def test_a_client_that_sends_too_much_gets_the_error(address, count, kind, status, chunked):
    place = urlsplit(address)
    connection = http.client.HTTPConnection(str(place.hostname), place.port, timeout=TIMEOUT)
    body = [b"x" * 2**16] * (count // 2**16)
    sent = iter(body) if chunked else b"".join(body)
    connection.request("POST", "/api/ask", sent, {"Content-Type": kind}, encode_chunked=chunked)
    found = connection.getresponse()
    assert found.status == status and b"error" in found.read()
    connection.close()


def test_too_large_headers_are_rejected(address: str):
    with open_connection(
        address, b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"x" * 40_000
    ) as opened:
        assert b" 400 " in opened.recv(100)


def test_websockets_are_rejected(address: str):
    sent = b"GET /api/ask HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\n"
    sent += b"Connection: Upgrade\r\nSec-WebSocket-Key: eA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    with open_connection(address, sent) as opened:
        assert b" 405 " in opened.recv(100)
