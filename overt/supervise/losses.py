"""How far attention is from where it should be, and predictions from what is right.

Every loss takes maps or tensors and gives `Loss(total, count)`. A target with one layer and one
head broadcasts over all layers and heads of a model. Rows that see no key, or whose target is
empty, count nothing. Sums are taken in float32 at least.
"""

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from overt.attention import AttentionMap, Form
from overt.supervise.loss import Loss

NOTHING = -20.7  # the logarithm of 1e-9


def classification(prediction: Float[Tensor, "b c"], labels: Int[Tensor, " b"]) -> Loss:
    """Cross-entropy of the right class, summed over the samples."""
    total = torch.nn.functional.cross_entropy(_precise(prediction), labels, reduction="sum")
    return Loss(total, torch.tensor(float(len(labels)), device=total.device))


def cross_entropy(attention: AttentionMap, target: AttentionMap) -> Loss:
    """`-sum_k t log a` of every supervised row, averaged over layers and heads.

    A key that the target wants and attention gives nothing costs what a weight of 1e-9 would. A
    map that keeps logarithms may cost more and still learns from it; plain weights below that
    have no gradient left.
    """
    return _rows(_cross(attention, target), attention, target)


def kl(attention: AttentionMap, target: AttentionMap) -> Loss:
    """`sum_k t log(t / a)`: the cross-entropy less the entropy of the target."""
    wanted = _precise(target.weights)
    own = torch.where(wanted > 0, wanted * torch.where(wanted > 0, wanted, 1).log(), 0).sum(dim=-1)
    return _rows(_cross(attention, target) + own, attention, target)


def mse(attention: AttentionMap, target: AttentionMap) -> Loss:
    """The mean over the visible keys of `(t - a)^2`, of every supervised row."""
    visible = rearrange(attention.visible, "b q k -> b 1 1 q k")
    square = (_precise(attention.weights) - _precise(target.weights)).square() * visible
    return _rows(square.sum(dim=-1) / visible.sum(dim=-1).clamp_min(1), attention, target)


def _cross(attention: AttentionMap, target: AttentionMap) -> Float[Tensor, "b l h q"]:
    logs = _precise(attention.log_weights)
    if attention.form is Form.LOG:
        logs = torch.where(logs.isneginf(), NOTHING, logs)
    else:
        logs = logs.clamp_min(NOTHING)
    return -(_precise(target.weights) * logs).sum(dim=-1)


def _rows(values: Float[Tensor, "b l h q"], attention: AttentionMap, target: AttentionMap) -> Loss:
    """The sum over rows that exist and have a target, the mean over layers and heads that do."""
    wanted = target.weights.sum(dim=-1) > 0
    rows = wanted.flatten(1, 2).any(dim=1) & attention.rows & target.rows
    wanted = (wanted & rearrange(rows, "b q -> b 1 1 q")).expand_as(values)
    sums = torch.where(wanted, values, 0).sum(dim=(1, 2))
    return Loss((sums / wanted.sum(dim=(1, 2)).clamp_min(1)).sum(), rows.sum())


def _precise(values: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    return values.to(torch.promote_types(values.dtype, torch.float32))
