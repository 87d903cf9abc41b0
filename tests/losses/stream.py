"""A tiny single-stream Transformer over packed samples: regions directly after their text."""

import torch
from torch import Tensor, nn

from overt.attention import AttentionMap, Kind, Layout, Span, regions, words


class Layer(nn.Module):
    """Self-attention by the fused kernel with dropout and a residual connection."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        out = nn.functional.scaled_dot_product_attention(
            q, k, v, seen[:, None, None], self.dropout if self.training else 0.0
        )
        return x + out.transpose(1, 2).reshape(b, n, d)


class Stream(nn.Module):
    """Layers over a packed sequence."""

    def __init__(self, width: int = 8, heads: int = 2, layers: int = 3, dropout: float = 0.0):
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, heads, dropout) for _ in range(layers))

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, seen)
        return x


def pack_samples(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Layout]:
    """Pack (text, regions) of each sample into states, presence mask and layout."""
    n, m = max(len(t) for t, _ in samples), max(len(r) for _, r in samples)
    length = max(len(t) + len(r) for t, r in samples)
    x = samples[0][0].new_zeros(len(samples), length, samples[0][0].shape[-1])
    seen = torch.zeros(len(samples), length, dtype=torch.bool)
    text = torch.full((len(samples), n), -1)
    boxes = torch.full((len(samples), m), -1)
    for row, (t, r) in enumerate(samples):
        both = len(t) + len(r)
        x[row, :both] = torch.cat([t, r])
        seen[row, :both] = True
        text[row, : len(t)] = torch.arange(len(t))
        boxes[row, : len(r)] = torch.arange(len(t), both)
    spans = (Span("text", (n,), text), Span("regions", (m,), boxes))
    return x, seen, Layout(spans, length)


def make_target(links: list[dict[int, list[int]]], n: int, m: int) -> AttentionMap:
    """Make a target in which each linked token attends evenly to its regions."""
    wanted = torch.zeros(len(links), 1, 1, n, m, dtype=torch.float64)
    for row, link in enumerate(links):
        for token, found in link.items():
            wanted[row, 0, 0, token, found] = 1
    seen = wanted[:, 0, 0].any(dim=-1, keepdim=True).expand(-1, -1, m)
    return AttentionMap(wanted, regions(m), words(n), seen, Kind.AMOUNT).normalize()
