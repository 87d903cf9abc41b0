"""One process or many: the few things that all of them must agree on."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from overt.errors import BadInput


@dataclass(frozen=True)
class Processes:
    """This process among `world`, and the device it computes on."""

    rank: int
    world: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files."""
        return self.rank == 0

    @property
    def exact(self) -> torch.dtype:
        """The most exact number format that the device has."""
        return torch.float32 if self.device.type == "mps" else torch.float64

    def sum(self, values: Tensor) -> Tensor:
        """The element-wise sum over all processes."""
        if self.world == 1:
            return values
        values = values.clone()
        torch.distributed.all_reduce(values)
        return values

    def largest(self, value: int) -> int:
        """The largest of the numbers that the processes hold."""
        if self.world == 1:
            return value
        held = torch.tensor(value, device=self.device)
        torch.distributed.all_reduce(held, op=torch.distributed.ReduceOp.MAX)
        return int(held)

    def of_first(self, values: Sequence[float]) -> list[float]:
        """The numbers of the first process, so that all decide alike."""
        if self.world == 1:
            return list(values)
        held = torch.tensor(values, dtype=self.exact, device=self.device)
        torch.distributed.broadcast(held, src=0)
        return [float(value) for value in held.tolist()]

    def union(self, names: Iterable[str]) -> list[str]:
        """All names that any process holds, in order."""
        if self.world == 1:
            return sorted(names)
        text = "\n".join(names).encode()
        mine = torch.zeros(self.largest(len(text)), dtype=torch.uint8, device=self.device)
        mine[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        held = [torch.empty_like(mine) for _ in range(self.world)]
        torch.distributed.all_gather(held, mine)
        texts = [bytes(one.tolist()).rstrip(b"\0").decode() for one in held]
        return sorted({name for one in texts for name in one.split("\n")} - {""})

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Every gradient replaced by its sum over all processes, in one message a number format.

        A process without a gradient, for want of a supervised row, counts as zero. A parameter
        without one on any process stays without: zero would let its momentum move it.
        """
        if self.world == 1:
            return
        by_format: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in parameters:
            by_format.setdefault(parameter.dtype, []).append(parameter)
        for group in by_format.values():
            there = [float(parameter.grad is not None) for parameter in group]
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in group]
            flags = torch.tensor(there, dtype=gradients[0].dtype, device=gradients[0].device)
            flat = torch.cat([flags, *(gradient.flatten() for gradient in gradients)])
            torch.distributed.all_reduce(flat)
            anywhere, start = flat[: len(group)].tolist(), len(group)
            for parameter, gradient, found in zip(group, gradients, anywhere, strict=True):
                if found:
                    total = flat[start : start + gradient.numel()].view_as(gradient)
                    parameter.grad = gradient.detach().copy_(total)
                start += gradient.numel()

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Every tensor overwritten with that of the first process."""
        if self.world > 1:
            for tensor in tensors:
                whole = tensor.detach().contiguous()
                torch.distributed.broadcast(whole, src=0)
                tensor.detach().copy_(whole)

    def wait(self) -> None:
        """Return when all processes have come this far."""
        if self.world > 1:
            torch.distributed.barrier()

    def slice(self, items: Sequence[int]) -> Sequence[int]:
        """The share of this process of a list that all processes hold."""
        size, extra = divmod(len(items), self.world)
        start = self.rank * size + min(self.rank, extra)
        return items[start : start + size + (self.rank < extra)]


def processes(device: str = "auto") -> Processes:
    """The processes that `torchrun` or `accelerate launch` started, or this one alone.

    `device` is "auto", "cpu", "cuda", "cuda:1", "mps"; one that this machine lacks is refused.
    """
    from accelerate import PartialState

    if device != "auto":
        check_device(device)
    here = torch.accelerator.is_available()
    on_cpu = device == "cpu" or (device == "auto" and not here)
    _join("cpu" if on_cpu else torch.accelerator.current_accelerator())
    state = PartialState(cpu=on_cpu)  # the first call decides, later ones find it
    chosen = state.device if device == "auto" else torch.device(device)
    if state.num_processes > 1 and chosen.type == "cuda":
        chosen = state.device  # torchrun gives each process a card of its own
    return Processes(state.process_index, state.num_processes, chosen)


def _join(kind: str | torch.device | None) -> None:
    """Meet the other processes where those of an earlier life of this run are not met.

    `torchrun --max-restarts` starts all processes again and leaves them the addresses of those that
    died: torch 2.13 shares one store between lives. On one machine all processes count their lives
    alike; on several they may not, and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 is the way.
    """
    said = os.environ.get
    life, world = said("TORCHELASTIC_RESTART_COUNT"), said("WORLD_SIZE", "1")
    apart = said("LOCAL_WORLD_SIZE") != world
    if life is None or world == "1" or apart or torch.distributed.is_initialized():
        return
    store, rank, size = next(torch.distributed.rendezvous("env://"))
    torch.distributed.init_process_group(
        torch.distributed.get_default_backend_for_device(kind or "cpu"),
        store=torch.distributed.PrefixStore(f"life-{life}-of-{world}", store),
        rank=rank,
        world_size=size,
    )


def check_device(device: str) -> None:
    """Refuse a device that this machine does not have, in one sentence."""
    try:
        kind = torch.device(device)
    except RuntimeError:
        raise BadInput(f"device {device!r} is not one of auto, cpu, cuda, cuda:N, mps") from None
    if kind.type == "cuda" and (
        not torch.cuda.is_available() or (kind.index or 0) >= torch.cuda.device_count()
    ):
        raise BadInput(
            f"device {device!r} is not here: this machine has {torch.cuda.device_count()} CUDA "
            "devices; use --device cpu"
        )
    if kind.type == "mps" and not torch.backends.mps.is_available():
        raise BadInput("device 'mps' is not here; use --device cpu")
    if kind.type not in ("cpu", "cuda", "mps"):
        raise BadInput(f"device {device!r} is not one of auto, cpu, cuda, cuda:N, mps")
