"""Enter the function mode only where a model attends.

The function mode sees every operation of a forward pass, at several microseconds each. The first
block of a model runs under it from beginning to end, and finds which modules run, which of them
attend, and which do so through the attention interface of Hugging Face alone. In later blocks the
mode is entered

- around the function of the interface, in modules that attended only there;
- from the pre-hook to the hook of other modules that attended, of modules that did not run yet, and
  of modules that may attend because their code names a softmax or fused attention.

Attention is captured by the same code in both cases. Only these modules and the root are hooked. An
attention module that runs and is not captured raises, as in every block.
"""

import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn

from overt.capture import _torch_compat, hf_interface
from overt.capture.function_mode import AttentionFunctionMode
from overt.capture.hooks import CountedPreHook
from overt.capture.records import CallRecord
from overt.capture.state import LOCK, STATE
from overt.capture.watch_plan import WatchPlan


class AttentionRoutes:
    """How a model attended in the blocks that were checked.

    Attributes:
        interface: Modules that attended through the interface of Hugging Face alone.
        others: Other modules that attended.
        ran: Hooked modules that ran.
        inside: Modules that attended, and all modules inside of them.
        usable: Whether the mode may be entered late: never below the mode of another library.
    """

    def __init__(self) -> None:
        self.interface: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.others: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.ran: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.inside: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.usable = True

    def learn(self, records: Iterable[CallRecord], ran: Iterable[nn.Module]) -> None:
        """Add what a block has found."""
        for record in records:
            (self.interface if record.through_interface else self.others).add(record.module)
        self.interface -= self.others  # modules that attend in both ways
        self.ran.update(ran)
        self.inside.update(inner for one in self.attending() for inner in one.modules())

    def attending(self) -> set[nn.Module]:
        """Return all modules that attended."""
        return {*self.interface, *self.others}


_ROUTES: "weakref.WeakKeyDictionary[nn.Module, dict[Any, AttentionRoutes]]" = (
    weakref.WeakKeyDictionary()
)


def learn_routes(
    model: nn.Module, key: Any, records: Iterable[CallRecord], ran: Iterable[nn.Module]
) -> None:
    """Store how a model attended, in addition to earlier blocks."""
    _ROUTES.setdefault(model, {}).setdefault(key, AttentionRoutes()).learn(records, ran)


def routes_of(model: nn.Module, key: Any) -> AttentionRoutes | None:
    """Return how a model attends, None if that is not known."""
    routes = _ROUTES.get(model, {}).get(key)
    return routes if routes is not None and routes.usable else None


def modules_to_hook(
    routes: AttentionRoutes, plan: WatchPlan, root: nn.Module
) -> tuple[list[nn.Module], set[nn.Module]]:
    """Return the modules to hook, and those of them that run under the function mode.

    Args:
        routes: What earlier blocks have found.
        plan: What is watched.
        root: The model.
    """
    attending = routes.attending()
    unseen = set(plan.hooked).difference(routes.ran)
    scoped = {*routes.others, *unseen, *plan.may_attend.difference(attending)}
    # Modules inside of attention are hooked, so that the innermost running module is known.
    # Besides these, what `check_coverage` counts (`expected`), what `without=` excludes, and the
    # root.
    needed = {*scoped, *routes.inside, *plan.expected, *plan.excluded, root}
    if root not in plan.watched:  # hooks tell watched modules from others
        return plan.hooked, scoped
    return [one for one in plan.hooked if one in needed], scoped


# --- entering the mode


def scope_pre_hook(module: nn.Module, inputs: Any) -> None:
    """Enter the function mode until the hook of the module; a forward pre-hook.

    Axes are tracked in modules that may have eager attention: those that did not run before, and
    `nn.MultiheadAttention`, whose flags decide.
    """
    if (
        STATE.scoped
        and STATE.mode_scope is None
        and STATE.module_stack[-1:] == [module]
        and not torch.compiler.is_compiling()
    ):
        _check_other_modes()
        undo = ExitStack()
        undo.callback(setattr, STATE, "tracks_axes", STATE.tracks_axes)
        undo.enter_context(AttentionFunctionMode())
        known = any(module in session.routes.ran for session in STATE.sessions)
        STATE.tracks_axes = not known or isinstance(module, nn.MultiheadAttention)
        STATE.mode_scope = module, undo


SCOPE_HOOK = CountedPreHook(scope_pre_hook)


def _check_other_modes() -> None:
    """Raise if another library has entered a function mode in the block.

    It would change the tensors below ours, which would record what did not attend. The next block
    enters ours first.
    """
    if _torch_compat.has_function_mode():
        for session in STATE.sessions:
            session.routes.usable = False
        raise NotImplementedError(
            "a TorchFunctionMode was entered inside of the block, which was not so when this model "
            "was first watched; run the block again to capture it"
        )


def _enter_mode_in(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of the interface that enters the function mode if it is needed."""

    @wraps(function)
    def attend(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not STATE.sessions:
            return function(*args, **kwargs)
        # No module around this call has entered the mode: it is needed for this call only.
        if STATE.scoped and STATE.mode_scope is None:
            _check_other_modes()
            recorder = STATE.decode_recorder
            if recorder is not None and recorder(function, args, kwargs):
                return function(*args, **kwargs)
            with AttentionFunctionMode():
                return function(*args, **kwargs)
        # The mode is active already; the record notes that the call came this way
        # (`AttentionRoutes`).
        STATE.in_interface = True
        try:
            return function(*args, **kwargs)
        finally:
            STATE.in_interface = False

    return attend


_OPEN = [0]  # blocks of all threads
_REPLACED: dict[str, tuple[Any, Any]] = {}  # by name: the function of the interface, and ours


@contextmanager
def wrapped_interface(configs: Collection[Any]) -> Iterator[None]:
    """Wrap the functions "sdpa" and "overt" of the Hugging Face interface for a block.

    They are the same functions to threads without an open block.
    """
    if not configs or "transformers.modeling_utils" not in sys.modules:
        yield
        return
    with LOCK:
        _OPEN[0] += 1
        if _OPEN[0] == 1:
            for name in ("sdpa", hf_interface.NAME):
                function = hf_interface.registered(name)
                if function is not None:
                    _REPLACED[name] = function, _enter_mode_in(function)
                    hf_interface.register(name, _REPLACED[name][1])
    try:
        yield
    finally:
        with LOCK:
            _OPEN[0] -= 1
            if not _OPEN[0]:
                for name, (function, ours) in _REPLACED.items():
                    # A function that was registered inside the block stays.
                    if hf_interface.registered(name) is ours:
                        hf_interface.register(name, function)
                _REPLACED.clear()


def can_scope() -> bool:
    """Return whether the mode can be entered later: no mode of another library is active.

    Such a mode would see the operations of a model in another order.
    """
    return not _torch_compat.has_function_mode()
