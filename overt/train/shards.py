"""Sharded training: each process keeps a part of every parameter (FSDP2), and saves it.

`fully_shard` gathers the parameters of a block before it runs and frees them afterwards. Tensors
are saved by `torch.distributed.checkpoint` as safetensors, one file per process, and can be loaded
by any number of processes. Its default format is a pickle and is not used.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn

from overt import io
from overt.errors import RunError, UserError
from overt.train.distributed import Processes

if TYPE_CHECKING:
    # importing it takes longer than the rest of this package
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

T = TypeVar("T")


def sharded_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose parameters are gathered together: the outermost layers of lists.

    Args:
        model: The model.

    Returns:
        The children of every outermost `nn.ModuleList` and `nn.Sequential`.

    Example:
        >>> layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        >>> sharded_blocks(nn.ModuleDict({"layers": layers, "head": nn.Linear(2, 1)}))
        [Linear(in_features=2, out_features=2, bias=True), Linear(in_features=2, out_features=2, bias=True)]
    """  # noqa: E501  the output of the example
    if isinstance(model, nn.ModuleList | nn.Sequential):
        return [child for child in model if any(True for _ in child.parameters())]
    return [block for child in model.children() for block in sharded_blocks(child)]


class ShardedModel:
    """A model whose parameters are shards, and the optimizers of these parameters.

    The blocks of `sharded_blocks` are gathered one at a time, so a model may be larger than a GPU:
    it is built on the CPU. The other parameters are gathered for a whole step. So a step may call
    any method of the model, but must use the parameters of a block only by calling the block.

    Args:
        model: The model, changed in place.
        ranks: The processes.
        optimizers: Optimizers of its parameters, without state; they get the shards instead.

    Raises:
        UserError: The model is sharded already, or an optimizer has a state.
    """

    def __init__(
        self, model: nn.Module, ranks: Processes, optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        if any(is_sharded(one) for one in model.parameters()):
            raise UserError(
                "cannot shard a model twice: load the weights of the first stage into a new model"
            )
        if any(one.state for one in optimizers):
            raise UserError("cannot shard the state of an optimizer: pass a new optimizer")
        self.world = ranks.world
        self.parameters: list[nn.Parameter] = []
        # a shared parameter is listed once, before and afterwards by the same name
        names = {id(one): name for name, one in model.named_parameters()}
        mesh = init_device_mesh(ranks.device.type, (ranks.world,))
        for block in sharded_blocks(model):
            gather_in_backward(fully_shard(block, mesh=mesh))
        # around the model, not on it: its hooks then run before any method that a step calls
        self.root: FSDPModule = fully_shard(_Root(model), mesh=mesh)
        shards = dict(model.named_parameters())
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"] = [shards[names[id(one)]] for one in group["params"]]
                self.parameters += [one for one in group["params"] if one.requires_grad]

    def run(self, work: Callable[[], tuple[T, list[Tensor]]]) -> T:
        """Run work that uses the model; it also returns the tensors of its backward pass."""
        found, _ = cast(Any, self.root)(work)
        return cast(T, found)

    def evaluate(self, work: Callable[[], T]) -> T:
        """Run work that uses the model without a backward pass."""
        found = self.run(lambda: (work(), []))
        # without a backward pass the parameters outside of blocks would stay gathered, and stale
        # after the next update
        self.root.reshard()
        return found

    def gradients(self, total: Tensor, retain_graph: bool) -> list[Tensor | None]:
        """Return the gradients of `total`, summed over all processes."""
        self.backward(total, [], retain_graph)
        found = [one.grad for one in self.parameters]
        self.clear()
        return found

    def backward(
        self, objective: Tensor, former: Sequence[Tensor | None], retain_graph: bool = False
    ) -> None:
        """Set the gradients to those of `objective`, summed over all processes, plus `former`."""
        if objective.requires_grad:
            # FSDP divides the sum by the number of processes
            (objective * self.world).backward(retain_graph=retain_graph)
        for parameter, gradient in zip(self.parameters, former, strict=False):
            if gradient is not None:
                own = parameter.grad
                parameter.grad = gradient if own is None else own + gradient

    def clear(self) -> None:
        """Remove all gradients: the backward pass reaches parameters without an optimizer too."""
        cast(nn.Module, self.root).zero_grad(set_to_none=True)


def gather_in_backward(block: "FSDPModule") -> None:
    """Gather a block also for gradients that do not come through its output.

    FSDP gathers it when the gradient of its output arrives. That of a loss on attention arrives at
    queries and keys, inside of the block.
    """

    def gather(gradient: Tensor) -> None:
        block.unshard()  # returns at once if it is gathered

    def register(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(gather)

    for name, part in cast(nn.Module, block).named_modules():
        # the block itself has the empty name
        if name and any(True for _ in part.parameters(recurse=False)):
            part.register_forward_hook(register)


class _Root(nn.Module):
    """Run any work inside of a forward pass around the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], tuple[T, list[Tensor]]]) -> tuple[T, list[Tensor]]:
        return work()


@contextmanager
def shared_folder(folder: Path, ranks: Processes) -> Iterator[Path]:
    """Yield a temporary folder that all processes fill; the first one renames it at the end."""
    with io.atomic_folder(folder) if ranks.is_main else nullcontext() as mine:
        (place,) = ranks.union([] if mine is None else [str(mine)])
        yield Path(place)
        ranks.barrier()  # the manifest lists the files of all processes


def write_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors, each process its own shards; all processes must call this.

    Args:
        folder: The folder, which all processes can reach.
        tensors: Tensors by name, sharded or the same in all processes.

    Raises:
        RunError: A process could not write, for example because the disk is full.
    """
    from torch.distributed import checkpoint

    if not tensors:
        return
    writer = checkpoint.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        checkpoint.save({**tensors}, storage_writer=writer)
    except checkpoint.CheckpointException as error:  # raised in all processes
        first = next(iter(error.failures.values()))[0]
        raise RunError(f"{folder} could not be written: {first}") from error


def read_shards(folder: Path, into: Mapping[str, Tensor]) -> None:
    """Fill tensors, sharded or not, from a folder of `write_shards`.

    Every process reads its own part of the files, without communication.

    Args:
        folder: The folder.
        into: Tensors by name, changed in place.

    Raises:
        RuntimeError: A tensor is missing, or has another shape.
    """
    from torch.distributed import checkpoint

    stored = {name: shape for name, shape, _ in stored_tensors(folder)}
    for name, tensor in into.items():
        if stored.get(name) != tensor.shape:
            raise RuntimeError(f"{name} has shape {stored.get(name)}, expected {tensor.shape}")
    if into:
        reader = checkpoint.HuggingFaceStorageReader(str(folder))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            checkpoint.load({**into}, storage_reader=reader, no_dist=True)


def stored_tensors(folder: Path) -> Iterator[tuple[str, torch.Size, torch.dtype]]:
    """Yield name, shape and dtype of the tensors in a folder of `write_shards`."""
    from torch.distributed import checkpoint

    if not folder.is_dir():
        return
    found = checkpoint.HuggingFaceStorageReader(str(folder)).read_metadata()
    for name, about in found.state_dict_metadata.items():
        assert isinstance(about, checkpoint.TensorStorageMetadata)
        yield name, about.size, about.properties.dtype


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is a `DTensor`."""
    # only a DTensor has placements
    return hasattr(tensor, "placements")


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of a tensor in this process."""
    return cast("DTensor", tensor).to_local() if is_sharded(tensor) else tensor


def whole_tensor(tensor: Tensor) -> Tensor:
    """Gather a tensor; all processes must call this."""
    return cast("DTensor", tensor).full_tensor() if is_sharded(tensor) else tensor
