"""Two processes with uneven supervised rows give the gradients of one, in every wrapper."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from overt import files
from tests.train import wrapped
from tests.train.sentences import bert, everything
from tests.train.test_trainer import assert_same, by_hand

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cases in one launch: most of the time goes into starting."""
    out = tmp_path_factory.mktemp("two")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    words = [*wrapped.CASES, "warned", "outside", "trained"]
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "tests.train.wrapped", str(out), *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.mark.parametrize("case", wrapped.CASES)
def test_two_processes_have_the_gradients_of_one(together: Path, case: str) -> None:
    """Two supervised rows beside one, three beside none; attention alone, and with the task."""
    alone = wrapped.gradients(wrapped.make(), everything(), wrapped.CASES[case].objective)
    for rank in (0, 1):
        found = files.read_tensors(together / case / f"rank-{rank}.safetensors")
        assert set(found) == set(alone)
        for name, gradient in alone.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12, msg=name)
    assert any(gradient.abs().max() > 1e-3 for gradient in alone.values())


def test_trainer_on_two_processes_takes_the_steps_of_a_loop_by_hand(together: Path) -> None:
    model = bert()
    model.load_state_dict(
        files.read_tensors(together / "trained" / "rank-1.safetensors"), strict=False
    )
    assert_same(model, by_hand()[0])


def test_watching_a_wrapped_model_warns_and_names_adopt(together: Path) -> None:
    (told,) = files.read_json(together / "warned" / "rank-0.json")
    assert "outside DistributedDataParallel" in told and "overt.adopt(model, loss=...)" in told


def test_outside_the_wrapper_a_loss_on_attention_alone_fails(together: Path) -> None:
    """Why it is computed inside: PyTorch waits for gradients of what made the logits."""
    told = files.read_json(together / "outside" / "rank-0.json")
    for wrapper in ("plain", "unused"):
        assert told[f"{wrapper}-both"] == "done"
        assert "did not receive grad" in told[f"{wrapper}-attention_alone"]
