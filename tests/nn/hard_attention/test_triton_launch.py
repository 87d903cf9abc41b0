"""Triton launch: which inputs the kernels support, and their gradient in PyTorch operations.

`test_triton_kernels` compares the kernels themselves with PyTorch.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from overt.nn.hard_attention import triton_launch
from tests.nn.hard_attention import slow

HEADS, SCALE = 2, 0.7


@pytest.fixture
def reference_kernels() -> Iterator[None]:
    """Replace the kernels, which have no float64, by PyTorch operations."""
    with (
        patch.object(triton_launch, "_AttentionLaunch", slow.AttentionLaunch),
        patch.object(triton_launch, "list_kept", slow.list_kept),
    ):
        yield


def make_inputs() -> tuple[Tensor, Tensor, Tensor]:
    dice = torch.Generator().manual_seed(0)
    cells, layer = (
        torch.randn(shape, generator=dice, dtype=torch.float64).requires_grad_()
        for shape in ((3, 5, 4), (12, 4))
    )
    kept = torch.rand(3, 5, generator=dice) > 0.4
    kept[1] = False
    return cells, layer, kept


def equation(cells: Tensor, layer: Tensor, kept: Tensor) -> Tensor:
    """Equation 7 without its value projection, with a mask."""
    query, key = (cells @ layer.mT).unflatten(2, (2, HEADS, -1)).permute(2, 0, 3, 1, 4)
    scores = (query @ key.mT * SCALE).masked_fill(~kept[:, None, None], -1e9)
    looks = scores.softmax(dim=-1) * kept[:, None, :, None] * kept[:, None, None]
    return looks.sum(dim=2) @ cells


def test_summed_attention_and_its_gradient_follow_equation_7(reference_kernels: None) -> None:
    cells, layer, kept = make_inputs()
    found = triton_launch.summed_attention(cells, kept, layer, HEADS, SCALE)
    expected = equation(cells, layer, kept)
    torch.testing.assert_close(found, expected)
    assert not found[1].any(), "a sample without kept cells gives zeros"
    pull = torch.randn(found.shape, dtype=torch.float64)
    for one, two in zip(
        torch.autograd.grad(found, (cells, layer), pull),
        torch.autograd.grad(expected, (cells, layer), pull),
        strict=True,
    ):
        torch.testing.assert_close(one, two)


def test_only_required_gradients_are_computed(reference_kernels: None) -> None:
    cells, layer, kept = make_inputs()
    with patch.object(slow.AttentionLaunch, "of_cells", side_effect=AssertionError):
        triton_launch.summed_attention(cells.detach(), kept, layer, HEADS, SCALE).sum().backward()
    with patch.object(slow.AttentionLaunch, "of_weight", side_effect=AssertionError):
        triton_launch.summed_attention(cells, kept, layer.detach(), HEADS, SCALE).sum().backward()
    assert layer.grad is not None and cells.grad is not None


def test_double_backward_raises(reference_kernels: None) -> None:
    cells, layer, kept = make_inputs()
    total = triton_launch.summed_attention(cells, kept, layer, HEADS, SCALE).square().sum()
    (once,) = torch.autograd.grad(total, cells, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        once.sum().backward()


def test_kernels_are_not_used_on_a_cpu() -> None:
    if triton_launch.INTERPRETED:
        pytest.skip("TRITON_INTERPRET=1 enables the kernels on a CPU")
    cells, layer, kept = make_inputs()
    assert not triton_launch.supports_scores(cells[..., 0].float())
    assert not triton_launch.supports_mask(kept)
    assert not triton_launch.supports_attention(cells.float(), layer.float(), HEADS)


@pytest.fixture
def triton_everywhere() -> Iterator[None]:
    """Pretend that Triton is installed and every tensor is on a GPU."""
    with patch.object(triton_launch, "_triton_runs_on", lambda tensor: tensor.numel() > 0):
        yield


def test_inputs_too_large_for_the_kernels_are_not_supported(triton_everywhere: None) -> None:
    few, many = torch.zeros(2, triton_launch.MAX_CELLS), torch.zeros(2, triton_launch.MAX_CELLS + 1)
    assert triton_launch.supports_scores(few) and not triton_launch.supports_scores(many)
    assert triton_launch.supports_mask(few > 0) and not triton_launch.supports_mask(many > 0)
    assert not triton_launch.supports_scores(few.double()), "float64 scores would be rounded"
    assert not triton_launch.supports_scores(few[:0])


def test_float32_products_use_tf32_only_where_torch_allows_it(triton_everywhere: None) -> None:
    cells, layer = torch.zeros(2, 5, 4), torch.zeros(8, 4)
    before = torch.get_float32_matmul_precision()
    try:
        for precision, fits in (
            ("highest", triton_launch.INTERPRETED),
            ("high", True),
            ("medium", True),
        ):
            torch.set_float32_matmul_precision(precision)
            assert triton_launch.supports_attention(cells, layer, 2) is fits
            assert triton_launch.supports_attention(cells.bfloat16(), layer, 2)
        assert not triton_launch.supports_attention(cells.double(), layer.double(), 2)
        wide = torch.zeros(4 * triton_launch.MAX_HEAD_WIDTH + 4, 4)
        assert triton_launch.supports_attention(
            cells, wide[:-4], 2
        ) and not triton_launch.supports_attention(cells, wide, 2)
        assert not triton_launch.supports_attention(
            torch.zeros(1, 2, triton_launch.MAX_FEATURES + 1),
            torch.zeros(8, triton_launch.MAX_FEATURES + 1),
            2,
        )
        assert not triton_launch.supports_attention(
            torch.zeros(1, triton_launch.MAX_CELLS + 1, 4), layer, 2
        )
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(("bytes_", "fits"), [(232_448, True), (166_912, True), (101_376, False)])
def test_kernels_need_enough_shared_memory(bytes_: int, fits: bool) -> None:
    triton_launch._has_shared_memory.cache_clear()
    known = SimpleNamespace(shared_memory_per_block_optin=bytes_)
    with patch.object(torch.cuda, "get_device_properties", lambda device: known):
        assert triton_launch._has_shared_memory(torch.device("cuda", 0)) is fits
    triton_launch._has_shared_memory.cache_clear()


def test_autocast_sets_the_dtype_of_products(triton_everywhere: None) -> None:
    cells, layer = torch.zeros(2, 5, 4), torch.zeros(8, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert triton_launch._format(cells) == torch.bfloat16
        assert triton_launch.supports_attention(cells, layer, 2)
    assert triton_launch._format(cells) == torch.float32


@pytest.mark.parametrize("size", [1, 2, 3, 12, 16, 17, 196])
def test_sizes_are_rounded_up_to_a_power_of_two(size: int) -> None:
    found = triton_launch._next_power_of_two(size)
    assert found >= size and found & (found - 1) == 0 and found < 2 * size
