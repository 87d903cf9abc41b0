"""timm's own models: every map is the weights that met the values, fused attention on and off.

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

from tests.parity.timm_maps import MODELS

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(sys.prefix) / "timm"
LIMIT = 300  # seconds; it takes about five


@pytest.fixture(scope="module")
def rows() -> dict[str, Any]:
    """What timm_maps.py found, in a process of its own."""
    command = [sys.executable, "tests/parity/timm_maps.py"]
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


@pytest.mark.parametrize("path", ["fused", "written out"])
@pytest.mark.parametrize("name", MODELS)
def test_maps_are_the_weights_that_met_the_values(
    rows: dict[str, Any], name: str, path: str
) -> None:
    row = rows[f"{name}, {path}"]
    assert row["seen"] == row["modules"], "one map an attention module, in order"
    assert row["own"] == len(row["seen"])
    assert row["difference"] <= 1e-6
    assert row["slope"] <= 1e-5, "the gradient through all maps to the pixels"
    assert row["output"] <= 2e-6, "what the model says is what it says alone"
    assert row["largest"] > 0.4, "an even map would show nothing"


@pytest.mark.parametrize("name", MODELS)
def test_fused_attention_stays_fused(rows: dict[str, Any], name: str) -> None:
    routes = rows[f"{name}, fused"]["routes"]
    if name.startswith("Swin v2"):
        assert routes == ["SOFTMAX"], "timm does not fuse it"
    elif name.startswith("CaiT"):
        assert routes == ["SDPA", "SOFTMAX"], (
            "its talking heads cannot be fused, its last layers are"
        )
    else:
        assert routes == ["SDPA"]
    assert rows[f"{name}, written out"]["routes"] == ["SOFTMAX"]


@pytest.mark.parametrize("path", ["fused", "written out"])
def test_talking_heads_are_signed_and_nothing_else_is(rows: dict[str, Any], path: str) -> None:
    for name in MODELS:
        row = rows[f"{name}, {path}"]
        signed = [module for module, kind in row["kinds"].items() if kind == "SIGNED"]
        if name.startswith("CaiT"):
            assert signed == ["blocks.0.attn", "blocks.1.attn"]
            assert row["lowest"] < 0, "heads were mixed with weights of both signs"
        else:
            assert signed == []
            assert row["lowest"] >= 0
