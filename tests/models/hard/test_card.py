"""What kernels would be given on a card, and their gradient step by step in plain operations; the
kernels themselves are held to plain operations in `test_kernels`."""

from collections.abc import Iterator
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from overt.models.hard import card
from tests.models.hard import slow

HEADS, SCALE = 2, 0.7


@pytest.fixture
def stepwise() -> Iterator[None]:
    """Plain operations in the place of the kernels: those have no float64."""
    with patch.object(card, "_Look", slow.Look), patch.object(card, "listed", slow.listed):
        yield


def made() -> tuple[Tensor, Tensor, Tensor]:
    dice = torch.Generator().manual_seed(0)
    cells, layer = (
        torch.randn(shape, generator=dice, dtype=torch.float64).requires_grad_()
        for shape in ((3, 5, 4), (12, 4))
    )
    kept = torch.rand(3, 5, generator=dice) > 0.4
    kept[1] = False
    return cells, layer, kept


def equation(cells: Tensor, layer: Tensor, kept: Tensor) -> Tensor:
    """Equation 7 before its values, by a mask."""
    query, key = (cells @ layer.mT).unflatten(2, (2, HEADS, -1)).permute(2, 0, 3, 1, 4)
    scores = (query @ key.mT * SCALE).masked_fill(~kept[:, None, None], -1e9)
    looks = scores.softmax(dim=-1) * kept[:, None, :, None] * kept[:, None, None]
    return looks.sum(dim=2) @ cells


def test_it_is_the_equation_with_its_gradient(stepwise: None) -> None:
    cells, layer, kept = made()
    found = card.seen_by_all(cells, kept, layer, HEADS, SCALE)
    expected = equation(cells, layer, kept)
    torch.testing.assert_close(found, expected)
    assert not found[1].any(), "a sample that keeps nothing sees zeros"
    pull = torch.randn(found.shape, dtype=torch.float64)
    for one, two in zip(
        torch.autograd.grad(found, (cells, layer), pull),
        torch.autograd.grad(expected, (cells, layer), pull),
        strict=True,
    ):
        torch.testing.assert_close(one, two)


def test_only_the_gradients_that_are_wanted_are_made(stepwise: None) -> None:
    cells, layer, kept = made()
    with patch.object(slow.Look, "of_cells", side_effect=AssertionError):
        card.seen_by_all(cells.detach(), kept, layer, HEADS, SCALE).sum().backward()
    with patch.object(slow.Look, "of_weight", side_effect=AssertionError):
        card.seen_by_all(cells, kept, layer.detach(), HEADS, SCALE).sum().backward()
    assert layer.grad is not None and cells.grad is not None


def test_its_gradient_has_no_gradient(stepwise: None) -> None:
    cells, layer, kept = made()
    total = card.seen_by_all(cells, kept, layer, HEADS, SCALE).square().sum()
    (once,) = torch.autograd.grad(total, cells, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        once.sum().backward()


def test_on_a_cpu_plain_operations_are_taken() -> None:
    if card.INTERPRETED:
        pytest.skip("TRITON_INTERPRET=1 asks for the kernels on a CPU")
    cells, layer, kept = made()
    assert not card.can_choose(cells[..., 0].float())
    assert not card.can_list(kept)
    assert not card.can_look(cells.float(), layer.float(), HEADS)


@pytest.fixture
def there() -> Iterator[None]:
    """As if there were a Triton, and every tensor on a card."""
    with patch.object(card, "_reachable", lambda tensor: tensor.numel() > 0):
        yield


def test_what_is_too_large_for_a_kernel_is_left_to_plain_operations(there: None) -> None:
    few, many = torch.zeros(2, card.CELLS), torch.zeros(2, card.CELLS + 1)
    assert card.can_choose(few) and not card.can_choose(many)
    assert card.can_list(few > 0) and not card.can_list(many > 0)
    assert not card.can_choose(few.double()), "ranks of float64 would be rounded"
    assert not card.can_choose(few[:0])


def test_products_of_float32_are_in_tf32_only_where_torch_may(there: None) -> None:
    cells, layer = torch.zeros(2, 5, 4), torch.zeros(8, 4)
    before = torch.get_float32_matmul_precision()
    try:
        for precision, fits in (("highest", card.INTERPRETED), ("high", True), ("medium", True)):
            torch.set_float32_matmul_precision(precision)
            assert card.can_look(cells, layer, 2) is fits
            assert card.can_look(cells.bfloat16(), layer, 2)
        assert not card.can_look(cells.double(), layer.double(), 2)
        wide = torch.zeros(4 * card.WIDE + 4, 4)
        assert card.can_look(cells, wide[:-4], 2) and not card.can_look(cells, wide, 2)
        assert not card.can_look(torch.zeros(1, 2, card.CELL + 1), torch.zeros(8, card.CELL + 1), 2)
        assert not card.can_look(torch.zeros(1, card.CELLS + 1, 4), layer, 2)
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(("bytes_", "fits"), [(232_448, True), (166_912, True), (101_376, False)])
def test_a_card_without_room_for_the_pieces_is_left_to_plain_operations(
    bytes_: int, fits: bool
) -> None:
    card._roomy.cache_clear()
    known = SimpleNamespace(shared_memory_per_block_optin=bytes_)
    with patch.object(torch.cuda, "get_device_properties", lambda device: known):
        assert card._roomy(torch.device("cuda", 0)) is fits
    card._roomy.cache_clear()


def test_under_autocast_the_format_is_the_one_it_has(there: None) -> None:
    cells, layer = torch.zeros(2, 5, 4), torch.zeros(8, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert card._format(cells) == torch.bfloat16
        assert card.can_look(cells, layer, 2)
    assert card._format(cells) == torch.float32


@pytest.mark.parametrize("size", [1, 2, 3, 12, 16, 17, 196])
def test_sizes_go_up_to_a_power_of_two(size: int) -> None:
    found = card._power(size)
    assert found >= size and found & (found - 1) == 0 and found < 2 * size
