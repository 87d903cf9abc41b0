"""Change attention weights and scores during the forward pass."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from overt.attention import Kind
from overt.capture import activation_checkpointing
from overt.capture.block_scores import ALL
from overt.capture.call import Call, MaterializedCall, QKCall, Route
from overt.capture.state import STATE

Edit = Callable[[Call, Float[Tensor, "b h q k"]], Float[Tensor, "b h q k"]]


@dataclass(frozen=True)
class Bias:
    """An edit that only adds to the scores, so that the fused kernel is still used.

    Adding `log(factor)` to a score multiplies the unnormalized weight by `factor`.

    Args:
        make: Maps a `Call` to the tensor to add, which must broadcast to (b, h, q, k); -inf hides a
            key, and None leaves the call unchanged.

    Example:
        >>> import overt, torch
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)
        >>> hide_first = Bias(lambda call: torch.tensor([-torch.inf, 0.0, 0.0]))
        >>> with overt.watch(layer, edit=hide_first) as trace:
        ...     _ = layer(torch.randn(1, 3, 8))
        >>> trace.map().weights[..., 0].max().item()
        0.0
    """

    make: Callable[[Call], Tensor | None]


def edits_of(module: nn.Module) -> list[tuple[Any, Edit | Bias]]:
    """Return the edits of the sessions that watch this module, outer sessions first."""
    return [
        (one, one.edit) for one in STATE.sessions if one.edit is not None and one.watches(module)
    ]


def attend_with_edits(
    module: nn.Module,
    route: Route,
    source: QKCall | MaterializedCall,
    value: Float[Tensor, "b g k d"],
    dropout: float,
    edits: list[tuple[Any, Edit | Bias]],
) -> tuple[QKCall | MaterializedCall, Float[Tensor, "b h q d"]]:
    """Return the source after all edits and its output, fused if only scores were changed."""
    source = apply_edits(module, route, source, value, edits)
    # Only scores were changed: the kernel takes bias, masks and causality as one mask.
    if isinstance(source, QKCall) and source.plain and source.sinks is None:
        output = F.scaled_dot_product_attention(
            source.query,
            source.key,
            value,
            _single_mask(source),
            dropout,
            scale=source.scale,
            enable_gqa=source.key.shape[1] != source.query.shape[1],
        )
        return source, output
    weights = F.dropout(source.weights(), dropout, training=dropout > 0).to(value.dtype)
    groups = weights.shape[1] // value.shape[1]
    return source, weights @ value.repeat_interleave(groups, dim=1)


def apply_edits(
    module: nn.Module,
    route: Route,
    source: QKCall | MaterializedCall,
    value: Tensor | None,
    edits: list[tuple[Any, Edit | Bias]],
) -> QKCall | MaterializedCall:
    """Return the source after all edits; a checkpointed recomputation will apply them again."""
    if not edits:
        return source
    # Checkpointing will run this forward pass again, perhaps after the block: the edits are bound
    # to the recomputation, or it would compute other activations.
    if (
        not torch.compiler.is_compiling()
        and activation_checkpointing.checkpoint_phase()
        is activation_checkpointing.CheckpointPhase.FORWARD
    ):
        sessions = [session for session, _ in edits]
        activation_checkpointing.wrap_recomputation(sessions[0].recompute_with_edits(sessions))
    # Each edit gets what the previous one has made.
    for session, edit in edits:
        call = Call(
            session.name_of(module),
            module,
            source,
            route,
            session.is_cross(module, source.shape, STATE.is_cross),
            STATE.steps - 1,
            value,
        )
        if isinstance(edit, Bias):
            extra = edit.make(call)
            source = source if extra is None else _with_bias(source, _check_bias(extra, call))
        else:
            source = _with_weights(call, edit(call, source.weights()))
    return source


def _with_weights(call: Call, weights: Any) -> MaterializedCall:
    if not isinstance(weights, Tensor):
        raise TypeError(
            f"the edit of {call.name or 'the model'} must return a tensor of weights, got "
            f"{type(weights).__name__}; return the given weights to leave a call unchanged"
        )
    if tuple(weights.shape) != call.shape:
        raise ValueError(
            f"the edit of {call.name or 'the model'} must return weights of shape {call.shape}, "
            f"got {tuple(weights.shape)}"
        )
    return MaterializedCall(weights, Kind.AMOUNT)


def _check_bias(extra: Tensor, call: Call) -> Tensor:
    """Return the tensor of a `Bias`, which has to broadcast to the scores."""
    sides = zip(reversed(extra.shape), reversed(call.shape), strict=False)
    if extra.ndim > 4 or any(size not in (1, expected) for size, expected in sides):
        raise ValueError(
            f"the bias of {call.name or 'the model'} must broadcast to scores of shape "
            f"{call.shape}, got {tuple(extra.shape)}"
        )
    return extra


def _with_bias(source: QKCall | MaterializedCall, extra: Tensor) -> QKCall | MaterializedCall:
    if isinstance(source, QKCall):
        return replace(source, bias=extra if source.bias is None else source.bias + extra)
    if source.logits is not None and not source.dropped:
        logits = source.logits + extra
        changed = replace(source, logits=logits)
        return replace(changed, used=changed.log_weights().exp().to(source.used.dtype))
    raise NotImplementedError(
        "a Bias needs scores, but these weights were changed after their softmax; use an edit of "
        "the weights instead"
    )


def _single_mask(source: QKCall) -> Tensor | None:
    """Return masks and biases of a call as the single mask of a fused kernel."""
    allowed = source.key_mask(ALL, ALL)
    if source.bias is None:
        return allowed
    bias = source.bias.to(source.query.dtype)
    bias = bias.reshape((1,) * (4 - bias.ndim) + tuple(bias.shape))
    _, _, q, k = source.shape
    # SDPA takes one mask: a float mask with -inf where the boolean mask hides a key.
    if allowed is not None:
        bias = torch.where(allowed, bias, -torch.inf)
    return bias.expand(-1, -1, q, k)
