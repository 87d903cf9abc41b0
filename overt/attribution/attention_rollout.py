"""Attention rollout of a captured trace or of a stored map.

Abnar and Zuidema, "Quantifying Attention Flow in Transformers", ACL 2020,
https://arxiv.org/abs/2005.00928, section 3.

For a trace, only the requested rows are multiplied through the layers, from the last to the first.
The weights of a layer are computed in chunks of rows and discarded. With gradients they are
recomputed in the backward pass, so that memory grows linearly with the sequence length, not
quadratically. Short sequences keep their weights, which is faster and needs little memory.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from overt.attention import AttentionMap, Form, Kind
from overt.attribution.raw_attention import (
    HeadFusion,
    check_self_attention,
    compute_dtype,
    default_chunk,
    device_of,
    hide_missing_rows,
    one_hot_rows,
    resolve_rows,
    row_chunks,
    row_positions,
    union_mask,
    without_autocast,
)
from overt.capture.block_scores import ALL, Index, no_autocast
from overt.capture.call import Call, QKCall, select_block
from overt.capture.trace import AttentionTrace, Where

# Up to these lengths it is faster to keep the weights than to compute them twice. The first limit
# is for the closed-form gradient, the second for recomputation by autograd.
MAX_KEYS_KEPT = 384
MAX_QUERIES_KEPT = 512


def rollout(
    attention: AttentionTrace | AttentionMap,
    rows: Where | None = None,
    fuse: HeadFusion = torch.mean,
    *,
    residual: bool = True,
    discard: float = 0.0,
    chunk: int | None = None,
) -> AttentionMap:
    """Compute attention rollout: how much of each input reaches each position (Abnar et al. 2020).

    The numbers are the same for a trace and for its map, `trace.map()`.

    Args:
        attention: A trace of `overt.watch`, or a map of self-attention with all layers.
        rows: The name of a span or positions per sample; None computes all rows. For traces only.
        fuse: Fuses heads, called as `fuse(weights, dim=, keepdim=True)`: `torch.mean`,
            `torch.amax`, `torch.amin`.
        residual: Mix each layer with the identity and renormalise its rows.
        discard: The share of the visible keys of each query that is set to zero, those with the
            lowest fused weights. Applied row by row: no row depends on another. For traces only.
        chunk: How many rows of a layer are computed at a time; None chooses by size. For traces
            only.

    Returns:
        A map with one head. For a trace it has one layer, the rollout through all layers. For a map
        its layer l is the rollout up to layer l.

    Raises:
        ValueError: The attention is not self-attention, or its weights are signed.

    Example:
        >>> from overt import words
        >>> attention = AttentionMap.from_scores(torch.zeros(1, 3, 2, 4, 4), words(4), words(4))
        >>> rollout(attention).shape
        (1, 3, 1, 4, 4)
    """
    if isinstance(attention, AttentionMap):
        if rows is not None or discard or chunk is not None:
            raise ValueError("rows, discard and chunk need a trace; an AttentionMap was given")
        return rollout_maps(attention, fuse, residual=residual)
    if not isinstance(attention, AttentionTrace):
        raise TypeError(
            f"rollout needs a trace or an AttentionMap, got a {type(attention).__name__}: run the "
            "model inside `with overt.watch(model) as trace:` and pass the trace"
        )
    return _rollout_trace(attention, rows, fuse, residual, discard, chunk)


def rollout_maps(
    attention: AttentionMap, fuse: HeadFusion = torch.mean, *, residual: bool = True
) -> AttentionMap:
    """Compute the rollout up to each layer of a stored map.

    A query without a visible key keeps a row of zeros and is masked. A key is masked if no path
    leads to it through the visible keys of each query.
    """
    if len(attention.queries) != len(attention.keys):
        raise ValueError(
            f"rollout needs self-attention, got {len(attention.queries)} queries and "
            f"{len(attention.keys)} keys"
        )
    if attention.kind is Kind.SIGNED:
        raise ValueError("rollout needs non-negative weights, got signed ones")
    layers = attention.over_heads(fuse).weights[:, :, 0]
    visible = attention.visible
    if residual:
        identity = torch.eye(len(attention.keys), device=layers.device, dtype=layers.dtype)
        layers = layers + identity
        layers = layers / layers.sum(dim=-1, keepdim=True)
        layers = layers * rearrange(attention.rows, "b q -> b 1 q 1")
        visible = (visible | identity.bool()) & rearrange(attention.rows, "b q -> b q 1")
    products = [layers[:, 0]]
    for layer in layers.unbind(dim=1)[1:]:
        products.append(layer @ products[-1])
    return replace(
        attention,
        values=rearrange(torch.stack(products, dim=1), "b l q k -> b l 1 q k"),
        mask=None if attention.mask is None else _paths(visible, len(products)),
        kind=Kind.PROBABILITY if residual else Kind.AMOUNT,
        form=Form.PLAIN,
    )


def _paths(visible: Bool[Tensor, "b q q"], steps: int) -> Bool[Tensor, "b q q"]:
    """Return which positions are connected by a path of at most `steps` steps."""
    step = visible.float()
    frontier = connected = visible
    for _ in range(steps - 1):
        frontier = step @ frontier.float() > 0
        connected = connected | frontier
    return connected


@without_autocast
def _rollout_trace(
    trace: AttentionTrace,
    rows: Where | None,
    fuse: HeadFusion,
    residual: bool,
    discard: float,
    chunk: int | None,
) -> AttentionMap:
    """Compute the last layer of `rollout_maps(trace.map())` for some rows."""
    check_self_attention(trace, "rollout")
    if not 0 <= discard < 1:
        raise ValueError(f"discard must be at least 0 and below 1, got {discard}")
    at, queries, keys = resolve_rows(trace, rows)
    b, _, q, _ = trace.calls[0].shape
    mask = union_mask(trace)
    alive = None if mask is None else mask.any(dim=-1).expand(b, q)
    mixing = LayerMixing(fuse, residual, discard, alive)
    *below, last = trace.calls
    first = row_positions(at, b, q, device_of(last))
    if first.shape[1] <= (chunk or default_chunk(last)):
        state = mixing(last, at) * (first >= 0)[..., None]
    else:  # too many rows to keep their weights in every head
        below.append(last)
        state = one_hot_rows(first, q, compute_dtype(last))
    for call in reversed(below):
        state = propagate(state, call, mixing, chunk)
    shown = None
    if mask is not None:
        shown = reachable_inputs(mask.expand(b, q, q), at, residual, len(trace))
    if isinstance(at, Tensor):
        shown = hide_missing_rows(shown, first >= 0, len(keys))
    kind = Kind.PROBABILITY if residual else Kind.AMOUNT
    return AttentionMap(state[:, None, None], keys, queries, shown, kind)


@dataclass(frozen=True, eq=False)
class LayerMixing:
    """The fused rows of one layer, mixing with the identity.

    `alive` marks the positions that have a visible key in any layer; the other rows are zero.
    """

    fuse: HeadFusion
    residual: bool
    discard: float
    alive: Bool[Tensor, "b q"] | None

    def __call__(self, call: Call, rows: Index = ALL) -> Float[Tensor, "b s k"]:
        """Return rows of a captured layer."""
        return self.mix(call, call.weights(rows).to(compute_dtype(call)), rows)

    def mix(
        self, call: Call, weights: Float[Tensor, "b h s k"], rows: Index
    ) -> Float[Tensor, "b s k"]:
        """Return rows of a layer, given the weights of its heads."""
        fused = self.fuse(weights, dim=1, keepdim=True)[:, 0]
        if self.discard:
            fused = fused * _keep_highest(fused.detach(), call.visible(rows), self.discard)
        if not self.residual:
            return fused
        b, _, k = fused.shape
        at = row_positions(rows, b, k, fused.device).clamp_min(0)
        own = fused.sum(dim=-1, keepdim=True) + 1
        scale = 1 / own
        if self.alive is not None:
            scale = scale * self.alive.to(fused.device).gather(1, at)[..., None]
        return (fused * scale).scatter_add(2, at[..., None], scale)


def propagate(
    state: Float[Tensor, "b s q"], call: Call, mixing: LayerMixing, chunk: int | None
) -> Float[Tensor, "b s k"]:
    """Multiply the state by the rows of a layer, in chunks if that saves memory."""
    size = chunk or default_chunk(call)
    source = call.source
    state = state.to(device_of(call))  # layers may be on several devices
    if chunk is None and call.shape[3] <= MAX_KEYS_KEPT:
        closed_form = isinstance(source, QKCall) and _has_closed_form(source, mixing)
        return _propagate_mean(state, source, mixing) if closed_form else state @ mixing(call)  # type: ignore[arg-type]
    if isinstance(source, QKCall) and _has_closed_form(source, mixing) and _is_unmasked(source):
        product: Tensor = _UnmaskedMeanPropagation.apply(
            state, source.query, source.key, source.scale, mixing, size
        )
    elif isinstance(source, QKCall) and _has_closed_form(source, mixing):
        product = _MeanPropagation.apply(state, source.query, source.key, source, mixing, size)
    elif not torch.is_grad_enabled():
        product = _propagate_chunks(state, call, mixing, size)
    elif (
        isinstance(source, QKCall)
        and _can_recompute(source)
        and (chunk or call.shape[2] > MAX_QUERIES_KEPT)
    ):
        product = _RecomputedPropagation.apply(state, source.query, source.key, call, mixing, size)
    else:
        product = state @ mixing(call)
    return product


def _can_recompute(source: QKCall) -> bool:
    """Return whether only queries and keys need gradients.

    A learned bias is as large as the weights, so recomputing the weights would save nothing.
    """
    learned = (source.bias, source.sinks)
    return source.score_mod is None and not any(x is not None and x.requires_grad for x in learned)


def _has_closed_form(source: QKCall, mixing: LayerMixing) -> bool:
    usual = mixing.fuse is torch.mean and not mixing.discard
    return usual and source.plain and source.sinks is None and _can_recompute(source)


def _is_unmasked(source: QKCall) -> bool:
    """Return whether every row sees every key and scores are plain dot products."""
    return source.bias is None and source.allowed is None and not source.causal


def _propagate_mean(
    state: Float[Tensor, "b s q"], source: QKCall, mixing: LayerMixing
) -> Float[Tensor, "b s k"]:
    """Compute `state @ mixing(call)` for the mean of softmaxes, whose rows sum to one or zero.

    The divisor of each row is therefore known before its weights and is applied to the state.
    """
    scores = source.scores()
    if source.bias is None and source.allowed is None:  # a causal row sees at least itself
        weights, sees = scores.softmax(dim=-1), None
    else:
        sees = ~scores.isneginf().all(dim=-1, keepdim=True)
        weights = torch.where(sees, scores, 0).softmax(dim=-1) * sees
    fused = weights.to(state.dtype).mean(dim=1)
    if not mixing.residual:
        return state @ fused
    if sees is None:
        given = state / 2
    else:
        given = state / (1 + sees[..., 0].to(state.dtype).mean(dim=1))[:, None]
    if mixing.alive is not None:
        given = given * mixing.alive[:, None].to(state)
    return given + given @ fused


def _propagate_chunks(state: Tensor, call: Call, mixing: LayerMixing, size: int) -> Tensor:
    b, s, q = state.shape
    total = state.new_zeros(b, s, call.shape[3])
    for rows in row_chunks(q, size):
        total.baddbmm_(state[..., rows], mixing(call, rows))
    return total


def _outside_autocast(backward: Callable[[Any, Tensor], Any]) -> Callable[[Any, Tensor], Any]:
    """Disable autocast in a backward pass, where it would round the products."""

    def exact(ctx: Any, gradient: Tensor) -> Any:
        with no_autocast(gradient.device):
            return backward(ctx, gradient)

    return exact


class _RecomputedPropagation(torch.autograd.Function):
    """`propagate` that saves queries and keys, and recomputes the weights in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        state: Tensor,
        query: Tensor,
        key: Tensor,
        call: Call,
        mixing: LayerMixing,
        size: int,
    ) -> Any:
        ctx.save_for_backward(state, query, key)
        ctx.call, ctx.mixing, ctx.size = call, mixing, size
        return _propagate_chunks(state, call, mixing, size)

    @staticmethod
    @once_differentiable
    @_outside_autocast
    def backward(ctx: Any, gradient: Tensor) -> Any:
        state, query, key = ctx.saved_tensors
        into_state, into_query = torch.empty_like(state), torch.empty_like(query)
        into_key = torch.zeros_like(key)
        key = key.detach().requires_grad_()
        for rows in row_chunks(state.shape[-1], ctx.size):
            part = query[:, :, rows].detach().requires_grad_()
            with torch.enable_grad():
                weights = _select_rows(ctx.call.source, rows, part, key).weights()
                layer = ctx.mixing.mix(ctx.call, weights, rows)
            into_state[..., rows] = gradient @ layer.detach().mT
            outer = state[..., rows].mT @ gradient
            into_query[:, :, rows], more = torch.autograd.grad(layer, (part, key), outer)
            into_key += more
        return into_state, into_query, into_key, None, None, None


