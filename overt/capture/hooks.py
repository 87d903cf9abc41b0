"""Forward hooks that maintain a stack of the running modules, one per thread.

Hooks have no state, so that a graph compiled under one session is valid for every later one.
"""

import sys
import weakref
from collections import OrderedDict
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from overt.capture import _torch_compat, activation_checkpointing, model_copies
from overt.capture.discovery import looks_like_attention
from overt.capture.state import FAILED, FLEX, GRAPH, LOCK, OPEN_SESSIONS, STATE


def _is_current(module: nn.Module) -> bool:
    """Whether this module is on top of the stack; a copied model may have our hooks twice."""
    return len(STATE.module_stack) > 0 and STATE.module_stack[-1] is module


def _pre_hook(module: nn.Module, inputs: Any) -> None:
    """Forward pre-hook: push the module on the stack."""
    if not STATE.sessions:
        _report_other_thread(module)
    elif not _is_current(module):
        STATE.module_stack.append(module)
        _note_running(module)


def _note_running(module: nn.Module) -> None:
    """Note that a module ran, for later blocks."""
    if STATE.ran is not None and not torch.compiler.is_compiling():
        STATE.ran.add(module)


def _thread_pre_hook(module: nn.Module, inputs: Any) -> None:
    """Forward pre-hook of modules that are not on the stack: report other threads only."""
    if not STATE.sessions:
        _report_other_thread(module)


def _attention_pre_hook(module: nn.Module, inputs: Any) -> None:
    """Forward pre-hook of an attention module: also log that it ran."""
    if not STATE.sessions:
        _report_other_thread(module)
    elif not _is_current(module):
        STATE.module_stack.append(module)
        _note_running(module)
        if torch.compiler.is_compiling():
            # The tag lets `check_coverage` name the remedy for compiled models.
            STATE.events.add((GRAPH, module))
            STATE.events.add(module)
        elif (
            activation_checkpointing.checkpoint_phase()
            is not activation_checkpointing.CheckpointPhase.RECOMPUTE
        ):
            STATE.events.add(module)
            if isinstance(module, nn.MultiheadAttention):
                raise_if_nested(module, inputs)


def raise_if_nested(module: nn.Module, given: Any) -> None:
    """Raise for nested tensors: samples of different lengths have no (b, h, q, k) map."""
    if any(isinstance(one, Tensor) and _is_nested(one) for one in given):
        raise NotImplementedError(
            f"{type(module).__name__} attends on nested (jagged) tensors, whose samples have "
            "different lengths; pad them with x.to_padded_tensor(0) and pass a mask to the model"
        )


def _is_nested(tensor: Tensor) -> bool:
    try:
        return tensor.is_nested
    except NotImplementedError:  # `CausalBias` of PyTorch 2.6 can only be given to SDPA
        return False


def _report_other_thread(module: nn.Module) -> None:
    """Report to a session that a part of its model runs in a worker thread of the model.

    A thread that called the whole model is another user of it. A thread that runs only a part of
    it, while the model runs in the thread of the session, is a worker.
    """
    if torch.compiler.is_compiling():
        return
    for session in tuple(OPEN_SESSIONS):
        if (
            session.module_stack
            and session.watches(module)
            and not _is_on_call_stack(session.watcher.unwrapped)
        ):
            session.in_other_threads.append(module)


