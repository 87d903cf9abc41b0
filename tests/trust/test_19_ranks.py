"""Trust 19: when a process is killed the others exit, and the run resumes exactly."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from overt import io
from overt.train import checkpoint
from tests.train import distributed_training
from tests.trust import two_processes

MODULE = "tests.train.distributed_training"
LAST = Path("checkpoints", "train", "step-000000028")
FILES = ("model.safetensors", "model.optimizer.safetensors", "adversary.optimizer.safetensors")


@pytest.fixture(scope="module")
def complete_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of two processes: one complete, one with a NaN loss, one stopped."""
    out = tmp_path_factory.mktemp("whole")
    two_processes.wait(two_processes.start(MODULE, str(out), "long", "poison", "stop"))
    return out


def assert_same_bytes(found: Path, expected: Path) -> None:
    """Compare weights, optimizers and log of two finished runs."""
    for name in FILES:
        assert io.digest(found / LAST / name) == io.digest(expected / LAST / name), name
    assert (found / "log.jsonl").read_bytes() == (expected / "log.jsonl").read_bytes()


def read_outcome(out: Path, case: str, rank: int) -> dict[str, object]:
    return io.read_json(out / f"{case}-ends" / f"rank-{rank}.json")


@pytest.mark.long
def test_after_a_kill_of_one_process_the_other_exits_and_a_restart_is_exact(
    complete_runs: Path, tmp_path: Path, record_result
) -> None:
    """There is no launcher: the remaining process has to detect the failure."""
    for _ in range(5):  # another process may have taken the port
        survivor, killed = two_processes.start_without_launcher(MODULE, str(tmp_path), "killed")
        killed.communicate(timeout=300)
        killed_at = time.monotonic()
        output, _ = survivor.communicate(timeout=300)
        waited = time.monotonic() - killed_at
        if "EADDRINUSE" not in output:
            break
    assert killed.returncode == -9 and survivor.returncode not in (0, -9), output
    assert waited < 240  # PyTorch waits for half an hour by default
    assert (tmp_path / "killed" / "checkpoints" / "train" / "step-000000008").is_dir()
    naive = train_from_weights_only(tmp_path / "killed")
    (tmp_path / "killed").rename(tmp_path / "long")
    two_processes.wait(two_processes.start(MODULE, str(tmp_path), "long:resume"))
    assert_same_bytes(tmp_path / "long", complete_runs / "long")
    expected = io.read_tensors(complete_runs / "long" / LAST / "model.safetensors")
    difference = max(float((naive[n] - one).abs().max()) for n, one in expected.items())
    assert difference > 1e-4
    record_result(
        19,
        "one process killed: the other exits, not with 0, within 60 s; the restart is exact",
        "as required; weights, optimizers and log have the same bytes",
        f"only weights loaded: up to {difference:.2f} off",
    )


def train_from_weights_only(out: Path) -> dict[str, torch.Tensor]:
    """Train with the weights of a checkpoint, but new optimizers and step counts."""
    found, _ = io.newest(out / "checkpoints" / "train", checkpoint.PREFIX)
    assert found is not None
    net = distributed_training.Net()
    checkpoint.load_model(found, net)
    main_parameters = [p for name, p in net.named_parameters() if not name.startswith("adversary")]
    sets = {
        "model": distributed_training.ParameterSet(
            torch.optim.AdamW(main_parameters, lr=1e-2, weight_decay=0.1), clip=1.0
        ),
        "adversary": distributed_training.ParameterSet(
            torch.optim.SGD(net.adversary.parameters(), lr=1e-2, momentum=0.9)
        ),
    }
    config = replace(distributed_training.LONG, steps=20)
    data = distributed_training.Numbers(50)
    distributed_training.fit(
        net, data, distributed_training.step, sets, config, out=out / "naive", seed=0, device="cpu"
    )
    return {name: value.detach() for name, value in net.state_dict().items()}


