"""Losses on attention maps and on predictions: cross-entropy, KL divergence, MSE.

Every loss returns `Loss(total, count)`. A target with one layer and one head broadcasts over all
layers and heads of a model. Rows without a visible key or with an empty target do not count.
Targets are not normalised: counts, or masks of several keys, weight their row by its sum. Sums are
taken in float32 at least.

These losses compare one row with one target. See `distribution_matching` for losses on whole
batches, `transport` for a loss that uses the distance of keys, `adversarial` for a learned loss.
"""

from dataclasses import replace

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from overt.attention import AttentionMap, Form
from overt.errors import UserError
from overt.losses.loss import Loss

LOG_EPS = -20.7  # log(1e-9), the logarithm used for weights of zero
IGNORE_INDEX = -100  # the label of samples without a class, as in torch and transformers


def classification(prediction: Float[Tensor, "b c"], labels: Int[Tensor, " b"]) -> Loss:
    """Compute the cross-entropy of class labels.

    Args:
        prediction: The logits.
        labels: The classes; samples labelled -100 are ignored.

    Returns:
        The loss, one row per sample.

    Raises:
        UserError: A label is out of range; checked on the CPU only, because on a GPU the check
            would synchronize.

    Example:
        >>> logits = torch.zeros(3, 4)
        >>> classification(logits, torch.tensor([0, 3, -100]))  # 2 log 4; -100 is ignored
        Loss(total=tensor(2.7726), count=tensor(2.), weight=1.0, batch_level=False)
    """
    check_logits(prediction, labels)
    try:
        total = torch.nn.functional.cross_entropy(
            at_least_float32(prediction), labels, reduction="sum"
        )
    except IndexError:
        classes = prediction.shape[-1]
        wrong = ((labels < 0) | (labels >= classes)) & (labels != IGNORE_INDEX)
        check_labels(labels, wrong, classes, str(IGNORE_INDEX))
        raise
    return Loss(total, (labels != IGNORE_INDEX).sum().to(total.dtype))


def check_logits(logits: Float[Tensor, "b c"], labels: Int[Tensor, " b"]) -> None:
    """Raise unless logits are (b, c), with one label per sample."""
    if logits.ndim != 2 or labels.shape != logits.shape[:1]:
        raise ValueError(
            "expected logits (b, classes) and labels (b,), got shapes "
            f"{tuple(logits.shape)} and {tuple(labels.shape)}"
        )


def check_soft_labels(logits: Float[Tensor, "b c"], answers: Float[Tensor, "b c"]) -> None:
    """Raise unless there is a score of each class for each sample."""
    if logits.ndim != 2 or answers.shape != logits.shape:
        raise ValueError(
            "expected logits and scores of the same shape (b, classes), got "
            f"{tuple(logits.shape)} and {tuple(answers.shape)}"
        )


def check_labels(
    labels: Int[Tensor, " b"], wrong: Bool[Tensor, " b"], classes: int, without: str
) -> None:
    """Raise for the first wrong label. This synchronizes the GPU.

    Args:
        labels: The classes.
        wrong: Which labels are out of range.
        classes: The number of classes.
        without: The label of samples without a class, for the message.

    Raises:
        UserError: A label is wrong.
    """
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise UserError(
            f"the label of row {row} is {int(labels[row])}, expected 0 to {classes - 1} for "
            f"{classes} classes, or {without} for a sample without a class"
        )


def soft_classification(prediction: Float[Tensor, "b c"], answers: Float[Tensor, "b c"]) -> Loss:
    """Compute `-sum_c s_c log p_c` for soft labels s.

    If a score is the share of annotators who gave an answer, this is the mean over annotators of
    -log p of "Show, Ask, Attend, and Answer". Samples without a positive score do not count.

    Args:
        prediction: The logits.
        answers: The score of each class.

    Returns:
        The loss, one row per sample.

    Example:
        >>> answers = torch.tensor([[0.7, 0.3, 0.0, 0.0]])
        >>> soft_classification(torch.zeros(1, 4), answers).mean()  # log 4
        tensor(1.3863)
    """
    check_soft_labels(prediction, answers)
    logs = at_least_float32(prediction).log_softmax(dim=-1)
    rows = (answers > 0).any(dim=-1)
    return Loss(-(at_least_float32(answers) * logs).sum(), rows.sum())


def cross_entropy(attention: AttentionMap, target: AttentionMap) -> Loss:
    """Compute `-sum_k t log a` of every supervised row, averaged over layers and heads.

    A weight of zero on a target key costs as much as a weight of 1e-9. Log-space maps can cost more
    and keep their gradient; plain weights below 1e-9 have no gradient.

    Args:
        attention: The attention of the model.
        target: The target map.

    Returns:
        The loss, one row per supervised query.

    Raises:
        ValueError: The shapes do not match.

    Example:
        >>> from overt import words
        >>> attention = AttentionMap.from_scores(torch.zeros(1, 1, 1, 1, 4), words(4))
        >>> target = AttentionMap.from_cells(torch.tensor([[0, 1, 0, 0]]), words(4))
        >>> cross_entropy(attention, target).mean()  # log 4
        tensor(1.3863)
    """
    return sum_rows(_row_cross_entropy(attention, target), attention, target)


