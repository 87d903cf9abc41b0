"""Networks that say for each word how far attention to each region may be left as it is.

Fei, AAAI 2022, eq. 2. They read the queries and keys of the attention they stand beside, so they
can be put beside any model's. All heads of a query together are a linear function of the state the
query was made from, and as large: a linear layer on them can do what one on the state could.
"""

from collections.abc import Callable

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from overt.supervise.perturb.fusing import Place

Queries = Float[Tensor, "b h q d"]
Keys = Float[Tensor, "b g k d"]
Mask = Float[Tensor, "b h q k"]


class QueryKeyMask(nn.Module):
    """`sigmoid(q' . k' / sqrt(d) + b)` with projections of its own: any number of regions.

    The form of Lu et al.'s code; the bias, one a head, is the paper's.
    """

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.heads = place.heads
        asked, known = place.heads * place.width, place.groups * place.width
        self.query, self.key = nn.Linear(asked, asked), nn.Linear(known, asked)
        self.bias = nn.Parameter(torch.zeros(place.heads))

    def forward(self, query: Queries, key: Keys) -> Mask:
        """The mask of every head, word and region."""
        asked = _heads(self.query(_joined(query)), self.heads)
        known = _heads(self.key(_joined(key)), self.heads)
        scores = asked @ known.transpose(-1, -2) / asked.shape[-1] ** 0.5
        return (scores + self.bias[:, None, None]).sigmoid()


class LinearMask(nn.Module):
    """`sigmoid(W h + b)` with an output a region (eq. 2 as printed): for at most `regions` of them.

    It knows regions by their number alone, which says little where they stand in no order.
    """

    def __init__(self, place: Place, regions: int) -> None:
        super().__init__()
        self.heads, self.regions = place.heads, regions
        self.linear = nn.Linear(place.heads * place.width, place.heads * regions)

    def forward(self, query: Queries, key: Keys) -> Mask:
        """The mask of every head, word and region."""
        count = key.shape[2]
        if count > self.regions:
            raise ValueError(f"{count} regions for a mask of {self.regions}; make it larger")
        return _heads(self.linear(_joined(query)), self.heads)[..., :count].sigmoid()


class RandomMask(nn.Module):
    """A placebo: masks by chance, evenly between 0 and 1, other ones each time."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.heads = place.heads

    def forward(self, query: Queries, key: Keys) -> Mask:
        """The mask of every head, word and region."""
        b, h, q, _ = query.shape
        return torch.rand(b, h, q, key.shape[2], device=query.device, dtype=query.dtype)


class ConstantMask(nn.Module):
    """A placebo: one learned number a head for all words and regions; renormalised, it is none."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(place.heads))

    def forward(self, query: Queries, key: Keys) -> Mask:
        """The mask of every head, word and region."""
        b, h, q, _ = query.shape
        return self.bias.sigmoid()[None, :, None, None].expand(b, h, q, key.shape[2])


MakeMask = Callable[[Place], nn.Module]


def query_key(place: Place) -> nn.Module:
    """Masks from queries and keys."""
    return QueryKeyMask(place)


def linear(regions: int) -> MakeMask:
    """Masks from queries alone, for at most `regions` regions."""
    return lambda place: LinearMask(place, regions)


def _joined(states: Float[Tensor, "b h n d"]) -> Float[Tensor, "b n w"]:
    return rearrange(states, "b h n d -> b n (h d)")


def _heads(states: Float[Tensor, "b n w"], heads: int) -> Float[Tensor, "b h n d"]:
    return rearrange(states, "b n (h d) -> b h n d", h=heads)
