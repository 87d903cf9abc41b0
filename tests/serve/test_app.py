"""The server from outside: what it answers, what it refuses, and that it hands out nothing else."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from overt.serve import app as serving
from overt.serve.app import make
from overt.serve.line import Line
from overt.serve.questions import MOST_BODY
from overt.serve.shelf import Shelf, offer


@pytest.fixture(scope="module")
def client(demo: Path) -> Iterator[TestClient]:
    app = make(Shelf(offer([str(demo)])), line=Line(patience=600.0))
    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as opened:
        yield opened


def test_the_page_comes_with_its_script_and_asks_nobody_else(client: TestClient):
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


def test_a_question_is_answered(client: TestClient, ask):
    found = client.post("/api/ask", json=ask())
    assert found.status_code == 200
    assert len(found.json()["view"]["panels"]) == 2
    drawn = client.post("/api/picture", json=ask())
    assert drawn.headers["content-type"] == "image/png" and drawn.content.startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("changes", "status", "said"),
    [
        ({"model": "../../etc"}, 400, "there is no model"),
        ({"picture": "%%%"}, 400, "not base64"),
        ({"text": " "}, 400, "wants a text"),
        ({"map": "rollout"}, 400, "no map 'rollout'"),
        ({"map": "nothing"}, 422, "there is no map"),
        ({"head": "many"}, 422, "head"),
        ({"head": 7}, 400, "heads 0 to"),
        ({"path": "/etc/passwd"}, 422, "path"),
        ({"without": [[0, 0, 9, 9]]}, 422, "without"),
    ],
)
def test_what_is_wrong_is_one_sentence(client: TestClient, ask, changes, status, said):
    found = client.post("/api/ask", json=ask(**changes))
    assert found.status_code == status
    assert set(found.json()) == {"error"} and said in found.json()["error"]
    assert "\n" not in found.json()["error"] and "Traceback" not in found.text


def test_bodies_that_are_not_questions_are_refused(client: TestClient):
    for body, kind in ((b"not json", "application/json"), (b"a=1", "text/plain"), (b"", "")):
        found = client.post("/api/ask", content=body, headers={"content-type": kind})
        assert found.status_code == 422 and "error" in found.json()
    assert client.get("/api/ask").status_code == 405


def test_a_body_that_is_too_large_is_stopped(client: TestClient, monkeypatch):
    found = client.post("/api/ask", content=b"x" * (MOST_BODY + 1))
    assert found.status_code == 413 and "smaller picture" in found.json()["error"]

    def dripping() -> Iterator[bytes]:  # without a length in its head
        for _ in range(MOST_BODY // 2**20 + 2):
            yield b"x" * 2**20

    found = client.post("/api/ask", content=dripping())
    assert found.status_code == 413
    wrong = client.post("/api/ask", content=b"{}", headers={"content-length": "-5"})
    assert wrong.status_code == 413


@pytest.mark.parametrize(
    "path",
    ["/../pyproject.toml", "/serve.css", "/%2e%2e/%2e%2e/etc/passwd", "/api/../../x", "/docs"],
)
def test_no_file_can_be_had(client: TestClient, path: str):
    found = client.get(path)
    assert found.status_code == 404 and set(found.json()) == {"error"}


def test_another_host_is_not_answered(client: TestClient):
    assert client.get("/", headers={"host": "evil.example"}).status_code == 400


def test_twenty_clients_are_answered(client: TestClient, ask):
    found: list[int] = []

    def one() -> None:
        found.append(client.post("/api/ask", json=ask()).status_code)

    threads = [threading.Thread(target=one) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [200] * 20
    assert client.get("/api/health").json()["waiting"] == 0


def test_a_full_line_says_when_to_come_back(demo: Path, ask):
    app = make(Shelf(offer([str(demo)])), line=Line(waiting=0))
    with TestClient(app, base_url="http://127.0.0.1") as client:
        found = client.post("/api/ask", json=ask())
    assert found.status_code == 503 and found.headers["retry-after"] == "2"


def test_a_mistake_of_ours_says_nothing_of_itself(demo: Path, ask, monkeypatch, capsys):
    def broken(*given: object) -> None:
        raise RuntimeError("the secret path /home/x")

    monkeypatch.setattr(serving, "reply", broken)
    app = make(Shelf(offer([str(demo)])))
    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        found = client.post("/api/ask", json=ask())
    assert found.status_code == 500 and "secret" not in found.text
    assert "secret" in capsys.readouterr().err
