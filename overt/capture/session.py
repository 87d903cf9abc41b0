"""Capture the attention of a PyTorch model during its forward pass, and optionally edit it."""

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch import nn

from overt.capture import _torch_compat, activation_checkpointing, hf_interface
from overt.capture.call import Call, Route
from overt.capture.coverage import (
    UncapturedAttentionError,
    check_coverage,
    raise_if_modified,
    raise_if_other_threads,
    raise_if_uncaptured,
    verify_rows,
    withheld_notes,
    without_weights_notes,
)
from overt.capture.discovery import (
    declare_attention,
    format_names,
    is_compiled,
    is_cross_by_name,
    is_cross_by_shape,
    is_differential,
    undeclare_attention,
    without_adapter,
)
from overt.capture.dispatch_mode import (
    NOT_CHECKED,
    AttentionDispatchMode,
    check_notes,
    is_plain,
    mark_checked,
    mark_plain,
    needs_check,
    raise_if_subclass_created,
    reset_check,
    was_checked,
)
from overt.capture.edits import Bias, Edit
from overt.capture.function_mode import AttentionFunctionMode
from overt.capture.hooks import (
    THREAD_HOOK,
    add_module_hooks,
    add_step_hook,
    copy_cuda_graph_tensors,
    leave_mode_scope,
    remove_module_hooks,
    remove_step_hook,
)
from overt.capture.records import CallRecord, resolve_flex_event
from overt.capture.scoped_mode import (
    SCOPE_HOOK,
    AttentionRoutes,
    can_scope,
    learn_routes,
    modules_to_hook,
    routes_of,
    wrapped_interface,
)
from overt.capture.state import OPEN_SESSIONS, STATE, EventLog
from overt.capture.trace import AttentionTrace, Layouts
from overt.capture.watch_plan import plan_watch

_FLAGS = bool, str


