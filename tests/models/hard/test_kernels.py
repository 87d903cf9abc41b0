"""The kernels of hard attention, held to plain operations in a process that checks no types: Triton
reads the source of its functions, and has to find them as they were written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from overt.models.hard import card

CASES = Path(__file__).with_name("kernels_held.py")


@pytest.mark.long
def test_the_kernels_are_what_plain_operations_are() -> None:
    if not card.installed():
        pytest.skip("Triton is not installed")
    how = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    words = ["-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", "-c", os.devnull]
    done = subprocess.run(
        [sys.executable, *words, "--rootdir", str(CASES.parent), str(CASES)],
        env={**os.environ, **how, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
