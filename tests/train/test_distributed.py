"""`Processes` in one process: collectives, shards, devices; two in test_loop_distributed.py."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import nn

from overt import io
from overt.errors import UserError
from overt.train.distributed import GradientReducer, Processes, check_device, processes
from tests.train import reduced_gradients

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


def test_one_process_exchanges_and_copies_nothing() -> None:
    single = processes("cpu")
    assert (single.rank, single.world, single.is_main) == (0, 1, True)
    values, net = torch.tensor([1.0, 2.0]), nn.Linear(2, 2)
    net.weight.grad = torch.ones(2, 2)
    assert single.sum(values) is values
    assert single.max(7) == 7
    assert single.broadcast([0.1, float("inf")]) == [0.1, float("inf")]
    assert single.union({"b", "a"}) == ["a", "b"]
    assert single.gather(values)[0] is values and single.map(float, ["1", "2"]) == [1.0, 2.0]
    GradientReducer([*net.parameters()], single.world).backward(torch.zeros(()), [])
    assert torch.equal(net.weight.grad, torch.ones(2, 2)) and net.bias.grad is None
    single.broadcast_tensors([values])
    single.barrier()
    assert values.tolist() == [1, 2]


@given(items=some.lists(some.integers(), max_size=20), world=some.integers(1, 6))
def test_shards_partition_the_items_in_order_and_differ_by_at_most_one(
    items: list[int], world: int
) -> None:
    shares = [Processes(rank, world, CPU).shard(items) for rank in range(world)]
    assert [item for share in shares for item in share] == items
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(
    "device", ["gpu", "", "CPU", "cuda:-1", "cuda:x", "meta", "xla", "cpu,cuda"]
)
def test_an_unknown_device_raises_with_the_valid_names(device: str) -> None:
    for function in (check_device, processes):
        with pytest.raises(UserError, match="cuda:N or mps"):
            function(device)


def test_an_unavailable_device_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"\b0 .*--device cpu"):
        check_device("cuda")
    with pytest.raises(UserError, match=r"'mps'.*--device cpu"):
        check_device("mps")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_device("cuda")
    check_device("cuda:1")
    with pytest.raises(UserError, match="has 2 CUDA devices"):
        check_device("cuda:2")


@pytest.mark.long
def test_device_cpu_is_the_cpu_on_a_machine_with_a_gpu() -> None:
    """The first call selects the backend: gloo for the CPU, also on a machine with a GPU."""
    code = (
        "import torch\n"
        "torch.cuda.is_available = lambda: True\n"
        "torch.cuda.device_count = lambda: 1\n"
        "from overt.train.distributed import processes\n"
        "ranks = processes('cpu')\n"
        "from accelerate import PartialState\n"
        "print(ranks.device, PartialState().device, ranks.widest_float)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.stdout.split() == ["cpu", "cpu", "torch.float64"], done.stderr


def test_sums_use_the_widest_float_of_the_device() -> None:
    assert Processes(0, 1, CPU).widest_float == torch.float64
    assert Processes(0, 1, torch.device("mps")).widest_float == torch.float32


def run_accelerate_launch(*options: str) -> str:
    """Return the output of a script that calls `processes` under `accelerate launch`."""
    script = "from overt.train.distributed import processes; print(processes('cpu').world)"
    command = [sys.executable, "-m", "accelerate.commands.launch", *options, "--cpu", "--no_python"]
    plain = {name: os.environ[name] for name in os.environ if not name.startswith("MASTER_")}
    done = subprocess.run(
        [*command, sys.executable, "-c", script], capture_output=True, text=True, check=True,
        env={**plain, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    return done.stdout + done.stderr


@pytest.mark.long
def test_one_process_instead_of_several_prints_a_warning() -> None:
    """`accelerate launch --num_processes 2 --cpu` runs its command once, without an error."""
    output = run_accelerate_launch("--num_processes", "2")
    assert "1" in output.split() and "expected several processes, got one" in output
    assert "torchrun --nproc-per-node" in output
    assert "expected several" not in run_accelerate_launch("--num_processes", "1")


def summed_gradients(world: int) -> dict[str, torch.Tensor]:
    """Sum the gradients of all processes and batches one by one."""
    net = reduced_gradients.make()
    for rank in range(world):
        for micro in (0, 1):
            found = reduced_gradients.objective(net, rank, micro)
            if found.requires_grad:
                found.backward()
    return {n: p.grad for n, p in net.named_parameters() if p.grad is not None}


@pytest.mark.long
@pytest.mark.parametrize("world", [2, 4])
def test_gradients_are_summed_in_buckets_during_the_backward_pass(
    world: int, tmp_path: Path
) -> None:
    """Different layers in each process, some in an earlier batch only, one layer in none."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world)]
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "tests.train.reduced_gradients", str(tmp_path)],
        capture_output=True, text=True, check=False, cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "find_unused_parameters" not in done.stderr  # no advice to the user
    expected = summed_gradients(world)
    for rank in range(world):
        found = io.read_tensors(tmp_path / f"rank-{rank}.safetensors")
        assert set(found) == set(expected) and not any("unused" in name for name in found)
        for name, one in expected.items():
            torch.testing.assert_close(found[name], one, rtol=1e-5, atol=1e-7, msg=name)
        events = io.read_json(tmp_path / f"rank-{rank}.json")
        assert events.count("message") > 2 and events.index("first layer") > 0
        check_shared_items(io.read_json(tmp_path / f"rank-{rank}-items.json"), rank, world)


def check_shared_items(found: dict[str, Any], rank: int, world: int) -> None:
    """Each item is computed once, all processes have all results, and an error reaches all."""
    assert found["values"] == [[item, 2 * item, item % world] for item in range(7)]
    assert found["taken"] == [*range(rank, 7, world)] and found["few"] == ["1"]
    raised = "ValueError: item 1 is wrong"
    assert found["error"] == (raised if rank == 1 else f"RunError: process 1 failed with {raised}")
    assert found["names"] == sorted({"all", "ä", *(f"rank {one}" for one in range(world))})


def test_one_process_adds_the_gradients_of_earlier_batches() -> None:
    net = nn.Linear(2, 1)
    reducer = GradientReducer([*net.parameters()], world=1)
    reducer.backward(net(torch.ones(1, 2)).sum(), [torch.full((1, 2), 3.0), None])
    assert net.weight.grad is not None and net.bias.grad is not None
    assert net.weight.grad.tolist() == [[4, 4]] and net.bias.grad.tolist() == [1]
    reducer.backward(torch.zeros(()), [None, None])
    assert net.weight.grad is None and net.bias.grad is None
