"""Selection of the heads to supervise: by hand, by usefulness for the task, or by learned gates.

"Attending Self-Attention" (Samaran et al. 2021) supervises every head of every layer alike and
names the selection of heads as future work. Everything here compares two maps and can replace
`cross_entropy`: `direct_supervision(block, target, on_selected_heads(which), ...)`.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Num
from torch import Tensor, nn

from overt.attention import AttentionMap, Form
from overt.losses.attention_losses import (
    LOG_EPS,
    at_least_float32,
    cross_entropy,
    detach_subnormal,
    supervised_rows,
)
from overt.losses.grounding import MapLoss
from overt.losses.loss import Loss

# --- selected heads


def on_selected_heads(which: Bool[Tensor, "l h"], compare: MapLoss = cross_entropy) -> MapLoss:
    """Return a loss on some heads only; the mean is over them, and other heads get no gradient.

    This does not save computation; `trace.heads` and `trace.where` do.

    Args:
        which: The heads to supervise.
        compare: The loss of two maps.

    Returns:
        A loss of two maps.

    Example:
        >>> weights = torch.tensor([[[[[0.5, 0.5]], [[0.9, 0.1]]]]])
        >>> attention = AttentionMap.from_weights(weights, axes="b l h q k")
        >>> target = AttentionMap.from_weights(torch.tensor([[1.0, 0.0]]), axes="b k")
        >>> on_selected_heads(torch.tensor([[True, False]]))(attention, target).mean()  # log 2
        tensor(0.6931)
    """

    def loss(attention: AttentionMap, target: AttentionMap) -> Loss:
        return compare(attention, mask_target_heads(target, which))

    return loss


def mask_target_heads(target: AttentionMap, which: Bool[Tensor, "l h"]) -> AttentionMap:
    """Return the target for the selected heads, with zeros for the others.

    The losses of this package average over the layers and heads that have a target.

    Args:
        target: The target, with one layer and head or with all.
        which: The heads to supervise.

    Returns:
        A target with all layers and heads.

    Raises:
        ValueError: The target has another number of layers or heads.

    Example:
        >>> target = AttentionMap.from_weights(torch.tensor([[1.0, 0.0]]), axes="b k")
        >>> mask_target_heads(target, torch.tensor([[True, False]])).weights.sum(dim=-1).flatten()
        tensor([1., 0.])
    """
    b, l, h, q, k = target.values.shape
    if (l, h) not in ((1, 1), tuple(which.shape)):
        raise ValueError(
            f"target has {l} layers and {h} heads, expected 1 and 1 or {tuple(which.shape)}"
        )
    kept = rearrange(which.to(target.values.device), "l h -> 1 l h 1 1")
    weights = torch.where(kept, target.weights, 0).expand(b, *which.shape, q, k)
    return replace(target, values=weights, form=Form.PLAIN)


def heads_of_layers(layers: Iterable[int], shape: tuple[int, int]) -> Bool[Tensor, "l h"]:
    """Select all heads of some layers.

    Args:
        layers: The indices of the layers; -1 is the last one.
        shape: The numbers of layers and heads of the model.

    Returns:
        The selected heads.

    Raises:
        ValueError: A layer is out of range.

    Example:
        >>> heads_of_layers([-1], (2, 3))
        tensor([[False, False, False],
                [ True,  True,  True]])
    """
    found = torch.zeros(shape, dtype=torch.bool)
    for layer in layers:
        if not -shape[0] <= layer < shape[0]:
            raise ValueError(f"layer {layer} is out of range for {shape[0]} layers")
        found[layer] = True
    return found


def top_heads(scores: Float[Tensor, "l h"], count: int) -> Bool[Tensor, "l h"]:
    """Select the `count` heads with the highest scores; ties select the first, NaN never.

    Args:
        scores: A score per head, such as the grounding accuracy of `overt.metrics` on a validation
            set for heads that already ground, or `gradient_agreement` for heads that should.
        count: How many heads to select.

    Returns:
        The selected heads.

    Raises:
        ValueError: `count` is out of range.

    Example:
        >>> top_heads(torch.tensor([[0.1, 0.9], [0.5, 0.2]]), count=2)
        tensor([[False,  True],
                [ True, False]])
    """
    if not 1 <= count <= scores.numel():
        raise ValueError(f"count must be 1 to {scores.numel()}, got {count}")
    flat = scores.flatten().nan_to_num(-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    order = flat.argsort(descending=True, stable=True)[:count]
    found = torch.zeros_like(flat, dtype=torch.bool).scatter(0, order, True)
    return (found & ~scores.isnan().flatten()).view_as(scores)


# --- losses per head


def cross_entropy_per_head(
    attention: AttentionMap, target: AttentionMap
) -> tuple[Float[Tensor, "l h"], Num[Tensor, "l h"]]:
    """Compute the cross-entropy of every head.

    Args:
        attention: The attention of the model.
        target: The target map.

    Returns:
        The sums over supervised rows, and the numbers of these rows.

    Example:
        >>> weights = torch.tensor([[[[[0.5, 0.5]], [[0.9, 0.1]]]]])
        >>> attention = AttentionMap.from_weights(weights, axes="b l h q k")
        >>> target = AttentionMap.from_weights(torch.tensor([[1.0, 0.0]]), axes="b k")
        >>> cross_entropy_per_head(attention, target)
        (tensor([[0.6931, 0.1054]]), tensor([[1, 1]]))
    """
    costs, rows = _row_costs(attention, target)
    return torch.where(rows, costs, 0).sum(dim=(0, 3)), rows.sum(dim=(0, 3))


def gradient_agreement(
    parameters: Sequence[Tensor],
    task: Callable[[], Float[Tensor, ""]],
    heads: Callable[[], Float[Tensor, "l h"]],
    step: float = 1e-3,
) -> Float[Tensor, "l h"]:
    """Compute how much the loss of each head falls in a small step for the task alone.

    To first order this is `<task gradient, head gradient> / |task gradient|`: above 0, supervising
    the head agrees with the task. One additional forward pass covers all heads, and fused kernels
    can be used, which a second derivative would prevent. Disable dropout, so that the two passes do
    not differ otherwise. Parameters are restored.

    Args:
        parameters: The parameters to move.
        task: Computes the task loss.
        heads: Computes the loss of each head.
        step: The length of the step.

    Returns:
        One number per head.

    Example:
        >>> weight = torch.tensor([1.0], requires_grad=True)
        >>> def heads():  # the first agrees with the task, the second does not
        ...     return torch.cat([weight, -weight])[None]
        >>> gradient_agreement([weight], lambda: weight.sum(), heads).round(decimals=2)
        tensor([[ 1., -1.]])
    """
    gradients = torch.autograd.grad(task(), list(parameters), allow_unused=True)
    length = torch.stack([gradient.norm() for gradient in gradients if gradient is not None]).norm()
    saved = [one.detach().clone() for one in parameters]
    with torch.no_grad():
        before = heads()
        try:
            for one, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None:
                    one.sub_(gradient * (step / length.clamp_min(1e-12)))
            after = heads()
        finally:
            for one, value in zip(parameters, saved, strict=True):
                one.copy_(value)
    return (before - after) / step


# --- learned selection


def soft_minimum_over_heads(temperature: float = 1.0) -> MapLoss:
    """Return the loss `-t log mean exp(-c / t)` over the costs c of all heads, row by row.

    A temperature near 0 only requires that one head grounds each word; a high temperature is the
    mean over all heads, as in the paper. The best heads get most of the gradient.

    Args:
        temperature: The temperature t.

    Returns:
        A loss of two maps.

    Raises:
        ValueError: The temperature is not positive.

    Example:
        >>> weights = torch.tensor([[[[[0.5, 0.5]], [[1.0, 0.0]]]]])
        >>> attention = AttentionMap.from_weights(weights, axes="b l h q k")
        >>> target = AttentionMap.from_weights(torch.tensor([[1.0, 0.0]]), axes="b k")
        >>> soft_minimum_over_heads(0.01)(attention, target).mean().round(decimals=2)
        tensor(0.0100)
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}")

    def compare(attention: AttentionMap, target: AttentionMap) -> Loss:
        costs, rows = _row_costs(attention, target)
        soft = torch.where(rows, -costs / temperature, -torch.inf)
        some = rows.any(dim=2).any(dim=1)
        count = rows.sum(dim=(1, 2)).clamp_min(1)
        soft = torch.where(some[:, None, None], soft, 0).logsumexp(dim=(1, 2)) - count.log()
        return Loss(torch.where(some, -temperature * soft, 0).sum(), some.sum())

    return compare


