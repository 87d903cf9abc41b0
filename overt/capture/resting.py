"""A model in evaluation mode for a while, and afterwards as it was found."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def still(model: nn.Module) -> Iterator[nn.Module]:
    """Every module inside in evaluation mode for the block, and each as it was afterwards.

    An attack or a probe of a model that is training would meet dropout, and move the statistics of
    batch norm.
    """
    before = [(part, part.training) for part in model.modules()]
    try:
        for part, _ in before:
            part.training = False
        yield model
    finally:
        for part, training in before:
            part.training = training


@contextmanager
def resting(model: Any) -> Iterator[None]:
    """`still`, and random numbers that nobody else misses; what is no module is left alone."""
    if not isinstance(model, nn.Module):
        with torch.random.fork_rng(devices=[]):
            yield
        return
    first = next(model.parameters(), None)
    cards = [first.device] if first is not None and first.device.type == "cuda" else []
    with torch.random.fork_rng(devices=cards), still(model):
        yield
