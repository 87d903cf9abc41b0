"""One process or many: the few things that all of them must agree on."""

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

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Every gradient replaced by its sum over all processes, in one message a number format."""
        if self.world == 1:
            return
        for parameter in parameters:
            if parameter.grad is None:  # a rank without a supervised row still has to answer
                parameter.grad = torch.zeros_like(parameter)
        by_format: dict[torch.dtype, list[Tensor]] = {}
        for parameter in parameters:
            assert parameter.grad is not None
            by_format.setdefault(parameter.grad.dtype, []).append(parameter.grad)
        for gradients in by_format.values():
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            torch.distributed.all_reduce(flat)
            start = 0
            for gradient in gradients:
                gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
                start += gradient.numel()

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Every tensor overwritten with that of the first process."""
        if self.world > 1:
            for tensor in tensors:
                torch.distributed.broadcast(tensor, src=0)

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
    if device == "cpu" and not PartialState().initialized:
        PartialState(cpu=True)
    state = PartialState()
    chosen = state.device if device == "auto" else torch.device(device)
    if state.num_processes > 1 and chosen.type == "cuda":
        chosen = state.device  # torchrun gives each process a card of its own
    return Processes(state.process_index, state.num_processes, chosen)


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
