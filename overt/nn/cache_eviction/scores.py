"""Scores of cached positions: which keys and values of a layer are worth their memory.

A rule is a function of the attention of one layer, with `functools.partial` for its parameters. It
returns one number per sample, head of keys and values, and cached position; the largest are kept.
No rule needs the N x N matrix: weights are computed in blocks of rows, reduced, and dropped.

- Zhang, Sheng, Zhou et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large
  Language Models", NeurIPS 2023, https://arxiv.org/abs/2306.14048.
- Li, Huang, Yang et al., "SnapKV: LLM Knows What You are Looking for Before Generation", NeurIPS
  2024, https://arxiv.org/abs/2404.14469.
- Xiao, Tian, Chen, Han and Lewis, "Efficient Streaming Language Models with Attention Sinks"
  (StreamingLLM), ICLR 2024, https://arxiv.org/abs/2309.17453.

Axis letters:  b batch  h head  g group of heads that share keys  q query  k cached position
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from einops import reduce
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from overt.capture import attention_statistics
from overt.capture.call import Call

ROWS = 8  # queries of an observation window whose weights exist at the same time

# Smooths scores (b h k) over neighbouring positions, called with kernel_size, stride and padding.
Pool = Callable[..., Float[Tensor, "b h k"]]


@dataclass(frozen=True, eq=False)
class CachedAttention:
    """The attention of one layer over a prompt, as a rule sees it.

    Args:
        call: The captured call; its queries and keys are the tokens of the prompt.
        present: The positions that are not padding.
        kv_heads: Number of heads of keys and values in the cache.

    Example:
        >>> import overt
        >>> layer, x = torch.nn.MultiheadAttention(8, 2, batch_first=True), torch.zeros(1, 5, 8)
        >>> with overt.watch(layer) as trace:
        ...     _ = layer(x, x, x)
        >>> cached = CachedAttention(trace.calls[0], torch.ones(1, 5, dtype=torch.bool), kv_heads=2)
        >>> accumulated_attention(cached)[0, 0]  # five queries attend evenly to five keys
        tensor([1., 1., 1., 1., 1.])
    """

    call: Call
    present: Bool[Tensor, "b k"]
    kv_heads: int


ScoreRule = Callable[[CachedAttention], Float[Tensor, "b g k"]]


def accumulated_attention(cached: CachedAttention) -> Float[Tensor, "b g k"]:
    """Score positions by the attention they received: the heavy hitters of H2O.

    The sum of the weights over all real queries of the prompt, and the mean over the query heads
    that share a head of keys. Early positions are seen by more queries; `mean_attention` corrects
    for it. H2O also keeps the most recent positions: half of `keep` in the paper, as
    `evict_cache(..., keep=64, last=32)`, and goes on evicting while it generates, which is not done
    here.

    Args:
        cached: Attention of one layer.

    Returns:
        The scores; 0 for padding.

    Example:
        >>> import overt
        >>> layer, x = torch.nn.MultiheadAttention(8, 2, batch_first=True), torch.rand(1, 5, 8)
        >>> with overt.watch(layer) as trace:
        ...     _ = layer(x, x, x)
        >>> cached = CachedAttention(trace.calls[0], torch.ones(1, 5, dtype=torch.bool), kv_heads=2)
        >>> accumulated_attention(cached).sum(dim=-1).round()  # each query has one to give
        tensor([[5., 5.]])
    """
    found = attention_statistics.received(cached.call, queries=cached.present)
    return _share_heads(found, cached.kv_heads)


def mean_attention(cached: CachedAttention) -> Float[Tensor, "b g k"]:
    """Score positions by the mean attention they received from the queries that may see them.

    The sums of `accumulated_attention`, divided by the number of queries from the position itself
    to the end of the prompt.

    Args:
        cached: Attention of one layer, causal.

    Returns:
        The scores; 0 for padding.

    Example:
        >>> import overt
        >>> layer, x = torch.nn.MultiheadAttention(8, 2, batch_first=True), torch.zeros(1, 3, 8)
        >>> later = torch.ones(3, 3, dtype=torch.bool).triu(1)
        >>> with overt.watch(layer) as trace:
        ...     _ = layer(x, x, x, attn_mask=later)
        >>> cached = CachedAttention(trace.calls[0], torch.ones(1, 3, dtype=torch.bool), kv_heads=2)
        >>> mean_attention(cached)[0, 0]  # (1 + 1/2 + 1/3) / 3, (1/2 + 1/3) / 2, 1/3
        tensor([0.6111, 0.4167, 0.3333])
    """
    found = accumulated_attention(cached)
    k = found.shape[-1]
    return found / torch.arange(k, 0, -1, device=found.device)


@torch.no_grad()
def observation_window(
    cached: CachedAttention, window: int = 32, kernel: int = 5, pool: Pool = F.avg_pool1d
) -> Float[Tensor, "b g k"]:
    """Score positions by the attention of the last `window` queries: SnapKV.

    The mean weight over the real queries of the window, smoothed over neighbouring positions, and
    the mean over the query heads that share a head of keys (the paper has a head of keys per query
    head). Positions of the window itself score infinity and are always kept.
    The scores have no gradient.

    Args:
        cached: Attention of one layer.
        window: Number of queries at the end of the prompt.
        kernel: Number of positions to smooth over, odd; 1 for none.
        pool: `torch.nn.functional.avg_pool1d` or `max_pool1d`.

    Returns:
        The scores; infinity in the window.

    Raises:
        ValueError: The prompt is not longer than the window, or the kernel is even.

    Example:
        >>> import overt
        >>> layer, x = torch.nn.MultiheadAttention(8, 2, batch_first=True), torch.zeros(1, 5, 8)
        >>> with overt.watch(layer) as trace:
        ...     _ = layer(x, x, x)
        >>> cached = CachedAttention(trace.calls[0], torch.ones(1, 5, dtype=torch.bool), kv_heads=2)
        >>> observation_window(cached, window=2, kernel=1)[0, 0]
        tensor([0.2000, 0.2000, 0.2000,    inf,    inf])
    """
    b, h, q, k = cached.call.shape
    if not 1 <= window < q:
        raise ValueError(
            f"window must be 1 to {q - 1} for a prompt of {q} tokens, got {window}; use a smaller "
            "window"
        )
    if kernel < 1 or kernel % 2 == 0:
        raise ValueError(f"kernel must be odd and positive, got {kernel}")
    # a sample shorter than the window has padding in it, whose queries mean nothing
    real = cached.present[:, q - window :]
    share = real / real.sum(dim=-1, keepdim=True).clamp_min(1)
    total = torch.zeros(b, h, k, device=share.device)
    for start in range(0, window, ROWS):
        at = slice(start, min(start + ROWS, window))
        weights = cached.call.weights(rows=slice(q - window + at.start, q - window + at.stop))
        # not a product of matrices: after a softmax, that looks like attention to the capture
        weights = torch.where(real[:, None, at, None], weights, 0) * share[:, None, at, None]
        total = total + weights.sum(dim=2)
    before = total[..., : k - window]
    before = pool(before, kernel_size=kernel, stride=1, padding=kernel // 2)
    return F.pad(_share_heads(before, cached.kv_heads), (0, window), value=torch.inf)


def recent(cached: CachedAttention) -> Float[Tensor, "b g k"]:
    """Score positions by their index, so that the last are kept: a control.

    With `evict_cache(..., first=4)` it keeps the attention sinks and the most recent positions, as
    StreamingLLM does; here positions keep their true index, as in the rest of the package.

    Args:
        cached: Attention of one layer; only its sizes are used.

    Returns:
        The scores.

    Example:
        >>> import overt
        >>> layer, x = torch.nn.MultiheadAttention(8, 2, batch_first=True), torch.zeros(1, 3, 8)
        >>> with overt.watch(layer) as trace:
        ...     _ = layer(x, x, x)
        >>> cached = CachedAttention(trace.calls[0], torch.ones(1, 3, dtype=torch.bool), kv_heads=1)
        >>> recent(cached)
        tensor([[[0., 1., 2.]]])
    """
    b, k = cached.present.shape
    places = torch.arange(k, device=cached.present.device, dtype=torch.float32)
    return places.expand(b, cached.kv_heads, k)


def random_scores(
    cached: CachedAttention, generator: torch.Generator | None = None
) -> Float[Tensor, "b g k"]:
    """Score positions at random, separately in each layer and head: a control.

    Args:
        cached: Attention of one layer; only its sizes are used.
        generator: Source of the random numbers; by default PyTorch's global one of the CPU.

    Returns:
        The scores.

    Example:
        >>> import overt
        >>> layer, x = torch.nn.MultiheadAttention(8, 2, batch_first=True), torch.zeros(1, 3, 8)
        >>> with overt.watch(layer) as trace:
        ...     _ = layer(x, x, x)
        >>> cached = CachedAttention(trace.calls[0], torch.ones(1, 3, dtype=torch.bool), kv_heads=1)
        >>> random_scores(cached, torch.Generator().manual_seed(0)).shape
        torch.Size([1, 1, 3])
    """
    b, k = cached.present.shape
    # drawn on the generator's device: the same positions whatever GPU the model is on
    device = "cpu" if generator is None else generator.device
    drawn = torch.rand(b, cached.kv_heads, k, generator=generator, device=device)
    return drawn.to(cached.present.device)


def _share_heads(values: Float[Tensor, "b h k"], kv_heads: int) -> Float[Tensor, "b g k"]:
    """Average over the query heads of each head of keys; they are adjacent."""
    return reduce(values, "b (g n) k -> b g k", "mean", g=kv_heads)
