"""Evaluation mode for a block, restored afterwards."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[nn.Module]:
    """Set all modules to evaluation mode for the block, and restore each one afterwards.

    In training mode, dropout would be active, and batch norm would update its statistics.

    Args:
        model: The model to switch.

    Yields:
        The same model.
    """
    before = [(part, part.training) for part in model.modules()]
    try:
        # Not `train()`, which a class may override and which sets all children.
        for part, training in before:
            if training:
                part.training = False
        yield model
    finally:
        for part, training in before:
            if part.training is not training:  # assigning an attribute of a module is slow
                part.training = training


@contextmanager
def eval_mode_forked_rng(model: Any) -> Iterator[None]:
    """Enter `eval_mode` with a forked RNG, so that the block does not affect random numbers.

    A callable that is not a module only gets the forked RNG.
    """
    if not isinstance(model, nn.Module):
        # By default `fork_rng` saves the state of every GPU.
        with torch.random.fork_rng(devices=[]):
            yield
        return
    first = next(model.parameters(), None)
    devices = [first.device] if first is not None and first.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), eval_mode(model):
        yield
