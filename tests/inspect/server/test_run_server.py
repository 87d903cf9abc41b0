"""Running the server: ports, URLs, corrupt runs, and shutdown."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from overt.errors import CorruptFileError, UserError
from overt.inspect.server import app as serving
from overt.inspect.server.address import Address
from overt.inspect.server.app import create_app
from overt.inspect.server.model_cache import ModelCache, find_models
from overt.inspect.server.run_server import announce, listen, serve
from tests.inspect.server import http_load
from tests.inspect.server.live_server import TIMEOUT, live_server


def test_a_port_in_use_raises():
    """The port is bound before the first model is loaded."""
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT).close()
        with pytest.raises(UserError, match="another port"):
            listen("127.0.0.1", port)
    with pytest.raises(UserError, match=r"address.*machine"):
        listen("no such host at all", 0)


def has_ipv6() -> bool:
    try:
        with listen("::1", 0):
            return True
    except UserError:
        return False


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "::1", "0.0.0.0", "::"])
def test_the_printed_url_gets_a_response(demo: Path, host: str):
    if ":" in host and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    lines: list[str] = []
    with listen(host, 0) as taken:
        address = Address(host, (), taken.getsockname()[0])
        announce(["soft"], address, taken.getsockname()[1], lines.append)
        url = next(word for word in lines[0].split() if word.startswith("http://"))
        with live_server(create_app(ModelCache(find_models([str(demo)])), address), taken):
            assert is_answered(f"{url}/api/health")
            other = urllib.request.Request(f"{url}/api/health", headers={"Host": "evil.example"})
            with pytest.raises(urllib.error.HTTPError, match="400"):
                urllib.request.urlopen(other, timeout=TIMEOUT)
    assert (len(lines) == 1) == address.is_loopback


@pytest.mark.parametrize("name", ["", "a b", "http://x.org", "x.org/path", "x.org:99999"])
def test_an_invalid_extra_host_name_is_rejected(demo: Path, name: str):
    with pytest.raises(UserError, match=r"not.*host name"):
        serve([str(demo)], port=0, also=[name])


def test_other_runs_are_served_if_the_first_is_corrupt(demo: Path, tmp_path: Path, monkeypatch):
    shutil.copytree(demo, tmp_path / "runs")
    (tmp_path / "runs" / "soft" / "model" / "model.safetensors").write_bytes(b"cut off")
    lines: list[str] = []
    monkeypatch.setattr("uvicorn.Server.run", lambda *given, **named: None)
    serve([str(tmp_path / "runs")], port=0, say=lines.append)
    assert lines[0].startswith("soft cannot be loaded: ") and "average" in lines[1]
    (tmp_path / "runs" / "average" / "model" / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises((UserError, CorruptFileError)):
        serve([str(tmp_path / "runs")], port=0, say=lines.append)


@pytest.mark.long
def test_the_server_stops_cleanly_on_ctrl_c(demo: Path, tmp_path: Path):
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "overt", "serve", str(demo), "--port", "0"],
        cwd=Path(__file__).parents[2],
        env=env,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        address = next(word for word in line.split() if word.startswith("http://"))
        wait_for(lambda: is_answered(f"{address}/api/health"))
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=TIMEOUT) == 0
        assert "Stopped." in process.stderr.read()
        with socket.socket() as again, pytest.raises(OSError, match="refused"):
            again.connect(("127.0.0.1", int(address.rsplit(":", 1)[1])))
    finally:
        process.kill()
        process.wait()


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait for a condition, with a timeout for a loaded machine."""
    end = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < end, "the condition was never true"
        time.sleep(0.05)


def is_answered(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=TIMEOUT) as found:
            return bool(found.status == 200)
    except OSError:
        return False


@pytest.mark.long
def test_requests_in_progress_finish_before_the_server_stops(demo: Path, ask, monkeypatch):
    """Later connections are refused."""
    started, go = threading.Event(), threading.Event()

    def slow(*given: object) -> dict[str, bool]:
        started.set()
        assert go.wait(TIMEOUT)
        return {"answered": True}

    monkeypatch.setattr(serving, "build_response", slow)
    responses: list[tuple[int, bytes]] = []
    with live_server(create_app(ModelCache(find_models([str(demo)])))) as address:
        thread = threading.Thread(
            target=lambda: responses.append(http_load.send_request(address, "/api/ask", ask()))
        )
        thread.start()
        assert started.wait(TIMEOUT)
        threading.Timer(0.2, go.set).start()
    thread.join(TIMEOUT)
    assert responses == [(200, b'{"answered":true}')]
    with pytest.raises(OSError, match="refused"):
        http_load.send_request(address, "/api/health")
