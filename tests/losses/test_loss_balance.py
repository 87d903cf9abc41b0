"""Loss balancing: ratio of the first batches, state, logs, resume, several processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from overt import io
from overt.losses import Loss, LossBalancer, SupervisedModel
from tests.losses import adversarial_run

ROOT = Path(__file__).resolve().parents[2]


def loss(total: float, count: float) -> Loss:
    return Loss(torch.tensor(total), torch.tensor(count))


def test_weight_is_the_loss_ratio_of_the_first_batches():
    scale = LossBalancer(batches=2)
    assert scale.weight == 1.0
    first = scale(loss(20.0, 10.0), loss(0.4, 8.0))  # 2 per sample and 0.05 per row
    assert first.weight == pytest.approx(40.0)
    second = scale(loss(10.0, 10.0), loss(0.8, 4.0))  # 30 / 20 and 1.2 / 12 together
    assert second.weight == pytest.approx(15.0)
    third = scale(loss(1000.0, 10.0), loss(0.1, 4.0))
    assert third.weight == scale.weight == second.weight
    assert third.total == loss(0.1, 4.0).total, "only the weight changes"


def test_batches_without_supervised_rows_do_not_count():
    scale = LossBalancer(batches=1)
    assert scale(loss(5.0, 5.0), loss(0.0, 0.0)).weight == 1.0
    assert scale(loss(8.0, 4.0), loss(1.0, 1.0)).weight == 2.0
    assert scale(loss(80.0, 4.0), loss(1.0, 1.0)).weight == 2.0


def test_balancer_multiplies_the_given_weight_and_keeps_batch_level():
    scale = LossBalancer(batches=1)
    half = 0.5 * Loss(torch.tensor(1.0), torch.tensor(1.0), batch_level=True)
    found = scale(loss(4.0, 1.0), half)
    assert found.weight == pytest.approx(2.0) and found.batch_level


def test_gradient_flows_through_the_loss_only():
    value = torch.tensor(3.0, requires_grad=True)
    scale = LossBalancer(batches=1)
    found = scale(Loss(value * 2, torch.tensor(1.0)), Loss(value, torch.tensor(1.0)))
    found.mean().backward()
    assert float(value.grad) == pytest.approx(2.0)
    assert not any(buffer.requires_grad for buffer in scale.buffers())


def test_state_dict_restores_the_weight():
    scale, other = LossBalancer(2), LossBalancer(2)
    scale(loss(6.0, 1.0), loss(2.0, 1.0))
    scale(loss(6.0, 1.0), loss(2.0, 1.0))
    for _ in range(2):
        other(loss(1.0, 1.0), loss(1.0, 1.0))
    assert other.weight == 1.0
    other.load_state_dict(scale.state_dict())
    assert other.weight == 3.0
    assert other(loss(60.0, 1.0), loss(2.0, 1.0)).weight == 3.0


def test_negative_losses_raise_and_nan_is_ignored():
    with pytest.raises(ValueError, match=r"loss is -0\.5"):
        LossBalancer()(loss(1.0, 1.0), loss(-0.5, 1.0))
    scale = LossBalancer(1)
    scale(loss(float("nan"), 1.0), loss(1.0, 1.0))
    assert scale.weight == 1.0 and int(scale.seen) == 0
    with pytest.raises(ValueError, match="batches .* 0"):
        LossBalancer(0)


def test_supervised_model_runs_the_model_and_names_loss_modules():
    net = SupervisedModel(nn.Linear(2, 1), gamma=LossBalancer())
    assert net(torch.zeros(3, 2)).shape == (3, 1)
    assert list(net.loss_modules) == ["gamma"] and isinstance(net.gamma, LossBalancer)
    assert {name.split(".")[0] for name in net.state_dict()} == {"model", "gamma"}
    with pytest.raises(ValueError, match="'forward'"):
        SupervisedModel(nn.Linear(2, 1), forward=LossBalancer())


def run_files(out: Path) -> dict[str, bytes]:
    newest = sorted((out / "checkpoints" / "train").glob("step-*"))[-1]
    found = {p.name: p.read_bytes() for p in newest.iterdir() if p.suffix == ".safetensors"}
    return {**found, "log": (out / "log.jsonl").read_bytes()}


@pytest.mark.long
@pytest.mark.parametrize("crash", [2, 4, 11])
def test_adversarial_run_resumes_to_identical_files(tmp_path: Path, crash: int) -> None:
    """Interrupted while the weight is measured, directly after, and late."""
    whole = adversarial_run.train(tmp_path / "whole")

    class Interrupted(Exception):
        pass

    def broken(net, batch, progress):
        if progress.step == crash:
            raise Interrupted
        return adversarial_run.with_coral(net, batch, progress)

    with pytest.raises(Interrupted):
        adversarial_run.train(tmp_path / "broken", step=broken)
    resumed = adversarial_run.train(tmp_path / "broken", resume=True)
    assert resumed.gamma.weight == whole.gamma.weight != 1.0
    assert resumed.beta.weight == whole.beta.weight > 100
    assert run_files(tmp_path / "broken") == run_files(tmp_path / "whole")


def test_log_has_the_weight_and_unweighted_losses(tmp_path: Path) -> None:
    net = adversarial_run.train(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    shown = [line["losses"] for line in lines if line["split"] == "train"]
    assert shown[-1]["gamma"] == net.gamma.weight
    assert shown[0]["gamma"] != net.gamma.weight, (
        "the first lines are from before the weight is fixed"
    )
    assert all(0.2 < one["map"] < 2 for one in shown), "not multiplied by the weight"
    assert {"task", "map", "coral", "gamma", "rival/rival"} == set(shown[-1])


@pytest.mark.long
def test_two_processes_measure_one_weight_and_train_as_one_process(tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "tests.losses.adversarial_run", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = {
        name: [io.read_tensors(tmp_path / f"{name}-rank-{rank}.safetensors") for rank in (0, 1)]
        for name in ("plain", "coral")
    }
    for one, two in found.values():
        assert all(torch.equal(one[key], two[key]) for key in one)
    alone = adversarial_run.train(
        tmp_path / "alone", dropout=0.0, step=adversarial_run.step
    ).state_dict()
    for key, value in alone.items():
        torch.testing.assert_close(found["plain"][0][key], value, rtol=1e-9, atol=1e-10, msg=key)
    # a batch-level loss has one row on each process with at least two samples
    assert 4 < found["coral"][0]["beta.sums"][1, 1] <= 2 * 4
