"""Trust 18: the scripts in examples/, with two "machines" on one host."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from overt import io

ROOT = Path(__file__).resolve().parents[2]
TINY = ["data.limit=16", "model.width=0.25", "train.steps=2"]
ARGUMENTS = ["scenes-soft", "--device", "cpu", *(word for one in TINY for word in ("--set", one))]

SRUN = """#!/usr/bin/env bash
# Starts a command once per machine of the job, as srun does, all on this host.
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
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def environment(**more: str) -> dict[str, str]:
    common = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHON": sys.executable}
    return {**os.environ, **common, **more}


@pytest.mark.long
def test_a_slurm_job_on_two_machines_finishes(tmp_path: Path, record_result) -> None:
    """The job script starts the torchrun script on each machine."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    for attempt in range(5):  # another process may have taken the port
        out = tmp_path / f"run-{attempt}"
        done = subprocess.run(
            ["bash", str(ROOT / "examples" / "slurm.sbatch"), *ARGUMENTS],
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
    results = io.read_json(out / "results.json")
    assert (results["status"], results["world_size"]) == ("done", 2)
    io.verify(out)
    record_result(
        18,
        "SLURM and torchrun examples were run",
        "both scripts unchanged, two machines with one process each on one host: done",
    )


def test_the_torchrun_script_exits_with_the_missing_argument() -> None:
    script = str(ROOT / "examples" / "torchrun.sh")
    without_variables = {
        name: value for name, value in environment().items() if name not in ("HEAD_NODE", "OUT")
    }
    for variables, message, code in (
        (without_variables, "HEAD_NODE=machine:port", 1),
        (environment(HEAD_NODE="127.0.0.1:1"), "set OUT=folder", 1),
        (environment(HEAD_NODE="127.0.0.1:1", OUT="runs/none"), "a recipe is required", 2),
    ):
        done = subprocess.run(
            ["bash", script], env=variables, capture_output=True, text=True, check=False
        )
        assert message in done.stderr and done.returncode == code
