"""Trust 18: the scripts in examples/ as they are, with two "machines" that are one."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from overt import files

ROOT = Path(__file__).resolve().parents[2]
TINY = ["data.limit=16", "model.width=0.25", "train.steps=2"]
ASKED = ["scenes-soft", "--device", "cpu", *(word for one in TINY for word in ("--set", one))]

SRUN = """#!/usr/bin/env bash
# Starts a command once for every machine of the job, as srun does; all of them are this one.
shift
for _ in $(seq "$SLURM_NNODES"); do "$@" & started+=($!); done
for one in "${started[@]}"; do wait "$one" || failed=1; done
exit "${failed:-0}"
"""
SCONTROL = """#!/usr/bin/env bash
echo 127.0.0.1
echo 127.0.0.1
"""


def free_port() -> int:
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        return int(asked.getsockname()[1])


def environment(**more: str) -> dict[str, str]:
    plain = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHON": sys.executable}
    return {**os.environ, **plain, **more}


@pytest.mark.long
def test_a_slurm_job_of_two_machines_comes_to_its_end(tmp_path: Path, reached) -> None:
    """The job script starts the other one on each machine, which is what one does without SLURM."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    for attempt in range(5):  # somebody may have taken the port meanwhile
        out = tmp_path / f"run-{attempt}"
        done = subprocess.run(
            ["bash", str(ROOT / "examples" / "slurm.sbatch"), *ASKED],
            cwd=ROOT,
            env=environment(
                PATH=f"{tools}:{os.environ['PATH']}",
                SLURM_JOB_NODELIST="two",
                SLURM_NNODES="2",
                SLURM_JOB_ID="7",
                SLURM_SUBMIT_DIR=str(ROOT),
                PORT=str(free_port()),
                OUT=str(out),
                TRIES="1",
                PAUSE="0",
            ),
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        if done.returncode == 0:
            break
    assert done.returncode == 0, done.stdout + done.stderr
    results = files.read_json(out / "results.json")
    assert (results["status"], results["world_size"]) == ("done", 2)
    files.verify(out)
    reached(
        18,
        "SLURM and torchrun examples were run",
        "both scripts as they are, two machines with a process each on one host: done",
    )


def test_the_torchrun_script_says_what_it_needs() -> None:
    script = str(ROOT / "examples" / "torchrun.sh")
    bare = {
        name: value for name, value in environment().items() if name not in ("HEAD_NODE", "OUT")
    }
    for given, told, code in (
        (bare, "say HEAD_NODE=machine:port", 1),
        (environment(HEAD_NODE="127.0.0.1:1"), "say OUT=folder", 1),
        (environment(HEAD_NODE="127.0.0.1:1", OUT="runs/none"), "say which recipe", 2),
    ):
        done = subprocess.run(
            ["bash", script], env=given, capture_output=True, text=True, check=False
        )
        assert told in done.stderr and done.returncode == code
