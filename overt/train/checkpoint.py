"""Checkpoints for exact resuming, in safetensors and JSON.

The random numbers of a step depend only on (seed, stage, step, rank), and the order of the samples
only on (seed, stage, epoch). So the counters here also determine the state of every random
generator and the position in the data.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from overt import io
from overt.errors import CorruptFileError, RunError, missing_resource
from overt.train.distributed import Processes
from overt.train.shards import (
    is_sharded,
    read_shards,
    shared_folder,
    stored_tensors,
    write_shards,
)

PREFIX = "step-"


@dataclass
class TrainState:
    """The counters of a training stage; `plan` has the settings that define them."""

    stage: str
    seed: int
    step: int = 0
    epoch: int = 0
    samples: int = 0
    seconds: float = 0.0
    best: float | None = None
    best_step: int = 0
    waited: int = 0
    log_bytes: int = 0
    done: bool = False
    meters: dict[str, list[float]] = field(default_factory=dict)
    plan: dict[str, int] = field(default_factory=dict)


def save(
    parent: Path,
    state: TrainState,
    model: nn.Module,
    optimizers: Mapping[str, torch.optim.Optimizer],
    keep: int = 2,
) -> Path:
    """Write a checkpoint folder atomically, and delete all but the newest `keep`."""
    folder = parent / f"{PREFIX}{state.step:09d}"
    # packed before anything is written: an optimizer that cannot be saved leaves no folder behind
    packed = {
        name: pack_optimizer_state(optimizer.state_dict()) for name, optimizer in optimizers.items()
    }
    with io.atomic_folder(folder) as temporary:
        io.write_tensors(temporary / "model.safetensors", cpu_copies(model.state_dict()))
        for name, (tensors, rest) in packed.items():
            io.write_tensors(temporary / f"{name}.optimizer.safetensors", tensors)
            io.write_json(temporary / f"{name}.optimizer.json", rest)
        io.write_json(temporary / "state.json", asdict(state))
    # old checkpoints are deleted only after the new one is complete
    io.prune(parent, PREFIX, keep)
    return folder


def save_shards(
    parent: Path,
    state: TrainState,
    model: nn.Module,
    optimizers: Mapping[str, torch.optim.Optimizer],
    ranks: Processes,
    keep: int = 2,
) -> Path:
    """Write a checkpoint folder of a sharded model; all processes must call this."""
    folder = parent / f"{PREFIX}{state.step:09d}"
    packed = {
        name: split_optimizer_state(optimizer.state_dict())
        for name, optimizer in optimizers.items()
    }
    with shared_folder(folder, ranks) as temporary:
        write_shards(temporary / "model", model.state_dict())
        for name, (tensors, rest) in packed.items():
            write_shards(temporary / f"{name}.optimizer", tensors)
            if ranks.is_main:
                io.write_json(temporary / f"{name}.optimizer.json", rest)
        if ranks.is_main:
            io.write_json(temporary / "state.json", asdict(state))
    if ranks.is_main:
        io.prune(parent, PREFIX, keep)
    return folder


def load(
    folder: Path, model: nn.Module, optimizers: Mapping[str, torch.optim.Optimizer]
) -> TrainState:
    """Verify a checkpoint and load it into the model and the optimizers.

    Both the checkpoint and the model may be sharded or whole.

    Raises:
        CorruptFileError: The checkpoint is damaged, or from another model or optimizer.
    """
    # checksums of all files first, so that a damaged checkpoint changes neither model nor
    # optimizers
    io.verify(folder)
    values = io.read_json(folder / "state.json")
    try:
        state = TrainState(**values)
    except TypeError as error:
        raise CorruptFileError(
            f"{folder / 'state.json'} is not the state of a run: {error}"
        ) from None
    load_model(folder, model)
    for name, optimizer in optimizers.items():
        # load_state_dict replaces the settings of each group by those of the file: keep them to
        # compare, and to restore types that JSON does not have
        current = [dict(group) for group in optimizer.param_groups]
        try:
            tensors = _read_optimizer(folder, name, optimizer)
            rest = io.read_json(folder / f"{name}.optimizer.json")
            optimizer.load_state_dict(unpack_optimizer_state(tensors, rest))
            restore_dtypes(optimizer, tensors)
            match_memory_format(optimizer)
            for before, group in zip(current, optimizer.param_groups, strict=True):
                if before.keys() - group.keys():
                    lacks = ", ".join(sorted(before.keys() - group.keys()))
                    raise ValueError(f"missing settings: {lacks}")
                group |= {key: _restore_type(value, group[key]) for key, value in before.items()}
        except (RunError, CorruptFileError):
            raise
        except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
            _refuse_shortage(folder, error)
            raise CorruptFileError(
                f"{folder / name}.optimizer.json does not match this optimizer: {error}"
            ) from error
    return state


def load_model(folder: Path, model: nn.Module) -> None:
    """Load the weights of a verified checkpoint into a model."""
    try:
        model.load_state_dict(_read_model(folder, model))
    except (RunError, CorruptFileError):
        raise
    except RuntimeError as error:
        _refuse_shortage(folder, error)
        first = str(error).strip().splitlines()[-1].strip()
        raise CorruptFileError(
            f"{folder / 'model.safetensors'} does not match this model: {first}"
        ) from None


def _read_model(folder: Path, model: nn.Module) -> dict[str, torch.Tensor]:
    state = model.state_dict()
    shards = folder / "model"
    if not shards.is_dir() and not any(map(is_sharded, state.values())):
        return io.read_tensors(folder / "model.safetensors")
    found = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    other = {name for name, _, _ in stored_tensors(shards)} - set(found)
    if other:
        raise RuntimeError(f"unexpected weights {', '.join(sorted(other))}")
    # a folder of whole files is read like one with a single shard
    read_shards(shards if shards.is_dir() else folder, found)
    return found


def _read_optimizer(
    folder: Path, name: str, optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    shards = folder / f"{name}.optimizer"
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    if not shards.is_dir() and not any(map(is_sharded, parameters)):
        # without any state there are no shards
        whole = folder / f"{name}.optimizer.safetensors"
        return io.read_tensors(whole) if not (folder / "model").is_dir() else {}
    place = shards if shards.is_dir() else folder
    found = {}
    for slot, shape, kind in stored_tensors(place):
        index, slash, _ = slot.partition("/")
        if slash:  # not a weight
            one = parameters[int(index)]
            found[slot] = (
                torch.empty_like(one, dtype=kind)
                if shape == one.shape
                else torch.empty(shape, dtype=kind)
            )
    read_shards(place, found)
    return found


def _refuse_shortage(folder: Path, error: Exception) -> None:
    """Raise `RunError` if loading failed for lack of memory or another resource."""
    if lacked := missing_resource(error):
        raise RunError(
            f"{folder} could not be loaded: {lacked}. The checkpoint is intact: free "
            "memory and try again."
        ) from error


def restore_dtypes(optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor]) -> None:
    """Give state tensors the dtype and the bits of the file.

    `load_state_dict` casts them to the dtype of their parameter. Some are float32 whatever the
    parameter is, such as `mu_product` of NAdam: 0.9 in bfloat16 is another number.
    """
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    for name, stored in tensors.items():
        index, slot = name.split("/", 1)
        slots = optimizer.state[parameters[int(index)]]
        if slots[slot].dtype != stored.dtype:
            slots[slot] = stored.to(slots[slot].device)


def match_memory_format(optimizer: torch.optim.Optimizer) -> None:
    """Give state tensors the memory format of their parameters, as training gives them.

    Files hold contiguous tensors. Fused optimizers refuse a contiguous momentum beside a
    channels-last parameter.
    """
    for parameter, slots in optimizer.state.items():
        for name, value in slots.items():
            # a scalar parameter has the shape of the step count, whose device the optimizer chose
            if isinstance(value, torch.Tensor) and value.ndim and value.shape == parameter.shape:
                slots[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def cpu_copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy tensors to the CPU so that no two share memory, as safetensors requires."""
    return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}