class HeadGates(nn.Module):
    """Learn how much each head is supervised.

    The objective is `sum p c + t sum p log(p n)` for gates p and mean costs c of the n heads: the
    weighted cost, and t times the divergence of the gates from uniform. For constant costs its
    minimum is p proportional to exp(-c / t): heads that ground easily are supervised, and the
    others are free. A high temperature t is the paper's direct supervision. The gates are a loss
    module (`SupervisedModel(net, gates=HeadGates(...))`), not part of the model.

    Args:
        layers: The number of layers.
        heads: The number of heads per layer.
        temperature: The temperature t.

    Raises:
        ValueError: The temperature is not positive.

    Example:
        >>> gates = HeadGates(layers=2, heads=4)
        >>> gates.probabilities.sum()
        tensor(1., grad_fn=<SumBackward0>)
    """

    def __init__(self, layers: int, heads: int, temperature: float = 0.5) -> None:
        super().__init__()
        if temperature <= 0:
            raise ValueError(f"temperature must be positive, got {temperature}")
        self.temperature = temperature
        self.logits = nn.Parameter(torch.zeros(layers, heads))

    @property
    def probabilities(self) -> Float[Tensor, "l h"]:
        """How much each head is supervised; sums to one."""
        return self.logits.flatten().softmax(dim=0).view_as(self.logits)

    def forward(self, attention: AttentionMap, target: AttentionMap) -> Loss:
        """Compute the objective, summed over rows that have a target in every head."""
        if tuple(attention.values.shape[1:3]) != tuple(self.logits.shape):
            raise ValueError(
                f"attention has {tuple(attention.values.shape[1:3])} layers and heads, the gates "
                f"have {tuple(self.logits.shape)}"
            )
        costs, rows = _row_costs(attention, target)
        whole = rows.all(dim=2).all(dim=1)
        shares = self.probabilities.to(costs.dtype)
        cost = (costs * rearrange(shares, "l h -> 1 l h 1")).sum(dim=(1, 2))
        logs = self.logits.flatten().log_softmax(dim=0).view_as(shares)
        divergence = (shares * (logs + math.log(shares.numel()))).sum()
        total = torch.where(whole, cost, 0).sum() + self.temperature * divergence * whole.sum()
        return Loss(total, whole.sum())


def _row_costs(
    attention: AttentionMap, target: AttentionMap
) -> tuple[Float[Tensor, "b l h q"], Bool[Tensor, "b l h q"]]:
    """Return the cross-entropy of each row, as in `cross_entropy`, and the supervised rows."""
    rows = supervised_rows(attention, target)
    logs = at_least_float32(detach_subnormal(attention).log_weights)
    logs = torch.where(logs.isneginf(), LOG_EPS, logs)
    if attention.form is Form.PLAIN:
        logs = logs.clamp_min(LOG_EPS)
    return -(at_least_float32(target.weights) * logs).sum(dim=-1), rows
