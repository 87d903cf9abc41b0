"""Does attention fall where the truth is?"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from overt.attention import AttentionMap
from overt.measure.measured import Measured, defined, measured, row, rows, shares


def support(truth: AttentionMap, above: float = 0.0) -> Bool[Tensor, "b k"]:
    """The cells that belong to the truth: those with more than `above` times its largest weight."""
    weights, seen = row(truth)
    return _above(weights, above) & seen


def _above(weights: Float[Tensor, "b k"], above: float) -> Bool[Tensor, "b k"]:
    return weights > (above * weights.amax(dim=-1, keepdim=True)).clamp_min(0)


@measured("pointing game", "share", higher_is_better=True, low=0.0, high=1.0)
def pointing_game(attention: AttentionMap, truth: AttentionMap, above: float = 0.0) -> Measured:
    """1 where the cell with the largest weight belongs to the truth, else 0.

    Cells that tie for the largest weight count by the share of them that is in the truth, so that
    a uniform map scores what a random cell would. `above` is as in `support`.
    """
    ours, theirs, seen = rows(attention, truth)
    inside = _above(theirs, above)
    largest = ours.masked_fill(~seen, -torch.inf).amax(dim=-1, keepdim=True)
    top = (ours == largest) & seen
    hits = (top & inside).sum(dim=-1) / top.sum(dim=-1).clamp_min(1)
    return defined(hits, inside.any(dim=-1) & (ours != 0).any(dim=-1))


@measured("mass inside", "share", higher_is_better=True, low=0.0, high=1.0)
def mass_inside(attention: AttentionMap, truth: AttentionMap, above: float = 0.0) -> Measured:
    """The share of the attention that falls on cells of the truth; `above` is as in `support`."""
    ours, theirs, _ = rows(attention, truth)
    inside = _above(theirs, above)
    mass = (shares(ours, attention.kind) * inside).sum(dim=-1)
    return defined(mass, inside.any(dim=-1) & (ours > 0).any(dim=-1))
