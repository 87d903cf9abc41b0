"""Is a model as often right as it says? Confidence beside accuracy, and the error between them.

Guo, Pleiss, Sun and Weinberger, "On Calibration of Modern Neural Networks", ICML 2017,
https://arxiv.org/abs/1706.04599.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from overt.measure.answers import labelled
from overt.measure.measured import Measured, defined, measured

Edges = Callable[[Float[Tensor, " n"], int], Float[Tensor, " e"]]


@dataclass(frozen=True, eq=False)
class Reliability:
    """Samples sorted into bins by their confidence: bin i is above edge i and up to edge i + 1.

    `confidence` and `accuracy` are means over a bin, NaN where it is empty.
    """

    edges: Float[Tensor, " e"]
    count: Int[Tensor, " m"]
    confidence: Float[Tensor, " m"]
    accuracy: Float[Tensor, " m"]

    @property
    def gap(self) -> Float[Tensor, " m"]:
        """How far confidence is above accuracy in each bin; below 0 the model is too modest."""
        return self.confidence - self.accuracy

    @property
    def ece(self) -> float:
        """The expected calibration error (eq. 3): the mean gap, bins by their share of samples.

        It depends on the bins, and is above 0 for few samples even of a calibrated model: compare
        numbers of the same bins and the same samples only. NaN without samples, and where a bin
        that is not empty has no gap.
        """
        gaps = torch.where(self.count > 0, self.gap.abs(), 0)
        return float((gaps * self.count).sum() / self.count.sum())

    @property
    def mce(self) -> float:
        """The largest gap of any bin that is not empty (eq. 5)."""
        filled = self.gap.abs()[self.count > 0]
        return float(filled.max()) if len(filled) else torch.nan


@measured("Brier score", "score", higher_is_better=False, low=0.0, high=2.0)
def brier(logits: Float[Tensor, "b c"], labels: Int[Tensor, " b"]) -> Measured:
    """How far probabilities are from the truth, squared: 0 is sure and right, 2 sure and wrong.

    Brier, "Verification of forecasts expressed in terms of probability", Monthly Weather Review
    1950. Its mean is least for a model that says how sure it is, which no share of right answers
    rewards, and unlike the error of `reliability` it is a number of each sample. Not defined where
    the label is negative, or a logit is NaN; a label that is no class is as in `accuracy`.
    """
    there = labelled(labels, logits.shape[-1])
    chances = logits.double().softmax(dim=-1)
    right = chances.gather(-1, labels.clamp(0, logits.shape[-1] - 1)[:, None])[:, 0]
    return defined(chances.square().sum(dim=-1) - 2 * right + 1, there).clamp(0, 2)


def equal_width(confidence: Float[Tensor, " n"], bins: int) -> Float[Tensor, " e"]:
    """Edges at equal distances from 0 to 1, as is usual."""
    return torch.arange(bins + 1, device=confidence.device, dtype=torch.float64) / bins


def equal_mass(confidence: Float[Tensor, " n"], bins: int) -> Float[Tensor, " e"]:
    """Edges that put as many samples into each bin, but for ties, which stay together.

    Equal widths put nearly all samples of a confident model into the last bin.
    """
    if not len(confidence):
        return equal_width(confidence, bins)
    ordered = confidence.double().sort().values
    places = torch.arange(1, bins, device=confidence.device) * len(ordered) // bins
    inner = ordered[(places - 1).clamp_min(0)]
    return torch.cat([inner.new_zeros(1), inner, inner.new_ones(1)])


def reliability(
    logits: Float[Tensor, "b c"],
    labels: Int[Tensor, " b"],
    bins: int = 15,
    edges: Edges = equal_width,
) -> Reliability:
    """How often the class with the largest probability is right, by how large that is.

    Samples with a negative label, or with logits that are no probabilities (NaN, or infinite), are
    left out. `reliability(...).ece` is the calibration error.

    >>> logits = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.6, 0.4], [0.4, 0.6]]).log()
    >>> found = reliability(logits, torch.tensor([0, 1, 0, 1]), bins=2)
    >>> found.count.tolist(), round(found.ece, 4)
    ([0, 4], 0.0)
    """
    if bins < 1:
        raise ValueError(f"{bins} bins hold no sample; take 1 at least")
    highest, chosen = logits.detach().double().softmax(dim=-1).max(dim=-1)
    known = labelled(labels, logits.shape[-1]) & ~highest.isnan()
    right = (chosen == labels)[known].double()
    highest = highest[known]
    lines = edges(highest, bins)
    place = torch.bucketize(highest, lines[1:-1])  # a sample on an edge belongs below it
    count = torch.bincount(place, minlength=bins)
    return Reliability(lines, count, _means(highest, place, count), _means(right, place, count))


def _means(
    values: Float[Tensor, " n"], place: Int[Tensor, " n"], count: Int[Tensor, " m"]
) -> Float[Tensor, " m"]:
    """The mean of the values in each bin; one product, so that a GPU adds in the same order."""
    bins = torch.arange(len(count), device=place.device)
    inside = (place == bins[:, None]).to(values.dtype)
    return inside @ values / torch.where(count > 0, count, torch.nan)
