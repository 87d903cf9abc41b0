"""Usual implementations of checkpoints, which must fail the tests that `overt` passes."""

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

from overt import io
from overt.train import checkpoint
from overt.train.checkpoint import TrainState


def save(
    parent: Path,
    state: TrainState,
    model: nn.Module,
    optimizers: Mapping[str, torch.optim.Optimizer],
    keep: int = 2,
) -> Path:
    """Delete old checkpoints, then write each file in place."""
    for folder in list_by_name(parent)[: -max(1, keep - 1)]:
        shutil.rmtree(folder)
    folder = parent / f"{checkpoint.PREFIX}{state.step:09d}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "state.json").write_text(json.dumps(asdict(state)))
    save_file(checkpoint.cpu_copies(model.state_dict()), folder / "model.safetensors")
    for name, optimizer in optimizers.items():
        tensors, rest = checkpoint.pack_optimizer_state(optimizer.state_dict())
        save_file(tensors, folder / f"{name}.optimizer.safetensors")
        (folder / f"{name}.optimizer.json").write_text(json.dumps(rest))
    return folder


def list_by_name(parent: Path) -> list[Path]:
    """Checkpoints sorted by name, oldest first."""
    return sorted(parent.glob(f"{checkpoint.PREFIX}*"))


def newest(parent: Path, prefix: str) -> tuple[Path | None, list[Path]]:
    """Return the last one by name, without verification."""
    found = list_by_name(parent)
    return (found[-1] if found else None), []


def prune(parent: Path, prefix: str, keep: int) -> list[Path]:
    """Delete all but the last by name, without verification."""
    deleted = list_by_name(parent)[:-keep]
    for folder in deleted:
        shutil.rmtree(folder)
    return deleted


def read(folder: Path) -> dict[str, Any]:
    """Read a checkpoint without verifying checksums."""
    found: dict[str, Any] = {"state": json.loads((folder / "state.json").read_text())}
    for name in ("model", "model.optimizer", "adversary.optimizer"):
        found[name] = load_file(folder / f"{name}.safetensors")
    for name in ("model", "adversary"):
        found[f"{name}.json"] = json.loads((folder / f"{name}.optimizer.json").read_text())
    return found


def patch_checkpoints() -> None:
    """Patch saving and resuming with these functions, in a process that ends soon."""
    patch = pytest.MonkeyPatch()
    patch.setattr(checkpoint, "save", save)
    patch.setattr(io, "newest", newest)
    patch.setattr(io, "prune", prune)
    patch.setattr(io, "verify", lambda folder: {})
