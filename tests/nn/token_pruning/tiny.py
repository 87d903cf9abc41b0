"""Token sequences with one class token and a grid of cells, or with positions only."""

import torch
from torch import Tensor

from overt.attention import Kind, Layout, grid, words
from overt.capture.call import Call, MaterializedCall, QKCall, Route
from overt.nn.token_pruning.tokens import TokenSequence


def layout(rows: int = 2, columns: int = 3) -> Layout:
    return words(1, "class") + grid(rows, columns)


def tokens(states: Tensor, call: Call | None = None, there: Tensor | None = None) -> TokenSequence:
    """Make tokens of which the first is a class token and all others are free."""
    b, k, _ = states.shape
    there = torch.ones(b, k, dtype=torch.bool) if there is None else there
    free = there & (torch.arange(k) > 0)
    places = torch.arange(k).expand(b, k)
    return TokenSequence(states, there, free, torch.ones(b, k), places, layout(1, k - 1), call)


def qk_call(keys: Tensor) -> Call:
    """Make a call whose queries are its keys, `keys[b, h, k, d]`."""
    return Call("attention", torch.nn.Identity(), QKCall(keys, keys, 1.0), Route.SDPA, False)


def softmax_call(weights: Tensor) -> Call:
    source = MaterializedCall(weights, Kind.PROBABILITY)
    return Call("attention", torch.nn.Identity(), source, Route.SOFTMAX, False)