def _select_rows(source: QKCall, rows: slice, query: Tensor, key: Tensor) -> QKCall:
    """Return the call for some of its rows, with these queries."""
    _, _, q, k = source.shape
    bias = None if source.bias is None else select_block(source.bias, rows, ALL, (q, k))
    allowed = source.key_mask(rows, ALL)
    return replace(
        source, query=query, key=key, bias=bias, allowed=allowed, causal=False, mask_mod=None
    )


class _MeanPropagation(torch.autograd.Function):
    """`propagate` for the mean of softmaxes, with an analytic gradient.

    Heads are not fused: one product sums over heads and rows. Only the log-sums of each layer are
    saved. The gradient G of the weights is the outer product of state and gradient, the same in all
    heads, and that of the scores is P (G - P . G).
    """

    @staticmethod
    def forward(
        ctx: Any,
        state: Tensor,
        query: Tensor,
        key: Tensor,
        source: QKCall,
        mixing: LayerMixing,
        size: int,
    ) -> Any:
        b, h, q, _ = source.shape
        given = torch.empty_like(state)
        logs = state.new_empty(b, h, q, 1)
        total = torch.zeros_like(state)
        shares = torch.ones_like(state[:, 0])
        for rows in row_chunks(q, size):
            keys = _visible_keys(source, rows)
            scores = source.scores(rows, keys)
            highest = scores.amax(dim=-1, keepdim=True).clamp_min_(torch.finfo(scores.dtype).min)
            parts = scores.sub_(highest).exp_()
            sums = parts.sum(dim=-1, keepdim=True)
            some = sums > 0  # zero in a row without a visible key
            sums = torch.where(some, sums, 1)
            logs[:, :, rows] = highest + sums.log()
            if mixing.residual:
                shares[:, rows] = 1 / (1 + some.to(state.dtype).mean(dim=(1, 3)))
                if mixing.alive is not None:
                    shares[:, rows] *= mixing.alive[:, rows].to(state)
            given[..., rows] = state[..., rows] * shares[:, None, rows]
            spread = given[:, :, None, rows] / (h * sums.squeeze(-1))[:, None]
            total[..., keys].baddbmm_(spread.flatten(2), parts.flatten(1, 2))
        ctx.save_for_backward(given, shares, query, key, logs)
        ctx.source, ctx.mixing, ctx.size = source, mixing, size
        return total + given if mixing.residual else total

    @staticmethod
    @once_differentiable
    @_outside_autocast
    def backward(ctx: Any, gradient: Tensor) -> Any:
        given, shares, query, key, logs = ctx.saved_tensors
        source = replace(ctx.source, query=query, key=key)
        h, q = source.shape[1:3]
        precise = key.to(given.dtype)
        into_state = gradient.clone() if ctx.mixing.residual else torch.zeros_like(gradient)
        into_query, into_key = torch.empty_like(query), torch.zeros_like(precise)
        for rows in row_chunks(q, ctx.size):
            keys = _visible_keys(source, rows)
            weights = source.scores(rows, keys).sub_(logs[:, :, rows]).exp_()
            wanted = gradient[..., keys]
            met = (weights.flatten(1, 2) @ wanted.mT).unflatten(1, (h, -1))  # b h rows s
            into_state[..., rows] += met.mean(dim=1).mT
            gave = given[..., rows].mT / h
            level = (met * gave[:, None]).sum(dim=-1, keepdim=True)
            slope = ((gave @ wanted)[:, None] - level).mul_(weights).mul_(source.scale)
            queries, some = _score_gradients(slope, query[:, :, rows], precise[:, :, keys])
            into_query[:, :, rows] = queries
            into_key[:, :, keys] += some
        into_state *= shares[:, None]
        return into_state, into_query, into_key.to(key.dtype), None, None, None


