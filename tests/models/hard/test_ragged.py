"""The operator over unequal samples, against one sample at a time by autograd."""

import pytest
import torch
from torch import Tensor

from overt.models.hard import aggregate
from overt.models.hard.aggregate import Pairwise
from overt.models.hard.ragged import seen_by_all
from overt.models.hard.selection import Ragged

COUNTS = (3, 0, 1, 5)


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(0)
    cells, both = (torch.randn(9, wide, generator=dice, dtype=dtype) for wide in (4, 12))
    return cells.requires_grad_(), both.requires_grad_()


def slow(cells: Tensor, both: Tensor, heads: int, scale: float) -> Tensor:
    """Equation 7 a sample and a head at a time, without its values."""
    found = []
    for x, one in zip(cells.split(COUNTS), both.split(COUNTS), strict=True):
        query, key = (part.unflatten(1, (heads, -1)) for part in one.chunk(2, dim=1))
        for head in range(heads):
            weights = (scale * query[:, head] @ key[:, head].mT).softmax(dim=-1)
            found.append((weights @ x).sum(dim=0))
    return torch.stack(found).unflatten(0, (len(COUNTS), heads))


def test_it_is_the_equation_and_a_sample_without_cells_sees_nothing() -> None:
    cells, both = inputs()
    found = seen_by_all(cells, both, COUNTS, heads=2, scale=0.7)
    torch.testing.assert_close(found, slow(cells, both, 2, 0.7))
    assert not found[1].any()


def test_its_gradient_is_that_of_the_equation() -> None:
    cells, both = inputs()
    for_found, for_slow = (
        torch.autograd.grad(one.square().sum(), (cells, both))
        for one in (seen_by_all(cells, both, COUNTS, 2, 0.7), slow(cells, both, 2, 0.7))
    )
    torch.testing.assert_close(for_found, for_slow)

    def called(x: Tensor, y: Tensor) -> Tensor:
        return seen_by_all(x, y, COUNTS, 3, 1.0)

    assert torch.autograd.gradcheck(called, (cells, both))


def test_its_gradient_has_no_gradient() -> None:
    cells, both = inputs()
    total = seen_by_all(cells, both, COUNTS, 2, 0.7).square().sum()
    (once,) = torch.autograd.grad(total, cells, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        once.sum().backward()


def test_far_scores_and_half_precision_stay_near() -> None:
    cells, both = inputs(torch.float32)
    wide = seen_by_all(cells, both, COUNTS, 2, 300.0)
    assert wide.isfinite().all()
    half = seen_by_all(cells.bfloat16(), both.bfloat16(), COUNTS, 2, 0.7)
    assert half.dtype is torch.bfloat16
    near = seen_by_all(cells, both, COUNTS, 2, 0.7)
    torch.testing.assert_close(half.float(), near, rtol=0.05, atol=0.05)


def test_filled_up_and_not_filled_up_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """What samples of many cells get on a CPU, and what all others get."""
    torch.manual_seed(0)
    monkeypatch.setattr(aggregate, "FEW", 0)
    module, asked = Pairwise(4, size=6).double(), torch.zeros(4, 1, dtype=torch.float64)
    cells, _ = inputs()
    kept = Ragged(cells, COUNTS)
    found = module(kept, asked)
    ours = torch.autograd.grad(found.square().sum(), (cells, *module.parameters()))
    for spare in (-1.0, 1e9):
        monkeypatch.setattr(aggregate, "SPARE", spare)
        other = module.filled_up(kept)
        torch.testing.assert_close(found, other)
        theirs = torch.autograd.grad(other.square().sum(), (cells, *module.parameters()))
        torch.testing.assert_close(ours, theirs)