@pytest.mark.long
def test_torchrun_restarts_a_killed_run_and_it_resumes(
    complete_runs: Path, tmp_path: Path, record_result
) -> None:
    launcher = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "2"]
    started = two_processes.start(MODULE, str(tmp_path), "killed-once:elastic", launcher=launcher)
    two_processes.wait(started)
    assert_same_bytes(tmp_path / "killed-once", complete_runs / "long")
    assert [read_outcome(tmp_path, "killed-once", rank)["outcome"] for rank in (0, 1)] == [
        "done 28 200"
    ] * 2
    one_restart = [*launcher[:-1], "1"]
    naive = two_processes.start(
        MODULE, str(tmp_path / "usual"), "killed-once", launcher=one_restart
    )
    output, _ = naive.communicate(timeout=300)
    assert naive.returncode != 0 and "already has checkpoints" in output
    record_result(
        19,
        "elastic restart: torchrun --max-restarts resumes",
        "killed at step 10, resumed from step 8, same bytes at the end",
        "a program that does not resume fails again after the restart",
    )


@pytest.mark.long
def test_resuming_with_two_one_and_two_processes_equals_one_process(
    complete_runs: Path, tmp_path: Path, record_result
) -> None:
    distributed_training.run(distributed_training.CASES["long"], tmp_path / "alone")
    (complete_runs / "stop").rename(tmp_path / "stop-first")
    distributed_training.run(
        distributed_training.CASES["stop-first"], tmp_path / "stop-first", resume=True
    )
    assert str(read_outcome(tmp_path, "stop-first", 0)["outcome"]).startswith(
        "RunInterrupted: stopped and saved at step 10"
    )
    (tmp_path / "stop-first").rename(tmp_path / "long")
    two_processes.wait(two_processes.start(MODULE, str(tmp_path), "long:resume"))
    single_process = io.read_tensors(tmp_path / "alone" / LAST / "model.safetensors")
    found = io.read_tensors(tmp_path / "long" / LAST / "model.safetensors")
    error = max(
        float((found[name] - one).abs().max())
        for name, one in single_process.items()
        if not name.startswith("norm.")  # batch norm depends on the shard of its process
    )
    assert error < 1e-9
    assert [read_outcome(tmp_path, "long", rank)["outcome"] for rank in (0, 1)] == [
        "done 28 200"
    ] * 2
    naive = train_with_batch_of_one_process(tmp_path / "usual")
    difference = max(
        float((naive[n] - one).abs().max())
        for n, one in single_process.items()
        if not n.startswith("norm.")
    )
    assert difference > 1e-3
    record_result(
        19,
        "world size 2, then 1, then 2 loads",
        f"resumed, and ends {error:.0e} from one process at most",
        f"a batch of fixed size per process: one process ends up to {difference:.2f} off",
    )


def train_with_batch_of_one_process(out: Path) -> dict[str, torch.Tensor]:
    """Train one process with the batch size of one process instead of the whole run."""
    half = replace(distributed_training.LONG, batch=distributed_training.LONG.batch // 2)
    distributed_training.run(replace(distributed_training.CASES["long"], config=half), out)
    found, _ = io.newest(out / "checkpoints" / "train", checkpoint.PREFIX)
    assert found is not None
    return io.read_tensors(found / "model.safetensors")


@pytest.mark.long
def test_a_non_finite_loss_on_one_process_stops_all_processes(
    complete_runs: Path, tmp_path: Path, record_result
) -> None:
    first, second = (read_outcome(complete_runs, "poison", rank) for rank in (0, 1))
    assert first["outcome"] == second["outcome"]
    assert str(first["outcome"]).startswith("RunError: loss adversary/guess")
    assert first["weights_unchanged"] and second["weights_unchanged"]  # the weights did not change
    assert not (complete_runs / "poison" / "checkpoints").exists()
    two_processes.wait(two_processes.start("tests.trust.two_processes", str(tmp_path), "poisoned"))
    finite = [io.read_json(tmp_path / f"poisoned-rank-{n}.json")["finite"] for n in (0, 1)]
    assert finite == [False, True]
    record_result(
        15,
        "not finite on one process: all stop together, nothing saved",
        "both stop at the same step with the same error, weights unchanged",
        "each process checks only its loss: the other one steps to NaN weights",
    )
