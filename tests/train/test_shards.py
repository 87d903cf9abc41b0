"""Sharded training takes the same steps as one process, and its checkpoints fit any world size."""

import errno
import json
import shutil
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint
from torch import nn

from overt import io
from overt.errors import CorruptFileError, RunError, UserError
from overt.train import FitConfig, ParameterSet, checkpoint, fit, loop
from overt.train.distributed import Processes
from overt.train.shards import (
    ShardedModel,
    is_sharded,
    local_part,
    read_shards,
    sharded_blocks,
    stored_tensors,
    whole_tensor,
    write_shards,
)
from tests.train import sharded_runs
from tests.trust import two_processes

MODULE = "tests.train.sharded_runs"
EQUAL = ["accumulate1", "accumulate2", "accumulate3", "attention"]
RANKS = Processes(0, 2, torch.device("cpu"))


def launch(out: Path, *words: str, world: int = 2) -> None:
    launcher = ["--standalone", "--nproc-per-node", str(world)]
    two_processes.wait(two_processes.start(MODULE, str(out), *words, launcher=launcher))


def train_alone(out: Path, case: str) -> dict[str, torch.Tensor]:
    sharded_runs.run(sharded_runs.CASES[case], out / case)
    return weights(out, case)


def weights(out: Path, case: str) -> dict[str, torch.Tensor]:
    return io.read_tensors(out / f"{case}-ends" / "rank-0.safetensors")


def read_outcomes(out: Path, case: str, world: int = 2) -> list[dict[str, object]]:
    return [io.read_json(out / f"{case}-ends" / f"rank-{r}.json") for r in range(world)]


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-10, msg=name)


def read_whole(folder: Path) -> dict[str, torch.Tensor]:
    found = {name: torch.zeros(size, dtype=kind) for name, size, kind in stored_tensors(folder)}
    read_shards(folder, found)
    return found


