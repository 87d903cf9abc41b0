"""How far attention is from where it should be, and predictions from what is right.

Every loss takes maps or tensors and gives `Loss(total, count)`. A target with one layer and one
head broadcasts over all layers and heads of a model. Rows that see no key, or whose target is
empty, count nothing. Targets are taken as they are: one that was not normalised, as counts and
masks of several keys, weighs its row by its sum. Sums are taken in float32 at least.

The losses here compare one row with one target. `distributions` holds those that compare whole
batches, `transport` one that knows how far apart keys are, `adversary` one that is learned.
"""

from dataclasses import replace

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from overt.attention import AttentionMap, Form
from overt.capture.unread import Unread
from overt.errors import BadInput
from overt.supervise.loss import Loss

NOTHING = -20.7  # the logarithm of 1e-9
UNLABELLED = -100  # what torch and transformers call the class of a sample that has none


def classification(prediction: Float[Tensor, "b c"], labels: Int[Tensor, " b"]) -> Loss:
    """Cross-entropy of the right class, summed over the samples; one of class -100 has none.

    On a CPU, where it costs no wait, a class that is not there is told in a sentence.
    """
    try:
        total = torch.nn.functional.cross_entropy(precise(prediction), labels, reduction="sum")
    except IndexError:
        classes = prediction.shape[-1]
        wrong = ((labels < 0) | (labels >= classes)) & (labels != UNLABELLED)
        check_labels(labels, wrong, classes, str(UNLABELLED))
        raise
    return Loss(total, (labels != UNLABELLED).sum().to(total.dtype))


def check_labels(
    labels: Int[Tensor, " b"], wrong: Bool[Tensor, " b"], classes: int, without: str
) -> None:
    """Raise for the first wrong label; `without` is how a sample without a class is labelled.

    This asks for a value: on a card, that is to wait.
    """
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise BadInput(
            f"row {row} is labelled {int(labels[row])}, and there are {classes} classes, 0 to "
            f"{classes - 1}; a sample without a class is labelled {without}"
        )


def soft_classification(prediction: Float[Tensor, "b c"], answers: Float[Tensor, "b c"]) -> Loss:
    """`-sum_c s_c log p_c` where several classes are right, each as much as its score says.

    With the share of annotators who gave an answer as its score, this is the mean over annotators
    of -log p of "Show, Ask, Attend, and Answer". Samples of which no answer is a class count
    nothing.
    """
    logs = precise(prediction).log_softmax(dim=-1)
    rows = (answers > 0).any(dim=-1)
    return Loss(-(precise(answers) * logs).sum(), rows.sum())


def cross_entropy(attention: AttentionMap, target: AttentionMap) -> Loss:
    """`-sum_k t log a` of every supervised row, averaged over layers and heads.

    A key that the target wants and attention gives nothing costs what a weight of 1e-9 would. A
    map that keeps logarithms may cost more and still learns from it; plain weights below that
    have no gradient left.
    """
    return summed(_cross(attention, target), attention, target)


def kl(attention: AttentionMap, target: AttentionMap) -> Loss:
    """`sum_k t log(t / a)`: the cross-entropy less the entropy of the target."""
    check_fit(attention, target)
    wanted = precise(target.weights)
    own = torch.where(wanted > 0, wanted * torch.where(wanted > 0, wanted, 1).log(), 0).sum(dim=-1)
    return summed(_cross(attention, target) + own, attention, target)


def mse(attention: AttentionMap, target: AttentionMap) -> Loss:
    """The mean over the visible keys of `(t - a)^2`, of every supervised row (SSA, eq. 6)."""
    check_fit(attention, target)
    visible = rearrange(attention.visible, "b q k -> b 1 1 q k")
    square = (precise(attention.weights) - precise(target.weights)).square() * visible
    return summed(square.sum(dim=-1) / visible.sum(dim=-1).clamp_min(1), attention, target)


def _cross(attention: AttentionMap, target: AttentionMap) -> Float[Tensor, "b l h q"]:
    check_fit(attention, target)
    if isinstance(attention, Unread):
        found = attention.costs(precise(target.weights), NOTHING)
        if found is not None:
            return found
    logs = precise(steady(attention).log_weights)
    if attention.form is Form.LOG:
        logs = torch.where(logs.isneginf(), NOTHING, logs)
    else:
        logs = logs.clamp_min(NOTHING)
    return -(precise(target.weights) * logs).sum(dim=-1)


def check_fit(attention: AttentionMap, target: AttentionMap) -> None:
    """Raise when the target is not one for this attention; one layer and one head are for all."""
    for one in (attention, target):
        if not isinstance(one, AttentionMap):
            raise TypeError(
                f"a loss compares two AttentionMaps, and one of these is a {type(one).__name__}; "
                "AttentionMap(values, keys, queries) makes one of weights (b, l, h, q, k)"
            )
    ours, theirs = attention.shape, target.shape
    if any(theirs[axis] != ours[axis] for axis in (0, 3, 4)):
        raise ValueError(
            f"a target of {theirs[0]} samples, {theirs[3]} queries and {theirs[4]} keys for "
            f"attention of {ours[0]}, {ours[3]} and {ours[4]}; only layers and heads broadcast"
        )
    if any(theirs[axis] not in (1, ours[axis]) for axis in (1, 2)):
        raise ValueError(
            f"a target of {theirs[1]} layers and {theirs[2]} heads for attention of {ours[1]} and "
            f"{ours[2]}; give one for all, or one for each"
        )


def supervised(attention: AttentionMap, target: AttentionMap) -> Bool[Tensor, "b l h q"]:
    """Which rows of the attention see a key and have a target: those that a loss is about.

    A target that is not a number is one: its loss is none either, and training stops and says so.
    """
    check_fit(attention, target)
    wanted = ~(target.weights.sum(dim=-1) <= 0)
    rows = rearrange(attention.rows & target.rows, "b q -> b 1 1 q")
    return (wanted & rows).expand(*attention.shape[:-1])


def summed(values: Float[Tensor, "b l h q"], attention: AttentionMap, target: AttentionMap) -> Loss:
    """The sum over rows that exist and have a target, the mean over layers and heads that do."""
    wanted = supervised(attention, target)
    sums = torch.where(wanted, values, 0).sum(dim=(1, 2))
    times = wanted.sum(dim=(1, 2))
    return Loss((sums / times.clamp_min(1)).sum(), (times > 0).sum())


def steady(attention: AttentionMap) -> AttentionMap:
    """The same map, whose plain weights get no gradient where their format could not hold it.

    The slope of a logarithm is one over the weight. Of a weight of 1e-7 in sixteen bits that is
    infinite, and NaN one step further back.
    """
    if attention.form is Form.LOG:
        return attention
    values = attention.values
    large = values >= torch.finfo(values.dtype).tiny
    return replace(attention, values=torch.where(large, values, values.detach()))


def precise(values: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """The values in 32 bits at least."""
    return values.to(torch.promote_types(values.dtype, torch.float32))
