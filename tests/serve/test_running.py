import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from overt.errors import BadInput
from overt.serve.running import is_this_machine, listen


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
        for _ in range(200):
            try:
                with urllib.request.urlopen(f"{address}/api/health", timeout=20) as found:
                    assert found.status == 200
                break
            except OSError:
                time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
        assert "Stopped." in process.stderr.read()
        with socket.socket() as again, pytest.raises(OSError, match="refused"):
            again.connect(("127.0.0.1", int(address.rsplit(":", 1)[1])))
    finally:
        process.kill()
        process.wait()
