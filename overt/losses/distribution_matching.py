"""Losses between the distributions of attention maps and targets in a batch: CORAL and MMD.

Patro, Kasturi, Jain and Namboodiri, "Self Supervision for Attention Networks", WACV 2021, eq. 4
and 5.

These losses compare two sets of rows and do not use which target belongs to which row: permuting
the targets of a batch changes nothing. They teach the distribution of maps over a dataset and
cannot teach the map of one sample. Each loss is one row, `Loss(batch_level=True)`: splitting a
batch changes the loss, and each process compares its own share.

The rows of all samples and queries form one set. Each layer and head is compared with the target
separately, and the mean is taken over those with a target. Masked keys have weight zero on both
sides, and a key that no row sees counts as absent: padding changes nothing.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from overt.attention import AttentionMap
from overt.losses.attention_losses import at_least_float32, supervised_rows
from overt.losses.loss import Loss

# Maps squared distances, and which pairs exist, to a similarity: 1 for equal rows.
Kernel = Callable[
    [Float[Tensor, "l h m m"], Bool[Tensor, "l h m m"]],
    Float[Tensor, "l h m m"],
]


def coral(attention: AttentionMap, target: AttentionMap) -> Loss:
    """Compute CORAL: `||C(t) - C(a)||_F^2 / 4 d^2` of covariances, for d visible keys (eq. 5).

    The constant is that of Sun and Saenko, "Deep CORAL", 2016, https://arxiv.org/abs/1607.01719,
    which the paper follows otherwise; `coral_unscaled` has the constant of the paper. Fewer than
    two rows have no covariance and cost nothing.

    Args:
        attention: The attention of the model.
        target: The target maps.

    Returns:
        A batch-level loss.

    Example:
        >>> from overt import words
        >>> attention = AttentionMap.from_scores(torch.eye(4)[:, None, None, None], words(4))
        >>> float(coral(attention, attention).mean())
        0.0
    """
    rows = _supervised_rows(attention, target)
    return _loss(_covariance_gap(rows) / (4 * rows.keys.clamp_min(1).square()), rows.count > 1)


def coral_unscaled(attention: AttentionMap, target: AttentionMap) -> Loss:
    """Compute `||C(t) - C(a)||_F^2 / 4`, eq. 5 as printed: `coral` times d squared.

    Args:
        attention: The attention of the model.
        target: The target maps.

    Returns:
        A batch-level loss.

    Example:
        >>> from overt import words
        >>> attention = AttentionMap.from_scores(torch.eye(4)[:, None, None, None], words(4))
        >>> target = AttentionMap.from_cells(torch.eye(4), words(4))
        >>> ratio = coral_unscaled(attention, target).mean() / coral(attention, target).mean()
        >>> round(float(ratio), 3)  # 4 d^2 with d = 4 keys
        16.0
    """
    rows = _supervised_rows(attention, target)
    return _loss(_covariance_gap(rows) / 4, rows.count > 1)


def mmd_linear(attention: AttentionMap, target: AttentionMap) -> Loss:
    """Compute `|| mean t - mean a ||`: eq. 4 with the map itself as the representation.

    It only compares the mean maps of the batch.

    Args:
        attention: The attention of the model.
        target: The target maps.

    Returns:
        A batch-level loss.

    Example:
        >>> from overt import words
        >>> attention = AttentionMap.from_scores(torch.zeros(2, 1, 1, 1, 4), words(4))
        >>> target = AttentionMap.from_cells(torch.tensor([[1, 0, 0, 0], [1, 0, 0, 0]]), words(4))
        >>> mmd_linear(attention, target).mean()  # squared distance of the two mean maps
        tensor(0.8660)
    """
    rows = _supervised_rows(attention, target)
    difference = (rows.target - rows.attention).sum(dim=2) / rows.count.clamp_min(1)[..., None]
    return _loss(torch.linalg.vector_norm(difference, dim=-1), rows.count > 0)


def gaussian_kernel(widths: Sequence[float]) -> Kernel:
    """Return the mean of the kernels `exp(-s / 2 w^2)` over widths w, for squared distances s.

    Args:
        widths: The widths.

    Returns:
        The kernel.

    Raises:
        ValueError: There is no width, or one that is not positive and finite.

    Example:
        >>> from overt import words
        >>> attention = AttentionMap.from_scores(torch.zeros(2, 1, 1, 1, 4), words(4))
        >>> target = AttentionMap.from_cells(torch.tensor([[1, 0, 0, 0], [0, 1, 0, 0]]), words(4))
        >>> round(float(mmd(attention, target, gaussian_kernel([0.5, 1.0])).mean()), 3)
        0.686
    """
    widths = _check_positive("widths", widths)

    def kernel(
        squared: Float[Tensor, "l h m m"], real: Bool[Tensor, "l h m m"]
    ) -> Float[Tensor, "l h m m"]:
        return torch.stack([(-squared / (2 * width**2)).exp() for width in widths]).mean(dim=0)

    return kernel


def _check_positive(name: str, values: Sequence[float]) -> tuple[float, ...]:
    """Return several positive numbers; with others a kernel is NaN, or the same for all rows."""
    found = tuple(values) if isinstance(values, Iterable) else ()
    if not found or not all(0 < value < math.inf for value in found):
        raise ValueError(f"{name} must be one or more positive numbers, got {values!r}")
    return found


def adaptive_gaussian_kernel(factors: Sequence[float] = (0.25, 0.5, 1.0, 2.0, 4.0)) -> Kernel:
    """Return the mean of `exp(-s / f m)` over factors f, with m the mean of s over different rows.

    The widths thus fit maps with any number of keys. The mean is detached: rows get no gradient
    towards a larger common distance.

    Args:
        factors: The factors.

    Returns:
        The kernel.

    Raises:
        ValueError: There is no factor, or one that is not positive and finite.

    Example:
        >>> from overt import words
        >>> attention = AttentionMap.from_scores(torch.zeros(2, 1, 1, 1, 4), words(4))
        >>> target = AttentionMap.from_cells(torch.tensor([[1, 0, 0, 0], [0, 1, 0, 0]]), words(4))
        >>> round(float(mmd(attention, target, adaptive_gaussian_kernel([1.0])).mean()), 3)
        0.732
    """
    factors = _check_positive("factors", factors)

    def kernel(
        squared: Float[Tensor, "l h m m"], real: Bool[Tensor, "l h m m"]
    ) -> Float[Tensor, "l h m m"]:
        other = real & ~torch.eye(real.shape[-1], dtype=torch.bool, device=real.device)
        total = (squared.detach() * other).sum(dim=(-2, -1), keepdim=True)
        mean = total / other.sum(dim=(-2, -1), keepdim=True).clamp_min(1)
        # if all rows are equal the distances are 0, and any width gives 1
        mean = torch.where(mean > 0, mean, 1)
        return torch.stack([(-squared / (factor * mean)).exp() for factor in factors]).mean(dim=0)

    return kernel


ADAPTIVE_GAUSSIAN = adaptive_gaussian_kernel()


def mmd(attention: AttentionMap, target: AttentionMap, kernel: Kernel = ADAPTIVE_GAUSSIAN) -> Loss:
    """Compute the biased squared maximum mean discrepancy (eq. 4, squared).

    `mean k(t, t) + mean k(a, a) - 2 mean k(t, a)`, including each row with itself: never negative,
    and with Gaussian kernels zero only for equal sets, but positive on average for two samples of
    one distribution. Squared, because the square root of eq. 4 has no gradient at its minimum. With
    one row it is `2 - 2 k(t, a)`: for a wide kernel the squared error, not a comparison of
    distributions.

    Args:
        attention: The attention of the model.
        target: The target maps.
        kernel: The similarity of two rows.

    Returns:
        A batch-level loss.

    Example:
        >>> from overt import words
        >>> attention = AttentionMap.from_scores(torch.zeros(2, 1, 1, 1, 4), words(4))
        >>> target = AttentionMap.from_cells(torch.tensor([[1, 0, 0, 0], [0, 1, 0, 0]]), words(4))
        >>> [round(float(mmd(attention, one).mean()), 3) for one in (attention, target)]
        [0.0, 0.781]
    """
    rows = _supervised_rows(attention, target)
    similarity, count = _kernel_matrix(rows, kernel), rows.count.clamp_min(1)
    share = rows.present.to(similarity.dtype) / count[..., None]
    signed = torch.cat([share, -share], dim=-1)
    return _loss(_quadratic_form(similarity, signed, signed).clamp_min(0), rows.count > 0)


def mmd_unbiased(
    attention: AttentionMap, target: AttentionMap, kernel: Kernel = ADAPTIVE_GAUSSIAN
) -> Loss:
    """Compute the unbiased squared MMD, without rows paired with themselves.

    Its mean is right, and about half of its values are negative. Fewer than two rows cost nothing.

    Args:
        attention: The attention of the model.
        target: The target maps.
        kernel: The similarity of two rows.

    Returns:
        A batch-level loss.

    Example:
        >>> from overt import words
        >>> attention = AttentionMap.from_scores(torch.zeros(2, 1, 1, 1, 4), words(4))
        >>> target = AttentionMap.from_cells(torch.tensor([[1, 0, 0, 0], [0, 1, 0, 0]]), words(4))
        >>> round(float(mmd_unbiased(attention, target).mean()), 3)
        0.376
    """
    rows = _supervised_rows(attention, target)
    similarity, n = _kernel_matrix(rows, kernel), rows.present.shape[-1]
    other = similarity - torch.diag_embed(similarity.diagonal(dim1=-2, dim2=-1))
    real, count = rows.present.to(similarity.dtype), rows.count.to(similarity.dtype)
    within = _quadratic_form(other[..., :n, :n] + other[..., n:, n:], real, real)
    across = _quadratic_form(similarity[..., :n, n:], real, real)
    pairs = (count * (count - 1)).clamp_min(1)
    return _loss(within / pairs - 2 * across / count.square().clamp_min(1), rows.count > 1)


# --- sets of rows


@dataclass(frozen=True, eq=False)
class _SupervisedRows:
    """The supervised rows of a batch for each layer and head; all other rows are zero."""

    attention: Float[Tensor, "l h n k"]
    target: Float[Tensor, "l h n k"]
    present: Bool[Tensor, "l h n"]
    keys: Int[Tensor, ""]

    @property
    def count(self) -> Tensor:
        return self.present.sum(dim=-1)


def _supervised_rows(attention: AttentionMap, target: AttentionMap) -> _SupervisedRows:
    present = supervised_rows(attention, target)
    visible = rearrange(attention.visible, "b q k -> b 1 1 q k") & present[..., None]
    sets = [
        rearrange(
            torch.where(visible, at_least_float32(one.weights), 0), "b l h q k -> l h (b q) k"
        )
        for one in (attention, target)
    ]
    keys = visible.flatten(0, 3).any(dim=0).sum()
    return _SupervisedRows(sets[0], sets[1], rearrange(present, "b l h q -> l h (b q)"), keys)


def _covariance_gap(rows: _SupervisedRows) -> Float[Tensor, "l h"]:
    """Compute `||C(t) - C(a)||_F^2` of sample covariances."""
    found, below = [], (rows.count - 1).clamp_min(1)[..., None, None]
    for rows_of_set in (rows.target, rows.attention):
        mean = rows_of_set.sum(dim=2, keepdim=True) / rows.count.clamp_min(1)[..., None, None]
        centred = (rows_of_set - mean) * rows.present[..., None]
        with torch.autocast(
            rows_of_set.device.type, enabled=False
        ):  # which would round the product
            found.append(centred.mT @ centred / below)
    return (found[0] - found[1]).square().sum(dim=(-2, -1))


def _kernel_matrix(rows: _SupervisedRows, kernel: Kernel) -> Float[Tensor, "l h m m"]:
    """Compute the similarity of all pairs of rows, targets first; 0 for absent rows."""
    both = torch.cat([rows.target, rows.attention], dim=2)
    present = torch.cat([rows.present, rows.present], dim=-1)
    real = present[..., :, None] & present[..., None, :]
    # the faster way, by matrix products, loses small distances to rounding
    squared = torch.cdist(both, both, compute_mode="donot_use_mm_for_euclid_dist").square()
    return torch.where(real, kernel(squared, real), 0)


def _quadratic_form(
    similarity: Float[Tensor, "l h m n"],
    left: Float[Tensor, "l h m"],
    right: Float[Tensor, "l h n"],
) -> Float[Tensor, "l h"]:
    """Compute `left K right` as a sum, because autocast would round a matrix product."""
    return (similarity * left[..., :, None] * right[..., None, :]).sum(dim=(-2, -1))


def _loss(values: Float[Tensor, "l h"], enough: Bool[Tensor, "l h"]) -> Loss:
    """Return the mean over layers and heads with enough rows as a batch-level loss."""
    total = torch.where(enough, values, 0).sum() / enough.sum().clamp_min(1)
    return Loss(total, enough.any().to(total.dtype), batch_level=True)
