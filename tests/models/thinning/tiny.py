"""Tokens by hand: one class token and a grid of cells, or nothing but positions."""

import torch
from torch import Tensor

from overt.attention import Kind, Layout, grid, words
from overt.capture.call import Call, Projected, Route, Written
from overt.models.thinning.tokens import Tokens


def layout(rows: int = 2, columns: int = 3) -> Layout:
    return words(1, "class") + grid(rows, columns)


def tokens(states: Tensor, call: Call | None = None, there: Tensor | None = None) -> Tokens:
    """Tokens of which the first is a class token and all others are free."""
    b, k, _ = states.shape
    there = torch.ones(b, k, dtype=torch.bool) if there is None else there
    free = there & (torch.arange(k) > 0)
    places = torch.arange(k).expand(b, k)
    return Tokens(states, there, free, torch.ones(b, k), places, layout(1, k - 1), call)


def attended(keys: Tensor) -> Call:
    """A call whose queries are its keys, `keys[b, h, k, d]`."""
    return Call("attention", torch.nn.Identity(), Projected(keys, keys, 1.0), Route.SDPA, False)


def written(weights: Tensor) -> Call:
    source = Written(weights, Kind.PROBABILITY)
    return Call("attention", torch.nn.Identity(), source, Route.SOFTMAX, False)
