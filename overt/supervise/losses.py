"""How far attention is from where it should be, and predictions from what is right.

Every loss takes maps or tensors and gives `Loss(total, count)`. A target with one layer and one
head broadcasts over all layers and heads of a model. Rows that see no key, or whose target is
empty, count nothing.
"""

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from overt.attention import AttentionMap
from overt.supervise.loss import Loss


def classification(prediction: Float[Tensor, "b c"], labels: Int[Tensor, " b"]) -> Loss:
    """Cross-entropy of the right class, summed over the samples."""
    total = torch.nn.functional.cross_entropy(prediction.float(), labels, reduction="sum")
    return Loss(total, torch.tensor(float(len(labels)), device=total.device))


def cross_entropy(attention: AttentionMap, target: AttentionMap) -> Loss:
    """`-sum_k t log a` of every supervised row, averaged over layers and heads.

    A key that the target wants and attention gives nothing costs what a weight of 1e-9 would.
    """
    logs = attention.log_weights.float().clamp_min(-20.7)
    return _rows(-(target.weights * logs).sum(dim=-1), attention, target)


def kl(attention: AttentionMap, target: AttentionMap) -> Loss:
    """`sum_k t log(t / a)`: the cross-entropy less the entropy of the target."""
    wanted = target.weights
    own = torch.where(wanted > 0, wanted * torch.where(wanted > 0, wanted, 1).log(), 0).sum(dim=-1)
    cross = -(wanted * attention.log_weights.float().clamp_min(-20.7)).sum(dim=-1)
    return _rows(cross + own, attention, target)


def mse(attention: AttentionMap, target: AttentionMap) -> Loss:
    """The mean over the visible keys of `(t - a)^2`, of every supervised row."""
    visible = rearrange(attention.visible, "b q k -> b 1 1 q k")
    square = (attention.weights.float() - target.weights).square() * visible
    return _rows(square.sum(dim=-1) / visible.sum(dim=-1).clamp_min(1), attention, target)


def _rows(
    values: Float[Tensor, "b l h q"], attention: AttentionMap, target: AttentionMap
) -> Loss:
    """The sum over rows that exist and have a target, the mean over layers and heads."""
    wanted = (target.weights.sum(dim=-1) > 0).flatten(1, 2).any(dim=1)
    rows = wanted & attention.rows & target.rows
    kept = torch.where(rearrange(rows, "b q -> b 1 1 q"), values, 0)
    return Loss(kept.mean(dim=(1, 2)).sum(), rows.sum())
