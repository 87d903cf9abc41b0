"""docs/integrations.md with the real libraries, which `make .venv/.apart` installs apart.

They are kept out of the environment of the other tests: transformers and others change their
behavior where wandb, mlflow or datasets can be imported.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(sys.prefix) / "integrations"

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not FOLDER.is_dir(), reason=f"{FOLDER} is missing: run `make .venv/.apart`"),
]


def test_every_block_runs_with_the_real_libraries() -> None:
    name = "tests/test_readme.py::test_code_blocks_of_pages_run[docs/integrations.md]"
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", name],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(FOLDER)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 passed" in found.stdout, found.stdout + found.stderr
