"""Everything a run needs to go on as if it had never stopped, in safetensors and JSON.

The random numbers of a step are a function of (seed, stage, step, rank) and the order of an
epoch's samples is a function of (seed, stage, epoch), so the counters here are also the state of
every random generator and the position in the data.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from overt import files
from overt.errors import Damaged

PREFIX = "step-"


@dataclass
class State:
    """How far a stage has come, and of what: `plan` is what its counters mean."""

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
    state: State,
    model: nn.Module,
    optimizers: Mapping[str, torch.optim.Optimizer],
    keep: int = 2,
) -> Path:
    """Write one checkpoint folder, whole or not at all, and drop all but the newest `keep`."""
    folder = parent / f"{PREFIX}{state.step:09d}"
    packed = {name: pack(optimizer.state_dict()) for name, optimizer in optimizers.items()}
    with files.writing(folder) as temporary:
        files.write_tensors(temporary / "model.safetensors", copy_of(model.state_dict()))
        for name, (tensors, rest) in packed.items():
            files.write_tensors(temporary / f"{name}.optimizer.safetensors", tensors)
            files.write_json(temporary / f"{name}.optimizer.json", rest)
        files.write_json(temporary / "state.json", asdict(state))
    files.prune(parent, PREFIX, keep)
    return folder


def load(folder: Path, model: nn.Module, optimizers: Mapping[str, torch.optim.Optimizer]) -> State:
    """Verify a checkpoint, then put it into the model and the optimizers.

    One that is whole but was left by another model or another kind of optimizer is `Damaged` too.
    """
    files.verify(folder)
    values = files.read_json(folder / "state.json")
    try:
        state = State(**values)
    except TypeError as error:
        raise Damaged(f"{folder / 'state.json'} is not the state of a run: {error}") from None
    load_model(folder, model)
    for name, optimizer in optimizers.items():
        tensors = files.read_tensors(folder / f"{name}.optimizer.safetensors")
        rest = files.read_json(folder / f"{name}.optimizer.json")
        formerly = [dict(group) for group in optimizer.param_groups]
        try:
            optimizer.load_state_dict(unpack(tensors, rest))
            for before, group in zip(formerly, optimizer.param_groups, strict=True):
                if before.keys() - group.keys():
                    lacks = ", ".join(sorted(before.keys() - group.keys()))
                    raise ValueError(f"it lacks {lacks}")
                group |= {key: _as(value, group[key]) for key, value in before.items()}
        except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
            raise Damaged(
                f"{folder / name}.optimizer.json does not fit this optimizer: {error}"
            ) from error
    return state


def load_model(folder: Path, model: nn.Module) -> None:
    """Put the weights of a verified checkpoint into a model of the same shape."""
    try:
        model.load_state_dict(files.read_tensors(folder / "model.safetensors"))
    except RuntimeError as error:
        first = str(error).strip().splitlines()[-1].strip()
        raise Damaged(f"{folder / 'model.safetensors'} does not fit this model: {first}") from None


def copy_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies on the CPU that share no memory, as safetensors wants them."""
    return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}


def pack(state: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """An optimizer's state as tensors and JSON; one that holds anything else is refused."""
    tensors, plain = {}, {}
    for index, slots in state["state"].items():
        for slot, value in slots.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{index}/{slot}"] = value
            elif value is None or isinstance(value, bool | int | float | str):
                plain[f"{index}/{slot}"] = value
            else:
                raise ValueError(
                    f"the optimizer keeps a {type(value).__name__} as {slot!r}, which cannot be "
                    "saved; use one that keeps tensors and numbers"
                )
    groups = [
        {key: _number(value) for key, value in group.items()} for group in state["param_groups"]
    ]
    return copy_of(tensors), {"plain": plain, "groups": groups}


def unpack(tensors: Mapping[str, torch.Tensor], rest: Mapping[str, Any]) -> dict[str, Any]:
    """The optimizer's state that `pack` took apart."""
    state: dict[int, dict[str, Any]] = {}
    for name, value in [*tensors.items(), *rest["plain"].items()]:
        index, slot = name.split("/", 1)
        state.setdefault(int(index), {})[slot] = value
    return {"state": state, "param_groups": [dict(group) for group in rest["groups"]]}


def _as(before: Any, value: Any) -> Any:
    """A setting in the form that the optimizer was made with: what `_number` did, undone."""
    if isinstance(before, torch.Tensor):
        return torch.as_tensor(value, dtype=before.dtype, device=before.device)
    return tuple(value) if isinstance(before, tuple) else value


def _number(value: Any) -> Any:
    """Optimizers keep betas as tuples and some numbers as tensors; JSON has neither."""
    if isinstance(value, torch.Tensor):
        value = value.item()
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"an optimizer setting is {value}")
    return value
