"""Changing attention in flight."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from overt.attention import Kind
from overt.capture import checkpoints
from overt.capture.call import Call, Projected, Route, Written
from overt.capture.places import HERE
from overt.capture.products import ALL

Edit = Callable[[Call, Float[Tensor, "b h q k"]], Float[Tensor, "b h q k"]]


@dataclass(frozen=True)
class Bias:
    """An edit that only adds to the scores, and so stays on the fused kernel.

    `make(call)` gives what is added, anything that broadcasts to (b, h, q, k), -inf to hide a key;
    None leaves the call alone. Use it for whatever is a product of the weights before they are
    normalised: `log(factor)` added to a score multiplies the weight by `factor`.
    """

    make: Callable[[Call], Tensor | None]


def edits_of(module: nn.Module) -> list[tuple[Any, Edit | Bias]]:
    """The edits of those who watch this module, outer watchers first."""
    return [(one, one.edit) for one in HERE.watchers if one.edit is not None and one.knows(module)]


def edited(
    module: nn.Module,
    route: Route,
    source: Projected | Written,
    value: Float[Tensor, "b g k d"],
    dropout: float,
    edits: list[tuple[Any, Edit | Bias]],
) -> tuple[Projected | Written, Float[Tensor, "b h q d"]]:
    """The source after all edits, and the output that it gives; fused when only scores changed."""
    source = changed(module, route, source, value, edits)
    if isinstance(source, Projected) and source.plain and source.sinks is None:
        output = F.scaled_dot_product_attention(
            source.query,
            source.key,
            value,
            _one_mask(source),
            dropout,
            scale=source.scale,
            enable_gqa=source.key.shape[1] != source.query.shape[1],
        )
        return source, output
    weights = F.dropout(source.weights(), dropout, training=dropout > 0).to(value.dtype)
    groups = weights.shape[1] // value.shape[1]
    return source, weights @ value.repeat_interleave(groups, dim=1)


def changed(
    module: nn.Module,
    route: Route,
    source: Projected | Written,
    value: Tensor | None,
    edits: list[tuple[Any, Edit | Bias]],
) -> Projected | Written:
    """The source after all edits, and the promise that checkpointing will edit again."""
    if not edits:
        return source
    if not torch.compiler.is_compiling() and checkpoints.current() is checkpoints.Pass.FIRST:
        watchers = [watcher for watcher, _ in edits]
        checkpoints.bind(watchers[0].replaying(watchers))
    for watcher, edit in edits:
        call = Call(
            watcher.name_of(module),
            module,
            source,
            route,
            watcher.crosses(module, source.shape, HERE.cross),
            HERE.steps - 1,
            value,
        )
        if isinstance(edit, Bias):
            extra = edit.make(call)
            source = source if extra is None else _biased(source, _fitting(extra, call))
        else:
            source = _replaced(call, edit(call, source.weights()))
    return source


def _replaced(call: Call, weights: Any) -> Written:
    if not isinstance(weights, Tensor):
        raise TypeError(
            f"the edit of {call.name or 'the model'} gave {type(weights).__name__} where weights "
            "are wanted, a tensor; return those that it was given to leave a call as it is"
        )
    if tuple(weights.shape) != call.shape:
        raise ValueError(
            f"the edit of {call.name or 'the model'} gave weights of shape {tuple(weights.shape)} "
            f"where {call.shape} were expected"
        )
    return Written(weights, Kind.AMOUNT)


def _fitting(extra: Tensor, call: Call) -> Tensor:
    """What a `Bias` adds; it has to broadcast to the scores."""
    sides = zip(reversed(extra.shape), reversed(call.shape), strict=False)
    if extra.ndim > 4 or any(one not in (1, wanted) for one, wanted in sides):
        raise ValueError(
            f"the bias of {call.name or 'the model'} has the shape {tuple(extra.shape)}, which "
            f"does not broadcast to scores of {call.shape}"
        )
    return extra


def _biased(source: Projected | Written, extra: Tensor) -> Projected | Written:
    if isinstance(source, Projected):
        return replace(source, bias=extra if source.bias is None else source.bias + extra)
    if source.logits is not None and not source.dropped:
        logits = source.logits + extra
        changed = replace(source, logits=logits)
        return replace(changed, used=changed.log_weights().exp().to(source.used.dtype))
    raise NotImplementedError(
        "a bias needs the scores, and these weights were changed after their softmax; "
        "edit the weights instead"
    )


def _one_mask(source: Projected) -> Tensor | None:
    """Masks and biases of a call as the one additive mask that a fused kernel takes."""
    allowed = source.seen(ALL, ALL)
    if source.bias is None:
        return allowed
    bias = source.bias.to(source.query.dtype)
    bias = bias.reshape((1,) * (4 - bias.ndim) + tuple(bias.shape))
    _, _, q, k = source.shape
    if allowed is not None:
        bias = torch.where(allowed, bias, -torch.inf)
    return bias.expand(-1, -1, q, k)
