"""`overt measure` on timm's models: one that attends, and one of convolutions alone."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(sys.prefix) / "timm"


@pytest.mark.long
def test_a_vit_has_attention_and_a_resnet_class_activation(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.parity.timm_measure", str(tmp_path)]
    if FOLDER.is_dir():
        command.append(str(FOLDER))
    elif importlib.util.find_spec("timm") is None:
        pytest.skip(f"timm is not there: `make .venv/.apart` lays it into {FOLDER}")
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    vit, resnet = found["vit_tiny_patch16_224"], found["resnet10t"]
    assert vit["maps"][:2] == ["attention", "gradient"]
    assert "class activation" not in vit["maps"]
    assert {"deletion_area@mask", "output_change_evened"} <= set(vit["measures"])
    assert resnet["maps"][:2] == ["class activation", "gradient"]
    assert set(resnet["measures"]) == {"mass_inside", "deletion_area@mean"}