def log(out: Path, case: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (out / case / "log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run all cases in one launch, because starting takes most of the time."""
    out = tmp_path_factory.mktemp("sharded")
    launch(out, *EQUAL, "uneven", "poison", "patience", "long", "stop", "whole-stop", "multihead")
    return out


@pytest.mark.long
@pytest.mark.parametrize("case", [*EQUAL, "patience", "long"])
def test_two_processes_with_shards_take_the_same_steps_as_one(
    outputs: Path, tmp_path: Path, case: str
) -> None:
    """Uneven supervised rows of a loss on attention, a process without a sample, accumulation."""
    assert_close(weights(outputs, case), train_alone(tmp_path, case))
    whole = sum(one.numel() for one in sharded_runs.Net().parameters())
    reports = read_outcomes(outputs, case)
    assert sum(int(str(report["numbers"])) for report in reports) == whole
    assert not any(report["unused_has_gradient"] for report in reports)
    assert torch.equal(weights(outputs, case)["unused"], torch.ones(3).double())
    for mine, other in zip(log(outputs, case), log(tmp_path, case), strict=True):
        for numbers in ("losses", "measures"):
            assert mine.get(numbers, {}) == pytest.approx(other.get(numbers, {}), rel=1e-9)


@pytest.mark.long
def test_four_processes_with_shards_take_the_same_steps_as_one(
    outputs: Path, tmp_path: Path
) -> None:
    """Some shards are empty; the run of two processes is resumed by four."""
    shutil.copytree(outputs / "stop", tmp_path / "long")
    shutil.copytree(outputs / "whole-stop", tmp_path / "stop")
    launch(tmp_path, *EQUAL, "long:resume", "stop:resume", world=4)
    for case in EQUAL:
        assert_close(weights(tmp_path, case), train_alone(tmp_path / "alone", case))
    long = train_alone(tmp_path / "alone", "long")
    assert_close(weights(tmp_path, "long"), long)
    assert_close(weights(tmp_path, "stop"), long)  # its checkpoint was not sharded


@pytest.mark.long
def test_one_process_resumes_a_sharded_run(outputs: Path, tmp_path: Path) -> None:
    shutil.copytree(outputs / "stop", tmp_path / "long")
    sharded_runs.run(sharded_runs.CASES["long"], tmp_path / "long", resume=True)
    assert read_outcomes(tmp_path, "long", 1)[0]["outcome"] == "done 16 100"
    assert_close(weights(tmp_path, "long"), weights(outputs, "long"))


@pytest.mark.long
def test_after_a_kill_of_one_process_a_sharded_run_resumes_exactly(
    outputs: Path, tmp_path: Path
) -> None:
    for _ in range(5):  # another process may have taken the port
        survivor, killed = two_processes.start_without_launcher(MODULE, str(tmp_path), "killed")
        killed.communicate(timeout=300)
        output, _ = survivor.communicate(timeout=300)
        if "EADDRINUSE" not in output:
            break
    assert killed.returncode == -9 and survivor.returncode not in (0, -9), output
    (tmp_path / "killed").rename(tmp_path / "long")
    launch(tmp_path, "long:resume")
    last = Path("long", "checkpoints", "train", "step-000000016")
    files = io.manifest_names(outputs / last)
    assert sum("shard-0000" in name for name in files) == 4  # weights and optimizer, two each
    for part in ("model", "model.optimizer"):  # the order in a file depends on the process
        found, expected = read_whole(tmp_path / last / part), read_whole(outputs / last / part)
        assert set(found) == set(expected) and len(found) > 10
        assert all(torch.equal(found[name], one) for name, one in expected.items())
    assert (tmp_path / "long" / "log.jsonl").read_bytes() == (
        outputs / "long" / "log.jsonl"
    ).read_bytes()


@pytest.mark.long
def test_a_missing_or_non_finite_loss_stops_all_processes(outputs: Path) -> None:
    first, second = (report["outcome"] for report in read_outcomes(outputs, "uneven"))
    assert first == second and "lacks one of the losses model/attention" in str(first)
    first, second = (report["outcome"] for report in read_outcomes(outputs, "poison"))
    assert first == second and str(first).startswith("RunError: loss model/task")
    assert not (outputs / "poison" / "checkpoints").exists()


@pytest.mark.long
def test_a_loss_inside_of_multihead_attention_alone_raises(outputs: Path) -> None:
    """Its projections are not modules, so nothing gathers them before their gradient."""
    for report in read_outcomes(outputs, "multihead"):
        assert "storage of size 0" in str(report["outcome"])


def test_blocks_are_the_outermost_layers_of_lists() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model = nn.ModuleDict({"layers": nn.ModuleList([inner]), "head": nn.Linear(2, 1)})
    assert sharded_blocks(model) == [inner]
    assert sharded_blocks(inner) == [inner[0]]  # ReLU has no parameters
    assert sharded_blocks(nn.Linear(2, 2)) == []


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_whole_tensors_are_written_and_read(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 2), "b": torch.tensor(2.0), "c": torch.arange(4)}
    write_shards(tmp_path / "model", tensors)
    assert {name: (size, kind) for name, size, kind in stored_tensors(tmp_path / "model")} == {
        name: (one.shape, one.dtype) for name, one in tensors.items()
    }
    found = {name: torch.zeros_like(one) for name, one in tensors.items()}
    read_shards(tmp_path / "model", found)
    assert all(torch.equal(found[name], one) for name, one in tensors.items())
    one = tensors["a"]
    assert not is_sharded(one) and local_part(one) is one and whole_tensor(one) is one
    with pytest.raises(RuntimeError, match=r"a .*3, 2.*2, 3"):
        read_shards(tmp_path / "model", {"a": torch.zeros(2, 3)})
    with pytest.raises(RuntimeError, match="d .*None"):
        read_shards(tmp_path / "model", {"d": torch.zeros(2, 3)})


def test_a_failed_write_raises_in_all_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    failures = {1: (full, traceback.StackSummary())}

    def fail(*args: object, **kwargs: object) -> None:
        raise torch.distributed.checkpoint.CheckpointException("", failures)

    monkeypatch.setattr("torch.distributed.checkpoint.save", fail)
    with pytest.raises(RunError, match=r"written: .*No space"):
        write_shards(tmp_path, {"a": torch.zeros(1)})


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_shards_of_another_model_raise(tmp_path: Path) -> None:
    net = nn.Linear(2, 3)
    write_shards(tmp_path / "model", net.state_dict())
    found = nn.Linear(2, 3)
    checkpoint.load_model(tmp_path, found)
    assert torch.equal(found.weight, net.weight)
    with pytest.raises(CorruptFileError, match=r": .*\bbias"):
        checkpoint.load_model(tmp_path, nn.Linear(2, 3, bias=False))
    with pytest.raises(CorruptFileError, match=r"weight .*3, 2"):
        checkpoint.load_model(tmp_path, nn.Linear(3, 3))


def test_several_sets_and_used_optimizers_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    used = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 2)).sum().backward()
    used.step()
    with pytest.raises(UserError, match="new optimizer"):
        ShardedModel(net, RANKS, [used])
    monkeypatch.setattr(loop, "processes", lambda device: RANKS)
    sets = {
        str(place): ParameterSet(torch.optim.SGD(part.parameters(), lr=0.1))
        for place, part in enumerate(net)
    }
    data, config = sharded_runs.Items(4), FitConfig(epochs=1, batch=2, shard=True)
    with pytest.raises(UserError, match="got 0, 1"):
        fit(net, data, sharded_runs.step, sets, config, out=tmp_path, seed=0)
