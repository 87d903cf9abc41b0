"""Activation checkpointing: the second forward pass must do what the first one did.

Checkpointing throws activations away and computes them again in the backward pass, which may come
after the watcher has gone, and in another thread. An edit is therefore bound to the recomputation
itself. The second pass is not remembered: it is the same call.
"""

import sys
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction


class Pass(Enum):
    """Which pass over a module this is."""

    ONLY = "only"
    FIRST = "first"  # of two: what it saves will be computed again
    AGAIN = "again"


def current() -> Pass:
    """Which pass is under way; reentrant checkpointing, which cuts the graph, is refused."""
    if not torch.is_grad_enabled():
        if _reentrant():
            raise NotImplementedError(
                "reentrant checkpointing runs the model without a graph, so what is seen there has "
                "no gradient; use checkpoint(..., use_reentrant=False), in Hugging Face "
                'gradient_checkpointing_enable({"use_reentrant": False})'
            )
        return Pass.ONLY
    pack = _pack()
    name = "" if pack is None else getattr(pack, "__qualname__", "")
    if name.startswith("_recomputation_hook"):
        return Pass.AGAIN
    return Pass.FIRST if name.startswith("_checkpoint_hook") else Pass.ONLY


def bind(around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Have the recomputation of the pass under way run inside `around`, once."""
    frame = _frame()
    if not hasattr(frame, "overt_bound"):
        frame.recompute_fn = around(frame.recompute_fn)
        frame.overt_bound = True


def _pack() -> Any:
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0]


def _frame() -> Any:
    for cell in getattr(_pack(), "__closure__", None) or ():
        if hasattr(cell.cell_contents, "recompute_fn"):
            return cell.cell_contents
    raise NotImplementedError(
        f"attention cannot be edited under the checkpointing of torch {torch.__version__}; "
        "switch checkpointing off while editing"
    )


def _reentrant() -> bool:
    frame = sys._getframe()
    wanted = CheckpointFunction.forward.__code__, CheckpointFunction.backward.__code__
    while frame is not None:
        if frame.f_code in wanted:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
