"""Run a module in a subprocess with packages that are not in the environment of the tests.

`make .venv/.apart` installs timm, torchvision and pytorch-grad-cam into .venv/timm: with a
torchvision built for another torch, transformers cannot be imported.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(sys.prefix) / "timm"
LIMIT = 300  # seconds; the modules take five to ten


def run_with_packages(
    module: str, *arguments: str, packages: Sequence[str] = ("timm",)
) -> dict[str, Any]:
    """Return the JSON that a module prints in its last line.

    The folder of the packages is its last argument. Skips the test without one of them.
    """
    for name in packages:
        if not (FOLDER / name).is_dir() and importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: `make .venv/.apart` installs it into {FOLDER}")
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(
        [*command, str(FOLDER)] if FOLDER.is_dir() else command,
        capture_output=True, text=True, cwd=ROOT, timeout=LIMIT, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
