"""Trust 22: thousands of steps do not leak memory, open files or threads."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("plain_training", "attention_training", "surrogate_search", "self_critical_training")
KILOBYTE = 1024


@pytest.mark.long
def test_thousands_of_steps_do_not_leak_memory_files_or_threads(
    tmp_path: Path, record_result, full: bool
) -> None:
    """Plain training, training with an attention loss, surrogate search, self-critical training.

    In the short version only plain training has 2,000 steps. The others have 300 and may use a
    tenth of the memory and a third of the objects of the leaking counterpart, because a single page
    matters over a few hundred steps. A block of the Python allocator has at most 512 bytes, so that
    less than two blocks per step are less than a kilobyte.
    """
    steps = {name: 2000 if full or name == "plain_training" else 300 for name in KINDS}
    words = [
        *(f"{name}:{count}" for name, count in steps.items()),
        "leak_memory:300",
        "leak_files:300",
    ]
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
    results = {one["kind"]: one for one in map(json.loads, done.stdout.splitlines())}
    leaked_bytes, leaked_blocks = (
        results["leak_memory"]["resident"],
        results["leak_memory"]["blocks"],
    )
    assert leaked_bytes > 10 * KILOBYTE and leaked_blocks > 6  # the threshold detects a leak
    assert results["leak_files"]["files"] >= 100
    for name in KINDS:
        found, full_length = results[name], steps[name] == 2000
        assert found["objects"] < KILOBYTE, found
        assert found["blocks"] < (2 if full_length else leaked_blocks / 3), found
        assert found["resident"] < (KILOBYTE if full_length else leaked_bytes / 10), found
        assert found["files"] == 0 and found["threads"] == 0, found
    worst = max(results[name]["resident"] for name in KINDS if steps[name] == 2000)
    record_result(
        22,
        "2,000 steps: memory grows by less than 1 KB per step, files and threads constant",
        f"{'four kinds of work' if full else 'plain training'}: {max(worst, 0) / KILOBYTE:.1f} KB "
        "per step at most, files and threads constant",
        f"kept losses: {leaked_bytes / KILOBYTE:.0f} KB per step; open logs: "
        f"{results['leak_files']['files']} files",
    )
