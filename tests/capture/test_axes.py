"""Whatever stands in front, four axes come out."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from overt.capture import watch
from overt.capture.axes import num_heads_of, to_bhnm


class Folded(nn.Module):
    """SDPA over whatever comes in."""

    num_heads = 4

    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((3, 6, 5), (3, 1, 6, 6)),
        ((2, 4, 3, 6, 5), (6, 4, 6, 6)),  # windows behind the heads
        ((2, 3, 4, 6, 5), (6, 4, 6, 6)),  # windows before them
    ],
)
def test_sdpa_of_other_shapes(shape, expected):
    torch.manual_seed(0)
    model, x = Folded(), torch.randn(shape)
    with watch(model) as trace:
        plain = model(x)
    assert trace.calls[0].shape == expected
    weights = (x @ x.transpose(-1, -2) / 5**0.5).softmax(-1)
    torch.testing.assert_close(trace.map().weights[:, 0], to_bhnm(weights, 4))
    with watch(model, edit=lambda call, weights: weights):
        torch.testing.assert_close(model(x), plain)


def test_numbers_of_heads():
    assert num_heads_of(Folded()) == 4
    assert num_heads_of(nn.Identity()) == 1
    named = nn.Identity()
    named.nhead = 3
    assert num_heads_of(named) == 3
    with pytest.raises(ValueError, match=r"batch.*\(2, 2\)"):
        to_bhnm(torch.zeros(2, 2), 1)
