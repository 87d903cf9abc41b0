"""Cases in a process of their own that checks no types: Triton and graphs that are compiled read
functions, and have to find them as they were written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from overt.capture import launching


def held(cases: Path) -> None:
    """All cases of a file hold: on a card where there is one, else by Triton's interpreter."""
    if not launching.installed():
        pytest.skip("Triton is not installed")
    apart(cases, {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"})


def apart(cases: Path, how: dict[str, str]) -> None:
    """All cases of a file hold, and none is skipped; `how` is added to the environment."""
    words = ["-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", "-c", os.devnull]
    done = subprocess.run(
        [sys.executable, *words, "--rootdir", str(cases.parent), str(cases)],
        env={**os.environ, **how, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
