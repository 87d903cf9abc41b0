"""Trust 22: thousands of steps leave memory, open files and threads as they were."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HONEST = ("plain", "watched", "searching", "critical")
KILOBYTE = 1024


@pytest.mark.long
def test_thousands_of_steps_leave_nothing_behind(tmp_path: Path, reached, full: bool) -> None:
    """Training, training on what is watched, the search for surrogates, self-critical steps.

    In the short form plain training alone has its 2,000 steps. The others have 300, and are held to
    a tenth of the memory and a third of the objects that the leaking counterpart leaves behind:
    over a few hundred steps a page more or less would decide. A block of Python's own is 512 bytes
    at most, so that less than two of them a step is less than a kilobyte.
    """
    steps = {name: 2000 if full or name == "plain" else 300 for name in HONEST}
    words = [*(f"{name}:{count}" for name, count in steps.items()), "leaking:300", "opening:300"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.trust.soak", str(tmp_path), *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = {one["kind"]: one for one in map(json.loads, done.stdout.splitlines())}
    leak, left = told["leaking"]["resident"], told["leaking"]["blocks"]
    assert leak > 10 * KILOBYTE and left > 6  # so the mark can be missed
    assert told["opening"]["files"] >= 100
    for name in HONEST:
        found, whole = told[name], steps[name] == 2000
        assert found["objects"] < KILOBYTE, found
        assert found["blocks"] < (2 if whole else left / 3), found
        assert found["resident"] < (KILOBYTE if whole else leak / 10), found
        assert found["files"] == 0 and found["threads"] == 0, found
    worst = max(told[name]["resident"] for name in HONEST if steps[name] == 2000)
    reached(
        22,
        "2,000 steps: memory grows by less than 1 KB a step, files and threads constant",
        f"{'four kinds of work' if full else 'plain training'}: {max(worst, 0) / KILOBYTE:.1f} KB "
        "a step at most, files and threads constant",
        f"losses that are kept: {leak / KILOBYTE:.0f} KB a step; logs left open: "
        f"{told['opening']['files']} files",
    )
