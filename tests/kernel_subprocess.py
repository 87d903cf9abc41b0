"""Run cases in a subprocess without runtime type checks.

Triton and compiled graphs read the source of functions, which type checking would wrap.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from overt.capture.kernels import triton_launch


def assert_cases_pass(cases: Path) -> None:
    """Check that all cases of a file pass, on a GPU or else in Triton's interpreter."""
    if not triton_launch.triton_installed():
        pytest.skip("Triton is not installed")
    run_cases(cases, {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"})


def run_cases(cases: Path, variables: dict[str, str]) -> None:
    """Check that all cases of a file pass without skips; `variables` extend the environment."""
    words = ["-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", "-c", os.devnull]
    done = subprocess.run(
        [sys.executable, *words, "--rootdir", str(cases.parent), str(cases)],
        env={**os.environ, **variables, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
