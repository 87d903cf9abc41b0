"""Mask networks: how much of the attention from each word to each region is left unchanged.

Fei, AAAI 2022, eq. 2. They read the queries and keys of an attention module, so they work with any
model. The queries of all heads together are a linear function of the decoder state, of the same
size: a linear layer on them is as expressive as one on the state.
"""

from collections.abc import Callable

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from overt.nn.mask_perturbation.fusion import AttentionShape

Queries = Float[Tensor, "b h q d"]
Keys = Float[Tensor, "b g k d"]
Mask = Float[Tensor, "b h q k"]


class QueryKeyMask(nn.Module):
    """`sigmoid(q' . k' / sqrt(d) + b)` with its own projections: any number of regions.

    The form of Lu et al.'s code; the bias, one per head, is the paper's.

    Args:
        place: The shape of the attention module.

    Example:
        >>> query, key = torch.rand(1, 2, 3, 4), torch.rand(1, 2, 5, 4)  # 3 words, 5 regions
        >>> QueryKeyMask(AttentionShape(heads=2, groups=2, width=4))(query, key).shape
        torch.Size([1, 2, 3, 5])
    """

    def __init__(self, place: AttentionShape) -> None:
        super().__init__()
        self.heads = place.heads
        wide, key_wide = place.heads * place.width, place.groups * place.width
        self.query, self.key = nn.Linear(wide, wide), nn.Linear(key_wide, wide)
        self.bias = nn.Parameter(torch.zeros(place.heads))

    def forward(self, query: Queries, key: Keys) -> Mask:
        """Return the mask of every head, word and region."""
        # one projection over all heads: with fewer key groups (GQA) its output still has every head
        queries = _split_heads(self.query(_join_heads(query)), self.heads)
        keys = _split_heads(self.key(_join_heads(key)), self.heads)
        scores = queries @ keys.transpose(-1, -2) / queries.shape[-1] ** 0.5
        return (scores + self.bias[:, None, None]).sigmoid()


class LinearMask(nn.Module):
    """`sigmoid(W h + b)` with one output per region (eq. 2 as published), for at most `regions`.

    It identifies regions by their index only, which means little if they are unordered.

    Args:
        place: The shape of the attention module.
        regions: The largest number of regions.

    Example:
        >>> query, key = torch.rand(1, 2, 3, 4), torch.rand(1, 2, 5, 4)  # 3 words, 5 regions
        >>> LinearMask(AttentionShape(heads=2, groups=2, width=4), regions=8)(query, key).shape
        torch.Size([1, 2, 3, 5])
    """

    def __init__(self, place: AttentionShape, regions: int) -> None:
        super().__init__()
        self.heads, self.regions = place.heads, regions
        self.linear = nn.Linear(place.heads * place.width, place.heads * regions)

    def forward(self, query: Queries, key: Keys) -> Mask:
        """Return the mask of every head, word and region."""
        count = key.shape[2]
        if count > self.regions:
            raise ValueError(f"got {count} regions, the mask has at most {self.regions}")
        # outputs beyond the regions of this batch get no gradient
        return _split_heads(self.linear(_join_heads(query)), self.heads)[..., :count].sigmoid()


class RandomMask(nn.Module):
    """Random control: uniform masks between 0 and 1, sampled in each call.

    Args:
        place: The shape of the attention module.

    Example:
        >>> query, key = torch.rand(1, 2, 3, 4), torch.rand(1, 2, 5, 4)  # 3 words, 5 regions
        >>> RandomMask(AttentionShape(heads=2, groups=2, width=4))(query, key).shape
        torch.Size([1, 2, 3, 5])
    """

    def __init__(self, place: AttentionShape) -> None:
        super().__init__()
        self.heads = place.heads

    def forward(self, query: Queries, key: Keys) -> Mask:
        """Return the mask of every head, word and region."""
        b, h, q, _ = query.shape
        return torch.rand(b, h, q, key.shape[2], device=query.device, dtype=query.dtype)


class ConstantMask(nn.Module):
    """Constant control: one learned value per head for all words and regions.

    After renormalisation it has no effect.

    Args:
        place: The shape of the attention module.

    Example:
        >>> query, key = torch.rand(1, 2, 3, 4), torch.rand(1, 2, 5, 4)  # 3 words, 5 regions
        >>> ConstantMask(AttentionShape(heads=2, groups=2, width=4))(query, key).shape
        torch.Size([1, 2, 3, 5])
    """

    def __init__(self, place: AttentionShape) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(place.heads))

    def forward(self, query: Queries, key: Keys) -> Mask:
        """Return the mask of every head, word and region."""
        b, h, q, _ = query.shape
        # a constant mask scales a row by one factor, which renormalisation cancels
        return self.bias.sigmoid()[None, :, None, None].expand(b, h, q, key.shape[2])


MakeMask = Callable[[AttentionShape], nn.Module]


def query_key(place: AttentionShape) -> nn.Module:
    """Make a mask network on queries and keys.

    Args:
        place: The shape of the attention module.

    Returns:
        The network.

    Example:
        >>> type(query_key(AttentionShape(heads=2, groups=2, width=4))).__name__
        'QueryKeyMask'
    """
    return QueryKeyMask(place)


def linear(regions: int) -> MakeMask:
    """Return a maker of mask networks on queries alone, for at most `regions` regions.

    Args:
        regions: The largest number of regions.

    Returns:
        A function from the shape of an attention module to its mask network.

    Example:
        >>> linear(regions=36)(AttentionShape(heads=2, groups=2, width=4)).regions
        36
    """
    return lambda place: LinearMask(place, regions)


def _join_heads(states: Float[Tensor, "b h n d"]) -> Float[Tensor, "b n w"]:
    return rearrange(states, "b h n d -> b n (h d)")


def _split_heads(states: Float[Tensor, "b n w"], heads: int) -> Float[Tensor, "b h n d"]:
    return rearrange(states, "b n (h d) -> b h n d", h=heads)
