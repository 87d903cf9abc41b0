"""Distributed training: the processes of a run and their collective operations."""

import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from overt.errors import RunError, RunInterrupted, UserError, require_package
from overt.train import messages

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Processes:
    """The rank of this process, the number of processes and the device.

    All operations return at once in a single process.

    Args:
        rank: Index of this process.
        world: Number of processes.
        device: Device of this process.

    Example:
        >>> alone = Processes(rank=0, world=1, device=torch.device("cpu"))
        >>> alone.device
        device(type='cpu')
    """

    rank: int
    world: int
    device: torch.device

    @classmethod
    def current(cls, device: torch.device) -> "Processes":
        """Return the processes that communicate already, or this one alone.

        Args:
            device: The device of this process.

        Example:
            >>> Processes.current(torch.device("cpu")).world
            1
        """
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            group = torch.distributed
            return cls(group.get_rank(), group.get_world_size(), device)
        return cls(0, 1, device)

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes files, rank 0."""
        return self.rank == 0

    @property
    def widest_float(self) -> torch.dtype:
        """The widest float type of the device."""
        return torch.float32 if self.device.type == "mps" else torch.float64

    def sum(self, values: Tensor) -> Tensor:
        """Sum a tensor over all processes."""
        if self.world == 1:
            return values
        # all_reduce writes in place: the caller keeps its local values
        values = values.clone()
        torch.distributed.all_reduce(values)
        return values

    def max(self, value: int) -> int:
        """Return the maximum of a number over all processes."""
        if self.world == 1:
            return value
        held = torch.tensor(value, device=self.device)
        torch.distributed.all_reduce(held, op=torch.distributed.ReduceOp.MAX)
        return int(held)

    def broadcast(self, values: Sequence[float]) -> list[float]:
        """Return the numbers of rank 0, so that all processes decide alike."""
        if self.world == 1:
            return list(values)
        # float64, so that metrics arrive unrounded
        held = torch.tensor(values, dtype=self.widest_float, device=self.device)
        torch.distributed.broadcast(held, src=0)
        return [float(value) for value in held.tolist()]

    def union(self, names: Iterable[str]) -> list[str]:
        """Return the sorted union of names over all processes."""
        if self.world == 1:
            return sorted(names)
        return sorted({name for each in self.gather([*names]) for name in each})

    def gather(self, value: T) -> list[T]:
        """Return the values of all processes, in the order of ranks.

        A value consists of tensors, arrays, texts, numbers, lists, tuples and dictionaries; tensors
        arrive on the CPU.
        """
        if self.world == 1:
            return [value]
        sent = messages.encode(value)
        sizes = [torch.zeros(1, dtype=torch.long, device=self.device) for _ in range(self.world)]
        torch.distributed.all_gather(sizes, torch.full_like(sizes[0], len(sent)))
        lengths = [int(size) for size in sizes]
        # all_gather needs equal sizes: shorter messages are padded
        mine = torch.zeros(max(lengths), dtype=torch.uint8)
        mine[: len(sent)] = torch.frombuffer(bytearray(sent), dtype=torch.uint8)
        received = [torch.empty_like(mine, device=self.device) for _ in lengths]
        torch.distributed.all_gather(received, mine.to(self.device))
        return [
            messages.decode(one[:length].cpu().numpy().tobytes())
            for one, length in zip(received, lengths, strict=True)
        ]

    def map(self, function: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Apply a function to each item in one process, and return all results in every process.

        Process r takes items r, r + world, and so on, so a result depends only on its item if the
        function does. All processes must call this with the same items.

        Args:
            function: Returns a value that `gather` can send.
            items: The items.

        Returns:
            The results, in the order of the items.

        Raises:
            RunError: The function raised an error in another process.

        Example:
            >>> Processes(rank=0, world=1, device=torch.device("cpu")).map(len, ["a", "bc"])
            [1, 2]
        """
        if self.world == 1:
            return [function(item) for item in items]
        results: list[R] = []
        failure: Exception | None = None
        try:
            results = [function(item) for item in items[self.rank :: self.world]]
        except RunInterrupted:
            raise  # at once: the others end with their next message
        except Exception as error:
            failure = error
        # the others would wait for a process that ends here
        reason = "" if failure is None else f"{type(failure).__name__}: {failure}"
        reasons = self.gather(reason)
        if failure is not None:
            raise failure
        for rank, reason in enumerate(reasons):
            if reason:
                raise RunError(f"process {rank} failed with {reason}")
        parts = self.gather(results)
        return [parts[at % self.world][at // self.world] for at in range(len(items))]

    def broadcast_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite tensors with those of rank 0."""
        if self.world > 1:
            for tensor in tensors:
                # broadcast needs dense memory on the device of the process: other tensors go
                # through a copy
                whole = tensor.detach().to(self.device).contiguous()
                torch.distributed.broadcast(whole, src=0)
                tensor.detach().copy_(whole)

    def barrier(self) -> None:
        """Wait until all processes have reached this point."""
        if self.world > 1:
            torch.distributed.barrier()

    def shard(self, items: Sequence[int]) -> Sequence[int]:
        """Return the part of a list that belongs to this process."""
        # the first `extra` processes get one item more
        size, extra = divmod(len(items), self.world)
        start = self.rank * size + min(self.rank, extra)
        return items[start : start + size + (self.rank < extra)]


class GradientReducer:
    """Sum the gradients of parameters over all processes, in buckets during the backward pass.

    `DistributedDataParallel` does the work, around a module that has the parameters and only
    returns its input, the objective. So the objective may come from any code: several methods of a
    model, losses on attention, or parts of the model that this process does not use. Alone, a
    process computes its gradients without communication.

    Args:
        parameters: The trainable parameters.
        world: Number of processes.
        bucket_cap_mb: Size of a message in MB, as in `DistributedDataParallel`.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> reducer = GradientReducer([*net.parameters()], world=1)
        >>> reducer.backward(net(torch.ones(1, 2)).sum(), [])
        >>> net.weight.grad
        tensor([[1., 1.]])
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], world: int, bucket_cap_mb: int = 25
    ) -> None:
        self.parameters, self.world = list(parameters), world
        self.module: nn.Module | None = None
        if world > 1 and self.parameters:
            self.module = DistributedDataParallel(
                _Objective(self.parameters),
                # a parameter without a gradient on all processes keeps None: with zero, momentum
                # would move it
                find_unused_parameters=True,
                # gradients live in the messages: no second copy
                gradient_as_bucket_view=True,
                # `fit` has broadcast the whole model
                init_sync=False,
                bucket_cap_mb=bucket_cap_mb,
            )

    def gradients(self, total: Tensor, retain_graph: bool) -> list[Tensor | None]:
        """Return the gradients of `total` in this process, without communication."""
        found = torch.autograd.grad(
            total, self.parameters, retain_graph=retain_graph, allow_unused=True
        )
        return [*found]

    def backward(
        self,
        objective: Tensor,
        former: Sequence[Tensor | None],
        retain_graph: bool = False,
    ) -> None:
        """Set the gradients to those of `objective` plus `former`, summed over all processes.

        A process without a gradient, for example without supervised rows, counts as zero. All
        processes must call this, also with an objective that has no gradient.

        Args:
            objective: A number; without a gradient it counts as zero.
            former: Gradients of earlier batches, in the order of the parameters; may be empty.
            retain_graph: Keep the graph of the objective for another backward pass.
        """
        if self.module is None:
            for parameter, gradient in zip(self.parameters, former, strict=False):
                parameter.grad = gradient
            if objective.requires_grad:
                objective.backward(inputs=self.parameters, retain_graph=retain_graph)
            return
        # DistributedDataParallel divides the sum by the number of processes
        scaled = [None if one is None else one * self.world for one in former]
        total: Tensor = self.module(objective * self.world, scaled)
        total.backward(inputs=self.parameters, retain_graph=retain_graph)


