"""The non-local operator over samples that keep unequally many cells, without filling any up.

On a CPU the work of filling up, and on what was filled up, takes as long as that on the cells: a
sample after another is quicker, with the gradient written out. On a GPU it would wait for as many
small kernels as there are samples: there `card` has kernels for all samples at once.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable


def seen_by_all(
    cells: Float[Tensor, "n c"],
    both: Float[Tensor, "n s"],
    counts: Sequence[int],
    heads: int,
    scale: float,
) -> Float[Tensor, "b h c"]:
    """The mix of cells that all cells of a sample look at together (eq. 7 before its values).

    `both` are the queries and then the keys of every packed cell; a sample without cells sees
    zeros. Softmax is in float32 at least. The gradient cannot be differentiated again.
    """
    mix: Tensor = _Seen.apply(cells, both, tuple(counts), heads, scale)
    return mix


class _Seen(torch.autograd.Function):
    """Scores, shares and the mix of each sample in turn, and their gradient.

    There are few calls a sample: on a few cells a call takes longer than its work.
    """

    @staticmethod
    def forward(
        ctx: Any, cells: Tensor, both: Tensor, counts: tuple[int, ...], heads: int, scale: float
    ) -> Tensor:
        precise = torch.promote_types(both.dtype, torch.float32)
        mix = cells.new_empty(len(counts), heads, cells.shape[1])
        weights, shares = [], []
        for row, (x, (query, key)) in enumerate(_samples(cells, both, counts, heads)):
            scores = torch.bmm(query, key.mT)
            each = torch.softmax(scores.to(precise).mul_(scale), dim=-1)
            taken = each.sum(dim=1).to(x.dtype)
            torch.mm(taken, x, out=mix[row])
            weights.append(each)
            shares.append(taken)
        ctx.save_for_backward(cells, both, *weights, *shares)
        ctx.numbers = counts, heads, scale
        return mix

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, ...]:
        cells, both, *saved = ctx.saved_tensors
        counts, heads, scale = ctx.numbers
        of_cells, of_both = torch.empty_like(cells), torch.empty_like(both)
        parts = _samples(cells, both, counts, heads)
        outs = _samples(of_cells, of_both, counts, heads)
        weights, shares = saved[: len(counts)], saved[len(counts) :]
        for (x, (query, key)), (to_x, (to_query, to_key)), each, taken, mixed in zip(
            parts, outs, weights, shares, above, strict=True
        ):
            torch.mm(taken.mT, mixed, out=to_x)
            of_share = torch.mm(mixed, x.mT).to(each.dtype)  # the same for all who look
            own = torch.bmm(each, of_share[:, :, None])
            of_score = (of_share[:, None] - own).mul_(each).to(both.dtype)
            to_query.copy_(torch.bmm(of_score, key))
            to_key.copy_(torch.bmm(of_score.mT, query))
        return of_cells, of_both.mul_(scale), None, None, None


def _samples(
    cells: Tensor, both: Tensor, counts: tuple[int, ...], heads: int
) -> list[tuple[Tensor, tuple[Tensor, Tensor]]]:
    """The cells of each sample, and its queries and keys a head; all are views."""
    queries, keys = both.unflatten(1, (2, heads, -1)).permute(1, 2, 0, 3)
    pairs = zip(queries.split(counts, dim=1), keys.split(counts, dim=1), strict=True)
    return list(zip(cells.split(counts), pairs, strict=True))
