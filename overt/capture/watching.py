"""Watch the attention of any PyTorch model while it runs, and change it if asked."""

import threading
import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack

from overt.capture import interface
from overt.capture.call import Call, Route
from overt.capture.coverage import Unseen, verify
from overt.capture.edits import Bias, Edit
from overt.capture.mode import Watching
from overt.capture.places import (
    HERE,
    Chain,
    announce,
    attention_modules,
    choose,
    few,
    finishing,
    hook,
    hush,
    is_compiled,
    named_cross,
    sized_cross,
    unhook,
    worth_a_hook,
)
from overt.capture.records import Record, settled
from overt.capture.seen import Layouts, Seen


class watch:
    """Watch a model: `with overt.watch(model) as seen: model(**inputs)`, then ask `seen`.

    Queries, keys, masks and biases of every attention call are kept, and the model runs as it
    always does, fused kernels on. What is asked of `seen` is computed then, and only that. When the
    block ends, an attention module that ran and was not seen is an error (`Unseen`): nothing is
    silently empty. The model is left as it was found. A watcher may be used again and again,
    nested, closed in any order, and in threads, each of which closes what it has opened; it knows
    the modules that the model had when it was made.

    `layers` chooses attention modules by name or by their place in `attention_modules(model)`,
    `heads` chooses heads, and `layout` says what the positions are, for both axes or as a pair
    (queries, keys). `edit(call, weights)` changes weights in flight, which makes the weights of the
    layers watched real; `edit=Bias(make)` adds to the scores and stays fused. With `each(call)`,
    calls are handed over as they come, and only what it returns is kept, in `seen.kept`; that is
    for `generate()`.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Collection[int | str] | None = None,
        heads: Sequence[int] | None = None,
        layout: Layouts | None = None,
        edit: Edit | Bias | None = None,
        each: Callable[[Call], Any] | None = None,
    ) -> None:
        _refuse(model)
        if edit is not None and not isinstance(edit, Bias) and not callable(edit):
            raise TypeError(f"edit is a function (call, weights) or a Bias, not {edit!r}")
        if heads is not None and (isinstance(heads, int) or not len(heads)):
            raise TypeError(f"heads is a list of some heads, such as heads=[0], not {heads!r}")
        self.model = model
        self.heads = heads
        self.layout = layout
        self.edit = edit
        self.each = each
        self.bare = bare(model)
        self.names = {module: name for name, module in self.bare.named_modules()}
        chosen = choose(self.bare, layers)
        within = [self.bare] if chosen is None else list(chosen.values())
        self.within = {inner for module in within for inner in module.modules()}
        listed = attention_modules(self.bare).values()
        self.expected = {module for module in listed if module in self.within}
        kept = self.expected | {self.bare}
        self.hooked = [one for one in self.within if one in kept or worth_a_hook(one)]
        self.compiled = is_compiled(model)
        self.crossing: dict[nn.Module, bool] = {}
        self.configs = interface.configs(self.bare)
        self._open = threading.local()

    def __enter__(self) -> Seen:
        session = Session(self)
        session.start()
        self._open.sessions = [*getattr(self._open, "sessions", []), session]
        return session.seen

    def __exit__(self, kind: Any, problem: Any, trace: Any) -> None:
        if not getattr(self._open, "sessions", []):
            raise RuntimeError(
                f"this watcher of {type(self.bare).__name__} is not open in this thread: it was "
                "closed before, or opened in another thread; close each where it was opened, once"
            )
        session = self._open.sessions.pop()
        session.stop()
        if problem is None:
            session.check()


class Session:
    """One use of a watcher, in one thread."""

    def __init__(self, watcher: watch) -> None:
        self.watcher = watcher
        self.edit = watcher.edit
        self.seen = Seen(self._calls, watcher.layout)
        self.taken: list[nn.Module] = []
        self.listens = False
        self._cleanup = ExitStack()
        self._mark: Any = None
        self._chain = HERE.events
        self._events: list[Any] = []
        self._over = False

    # --- beginning and end

    def start(self) -> None:
        """Put the hooks in place and let the routes see what is called."""
        with ExitStack() as undo:
            undo.enter_context(interface.routed(self.watcher.configs))
            model = self.watcher.model
            announce(model)
            undo.callback(hush, model)
            if hasattr(model, "_orig_mod"):
                undo.callback(model.register_forward_hook(finishing).remove)
            self._hook(undo)
            if not HERE.watchers:
                HERE.steps = 0
            self._chain = HERE.events  # this thread's, whoever asks later
            HERE.events.add(self)
            self._mark = HERE.events.last
            HERE.watchers.append(self)
            undo.callback(self._leave)
            self.listens = _listen(undo)
            self._cleanup = undo.pop_all()

    def stop(self) -> None:
        """Leave the model as it was found; what was seen stays."""
        self.seen.close()
        self._events, self._over = self._since(), True
        self._chain, self._mark = Chain(), None  # the old one knows us, and all that came after
        for event in self._events:  # FlexAttention is the one route that cannot hand over at once
            if self.watcher.each is not None and _flexed(event):
                self.take(event)
        self._cleanup.close()
        if HERE.watchers and not any(session.listens for session in HERE.watchers):
            # the first to come has gone first, and with it what others saw by
            HERE.watchers[-1].listens = _listen(HERE.watchers[-1]._cleanup)

    def _hook(self, undo: ExitStack) -> None:
        hook(self.watcher.hooked, self.watcher.expected, self.watcher.compiled)
        undo.callback(unhook, self.watcher.hooked)

    def _leave(self) -> None:
        HERE.watchers.remove(self)
        if all(session.watcher.each is not None for session in HERE.watchers):
            HERE.events.forget(Record)
        if not HERE.watchers:
            HERE.stack.clear()
            HERE.traces.clear()
            HERE.product = HERE.copied = None
            HERE.events = Chain()

    # --- what the routes ask

    def knows(self, module: nn.Module) -> bool:
        """Whether this module is watched."""
        return module in self.watcher.within

    def name_of(self, module: nn.Module) -> str:
        """The module's name in the model."""
        return self.watcher.names[module]

    def crosses(
        self, module: nn.Module, shape: tuple[int, int, int, int], apart: bool | None
    ) -> bool:
        """Whether the module looks from one sequence at another: the call itself, names, sizes."""
        if apart is not None:
            return apart
        known = self.watcher.crossing
        if module not in known:
            known[module] = named_cross(self.watcher.bare, self.watcher.names[module])
        return known[module] or sized_cross(module, shape)

    def take(self, record: Record) -> bool:
        """Hand the call over if it is wanted as it comes; True if it should be kept instead."""
        if not self.knows(record.module):
            return False
        if self.watcher.each is None:
            return True
        self.taken.append(record.module)
        self.seen.kept.append(self.watcher.each(self._call(record, HERE.steps - 1)))
        return False

    def replaying(self, sessions: list["Session"]) -> Callable[[Callable[..., Any]], Any]:
        """Makes a function run under the edits of these sessions, whenever and wherever it runs."""

        def around(function: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(function)
            def again(*args: Any, **kwargs: Any) -> Any:
                before, HERE.watchers = HERE.watchers, sessions
                with ExitStack() as undo:
                    undo.callback(setattr, HERE, "watchers", before)
                    for session in sessions:
                        session._hook(undo)
                    _listen(undo)
                    return function(*args, **kwargs)

            return again

        return around

    # --- what was seen

    def _calls(self) -> list[Call]:
        step, calls = -1, list[Call]()
        if self.watcher.each is not None:
            return calls  # they were handed over
        for event in self._since():
            if event == (self.watcher.model,):
                step += 1
            elif isinstance(event, Record) and self.knows(event.module):
                calls.append(self._call(event, max(step, 0)))
        return calls

    def _since(self) -> list[Any]:
        """What has happened since the start."""
        if self._over:
            return self._events
        return [settled(event) for event in self._chain.since(self._mark)]

    def _call(self, record: Record, step: int) -> Call:
        call = Call(
            self.watcher.names[record.module],
            record.module,
            record.source,
            record.route,
            self.crosses(record.module, record.source.shape, record.cross),
            step,
            *record.ends,
        )
        return call if self.watcher.heads is None else call.heads(self.watcher.heads)

    def check(self) -> None:
        """Raise when nothing was seen, or less than ran, or what cannot be edited was to be."""
        if self.edit is not None and any(_flexed(event) for event in self._events):
            raise NotImplementedError(
                "FlexAttention cannot be edited; put the edit into its score function, or use "
                "scaled_dot_product_attention"
            )
        kept = [one for one in self._events if isinstance(one, Record) and self.knows(one.module)]
        changed = [self.name_of(one.module) for one in kept if one.changed]
        if changed and self.watcher.each is None:
            raise Unseen(
                f"queries or keys were changed in place after they had attended, in "
                f"{few(sorted(set(changed)))}: their weights cannot be told any more. Take each "
                "call as it comes: watch(model, each=lambda call: call.weights())."
            )
        verify(
            self.watcher.model, self.watcher.bare, self.watcher.expected, self._events, self.taken
        )


def _flexed(event: Any) -> bool:
    return isinstance(event, Record) and event.route is Route.FLEX


def bare(model: nn.Module) -> nn.Module:
    """The model inside `torch.compile` and the wrappers of many processes."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and _wraps(model):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _wraps(model: nn.Module) -> bool:
    return type(model).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel")


def _listen(undo: ExitStack) -> bool:
    """Let this thread's functions be seen, unless they already are; True if that was needed.

    A backward pass that was started in the block runs with our own mode switched off, as everything
    does that a mode has been handed.
    """
    if not any(isinstance(mode, Watching) for mode in _get_current_function_mode_stack()):
        undo.enter_context(Watching())
        return True
    return False


def _refuse(model: nn.Module) -> None:
    """Say no to what cannot be watched, and warn of what goes wrong in training."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"watch takes a torch.nn.Module, and this is of type {type(model).__name__}"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise Unseen("a TorchScript model cannot be watched; load the Python model instead.")
    if isinstance(model, nn.DataParallel):
        raise Unseen(
            "DataParallel runs copies of the model in threads of its own; watch model.module, or "
            "use DistributedDataParallel."
        )
    if _wraps(model):
        warnings.warn(
            f"a loss on attention seen outside {type(model).__name__} is no part of its forward "
            "pass; overt.adopt(model, loss=...) computes it inside",
            stacklevel=3,
        )
