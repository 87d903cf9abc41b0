"""timm's own models lose tokens as if these were hidden, position biases and rotations included.

`make .venv/.apart` lays timm and torchvision into .venv/timm, which nothing else looks into.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.parity.timm_thinning import MODELS

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(sys.prefix) / "timm"
LIMIT = 300  # seconds; it takes about five


@pytest.fixture(scope="module")
def rows() -> dict[str, Any]:
    """What timm_thinning.py found, in a process of its own."""
    command = [sys.executable, "-m", "tests.parity.timm_thinning"]
    if FOLDER.is_dir():
        command.append(str(FOLDER))
    elif importlib.util.find_spec("timm") is None:
        pytest.skip(f"timm is not there: `make .venv/.apart` lays it into {FOLDER}")
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=LIMIT, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", MODELS)
def test_keeping_all_is_the_untouched_model_exactly(rows: dict[str, Any], name: str) -> None:
    assert rows[name]["all"] == rows[name]["merge none"] == 0
    assert rows[name]["after"] == 0, "and it is left as found"


@pytest.mark.parametrize("name", MODELS)
def test_thinning_is_hiding_what_went(rows: dict[str, Any], name: str) -> None:
    row = rows[name]
    for rule in ("half", "adaptive"):
        assert row[rule] <= 1e-5
        assert row[f"{rule} moved"] > 0.1, "tokens that do not matter would show nothing"
        assert row[f"{rule} lengths"][-1] < row[f"{rule} lengths"][0]
    assert len(set(row["half kept"])) == 1 and len(set(row["adaptive kept"])) > 1


@pytest.mark.parametrize("name", MODELS)
def test_tokens_merge(rows: dict[str, Any], name: str) -> None:
    n = rows[name]["merged lengths"][0]
    assert rows[name]["merged"] and rows[name]["merged lengths"] == [n, n - 3, n - 6]


def test_what_stands_around_the_cells_is_known(rows: dict[str, Any]) -> None:
    assert rows["DeiT"]["spans"] == ["class", "distillation", "image"]
    assert rows["ViT with registers, normed queries"]["spans"] == ["class", "registers", "image"]
    assert rows["ViT with pooling by attention"]["spans"] == ["image"]


def test_attention_that_is_written_out(rows: dict[str, Any]) -> None:
    assert rows["written out"] <= 1e-5
    assert "position bias of its own" in rows["refused"]
    assert "leave out rest=" in rows["EVA-02 (rotated)"]["fused"]
