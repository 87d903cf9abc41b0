"""Attention inside a custom autograd function can be read, and has no gradient without a word."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from overt.capture import watch


class Kernel(torch.autograd.Function):
    """Attention with a backward pass of its own, in one of two ways."""

    @staticmethod
    def forward(ctx, query, key, fused):
        ctx.save_for_backward(query, key)
        if fused:
            return F.scaled_dot_product_attention(query, key, key, scale=1.0)
        return (query @ key.mT).softmax(-1) @ key

    @staticmethod
    def backward(ctx, gradient):
        return gradient, gradient, None


class KernelAttention(nn.Module):
    def __init__(self, fused):
        super().__init__()
        self.query, self.fused = nn.Linear(8, 8), fused

    def forward(self, x):
        return Kernel.apply(self.query(x)[:, None], x[:, None], self.fused)


@pytest.mark.parametrize("fused", [True, False])
def test_a_gradient_through_a_custom_function_is_an_error_that_names_the_module(fused):
    torch.manual_seed(0)
    model, x = KernelAttention(fused), torch.randn(2, 5, 8)
    with watch(model) as trace:
        out = model(x)
    expected = (model.query(x) @ x.mT).softmax(-1)
    torch.testing.assert_close(trace.map().weights[:, 0, 0], expected)
    out.sum().backward()
    every = torch.arange(5).repeat(2, 1)
    for read in (
        lambda: trace.map().weights,
        lambda: trace.block(every, every).weights,
        lambda: trace.log_block(every, every).values,
    ):
        with pytest.raises(RuntimeError, match=r"KernelAttention.* Kernel"):
            read()[..., 0].sum().backward()


@pytest.mark.parametrize("fused", [True, False])
def test_without_anything_that_learns_nothing_is_sealed(fused):
    model, x = KernelAttention(fused).requires_grad_(False), torch.randn(2, 5, 8)
    with watch(model) as trace:
        model(x)
    assert not trace.map().weights.requires_grad
    model.requires_grad_(True)
    with watch(model) as trace, torch.no_grad():
        model(x)
    trace.map().weights.numpy()
