"""Sum gradients and share items over processes: `torchrun -m tests.train.reduced_gradients OUT`.

Every process writes OUT/rank-N.safetensors, its gradients, OUT/rank-N.json, the order of events
in a backward pass, and OUT/rank-N-items.json, the results of shared items.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from overt import io
from overt.errors import RunError
from overt.train.distributed import GradientReducer, Processes, processes

WIDTH = 600  # 1.4 MB per layer: a bucket each
LAYERS = ("first", "second", "third", "rare", "unused")
# (rank, batch) -> layers used; "rare" by one process, in an earlier batch only
USED = {
    (0, 0): ("first", "second", "third"),
    (0, 1): ("first",),
    (1, 0): (),
    (1, 1): ("second", "rare"),
    (2, 0): ("first", "third"),
    (2, 1): (),
    (3, 0): ("third",),
    (3, 1): ("third", "second"),
}


def make() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in LAYERS})


def objective(net: nn.ModuleDict, rank: int, micro: int) -> Tensor:
    """Pass random numbers through the layers that this process uses in this batch."""
    states = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * rank + micro))
    for name in USED[rank, micro]:
        states = net[name](states)
    return states.square().mean()


def earlier_gradients(net: nn.ModuleDict, rank: int) -> list[Tensor | None]:
    found = objective(net, rank, 1)
    parameters = [*net.parameters()]
    if not found.requires_grad:
        return []
    return [*torch.autograd.grad(found, parameters, allow_unused=True)]


def share_items(ranks: Processes) -> dict[str, object]:
    """Return results of `Processes.map`, which items this process took, and an error of rank 1."""
    taken: list[int] = []

    def double(item: int) -> dict[str, object]:
        taken.append(item)
        return {"item": item, "double": torch.tensor(2 * item), "rank": ranks.rank}

    found = ranks.map(double, range(7))
    values = [[one["item"], int(one["double"]), one["rank"]] for one in found]  # type: ignore[call-overload]
    few = ranks.map(str, [1])  # fewer items than processes

    def fail(item: int) -> int:
        if item == 1:
            raise ValueError("item 1 is wrong")
        return item

    try:
        ranks.map(fail, range(4))
    except (ValueError, RunError) as error:
        return {
            "values": values,
            "taken": taken,
            "few": few,
            "error": f"{type(error).__name__}: {error}",
            "names": ranks.union([f"rank {ranks.rank}", "all", "ä"]),
        }
    raise AssertionError("no error")


def main(out: Path) -> None:
    torch.set_num_threads(1)
    ranks, net = processes("cpu"), make()
    parameters = [*net.parameters()]
    reducer = GradientReducer(parameters, ranks.world, bucket_cap_mb=1)
    for _ in range(2):  # the second step uses the same buckets again
        net.zero_grad()
        reducer.backward(objective(net, ranks.rank, 0), earlier_gradients(net, ranks.rank))
    found = {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}
    io.write_tensors(out / f"rank-{ranks.rank}.safetensors", found)
    # --- messages leave before the backward pass has reached the first layer
    events: list[str] = []
    reducer = GradientReducer(parameters, ranks.world, bucket_cap_mb=1)
    assert isinstance(reducer.module, DistributedDataParallel)

    def send(group: None, bucket: torch.distributed.GradBucket) -> torch.futures.Future[Tensor]:
        events.append("message")
        return allreduce_hook(group, bucket)  # type: ignore[arg-type]

    reducer.module.register_comm_hook(None, send)
    states = net["first"](torch.randn(4, WIDTH))
    states.register_hook(lambda gradient: events.append("first layer"))
    reducer.backward(net["third"](net["second"](states)).sum(), [])
    io.write_json(out / f"rank-{ranks.rank}.json", events)
    io.write_json(out / f"rank-{ranks.rank}-items.json", share_items(ranks))
    ranks.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