def pack_optimizer_state(state: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Split an optimizer's state as `split_optimizer_state`, and copy its tensors to the CPU."""
    tensors, rest = split_optimizer_state(state)
    return cpu_copies(tensors), rest


def split_optimizer_state(state: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Split an optimizer's state into tensors and JSON values; other values raise `ValueError`."""
    tensors, plain = {}, {}
    for index, slots in state["state"].items():
        for slot, value in slots.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{index}/{slot}"] = value
            elif value is None or isinstance(value, bool | int | float | str):
                plain[f"{index}/{slot}"] = value
            else:
                raise ValueError(
                    f"cannot save the optimizer: its state {slot!r} is a {type(value).__name__}, "
                    "not a tensor or a number; use another optimizer"
                )
    groups = [
        {key: _json_value(value) for key, value in group.items()} for group in state["param_groups"]
    ]
    return tensors, {"plain": plain, "groups": groups}


def unpack_optimizer_state(
    tensors: Mapping[str, torch.Tensor], rest: Mapping[str, Any]
) -> dict[str, Any]:
    """Join what `pack_optimizer_state` split."""
    state: dict[int, dict[str, Any]] = {}
    for name, value in [*tensors.items(), *rest["plain"].items()]:
        index, slot = name.split("/", 1)
        # optimizers number their parameters; names in files are strings
        state.setdefault(int(index), {})[slot] = value
    # "10" sorts before "2": keep the order of the parameters
    ordered = dict(sorted(state.items()))
    return {"state": ordered, "param_groups": [dict(group) for group in rest["groups"]]}


def _restore_type(before: Any, value: Any) -> Any:
    """Restore the type of an optimizer setting: the inverse of `_json_value`."""
    if isinstance(before, torch.Tensor):
        return torch.as_tensor(value, dtype=before.dtype, device=before.device)
    return tuple(value) if isinstance(before, tuple) else value


def _json_value(value: Any) -> Any:
    """Convert an optimizer setting to JSON: tuples to lists, tensors to numbers."""
    if isinstance(value, torch.Tensor):
        value = value.item()
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"optimizer settings must be finite, got {value}")
    return value
