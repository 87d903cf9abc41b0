"""The server through its HTTP interface: responses, rejected requests, and no file access."""

import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from overt.inspect.server import app as serving
from overt.inspect.server import responses
from overt.inspect.server.app import create_app
from overt.inspect.server.model_cache import ModelCache, find_models
from overt.inspect.server.request_queue import RequestQueue
from overt.inspect.server.request_schema import MAX_BODY


@pytest.fixture(scope="module")
def client(demo: Path) -> Iterator[TestClient]:
    app = create_app(ModelCache(find_models([str(demo)])), line=RequestQueue(patience=600.0))
    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as opened:
        yield opened


def test_the_page_has_its_script_and_no_external_resources(client: TestClient):
    page = client.get("/")
    assert page.status_code == 200 and "Where does it look?" in page.text
    assert "http://" not in page.text and "https://" not in page.text
    assert "script-src 'self'" in page.headers["content-security-policy"]
    script = client.get("/serve.js")
    assert script.headers["content-type"].startswith("text/javascript")
    assert "drawPanels" in script.text and "{%" not in script.text


def test_models_and_examples_are_listed(client: TestClient):
    assert [one["name"] for one in client.get("/api/models").json()] == ["soft", "average"]
    assert len(client.get("/api/examples", params={"model": "soft"}).json()) == 3


def test_a_question_gets_a_response(client: TestClient, ask):
    found = client.post("/api/ask", json=ask())
    assert found.status_code == 200
    assert len(found.json()["view"]["panels"]) == 2
    drawn = client.post("/api/picture", json=ask())
    assert drawn.headers["content-type"] == "image/png" and drawn.content.startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("changes", "status", "message"),
    [
        ({"model": "../../etc"}, 400, "unknown model"),
        ({"picture": "%%%"}, 400, "not valid base64"),
        ({"text": " "}, 400, "needs a text"),
        ({"map": "rollout"}, 400, "no map 'rollout'"),
        ({"map": "nothing"}, 422, "unknown map"),
        ({"head": "many"}, 422, "head"),
        ({"head": 7}, 400, "heads 0 to"),
        ({"path": "/etc/passwd"}, 422, "path"),
        ({"without": [[0, 0, 9, 9]]}, 422, "without"),
    ],
)
def test_invalid_requests_return_a_one_line_error(
    client: TestClient, ask, changes, status, message
):
    found = client.post("/api/ask", json=ask(**changes))
    assert found.status_code == status
    assert set(found.json()) == {"error"} and message in found.json()["error"]
    assert "\n" not in found.json()["error"] and "Traceback" not in found.text


def test_malformed_bodies_are_rejected(client: TestClient):
    for body in (b"not json", b"", b"[]", b"null", b'"model"', b"{", b"{}", b"\xff\xfe{\x00"):
        found = client.post("/api/ask", content=body, headers={"content-type": "application/json"})
        assert found.status_code in (415, 422) and "error" in found.json()
        if body in (b"not json", b"{"):
            assert found.json()["error"] == "the request is not valid JSON: send one object."
    assert client.get("/api/ask").status_code == 405


