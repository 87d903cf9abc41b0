"""Which heads to supervise: some that were chosen, those that help the task, or learned gates.

"Attending Self-Attention" (Samaran et al. 2021) supervises every head of every layer alike, and
names the choice of heads as future work. Everything here is a way to compare two maps, and goes
where `cross_entropy` goes: `direct(block, target, on_heads(which), on_heads(which))`.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Num
from torch import Tensor, nn

from overt.attention import AttentionMap, Form
from overt.supervise.grounding import Compare
from overt.supervise.loss import Loss
from overt.supervise.losses import NOTHING, cross_entropy, precise, steady, supervised

# --- chosen


def on_heads(which: Bool[Tensor, "l h"], compare: Compare = cross_entropy) -> Compare:
    """A comparison on some heads alone; the mean is over them, and no other gets a gradient.

    Only the loss is left out: where attention is read by blocks, `seen.heads` and `seen.where`
    also save the work.
    """

    def some(attention: AttentionMap, target: AttentionMap) -> Loss:
        return compare(attention, chosen(target, which))

    return some


def chosen(target: AttentionMap, which: Bool[Tensor, "l h"]) -> AttentionMap:
    """The target for the heads that are chosen, and none for the others.

    Every loss of ours takes its mean over the layers and heads that have a target.
    """
    b, l, h, q, k = target.values.shape
    if (l, h) not in ((1, 1), tuple(which.shape)):
        raise ValueError(
            f"a target of {l} layers and {h} heads for a choice among {tuple(which.shape)}"
        )
    kept = rearrange(which.to(target.values.device), "l h -> 1 l h 1 1")
    weights = torch.where(kept, target.weights, 0).expand(b, *which.shape, q, k)
    return replace(target, values=weights, form=Form.PLAIN)


def of_layers(layers: Iterable[int], shape: tuple[int, int]) -> Bool[Tensor, "l h"]:
    """All heads of some layers, in a model of `shape` = (layers, heads); -1 is the last layer."""
    found = torch.zeros(shape, dtype=torch.bool)
    for layer in layers:
        if not -shape[0] <= layer < shape[0]:
            raise ValueError(f"layer {layer} is not one of {shape[0]}")
        found[layer] = True
    return found


def best_heads(scores: Float[Tensor, "l h"], count: int) -> Bool[Tensor, "l h"]:
    """The `count` heads with the highest scores, the first of equals; NaN is never chosen.

    Scores may be `measure.grounding_accuracy` averaged over a validation set, the heads that ground
    already, or `agreement`, those that should.
    """
    if not 1 <= count <= scores.numel():
        raise ValueError(f"{count} heads cannot be chosen of {scores.numel()}")
    flat = scores.flatten().nan_to_num(-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    order = flat.argsort(descending=True, stable=True)[:count]
    found = torch.zeros_like(flat, dtype=torch.bool).scatter(0, order, True)
    return (found & ~scores.isnan().flatten()).view_as(scores)


# --- each head by itself


def each_head(
    attention: AttentionMap, target: AttentionMap
) -> tuple[Float[Tensor, "l h"], Num[Tensor, "l h"]]:
    """The cross-entropy of every head summed over its supervised rows, and how many those are."""
    costs, rows = _costs(attention, target)
    return torch.where(rows, costs, 0).sum(dim=(0, 3)), rows.sum(dim=(0, 3))


def agreement(
    parameters: Sequence[Tensor],
    task: Callable[[], Float[Tensor, ""]],
    heads: Callable[[], Float[Tensor, "l h"]],
    step: float = 1e-3,
) -> Float[Tensor, "l h"]:
    """How much each head's loss falls when a small step is made for the task alone.

    To first order `<task gradient, head gradient> / |task gradient|` for every head: above 0, to
    supervise the head and to learn the task pull the same way. One forward pass more answers for
    all heads, and fused kernels stay on, which a second derivative would not allow. Dropout must be
    off, so that the two passes differ in nothing else. Parameters are left as they were.
    """
    slopes = torch.autograd.grad(task(), list(parameters), allow_unused=True)
    length = torch.stack([slope.norm() for slope in slopes if slope is not None]).norm()
    kept = [one.detach().clone() for one in parameters]
    with torch.no_grad():
        before = heads()
        try:
            for one, slope in zip(parameters, slopes, strict=True):
                if slope is not None:
                    one.sub_(slope * (step / length.clamp_min(1e-12)))
            after = heads()
        finally:
            for one, value in zip(parameters, kept, strict=True):
                one.copy_(value)
    return (before - after) / step


# --- learned


def any_head(temperature: float = 1.0) -> Compare:
    """`-t log mean exp(-c / t)` over the costs c of all heads, row by row: some head should do it.

    A temperature near 0 asks of each word no more than that one head grounds it; a high one is the
    mean over all heads, as in the paper. The heads that are nearest get most of the gradient.
    """
    if temperature <= 0:
        raise ValueError(f"a temperature of {temperature}; it is above 0")

    def compare(attention: AttentionMap, target: AttentionMap) -> Loss:
        costs, rows = _costs(attention, target)
        soft = torch.where(rows, -costs / temperature, -torch.inf)
        some = rows.any(dim=2).any(dim=1)
        count = rows.sum(dim=(1, 2)).clamp_min(1)
        soft = torch.where(some[:, None, None], soft, 0).logsumexp(dim=(1, 2)) - count.log()
        return Loss(torch.where(some, -temperature * soft, 0).sum(), some.sum())

    return compare


class Gates(nn.Module):
    """How much each head is supervised, p, learned with the rest.

    The objective is `sum p c + t sum p log(p n)` for the mean costs c of the n heads: the cost that
    is felt, and t times how far the choice is from even. Where costs stand still its minimum is p
    proportional to exp(-c / t), so heads to which grounding comes easily are supervised and the
    others are left to do something else. A high temperature t is the paper's direct supervision.
    The gates are a teacher (`Taught(net, gates=Gates(...))`): they are not part of the model.
    """

    def __init__(self, layers: int, heads: int, temperature: float = 0.5) -> None:
        super().__init__()
        if temperature <= 0:
            raise ValueError(f"a temperature of {temperature}; it is above 0")
        self.temperature = temperature
        self.logits = nn.Parameter(torch.zeros(layers, heads))

    @property
    def shares(self) -> Float[Tensor, "l h"]:
        """How much each head is supervised; they sum to one."""
        return self.logits.flatten().softmax(dim=0).view_as(self.logits)

    def forward(self, attention: AttentionMap, target: AttentionMap) -> Loss:
        """The objective, summed over rows that have a target in every head."""
        if tuple(attention.values.shape[1:3]) != tuple(self.logits.shape):
            raise ValueError(
                f"gates for {tuple(self.logits.shape)} layers and heads, and attention has "
                f"{tuple(attention.values.shape[1:3])}"
            )
        costs, rows = _costs(attention, target)
        whole = rows.all(dim=2).all(dim=1)
        shares = self.shares.to(costs.dtype)
        felt = (costs * rearrange(shares, "l h -> 1 l h 1")).sum(dim=(1, 2))
        logs = self.logits.flatten().log_softmax(dim=0).view_as(shares)
        uneven = (shares * (logs + math.log(shares.numel()))).sum()
        total = torch.where(whole, felt, 0).sum() + self.temperature * uneven * whole.sum()
        return Loss(total, whole.sum())


def _costs(
    attention: AttentionMap, target: AttentionMap
) -> tuple[Float[Tensor, "b l h q"], Bool[Tensor, "b l h q"]]:
    """The cross-entropy of each row, as `cross_entropy` has it, and which rows are supervised."""
    rows = supervised(attention, target)
    logs = precise(steady(attention).log_weights)
    logs = torch.where(logs.isneginf(), NOTHING, logs)
    if attention.form is Form.PLAIN:
        logs = logs.clamp_min(NOTHING)
    return -(precise(target.weights) * logs).sum(dim=-1), rows
