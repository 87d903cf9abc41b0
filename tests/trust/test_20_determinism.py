"""Trust 20: one seed gives the same weights, maps and metrics in new processes."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from overt import io

SETS = ["data.limit=16", "model.width=0.25", "train.batch=4", "train.steps=4"]
CLOCK = {"started", "seconds", "samples_per_second", "peak_memory", "command", "commit", "clock"}
PARTS = ("weights", "maps", "metrics", "samples", "log")


def run(out: Path, seed: int, hash_seed: int) -> dict[str, str]:
    """Call `overt run` in a new process; SHA-256 of its files, without clock times."""
    arguments = ["run", "scenes-soft", "--out", str(out), "--device", "cpu", "--seed", str(seed)]
    arguments += [word for one in SETS for word in ("--set", one)]
    done = subprocess.run(
        [sys.executable, "-m", "overt", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": str(hash_seed)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = io.read_json(out / "results.json")
    without_clock = {key: value for key, value in results.items() if key not in CLOCK}
    without_clock.pop("seed")
    found = {
        "weights": (out / "model/model.safetensors").read_bytes(),
        "maps": (out / "gallery/arrays.npz").read_bytes(),
        "metrics": repr(without_clock).encode(),
        "samples": (out / "samples.npz").read_bytes(),
        "log": (out / "log.jsonl").read_bytes(),
    }
    return {name: hashlib.sha256(data).hexdigest() for name, data in found.items()}


@pytest.mark.long
def test_the_same_seed_gives_the_same_bytes_in_fresh_processes(tmp_path, record_result) -> None:
    one, two, other = (
        run(tmp_path / str(number), seed, hash_seed)
        for number, (seed, hash_seed) in enumerate([(0, 1), (0, 77), (1, 1)])
    )
    assert one == two
    differ = [name for name in PARTS if other[name] != one[name]]
    assert differ == list(PARTS)
    record_result(
        20,
        "fresh processes, PYTHONHASHSEED 1 and 77: SHA-256 of weights, maps, metrics identical; "
        "another seed differs",
        f"{len(one)} of {len(PARTS)} identical ({', '.join(PARTS)}); with another seed "
        f"{len(differ)} of {len(PARTS)} differ",
        "the other seed differs",
    )
