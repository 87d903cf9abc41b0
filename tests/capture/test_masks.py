"""Masks are recorded as the kernel reads them."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from overt.capture import watch


class MaskedAttention(nn.Module):
    """SDPA of one sequence over another, with whatever mask it is given."""

    def forward(self, query: Tensor, key: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, key, mask)


@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize("rows", [4, 6])
def test_a_causal_bias_hides_what_the_kernel_hides(make, rows):
    torch.manual_seed(0)
    query, key = torch.randn(2, 3, rows, 8), torch.randn(2, 3, 6, 8)
    model, mask = MaskedAttention(), make(rows, 6)
    with watch(model) as trace:
        out = model(query, key, mask)
    weights = trace.map().weights[:, 0]
    torch.testing.assert_close(weights @ key, out)
    hidden = ~mask._materialize()
    assert not weights[..., hidden].any()
    expected = (query @ key.mT / math.sqrt(8)).masked_fill(hidden, -torch.inf).softmax(-1)
    torch.testing.assert_close(weights, expected)
    with watch(model, edit=lambda call, weights: weights):
        torch.testing.assert_close(model(query, key, mask), out)


class OwnBias(Tensor):
    """A bias that tells SDPA something else than its values."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            return F.scaled_dot_product_attention(*args[:3], is_causal=True)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_mask_that_overrides_the_kernel_is_refused_by_the_name_of_its_module():
    x, mask = torch.randn(2, 3, 6, 8), torch.zeros(6, 6).as_subclass(OwnBias)
    with (
        pytest.raises(NotImplementedError, match=r"OwnBias.*MaskedAttention"),
        watch(model := MaskedAttention()),
    ):
        model(x, x, mask)


def test_autocast_rounds_a_float_mask_in_the_map_as_in_the_kernel():
    torch.manual_seed(0)
    x, mask = torch.randn(2, 3, 6, 8), 40 * torch.randn(6, 6)
    with watch(model := MaskedAttention()) as trace, torch.autocast("cpu", torch.bfloat16):
        model(x, x, mask)
    low = x.bfloat16().double()
    expected = (low @ low.mT / math.sqrt(8) + mask.bfloat16().double()).softmax(-1)
    torch.testing.assert_close(trace.map().weights[:, 0].double(), expected, rtol=0, atol=1e-5)
    with watch(model) as trace, torch.autocast("cpu", torch.bfloat16):
        model(x, x, mask > 0)
    assert trace.calls[0].source.allowed.dtype == torch.bool
