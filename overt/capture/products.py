"""Scores of the same rows and keys in many layers, at the price of those scores.

Plain autograd would save a copy of the keys in every layer, in float32 at that, make a dozen small
nodes a layer, and hold the gradients of all layers at once. One function for all layers saves
nothing that attention itself has not saved: queries and keys as they are.
"""

from collections.abc import Sequence
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

Index = slice | Tensor  # positions, the same for every sample or one row a sample
ALL = slice(None)


class Tap:
    """A place in the graph, made while the model runs, where gradients of rows are brought later.

    The gradient of a few rows is a whole tensor of zeros but for those rows. Made when a loss is
    traced back, those of all layers would exist at once, on top of every activation. A tap is
    handed the rows, and adds them when the backward pass has come to its layer. Give its `tensor`
    to attention, and to nothing else: then they are added into the gradient that attention has
    made, and no tensor of zeros is made at all.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.parts: list[tuple[int, Index, Tensor]] = []
        self.tensor: Tensor = _Tapped.apply(tensor, self)

    def bring(self, index: Index, part: Tensor) -> None:
        """The gradient of some rows, for the backward pass that is under way."""
        self.parts.append((torch._C._current_graph_task_id(), index, part))

    def taken(self) -> list[tuple[Index, Tensor]]:
        """What this backward pass has brought; what an earlier one left is forgotten."""
        return _taken(self.parts)


def _taken(parts: list[tuple[int, Index, Tensor]]) -> list[tuple[Index, Tensor]]:
    """What the backward pass under way has brought; the list is empty afterwards."""
    now = torch._C._current_graph_task_id()
    found = [(index, part) for task, index, part in parts if task == now]
    parts.clear()
    return found


class _Tapped(torch.autograd.Function):
    """The tensor itself; its gradient is what was brought to the tap."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, tap: Tap) -> Tensor:
        """The same values. The graph knows the parts and not the tap, which knows the graph."""
        ctx.set_materialize_grads(False)
        ctx.parts, ctx.like = tap.parts, (tensor.shape, tensor.dtype, tensor.device)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """The rows in their places, and whatever came along the graph."""
        shape, dtype, device = ctx.like
        whole, parts = gradients[0], _taken(ctx.parts)
        if not parts:
            return whole, None
        if whole is None:
            whole = torch.zeros(shape, dtype=dtype, device=device)
        elif torch.is_grad_enabled():  # to be differentiated again
            whole = whole.clone()
        for index, part in parts:
            _place(part, index, whole)
        return whole, None


def products(
    queries: Sequence[Float[Tensor, "b h q d"] | Tap],
    keys: Sequence[Float[Tensor, "b g k d"] | Tap],
    rows: Index,
    columns: Index,
    scale: float = 1.0,
) -> Float[Tensor, "l b h s r"]:
    """`scale query . key` of some rows and keys in every layer, in float32 at least, with gradient.

    The scale is on the rows of the queries, which are fewer than the products.
    """
    given = [*queries, *keys]
    taps = [one if isinstance(one, Tap) else None for one in given]
    tensors = [one.tensor if isinstance(one, Tap) else one for one in given]
    return _Products.apply(rows, columns, scale, taps, *tensors)


class _Products(torch.autograd.Function):
    """The products, layer by layer; the gradient goes to the rows and keys that took part."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Index,
        columns: Index,
        scale: float,
        taps: list[Tap | None],
        *tensors: Tensor,
    ) -> Tensor:
        """One product a layer; what is converted for it is let go."""
        ctx.rows, ctx.columns, ctx.scale, ctx.taps = rows, columns, scale, taps
        ctx.save_for_backward(*tensors)
        count = len(tensors) // 2
        with torch.autocast(tensors[0].device.type, enabled=False):
            return torch.stack(
                [
                    _product(
                        _precise(take(query, rows, 2)) * scale, _precise(take(key, columns, 2))
                    )
                    for query, key in zip(tensors[:count], tensors[count:], strict=True)
                ]
            )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Each layer's gradient, brought to its tap or made whole."""
        tensors, taps = ctx.saved_tensors, ctx.taps
        count, found = len(tensors) // 2, [None] * len(tensors)
        wanted = ctx.needs_input_grad[4:]
        with torch.autocast(tensors[0].device.type, enabled=False):
            for layer, gradient in enumerate(gradients[0]):
                query, key = tensors[layer], tensors[count + layer]
                grouped = rearrange(gradient, "b (g n) s r -> b g (n s) r", g=key.shape[1])
                if wanted[layer]:
                    part = grouped @ _precise(take(key, ctx.columns, 2)) * ctx.scale
                    part = rearrange(part, "b g (n s) d -> b (g n) s d", s=gradient.shape[2])
                    found[layer] = _handed(part.to(query.dtype), ctx.rows, query, taps[layer])
                if wanted[count + layer]:
                    at = _precise(take(query, ctx.rows, 2)) * ctx.scale
                    at = rearrange(at, "b (g n) s d -> b g (n s) d", g=key.shape[1])
                    part = (grouped.transpose(-1, -2) @ at).to(key.dtype)
                    found[count + layer] = _handed(part, ctx.columns, key, taps[count + layer])
        return (None, None, None, None, *found)


def _handed(part: Tensor, index: Index, like: Tensor, tap: Tap | None) -> Any:
    """Nothing when a tap has taken the part; else the part as a gradient of the whole."""
    if tap is not None:
        tap.bring(index, part)
        return None
    whole = torch.zeros_like(like)
    _place(part, index, whole)
    return whole


def _product(query: Float[Tensor, "b h s d"], key: Float[Tensor, "b g r d"]) -> Tensor:
    grouped = rearrange(query, "b (g n) s d -> b g (n s) d", g=key.shape[1])
    scores = grouped @ key.transpose(-1, -2)
    return rearrange(scores, "b g (n s) r -> b (g n) s r", s=query.shape[2])


def _precise(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _place(part: Tensor, index: Index, whole: Tensor) -> None:
    """Add a part to the whole at its place; a position that was used twice gets both."""
    if isinstance(index, slice):
        whole[:, :, index] += part
    else:
        places = index.to(whole.device).clamp_min(0)[:, None, :, None].expand_as(part)
        whole.scatter_add_(2, places, part)


def take(values: Tensor, index: Index, dim: int) -> Tensor:
    """The positions `index` along one axis of (b, h, n, m); -1 reads the first, to be hidden."""
    if isinstance(index, slice):
        if index == ALL:
            return values
        return values[:, :, index] if dim == 2 else values[..., index]
    at = index.to(values.device).clamp_min(0)
    at = at[:, None, :, None] if dim == 2 else at[:, None, None, :]
    sizes = [len(index), *values.shape[1:]]
    sizes[dim] = at.shape[dim]
    if values.shape[0] != len(index):
        values = values.expand(len(index), *values.shape[1:])
    return values.gather(dim, at.expand(sizes))
