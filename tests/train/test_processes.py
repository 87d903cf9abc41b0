"""One process alone; two together are in test_loop_distributed.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import nn

from overt.errors import BadInput
from overt.train.processes import Processes, check_device, processes

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


def test_alone_nothing_is_exchanged_and_nothing_copied() -> None:
    alone = processes("cpu")
    assert (alone.rank, alone.world, alone.first) == (0, 1, True)
    values, net = torch.tensor([1.0, 2.0]), nn.Linear(2, 2)
    net.weight.grad = torch.ones(2, 2)
    assert alone.sum(values) is values
    assert alone.largest(7) == 7
    assert alone.of_first([0.1, float("inf")]) == [0.1, float("inf")]
    assert alone.union({"b", "a"}) == ["a", "b"]
    alone.sum_gradients([*net.parameters()])
    assert torch.equal(net.weight.grad, torch.ones(2, 2)) and net.bias.grad is None
    alone.share([values])
    alone.wait()
    assert values.tolist() == [1, 2]


@given(items=some.lists(some.integers(), max_size=20), world=some.integers(1, 6))
def test_the_shares_are_the_whole_in_order_and_differ_by_one_at_most(
    items: list[int], world: int
) -> None:
    shares = [Processes(rank, world, CPU).slice(items) for rank in range(world)]
    assert [item for share in shares for item in share] == items
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(
    "device", ["gpu", "", "CPU", "cuda:-1", "cuda:x", "meta", "xla", "cpu,cuda"]
)
def test_what_is_no_device_is_refused_with_those_there_are(device: str) -> None:
    for ask in (check_device, processes):
        with pytest.raises(BadInput, match=r"not one of auto, cpu, cuda, cuda:N, mps"):
            ask(device)


def test_a_device_that_this_machine_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(BadInput, match="has 0 CUDA devices; use --device cpu"):
        check_device("cuda")
    with pytest.raises(BadInput, match="'mps' is not here; use --device cpu"):
        check_device("mps")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_device("cuda")
    check_device("cuda:1")
    with pytest.raises(BadInput, match="has 2 CUDA devices"):
        check_device("cuda:2")


def test_cpu_is_cpu_even_where_there_is_a_card() -> None:
    """The first call decides on how processes talk: gloo for the CPU, whatever else is there."""
    code = (
        "import torch\n"
        "torch.cuda.is_available = lambda: True\n"
        "torch.cuda.device_count = lambda: 1\n"
        "from overt.train.processes import processes\n"
        "ranks = processes('cpu')\n"
        "from accelerate import PartialState\n"
        "print(ranks.device, PartialState().device, ranks.exact)\n"
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


def test_sums_are_as_exact_as_the_device_can() -> None:
    assert Processes(0, 1, CPU).exact == torch.float64
    assert Processes(0, 1, torch.device("mps")).exact == torch.float32