class _Objective(nn.Module):
    """Return an objective, as a function of all parameters of `GradientReducer`."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.trained = nn.ParameterList(parameters)
        # never used: without an unused parameter, DistributedDataParallel advises not to look for
        # one
        self.spare = nn.Parameter(torch.zeros_like(self.trained[0].flatten()[:1]))

    def forward(self, objective: Tensor, former: Sequence[Tensor | None]) -> Tensor:
        zero: Tensor = _FormerGradients.apply(former, *self.trained)
        return objective + zero


class _FormerGradients(torch.autograd.Function):
    """Zero, whose gradients are those of earlier batches.

    Every parameter is in the graph of this zero, so the hooks of the reducer run for each one in
    every process, also without a gradient.
    """

    @staticmethod
    def forward(ctx: Any, former: Sequence[Tensor | None], *parameters: Tensor) -> Tensor:
        ctx.former = [*former, *[None] * (len(parameters) - len(former))]
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        return None, *ctx.former


def processes(device: str = "auto") -> Processes:
    """Return the processes that `torchrun` or `accelerate launch` started, or this one alone.

    Warns if the launcher was to start several processes and started one.

    Args:
        device: "auto", "cpu", "cuda", "cuda:N" or "mps".

    Returns:
        The processes and the device of this one.

    Raises:
        UserError: This machine does not have the device.

    Example:
        >>> alone = processes("cpu")
        >>> alone.rank, alone.world
        (0, 1)
    """
    require_package("accelerate")
    from accelerate import PartialState

    if device != "auto":
        check_device(device)
    here = torch.accelerator.is_available()
    on_cpu = device == "cpu" or (device == "auto" and not here)
    _init_process_group("cpu" if on_cpu else torch.accelerator.current_accelerator())
    state = PartialState(cpu=on_cpu)  # a singleton: the first call decides
    if state.num_processes == 1 and _launcher_wanted_more():
        warnings.warn(
            "expected several processes, got one: `accelerate launch` starts several on GPUs only. "
            "On CPUs use `torchrun --nproc-per-node N -m overt run ...`.",
            stacklevel=2,
        )
    chosen = state.device if device == "auto" else torch.device(device)
    if state.num_processes > 1 and chosen.type == "cuda":
        chosen = state.device  # torchrun gives each process its own GPU
    return Processes(state.process_index, state.num_processes, chosen)


def _launcher_wanted_more() -> bool:
    """Return whether `accelerate launch` was to start several processes and started this one alone.

    Without GPUs, or with `--cpu`, it runs the command once (accelerate 1.15): it sets the address
    of the main process but no number of processes. MPI sets variables of its own.
    """
    counted = any(name in os.environ for name in ("WORLD_SIZE", *_MPI))
    launched = "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_PORT" in os.environ
    return launched and not counted


_MPI = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "I_MPI_HYDRA_HOST_FILE")


def _init_process_group(kind: str | torch.device | None) -> None:
    """Initialize the process group under a prefix of its own after each restart of `torchrun`.

    After `torchrun --max-restarts` restarts all processes, torch 2.13 gives them the store with the
    addresses of those that died. On one machine all processes have the same restart count; on
    several they may not, and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 is needed instead.
    """
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    world = os.environ.get("WORLD_SIZE", "1")
    several_machines = os.environ.get("LOCAL_WORLD_SIZE") != world
    if restarts is None or world == "1" or several_machines or torch.distributed.is_initialized():
        return
    store, rank, size = next(torch.distributed.rendezvous("env://"))
    torch.distributed.init_process_group(
        torch.distributed.get_default_backend_for_device(kind or "cpu"),
        store=torch.distributed.PrefixStore(f"life-{restarts}-of-{world}", store),
        rank=rank,
        world_size=size,
    )


def check_device(device: str) -> None:
    """Raise `UserError` if this machine does not have the device."""
    try:
        kind = torch.device(device)
    except RuntimeError:
        raise UserError(f"unknown device {device!r}: use auto, cpu, cuda, cuda:N or mps") from None
    if kind.type == "cuda" and (
        not torch.cuda.is_available() or (kind.index or 0) >= torch.cuda.device_count()
    ):
        raise UserError(
            f"device {device!r} is not available: this machine has {torch.cuda.device_count()} "
            "CUDA devices; use --device cpu"
        )
    if kind.type == "mps" and not torch.backends.mps.is_available():
        raise UserError("device 'mps' is not available; use --device cpu")
    if kind.type not in ("cpu", "cuda", "mps"):
        raise UserError(f"unknown device {device!r}: use auto, cpu, cuda, cuda:N or mps")