class _UnmaskedMeanPropagation(torch.autograd.Function):
    """`_MeanPropagation` where every row sees every key: nothing of a layer is saved.

    The weights are the largest tensors, so passes over them dominate the cost: the scale is folded
    into the products, and the sums of softmaxes, which are one, are not computed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        state: Tensor,
        query: Tensor,
        key: Tensor,
        scale: float,
        mixing: LayerMixing,
        size: int,
    ) -> Any:
        given = _scale_state(state, mixing)
        total = torch.zeros_like(state)
        h, q = query.shape[1:3]
        for rows in row_chunks(q, size):
            weights = _softmaxes(query[:, :, rows], key, scale)
            spread = (given[..., rows] / h)[:, :, None].expand(-1, -1, h, -1)
            total.baddbmm_(spread.flatten(2), weights.flatten(1, 2))
        ctx.save_for_backward(given, query, key)
        ctx.scale, ctx.mixing, ctx.size = scale, mixing, size
        return total + given if mixing.residual else total

    @staticmethod
    @once_differentiable
    @_outside_autocast
    def backward(ctx: Any, gradient: Tensor) -> Any:
        given, query, key = ctx.saved_tensors
        h, q = query.shape[1:3]
        precise = key.to(given.dtype)
        into_state = gradient.clone() if ctx.mixing.residual else torch.zeros_like(gradient)
        into_query, into_key = torch.empty_like(query), torch.zeros_like(precise)
        for rows in row_chunks(q, ctx.size):
            weights = _softmaxes(query[:, :, rows], key, ctx.scale)
            met = (weights.flatten(1, 2) @ gradient.mT).unflatten(1, (h, -1))  # b h rows s
            into_state[..., rows] += met.mean(dim=1).mT
            gave = given[..., rows].mT * (ctx.scale / h)
            level = (met * gave[:, None]).sum(dim=-1, keepdim=True)
            slope = ((gave @ gradient)[:, None] - level).mul_(weights)
            into_query[:, :, rows], keys = _score_gradients(slope, query[:, :, rows], precise)
            into_key += keys
        return (
            _scale_state(into_state, ctx.mixing),
            into_query,
            into_key.to(key.dtype),
            *(None,) * 3,
        )


def _score_gradients(
    slope: Float[Tensor, "b h q k"], query: Float[Tensor, "b h q d"], key: Float[Tensor, "b g k d"]
) -> tuple[Float[Tensor, "b h q d"], Float[Tensor, "b g k d"]]:
    """Return the gradients of queries and keys, which heads may share, given that of the scores."""
    groups = key.shape[1]
    slope = slope.unflatten(1, (groups, -1)).flatten(2, 3)
    part = query.to(key.dtype).unflatten(1, (groups, -1)).flatten(2, 3)
    return (slope @ key).reshape(query.shape), slope.mT @ part


def _scale_state(state: Float[Tensor, "b s q"], mixing: LayerMixing) -> Float[Tensor, "b s q"]:
    """Scale the state for a layer whose rows sum to one: half of it with the residual.

    Positions without a visible key in any layer have rows of zeros.
    """
    if not mixing.residual:
        return state
    return state / 2 if mixing.alive is None else state * mixing.alive[:, None].to(state) / 2


def _softmaxes(
    query: Float[Tensor, "b h s d"], key: Float[Tensor, "b g k d"], scale: float
) -> Float[Tensor, "b h s k"]:
    """Compute the weights of rows that see all keys; the scale is part of the product."""
    b, h, s, d = query.shape
    g, k = key.shape[1:3]
    precise = torch.promote_types(query.dtype, torch.float32)
    with no_autocast(query.device):
        left = query.to(precise).reshape(b * g, -1, d)
        right = key.to(precise).reshape(b * g, k, d)
        scores = left.new_empty(b * g, left.shape[1], k)
        scores.baddbmm_(
            left, right.mT, beta=0, alpha=scale
        )  # beta=0: the uninitialised memory is not read
        return scores.view(b, h, s, k).softmax(dim=-1)


def _visible_keys(source: QKCall, rows: slice) -> slice:
    """Return the keys visible to a chunk of rows: under a causal mask, none after its last row."""
    return slice(0, rows.stop) if source.causal else ALL


def _keep_highest(
    weights: Float[Tensor, "b s k"], visible: Bool[Tensor, "b #s k"] | None, discard: float
) -> Bool[Tensor, "b s k"]:
    """Mark all but the lowest share of the visible keys of each query; ties drop the first."""
    k = weights.shape[-1]
    count = torch.tensor(k, device=weights.device)
    if visible is not None:
        weights = weights.masked_fill(~visible, torch.inf)
        count = visible.sum(dim=-1, keepdim=True)
    order = weights.argsort(dim=-1, stable=True)
    enough = torch.arange(k, device=weights.device) >= (count * discard).floor()
    return torch.empty_like(order, dtype=torch.bool).scatter_(-1, order, enough.expand_as(order))


def reachable_inputs(
    visible: Bool[Tensor, "b q k"], at: Index, residual: bool, layers: int
) -> Bool[Tensor, "b s k"]:
    """Return which inputs each row can reach through visible keys in at most `layers` steps."""
    b, q, _ = visible.shape
    if residual:
        identity = torch.eye(q, dtype=torch.bool, device=visible.device)
        visible = (visible | identity) & visible.any(dim=-1, keepdim=True)
    rows = row_positions(at, b, q, visible.device).clamp_min(0)
    connected = visible.gather(1, rows[..., None].expand(-1, -1, q))
    step = visible.float()
    for _ in range(layers - 1):
        further = connected | (connected.float() @ step > 0)
        if visible.is_cpu and torch.equal(
            further, connected
        ):  # on a GPU the test would synchronize
            break
        connected = further
    return connected