def kl(attention: AttentionMap, target: AttentionMap) -> Loss:
    """Compute the KL divergence `sum_k t log(t / a)`: cross-entropy minus target entropy.

    Args:
        attention: The attention of the model.
        target: The target map.

    Returns:
        The loss, one row per supervised query.

    Raises:
        ValueError: The shapes do not match.

    Example:
        >>> from overt import words
        >>> attention = AttentionMap.from_scores(torch.zeros(1, 1, 1, 1, 4), words(4))
        >>> target = AttentionMap.from_cells(torch.tensor([[0.5, 0.5, 0, 0]]), words(4))
        >>> kl(attention, target).mean()  # log 4 - log 2
        tensor(0.6931)
    """
    check_shapes(attention, target)
    weights = at_least_float32(target.weights)
    negative_entropy = torch.where(
        weights > 0, weights * torch.where(weights > 0, weights, 1).log(), 0
    ).sum(dim=-1)
    return sum_rows(_row_cross_entropy(attention, target) + negative_entropy, attention, target)


def mse(attention: AttentionMap, target: AttentionMap) -> Loss:
    """Compute the mean over visible keys of `(t - a)^2`, for every supervised row (SSA, eq. 6).

    Args:
        attention: The attention of the model.
        target: The target map.

    Returns:
        The loss, one row per supervised query.

    Raises:
        ValueError: The shapes do not match.

    Example:
        >>> from overt import words
        >>> attention = AttentionMap.from_scores(torch.zeros(1, 1, 1, 1, 4), words(4))
        >>> target = AttentionMap.from_cells(torch.tensor([[0, 1, 0, 0]]), words(4))
        >>> mse(attention, target).mean()
        tensor(0.1875)
    """
    check_shapes(attention, target)
    visible = rearrange(attention.visible, "b q k -> b 1 1 q k")
    square = (
        at_least_float32(attention.weights) - at_least_float32(target.weights)
    ).square() * visible
    return sum_rows(square.sum(dim=-1) / visible.sum(dim=-1).clamp_min(1), attention, target)


def _row_cross_entropy(attention: AttentionMap, target: AttentionMap) -> Float[Tensor, "b l h q"]:
    check_shapes(attention, target)
    weights = at_least_float32(target.weights)
    fused = attention.fused_cross_entropy(weights, LOG_EPS)
    if fused is not None:
        return fused
    logs = at_least_float32(detach_subnormal(attention).log_weights)
    if attention.form is Form.LOG:
        logs = torch.where(logs.isneginf(), LOG_EPS, logs)
    else:
        logs = logs.clamp_min(LOG_EPS)
    return -(weights * logs).sum(dim=-1)


def check_shapes(attention: AttentionMap, target: AttentionMap) -> None:
    """Raise unless the target has the shape of the attention, or one layer or head for all."""
    for one in (attention, target):
        if not isinstance(one, AttentionMap):
            raise TypeError(
                f"expected two AttentionMaps, got a {type(one).__name__}; create one with "
                "AttentionMap.from_cells(weights, grid(7, 7)) from weights (b, k), or with "
                "AttentionMap(values, keys, queries) from weights (b, l, h, q, k)"
            )
    ours, theirs = attention.shape, target.shape
    if any(theirs[axis] != ours[axis] for axis in (0, 3, 4)):
        remedy = ""
        if ours[0] == theirs[0] and len(attention.keys.spans) > 1:
            names = [span.name for span in attention.keys.spans]
            remedy = f": choose a block of {names} with attention.between(query, key)"
        raise ValueError(
            "attention and target need the same samples, queries and keys, got "
            f"({ours[0]}, {ours[3]}, {ours[4]}) and ({theirs[0]}, {theirs[3]}, {theirs[4]}); only "
            f"layers and heads broadcast{remedy}"
        )
    if any(theirs[axis] not in (1, ours[axis]) for axis in (1, 2)):
        raise ValueError(
            f"attention has {ours[1]} layers and {ours[2]} heads, target has {theirs[1]} and "
            f"{theirs[2]}: use one target for all, or one for each"
        )


def supervised_rows(attention: AttentionMap, target: AttentionMap) -> Bool[Tensor, "b l h q"]:
    """Return which rows have a visible key and a target.

    NaN targets count, so that the loss is NaN and training stops.
    """
    check_shapes(attention, target)
    supervised = ~(target.weights.sum(dim=-1) <= 0)
    rows = rearrange(attention.rows & target.rows, "b q -> b 1 1 q")
    return (supervised & rows).expand(*attention.shape[:-1])


def sum_rows(
    values: Float[Tensor, "b l h q"], attention: AttentionMap, target: AttentionMap
) -> Loss:
    """Sum over supervised rows, and average over their supervised layers and heads."""
    supervised = supervised_rows(attention, target)
    sums = torch.where(supervised, values, 0).sum(dim=(1, 2))
    counts = supervised.sum(dim=(1, 2))
    return Loss((sums / counts.clamp_min(1)).sum(), (counts > 0).sum())


def detach_subnormal(attention: AttentionMap) -> AttentionMap:
    """Detach plain weights whose logarithm has a gradient that their dtype cannot represent.

    The derivative of the logarithm is one over the weight: infinite for 1e-7 in 16 bits, and NaN
    one step further back.
    """
    if attention.form is Form.LOG:
        return attention
    values = attention.values
    large = values >= torch.finfo(values.dtype).tiny
    return replace(attention, values=torch.where(large, values, values.detach()))


def at_least_float32(values: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """Convert to float32 unless the precision is higher already."""
    return values.to(torch.promote_types(values.dtype, torch.float32))
