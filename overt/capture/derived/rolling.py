"""Attention rollout out of what was seen, layer by layer.

Abnar and Zuidema, "Quantifying Attention Flow in Transformers", ACL 2020,
https://arxiv.org/abs/2005.00928, section 3. `overt.attention.rollout` multiplies whole maps. Here
only the rows asked for travel through the product, from the last layer down to the first, and the
weights of a layer are made in portions of rows and thrown away. With a gradient they are made a
second time in the backward pass, so that what is kept grows with the length of the sequence, not
with its square. Short sequences keep their weights: there that is faster, and they are few.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from overt.attention import AttentionMap, Kind
from overt.capture.call import Call, Projected, part_of
from overt.capture.derived.maps import (
    Fuse,
    device_of,
    exactly,
    hidden_rows,
    listed,
    one_hot_rows,
    onto_itself,
    places,
    portion_size,
    portions,
    precision_of,
    shared_mask,
)
from overt.capture.products import ALL, Index, unrounded
from overt.capture.seen import Seen, Where

# Up to so many positions it is faster to keep weights than to make them twice: the second number is
# for what has no gradient in closed form.
FEW = 384
SHORT = 512


@exactly
def rollout(
    seen: Seen,
    rows: Where | None = None,
    fuse: Fuse = torch.mean,
    *,
    residual: bool = True,
    discard: float = 0.0,
    portion: int | None = None,
) -> AttentionMap:
    """How much of each input reaches each position after the last layer (Abnar and Zuidema 2020).

    The last layer of `overt.attention.rollout(seen.map())`, for all positions or for `rows`, the
    name of a span or positions a sample. Heads are fused by `fuse(weights, dim=, keepdim=True)`:
    `torch.mean`, `torch.amax`, `torch.amin`. With `residual` each layer is mixed with the identity
    and its rows renormalised. `discard` is the share of the keys a query may see that count as
    nothing, those with the lowest fused weights, row by row: no row depends on another.
    `portion` is how many rows of a layer are worked on at a time; None decides by size.
    """
    onto_itself(seen, "rollout")
    if not 0 <= discard < 1:
        raise ValueError(f"a share of {discard} cannot be discarded; it is at least 0 and below 1")
    at, queries, keys = places(seen, rows)
    b, _, q, _ = seen.calls[0].shape
    mask = shared_mask(seen)
    alive = None if mask is None else mask.any(dim=-1).expand(b, q)
    mixed = Mixed(fuse, residual, discard, alive)
    *below, last = seen.calls
    first = listed(at, b, q, device_of(last))
    if first.shape[1] <= (portion or portion_size(last)):
        state = mixed(last, at) * (first >= 0)[..., None]
    else:  # too many rows to keep their weights in every head
        below.append(last)
        state = one_hot_rows(first, q, precision_of(last))
    for call in reversed(below):
        state = travel(state, call, mixed, portion)
    shown = None if mask is None else reached(mask.expand(b, q, q), at, residual, len(seen))
    if isinstance(at, Tensor):
        shown = hidden_rows(shown, first >= 0, len(keys))
    kind = Kind.PROBABILITY if residual else Kind.AMOUNT
    return AttentionMap(state[:, None, None], keys, queries, shown, kind)


@dataclass(frozen=True, eq=False)
class Mixed:
    """What one layer does to the information at each position: its rows, fused and mixed.

    `alive` says which positions see anything in any layer; the others are rows of zeros.
    """

    fuse: Fuse
    residual: bool
    discard: float
    alive: Bool[Tensor, "b q"] | None

    def __call__(self, call: Call, rows: Index = ALL) -> Float[Tensor, "b s k"]:
        """The rows of a layer as they were seen."""
        return self.of(call, call.weights(rows).to(precision_of(call)), rows)

    def of(
        self, call: Call, weights: Float[Tensor, "b h s k"], rows: Index
    ) -> Float[Tensor, "b s k"]:
        """The rows of a layer, from the weights of its heads."""
        fused = self.fuse(weights, dim=1, keepdim=True)[:, 0]
        if self.discard:
            fused = fused * _highest(fused.detach(), call.visible(rows), self.discard)
        if not self.residual:
            return fused
        b, _, k = fused.shape
        at = listed(rows, b, k, fused.device).clamp_min(0)
        own = fused.sum(dim=-1, keepdim=True) + 1
        scale = 1 / own
        if self.alive is not None:
            scale = scale * self.alive.to(fused.device).gather(1, at)[..., None]
        return (fused * scale).scatter_add(2, at[..., None], scale)


def travel(
    state: Float[Tensor, "b s q"], call: Call, mixed: Mixed, portion: int | None
) -> Float[Tensor, "b s k"]:
    """The product of the state and the rows of a layer, made in portions when that is worth it."""
    size = portion or portion_size(call)
    source = call.source
    if portion is None and call.shape[3] <= FEW:
        known = isinstance(source, Projected) and _in_closed_form(source, mixed)
        return _averaged(state, source, mixed) if known else state @ mixed(call)  # type: ignore[arg-type]
    if isinstance(source, Projected) and _in_closed_form(source, mixed) and _bare(source):
        found: Tensor = _BareTravel.apply(
            state, source.query, source.key, source.scale, mixed, size
        )
    elif isinstance(source, Projected) and _in_closed_form(source, mixed):
        found = _MeanTravel.apply(state, source.query, source.key, source, mixed, size)
    elif not torch.is_grad_enabled():
        found = _sum(state, call, mixed, size)
    elif (
        isinstance(source, Projected) and _can_repeat(source) and (portion or call.shape[2] > SHORT)
    ):
        found = _Travel.apply(state, source.query, source.key, call, mixed, size)
    else:
        found = state @ mixed(call)
    return found


def _can_repeat(source: Projected) -> bool:
    """Whether queries and keys are all that a gradient has to reach.

    A learned bias is as large as the weights, which then may as well be kept.
    """
    learned = (source.bias, source.sinks)
    return source.modify is None and not any(x is not None and x.requires_grad for x in learned)


def _in_closed_form(source: Projected, mixed: Mixed) -> bool:
    usual = mixed.fuse is torch.mean and not mixed.discard
    return usual and source.plain and source.sinks is None and _can_repeat(source)


def _bare(source: Projected) -> bool:
    """Whether every row sees every key, by its product alone."""
    return source.bias is None and source.allowed is None and not source.causal


def _averaged(
    state: Float[Tensor, "b s q"], source: Projected, mixed: Mixed
) -> Float[Tensor, "b s k"]:
    """`state @ mixed(call)` for the mean of softmaxes, whose rows sum to one or see nothing.

    So what each row is divided by is known before its weights are, and is put on the state.
    """
    scores = source.scores()
    if source.bias is None and source.allowed is None:  # a causal row sees at least itself
        weights, sees = scores.softmax(dim=-1), None
    else:
        sees = ~scores.isneginf().all(dim=-1, keepdim=True)
        weights = torch.where(sees, scores, 0).softmax(dim=-1) * sees
    fused = weights.to(state.dtype).mean(dim=1)
    if not mixed.residual:
        return state @ fused
    if sees is None:
        given = state / 2
    else:
        given = state / (1 + sees[..., 0].to(state.dtype).mean(dim=1))[:, None]
    if mixed.alive is not None:
        given = given * mixed.alive[:, None].to(state)
    return given + given @ fused


def _sum(state: Tensor, call: Call, mixed: Mixed, size: int) -> Tensor:
    b, s, q = state.shape
    total = state.new_zeros(b, s, call.shape[3])
    for rows in portions(q, size):
        total.baddbmm_(state[..., rows], mixed(call, rows))
    return total


def _outside_autocast(backward: Callable[[Any, Tensor], Any]) -> Callable[[Any, Tensor], Any]:
    """A backward pass may be started under autocast, which would round its products."""

    def exact(ctx: Any, gradient: Tensor) -> Any:
        with unrounded(gradient.device):
            return backward(ctx, gradient)

    return exact


class _Travel(torch.autograd.Function):
    """`travel` that keeps queries and keys, and makes the weights again in its backward pass."""

    @staticmethod
    def forward(
        ctx: Any, state: Tensor, query: Tensor, key: Tensor, call: Call, mixed: Mixed, size: int
    ) -> Any:
        ctx.save_for_backward(state, query, key)
        ctx.call, ctx.mixed, ctx.size = call, mixed, size
        return _sum(state, call, mixed, size)

    @staticmethod
    @once_differentiable
    @_outside_autocast
    def backward(ctx: Any, gradient: Tensor) -> Any:
        state, query, key = ctx.saved_tensors
        into_state, into_query = torch.empty_like(state), torch.empty_like(query)
        into_key = torch.zeros_like(key)
        key = key.detach().requires_grad_()
        for rows in portions(state.shape[-1], ctx.size):
            part = query[:, :, rows].detach().requires_grad_()
            with torch.enable_grad():
                weights = _rows(ctx.call.source, rows, part, key).weights()
                layer = ctx.mixed.of(ctx.call, weights, rows)
            into_state[..., rows] = gradient @ layer.detach().mT
            outer = state[..., rows].mT @ gradient
            into_query[:, :, rows], more = torch.autograd.grad(layer, (part, key), outer)
            into_key += more
        return into_state, into_query, into_key, None, None, None


def _rows(source: Projected, rows: slice, query: Tensor, key: Tensor) -> Projected:
    """The same call for some of its rows alone, whose queries are given."""
    _, _, q, k = source.shape
    bias = None if source.bias is None else part_of(source.bias, rows, ALL, (q, k))
    allowed = source.seen(rows, ALL)
    return replace(
        source, query=query, key=key, bias=bias, allowed=allowed, causal=False, allow=None
    )


class _MeanTravel(torch.autograd.Function):
    """`travel` for the mean of softmaxes, with the gradient worked out by hand.

    Heads are not fused: one product sums over heads and rows. Of each layer only the logarithms of
    its sums are kept. The gradient G of the weights is the outer product of state and gradient, the
    same in all heads, and that of the scores is P (G - P . G).
    """

    @staticmethod
    def forward(
        ctx: Any,
        state: Tensor,
        query: Tensor,
        key: Tensor,
        source: Projected,
        mixed: Mixed,
        size: int,
    ) -> Any:
        b, h, q, _ = source.shape
        given = torch.empty_like(state)
        logs = state.new_empty(b, h, q, 1)
        total = torch.zeros_like(state)
        shares = torch.ones_like(state[:, 0])
        for rows in portions(q, size):
            keys = _needed(source, rows)
            scores = source.scores(rows, keys)
            highest = scores.amax(dim=-1, keepdim=True).clamp_min_(torch.finfo(scores.dtype).min)
            parts = scores.sub_(highest).exp_()
            sums = parts.sum(dim=-1, keepdim=True)
            some = sums > 0  # a row that sees nothing has parts of zero
            sums = torch.where(some, sums, 1)
            logs[:, :, rows] = highest + sums.log()
            if mixed.residual:
                shares[:, rows] = 1 / (1 + some.to(state.dtype).mean(dim=(1, 3)))
                if mixed.alive is not None:
                    shares[:, rows] *= mixed.alive[:, rows].to(state)
            given[..., rows] = state[..., rows] * shares[:, None, rows]
            spread = given[:, :, None, rows] / (h * sums.squeeze(-1))[:, None]
            total[..., keys].baddbmm_(spread.flatten(2), parts.flatten(1, 2))
        ctx.save_for_backward(given, shares, query, key, logs)
        ctx.source, ctx.mixed, ctx.size = source, mixed, size
        return total + given if mixed.residual else total

    @staticmethod
    @once_differentiable
    @_outside_autocast
    def backward(ctx: Any, gradient: Tensor) -> Any:
        given, shares, query, key, logs = ctx.saved_tensors
        source = replace(ctx.source, query=query, key=key)
        h, q = source.shape[1:3]
        precise = key.to(given.dtype)
        into_state = gradient.clone() if ctx.mixed.residual else torch.zeros_like(gradient)
        into_query, into_key = torch.empty_like(query), torch.zeros_like(precise)
        for rows in portions(q, ctx.size):
            keys = _needed(source, rows)
            weights = source.scores(rows, keys).sub_(logs[:, :, rows]).exp_()
            wanted = gradient[..., keys]
            met = (weights.flatten(1, 2) @ wanted.mT).unflatten(1, (h, -1))  # b h rows s
            into_state[..., rows] += met.mean(dim=1).mT
            gave = given[..., rows].mT / h
            level = (met * gave[:, None]).sum(dim=-1, keepdim=True)
            slope = ((gave @ wanted)[:, None] - level).mul_(weights).mul_(source.scale)
            queries, some = _into_both(slope, query[:, :, rows], precise[:, :, keys])
            into_query[:, :, rows] = queries
            into_key[:, :, keys] += some
        into_state *= shares[:, None]
        return into_state, into_query, into_key.to(key.dtype), None, None, None


class _BareTravel(torch.autograd.Function):
    """`_MeanTravel` where every row sees every key: nothing of a layer is kept.

    Weights are larger than all else, so that what counts is how often they are gone through: the
    scale is left to the products, and the sums of softmaxes, which are one, are not asked for.
    """

    @staticmethod
    def forward(
        ctx: Any,
        state: Tensor,
        query: Tensor,
        key: Tensor,
        scale: float,
        mixed: Mixed,
        size: int,
    ) -> Any:
        given = _shared(state, mixed)
        total = torch.zeros_like(state)
        h, q = query.shape[1:3]
        for rows in portions(q, size):
            weights = _softmaxes(query[:, :, rows], key, scale)
            spread = (given[..., rows] / h)[:, :, None].expand(-1, -1, h, -1)
            total.baddbmm_(spread.flatten(2), weights.flatten(1, 2))
        ctx.save_for_backward(given, query, key)
        ctx.scale, ctx.mixed, ctx.size = scale, mixed, size
        return total + given if mixed.residual else total

    @staticmethod
    @once_differentiable
    @_outside_autocast
    def backward(ctx: Any, gradient: Tensor) -> Any:
        given, query, key = ctx.saved_tensors
        h, q = query.shape[1:3]
        precise = key.to(given.dtype)
        into_state = gradient.clone() if ctx.mixed.residual else torch.zeros_like(gradient)
        into_query, into_key = torch.empty_like(query), torch.zeros_like(precise)
        for rows in portions(q, ctx.size):
            weights = _softmaxes(query[:, :, rows], key, ctx.scale)
            met = (weights.flatten(1, 2) @ gradient.mT).unflatten(1, (h, -1))  # b h rows s
            into_state[..., rows] += met.mean(dim=1).mT
            gave = given[..., rows].mT * (ctx.scale / h)
            level = (met * gave[:, None]).sum(dim=-1, keepdim=True)
            slope = ((gave @ gradient)[:, None] - level).mul_(weights)
            into_query[:, :, rows], keys = _into_both(slope, query[:, :, rows], precise)
            into_key += keys
        return _shared(into_state, ctx.mixed), into_query, into_key.to(key.dtype), *(None,) * 3


def _into_both(
    slope: Float[Tensor, "b h q k"], query: Float[Tensor, "b h q d"], key: Float[Tensor, "b g k d"]
) -> tuple[Float[Tensor, "b h q d"], Float[Tensor, "b g k d"]]:
    """What the gradient of scores gives to queries and to keys, which several heads may share."""
    groups = key.shape[1]
    slope = slope.unflatten(1, (groups, -1)).flatten(2, 3)
    part = query.to(key.dtype).unflatten(1, (groups, -1)).flatten(2, 3)
    return (slope @ key).reshape(query.shape), slope.mT @ part


def _shared(state: Float[Tensor, "b s q"], mixed: Mixed) -> Float[Tensor, "b s q"]:
    """What of a state goes through a layer whose rows sum to one, half of it where they are mixed.

    Mixed rows of positions that see nothing in any layer are zeros.
    """
    if not mixed.residual:
        return state
    return state / 2 if mixed.alive is None else state * mixed.alive[:, None].to(state) / 2


def _softmaxes(
    query: Float[Tensor, "b h s d"], key: Float[Tensor, "b g k d"], scale: float
) -> Float[Tensor, "b h s k"]:
    """The weights of rows that see all keys; products are scaled as they are written."""
    b, h, s, d = query.shape
    g, k = key.shape[1:3]
    precise = torch.promote_types(query.dtype, torch.float32)
    with unrounded(query.device):
        left = query.to(precise).reshape(b * g, -1, d)
        right = key.to(precise).reshape(b * g, k, d)
        scores = left.new_empty(b * g, left.shape[1], k)
        scores.baddbmm_(left, right.mT, beta=0, alpha=scale)  # of what is there nothing is read
        return scores.view(b, h, s, k).softmax(dim=-1)


def _needed(source: Projected, rows: slice) -> slice:
    """The keys that a portion of rows can see: under a causal mask none beyond its last row."""
    return slice(0, rows.stop) if source.causal else ALL


def _highest(
    weights: Float[Tensor, "b s k"], visible: Bool[Tensor, "b #s k"] | None, discard: float
) -> Bool[Tensor, "b s k"]:
    """All but the lowest share of the keys that each query may see; of equals the first goes."""
    k = weights.shape[-1]
    count = torch.tensor(k, device=weights.device)
    if visible is not None:
        weights = weights.masked_fill(~visible, torch.inf)
        count = visible.sum(dim=-1, keepdim=True)
    order = weights.argsort(dim=-1, stable=True)
    enough = torch.arange(k, device=weights.device) >= (count * discard).floor()
    return torch.empty_like(order, dtype=torch.bool).scatter_(-1, order, enough.expand_as(order))


def reached(
    visible: Bool[Tensor, "b q k"], at: Index, residual: bool, layers: int
) -> Bool[Tensor, "b s k"]:
    """Which inputs each row is led to by what every query may see, in at most so many steps."""
    b, q, _ = visible.shape
    if residual:
        itself = torch.eye(q, dtype=torch.bool, device=visible.device)
        visible = (visible | itself) & visible.any(dim=-1, keepdim=True)
    rows = listed(at, b, q, visible.device).clamp_min(0)
    found = visible.gather(1, rows[..., None].expand(-1, -1, q))
    step = visible.float()
    for _ in range(layers - 1):
        further = found | (found.float() @ step > 0)
        if visible.is_cpu and torch.equal(further, found):  # to ask a card is to wait for it
            break
        found = further
    return found
