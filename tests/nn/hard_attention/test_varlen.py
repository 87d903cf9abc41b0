"""Attention over samples of unequal length, compared with one sample at a time by autograd."""

import pytest
import torch
from torch import Tensor

from overt.nn.hard_attention import aggregate
from overt.nn.hard_attention.aggregate import NonLocalAggregation
from overt.nn.hard_attention.selection import PackedCells
from overt.nn.hard_attention.varlen import summed_attention

COUNTS = (3, 0, 1, 5)


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(0)
    cells, both = (torch.randn(9, wide, generator=dice, dtype=dtype) for wide in (4, 12))
    return cells.requires_grad_(), both.requires_grad_()


def slow(cells: Tensor, both: Tensor, heads: int, scale: float) -> Tensor:
    """Compute equation 7 per sample and head, without its value projection."""
    found = []
    for x, one in zip(cells.split(COUNTS), both.split(COUNTS), strict=True):
        query, key = (part.unflatten(1, (heads, -1)) for part in one.chunk(2, dim=1))
        for head in range(heads):
            weights = (scale * query[:, head] @ key[:, head].mT).softmax(dim=-1)
            found.append((weights @ x).sum(dim=0))
    return torch.stack(found).unflatten(0, (len(COUNTS), heads))


def test_summed_attention_follows_equation_7_with_zeros_for_empty_samples() -> None:
    cells, both = inputs()
    found = summed_attention(cells, both, COUNTS, heads=2, scale=0.7)
    torch.testing.assert_close(found, slow(cells, both, 2, 0.7))
    assert not found[1].any()


def test_gradient_follows_equation_7() -> None:
    cells, both = inputs()
    for_found, for_slow = (
        torch.autograd.grad(one.square().sum(), (cells, both))
        for one in (summed_attention(cells, both, COUNTS, 2, 0.7), slow(cells, both, 2, 0.7))
    )
    torch.testing.assert_close(for_found, for_slow)

    def called(x: Tensor, y: Tensor) -> Tensor:
        return summed_attention(x, y, COUNTS, 3, 1.0)

    assert torch.autograd.gradcheck(called, (cells, both))


def test_double_backward_raises() -> None:
    cells, both = inputs()
    total = summed_attention(cells, both, COUNTS, 2, 0.7).square().sum()
    (once,) = torch.autograd.grad(total, cells, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        once.sum().backward()


def test_large_scores_are_finite_and_half_precision_is_close() -> None:
    cells, both = inputs(torch.float32)
    wide = summed_attention(cells, both, COUNTS, 2, 300.0)
    assert wide.isfinite().all()
    half = summed_attention(cells.bfloat16(), both.bfloat16(), COUNTS, 2, 0.7)
    assert half.dtype is torch.bfloat16
    near = summed_attention(cells, both, COUNTS, 2, 0.7)
    torch.testing.assert_close(half.float(), near, rtol=0.05, atol=0.05)


def test_padded_and_packed_aggregation_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path for samples of many cells on a CPU equals the path of all others."""
    torch.manual_seed(0)
    monkeypatch.setattr(aggregate, "MIN_MEAN_CELLS", 0)
    module, asked = NonLocalAggregation(4, size=6).double(), torch.zeros(4, 1, dtype=torch.float64)
    cells, _ = inputs()
    kept = PackedCells(cells, COUNTS)
    found = module(kept, asked)
    ours = torch.autograd.grad(found.square().sum(), (cells, *module.parameters()))
    for spare in (-1.0, 1e9):
        monkeypatch.setattr(aggregate, "MAX_PADDING", spare)
        other = module.forward_padded(kept)
        torch.testing.assert_close(found, other)
        theirs = torch.autograd.grad(other.square().sum(), (cells, *module.parameters()))
        torch.testing.assert_close(ours, theirs)
