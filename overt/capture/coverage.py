"""Raise if attention ran and was not captured."""

import re
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from overt.capture.discovery import format_names, is_compiled, is_inside_compiled, is_recurrent
from overt.capture.dispatch_mode import AttentionOp
from overt.capture.record_checks import (
    RowCheck,
    check_last_row,
    failed_checks,
    required_for_weights,
)
from overt.capture.records import CallRecord
from overt.capture.state import FAILED, FLEX, GRAPH


class UncapturedAttentionError(ValueError):
    """Attention ran and was not captured, or none ran; the message states the remedy.

    Example:
        >>> import overt
        >>> linear = nn.Linear(2, 2)
        >>> with overt.watch(linear):
        ...     _ = linear(torch.rand(1, 2))
        Traceback (most recent call last):
        overt.capture.coverage.UncapturedAttentionError: Linear has no attention ...
    """


def raise_if_modified(records: Sequence[tuple[str, CallRecord]]) -> None:
    """Raise if tensors needed for the weights were modified in place after a call."""
    found = [
        (name or "the model", required_for_weights(record.modified)) for name, record in records
    ]
    names = sorted({name for name, what in found if what})
    if names:
        what = sorted({one for _, several in found for one in several})
        raise UncapturedAttentionError(
            f"{' and '.join(what)} of {format_names(names)} were modified in place after the call, "
            "so the weights cannot be computed any more. Read each call when it is made: "
            "watch(model, each=lambda call: call.weights())."
        )


def withheld_notes(records: Sequence[tuple[str, CallRecord]]) -> list[str]:
    """Return notes on values and outputs that are dropped because they were modified in place."""
    notes = []
    found = [(name, record.modified) for name, record in records]
    for what in ("values", "outputs"):
        names = [name for name, modified in found if what in modified]
        if names:
            notes.append(f"{what} not available (modified in place later): {_count_calls(names)}")
    return notes


def raise_if_other_threads(names: Sequence[str]) -> None:
    """Raise if parts of the model ran in threads started by the model."""
    if names:
        places = sorted({name or "the model" for name in names})
        raise UncapturedAttentionError(
            f"{format_names(places)} ran in a thread started by the model, where attention is not "
            "captured. Run it in the thread that calls the model. " + _leave_out(places, ())
        )


def raise_if_uncaptured(found: Sequence[tuple[str, AttentionOp]], captured: Sequence[str]) -> None:
    """Raise if weights were multiplied with values in an operation without a record."""
    if not found:
        return
    names = sorted({name or "the model" for name, _ in found})
    first = found[0][1]
    raise UncapturedAttentionError(
        f"attention ran and was not captured in {format_names(names)}: "
        f"{type(first.module).__name__} calls {first.operation} on weights that do not come from "
        "softmax(dim=-1) in Python, or calls a fused kernel (TorchScript, exponentials divided by "
        "their sum, an operator of a library). Use scaled_dot_product_attention, or "
        "softmax(dim=-1) and a matrix product. " + _leave_out(names, captured)
    )


def _leave_out(names: Sequence[str], captured: Sequence[str]) -> str:
    """Advice for leaving modules out, and what remains; the whole model cannot be left out."""
    if "the model" in names:
        return "Or name the layers you need: watch(model, layers=[...])."
    inside = [one for one in captured if one.startswith(tuple(f"{name}." for name in names))]
    rest = [one for one in captured if one not in inside]
    listed = ", ".join(repr(name) for name in names[:6]) + (", ..." if len(names) > 6 else "")
    left = f", which leaves {format_names(rest)}" if rest else ""
    advice = [f"Or leave them out: watch(model, without=[{listed}]){left}."]
    if inside:  # leaving out a module leaves out those inside it
        works = (
            f"Or name the layers that work: watch(model, layers=[...]) of {format_names(inside)}."
        )
        advice = [*(advice if rest else []), works]
    return " ".join(advice)


def verify_rows(records: Sequence[tuple[str, CallRecord]]) -> list[str]:
    """Recompute one row of each call and compare it with the model.

    Returns:
        Notes on what could not be recomputed, and why.

    Raises:
        UncapturedAttentionError: If a row differs.
    """
    places, found, reasons = [], list[RowCheck](), dict[str, list[str]]()
    for name, record in records:
        # Values or outputs that the model changed in place after the call cannot be compared; the
        # log-weights still can, with the weights.
        whole = not record.modified & {"values", "outputs"}
        ends = (record.value, record.output) if whole else (None, None)
        for one in check_last_row(record.source, *ends, record.exact):
            places.append(name or "the model")
            found.append(one)
            if one.why:
                reasons.setdefault(one.why, []).append(name or "the model")
    wrong = failed_checks(found)
    if wrong:
        names = sorted({places[at] for at in wrong})
        raise UncapturedAttentionError(
            f"{found[wrong[0]].what} in {format_names(names)}: the captured tensors are not those "
            f"of the model. {_leave_out(names, sorted(set(places) - set(names)))}"
        )
    return [f"not verified ({why}): {_count_calls(names)}" for why, names in reasons.items()]


