"""A small encoder in double precision that can attend by a fused kernel or written out."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overt.capture.session import watch
from overt.capture.trace import AttentionTrace


class SelfAttention(nn.Module):
    """Fused, or with its weights kept in `kept`; `groups` heads of keys and values."""

    def __init__(self, width: int, heads: int, groups: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.groups, self.causal = heads, groups, causal
        size = width // heads
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, groups * size)
        self.v = nn.Linear(width, groups * size)
        self.out_proj = nn.Linear(width, width)
        self.fused = True
        self.kept: Tensor | None = None

    def forward(self, x: Tensor, allowed: Tensor | None) -> Tensor:
        q, k, v = (
            proj(x).unflatten(-1, (n, -1)).transpose(1, 2)
            for proj, n in ((self.q, self.heads), (self.k, self.groups), (self.v, self.groups))
        )
        if self.fused:
            out = F.scaled_dot_product_attention(
                q, k, v, allowed, is_causal=self.causal, enable_gqa=self.groups != self.heads
            )
        else:
            times = self.heads // self.groups
            k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
            scores = q @ k.mT / q.shape[-1] ** 0.5
            if self.causal:
                scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
            if allowed is not None:
                scores = scores.masked_fill(~allowed, -torch.inf)
            self.kept = scores.softmax(-1)
            if self.kept.requires_grad:
                self.kept.retain_grad()
            out = torch.einsum("bhqk,bhkd->bhqd", self.kept, v)
        return self.out_proj(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, groups: int, causal: bool) -> None:
        super().__init__()
        self.attention = SelfAttention(width, heads, groups, causal)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x: Tensor, allowed: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.first(x), allowed)
        return x + self.mlp(self.second(x))


class Encoder(nn.Module):
    """Blocks, and three scores of the first position."""

    def __init__(
        self,
        layers: int = 3,
        width: int = 16,
        heads: int = 4,
        groups: int = 4,
        causal: bool = False,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, heads, groups, causal) for _ in range(layers))
        self.head = nn.Linear(width, 3)
        self.double().eval()
        with torch.no_grad():
            for block in self.blocks:  # sharper weights than a fresh model has
                block.attention.q.weight.mul_(6)

    def forward(self, x: Tensor, allowed: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x, allowed)
        return self.head(x[:, -1])

    def written(self) -> "Encoder":
        """The same encoder with its weights written out."""
        for block in self.blocks:
            block.attention.fused = False
        return self

    def maps(self) -> list[Tensor]:
        """The weights of each block, as the last pass wrote them."""
        return [block.attention.kept for block in self.blocks]


def inputs(n: int = 7, b: int = 2, width: int = 16) -> Tensor:
    return torch.randn(b, n, width, generator=torch.Generator().manual_seed(1)).double()


def padding(n: int = 7) -> Tensor:
    """The second of two samples lacks its first two positions, as keys."""
    allowed = torch.ones(2, 1, 1, n, dtype=torch.bool)
    allowed[1, ..., :2] = False
    return allowed


def seen_of(
    model: Encoder, x: Tensor, allowed: Tensor | None = None
) -> tuple[AttentionTrace, Tensor]:
    with watch(model) as trace:
        scores = model(x, allowed)
    return trace, scores
