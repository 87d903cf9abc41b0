"""Keep the hooks of `watch` out of copies and pickles of a model.

`copy.deepcopy` and `torch.save` inside a block would copy the hooks, and nothing would remove them
from the copy. While a class has hooked modules, a reducer is registered in `copyreg`, which both
use: it returns the state of the module without our hooks. A class with a `__deepcopy__` of its own
(parametrized modules) is copied by that method, so its hooked modules get one that hides the hooks.
"""

import copyreg
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from overt.capture._torch_compat import (
    ALWAYS_CALLED_ATTRIBUTE,
    HOOK_ATTRIBUTES,
    forward_hook_dicts,
)

_LOCK = threading.Lock()
_CLASSES: Counter[type] = Counter()
_COPIERS: "weakref.WeakKeyDictionary[nn.Module, int]" = weakref.WeakKeyDictionary()
_OURS: list[Callable[..., Any]] = []  # hooks that are not copied


def exclude_from_copies(*hooks: Callable[..., Any]) -> None:
    """Register hooks that copies of a module must not contain."""
    _OURS.extend(hooks)


def install_reducers(modules: Collection[nn.Module]) -> None:
    """Copy and pickle modules of these classes without our hooks, until `remove_reducers`."""
    with _LOCK:
        for kind in {type(module) for module in modules}:
            _CLASSES[kind] += 1
            if _CLASSES[kind] == 1 and _uses_default_reduce(kind):
                # A reducer of somebody else stays.
                copyreg.dispatch_table.setdefault(kind, _reduce)
        for module in filter(_has_deepcopy, modules):
            _COPIERS[module] = _COPIERS.get(module, 0) + 1
            module.__dict__["__deepcopy__"] = _Copier(module)


def remove_reducers(modules: Collection[nn.Module]) -> None:
    """Undo one `install_reducers`."""
    with _LOCK:
        for kind in {type(module) for module in modules}:
            _CLASSES[kind] -= 1
            if not _CLASSES[kind]:
                del _CLASSES[kind]
                if copyreg.dispatch_table.get(kind) is _reduce:
                    del copyreg.dispatch_table[kind]
        for module in filter(_has_deepcopy, modules):
            count = _COPIERS.pop(module) - 1
            if count:
                _COPIERS[module] = count
            else:
                module.__dict__.pop("__deepcopy__", None)


def _uses_default_reduce(kind: type) -> bool:
    """Return whether a class is pickled by its attributes, without a custom method."""
    scripted = issubclass(kind, torch.jit.ScriptModule)
    return not scripted and getattr(kind, "__reduce__", None) is object.__reduce__


def _has_deepcopy(module: nn.Module) -> bool:
    """Return whether the class of a module has a `__deepcopy__` of its own.

    Not if it is pickled in its own way too (a `GraphModule`), which could not pickle ours.
    """
    return hasattr(type(module), "__deepcopy__") and _uses_default_reduce(type(module))


class _Copier:
    """The `__deepcopy__` of the class of a module, called while our hooks are hidden."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def __call__(self, memo: dict[int, Any]) -> Any:
        module = self._module()
        assert module is not None
        attributes = module.__dict__
        before = {name: attributes[name] for name in (*HOOK_ATTRIBUTES, ALWAYS_CALLED_ATTRIBUTE)}
        attributes.update(_hooks_without_ours(module, attributes))
        # Without ours, the method of the class copies the module.
        copier = attributes.pop("__deepcopy__")
        try:
            return type(module).__deepcopy__(module, memo)  # type: ignore[attr-defined]
        finally:
            attributes.update(before)
            attributes["__deepcopy__"] = copier


def _reduce(module: nn.Module) -> Any:
    """Reduce a module for `copy` and `pickle` without our hooks."""
    # Protocol 4, as `copy` uses: (function, arguments, state, ...).
    made = module.__reduce_ex__(4)
    if not isinstance(made, tuple) or len(made) < 3 or not isinstance(made[2], dict):
        return made
    state = dict(made[2])
    state.update(_hooks_without_ours(module, state))
    state.pop("__deepcopy__", None)
    return (*made[:2], state, *made[3:])


def _hooks_without_ours(module: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Return the hook dictionaries of a module without our hooks."""
    found = {
        name: OrderedDict((at, one) for at, one in state.get(name, {}).items() if one not in _OURS)
        for name in HOOK_ATTRIBUTES
    }
    called = state.get(ALWAYS_CALLED_ATTRIBUTE, {})
    _, hooks, _ = forward_hook_dicts(module)
    ours = [at for at in called if at in hooks and at not in found[HOOK_ATTRIBUTES[1]]]
    found[ALWAYS_CALLED_ATTRIBUTE] = OrderedDict(
        (at, one) for at, one in called.items() if at not in ours
    )
    return found