def without_weights_notes(names: Sequence[str]) -> list[str]:
    """Return a note on modules that mix positions without attention weights, if there are any."""
    if not names:
        return []
    kinds = sorted({re.sub(r"[0-9]+", "*", name) or "the model" for name in names})
    count = f"{len(names)} module{'s' * (len(names) > 1)}"
    return [f"no attention weights (recurrences, convolutions): {count} of {format_names(kinds)}"]


def _count_calls(names: Sequence[str]) -> str:
    """Count calls and name their modules, with numbers in names replaced by `*`."""
    kinds = sorted({re.sub(r"[0-9]+", "*", name) for name in names})
    return f"{len(names)} call{'s' * (len(names) > 1)} of {format_names(kinds)}"


def check_coverage(
    model: nn.Module,
    unwrapped: nn.Module,
    expected: Collection[nn.Module],
    events: Sequence[Any],
    handled: Sequence[nn.Module],
) -> None:
    """Raise if a module of `expected` ran more often than it was captured, or nothing was.

    `unwrapped` is the model inside `model`, if that is compiled or wrapped; `events` is the event
    log, and `handled` are the modules whose calls were passed to `each`.
    """
    if any(isinstance(event, tuple) and event[0] is FLEX for event in events):
        raise UncapturedAttentionError(
            "FlexAttention inside a compiled model cannot be assigned to a module; watch the "
            "uncompiled model."
        )
    ran = Counter(one for one in events if isinstance(one, nn.Module) and one in expected)
    # A module that raised need not have come to its attention.
    ran.subtract(one[1] for one in events if isinstance(one, tuple) and one[0] is FAILED)
    seen = Counter(handled)
    seen.update(event.module for event in events if isinstance(event, CallRecord))
    # A module is captured if a part of it is: wrappers are named like attention too.
    missed = [
        module
        for module, times in ran.items()
        if seen[module] < times and _captured_calls(module, seen) < times
    ]
    if not seen and missed and all(is_recurrent(module) for module in missed):
        missed = []  # a model without attention, not one with missing attention
    if seen and not missed:
        return
    names = {module: name or type(module).__name__ for name, module in unwrapped.named_modules()}
    if missed:
        graphed = (GRAPH, missed[0]) in events or is_inside_compiled(model, missed[0])
        remedy = _COMPILED if graphed else _remedy(missed[0])
        raise UncapturedAttentionError(
            f"{len(missed)} of {len(ran)} attention modules ran and were not captured: "
            f"{format_names([names[module] for module in missed])}. {remedy} "
            + _leave_out(
                [names[one] for one in missed], sorted({names[one] for one in seen if one in names})
            )
        )
    # Nothing was missed, but nothing was captured either.
    called = (model,) in events
    attending = [names[module] for module in expected if not is_recurrent(module)]
    nothing = _no_attention(type(unwrapped).__name__, called, attending)
    raise UncapturedAttentionError(
        f"{nothing} {_COMPILED}" if called and is_compiled(model) else nothing
    )


def _no_attention(kind: str, called: bool, expected: list[str]) -> str:
    if not called:
        return f"{kind} was not called inside the watch block; call it there."
    if expected:
        return (
            f"none of the attention modules of {kind} ran: {format_names(sorted(expected))}. "
            "Call the whole model, or watch the part that is called."
        )
    return (
        f"{kind} has no attention that can be captured from outside: no module has a name like "
        "it, and no softmax was multiplied with values by a matrix product. If a module pools by "
        "`(weights * values).sum(1)` or attends by other operations, name it: layers=[...], or "
        "layers=[''] for the forward of "
        f"{kind} itself. A model that cannot be captured needs `encode` and `decide` for masks and "
        "searches (docs/extending.md, A model). "
        "For convolutional networks use class_activation, grad_cam or rise of overt.attribution."
    )


_COMPILED = (
    "Attention written as softmax and product is not captured inside torch.compile. Run it "
    'uncompiled for this block, `with torch.compiler.set_stance("force_eager"):`, or use '
    'scaled_dot_product_attention (model.set_attn_implementation("sdpa") of Hugging Face).'
)


def _captured_calls(module: nn.Module, seen: Counter[nn.Module]) -> int:
    """Return how many calls of a module, or of a part of it, were captured."""
    inside = set(module.modules())
    return sum(times for one, times in seen.items() if one in inside)


def _remedy(module: nn.Module) -> str:
    """Return advice for a module that was not captured."""
    kind = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        return f"{kind} is TorchScript, which cannot be captured; load the Python model."
    if is_recurrent(module):
        return (
            f"{kind} mixes positions by a recurrence (a state space model, linear attention), "
            "which has no attention weights."
        )
    chosen = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if chosen not in (None, "eager"):  # do not recommend the current implementation
        ways = '("eager")' if chosen == "sdpa" else '("sdpa") or "eager"'
        return (
            f"Their {chosen!r} attention cannot be captured; use "
            f"model.set_attn_implementation{ways}."
        )
    return (
        f"{kind} uses attention that cannot be captured (a custom kernel, a softmax over another "
        "axis than the keys, weights without a softmax); use scaled_dot_product_attention, or "
        "softmax(dim=-1) and a matrix product. Or let it return its weights: "
        "AttentionMap.from_cells makes a map of (b, k)."
    )
