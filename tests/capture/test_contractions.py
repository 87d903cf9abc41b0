"""Which axes a product sums is read from the product."""

import pytest
import torch
from torch import Tensor

from overt.capture.contractions import PRODUCTS, find_contraction, split_operands

W, V = torch.zeros(2, 3, 4, 5), torch.zeros(2, 3, 5, 6)


@pytest.mark.parametrize("func", [torch.matmul, Tensor.__matmul__])
def test_matrix_products_with_weights_on_either_side(func):
    assert func in PRODUCTS
    found = find_contraction(func, None, (W, V), 0)
    assert (found.keys, found.rows, found.lead, found.beside) == (3, (2,), (0, 1), (0, 1))
    assert (found.summed, found.free, found.other) == (2, (3,), 1)
    found = find_contraction(func, None, (V.mT, W.mT), 1)
    assert (found.keys, found.rows, found.summed, found.free, found.other) == (2, (3,), 3, (2,), 0)


def test_values_without_leading_axes():
    found = find_contraction(torch.matmul, None, (W, V[0, 0]), 0)
    assert found.beside == (None, None) and found.summed == 0
    assert find_contraction(torch.matmul, None, (W, V[0, 0, :, 0]), 0) is None


@pytest.mark.parametrize(
    ("equation", "expected"),
    [
        ("bhqk,bhkd->bqhd", (3, (2,), (0, 1), (0, 1), 2, (3,))),
        ("...qk,...kd", (3, (2,), (0, 1), (0, 1), 2, (3,))),
        ("b h q k, b h k d -> b h q d", (3, (2,), (0, 1), (0, 1), 2, (3,))),
        ("bhqk,bhkd->bhqkd", None),
    ],
)
def test_letters(equation, expected):
    found = find_contraction(torch.einsum, equation, (W, V), 0)
    if expected is None:
        assert found is None
    else:
        made = found.keys, found.rows, found.lead, found.beside, found.summed, found.free
        assert made == expected


def test_rows_that_the_values_have_too_are_none():
    found = find_contraction(torch.einsum, "bne,bnef->bnf", (W[0], V[:, 0]), 0)
    assert found.rows == ()


def test_three_operands():
    found = find_contraction(torch.einsum, "bhqk,bhkd,hde->bqe", (W, V, torch.zeros(3, 6, 7)), 0)
    assert found.other == 1 and found.free == (3,) and found.rows == (2,)


def test_where_operands_begin():
    assert split_operands(torch.baddbmm, (1, 2, 3)) == (1, (1, 2, 3))
    assert split_operands(torch.einsum, ("ij,jk", [1, 2])) == (1, ("ij,jk", 1, 2))
    assert split_operands(torch.matmul, (1, 2)) == (0, (1, 2))
