"""Where in a model attention is: its modules by name, and which of them is at work right now.

Hooks keep a stack of the modules at work, one a thread. They hold no state of their own, so that a
graph compiled while one watcher was at work is right for every later one. Events are a chain of
links, not a list: a compiled graph would be bound to the length of a list.
"""

import re
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from overt.capture import checkpoints

_ATTENDS = re.compile(r"attention|attn", re.IGNORECASE)
_NOT_ATTENDING = re.compile(
    r"(output|mask|bias|norm|dropout|embeddings?|rotary\w*)$", re.IGNORECASE
)
_CROSS = re.compile(r"cross|encoder_attn|encdec|enc_dec|attn_pool|probe", re.IGNORECASE)


class Link:
    """One event, and what was before it."""

    def __init__(self, before: "Link | None", event: Any) -> None:
        self.before = before
        self.event = event


class Chain:
    """What happened, the last event first; a compiled graph can add to it."""

    def __init__(self) -> None:
        self.last = Link(None, None)

    def add(self, event: Any) -> None:
        """One more event."""
        self.last = Link(self.last, event)

    def forget(self, kind: type) -> None:
        """Let go of all events of one kind; others keep their places."""
        link = self.last
        while link.before is not None:
            if isinstance(link.event, kind):
                link.event = None
            link = link.before

    def since(self, mark: Link | None) -> list[Any]:
        """The events after `mark`, oldest first."""
        found = []
        link = self.last
        while link is not mark and link.before is not None:
            if link.event is not None:
                found.append(link.event)
            link = link.before
        return found[::-1]


class Here(threading.local):
    """What is going on in this thread."""

    def __init__(self) -> None:
        self.stack: list[nn.Module] = []
        self.events = Chain()
        self.watchers: list[Any] = []
        self.heads: int | None = None
        self.cross: bool | None = None
        self.traces: dict[int, Any] = {}
        self.product: Any = None  # the last one that met no softmax, which may be the scores
        self.copied: Any = None  # the last mask that was copied, its version, and its copy
        self.steps = 0


HERE = Here()
FLEX = "flex"  # marks the event of a call that does not know its module
FAILED = "failed"  # marks the event of a module that ended without a result
GRAPH = "graph"  # marks the event of a module that ran inside of a compiled graph


def _at_work(module: nn.Module) -> bool:
    """Whether this module has said so; a copy of a watched model has our hooks twice."""
    return len(HERE.stack) > 0 and HERE.stack[-1] is module


def _entering(module: nn.Module, inputs: Any) -> None:
    """A forward pre-hook: this module is at work."""
    if HERE.watchers and not _at_work(module):
        HERE.stack.append(module)


def _entering_attention(module: nn.Module, inputs: Any) -> None:
    """A forward pre-hook of a module that should be seen attending."""
    if HERE.watchers and not _at_work(module):
        HERE.stack.append(module)
        if torch.compiler.is_compiling():
            HERE.events.add((GRAPH, module))
            HERE.events.add(module)
        elif checkpoints.current() is not checkpoints.Pass.AGAIN:
            HERE.events.add(module)


def _leaving(module: nn.Module, inputs: Any, output: Any) -> None:
    """A forward hook: this module is done, and so is whatever an error left above it."""
    while module in HERE.stack and HERE.stack.pop() is not module:
        pass
    if torch.compiler.is_compiling():
        return
    if output is None and HERE.watchers:
        HERE.events.add((FAILED, module))
    if _loose(HERE.events.last.event):
        _settle(module)
    if HERE.traces:
        _let_go(module, output)


def _let_go(module: nn.Module, output: Any) -> None:
    """Follow a softmax no further than the module that took it, unless that is all it does.

    A softmax that is a module of its own gives its shares to the attention around it, where they
    meet the values. A router gives them to a block that is not named like attention.
    """
    given = output if isinstance(output, tuple | list) else (output,)
    around = HERE.stack[-1] if HERE.stack and looks_like_attention(HERE.stack[-1]) else None
    for at, trace in [pair for pair in HERE.traces.items() if pair[1].module is module]:
        handed = any(one is trace.tensor for one in given)
        if around is not None and handed and not trace.origin.met:
            trace.origin.module = around
        else:
            del HERE.traces[at]