class watch:
    """Context manager that captures the attention calls of a model.

    Queries, keys, masks and biases of every attention call are stored, and the model runs as usual,
    with its fused kernels. Weights are computed when they are read from the returned
    `AttentionTrace`. The model is restored at the end of the block.

    At the end of the block, an attention module that ran and was not captured is an error. In the
    first block of a model every operation is checked as well (see `dispatch_mode`), which finds
    attention in modules with other class names too.

    A watcher can be reused, nested, and closed in any order. In several threads, each closes what
    it has opened. It covers the modules that the model had when the watcher was created.

    Args:
        model: The model to watch, also compiled, or wrapped in DistributedDataParallel or by PEFT.
            Its modules have the names of the wrapped model.
        layers: Attention modules to capture, by name or by index in `attention_modules(model)`. A
            named module without attention modules inside is taken as attention itself.
        heads: Heads to keep.
        layout: Meaning of the positions, for both axes or as a pair (queries, keys):
            `overt.layout_of(model, inputs)` for a model of Hugging Face, or by hand, such as
            `overt.words(1, "class") + overt.grid(14, 14, geometry=geometry)`.
        edit: `edit(call, weights)` returns the weights to use instead, which materializes them.
            `Bias(make)` adds to the scores and keeps fused kernels.
        each: Called with each `Call` when it is made. The calls are not stored; what `each` returns
            is stored in `trace.results`. Meant for `generate()`.
        without: Modules to leave out, by name or pattern (`["layers.*.mixer"]`).
        attention: Modules that attend although their class names do not say so.

    Raises:
        UncapturedAttentionError: At the end of the block, if attention ran and was not captured, or
            none ran.

    Example:
        >>> import overt, torch
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)
        >>> with overt.watch(layer) as trace:
        ...     _ = layer(torch.randn(1, 5, 8))
        >>> trace.map().weights.shape  # batch, layers, heads, queries, keys
        torch.Size([1, 1, 2, 5, 5])
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Collection[int | str] | None = None,
        heads: Sequence[int] | None = None,
        layout: Layouts | None = None,
        edit: Edit | Bias | None = None,
        each: Callable[[Call], Any] | None = None,
        without: Collection[str] = (),
        attention: Collection[str] = (),
    ) -> None:
        _check_model(model)
        if edit is not None and not isinstance(edit, Bias) and not callable(edit):
            raise TypeError(f"edit must be a function (call, weights) or a Bias, got {edit!r}")
        if isinstance(heads, Mapping):
            raise TypeError(
                f"heads are those of every captured layer, such as [0, 3], got {heads!r}: to use "
                "other heads in each layer, read trace.layer(4).heads([1]) from the trace"
            )
        if heads is not None and (isinstance(heads, int) or not len(heads)):
            raise TypeError(f"heads must be a non-empty list such as [0], got {heads!r}")
        model = without_adapter(model)  # its `generate` does not call the forward of the wrapper
        self.model = model
        self.heads = heads
        self.layout = layout
        self.edit = edit
        self.each = each
        self.unwrapped = innermost_model(model)
        self.plan = plan_watch(self.unwrapped, layers, without, attention)
        inside = model is self.unwrapped
        self.compiled = self.plan.compiled if inside else is_compiled(model)
        self._open = threading.local()

    @property
    def key(self) -> tuple[Any, ...]:
        """Cache key for checks: everything that may change how the model attends.

        Flags of modules are part of it, such as timm's `fused_attn`. Numbers are not: a module may
        count its calls.
        """
        implementations = tuple(
            config._attn_implementation_internal for config in self.plan.configs
        )
        flags = tuple(
            value
            for module in (self.unwrapped, *self.plan.hooked)
            for value in vars(module).values()
            if issubclass(type(value), _FLAGS)  # `isinstance` reads attributes of configurations
        )
        return implementations, flags, len(self.plan.watched)

    def __enter__(self) -> AttentionTrace:
        session = Session(self)
        session.start()
        self._open.sessions = [*getattr(self._open, "sessions", []), session]
        return session.trace

    def __exit__(self, kind: Any, problem: Any, trace: Any) -> None:
        if not getattr(self._open, "sessions", []):
            raise RuntimeError(
                f"this watcher of {type(self.unwrapped).__name__} is not open in this thread; "
                "close it once, in the thread that opened it"
            )
        session = self._open.sessions.pop()
        session.stop()
        if problem is None:
            session.check()
        elif session.dispatch_mode is not None and isinstance(problem, RuntimeError):
            raise_if_subclass_created(self.unwrapped, problem)


class Session:
    """One `with` block of a watcher, in one thread."""

    def __init__(self, watcher: watch) -> None:
        self.watcher = watcher
        self.edit = watcher.edit
        self.trace = AttentionTrace(self._calls, watcher.layout)
        self.handled: list[nn.Module] = []  # modules whose calls were passed to `each`
        self.in_other_threads: list[nn.Module] = []  # modules that ran in other threads
        self.module_stack = STATE.module_stack
        self.dispatch_mode: AttentionDispatchMode | None = None
        self.key = watcher.key
        # Tracking axes costs Python time at every operation; fused attention does not need it.
        self.tracks_axes = watcher.edit is not None or not is_plain(watcher.unwrapped, self.key)
        self.owns_mode = False
        # What earlier blocks have found, if the function mode is entered only in attention.
        self.routes: AttentionRoutes | None = None
        self.ran: set[nn.Module] | None = None
        self._attended: list[CallRecord] = []  # calls of the first passes, without tensors
        self._unverified: list[str] = []
        self._cleanup = ExitStack()
        self._mark: Any = None
        self._log = STATE.events
        self._events: list[Any] = []
        self._stopped = False

    # --- beginning and end

    def start(self) -> None:
        """Install the hooks and enter the function mode."""
        with ExitStack() as undo:
            # Each change is registered in `undo` at once: an error below restores the model.
            plan = self.watcher.plan
            undo.enter_context(hf_interface.use_interface(plan.configs))
            undo.enter_context(activation_checkpointing.without_reentrant_checkpoints(plan.names))
            model = self.watcher.model
            add_step_hook(model)
            undo.callback(remove_step_hook, model)
            if _torch_compat.is_compile_wrapper(model):
                undo.callback(model.register_forward_hook(copy_cuda_graph_tensors).remove)
            # Before hooking: the route decides which modules are hooked.
            self._choose_route()
            if not self.watcher.compiled:
                undo.enter_context(wrapped_interface(self.watcher.plan.configs))
            self._hook(undo)
            declare_attention(self.watcher.plan.declared)
            undo.callback(undeclare_attention, self.watcher.plan.declared)
            # The outermost session counts from zero, and may check every operation.
            if not STATE.sessions:
                STATE.steps, STATE.ran = 0, None
                self._start_dispatch_mode(undo)
            self._log = STATE.events  # of this thread; the trace may be read in another
            STATE.events.add(self)
            self._mark = STATE.events.last
            STATE.sessions.append(self)
            OPEN_SESSIONS.append(self)
            _update_shared_state()
            # From here on the session is visible to the hooks and the mode.
            undo.callback(self._leave)
            self.owns_mode = self.routes is None and _enter_function_mode(undo)
            self._cleanup = undo.pop_all()

    def stop(self) -> None:
        """Restore the model; the trace stays readable."""
        self.trace.close()
        self._events, self._stopped = self._since(), True
        self._log, self._mark = EventLog(), None  # the old log keeps all later events alive
        for event in self._events:  # the module of a FlexAttention call is known only later
            if self.watcher.each is not None and _is_flex(event):
                self.handle(event)
        # After the events are read: leaving the last session starts a new log.
        self._cleanup.close()
        remaining = [session for session in STATE.sessions if session.routes is None]
        if remaining and not any(session.owns_mode for session in remaining):
            # the session that had entered the function mode has ended first
            remaining[-1].owns_mode = _enter_function_mode(remaining[-1]._cleanup)

    def _choose_route(self) -> None:
        """Decide whether the function mode is needed, by what the first block has found."""
        watcher = self.watcher
        others: list[Session] = STATE.sessions
        if (
            not self.tracks_axes
            and watcher.plan.configs  # others may be called by a compiled wrapper around them
            and not watcher.compiled
            and not watcher.plan.native_encoder
            and all(session.routes is not None for session in others)
            and can_scope()
        ):
            self.routes = routes_of(watcher.unwrapped, self.key)
        # Sessions share one mode. If this one needs it everywhere, those that entered it in
        # attention only hook all of their modules again.
        if self.routes is None and any(session.routes is not None for session in others):
            leave_mode_scope()
            for session in others:  # the function mode is needed, for all of them
                session.routes = None
                session._hook(session._cleanup)

    def _hook(self, undo: ExitStack) -> None:
        plan, routes = self.watcher.plan, self.routes
        hooked: Collection[nn.Module] = plan.hooked
        scoped: Collection[nn.Module] = ()
        if routes is not None:
            hooked, scoped = modules_to_hook(routes, plan, self.watcher.unwrapped)
        add_module_hooks(hooked, plan.expected, self.watcher.compiled)
        undo.callback(remove_module_hooks, hooked)
        if routes is not None:
            SCOPE_HOOK.add(scoped)  # after the hooks above, which push the module on the stack
            undo.callback(SCOPE_HOOK.remove, scoped)

    def _start_dispatch_mode(self, undo: ExitStack) -> None:
        """Check every operation in the first block of a model."""
        watcher = self.watcher
        if (
            watcher.edit is None
            and not watcher.compiled
            and needs_check(watcher.unwrapped, self.key)
        ):
            self.dispatch_mode = AttentionDispatchMode(
                [*watcher.unwrapped.parameters(), *watcher.unwrapped.buffers()]
            )
            STATE.dispatch_mode = undo.enter_context(self.dispatch_mode)
            # In this block, modules without a hook of their own are watched for worker threads as
            # well.
            others = watcher.plan.watched - set(watcher.plan.hooked)
            others = {one for one in others if not isinstance(one, torch.jit.ScriptModule)}
            THREAD_HOOK.add(others)
            undo.callback(THREAD_HOOK.remove, others)

    def _leave(self) -> None:
        STATE.sessions.remove(self)
        OPEN_SESSIONS.remove(self)
        if STATE.dispatch_mode is self.dispatch_mode:
            STATE.dispatch_mode = None
        # No other session stores calls: free their tensors now.
        if all(session.watcher.each is not None for session in STATE.sessions):
            STATE.events.discard(CallRecord)
        if not STATE.sessions:
            leave_mode_scope()
            STATE.module_stack.clear()
            STATE.traces.clear()
            STATE.write_counts.clear()
            STATE.op_nodes.clear()
            STATE.key_slices.clear()
            STATE.last_product = STATE.mask_copy = None
            STATE.events = EventLog()
        _update_shared_state()

    # --- used by the capture functions

    def watches(self, module: nn.Module) -> bool:
        """Return whether this module is watched."""
        return module in self.watcher.plan.watched

    def name_of(self, module: nn.Module) -> str:
        """Return the name of a module in the model."""
        return self.watcher.plan.names[module]

    def is_cross(
        self, module: nn.Module, shape: tuple[int, int, int, int], known_cross: bool | None
    ) -> bool:
        """Return whether a call is cross-attention, by the call itself, by names, or by sizes."""
        if known_cross is not None:
            return known_cross
        known, name = self.watcher.plan.cross_by_name, self.name_of(module)
        if name not in known:
            known[name] = is_cross_by_name(self.watcher.unwrapped, name)
        return known[name] or is_cross_by_shape(module, shape)

    def handle(self, record: CallRecord) -> bool:
        """Pass the call to `each`, if given; return True if it should be stored instead."""
        if not self.watches(record.module):
            return False
        if self.watcher.each is None:
            return True
        self.handled.append(record.module)
        with ExitStack() as undo:
            if self.dispatch_mode is not None:  # these operations are not the model's
                undo.enter_context(_torch_compat.without_dispatch_modes())
                # The first two passes: a generation may have thousands, and each verification costs
                # time.
                if STATE.steps < 3:
                    self._unverified += verify_rows([(self.name_of(record.module), record)])
                    self._attended.append(record.without_tensors())
            self.trace.results.append(self.watcher.each(self._call(record, STATE.steps - 1)))
        return False

    def recompute_with_edits(
        self, sessions: list["Session"]
    ) -> Callable[[Callable[..., Any]], Any]:
        """Return a decorator that runs a function under the edits of these sessions."""

        def around(function: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(function)
            def again(*args: Any, **kwargs: Any) -> Any:
                with ExitStack() as undo:
                    # State is per thread, and autograd may recompute in a thread of its own. The
                    # mode is active for the whole recomputation, so nothing is scoped.
                    others = {"sessions": sessions, "scoped": False, "ran": None}
                    for name, value in others.items():
                        undo.callback(setattr, STATE, name, getattr(STATE, name))
                        setattr(STATE, name, value)
                    for session in sessions:
                        session._hook(undo)
                    _enter_function_mode(undo)
                    return function(*args, **kwargs)

            return again

        return around

    # --- reading the event log

    def _calls(self) -> list[Call]:
        step, calls = -1, list[Call]()
        invocations = Counter[int]()  # by id, of modules that log when they start
        if self.watcher.each is not None:
            return calls  # they were passed to `each`
        for event in self._since():
            if event == (self.watcher.model,):
                step += 1
            elif isinstance(event, nn.Module):
                invocations[id(event)] += 1
            elif isinstance(event, CallRecord) and self.watches(event.module):
                # No step was counted if a part of the model was called directly.
                call = self._call(event, max(step, 0))
                calls.append(replace(call, invocation=invocations.get(id(event.module))))
        return calls

    def _since(self) -> list[Any]:
        """Return the events since the start."""
        if self._stopped:
            return self._events
        return [resolve_flex_event(event) for event in self._log.since(self._mark)]

    def _call(self, record: CallRecord, step: int) -> Call:
        call = Call(
            self.watcher.plan.names[record.module],
            record.module,
            record.current_source,
            record.route,
            self.is_cross(record.module, record.source.shape, record.cross),
            step,
            *record.value_and_output,
            leading_axes=record.leading_axes,
        )
        return call if self.watcher.heads is None else call.heads(self.watcher.heads)

    def check(self) -> None:
        """Raise if attention was not captured completely, or could not be edited."""
        if self.edit is not None and any(_is_flex(event) for event in self._events):
            raise NotImplementedError(
                "FlexAttention cannot be edited; put the edit into its score_mod, or use "
                "scaled_dot_product_attention"
            )
        # What was recorded, and may have been changed since.
        kept = [
            one for one in self._events if isinstance(one, CallRecord) and self.watches(one.module)
        ]
        if self.watcher.each is None:
            named = [(self.name_of(one.module), one) for one in kept]
            raise_if_modified(named)
            self.trace.notes += withheld_notes(named)
        names = self.watcher.plan.names
        raise_if_other_threads([self._attending_name(one) for one in self.in_other_threads])
        try:
            # What ran and was not recorded, by modules.
            check_coverage(
                self.watcher.model,
                self.watcher.unwrapped,
                self.watcher.plan.expected,
                self._events,
                self.handled,
            )
        except UncapturedAttentionError:
            if self.routes is not None:  # the next block runs under the mode as a whole
                self.routes.usable = False
            raise
        # First block of the model: what attended by other operations, and one recomputed row per
        # call.
        if self.dispatch_mode is not None:
            found = [one for one in self.dispatch_mode.uncaptured() if self.watches(one.module)]
            captured = sorted(
                {names[one.module] for one in kept} | {names[one] for one in self.handled}
            )
            raise_if_uncaptured([(names[one.module], one) for one in found], captured)
            notes = verify_rows([(names[one.module], one) for one in kept])
            notes += list(dict.fromkeys(self._unverified))
            # Valid, but the heads of differential attention are not maps on their own.
            pairs = sorted({names[one.module] for one in kept if is_differential(one.module)})
            if pairs:
                notes.append(
                    f"heads are subtracted, see differential(trace): {format_names(pairs)}"
                )
            # Only now: after an error above, the next block checks again.
            mark_checked(self.watcher.unwrapped, self.key, notes)
            # If every call was fused on (b, h, n, d), later blocks track no axes, and may enter the
            # mode in attention only.
            attended = [*kept, *self._attended]
            if attended and all(_is_fused(one) for one in attended):
                mark_plain(self.watcher.unwrapped, self.key)
                self._learn(attended)
        elif self.routes is not None:
            self._learn_later([one.module for one in kept])
        beside = [names[one] for one in self.watcher.plan.without_weights]
        self.trace.notes += without_weights_notes(beside)
        self.trace.notes += check_notes(self.watcher.unwrapped, self.key)
        if not was_checked(self.watcher.unwrapped, self.key):
            self.trace.notes.append(NOT_CHECKED)

    def _learn(self, records: Sequence[CallRecord]) -> None:
        """Store what ran in this block, for later ones."""
        if self.ran is not None:
            ran = self.ran.intersection(self.watcher.plan.names)
            learn_routes(self.watcher.unwrapped, self.key, records, ran)

    def _learn_later(self, attended: Sequence[nn.Module]) -> None:
        """Store what ran for the first time; if it attends, the next block is checked."""
        assert self.routes is not None
        new = {*attended, *self.handled} - self.routes.attending()
        if new:
            names = sorted(self.name_of(one) for one in new)
            self.trace.notes.append(f"not checked before: {format_names(names)}")
            reset_check(self.watcher.unwrapped)
        else:
            self._learn([])

    def _attending_name(self, module: nn.Module) -> str:
        """The name of the module that may attend: a leaf layer runs in the forward of a parent."""
        lists = nn.ModuleList, nn.ModuleDict
        hooked = {
            self.watcher.plan.names[one]
            for one in self.watcher.plan.hooked
            if not isinstance(one, lists)
        }
        name = self.watcher.plan.names[module]
        while name and name not in hooked:
            name = name.rpartition(".")[0]
        return name


def _update_shared_state() -> None:
    """Set what depends on all open sessions of this thread."""
    sessions = STATE.sessions
    STATE.scoped = bool(sessions) and all(session.routes is not None for session in sessions)
    # Inside of a scope, its pre-hook has set this for one module, and restores it.
    if STATE.mode_scope is None:
        STATE.tracks_axes = not sessions or any(session.tracks_axes for session in sessions)
    # Modules that run are noted only where a later block can learn from it.
    if not STATE.scoped and STATE.dispatch_mode is None:
        STATE.ran = None
    elif STATE.ran is None:
        STATE.ran = set()
    for session in sessions:
        session.ran = STATE.ran
    # Modules that a session leaves out and no other session watches.
    STATE.excluded = {
        module
        for session in STATE.sessions
        for module in session.watcher.plan.excluded
        if not any(other.watches(module) for other in STATE.sessions)
    }


def _is_fused(record: CallRecord) -> bool:
    """Return whether a call is fused attention on (b, h, n, d)."""
    return record.route not in (Route.SOFTMAX, Route.FLEX) and record.leading_axes is None


def _is_flex(event: Any) -> bool:
    return isinstance(event, CallRecord) and event.route is Route.FLEX


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the model inside `torch.compile` and distributed wrappers."""
    while True:
        inner = _torch_compat.inside_compile_wrapper(model)
        if inner is None and _is_distributed_wrapper(model):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def innermost_model(model: nn.Module) -> nn.Module:
    """Return the model inside all wrappers: compiled, distributed and PEFT, in any order."""
    while True:
        inner = without_adapter(unwrap_model(model))
        if inner is model:
            return model
        model = inner


def _is_distributed_wrapper(model: nn.Module) -> bool:
    return type(model).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel")


def _enter_function_mode(undo: ExitStack) -> bool:
    """Enter the function mode unless it is active in this thread; return whether it was entered.

    A backward pass started in the block runs with the mode disabled, as does everything called from
    within the mode.
    """
    if not any(isinstance(mode, AttentionFunctionMode) for mode in _torch_compat.function_modes()):
        undo.enter_context(AttentionFunctionMode())
        return True
    return False


def _check_model(model: nn.Module) -> None:
    """Raise for models that cannot be watched, and warn about distributed wrappers."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"watch expects a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise UncapturedAttentionError(
            "a TorchScript model cannot be watched; load the Python model instead."
        )
    if isinstance(model, nn.DataParallel):
        raise UncapturedAttentionError(
            "DataParallel runs copies of the model in worker threads; watch model.module, or use "
            "DistributedDataParallel."
        )
    if _is_distributed_wrapper(model):
        warnings.warn(
            f"a loss on attention captured outside of {type(model).__name__} is not part of its "
            "forward pass; use overt.wrap(model, loss=...) to compute it inside",
            stacklevel=3,
        )
