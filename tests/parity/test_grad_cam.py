"""Grad-CAM, its picture and ROAD's imputation are those of pytorch-grad-cam, to rounding.

`make .venv/.apart` lays pytorch-grad-cam beside timm, which nothing else looks into.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(sys.prefix) / "timm"

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def rows() -> dict[str, Any]:
    """What grad_cams.py found, in a process of its own."""
    command = [sys.executable, "-m", "tests.parity.grad_cams"]
    for name in ("pytorch_grad_cam", "torchvision", "timm", "cv2"):
        if not (FOLDER / name).is_dir() and importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not there: `make .venv/.apart` lays it into {FOLDER}")
    if FOLDER.is_dir():
        command.append(str(FOLDER))
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("layer", "shape"), [("fine", [8, 12]), ("coarse", [4, 6])])
def test_the_heat_of_every_cell_is_theirs(rows: dict[str, Any], layer: str, shape: Any) -> None:
    assert rows[layer]["shape"] == shape
    assert rows[layer]["cells"] <= 1e-6


@pytest.mark.parametrize("layer", ["fine", "coarse"])
def test_every_pixel_of_the_photo_has_their_heat(rows: dict[str, Any], layer: str) -> None:
    """Theirs is stretched by OpenCV, ours drawn by the geometry of the cells."""
    assert rows[layer]["picture"] <= 1e-6


def test_removed_pixels_are_imputed_as_theirs(rows: dict[str, Any]) -> None:
    assert rows["imputed"] <= 1e-6