def test_a_too_large_body_is_rejected(client: TestClient, monkeypatch):
    sent = {"content-type": "application/json"}
    found = client.post("/api/ask", content=b"x" * (MAX_BODY + 1), headers=sent)
    assert found.status_code == 413 and "smaller image" in found.json()["error"]

    def stream() -> Iterator[bytes]:  # without a content length
        for _ in range(MAX_BODY // 2**20 + 2):
            yield b"x" * 2**20

    found = client.post("/api/ask", content=stream(), headers=sent)
    assert found.status_code == 413
    wrong = client.post("/api/ask", content=b"{}", headers={**sent, "content-length": "-5"})
    assert wrong.status_code == 413


@pytest.mark.parametrize(
    "path",
    ["/../pyproject.toml", "/serve.css", "/%2e%2e/%2e%2e/etc/passwd", "/api/../../x", "/docs"],
)
def test_no_other_file_is_served(client: TestClient, path: str):
    found = client.get(path)
    assert found.status_code == 404 and set(found.json()) == {"error"}


def test_another_host_is_rejected(client: TestClient):
    assert client.get("/", headers={"host": "evil.example"}).status_code == 400


def test_twenty_concurrent_clients_get_responses(client: TestClient, ask):
    found: list[int] = []

    def post() -> None:
        found.append(client.post("/api/ask", json=ask()).status_code)

    threads = [threading.Thread(target=post) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [200] * 20
    assert client.get("/api/health").json()["waiting"] == 0


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"text": "\x00 what \u202e\u200f 🙂" + "e\u0301" * 50}, 200),
        ({"text": "\ufffe\uffff \U0010ffff"}, 200),
        ({"model": "\u202esoft"}, 400),
        ({"model": "x" * 301}, 422),
        ({"layer": "\x1b[31m", "map": "attention"}, 400),
        ({"query": "\x1b[31m"}, 400),
        ({"without": [[0.5, 0.5, 0.5, 0.5]]}, 200),
        ({"without": [[1, 1, 0, 0]]}, 200),
        ({"unsaid": [[5, 2], [19_999, 20_000]]}, 200),
    ],
)
def test_unusual_values_get_a_response_or_a_one_line_error(
    client: TestClient, ask, changes, status
):
    found = client.post("/api/ask", json=ask(**changes))
    assert found.status_code in (status, 400), found.text[:200]
    if found.status_code != 200:
        assert set(found.json()) == {"error"} and "\x1b" not in found.json()["error"]


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "soft", "text": "a", "head": NaN}',
        b'{"model": "soft", "text": "a", "head": 1e400}',
        b'{"model": "soft", "text": "a", "boxes": [[0, 0, Infinity, 1]]}',
        b'{"model": "soft", "text": "\\ud800"}',
        b'{"model": "soft", "text": "a", "text": "b", "\\u0000": 1}',
        b'{"model": "soft", "text": "a\xff"}',
        b'{"model": {"model": {}}}',
    ],
)
def test_invalid_numbers_and_texts_are_rejected(client: TestClient, body: bytes):
    found = client.post("/api/ask", content=body, headers={"content-type": "application/json"})
    assert found.status_code in (400, 422) and set(found.json()) == {"error"}


def test_a_corrupt_run_is_listed_with_its_problem(demo: Path, tmp_path: Path, ask):
    shutil.copytree(demo, tmp_path / "runs")
    app = create_app(
        ModelCache(find_models([str(tmp_path / "runs")])), line=RequestQueue(patience=600.0)
    )
    (tmp_path / "runs" / "average" / "model" / "spoken.json").write_text('{"format": ')
    with TestClient(app, base_url="http://127.0.0.1") as client:
        good, bad = client.get("/api/models").json()
        assert good["name"] == "soft" and "problem" not in good
        assert bad["name"] == "average" and "spoken.json is not valid JSON" in bad["problem"]
        assert client.post("/api/ask", json=ask()).status_code == 200


def test_a_full_queue_returns_retry_after(demo: Path, ask):
    app = create_app(ModelCache(find_models([str(demo)])), line=RequestQueue(waiting=0))
    with TestClient(app, base_url="http://127.0.0.1") as client:
        found = client.post("/api/ask", json=ask())
    assert found.status_code == 503 and found.headers["retry-after"] == "2"


def test_an_internal_error_does_not_leak_its_message(demo: Path, ask, monkeypatch, capsys):
    def broken(*given: object) -> None:
        raise RuntimeError("the secret path /home/x")

    monkeypatch.setattr(serving, "build_response", broken)
    app = create_app(ModelCache(find_models([str(demo)])))
    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        found = client.post("/api/ask", json=ask())
    assert found.status_code == 500 and "secret" not in found.text
    assert "secret" in capsys.readouterr().err


@pytest.mark.parametrize("chance", [float("nan"), float("inf"), 0.5])
def test_a_probability_that_is_not_finite_is_sent_as_null(
    demo: Path, ask, monkeypatch, chance: float
):
    found = responses.view_model

    def strange(*given: object) -> object:
        return replace(found(*given), answers=(("red", chance),))

    monkeypatch.setattr(responses, "view_model", strange)
    app = create_app(ModelCache(find_models([str(demo)])))
    with TestClient(app, base_url="http://127.0.0.1") as client:
        [answer] = client.post("/api/ask", json=ask()).json()["answers"]
    assert answer == {"name": "red", "chance": 0.5 if chance == 0.5 else None}
