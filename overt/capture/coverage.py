"""Nothing is silently empty: what ran is held against what was seen."""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from overt.capture.places import (
    FAILED,
    FLEX,
    GRAPH,
    few,
    in_compiled,
    is_compiled,
    looks_like_attention,
)
from overt.capture.records import Record


class Unseen(ValueError):
    """Attention was there, or should have been, and was not seen; the message says what to do."""


def verify(
    model: nn.Module,
    bare: nn.Module,
    expected: Collection[nn.Module],
    events: Sequence[Any],
    taken: Sequence[nn.Module],
) -> None:
    """Raise `Unseen` when a module of `expected` ran more often than it was seen, or nothing was.

    `bare` is the model inside `model`, if that is compiled or wrapped; `events` are what happened,
    and `taken` the modules whose calls were handed over as they came.
    """
    if any(isinstance(event, tuple) and event[0] is FLEX for event in events):
        raise Unseen(
            "FlexAttention inside a compiled model does not say which module called it; watch the "
            "model itself and not the compiled one."
        )
    ran = Counter(one for one in events if isinstance(one, nn.Module) and one in expected)
    ran.subtract(one[1] for one in events if isinstance(one, tuple) and one[0] is FAILED)
    seen = Counter(taken)
    seen.update(event.module for event in events if isinstance(event, Record))
    missed = [
        module
        for module, times in ran.items()
        if seen[module] < times and _found(module, seen) < times
    ]
    if seen and not missed:
        return
    names = {module: name or type(module).__name__ for name, module in bare.named_modules()}
    if missed:
        graphed = (GRAPH, missed[0]) in events or in_compiled(model, missed[0])
        remedy = _COMPILED if graphed else _remedy(missed[0])
        raise Unseen(
            f"{len(missed)} of {len(ran)} attention modules ran and were not seen: "
            f"{few([names[module] for module in missed])}. {remedy} "
            "Or name the layers you need: watch(model, layers=[...])."
        )
    called = (model,) in events
    nothing = _nothing(type(bare).__name__, called, [names[module] for module in expected])
    raise Unseen(f"{nothing} {_COMPILED}" if called and is_compiled(model) else nothing)


def _nothing(kind: str, called: bool, expected: list[str]) -> str:
    if not called:
        return f"{kind} was not called while it was watched; call it inside the block."
    if expected:
        return (
            f"none of the attention modules of {kind} ran: {few(sorted(expected))}. "
            "Was only a part of it called?"
        )
    return (
        f"{kind} has no attention that could be seen: no module is named like it, and nothing "
        "took a softmax and multiplied it with values. For convolutional networks there are "
        "class_activation, grad_cam and rise in overt.capture."
    )


_COMPILED = (
    "Attention that is written out, softmax and product, is not seen in what torch.compile has "
    'made. Run it as it was for this block, `with torch.compiler.set_stance("force_eager"):`, or '
    'use scaled_dot_product_attention (model.set_attn_implementation("sdpa") of Hugging Face).'
)


def _found(module: nn.Module, seen: Counter[nn.Module]) -> int:
    """How often a module was seen attending: itself, a part of it, or the attention around it."""
    inside = set(module.modules())
    return sum(
        times
        for one, times in seen.items()
        if one in inside or (looks_like_attention(one) and module in set(one.modules()))
    )


def _remedy(module: nn.Module) -> str:
    """What the user can do about a module that was not seen."""
    kind = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        return f"{kind} is TorchScript, which nothing can look into; load the Python model."
    chosen = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if chosen not in (None, "eager"):  # what is set already would be no help
        ways = '("eager")' if chosen == "sdpa" else '("sdpa") or "eager"'
        return (
            "They attend in a way that PyTorch does not show; "
            f"model.set_attn_implementation{ways} does show it."
        )
    return (
        f"{kind} attends in a way that PyTorch does not show (a custom kernel, a softmax over "
        "another axis than the keys, shares that no softmax made); use "
        "scaled_dot_product_attention, or softmax(dim=-1) and a matrix product. Or let it return "
        "its weights: AttentionMap.from_cells makes a map of (b, k)."
    )