def _is_on_call_stack(model: nn.Module) -> bool:
    """Return whether a method of this module is on the call stack of this thread."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        if frame.f_locals.get("self") is model:
            return True
        frame = frame.f_back
    return False


def _module_raised() -> bool:
    """Return whether a hook is called because its module raised, not because it returned None."""
    # An always-called hook gets None as output in both cases. If the module raised, the exception
    # was caught in the frame that now calls the hook.
    problem = sys.exc_info()[1]
    trace = None if problem is None else problem.__traceback__
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code is not _torch_compat.module_call_code():
        frame = frame.f_back  # runtime type checkers add frames in between
    return trace is not None and trace.tb_frame is frame


def _post_hook(module: nn.Module, inputs: Any, output: Any) -> None:
    """Forward hook: pop the module, and modules above it that an error left on the stack."""
    while module in STATE.module_stack and STATE.module_stack.pop() is not module:
        pass
    if torch.compiler.is_compiling():
        return
    if output is None and STATE.sessions and _module_raised():
        STATE.events.add((FAILED, module))
    # The event of a FlexAttention call has no module (`_capture_flex`): it is this one.
    if _is_unassigned_flex(STATE.events.last.event):
        _assign_flex_calls(module)
    if STATE.traces:
        _drop_traces(module, output)
    # A module that calls itself leaves the scope when its outermost call ends.
    scope = STATE.mode_scope
    if scope is not None and scope[0] is module and module not in STATE.module_stack:
        leave_mode_scope()
    # The outermost module has ended: nothing of this pass is needed later.
    if not STATE.module_stack:
        STATE.op_nodes.clear()
        STATE.key_slices.clear()


def leave_mode_scope() -> None:
    """Leave the function mode that a module has entered (see `scoped_mode`)."""
    if STATE.mode_scope is not None:
        undo = STATE.mode_scope[1]
        STATE.mode_scope = None
        undo.close()


def _drop_traces(module: nn.Module, output: Any) -> None:
    """Stop tracing the softmax results of a module, unless it returns them to attention.

    A softmax that is a module of its own returns the weights to the attention module around it,
    which multiplies them with values. A router returns them to a module that is not attention.
    """
    given = output if isinstance(output, tuple | list) else (output,)
    around = (
        STATE.module_stack[-1]
        if STATE.module_stack and looks_like_attention(STATE.module_stack[-1])
        else None
    )
    # A list, because entries are deleted in the loop.
    for at, trace in [pair for pair in STATE.traces.items() if pair[1].module is module]:
        handed = any(one is trace.tensor for one in given)
        if around is not None and handed and not trace.origin.multiplied:
            trace.origin.module = around
        else:
            del STATE.traces[at]


def _assign_flex_calls(module: nn.Module) -> None:
    """Assign the last FlexAttention calls to this module."""
    events = []
    while STATE.events.last.previous is not None and _is_unassigned_flex(STATE.events.last.event):
        events.append((FLEX, module, *STATE.events.last.event[2:]))
        STATE.events.last = STATE.events.last.previous
    for event in reversed(events):
        STATE.events.add(event)


def _is_unassigned_flex(event: Any) -> bool:
    """Return whether an event is a FlexAttention call whose module is not known yet."""
    return isinstance(event, tuple) and event[0] is FLEX and event[1] is None


def copy_cuda_graph_tensors(module: nn.Module, inputs: Any, output: Any) -> None:
    """Forward hook of a compiled model: copy captured tensors if CUDA graphs are in use.

    A CUDA graph writes every pass into the same memory.
    """
    if not STATE.sessions or not _torch_compat.uses_cuda_graph_trees():
        return
    # Back to the start of this forward pass.
    node = STATE.events.last
    while node.previous is not None and node.event != (module,):
        if hasattr(node.event, "clone_tensors"):
            node.event = node.event.clone_tensors()
        node = node.previous


def count_step(module: nn.Module, inputs: Any) -> None:
    """Forward pre-hook of the whole model: count the forward pass."""
    if STATE.sessions:
        STATE.events.add((module,))
        if not torch.compiler.is_compiling():
            STATE.steps += 1


model_copies.exclude_from_copies(
    _pre_hook,
    _attention_pre_hook,
    _post_hook,
    copy_cuda_graph_tensors,
    count_step,
)
_HOOK_COUNTS: "weakref.WeakKeyDictionary[nn.Module, int]" = weakref.WeakKeyDictionary()
_PRE_HOOK_ID, _POST_HOOK_ID = (
    RemovableHandle(OrderedDict()).id for _ in range(2)
)  # ids that no other hook will get


def add_module_hooks(
    modules: Collection[nn.Module], attending: Collection[nn.Module], compiled: bool
) -> None:
    """Hook modules once each, however many sessions watch them.

    The post-hook also runs when a module raises, but not in a compiled model, where it would break
    the graph: there the module is popped when a parent returns. The hooks are written directly into
    the hook dictionaries, under fixed ids: each block hooks all modules again, and
    `register_forward_hook` would be too slow.

    Args:
        modules: Modules to push on the stack while they run.
        attending: Those of them that are expected to attend.
        compiled: Whether the model is compiled.
    """
    with LOCK:
        for module in modules:
            count = _HOOK_COUNTS.get(module, 0)
            if not count:
                pre_hook = _attention_pre_hook if module in attending else _pre_hook
                pre_hooks, hooks, always_called = _torch_compat.forward_hook_dicts(module)
                pre_hooks[_PRE_HOOK_ID] = pre_hook
                hooks[_POST_HOOK_ID] = _post_hook
                if not compiled:
                    always_called[_POST_HOOK_ID] = True
            _HOOK_COUNTS[module] = count + 1
    model_copies.install_reducers(modules)


def remove_module_hooks(modules: Collection[nn.Module]) -> None:
    """Undo one `add_module_hooks`; the last one removes the hooks."""
    model_copies.remove_reducers(modules)
    with LOCK:
        for module in modules:
            count = _HOOK_COUNTS.pop(module)
            if count > 1:
                _HOOK_COUNTS[module] = count - 1
            else:
                pre_hooks, hooks, always_called = _torch_compat.forward_hook_dicts(module)
                pre_hooks.pop(_PRE_HOOK_ID, None)
                hooks.pop(_POST_HOOK_ID, None)
                always_called.pop(_POST_HOOK_ID, None)


class CountedPreHook:
    """A pre-hook that several sessions may add to a module; the last one removes it."""

    def __init__(self, hook: Any) -> None:
        self._hook = hook
        self._id = RemovableHandle(OrderedDict()).id  # an id that no other hook will get
        self._counts: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        model_copies.exclude_from_copies(hook)

    def add(self, modules: Collection[nn.Module]) -> None:
        """Add the hook to modules."""
        with LOCK:
            for module in modules:
                self._counts[module] = self._counts.get(module, 0) + 1
                _torch_compat.forward_hook_dicts(module)[0][self._id] = self._hook
        model_copies.install_reducers(modules)

    def remove(self, modules: Collection[nn.Module]) -> None:
        """Undo one `add`."""
        model_copies.remove_reducers(modules)
        with LOCK:
            for module in modules:
                count = self._counts.pop(module) - 1
                if count:
                    self._counts[module] = count
                else:
                    _torch_compat.forward_hook_dicts(module)[0].pop(self._id, None)


THREAD_HOOK = CountedPreHook(_thread_pre_hook)  # reports modules that run in a worker thread


_STEP_HOOKS: "weakref.WeakKeyDictionary[nn.Module, tuple[int, Any]]" = weakref.WeakKeyDictionary()


def add_step_hook(model: nn.Module) -> None:
    """Count the forward passes of a model, with one hook for all sessions."""
    with LOCK:
        count, handle = _STEP_HOOKS.get(model, (0, None))
        if not count:
            handle = model.register_forward_pre_hook(count_step)
        _STEP_HOOKS[model] = (count + 1, handle)


def remove_step_hook(model: nn.Module) -> None:
    """Undo one `add_step_hook`."""
    with LOCK:
        count, handle = _STEP_HOOKS.pop(model)
        if count > 1:
            _STEP_HOOKS[model] = (count - 1, handle)
        else:
            handle.remove()
