"""Gradients of one and two processes are equal with uneven supervised rows in every wrapper."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from overt import io
from tests.train import distributed_gradients
from tests.train.sentences import bert, full_batch
from tests.train.test_integrations import assert_same_weights, train_manually

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run all cases in one launch, because starting takes most of the time."""
    out = tmp_path_factory.mktemp("two")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    words = [*distributed_gradients.CASES, "watch-warnings", "loss-outside", "trainer-weights"]
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "tests.train.distributed_gradients", str(out), *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.mark.long
@pytest.mark.parametrize("case", distributed_gradients.CASES)
def test_two_processes_have_the_same_gradients_as_one(outputs: Path, case: str) -> None:
    """Supervised rows per process: 2 and 1, 3 and 0; with and without the task loss."""
    expected = distributed_gradients.gradients(
        distributed_gradients.make(), full_batch(), distributed_gradients.CASES[case].objective
    )
    for rank in (0, 1):
        found = io.read_tensors(outputs / case / f"rank-{rank}.safetensors")
        assert set(found) == set(expected)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12, msg=name)
    assert any(gradient.abs().max() > 1e-3 for gradient in expected.values())


@pytest.mark.long
def test_trainer_on_two_processes_takes_the_same_steps_as_a_manual_loop(outputs: Path) -> None:
    model = bert()
    model.load_state_dict(
        io.read_tensors(outputs / "trainer-weights" / "rank-1.safetensors"), strict=False
    )
    assert_same_weights(model, train_manually()[0])


@pytest.mark.long
def test_watching_a_wrapped_model_warns_and_suggests_wrap(outputs: Path) -> None:
    (outcomes,) = io.read_json(outputs / "watch-warnings" / "rank-0.json")
    assert "DistributedDataParallel" in outcomes and "overt.wrap(model, loss=...)" in outcomes


@pytest.mark.long
def test_outside_the_wrapper_an_attention_loss_without_task_loss_fails(outputs: Path) -> None:
    """DDP expects gradients of the parameters that computed the logits."""
    outcomes = io.read_json(outputs / "loss-outside" / "rank-0.json")
    for wrapper in ("ddp", "ddp_find_unused"):
        assert outcomes[f"{wrapper}-task_and_attention"] == "done"
        assert "did not receive grad" in outcomes[f"{wrapper}-attention_only"]
