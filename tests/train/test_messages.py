"""Messages: every value arrives as it was sent, and nothing else can be sent."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from overt.train.messages import decode, encode

SINGLE = some.none() | some.booleans() | some.integers() | some.text()
SINGLE |= some.floats(allow_nan=False)
NESTED = some.recursive(
    SINGLE,
    lambda inner: (
        some.lists(inner) | some.lists(inner).map(tuple) | some.dictionaries(some.text(), inner)
    ),
    max_leaves=10,
)


@given(value=NESTED)
def test_nested_values_arrive_unchanged(value: Any) -> None:
    assert repr(decode(encode(value))) == repr(value)  # repr tells -0.0 from 0, 1 from True


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_arrive_unchanged(dtype: torch.dtype) -> None:
    sent = torch.tensor([[0, 1, 2], [3, 0, 5]]).to(dtype)
    for one in (sent, sent.T, sent[:0], sent[0, 1]):
        found = decode(encode([one]))[0]
        assert found.dtype == dtype and found.shape == one.shape and torch.equal(found, one)


@pytest.mark.parametrize("dtype", ["f4", ">f8", "u1", "i8", "?"])
def test_arrays_arrive_unchanged(dtype: str) -> None:
    sent = np.array([[0, 1], [2, 3]]).astype(dtype)
    found = decode(encode({"a": sent, "b": (sent.T, sent[0, :0])}))
    np.testing.assert_array_equal(found["a"], sent)
    np.testing.assert_array_equal(found["b"][0], sent.T)
    assert found["b"][1].shape == (0,) and found["a"].dtype == np.dtype(dtype).newbyteorder("=")


def test_views_of_one_tensor_and_numbers_that_are_not_finite_arrive() -> None:
    whole = torch.arange(4.0, requires_grad=True)
    first, second, number, infinite = decode(encode([whole[:2], whole[1:], math.nan, -math.inf]))
    assert first.tolist() == [0, 1] and second.tolist() == [1, 2, 3] and not first.requires_grad
    assert math.isnan(number) and infinite == -math.inf


@pytest.mark.parametrize(
    "value", [{1: 2}, {"a": object()}, np.array(["a"]), np.array([None]), 1j, {"a"}]
)
def test_other_values_are_rejected(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot send"):
        encode([value])
