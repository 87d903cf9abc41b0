"""Small models that attend in every way PyTorch knows, and an oracle that multiplies by hand."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class FusedAttention(nn.Module):
    """Multi-head self-attention through SDPA, with fewer key heads than query heads if asked."""

    def __init__(self, width: int = 16, heads: int = 4, groups: int = 4, causal: bool = False):
        super().__init__()
        self.heads, self.groups, self.causal = heads, groups, causal
        size = width // heads
        self.query = nn.Linear(width, heads * size)
        self.key = nn.Linear(width, groups * size)
        self.value = nn.Linear(width, groups * size)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (count, -1)).transpose(1, 2)
            for part, count in (
                (self.query, self.heads),
                (self.key, self.groups),
                (self.value, self.groups),
            )
        )
        out = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=self.causal, enable_gqa=self.groups != self.heads
        )
        return out.transpose(1, 2).flatten(2)


class WrittenAttention(FusedAttention):
    """The same, written out, with dropout on the weights."""

    def __init__(self, width: int = 16, heads: int = 4, rate: float = 0.0):
        super().__init__(width, heads, heads)
        self.rate = rate
        self.last: Tensor | None = None

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
        weights = scores.softmax(-1)
        self.last = weights
        weights = F.dropout(weights, self.rate, self.training)
        return (weights @ v).transpose(1, 2).flatten(2)


class Stack(nn.Module):
    """Layers one after the other, each added to what came in."""

    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, mask)
        return x


def oracle(layer: FusedAttention, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """The weights of one layer in float64, score by score."""
    b, n, _ = x.shape
    x = x.double()
    q = x @ layer.query.weight.double().T + layer.query.bias.double()
    k = x @ layer.key.weight.double().T + layer.key.bias.double()
    size = q.shape[-1] // layer.heads
    weights = torch.zeros(b, layer.heads, n, n, dtype=torch.float64)
    for sample in range(b):
        for head in range(layer.heads):
            group = head // (layer.heads // layer.groups)
            for i in range(n):
                row = torch.full((n,), -math.inf, dtype=torch.float64)
                for j in range(n):
                    if layer.causal and j > i:
                        continue
                    if mask is not None and not bool(mask.expand(b, 1, n, n)[sample, 0, i, j]):
                        continue
                    at = q[sample, i, head * size : (head + 1) * size]
                    to = k[sample, j, group * size : (group + 1) * size]
                    row[j] = at @ to / math.sqrt(size)
                if bool((row > -math.inf).any()):
                    weights[sample, head, i] = row.softmax(0)
    return weights
