"""Activation checkpointing: make the recomputation repeat the edits of the first forward pass.

Checkpointing drops activations and recomputes them in the backward pass, which may run after the
`watch` block has ended and in another thread. Edits are therefore bound to the recomputation
function itself. The recomputation is not recorded: it is the same call.

Reentrant checkpointing has no autograd graph in the forward pass. Hugging Face models, which store
their checkpoint function, are switched to the other kind inside of a block.
"""

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from overt.capture._torch_compat import SHOWS_SAVED_TENSORS_HOOKS, saved_tensors_pack_hook


class CheckpointPhase(Enum):
    """Whether the current forward pass is checkpointed, or recomputes a checkpointed one."""

    NONE = "none"
    FORWARD = "forward"  # its activations will be recomputed
    RECOMPUTE = "recompute"


def checkpoint_phase() -> CheckpointPhase:
    """Return the phase of the current forward pass.

    Raises:
        NotImplementedError: For reentrant checkpointing, whose forward pass has no autograd graph.
    """
    if not torch.is_grad_enabled():
        if _in_reentrant_checkpoint():
            raise NotImplementedError(
                "reentrant checkpointing runs the model without an autograd graph, so captured "
                "attention has no gradient; use checkpoint(..., use_reentrant=False), in Hugging "
                'Face gradient_checkpointing_enable({"use_reentrant": False})'
            )
        return CheckpointPhase.NONE
    # Non-reentrant checkpointing packs saved tensors by a hook of its own in the forward pass, and
    # by another one in the recomputation; the names of their classes tell which.
    if not SHOWS_SAVED_TENSORS_HOOKS:
        return _checkpoint_on_stack()[0]
    pack = saved_tensors_pack_hook()
    name = "" if pack is None else getattr(pack, "__qualname__", "")
    if name.startswith("_recomputation_hook"):
        return CheckpointPhase.RECOMPUTE
    return CheckpointPhase.FORWARD if name.startswith("_checkpoint_hook") else CheckpointPhase.NONE


def wrap_recomputation(wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wrap the recomputation function of the current checkpoint, once per checkpoint."""
    frame = _checkpoint_frame()
    if not hasattr(frame, "overt_bound"):
        frame.recompute_fn = wrapper(frame.recompute_fn)
        frame.overt_bound = True


def _checkpoint_frame() -> Any:
    # The frame has no public accessor; the pack hook closes over it.
    if not SHOWS_SAVED_TENSORS_HOOKS and (found := _checkpoint_on_stack()[1]) is not None:
        return found
    for cell in getattr(saved_tensors_pack_hook(), "__closure__", None) or ():
        if hasattr(cell.cell_contents, "recompute_fn"):
            return cell.cell_contents
    raise NotImplementedError(
        f"attention cannot be edited under the activation checkpointing of torch "
        f"{torch.__version__}; turn checkpointing off while editing"
    )


def _checkpoint_on_stack() -> tuple[CheckpointPhase, Any]:
    """Return the phase and the frame of the innermost checkpoint, from the call stack.

    For PyTorch 2.6, which does not show its hooks for saved tensors.
    """
    caller: Any = sys._getframe()
    while caller is not None:
        code = caller.f_code
        if code.co_filename == sys.modules["torch.utils.checkpoint"].__file__:
            if code.co_name == "unpack_hook":
                return CheckpointPhase.RECOMPUTE, caller.f_locals.get("frame")
            generator = caller.f_locals.get("gen") if code.co_name == "checkpoint" else None
            if generator is not None and generator.gi_frame is not None:
                return CheckpointPhase.FORWARD, generator.gi_frame.f_locals.get("new_frame")
        caller = caller.f_back
    return CheckpointPhase.NONE, None


_STORED = "_gradient_checkpointing_func"  # of Hugging Face modules
_LOCK = threading.Lock()
_SWITCHED: "weakref.WeakKeyDictionary[nn.Module, tuple[int, Any, Any]]" = (
    weakref.WeakKeyDictionary()
)  # by module: sessions, previous function, ours


@contextmanager
def without_reentrant_checkpoints(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Switch Hugging Face modules to non-reentrant checkpointing for the block.

    Gradients are the same. The previous function is restored when the last session ends.
    """
    with ExitStack() as undo:
        for module in [one for one in modules if _STORED in one.__dict__]:
            stored = module.__dict__[_STORED]
            if module in _SWITCHED or _is_reentrant(stored):
                _switch(module, stored)
                undo.callback(_restore, module)
        yield


def _is_reentrant(stored: Any) -> bool:
    """Return whether a function is the `checkpoint` of PyTorch with reentrant settings."""
    return (
        isinstance(stored, functools.partial)
        and stored.func is checkpoint
        and stored.keywords.get("use_reentrant") is True
    )


def _switch(module: nn.Module, stored: Any) -> None:
    with _LOCK:
        count, before, ours = _SWITCHED.get(module, (0, stored, None))
        if ours is None:
            ours = functools.partial(stored, use_reentrant=False)
            setattr(module, _STORED, ours)
        _SWITCHED[module] = (count + 1, before, ours)


def _restore(module: nn.Module) -> None:
    with _LOCK:
        count, before, ours = _SWITCHED.pop(module)
        if count > 1:
            _SWITCHED[module] = (count - 1, before, ours)
        elif vars(module).get(_STORED) is ours:  # a function that was set inside the block stays
            setattr(module, _STORED, before)


def _in_reentrant_checkpoint() -> bool:
    frame = sys._getframe()
    codes = CheckpointFunction.forward.__code__, CheckpointFunction.backward.__code__
    while frame is not None:
        if frame.f_code in codes:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
