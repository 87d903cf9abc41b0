"""How most programs do it: the counterparts that must fail the tests that ours pass."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from overt import files
from overt.train import checkpoint
from overt.train.checkpoint import State


def save(
    parent: Path,
    state: State,
    model: nn.Module,
    optimizers: Mapping[str, torch.optim.Optimizer],
    keep: int = 2,
) -> Path:
    """Room is made, and each file is written where it belongs."""
    for folder in by_name(parent)[: -max(1, keep - 1)]:
        shutil.rmtree(folder)
    folder = parent / f"{checkpoint.PREFIX}{state.step:09d}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "state.json").write_text(json.dumps(asdict(state)))
    save_file(checkpoint.copy_of(model.state_dict()), folder / "model.safetensors")
    for name, optimizer in optimizers.items():
        tensors, rest = checkpoint.pack(optimizer.state_dict())
        save_file(tensors, folder / f"{name}.optimizer.safetensors")
        (folder / f"{name}.optimizer.json").write_text(json.dumps(rest))
    return folder


def by_name(parent: Path) -> list[Path]:
    """Checkpoints as a listing of the folder gives them, the oldest first."""
    return sorted(parent.glob(f"{checkpoint.PREFIX}*"))


def newest(parent: Path, prefix: str) -> tuple[Path | None, list[Path]]:
    """The last one by name, whatever is in it."""
    found = by_name(parent)
    return (found[-1] if found else None), []


def prune(parent: Path, prefix: str, keep: int) -> list[Path]:
    """All but the last by name go, whatever is in them."""
    gone = by_name(parent)[:-keep]
    for folder in gone:
        shutil.rmtree(folder)
    return gone


def read(folder: Path) -> dict[str, Any]:
    """A checkpoint as its formats read it, without a look at any checksum."""
    found: dict[str, Any] = {"state": json.loads((folder / "state.json").read_text())}
    for name in ("model", "model.optimizer", "adversary.optimizer"):
        found[name] = load_file(folder / f"{name}.safetensors")
    for name in ("model", "adversary"):
        found[f"{name}.json"] = json.loads((folder / f"{name}.optimizer.json").read_text())
    return found


def take_over() -> None:
    """Let a process save and resume the naive way; it must be one that ends soon."""
    patch = pytest.MonkeyPatch()
    patch.setattr(checkpoint, "save", save)
    patch.setattr(files, "newest", newest)
    patch.setattr(files, "prune", prune)
    patch.setattr(files, "verify", lambda folder: {})