def _settle(module: nn.Module) -> None:
    """Say of the last calls of FlexAttention that this module has made them."""
    loose = []
    while HERE.events.last.before is not None and _loose(HERE.events.last.event):
        loose.append((FLEX, module, *HERE.events.last.event[2:]))
        HERE.events.last = HERE.events.last.before
    for event in reversed(loose):
        HERE.events.add(event)


def _loose(event: Any) -> bool:
    """Whether this is a call of FlexAttention whose module is not known yet."""
    return isinstance(event, tuple) and event[0] is FLEX and event[1] is None


def finishing(module: nn.Module, inputs: Any, output: Any) -> None:
    """A forward hook of a compiled model: copy what the next pass would overwrite.

    CUDA graphs write every pass into the same memory. What was seen of this pass is copied if such
    graphs are in use.
    """
    graphs = sys.modules.get("torch._inductor.cudagraph_trees")
    if not HERE.watchers or graphs is None or not torch.cuda.is_available():
        return
    if graphs.get_manager(torch.cuda.current_device(), create_if_none_exists=False) is None:
        return
    link = HERE.events.last
    while link.before is not None and link.event != (module,):
        if hasattr(link.event, "copied"):
            link.event = link.event.copied()
        link = link.before


def starting(module: nn.Module, inputs: Any) -> None:
    """A forward pre-hook of the whole model: a new step begins."""
    if HERE.watchers:
        HERE.events.add((module,))
        if not torch.compiler.is_compiling():
            HERE.steps += 1


_LOCK = threading.Lock()
_HOOKED: "weakref.WeakKeyDictionary[nn.Module, int]" = weakref.WeakKeyDictionary()
_ENTER, _LEAVE = (
    RemovableHandle(OrderedDict()).id for _ in range(2)
)  # keys that no other hook will get


def hook(modules: Collection[nn.Module], attending: Collection[nn.Module], compiled: bool) -> None:
    """Have modules say when they are at work; those `attending` also that they should be seen.

    Each is hooked once, however many watch it. A module that fails says so too, but not in a
    compiled model, whose graph would break: there it is taken off the stack when a module around it
    is done. The hooks are put where `register_forward_hook` puts them, under keys of our own: a
    model has a hundred modules, and each block hooks them anew.
    """
    with _LOCK:
        for module in modules:
            count = _HOOKED.get(module, 0)
            if not count:
                entering = _entering_attention if module in attending else _entering
                module._forward_pre_hooks[_ENTER] = entering
                module._forward_hooks[_LEAVE] = _leaving
                if not compiled:
                    module._forward_hooks_always_called[_LEAVE] = True
            _HOOKED[module] = count + 1


def unhook(modules: Collection[nn.Module]) -> None:
    """One watcher fewer; the last one takes the hooks away."""
    with _LOCK:
        for module in modules:
            count = _HOOKED.pop(module)
            if count > 1:
                _HOOKED[module] = count - 1
            else:
                module._forward_pre_hooks.pop(_ENTER, None)
                module._forward_hooks.pop(_LEAVE, None)
                module._forward_hooks_always_called.pop(_LEAVE, None)


_ANNOUNCED: "weakref.WeakKeyDictionary[nn.Module, tuple[int, Any]]" = weakref.WeakKeyDictionary()


def announce(model: nn.Module) -> None:
    """Have a model say when a step begins, once a step, however many watch it."""
    with _LOCK:
        count, handle = _ANNOUNCED.get(model, (0, None))
        if not count:
            handle = model.register_forward_pre_hook(starting)
        _ANNOUNCED[model] = (count + 1, handle)


