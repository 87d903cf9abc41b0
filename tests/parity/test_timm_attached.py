"""Attention attached to timm's own models reads what timm calls its intermediate features."""

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
LIMIT = 300  # seconds; it takes about ten
FIRST, LAST, TOKENS = "channels first", "channels last", "tokens"
LEVELS: dict[str, list[list[Any]]] = {
    "ResNet": [[f"layer{at}", FIRST, 0] for at in (2, 3, 4)],
    "ConvNeXt": [[f"stages.{at}", FIRST, 0] for at in (1, 2, 3)],
    "EfficientNet": [[f"blocks.{at}", FIRST, 0] for at in (2, 3, 4)],
    "ViT": [[f"blocks.{at}", TOKENS, 1] for at in (1, 3, 5)],
    "ViT with registers": [[f"blocks.{at}", TOKENS, 5] for at in range(3)],
    "DeiT": [[f"blocks.{at}", TOKENS, 2] for at in range(3)],
    "Swin": [[f"layers.{at}", LAST, 0] for at in range(3)],
    "pyramid": [[f"[{at}]", FIRST, 0] for at in (2, 3, 4)],
}
each = pytest.mark.parametrize("name", LEVELS)


@pytest.fixture(scope="module")
def rows() -> dict[str, Any]:
    """What timm_attached.py found, in a process of its own, where the contract was checked too."""
    command = [sys.executable, "-m", "tests.parity.timm_attached"]
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


@each
def test_levels_are_the_last_resolutions_or_blocks_spread_evenly(
    rows: dict[str, Any], name: str
) -> None:
    assert rows[name]["levels"] == LEVELS[name]


@each
def test_the_last_level_is_the_last_intermediate_of_timm(rows: dict[str, Any], name: str) -> None:
    """Without class, distillation and register tokens, and with channels first."""
    assert rows[name]["intermediates"] == (None if name == "pyramid" else 0)


@each
def test_it_is_read_back_by_itself_where_timm_can_build_it(rows: dict[str, Any], name: str) -> None:
    unusual = name in ("ViT with registers", "DeiT", "Swin")  # timm does not keep what it was told
    assert rows[name]["library"] == (None if unusual else "timm")
    assert rows[name]["saved"] == 0


@each
def test_a_folder_is_looked_at_with_the_transform_of_timm(rows: dict[str, Any], name: str) -> None:
    row = rows[name]
    assert row["panels"] == (len(row["levels"]) if row["library"] else None)
