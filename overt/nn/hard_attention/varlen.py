"""Non-local operator over samples with different numbers of kept cells, without padding, on CPU.

On a CPU, padding costs as much as the work on the cells: a loop over samples with a written-out
gradient is faster. On a GPU the loop would launch many small kernels per sample; `triton_launch`
has kernels for all samples at once.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable


def summed_attention(
    cells: Float[Tensor, "n c"],
    both: Float[Tensor, "n s"],
    counts: Sequence[int],
    heads: int,
    scale: float,
) -> Float[Tensor, "b h c"]:
    """Mix the cells by the attention they receive from all cells of their sample (eq. 7).

    Values are not projected yet. The softmax is in float32 or better. No double backward.

    Args:
        cells: packed cells.
        both: queries, then keys, of every packed cell.
        counts: cells per sample; a sample without cells gives zeros.
        heads: number of heads.
        scale: factor on the scores.
    """
    mix: Tensor = _SummedAttention.apply(cells, both, tuple(counts), heads, scale)
    return mix


class _SummedAttention(torch.autograd.Function):
    """Loop over samples: scores, softmax and mixture, with their gradient.

    There are few calls per sample, because on a few cells the overhead of a call exceeds its work.
    """

    @staticmethod
    def forward(
        ctx: Any, cells: Tensor, both: Tensor, counts: tuple[int, ...], heads: int, scale: float
    ) -> Tensor:
        precise = torch.promote_types(both.dtype, torch.float32)
        mix = cells.new_empty(len(counts), heads, cells.shape[1])
        weights, shares = [], []
        for row, (x, (query, key)) in enumerate(_split_samples(cells, both, counts, heads)):
            scores = torch.bmm(query, key.mT)
            # in place: `to` has made a copy, or `scores` is not needed again
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
        parts = _split_samples(cells, both, counts, heads)
        outs = _split_samples(of_cells, of_both, counts, heads)
        weights, shares = saved[: len(counts)], saved[len(counts) :]
        for (x, (query, key)), (to_x, (to_query, to_key)), each, taken, mixed in zip(
            parts, outs, weights, shares, above, strict=True
        ):
            torch.mm(taken.mT, mixed, out=to_x)
            # the output is a sum over queries, so each query gets the same upstream gradient per
            # key
            of_share = torch.mm(mixed, x.mT).to(each.dtype)  # the same for all queries
            own = torch.bmm(each, of_share[:, :, None])
            # gradient of the softmax: w (g - sum w g)
            of_score = (of_share[:, None] - own).mul_(each).to(both.dtype)
            to_query.copy_(torch.bmm(of_score, key))
            to_key.copy_(torch.bmm(of_score.mT, query))
        # the factor on the scores, applied once to all samples
        return of_cells, of_both.mul_(scale), None, None, None


def _split_samples(
    cells: Tensor, both: Tensor, counts: tuple[int, ...], heads: int
) -> list[tuple[Tensor, tuple[Tensor, Tensor]]]:
    """Return views of the cells, and of queries and keys per head, of each sample."""
    queries, keys = both.unflatten(1, (2, heads, -1)).permute(1, 2, 0, 3)
    pairs = zip(queries.split(counts, dim=1), keys.split(counts, dim=1), strict=True)
    return list(zip(cells.split(counts), pairs, strict=True))
