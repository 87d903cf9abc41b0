"""Compare the Triton kernels of hard attention with PyTorch, interpreted or on a GPU."""

import pytest
import torch
from torch import Tensor

from overt.nn.hard_attention import selection, triton_launch
from overt.nn.hard_attention.aggregate import NonLocalAggregation
from overt.nn.hard_attention.selection import CellsInPlace, PaddedCells

pytestmark = pytest.mark.skipif(
    not triton_launch.triton_installed()
    or not (triton_launch.INTERPRETED or torch.cuda.is_available()),
    reason="needs a GPU with Triton, or TRITON_INTERPRET=1",
)
DEVICE = "cpu" if triton_launch.INTERPRETED else "cuda"
# on a GPU float32 products use TF32, which has as few digits as float16
TOLERANCE = {torch.float32: 2e-6 if DEVICE == "cpu" else 5e-3, torch.float16: 5e-3}
SIZES = {  # samples, cells, features, features of all heads, heads
    "one piece": (3, 20, 24, 32, 2),
    "several pieces": (2, 70, 40, 48, 3),
    "one head, many features": (4, 9, 150, 64, 1),
}


@pytest.fixture(autouse=True)
def tf32_products():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def plain(monkeypatch):
    """Run the same function without kernels."""

    def run(function, *given):
        with monkeypatch.context() as patched:
            patched.setattr(triton_launch, "triton_installed", lambda: False)
            return function(*given)

    return run


def scores(samples: int, cells: int) -> Tensor:
    """Scores with ties, absent cells, infinity and NaN."""
    torch.manual_seed(0)
    found = torch.randn(samples, cells).round(decimals=1)
    found[0] = -torch.inf
    found[1, : cells // 2] = -torch.inf
    found[-1, 0], found[-1, 1] = torch.inf, torch.nan
    return found.to(DEVICE)


@pytest.mark.parametrize("cells", [2, 7, 64, 196])
def test_top_cells_equal_those_of_a_sort(cells, plain):
    some = scores(5, cells)
    for count in (1, cells // 2 + 1, cells):
        asked = torch.full((5, 1), count, device=DEVICE)
        assert triton_launch.supports_scores(some)
        assert torch.equal(triton_launch.top_cells(some, asked), plain(selection._top, some, asked))
    each = torch.tensor([[3], [0], [1], [cells], [2]], device=DEVICE)
    assert torch.equal(triton_launch.top_cells(some, each), plain(selection._top, some, each))
    turned = some.mT.contiguous().mT
    assert torch.equal(triton_launch.top_cells(turned, each), triton_launch.top_cells(some, each))


@pytest.mark.parametrize("cells", [2, 7, 64, 196])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 30.0])
def test_cells_above_uniform_follow_equation_6(cells, temperature, plain):
    some = scores(5, cells)
    some[2] = 1.25  # with equal scores the first cell is kept
    found = selection.keep_above_uniform(some, temperature)
    assert torch.equal(found, plain(selection.keep_above_uniform, some, temperature))
    assert found[2].nonzero().tolist() == [[0]]
    assert not found[0].any()


def test_gathered_cells_keep_their_order(plain):
    kept = torch.rand(4, 30, generator=torch.Generator().manual_seed(0)).to(DEVICE) > 0.6
    kept[0], kept[1] = False, True
    cells = torch.randn(4, 30, 5, device=DEVICE)
    for count in (1, 12, 30):
        found = selection._gather_first(cells, kept, count)
        assert torch.equal(found, plain(selection._gather_first, cells, kept, count))


def attention_inputs(size: str, kind: torch.dtype) -> tuple[Tensor, Tensor, Tensor, int]:
    samples, cells, wide, inner, heads = SIZES[size]
    torch.manual_seed(0)
    x = torch.randn(samples, cells, wide, device=DEVICE).to(kind).requires_grad_()
    layer = (torch.randn(2 * inner, wide, device=DEVICE) * wide**-0.5).to(kind).requires_grad_()
    kept = torch.rand(samples, cells, device=DEVICE) > 0.5
    kept[0], kept[1] = False, True
    return x, layer, kept, heads