def hush(model: nn.Module) -> None:
    """One watcher fewer who wants to know of steps."""
    with _LOCK:
        count, handle = _ANNOUNCED.pop(model)
        if count > 1:
            _ANNOUNCED[model] = (count - 1, handle)
        else:
            handle.remove()


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that look like attention, by name, in order: the innermost of each nest.

    A module looks like attention when its class is named so. `layers=` counts along this list.
    """
    like = {name: module for name, module in model.named_modules() if looks_like_attention(module)}
    around = {name[:at] for name in like for at, letter in enumerate(name) if letter == "."}
    if len(like) > 1:
        around.add("")
    return {name: module for name, module in like.items() if name not in around}


def looks_like_attention(module: nn.Module) -> bool:
    """Whether the class of a module is named like attention."""
    kind = type(module).__name__
    return bool(_ATTENDS.search(kind)) and not _NOT_ATTENDING.search(kind)


def named_cross(root: nn.Module, path: str) -> bool:
    """Whether the module at `path`, or one around it, is named as one that looks elsewhere."""
    module = root.get_submodule(path)
    if getattr(module, "is_cross_attention", False) or _CROSS.search(path):
        return True
    while path:
        if re.search("cross", type(root.get_submodule(path)).__name__, re.IGNORECASE):
            return True
        path = path.rpartition(".")[0]
    return False


def sized_cross(module: nn.Module, shape: tuple[int, int, int, int]) -> bool:
    """Whether sizes say that a module looks from one sequence at another.

    A decoder with a cache has more keys than queries and still looks at itself.
    """
    decodes = any(getattr(module, name, False) for name in ("is_causal", "is_decoder"))
    return shape[2] != shape[3] and not decodes and not hasattr(module, "layer_idx")


def worth_a_hook(module: nn.Module) -> bool:
    """Whether attention could be computed in this module's own forward.

    The layers of `torch.nn` and the activations of transformers that have no children do not
    attend, and there are many of them; nor does a forward that names nothing but the module's
    children. What `torch.compile` puts around a
    module is at work only when the module is.
    """
    if hasattr(module, "_orig_mod"):
        return False
    if _ATTENDS.search(type(module).__name__):
        return True
    if type(module).__module__.startswith(("torch.nn.modules", "transformers.activations")):
        return next(module.children(), None) is not None
    return not _only_calls_children(module)


def _only_calls_children(module: nn.Module) -> bool:
    """Whether a forward is arithmetic on what children give: to attend, it would name a function.

    That is read off its code: the names of attributes and globals in it are those of children.
    """
    code = getattr(getattr(module.forward, "__func__", None), "__code__", None)
    if code is None or code.co_freevars or any(hasattr(one, "co_code") for one in code.co_consts):
        return False
    return module._modules.keys() >= set(code.co_names)


def is_compiled(model: nn.Module) -> bool:
    """Whether `torch.compile` has been at a model or at any part of it."""
    return any(_compiles(module) for module in model.modules())


def in_compiled(model: nn.Module, part: nn.Module) -> bool:
    """Whether a part of a model stands in something that `torch.compile` has been at."""
    return any(_compiles(module) and part in set(module.modules()) for module in model.modules())


def _compiles(module: nn.Module) -> bool:
    compiled = getattr(module, "_compiled_call_impl", None) is not None  # by module.compile()
    return compiled or hasattr(module, "_orig_mod")


def choose(model: nn.Module, layers: Collection[int | str] | None) -> dict[str, nn.Module] | None:
    """The modules that `layers` names or counts; None when all are meant."""
    if layers is None:
        return None
    if isinstance(layers, int | str):
        raise TypeError(f"layers is a list, also of one: layers=[{layers!r}]")
    listed = attention_modules(model)
    every = dict(model.named_modules())
    chosen: dict[str, nn.Module] = {}
    for layer in layers:
        if isinstance(layer, str):
            if layer not in every:
                near = [name for name in listed if layer in name]
                raise ValueError(
                    f"the model has no module {layer!r}; "
                    f"its attention modules are {few(near or list(listed))}"
                )
            chosen[layer] = every[layer]
        elif not -len(listed) <= layer < len(listed):
            raise ValueError(
                f"layer {layer} is not among the {len(listed)} attention modules of the model: "
                f"{few(list(listed))}"
            )
        else:
            name = list(listed)[layer]
            chosen[name] = listed[name]
    return chosen


def few(names: list[str], most: int = 6) -> str:
    """A list of names, cut short in the middle of a long one."""
    shown = [repr(name) for name in names[:most]]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(shown) or "none") + more
