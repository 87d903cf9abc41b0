"""The measured weight: the ratio of the first batches, frozen, logged, the same after a stop."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from overt import files
from overt.supervise import Loss, Scale, Taught
from tests.supervise import many

ROOT = Path(__file__).resolve().parents[2]


def loss(total: float, count: float) -> Loss:
    return Loss(torch.tensor(total), torch.tensor(count))


def test_the_ratio_of_the_first_batches_by_hand():
    scale = Scale(batches=2)
    assert scale.weight == 1.0
    first = scale(loss(20.0, 10.0), loss(0.4, 8.0))  # 2 a sample and 0.05 a row
    assert first.weight == pytest.approx(40.0)
    second = scale(loss(10.0, 10.0), loss(0.8, 4.0))  # 30 / 20 and 1.2 / 12 together
    assert second.weight == pytest.approx(15.0)
    third = scale(loss(1000.0, 10.0), loss(0.1, 4.0))
    assert third.weight == scale.weight == second.weight
    assert third.total == loss(0.1, 4.0).total, "only the weight is changed"


def test_batches_without_a_supervised_row_do_not_count():
    scale = Scale(batches=1)
    assert scale(loss(5.0, 5.0), loss(0.0, 0.0)).weight == 1.0
    assert scale(loss(8.0, 4.0), loss(1.0, 1.0)).weight == 2.0
    assert scale(loss(80.0, 4.0), loss(1.0, 1.0)).weight == 2.0


def test_a_weight_that_was_given_is_kept_and_batch_level_stays():
    scale = Scale(batches=1)
    half = 0.5 * Loss(torch.tensor(1.0), torch.tensor(1.0), batch_level=True)
    found = scale(loss(4.0, 1.0), half)
    assert found.weight == pytest.approx(2.0) and found.batch_level


def test_the_gradient_goes_through_the_loss_and_not_through_the_weight():
    value = torch.tensor(3.0, requires_grad=True)
    scale = Scale(batches=1)
    found = scale(Loss(value * 2, torch.tensor(1.0)), Loss(value, torch.tensor(1.0)))
    found.mean().backward()
    assert float(value.grad) == pytest.approx(2.0)
    assert not any(buffer.requires_grad for buffer in scale.buffers())


def test_it_is_in_the_state_and_what_was_loaded_decides():
    scale, other = Scale(2), Scale(2)
    scale(loss(6.0, 1.0), loss(2.0, 1.0))
    scale(loss(6.0, 1.0), loss(2.0, 1.0))
    for _ in range(2):
        other(loss(1.0, 1.0), loss(1.0, 1.0))
    assert other.weight == 1.0
    other.load_state_dict(scale.state_dict())
    assert other.weight == 3.0
    assert other(loss(60.0, 1.0), loss(2.0, 1.0)).weight == 3.0


def test_losses_below_zero_have_no_scale_and_nan_is_left_to_the_loop():
    with pytest.raises(ValueError, match="no weight brings a loss below zero"):
        Scale()(loss(1.0, 1.0), loss(-0.5, 1.0))
    scale = Scale(1)
    scale(loss(float("nan"), 1.0), loss(1.0, 1.0))
    assert scale.weight == 1.0 and int(scale.seen) == 0
    with pytest.raises(ValueError, match="one batch or more, not 0"):
        Scale(0)


def test_teachers_have_names_and_only_the_model_answers():
    net = Taught(nn.Linear(2, 1), gamma=Scale())
    assert net(torch.zeros(3, 2)).shape == (3, 1)
    assert list(net.teachers) == ["gamma"] and isinstance(net.gamma, Scale)
    assert {name.split(".")[0] for name in net.state_dict()} == {"model", "gamma"}
    with pytest.raises(ValueError, match="cannot be called 'forward'"):
        Taught(nn.Linear(2, 1), forward=Scale())


def fingerprint(out: Path) -> dict[str, bytes]:
    newest = sorted((out / "checkpoints" / "train").glob("step-*"))[-1]
    found = {p.name: p.read_bytes() for p in newest.iterdir() if p.suffix == ".safetensors"}
    return {**found, "log": (out / "log.jsonl").read_bytes()}


@pytest.mark.parametrize("crash", [2, 4, 11])
def test_a_run_with_two_players_goes_on_bit_for_bit(tmp_path: Path, crash: int) -> None:
    """Broken off while the scale is being measured, just after, and late."""
    whole = many.train(tmp_path / "whole")

    class Interrupted(Exception):
        pass

    def broken(net, batch, progress):
        if progress.step == crash:
            raise Interrupted
        return many.with_coral(net, batch, progress)

    with pytest.raises(Interrupted):
        many.train(tmp_path / "broken", step=broken)
    resumed = many.train(tmp_path / "broken", resume=True)
    assert resumed.gamma.weight == whole.gamma.weight != 1.0
    assert resumed.beta.weight == whole.beta.weight > 100
    assert fingerprint(tmp_path / "broken") == fingerprint(tmp_path / "whole")


def test_the_log_holds_the_weight_and_losses_as_they_are(tmp_path: Path) -> None:
    net = many.train(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    shown = [line["losses"] for line in lines if line["split"] == "train"]
    assert shown[-1]["gamma"] == net.gamma.weight
    assert shown[0]["gamma"] != net.gamma.weight, "the first lines are from the measuring"
    assert all(0.2 < one["map"] < 2 for one in shown), "not multiplied by the weight"
    assert {"task", "map", "coral", "gamma", "rival/rival"} == set(shown[-1])


@pytest.mark.long
def test_two_processes_measure_one_weight_and_take_the_steps_of_one(tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "tests.supervise.many", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = {
        name: [files.read_tensors(tmp_path / f"{name}-rank-{rank}.safetensors") for rank in (0, 1)]
        for name in ("plain", "coral")
    }
    for one, two in found.values():
        assert all(torch.equal(one[key], two[key]) for key in one)
    alone = many.train(tmp_path / "alone", dropout=0.0, step=many.step).state_dict()
    for key, value in alone.items():
        torch.testing.assert_close(found["plain"][0][key], value, rtol=1e-9, atol=1e-10, msg=key)
    # a loss over the batch is one row on each process whose share has two samples to compare
    assert 4 < found["coral"][0]["beta.sums"][1, 1] <= 2 * 4
