"""Scores of the same rows and keys in many layers, at the price of those scores.

Plain autograd would save a copy of the keys in every layer, in float32 at that, and make a dozen
small nodes a layer. One function for all layers saves nothing that attention itself has not saved:
queries and keys as they are.
"""

from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from overt.capture.call import Index, take


def products(
    queries: list[Float[Tensor, "b h q d"]],
    keys: list[Float[Tensor, "b g k d"]],
    rows: Index,
    columns: Index,
) -> Float[Tensor, "l b h s r"]:
    """`query . key` of some rows and keys in every layer, in float32 at least, with gradient."""
    return _Products.apply(rows, columns, len(queries), *queries, *keys)


class _Products(torch.autograd.Function):
    """The products, layer by layer; the gradient is taken to the rows and keys that were used."""

    @staticmethod
    def forward(ctx: Any, rows: Index, columns: Index, count: int, *tensors: Tensor) -> Tensor:
        """One product a layer; what is converted for it is let go."""
        ctx.rows, ctx.columns, ctx.count = rows, columns, count
        ctx.save_for_backward(*tensors)
        with torch.autocast(tensors[0].device.type, enabled=False):
            return torch.stack(
                [
                    _product(_precise(take(query, rows, 2)), _precise(take(key, columns, 2)))
                    for query, key in zip(tensors[:count], tensors[count:], strict=True)
                ]
            )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Each layer's gradient, zero but at the rows and keys that took part."""
        tensors, count = ctx.saved_tensors, ctx.count
        wanted = ctx.needs_input_grad[3:]
        found: list[Tensor | None] = [None] * len(tensors)
        with torch.autocast(tensors[0].device.type, enabled=False):
            for layer, gradient in enumerate(gradients[0]):
                query, key = tensors[layer], tensors[count + layer]
                grouped = rearrange(gradient, "b (g n) s r -> b g (n s) r", g=key.shape[1])
                if wanted[layer]:
                    part = grouped @ _precise(take(key, ctx.columns, 2))
                    part = rearrange(part, "b g (n s) d -> b (g n) s d", s=gradient.shape[2])
                    found[layer] = _placed(part, ctx.rows, query)
                if wanted[count + layer]:
                    at = take(query, ctx.rows, 2)
                    at = rearrange(at, "b (g n) s d -> b g (n s) d", g=key.shape[1])
                    part = grouped.transpose(-1, -2) @ _precise(at)
                    found[count + layer] = _placed(part, ctx.columns, key)
        return (None, None, None, *found)


def _product(query: Float[Tensor, "b h s d"], key: Float[Tensor, "b g r d"]) -> Tensor:
    grouped = rearrange(query, "b (g n) s d -> b g (n s) d", g=key.shape[1])
    scores = grouped @ key.transpose(-1, -2)
    return rearrange(scores, "b g (n s) r -> b (g n) s r", s=query.shape[2])


def _precise(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _placed(part: Tensor, index: Index, like: Tensor) -> Tensor:
    """The gradient of a part as one of the whole; a position that was used twice gets both."""
    whole = torch.zeros_like(like)
    part = part.to(like.dtype)
    if isinstance(index, slice):
        whole[:, :, index] = part
        return whole
    at = index.to(like.device).clamp_min(0)[:, None, :, None].expand_as(part)
    return whole.scatter_add(2, at, part)
