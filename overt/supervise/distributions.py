"""Losses that compare the maps of a whole batch with its targets: CORAL and MMD.

Patro, Kasturi, Jain and Namboodiri, "Self Supervision for Attention Networks", WACV 2021, eq. 4
and 5.

These losses see two heaps of rows, and not which target belongs to which row: handing the targets
of a batch round among its samples changes nothing. So they teach how maps are spread over a data
set, and cannot teach the map of one sample. Each is one row by itself, `Loss(batch_level=True)`: a
batch cut into parts is another loss, and on several processes each compares its own share.

The rows of all samples and queries make one heap. Each layer and head is compared with the target
on its own, and the mean is taken over those that have one. Keys that a row may not see weigh
nothing on both sides, and a key that no row sees is as good as absent: padding changes nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from overt.attention import AttentionMap
from overt.supervise.loss import Loss
from overt.supervise.losses import precise, supervised

# From squared distances, and which pairs are real, to likeness: 1 for two equal rows.
Kernel = Callable[
    [Float[Tensor, "l h m m"], Bool[Tensor, "l h m m"]],
    Float[Tensor, "l h m m"],
]


def coral(attention: AttentionMap, target: AttentionMap) -> Loss:
    """`||C(t) - C(a)||_F^2 / 4 d^2` of the covariances over the batch, for d visible keys (eq. 5).

    The constant is that of Sun and Saenko, "Deep CORAL", 2016, https://arxiv.org/abs/1607.01719,
    whom the paper follows but for it; `coral_as_printed` has the paper's. Fewer than two rows have
    no covariance and cost nothing.
    """
    rows = _rows(attention, target)
    return _loss(_covariance_gap(rows) / (4 * rows.keys.clamp_min(1).square()), rows.count > 1)


def coral_as_printed(attention: AttentionMap, target: AttentionMap) -> Loss:
    """`||C(t) - C(a)||_F^2 / 4` (eq. 5 to the letter): `coral` times the square of d."""
    rows = _rows(attention, target)
    return _loss(_covariance_gap(rows) / 4, rows.count > 1)


def mmd_linear(attention: AttentionMap, target: AttentionMap) -> Loss:
    """`|| mean t - mean a ||`: eq. 4 with the map itself as the representation.

    It sees the mean map of the batch and nothing else.
    """
    rows = _rows(attention, target)
    apart = (rows.target - rows.attention).sum(dim=2) / rows.count.clamp_min(1)[..., None]
    return _loss(torch.linalg.vector_norm(apart, dim=-1), rows.count > 0)


def gaussians(widths: Sequence[float]) -> Kernel:
    """The mean of `exp(-s / 2 w^2)` over fixed widths w, for squared distances s."""

    def kernel(
        squared: Float[Tensor, "l h m m"], real: Bool[Tensor, "l h m m"]
    ) -> Float[Tensor, "l h m m"]:
        return torch.stack([(-squared / (2 * width**2)).exp() for width in widths]).mean(dim=0)

    return kernel


def spread_gaussians(factors: Sequence[float] = (0.25, 0.5, 1.0, 2.0, 4.0)) -> Kernel:
    """The mean of `exp(-s / f m)` over factors f, where m is the mean of s over two different rows.

    So widths fit maps of any number of keys. That mean is a constant for the gradient: rows are not
    rewarded for moving apart all at once.
    """

    def kernel(
        squared: Float[Tensor, "l h m m"], real: Bool[Tensor, "l h m m"]
    ) -> Float[Tensor, "l h m m"]:
        other = real & ~torch.eye(real.shape[-1], dtype=torch.bool, device=real.device)
        total = (squared.detach() * other).sum(dim=(-2, -1), keepdim=True)
        mean = total / other.sum(dim=(-2, -1), keepdim=True).clamp_min(1)
        # rows that are all equal are at distance 0, which any width calls equal
        mean = torch.where(mean > 0, mean, 1)
        return torch.stack([(-squared / (factor * mean)).exp() for factor in factors]).mean(dim=0)

    return kernel


SPREAD = spread_gaussians()


def mmd(attention: AttentionMap, target: AttentionMap, kernel: Kernel = SPREAD) -> Loss:
    """The squared distance of the mean rows in the space of a kernel (eq. 4, squared; biased).

    `mean k(t, t) + mean k(a, a) - 2 mean k(t, a)` with every row also against itself: never below
    zero, and with Gaussians zero only for equal heaps, but above zero on average for two samples
    of one distribution. Squared, because the root of eq. 4 has no slope where it should end. With
    one row it is `2 - 2 k(t, a)`: for a wide kernel the squared error, and no comparison of
    distributions at all.
    """
    rows = _rows(attention, target)
    alike, count = _likeness(rows, kernel), rows.count.clamp_min(1)
    share = rows.there.to(alike.dtype) / count[..., None]
    signed = torch.cat([share, -share], dim=-1)
    return _loss(_weighed(alike, signed, signed).clamp_min(0), rows.count > 0)


def mmd_unbiased(attention: AttentionMap, target: AttentionMap, kernel: Kernel = SPREAD) -> Loss:
    """`mmd` without rows against themselves: right on average, and below zero about half the time.

    Needs two rows, and costs nothing with fewer.
    """
    rows = _rows(attention, target)
    alike, n = _likeness(rows, kernel), rows.there.shape[-1]
    other = alike - torch.diag_embed(alike.diagonal(dim1=-2, dim2=-1))
    real, count = rows.there.to(alike.dtype), rows.count.to(alike.dtype)
    within = _weighed(other[..., :n, :n] + other[..., n:, n:], real, real)
    across = _weighed(alike[..., :n, n:], real, real)
    pairs = (count * (count - 1)).clamp_min(1)
    return _loss(within / pairs - 2 * across / count.square().clamp_min(1), rows.count > 1)


# --- heaps of rows


@dataclass(frozen=True, eq=False)
class _Rows:
    """The supervised rows of a batch, for each layer and head; rows that are not are all zeros."""

    attention: Float[Tensor, "l h n k"]
    target: Float[Tensor, "l h n k"]
    there: Bool[Tensor, "l h n"]
    keys: Int[Tensor, ""]

    @property
    def count(self) -> Tensor:
        return self.there.sum(dim=-1)


def _rows(attention: AttentionMap, target: AttentionMap) -> _Rows:
    there = supervised(attention, target)
    visible = rearrange(attention.visible, "b q k -> b 1 1 q k") & there[..., None]
    heaps = [
        rearrange(torch.where(visible, precise(one.weights), 0), "b l h q k -> l h (b q) k")
        for one in (attention, target)
    ]
    keys = visible.flatten(0, 3).any(dim=0).sum()
    return _Rows(heaps[0], heaps[1], rearrange(there, "b l h q -> l h (b q)"), keys)


def _covariance_gap(rows: _Rows) -> Float[Tensor, "l h"]:
    """`||C(t) - C(a)||_F^2`, each with one less than the rows below the line."""
    found, below = [], (rows.count - 1).clamp_min(1)[..., None, None]
    for heap in (rows.target, rows.attention):
        mean = heap.sum(dim=2, keepdim=True) / rows.count.clamp_min(1)[..., None, None]
        centred = (heap - mean) * rows.there[..., None]
        with torch.autocast(heap.device.type, enabled=False):  # which would round the product
            found.append(centred.mT @ centred / below)
    return (found[0] - found[1]).square().sum(dim=(-2, -1))


def _likeness(rows: _Rows, kernel: Kernel) -> Float[Tensor, "l h m m"]:
    """How alike any two rows are, those of the target first; 0 for rows that are not there."""
    both = torch.cat([rows.target, rows.attention], dim=2)
    there = torch.cat([rows.there, rows.there], dim=-1)
    real = there[..., :, None] & there[..., None, :]
    # the quick way, by products, loses small distances to rounding
    away = torch.cdist(both, both, compute_mode="donot_use_mm_for_euclid_dist").square()
    return torch.where(real, kernel(away, real), 0)


def _weighed(
    alike: Float[Tensor, "l h m n"], left: Float[Tensor, "l h m"], right: Float[Tensor, "l h n"]
) -> Float[Tensor, "l h"]:
    """`left K right`, as a sum and not as a product, which autocast would round."""
    return (alike * left[..., :, None] * right[..., None, :]).sum(dim=(-2, -1))


def _loss(values: Float[Tensor, "l h"], enough: Bool[Tensor, "l h"]) -> Loss:
    """The mean over layers and heads with enough rows, as one row of a loss."""
    total = torch.where(enough, values, 0).sum() / enough.sum().clamp_min(1)
    return Loss(total, enough.any().to(total.dtype), batch_level=True)
