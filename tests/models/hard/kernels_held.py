"""The kernels of hard attention against plain operations: interpreted, or on a card itself."""

import pytest
import torch
from torch import Tensor

from overt.models.hard import card, selection
from overt.models.hard.aggregate import Pairwise
from overt.models.hard.selection import Kept, Standing

pytestmark = pytest.mark.skipif(
    not card.installed() or not (card.INTERPRETED or torch.cuda.is_available()),
    reason="no card with Triton here, nor TRITON_INTERPRET=1",
)
DEVICE = "cpu" if card.INTERPRETED else "cuda"
# on a card products of float32 are in TF32, which has as few digits as float16
NEAR = {torch.float32: 2e-6 if DEVICE == "cpu" else 5e-3, torch.float16: 5e-3}
SIZES = {  # samples, cells, features, features of all heads, heads
    "one piece": (3, 20, 24, 32, 2),
    "several pieces": (2, 70, 40, 48, 3),
    "one head, many features": (4, 9, 150, 64, 1),
}


@pytest.fixture(autouse=True)
def rounded():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def plain(monkeypatch):
    """The same function without kernels."""

    def run(function, *given):
        with monkeypatch.context() as patched:
            patched.setattr(card, "installed", lambda: False)
            return function(*given)

    return run


def scores(samples: int, cells: int) -> Tensor:
    """With equals among them, and cells that are not there."""
    torch.manual_seed(0)
    found = torch.randn(samples, cells).round(decimals=1)
    found[0] = -torch.inf
    found[1, : cells // 2] = -torch.inf
    found[-1, 0], found[-1, 1] = torch.inf, torch.nan
    return found.to(DEVICE)


@pytest.mark.parametrize("cells", [2, 7, 64, 196])
def test_cells_are_chosen_as_by_a_sort(cells, plain):
    some = scores(5, cells)
    for count in (1, cells // 2 + 1, cells):
        asked = torch.full((5, 1), count, device=DEVICE)
        assert card.can_choose(some)
        assert torch.equal(card.best(some, asked), plain(selection._best, some, asked))
    each = torch.tensor([[3], [0], [1], [cells], [2]], device=DEVICE)
    assert torch.equal(card.best(some, each), plain(selection._best, some, each))
    turned = some.mT.contiguous().mT
    assert torch.equal(card.best(turned, each), card.best(some, each))


@pytest.mark.parametrize("cells", [2, 7, 64, 196])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 30.0])
def test_cells_above_uniform_are_those_of_equation_6(cells, temperature, plain):
    some = scores(5, cells)
    some[2] = 1.25  # where all are equal the first is kept
    found = selection.keep_above_uniform(some, temperature)
    assert torch.equal(found, plain(selection.keep_above_uniform, some, temperature))
    assert found[2].nonzero().tolist() == [[0]]
    assert not found[0].any()


def test_kept_cells_come_first_in_their_order(plain):
    kept = torch.rand(4, 30, generator=torch.Generator().manual_seed(0)).to(DEVICE) > 0.6
    kept[0], kept[1] = False, True
    cells = torch.randn(4, 30, 5, device=DEVICE)
    for count in (1, 12, 30):
        found = selection._first(cells, kept, count)
        assert torch.equal(found, plain(selection._first, cells, kept, count))


def looked(size: str, kind: torch.dtype) -> tuple[Tensor, Tensor, Tensor, int]:
    samples, cells, wide, inner, heads = SIZES[size]
    torch.manual_seed(0)
    x = torch.randn(samples, cells, wide, device=DEVICE).to(kind).requires_grad_()
    layer = (torch.randn(2 * inner, wide, device=DEVICE) * wide**-0.5).to(kind).requires_grad_()
    kept = torch.rand(samples, cells, device=DEVICE) > 0.5
    kept[0], kept[1] = False, True
    return x, layer, kept, heads


