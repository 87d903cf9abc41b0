"""Grounding of words in regions: per layer and head, and in total.

Maps are blocks from words to regions, or back, with the rows of the truth: `trace.block("text",
"regions")` of a watched model, or `attention.block(...)` of a map. Scores are per sample, layer and
head, averaged over the sample's grounded rows; NaN for a sample without any.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from overt.attention import AttentionMap, Kind
from overt.geometry import RegionGeometry
from overt.metrics.metric import SampleScores, declare_metric, invalid_distribution, mask_undefined

HeadScores = Float[Tensor, "b l h"]  # NaN where a sample has no grounded row


@declare_metric("grounding mass", "share", higher_is_better=True, low=0.0, high=1.0)
def grounding_mass(attention: AttentionMap, truth: AttentionMap) -> HeadScores:
    """Compute the share of a row's attention to the block that falls on the true keys.

    Renormalized over the block, as in the direct loss; `block_mass` is the mass before that. Rows
    with a negative weight do not count.

    Args:
        attention: The block from words to regions, or back.
        truth: The true keys of each row.

    Returns:
        One share per sample, layer and head.

    Example:
        >>> from overt import regions, words
        >>> weights = torch.tensor([[[[[0.6, 0.2, 0.2], [0.1, 0.1, 0.8]]]]])  # 2 words, 3 regions
        >>> attention = AttentionMap(weights, regions(3), words(2))
        >>> named = torch.tensor([[[[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]]]])
        >>> truth = AttentionMap(named, regions(3), words(2))
        >>> grounding_mass(attention, truth)  # (0.6 + 0.1) / 2, one layer and one head
        tensor([[[0.3500]]])
    """
    weights, inside, rows = _align_rows(attention, truth)
    total = weights.sum(dim=-1)
    shares = (weights * inside).sum(dim=-1) / torch.where(total > 0, total, 1)
    return _mean_over_rows(shares, rows, (total > 0) & ~invalid_distribution(weights))


@declare_metric("grounding accuracy", "share", higher_is_better=True, low=0.0, high=1.0)
def grounding_accuracy(attention: AttentionMap, truth: AttentionMap) -> HeadScores:
    """Compute the share of rows whose largest weight is on a true key.

    Ties count by their share, so that a uniform map scores the expectation of a random key.

    Args:
        attention: The block from words to regions, or back.
        truth: The true keys of each row.

    Returns:
        One share per sample, layer and head.

    Example:
        >>> from overt import regions, words
        >>> weights = torch.tensor([[[[[0.6, 0.2, 0.2], [0.1, 0.1, 0.8]]]]])  # 2 words, 3 regions
        >>> attention = AttentionMap(weights, regions(3), words(2))
        >>> named = torch.tensor([[[[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]]]])
        >>> truth = AttentionMap(named, regions(3), words(2))
        >>> grounding_accuracy(attention, truth)  # the first word is right, the second is not
        tensor([[[0.5000]]])
    """
    weights, inside, rows = _align_rows(attention, truth)
    # exact ties only, unlike `pointing_game`, which also counts ties up to rounding
    top = _top(weights, attention.visible[:, None, None])
    hits = (top & inside).sum(dim=-1) / top.sum(dim=-1).clamp_min(1)
    return _mean_over_rows(hits.to(weights.dtype), rows, weights.sum(dim=-1) > 0)


@declare_metric("reach", "share", higher_is_better=None, low=0.0, high=1.0)
def block_mass(attention: AttentionMap, truth: AttentionMap) -> HeadScores:
    """Compute the share of attention that a grounded row gives to the block at all.

    Before renormalization. The direct loss has no gradient on it: grounding can be perfect beside a
    sink with 99.9 % of the attention. Rows with a negative weight do not count.

    Args:
        attention: The block from words to regions, not renormalized.
        truth: The true keys of each row.

    Returns:
        One share per sample, layer and head.

    Raises:
        ValueError: The rows are renormalized.
    """
    if attention.kind is Kind.PROBABILITY:
        raise ValueError(
            "block_mass needs rows before renormalization, got rows that sum to one: use "
            "trace.block(...) or attention.block(...), not log_block or between"
        )
    weights, _, rows = _align_rows(attention, truth)
    return _mean_over_rows(weights.sum(dim=-1), rows, ~invalid_distribution(weights))


@declare_metric("pointing at boxes", "share", higher_is_better=True, low=0.0, high=1.0)
def pointing_at_boxes(attention: AttentionMap, truth: AttentionMap) -> HeadScores:
    """Compute whether the center of the top region lies in a true box (pointing game of grounding).

    More forgiving than `grounding_accuracy`, which needs the region itself. Boxes are those of the
    truth's keys; ties count by their share.

    Args:
        attention: The block from words to regions.
        truth: The true regions of each row, with boxes.

    Returns:
        One share per sample, layer and head.
    """
    boxes = _boxes(truth)
    weights, inside, rows = _align_rows(attention, truth)
    middle = (boxes[:, :, :2] + boxes[:, :, 2:]) / 2
    hit = (middle[:, :, None] >= boxes[:, None, :, :2]) & (
        middle[:, :, None] <= boxes[:, None, :, 2:]
    )
    within = hit.all(dim=-1).to(weights.dtype)  # b, region, box
    right = torch.einsum("blhqn,bmn->blhqm", inside.to(weights.dtype), within) > 0
    top = _top(weights, attention.visible[:, None, None])
    hits = (top & right).sum(dim=-1) / top.sum(dim=-1).clamp_min(1)
    return _mean_over_rows(hits.to(weights.dtype), rows, weights.sum(dim=-1) > 0)


@declare_metric("located", "share", higher_is_better=True, low=0.0, high=1.0)
def box_accuracy(
    logits: Float[Tensor, "b m"],
    boxes: Float[Tensor, "b m 4"],
    meant: Float[Tensor, "b 4"],
    present: Bool[Tensor, "b m"] | None = None,
    overlap: float = 0.5,
) -> SampleScores:
    """Compute whether the top-scoring box has an IoU of at least 0.5 with the target box.

    Accuracy of referring-expression comprehension. With true boxes as candidates it is the accuracy
    of the choice; with detected boxes it also depends on the proposals.

    Args:
        logits: Scores of the candidate boxes.
        boxes: The candidates as (x0, y0, x1, y1).
        meant: The target box per sample.
        present: Which candidates exist; all by default.
        overlap: The least IoU of a hit.

    Returns:
        1 or 0 per sample; NaN without a candidate, or where a logit is NaN.

    Raises:
        ValueError: A target box has no area. Only checked on a CPU, where it needs no
            synchronization.
    """
    if meant.device.type == "cpu":
        _check_target_boxes(meant)
    there = torch.ones_like(logits, dtype=torch.bool) if present is None else present
    # absent boxes must not win
    best = logits.masked_fill(~there, -torch.inf).argmax(dim=-1)
    chosen = boxes.gather(1, best[:, None, None].expand(-1, 1, 4))
    found = RegionGeometry(meant[:, None]).overlap(chosen)[:, 0, 0]
    known = ~(logits.isnan() & there).any(dim=-1)
    return mask_undefined((found >= overlap).double(), there.any(dim=-1) & known)


def _check_target_boxes(meant: Float[Tensor, "b 4"]) -> None:
    wrong = (~(meant[:, :2] < meant[:, 2:])).any(dim=-1).nonzero()
    if len(wrong):
        numbers = ", ".join(f"{number:g}" for number in meant[wrong[0, 0]].tolist())
        raise ValueError(
            f"boxes must be (x0, y0, x1, y1) with x0 < x1 and y0 < y1, got ({numbers}) as the "
            f"target of sample {int(wrong[0, 0])}"
        )


def mean_by_layer_and_head(
    measure: Callable[[AttentionMap, AttentionMap], Tensor],
    pairs: list[tuple[AttentionMap, AttentionMap]],
) -> Float[Tensor, "l h"]:
    """Compute the mean of a grounding metric over the samples of several batches.

    Args:
        measure: A metric that returns scores per sample, layer and head.
        pairs: Attention and truth of each batch.

    Returns:
        One mean per layer and head.

    Example:
        >>> def measure(attention, truth):
        ...     return attention.weights.amax(dim=(3, 4))
        >>> maps = AttentionMap.from_weights(torch.full((2, 3, 4, 1, 5), 0.2), axes="b l h q k")
        >>> mean_by_layer_and_head(measure, [(maps, maps)]).shape
        torch.Size([3, 4])
    """
    return torch.cat([measure(*one).detach().cpu() for one in pairs]).nanmean(dim=0)


# --- classification report


@dataclass(frozen=True)
class ClassificationReport:
    """Precision, recall and F1 of each class, and the accuracy."""

    precision: tuple[float, ...]
    recall: tuple[float, ...]
    f1: tuple[float, ...]
    count: tuple[int, ...]  # samples of each class
    accuracy: float

    @property
    def macro_f1(self) -> float:
        """Mean F1 over the classes that occur or were predicted."""
        known = [one for one in self.f1 if one == one]
        return sum(known) / len(known) if known else float("nan")


def classification_report(
    predicted: Int[Tensor, " b"], labels: Int[Tensor, " b"], classes: int
) -> ClassificationReport:
    """Compute accuracy, and precision, recall and F1 of each class.

    Args:
        predicted: The predicted classes.
        labels: The true classes; negative ones do not count.
        classes: Number of classes.

    Returns:
        The report. NaN for a class that neither occurs nor is predicted; 0 for one that has only
        one of them.

    Raises:
        ValueError: A class is beyond `classes`.
    """
    kept = labels >= 0
    predicted, labels = predicted[kept], labels[kept]
    if len(labels) and int(torch.stack([predicted, labels]).max()) >= classes:
        raise ValueError(
            f"classes must be below {classes}, got {int(torch.stack([predicted, labels]).max())}"
        )
    # the confusion matrix, flattened: one bin per pair of true and predicted class
    table = torch.bincount(labels * classes + predicted, minlength=classes**2)
    table = table.view(classes, classes).double()  # true class, predicted class
    right, said, given = table.diagonal(), table.sum(dim=0), table.sum(dim=1)
    some = said + given > 0
    # 2 TP / (2 TP + FP + FN): defined without precision and recall, which may be 0 / 0
    f1 = 2 * right / torch.where(some, said + given, torch.nan)
    return ClassificationReport(
        precision=_to_tuple(right / torch.where(said > 0, said, torch.nan), some),
        recall=_to_tuple(right / torch.where(given > 0, given, torch.nan), some),
        f1=tuple(f1.tolist()),
        count=tuple(int(n) for n in given.tolist()),
        accuracy=float(right.sum() / table.sum()) if len(labels) else float("nan"),
    )


def _to_tuple(values: Float[Tensor, " c"], some: Bool[Tensor, " c"]) -> tuple[float, ...]:
    # 0 / 0 counts 0 for a class that occurs or was predicted, and is NaN for any other
    return tuple(torch.where(some, values.nan_to_num(0.0), torch.nan).tolist())


# --- rows


def _align_rows(
    attention: AttentionMap, truth: AttentionMap
) -> tuple[Float[Tensor, "b l h q k"], Bool[Tensor, "b l h q k"], Bool[Tensor, "b l h q"]]:
    """Return weights, which keys are in the truth, and which rows are grounded.

    A row with a NaN or infinite weight has no largest weight and does not count.
    """
    ours, theirs = attention.values.shape, truth.values.shape
    if any(theirs[axis] != ours[axis] for axis in (0, 3, 4)):
        raise ValueError(
            f"attention and truth must have the same samples, rows and keys, got "
            f"{(ours[0], ours[3], ours[4])} and {(theirs[0], theirs[3], theirs[4])}"
        )
    if attention.kind is Kind.SIGNED:
        raise ValueError("signed weights are not a distribution: take their positive part first")
    visible = attention.visible[:, None, None]
    weights = attention.weights.detach().double().masked_fill(~visible, 0)
    finite = weights.isfinite().all(dim=-1, keepdim=True)
    inside = ((truth.weights > 0) & truth.visible[:, None, None]).expand(ours) & visible
    return weights.masked_fill(~finite, 0), inside, inside.any(dim=-1) & finite[..., 0]


def _top(weights: Float[Tensor, "b l h q k"], visible: Tensor) -> Bool[Tensor, "b l h q k"]:
    largest = weights.masked_fill(~visible, -torch.inf).amax(dim=-1, keepdim=True)
    return (weights == largest) & visible


def _mean_over_rows(
    values: Float[Tensor, "b l h q"], rows: Bool[Tensor, "b l h q"], some: Bool[Tensor, "b l h q"]
) -> HeadScores:
    """Average over the rows that are grounded and have weight."""
    counted = rows & some
    total = torch.where(counted, values, 0).sum(dim=-1)
    count = counted.sum(dim=-1)
    # per sample first: a sample with many grounded words counts as much as one with few
    return torch.where(count > 0, total / count.clamp_min(1), torch.nan).float()


def _boxes(truth: AttentionMap) -> Float[Tensor, "b m 4"]:
    for span in truth.keys.spans:
        if isinstance(span.geometry, RegionGeometry) and len(span) == len(truth.keys):
            return span.geometry.boxes
    raise ValueError("pointing_at_boxes needs keys with boxes: give the span a RegionGeometry")
