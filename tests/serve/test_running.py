import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from overt.errors import BadInput
from overt.serve import app as serving
from overt.serve.app import make
from overt.serve.running import is_this_machine, listen
from overt.serve.shelf import Shelf, offer
from tests.serve import soaking
from tests.serve.running import PATIENCE, served


def test_a_place_that_is_taken_is_told():
    with listen("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(BadInput, match="choose another with --port"):
            listen("127.0.0.1", port)
    with pytest.raises(BadInput, match="no address of this machine"):
        listen("no such host at all", 0)


@pytest.mark.parametrize(
    ("host", "own"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("x.org", False)],
)
def test_who_can_reach_an_address(host: str, own: bool):
    assert is_this_machine(host) is own


@pytest.mark.long
def test_it_serves_until_ctrl_c_and_ends_in_good_order(demo: Path, tmp_path: Path):
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
        assert process.wait(timeout=PATIENCE) == 0
        assert "Stopped." in process.stderr.read()
        with socket.socket() as again, pytest.raises(OSError, match="refused"):
            again.connect(("127.0.0.1", int(address.rsplit(":", 1)[1])))
    finally:
        process.kill()
        process.wait()


def wait_for(holds: Callable[[], bool]) -> None:
    """Wait until something holds, for as long as a loaded machine may need."""
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, "it never came to hold"
        time.sleep(0.05)


def is_answered(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=PATIENCE) as found:
            return bool(found.status == 200)
    except OSError:
        return False


@pytest.mark.long
def test_an_answer_that_has_begun_is_given_before_the_server_ends(demo: Path, ask, monkeypatch):
    """Who has asked gets the answer; who asks after that finds nobody."""
    begun, go = threading.Event(), threading.Event()

    def slow(*given: object) -> dict[str, bool]:
        begun.set()
        assert go.wait(PATIENCE)
        return {"answered": True}

    monkeypatch.setattr(serving, "reply", slow)
    told: list[tuple[int, bytes]] = []
    with served(make(Shelf(offer([str(demo)])))) as address:
        asking = threading.Thread(
            target=lambda: told.append(soaking.once(address, "/api/ask", ask()))
        )
        asking.start()
        assert begun.wait(PATIENCE)
        threading.Timer(0.2, go.set).start()
    asking.join(PATIENCE)
    assert told == [(200, b'{"answered":true}')]
    with pytest.raises(OSError, match="refused"):
        soaking.once(address, "/api/health")
