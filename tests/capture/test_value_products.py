"""Weights become (b, h, q, k) from any product, with their logits, and go back."""

import pytest
import torch
from torch import nn

from overt.capture import watch


class Merged(nn.Module):
    """One key for all heads, queries and heads in one axis, in either order."""

    def __init__(self, heads_behind):
        super().__init__()
        self.query, self.key, self.heads_behind = nn.Linear(8, 12), nn.Linear(8, 4), heads_behind

    def forward(self, x):
        b, n, _ = x.shape
        query, key = self.query(x).view(b, n, 3, 4), self.key(x)
        if not self.heads_behind:
            query = query.transpose(1, 2)
        weights = (query.reshape(b, 3 * n, 4) @ key.mT).view(*query.shape[:3], n).softmax(-1)
        return weights.view(b, 3 * n, n) @ key


@pytest.mark.parametrize("behind", [True, False])
def test_rows_that_are_merged_with_heads(behind):
    torch.manual_seed(0)
    model, x = Merged(behind), torch.randn(2, 5, 8)
    with watch(model) as trace:
        out = model(x)
    query = model.query(x).view(2, 5, 3, 4).transpose(1, 2)
    expected = (query @ model.key(x)[:, None].mT).softmax(-1)
    (call,) = trace.calls
    torch.testing.assert_close(call.weights(), expected)
    torch.testing.assert_close(call.log_weights().exp(), expected)
    with watch(model, edit=lambda call, weights: weights):
        torch.testing.assert_close(model(x), out)


class Unfolded(nn.Module):
    """A softmax over (b h, q, k), whose result is taken apart before the product."""

    def __init__(self):
        super().__init__()
        self.query = nn.Linear(8, 8)

    def forward(self, x):
        heads = self.query(x).unflatten(-1, (2, 4)).transpose(1, 2)
        folded = heads.reshape(-1, *heads.shape[2:])
        weights = (folded @ folded.mT).softmax(-1).view(*heads.shape[:2], x.shape[1], x.shape[1])
        return torch.einsum("bhij,bhjd->bihd", weights, heads)


def test_logits_follow_weights_that_are_in_other_groups():
    torch.manual_seed(0)
    model, x = Unfolded(), torch.randn(2, 5, 8)
    with watch(model) as trace:
        model(x)
    heads = model.query(x).unflatten(-1, (2, 4)).transpose(1, 2)
    (call,) = trace.calls
    torch.testing.assert_close(call.weights(), (heads @ heads.mT).softmax(-1))
    torch.testing.assert_close(call.scores(), heads @ heads.mT)


class InHalves(nn.Module):
    """Heads that meet the values half by half."""

    def forward(self, x):
        heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
        weights = (heads @ heads.mT).softmax(-1)
        return torch.cat([weights[:, :1] @ heads[:, :1], weights[:, 1:] @ heads[:, 1:]], dim=1)


class SomeRows(nn.Module):
    def forward(self, x):
        weights = (x @ x.mT).softmax(-1)
        return weights[:, 2:] @ x


@pytest.mark.parametrize("kind", [InHalves, SomeRows])
def test_parts_of_the_weights_are_refused(kind):
    with (
        pytest.raises(NotImplementedError, match=f"{kind.__name__} multiplies"),
        watch(model := kind()),
    ):
        model(torch.randn(2, 5, 8))


class Shared(nn.Module):
    """The same weights for all samples."""

    def __init__(self):
        super().__init__()
        self.scores = nn.Parameter(torch.randn(1, 3, 5, 5))

    def forward(self, x):
        return self.scores.softmax(-1) @ x.unflatten(-1, (3, 4)).transpose(1, 2)


def test_weights_that_samples_share_have_their_batch():
    model, x = Shared(), torch.randn(2, 5, 12)
    with watch(model) as trace:
        model(x)
    assert trace.calls[0].shape == (2, 3, 5, 5)
    torch.testing.assert_close(trace.calls[0].weights()[1:], model.scores.softmax(-1))