def equation(x: Tensor, layer: Tensor, kept: Tensor, heads: int, scale: float) -> Tensor:
    """Equation 7 before its values, a sample at a time, in float64."""
    found = []
    for one, some in zip(x.double(), kept, strict=True):
        here = one[some]
        query, key = (here @ layer.double().mT).unflatten(1, (2, heads, -1)).permute(1, 2, 0, 3)
        found.append((query @ key.mT * scale).softmax(dim=-1).sum(dim=1) @ here)
    return torch.stack(found)


@pytest.mark.parametrize("kind", NEAR, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_what_cells_see_and_its_gradient_are_those_of_the_equation(size, kind):
    x, layer, kept, heads = looked(size, kind)
    assert card.can_look(x, layer, heads)
    made = card.seen_by_all(x, kept, layer, heads, 0.3)
    expected = equation(x, layer, kept, heads, 0.3)
    assert made.dtype == kind and not made[0].any()
    pull = torch.randn(made.shape, device=DEVICE)
    slopes = torch.autograd.grad(made, (x, layer), pull.to(kind))
    wanted = torch.autograd.grad(expected, (x, layer), pull.to(kind).double())
    for found, want in ((made, expected), *zip(slopes, wanted, strict=True)):
        near = NEAR[kind] * float(want.abs().max())
        torch.testing.assert_close(found.double(), want.double(), rtol=0, atol=near)
    assert not slopes[0][~kept].any()


def test_samples_that_keep_nothing_at_all():
    x, layer, kept, heads = looked("one piece", torch.float32)
    made = card.seen_by_all(x, torch.zeros_like(kept), layer, heads, 0.3)
    slopes = torch.autograd.grad(made.sum(), (x, layer))
    assert not made.any() and not any(one.any() for one in slopes)


def test_only_the_gradients_that_are_wanted_are_made():
    x, layer, kept, heads = looked("one piece", torch.float32)
    (both,) = torch.autograd.grad(card.seen_by_all(x, kept, layer, heads, 0.3).sum(), x)
    (one,) = torch.autograd.grad(card.seen_by_all(x, kept, layer.detach(), heads, 0.3).sum(), x)
    (other,) = torch.autograd.grad(
        card.seen_by_all(x.detach(), kept, layer, heads, 0.3).sum(), layer
    )
    assert torch.equal(both, one) and other.shape == layer.shape


def test_the_operator_over_standing_cells_is_that_over_gathered_ones():
    torch.manual_seed(0)
    module = Pairwise(24, 32).to(DEVICE)
    cells = torch.randn(5, 20, 24, device=DEVICE, requires_grad=True)
    kept = torch.rand(5, 20, device=DEVICE) > 0.5
    question = torch.randn(5, 3, device=DEVICE)
    ways = Standing(cells, kept), Kept(cells, kept.to(cells.dtype))
    parameters = list(module.parameters())
    first, second = (
        (found, *torch.autograd.grad(found.square().sum(), (cells, *parameters)))
        for found in (module(way, question) for way in ways)
    )
    for one, two in zip(first, second, strict=True):
        near = NEAR[torch.float32] * 4 * float(two.abs().max())
        torch.testing.assert_close(one, two, rtol=0, atol=near)


def test_under_autocast_products_are_in_its_format():
    kind = torch.float16 if DEVICE == "cpu" else torch.bfloat16
    x, layer, kept, heads = looked("one piece", torch.float32)
    with torch.autocast(DEVICE, kind):
        assert card.can_look(x, layer, heads)
        made = card.seen_by_all(x, kept, layer, heads, 0.3)
    assert made.dtype == kind
    slopes = torch.autograd.grad(made.float().sum(), (x, layer))
    assert all(one.dtype == torch.float32 for one in slopes)
    expected = equation(x, layer, kept, heads, 0.3)
    torch.testing.assert_close(made.double(), expected, rtol=2e-2, atol=2e-2)
