"""The request guard alone, over a minimal ASGI app without a web framework."""

import asyncio
import json
from typing import Any

import pytest

from overt.inspect.server import middleware
from overt.inspect.server.address import Address
from overt.inspect.server.middleware import HEADERS, Message, RequestGuard, error_response
from overt.inspect.server.request_schema import MAX_BODY

OWN = "127.0.0.1:8642"


class RecordingApp:
    """An app that records the bodies it receives, and returns 200."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        self.bodies.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


def send_request(
    app: Any, method: str = "POST", path: str = "/api/ask", parts: Any = (b"{}",), **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """Send one request; return status, headers and body. An underscore stands for a hyphen."""
    sent = {"host": OWN, **({"content_type": "application/json"} if method == "POST" else {})}
    sent |= headers
    listed = [(k.replace("_", "-").encode(), v.encode("latin-1")) for k, v in sent.items() if v]
    return send_raw(app, method, path, listed, parts)


def send_raw(
    app: Any, method: str, path: str, headers: list[tuple[bytes, bytes]], parts: Any
) -> Any:
    left, out = list(parts), []

    async def receive() -> Message:
        if left:
            part = left.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(left)}
        await asyncio.sleep(600)
        raise AssertionError

    async def send(message: Message) -> None:
        out.append(message)

    scope = {"type": "http", "method": method, "path": path, "headers": headers}
    asyncio.run(app(scope, receive, send))
    found = {k.decode().lower(): v.decode() for k, v in out[0]["headers"]}
    return out[0]["status"], found, b"".join(one.get("body", b"") for one in out[1:])


@pytest.fixture
def app() -> RecordingApp:
    return RecordingApp()


def make_guard(app: RecordingApp, **changes: Any) -> RequestGuard:
    return RequestGuard(app, Address(), **changes)


def test_requests_of_the_page_and_of_programs_pass_with_security_headers(app: RecordingApp):
    for headers in (
        {"origin": f"http://{OWN}", "sec_fetch_site": "same-origin"},
        {"origin": f"http://{OWN}"},
        {},
        {"content_type": "Application/JSON; charset=utf-8"},
    ):
        status, found, _ = send_request(make_guard(app), **headers)
        assert status == 200
        assert {name.lower() for name in HEADERS} <= set(found)
    assert app.bodies == [b"{}"] * 4


@pytest.mark.parametrize(
    "kind",
    ["", "text/plain", "text/plain; application/json", "application/x-www-form-urlencoded",
     "multipart/form-data", "application/jsonx", "application/ld+json", "json"],
)  # fmt: skip
def test_content_types_of_cross_site_forms_are_rejected(app: RecordingApp, kind: str):
    """A cross-site request without a preflight has one of these content types, or none."""
    status, _, body = send_request(make_guard(app), content_type=kind)
    assert status == 415 and "application/json" in json.loads(body)["error"] and not app.bodies


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:3000"},
        {"origin": "http://127.0.0.1"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
        {"sec_fetch_site": "something new"},
        {"origin": f"http://{OWN}", "sec_fetch_site": "cross-site"},
        {"origin": "http://evil.example", "sec_fetch_site": "same-origin"},
    ],
)
@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/api/ask"), ("POST", "/"), ("GET", "/api/examples"), ("DELETE", "/x")],
)
def test_requests_of_another_origin_are_rejected(
    app: RecordingApp, method: str, path: str, headers: dict
):
    status, found, body = send_request(make_guard(app), method, path, **headers)
    assert status == 403 and not app.bodies and set(json.loads(body)) == {"error"}
    assert found["x-content-type-options"] == "nosniff"


def test_a_cross_site_link_to_the_page_is_allowed(app: RecordingApp):
    assert send_request(make_guard(app), "GET", "/", sec_fetch_site="cross-site")[0] == 200


@pytest.mark.parametrize("bound", ["127.0.0.1", "127.0.0.2", "::1", "0.0.0.0", "::", "10.1.2.3"])
def test_the_host_is_checked_for_every_bound_address(app: RecordingApp, bound: str):
    guard = RequestGuard(app, Address(bound))
    for host in ("evil.example", "evil.example:8642", ""):
        status, _, body = send_request(guard, "GET", "/", host=host)
        assert status == 400 and b"Host" in body
    assert send_request(guard, "GET", "/", host=Address(bound).url(8642)[7:])[0] == 200


def test_repeated_headers_are_rejected(app: RecordingApp):
    own, kind = (b"host", OWN.encode()), (b"content-type", b"application/json")
    for headers, expected in (
        ([own, own, kind], 400),
        ([own, kind, (b"content-type", b"text/plain")], 415),
        ([own, kind, (b"origin", b"http://" + own[1]), (b"origin", b"http://x")], 403),
        ([own, kind, (b"sec-fetch-site", b"same-origin"), (b"sec-fetch-site", b"x")], 403),
        ([own, kind, (b"content-length", b"2"), (b"content-length", b"3")], 413),
    ):
        assert send_raw(make_guard(app), "POST", "/api/ask", headers, [b"{}"])[0] == expected
    assert not app.bodies


def test_a_body_is_limited_while_it_is_received(app: RecordingApp):
    guard = make_guard(app, most=10)
    assert send_request(guard, parts=[b'"1', b"23", b'45"'])[0] == 200
    assert send_request(guard, parts=[b"12345", b"123456"])[0] == 413
    assert send_request(guard, parts=[b"1"], content_length="11")[0] == 413
    assert send_request(guard, parts=[b"1"], content_length="1" * 5_000)[0] == 413
    assert send_request(guard, "GET", "/", parts=[b"x" * 11])[0] == 413
    assert app.bodies == [b'"12345"'] and guard.holding == 0


def test_a_rejected_body_is_discarded_for_a_short_time(app: RecordingApp, monkeypatch):
    monkeypatch.setattr(middleware, "DISCARD_TIMEOUT", 0.05)
    taken: list[int] = []

    async def endless() -> Message:
        taken.append(1)
        await asyncio.sleep(0.001 if len(taken) < 20 else 600)
        return {"type": "http.request", "body": b"x", "more_body": True}

    out: list[Message] = []

    async def send(message: Message) -> None:
        out.append(message)

    scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"host", b"evil.example")]}
    asyncio.run(make_guard(app, most=100)(scope, endless, send))
    assert out[0]["status"] == 400 and 1 < len(taken) <= 20
    taken.clear()
    monkeypatch.setattr(middleware, "DISCARD_TIMEOUT", 600.0)
    asyncio.run(make_guard(app, most=1)(scope, endless, send))
    assert len(taken) == 9  # eight times the limit


def test_the_total_size_of_all_requests_is_limited():
    """Three requests in progress fill the limit; a fourth passes after they finish."""
    go = asyncio.Event()
    codes: list[int] = []

    async def slow(scope: Message, receive: Any, send: Any) -> None:
        await go.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    guard = RequestGuard(slow, Address(), held=30)

    async def one() -> None:
        sent = [{"type": "http.request", "body": b'"12345678"'}]

        async def receive() -> Message:
            if sent:
                return sent.pop()
            await asyncio.sleep(600)
            raise AssertionError

        async def send(message: Message) -> None:
            if "status" in message:
                codes.append(message["status"])

        headers = [(b"host", OWN.encode()), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/api/ask", "headers": headers}
        await guard(scope, receive, send)

    async def scenario() -> None:
        first = [asyncio.ensure_future(one()) for _ in range(3)]
        await asyncio.sleep(0.01)
        await one()
        assert codes == [503] and guard.holding == 30
        go.set()
        await asyncio.gather(*first)
        await one()

    asyncio.run(scenario())
    assert codes == [503, 200, 200, 200, 200] and guard.holding == 0


@pytest.mark.long
@pytest.mark.parametrize(
    "part", [b'"k%d":1,', b'{"a":', b"[", b'"a",', b"1,"], ids=["keys", "objects", "lists", "", ""]
)
def test_a_body_of_a_million_keys_is_rejected_before_parsing(app: RecordingApp, part: bytes):
    many = b"".join(part % n if b"%" in part else part for n in range(1_000_000))
    body = (b"{" + many)[: MAX_BODY - 1]
    status, _, body = send_request(make_guard(app), parts=[body])
    assert status == 413 and b"JSON" in body and not app.bodies


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32-be", "utf-8-sig"])
def test_json_in_another_encoding_is_rejected(app: RecordingApp, encoding: str):
    """The parser would accept it, but the limits are not checked in it."""
    assert send_request(make_guard(app), parts=['{"a": 1}'.encode(encoding)])[0] == 415


def test_an_endless_body_times_out(app: RecordingApp):
    guard = make_guard(app, within=0.05)

    async def receive() -> Message:
        await asyncio.sleep(0.01)
        return {"type": "http.request", "body": b" ", "more_body": True}

    out: list[Message] = []

    async def send(message: Message) -> None:
        out.append(message)

    headers = [(b"host", OWN.encode()), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/api/ask", "headers": headers}
    asyncio.run(guard(scope, receive, send))
    assert out[0]["status"] == 408 and (b"connection", b"close") in out[0]["headers"]
    assert guard.holding == 0


def test_the_work_for_a_disconnected_client_is_cancelled():
    events: list[str] = []

    async def slow(scope: Message, receive: Any, send: Any) -> None:
        await receive()
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            events.append("cancelled")
            raise

    messages = [
        {"type": "http.request", "body": b"{}", "more_body": False},
        {"type": "http.disconnect"},
    ]

    async def receive() -> Message:
        await asyncio.sleep(0.01)
        return messages.pop(0)

    guard = RequestGuard(slow, Address())
    headers = [(b"host", OWN.encode()), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/api/ask", "headers": headers}

    async def send(message: Message) -> None:
        raise AssertionError("the client is disconnected")

    asyncio.run(guard(scope, receive, send))
    assert events == ["cancelled"] and guard.holding == 0


def test_an_incomplete_request_does_not_reach_the_app(app: RecordingApp):
    messages = [
        {"type": "http.request", "body": b"{", "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive() -> Message:
        return messages.pop(0)

    async def send(message: Message) -> None:
        raise AssertionError("the client is disconnected")

    guard = make_guard(app)
    headers = [(b"host", OWN.encode()), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/api/ask", "headers": headers}
    asyncio.run(guard(scope, receive, send))
    assert not app.bodies and guard.holding == 0


def make_failing_guard(text: str, begin: bool = False) -> Any:
    async def broken(scope: Message, receive: Any, send: Any) -> None:
        if begin:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError(text)

    return RequestGuard(broken, Address())


def test_app_errors_are_printed_escaped_and_not_sent(capsys):
    status, found, body = send_request(make_failing_guard("sent \x1b]0;owned\x07\u202e"))
    assert status == 500 and "owned" not in body.decode() and set(json.loads(body)) == {"error"}
    assert found["x-content-type-options"] == "nosniff"
    printed = capsys.readouterr().err
    assert "\\x1b]0;owned" in printed and not {"\x1b", "\x07", "\u202e"} & set(printed)


def test_an_error_after_the_response_start_aborts_the_connection(capsys):
    with pytest.raises(ConnectionAbortedError, match="finished"):
        send_request(make_failing_guard("a secret", begin=True))
    assert "a secret" in capsys.readouterr().err


def test_a_failing_stderr_does_not_block_the_response(monkeypatch):
    class FailingStream:
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("sys.stderr", FailingStream())
    status = send_request(make_failing_guard("x"))[0]
    monkeypatch.undo()
    assert status == 500


def test_error_messages_are_one_line_without_control_characters():
    response = error_response(400, "no model '\x1b[31m\u202e\ud800'\n\tthere")
    assert json.loads(response.body) == {"error": "no model ' [31m ' there"}


def test_only_http_requests_are_guarded():
    types: list[str] = []

    async def app(scope: Message, receive: Any, send: Any) -> None:
        types.append(scope["type"])

    asyncio.run(RequestGuard(app, Address())({"type": "lifespan"}, None, None))  # type: ignore
    assert types == ["lifespan"]
