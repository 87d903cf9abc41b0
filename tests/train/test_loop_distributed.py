"""Training in two processes: the same steps as in one, each file written once, joint stops."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from overt import io
from tests.train import distributed_training

ROOT = Path(__file__).resolve().parents[2]
EQUAL = [name for name in distributed_training.CASES if name.startswith("last") or name == "small"]


def start(out: Path, *words: str, world: int = 2) -> subprocess.Popen[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world)]
    return subprocess.Popen(
        [sys.executable, *launcher, "-m", "tests.train.distributed_training", str(out), *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def launch(out: Path, *words: str, world: int = 2) -> None:
    process = start(out, *words, world=world)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output


def read_outcomes(out: Path, case: str, world: int = 2) -> list[dict[str, object]]:
    return [io.read_json(out / f"{case}-ends" / f"rank-{r}.json") for r in range(world)]


def weights(out: Path, case: str, rank: int = 0) -> dict[str, torch.Tensor]:
    return io.read_tensors(out / f"{case}-ends" / f"rank-{rank}.safetensors")


def checkpoints(out: Path, case: str) -> list[str]:
    return sorted(path.name for path in (out / case / "checkpoints" / "train").iterdir())


def log(out: Path, case: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (out / case / "log.jsonl").read_text().splitlines()]


def assert_close(two_logs: dict[str, torch.Tensor], one_log: dict[str, torch.Tensor]) -> None:
    for name, tensor in one_log.items():
        if not name.startswith("norm."):  # batch norm depends on the shard of its process
            torch.testing.assert_close(two_logs[name], tensor, rtol=1e-9, atol=1e-10, msg=name)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run all short cases in one launch, because starting takes most of the time."""
    out = tmp_path_factory.mktemp("two")
    launch(out, *EQUAL, "poison", "stop", "patience")
    return out


@pytest.mark.long
@pytest.mark.parametrize("case", EQUAL)
def test_two_processes_take_the_same_steps_as_one(outputs: Path, tmp_path: Path, case: str) -> None:
    """Uneven supervised rows, a process with none or without the loss, an uneven last batch, a
    batch smaller than the world size, unused weights, different weights at the start."""
    distributed_training.run(distributed_training.CASES[case], tmp_path / case)
    one = weights(tmp_path, case)
    first, second = weights(outputs, case), weights(outputs, case, rank=1)
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    assert_close(first, one)
    assert torch.equal(first["unused"], torch.ones(3))  # no decay without a gradient
    assert [report["outcome"] for report in read_outcomes(outputs, case)] == [
        read_outcomes(tmp_path, case, 1)[0]["outcome"]
    ] * 2
    two_logs, one_log = log(outputs, case), log(tmp_path, case)
    assert len(two_logs) == len(one_log) > 0
    for mine, other in zip(two_logs, one_log, strict=True):
        assert mine["losses"] == pytest.approx(other["losses"], rel=1e-9)
        assert {**mine, "losses": 0} == {**other, "losses": 0}


@pytest.mark.long
def test_four_processes_take_the_same_steps_as_one(tmp_path: Path) -> None:
    """Most processes have no sample in the last batch of an epoch, or with a batch of two."""
    launch(tmp_path, *EQUAL, world=4)
    for case in EQUAL:
        distributed_training.run(distributed_training.CASES[case], tmp_path / "alone" / case)
        one, found = weights(tmp_path / "alone", case), weights(tmp_path, case, rank=3)
        assert_close(found, one)
        assert torch.equal(found["unused"], torch.ones(3))


@pytest.mark.long
def test_only_the_first_process_writes_files_and_messages(outputs: Path) -> None:
    first, second = read_outcomes(outputs, "stop")
    assert any("step-" in path for path in first["written"])  # type: ignore[attr-defined]
    assert any(path.endswith("log.jsonl") for path in first["written"])  # type: ignore[attr-defined]
    assert second["written"] == [] and second["messages"] == 0
    assert [report["messages"] for report in read_outcomes(outputs, "patience")] == [4, 0]


@pytest.mark.long
def test_a_non_finite_loss_on_one_process_stops_both(outputs: Path) -> None:
    first, second = read_outcomes(outputs, "poison")
    assert first["outcome"] == second["outcome"]
    match = re.match(
        r"RunError: loss adversary/guess .* not finite at step 3 .*\(samples (number.*) \.\.\.\)",
        str(first["outcome"]),
    )
    assert match and set(match[1].split(", ")) <= set(second["ids"])  # type: ignore[call-overload]
    assert first["weights_unchanged"] and second["weights_unchanged"]
    one, two = (weights(outputs, "poison", rank) for rank in (0, 1))
    assert all(torch.equal(one[name], two[name]) for name in one if not name.startswith("norm."))
    assert not (outputs / "poison" / "checkpoints").exists()


@pytest.mark.long
def test_a_signal_to_one_process_saves_once_and_stops_both(outputs: Path) -> None:
    for report in read_outcomes(outputs, "stop"):
        assert str(report["outcome"]).startswith(
            "RunInterrupted: stopped and saved at step 6 of 28"
        )
    assert checkpoints(outputs, "stop") == ["step-000000004", "step-000000006"]
    assert io.is_intact(outputs / "stop" / "checkpoints" / "train" / "step-000000006")


@pytest.mark.long
def test_the_first_process_decides_on_early_stopping(outputs: Path) -> None:
    """The score of the second process increases at every validation."""
    assert [report["outcome"] for report in read_outcomes(outputs, "patience")] == [
        "done 28 200"
    ] * 2
    first, second = weights(outputs, "patience"), weights(outputs, "patience", rank=1)
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    scores = [line["measures"] for line in log(outputs, "patience") if line["split"] == "val"]
    assert scores == [{"score": value} for value in (0.1, 0.5, 0.4, 0.3)]


@pytest.mark.long
def test_sigterm_to_the_launcher_saves_once_and_stops_all(tmp_path: Path) -> None:
    process = start(tmp_path, "slow")
    deadline = time.monotonic() + 600
    while not (tmp_path / "slow" / "checkpoints" / "train").is_dir():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=600)
    found = read_outcomes(tmp_path, "slow")
    assert found[0]["outcome"] == found[1]["outcome"], output
    assert str(found[0]["outcome"]).startswith("RunInterrupted: stopped and saved at step ")
    step = int(str(found[0]["outcome"]).split(" step ")[1].split()[0])
    assert checkpoints(tmp_path, "slow")[-1] == f"step-{step:09d}"
    assert io.is_intact(tmp_path / "slow" / "checkpoints" / "train" / f"step-{step:09d}")


@pytest.mark.long
def test_data_workers_do_not_change_the_weights(tmp_path: Path) -> None:
    launch(tmp_path, "workers")
    distributed_training.run(distributed_training.CASES["workers"], tmp_path / "alone")
    assert_close(weights(tmp_path, "workers"), weights(tmp_path, "alone"))
