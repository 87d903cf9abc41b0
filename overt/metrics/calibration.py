"""Calibration: does the confidence of a model match its accuracy?

Guo, Pleiss, Sun and Weinberger, "On Calibration of Modern Neural Networks", ICML 2017,
https://arxiv.org/abs/1706.04599.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from overt.losses.attention_losses import check_logits
from overt.metrics.answer_accuracy import has_valid_label
from overt.metrics.argument_checks import check_count
from overt.metrics.metric import SampleScores, declare_metric, mask_undefined

BinEdges = Callable[[Float[Tensor, " n"], int], Float[Tensor, " e"]]


@dataclass(frozen=True, eq=False)
class ReliabilityDiagram:
    """Samples in bins by confidence: bin i is above edge i and up to edge i + 1.

    Args:
        edges: Edges of the bins.
        count: Samples per bin.
        confidence: Mean confidence per bin, NaN where it is empty.
        accuracy: Accuracy per bin, NaN where it is empty.
    """

    edges: Float[Tensor, " e"]
    count: Int[Tensor, " m"]
    confidence: Float[Tensor, " m"]
    accuracy: Float[Tensor, " m"]

    @property
    def gap(self) -> Float[Tensor, " m"]:
        """Confidence less accuracy per bin; negative where the model is underconfident."""
        return self.confidence - self.accuracy

    @property
    def ece(self) -> float:
        """The expected calibration error (eq. 3): the mean absolute gap, bins weighted by count.

        It depends on the bins, and is above 0 for few samples even of a calibrated model: compare
        only numbers of the same bins and samples. NaN without samples, and where a non-empty bin
        has no gap.
        """
        # empty bins have a NaN gap, and NaN * 0 is NaN
        gaps = torch.where(self.count > 0, self.gap.abs(), 0)
        return float((gaps * self.count).sum() / self.count.sum())

    @property
    def mce(self) -> float:
        """The maximum calibration error: the largest gap of a non-empty bin (eq. 5)."""
        filled = self.gap.abs()[self.count > 0]
        return float(filled.max()) if len(filled) else torch.nan


@declare_metric("Brier score", "score", higher_is_better=False, low=0.0, high=2.0)
def brier(logits: Float[Tensor, "b c"], labels: Int[Tensor, " b"]) -> SampleScores:
    """Compute the Brier score: the squared error of the class probabilities.

    Brier, "Verification of forecasts expressed in terms of probability", Monthly Weather Review
    1950. 0 for a certain right answer, 2 for a certain wrong one. A proper score: its expectation
    is lowest for the true probabilities. Unlike calibration error it is defined per sample. A label
    beyond the classes is treated as in `accuracy`.

    Args:
        logits: Scores of the classes.
        labels: The right classes; negative where unknown.

    Returns:
        One score per sample; NaN where the label is negative or a logit is NaN.

    Example:
        >>> brier(torch.tensor([[0.8, 0.2]]).log(), torch.tensor([0]))  # 0.2^2 + 0.2^2
        tensor([0.0800])
    """
    check_logits(logits, labels)
    there = has_valid_label(labels, logits.shape[-1])
    chances = logits.double().softmax(dim=-1)
    # unknown labels read any class; their score is masked below
    right = chances.gather(-1, labels.clamp(0, logits.shape[-1] - 1)[:, None])[:, 0]
    # sum (p - y)^2 with one-hot y, expanded: no one-hot matrix is needed
    return mask_undefined(chances.square().sum(dim=-1) - 2 * right + 1, there).clamp(0, 2)


def equal_width_bins(confidence: Float[Tensor, " n"], bins: int) -> Float[Tensor, " e"]:
    """Return edges at equal distances from 0 to 1."""
    return torch.arange(bins + 1, device=confidence.device, dtype=torch.float64) / bins


def equal_mass_bins(confidence: Float[Tensor, " n"], bins: int) -> Float[Tensor, " e"]:
    """Return edges that put equally many samples into each bin, except that ties stay together.

    With equal widths, nearly all samples of a confident model fall into the last bin.
    """
    if not len(confidence):
        return equal_width_bins(confidence, bins)
    ordered = confidence.double().sort().values
    places = torch.arange(1, bins, device=confidence.device) * len(ordered) // bins
    # the edge is the last confidence of a bin: samples that tie with it stay in the same bin
    inner = ordered[(places - 1).clamp_min(0)]
    return torch.cat([inner.new_zeros(1), inner, inner.new_ones(1)])


def reliability_diagram(
    logits: Float[Tensor, "b c"],
    labels: Int[Tensor, " b"],
    bins: int = 15,
    edges: BinEdges = equal_width_bins,
) -> ReliabilityDiagram:
    """Compute accuracy by confidence; `.ece` of the result is the expected calibration error.

    Args:
        logits: Scores of the classes.
        labels: The right classes. Samples with a negative label, or with NaN or infinite logits,
            are left out.
        bins: Number of bins.
        edges: How bins are chosen: `equal_width_bins` or `equal_mass_bins`.

    Returns:
        Count, mean confidence and accuracy per bin.

    Raises:
        ValueError: `bins` is below 1.

    Example:
        >>> logits = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.6, 0.4], [0.4, 0.6]]).log()
        >>> found = reliability_diagram(logits, torch.tensor([0, 1, 0, 1]), bins=2)
        >>> found.count.tolist(), round(found.ece, 4)
        ([0, 4], 0.0)
    """
    bins = check_count("bins", bins)
    check_logits(logits, labels)
    # float64: in float32 confident predictions round to exactly 1
    highest, chosen = logits.detach().double().softmax(dim=-1).max(dim=-1)
    known = has_valid_label(labels, logits.shape[-1]) & ~highest.isnan()
    right = (chosen == labels)[known].double()
    highest = highest[known]
    lines = edges(highest, bins)
    place = torch.bucketize(highest, lines[1:-1])  # a sample on an edge belongs to the bin below
    count = torch.bincount(place, minlength=bins)
    return ReliabilityDiagram(
        lines, count, _means(highest, place, count), _means(right, place, count)
    )


def _means(
    values: Float[Tensor, " n"], place: Int[Tensor, " n"], count: Int[Tensor, " m"]
) -> Float[Tensor, " m"]:
    """Compute the mean per bin, as one matrix product so that a GPU adds in a fixed order."""
    bins = torch.arange(len(count), device=place.device)
    inside = (place == bins[:, None]).to(values.dtype)
    return inside @ values / torch.where(count > 0, count, torch.nan)
