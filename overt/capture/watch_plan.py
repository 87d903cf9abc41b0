"""Which modules of a model a watcher captures, expects and hooks.

Finding them reads the class, the parameters and the code of every module, which takes milliseconds
for a large model, and `with watch(model)` is written inside of loops. The result is therefore
cached per model, as positions in the order of `named_modules`, and used again as long as the model
has the same modules.
"""

import weakref
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from overt.capture import hf_interface
from overt.capture._torch_compat import is_compiled_module
from overt.capture.code_inspection import may_attend
from overt.capture.discovery import (
    attention_modules,
    find_modules,
    modules_without_weights,
    needs_hook,
    recurrent_modules,
    select_layers,
)


@dataclass(frozen=True)
class WatchPlan:
    """The modules of one watcher.

    Attributes:
        names: Every module and its name.
        watched: Modules whose attention is captured.
        excluded: Modules that `without=` leaves out.
        expected: Watched modules that must be captured when they run.
        declared: Modules that are attention whatever their class names.
        hooked: Modules in whose own forward attention could run.
        may_attend: Hooked modules whose code names attention or a softmax.
        configs: Hugging Face configurations whose attention implementation can be changed.
        compiled: Whether the model or a part of it is compiled.
        native_encoder: Whether there is an `nn.TransformerEncoder`, which takes another path unless
            a function mode is active.
        without_weights: Modules that mix positions without attention weights, such as recurrences.
        cross_by_name: Whether modules are cross-attention by their names, as far as known.
    """

    names: dict[nn.Module, str]
    watched: set[nn.Module]
    excluded: set[nn.Module]
    expected: set[nn.Module]
    declared: set[nn.Module]
    hooked: list[nn.Module]
    may_attend: set[nn.Module]
    configs: list[Any]
    compiled: bool
    native_encoder: bool
    without_weights: list[nn.Module]
    cross_by_name: dict[str, bool]


@dataclass(frozen=True)
class _CachedPlan:
    """A plan as positions in `modules`, which are not kept alive."""

    modules: tuple["weakref.ref[nn.Module]", ...]
    names: tuple[str, ...]
    sets: tuple[tuple[int, ...], ...]  # those of `WatchPlan`, modules with configs, without weights
    native_encoder: bool
    cross_by_name: dict[str, bool] = field(default_factory=dict)

    def fits(self, names: list[str], modules: list[nn.Module]) -> bool:
        """Return whether a model still has the same modules under the same names."""
        return (
            len(modules) == len(self.modules)
            and tuple(names) == self.names
            and all(ref() is one for ref, one in zip(self.modules, modules, strict=True))
        )


_NATIVE_ENCODERS = nn.TransformerEncoder, nn.TransformerEncoderLayer
_PLANS: "weakref.WeakKeyDictionary[nn.Module, dict[Any, _CachedPlan]]" = weakref.WeakKeyDictionary()


def plan_watch(
    model: nn.Module,
    layers: Collection[int | str] | None = None,
    without: Collection[str] = (),
    attention: Collection[str] = (),
) -> WatchPlan:
    """Return which modules to watch; the arguments are those of `watch`.

    Args:
        model: The model, without wrappers.
        layers: Attention modules to capture, None for all.
        without: Modules to leave out.
        attention: Modules that attend although their class names do not say so.

    Raises:
        TypeError: If an argument is a single name instead of a list.
        ValueError: If there is no such module.
    """
    names, modules = _walk(model)
    key = _cache_key(layers, without, attention)
    cached = None if key is None else _PLANS.get(model, {}).get(key)
    if cached is None or not cached.fits(names, modules):
        cached = _make_plan(model, names, modules, layers, without, attention)
        if key is not None:
            _PLANS.setdefault(model, {})[key] = cached
    watched, excluded, expected, declared, hooked, may, configured, unweighted = (
        [modules[at] for at in some] for some in cached.sets
    )
    # By id: modules share configurations, which compare by their contents.
    configs = {id(one.config): one.config for one in configured}
    return WatchPlan(
        names=dict(zip(modules, names, strict=True)),
        watched=set(watched),
        excluded=set(excluded),
        expected=set(expected),
        declared=set(declared),
        hooked=hooked,
        may_attend=set(may),
        configs=list(configs.values()),
        compiled=any(map(is_compiled_module, modules)),
        native_encoder=cached.native_encoder,
        without_weights=unweighted,
        cross_by_name=cached.cross_by_name,
    )


def _walk(model: nn.Module) -> tuple[list[str], list[nn.Module]]:
    """Return names and modules as `named_modules` does, several times faster."""
    # A stack of iterators: `named_modules` is a recursive generator, which passes each module
    # through one frame per level of the tree.
    names, modules, seen = [""], [model], {model}
    pending = [("", iter(model._modules.items()))]
    while pending:
        prefix, children = pending[-1]
        for name, child in children:
            if child is not None and child not in seen:
                seen.add(child)
                names.append(prefix + name)
                modules.append(child)
                if child._modules:
                    pending.append((f"{prefix}{name}.", iter(child._modules.items())))
                    break
        else:
            pending.pop()
    return names, modules


def _cache_key(*arguments: Collection[Any] | None) -> Any:
    """Return the arguments as a key of the cache, None if they cannot be one."""
    try:
        key = tuple(None if one is None else tuple(one) for one in arguments)
        hash(key)
    except TypeError:  # not a collection of names; `_make_plan` raises a clear error
        return None
    return None if any(isinstance(one, str) for one in arguments) else key


def _make_plan(
    model: nn.Module,
    names: list[str],
    modules: list[nn.Module],
    layers: Collection[int | str] | None,
    without: Collection[str],
    attention: Collection[str],
) -> _CachedPlan:
    # What counts as attention whatever its class name.
    declared = set(find_modules(model, attention, "attention").values())
    chosen = select_layers(model, layers, declared)
    declared |= _declared_by_name(chosen, layers)
    # What is captured: everything inside of the chosen modules, except what is left out.
    left_out = find_modules(model, without, "without").values()
    excluded = {inner for module in left_out for inner in module.modules()}
    within = [model] if chosen is None else list(chosen.values())
    watched = {inner for one in within for inner in one.modules()} - excluded
    # What has to be captured if it runs.
    listed = attention_modules(model, declared).values()
    recurrent = recurrent_modules(model).values()
    expected = {one for one in (*listed, *recurrent) if one in watched}
    # What is pushed on the stack: also excluded modules, so that their attention is recognized as
    # theirs.
    kept = expected | {model}
    hooked = {one for one in watched | excluded if one in kept or needs_hook(one)}
    may = {one for one in hooked if may_attend(one)}
    configured = set(hf_interface.configured_modules(modules))
    unweighted = set(modules_without_weights(model).values())
    sets = (watched, excluded, expected, declared, hooked, may, configured, unweighted)
    position = {module: at for at, module in enumerate(modules)}

    def positions(some: Collection[nn.Module]) -> tuple[int, ...]:
        return tuple(sorted(position[one] for one in some))

    return _CachedPlan(
        tuple(map(weakref.ref, modules)),
        tuple(names),
        tuple(map(positions, sets)),
        native_encoder=any(isinstance(one, _NATIVE_ENCODERS) for one in modules),
    )


def _declared_by_name(
    chosen: dict[str, nn.Module] | None, layers: Collection[int | str] | None
) -> set[nn.Module]:
    """Modules named in `layers` without attention modules inside: taken as attention."""
    if chosen is None or layers is None:
        return set()
    named_ones = [chosen[one] for one in layers if isinstance(one, str)]
    return {one for one in named_ones if not attention_modules(one) and not recurrent_modules(one)}