def equation(x: Tensor, layer: Tensor, kept: Tensor, heads: int, scale: float) -> Tensor:
    """Equation 7 without its value projection, one sample at a time, in float64."""
    found = []
    for one, some in zip(x.double(), kept, strict=True):
        here = one[some]
        query, key = (here @ layer.double().mT).unflatten(1, (2, heads, -1)).permute(1, 2, 0, 3)
        found.append((query @ key.mT * scale).softmax(dim=-1).sum(dim=1) @ here)
    return torch.stack(found)


@pytest.mark.parametrize("kind", TOLERANCE, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_summed_attention_and_its_gradient_follow_equation_7(size, kind):
    x, layer, kept, heads = attention_inputs(size, kind)
    assert triton_launch.supports_attention(x, layer, heads)
    made = triton_launch.summed_attention(x, kept, layer, heads, 0.3)
    expected = equation(x, layer, kept, heads, 0.3)
    assert made.dtype == kind and not made[0].any()
    pull = torch.randn(made.shape, device=DEVICE)
    slopes = torch.autograd.grad(made, (x, layer), pull.to(kind))
    wanted = torch.autograd.grad(expected, (x, layer), pull.to(kind).double())
    for found, want in ((made, expected), *zip(slopes, wanted, strict=True)):
        near = TOLERANCE[kind] * float(want.abs().max())
        torch.testing.assert_close(found.double(), want.double(), rtol=0, atol=near)
    assert not slopes[0][~kept].any()


def test_samples_without_kept_cells_give_zeros():
    x, layer, kept, heads = attention_inputs("one piece", torch.float32)
    made = triton_launch.summed_attention(x, torch.zeros_like(kept), layer, heads, 0.3)
    slopes = torch.autograd.grad(made.sum(), (x, layer))
    assert not made.any() and not any(one.any() for one in slopes)


def test_only_required_gradients_are_computed():
    x, layer, kept, heads = attention_inputs("one piece", torch.float32)
    (both,) = torch.autograd.grad(
        triton_launch.summed_attention(x, kept, layer, heads, 0.3).sum(), x
    )
    (one,) = torch.autograd.grad(
        triton_launch.summed_attention(x, kept, layer.detach(), heads, 0.3).sum(), x
    )
    (other,) = torch.autograd.grad(
        triton_launch.summed_attention(x.detach(), kept, layer, heads, 0.3).sum(), layer
    )
    assert torch.equal(both, one) and other.shape == layer.shape


def test_cells_in_place_and_padded_cells_agree():
    torch.manual_seed(0)
    module = NonLocalAggregation(24, 32).to(DEVICE)
    cells = torch.randn(5, 20, 24, device=DEVICE, requires_grad=True)
    kept = torch.rand(5, 20, device=DEVICE) > 0.5
    question = torch.randn(5, 3, device=DEVICE)
    ways = CellsInPlace(cells, kept), PaddedCells(cells, kept.to(cells.dtype))
    parameters = list(module.parameters())
    first, second = (
        (found, *torch.autograd.grad(found.square().sum(), (cells, *parameters)))
        for found in (module(way, question) for way in ways)
    )
    for one, two in zip(first, second, strict=True):
        near = TOLERANCE[torch.float32] * 4 * float(two.abs().max())
        torch.testing.assert_close(one, two, rtol=0, atol=near)


def test_autocast_sets_the_dtype_of_products():
    kind = torch.float16 if DEVICE == "cpu" else torch.bfloat16
    x, layer, kept, heads = attention_inputs("one piece", torch.float32)
    with torch.autocast(DEVICE, kind):
        assert triton_launch.supports_attention(x, layer, heads)
        made = triton_launch.summed_attention(x, kept, layer, heads, 0.3)
    assert made.dtype == kind
    slopes = torch.autograd.grad(made.float().sum(), (x, layer))
    assert all(one.dtype == torch.float32 for one in slopes)
    expected = equation(x, layer, kept, heads, 0.3)
    torch.testing.assert_close(made.double(), expected, rtol=2e-2, atol=2e-2)
