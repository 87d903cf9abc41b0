"""How far attention must be carried to lie where it should: a loss that knows distances.

The exact earth mover's distance on a grid is a linear programme for every row. In one dimension it
is a sum: the area between the two cumulated maps. So words are compared exactly, and a picture is
compared along several directions, each exactly (the sliced distance of Rabin, Peyre, Delon and
Bernot, "Wasserstein Barycenter and its Application to Texture Mixing", 2011). Entropic transport
was not taken: its maps are blurred by a temperature that has to be chosen, it takes many rounds,
and at the target its loss is not zero.
"""

import math

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from overt.attention import AttentionMap, Span
from overt.supervise.loss import Loss
from overt.supervise.losses import check_fit, precise, summed


def emd(attention: AttentionMap, target: AttentionMap, directions: int = 8) -> Loss:
    """The earth mover's distance of every supervised row: exact for words, from below on a grid.

    The unit is the length of the text, or the longer side of the picture. Rows are taken as shares
    of their sum. On a grid the mean over `directions` is divided by the most that a step of length
    one can make of it: never more than the exact distance, and for maps that differ by a shift at
    least 98 % of it with 8 directions. It is zero only for equal maps. Two grids of other sides are
    refused, though their cells be as many.
    """
    check_fit(attention, target)
    span = _only(attention)
    check_places(attention, target)
    if directions < 1:
        raise ValueError(f"the distance needs a direction to look along, not {directions}")
    visible = rearrange(attention.visible, "b q k -> b 1 1 q k")
    ours, theirs = (_shares(torch.where(visible, precise(one.weights), 0))
                    for one in (attention, target))  # fmt: skip
    apart = ours - theirs
    if len(span.shape) == 1:
        steps = visible / visible.sum(dim=-1, keepdim=True).clamp_min(1)
        return summed((apart.cumsum(dim=-1).abs() * steps).sum(dim=-1), attention, target)
    order, gaps = _lines(span.shape, directions, apart)
    sorted_ = apart[..., order]  # b l h q directions k
    along = (sorted_.cumsum(dim=-1)[..., :-1].abs() * gaps).sum(dim=-1)
    most = 1 / (directions * math.sin(math.pi / (2 * directions)))
    return summed(along.mean(dim=-1) / most, attention, target)


def check_places(attention: AttentionMap, target: AttentionMap) -> None:
    """Raise where the keys of two maps stand in other places: their distances are not the same.

    Words in a line and a grid of one row, or one column, are the same places.
    """
    spans = [span for one in (attention, target) for span in one.keys.spans]
    if len(spans) != 2 or any(len(span) != len(attention.keys) for span in spans):
        return  # not one kind of key on each side
    ours, theirs = (span.shape for span in spans)
    if ours == theirs:
        return
    if len(ours) == len(theirs) or max(ours) != max(theirs):
        raise ValueError(
            f"keys of shape {ours} and of shape {theirs} are not equally far apart: compare maps "
            "over the same keys; overt.measure.on_grid draws a picture on another grid"
        )


def _lines(
    shape: tuple[int, ...], directions: int, like: Tensor
) -> tuple[Tensor, Float[Tensor, "n g"]]:
    """The order of the cells along each direction, and how far each is from the next.

    They begin a third of a step off the axis: then none of them, however many, has a rational
    slope, and no two cells fall together.
    """
    angles = (torch.arange(directions, dtype=torch.float64) + 1 / 3) * math.pi / directions
    y, x = torch.meshgrid(*(torch.arange(n, dtype=torch.float64) for n in shape), indexing="ij")
    places = torch.outer(angles.sin(), y.flatten()) + torch.outer(angles.cos(), x.flatten())
    places, order = (places / max(shape)).sort(dim=-1)
    return order.to(like.device), places.diff(dim=-1).to(like)


def _only(attention: AttentionMap) -> Span:
    """The one kind of key, whose places are known: words in a line or cells of a grid."""
    spans = attention.keys.spans
    if len(spans) == 1 and len(spans[0]) == len(attention.keys) and len(spans[0].shape) <= 2:
        return spans[0]
    found = [f"{span.name} {span.shape}" for span in spans]
    raise ValueError(
        f"distances need keys that are all words or all cells of one picture, not {found} on "
        f"{len(attention.keys)} positions; take .between(query, key) first"
    )


def _shares(weights: Float[Tensor, "*rows k"]) -> Float[Tensor, "*rows k"]:
    total = weights.sum(dim=-1, keepdim=True)
    return weights / torch.where(total > 0, total, 1)
