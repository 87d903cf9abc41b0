"""A linear detector of wrong answers from signals, with a control that sees the length only.

Whatever grows or falls along a text predicts whatever does, too: long answers contain more errors,
and attention to an image falls with each word. So a detector counts only for what it adds to the
length of the text, on samples that it was not fitted on.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

STEPS = 100  # of the optimizer; the loss is convex and has few parameters


@dataclass(frozen=True, eq=False)
class LinearDetector:
    """Logistic regression on standardized features.

    Args:
        weights: One weight per standardized feature.
        bias: The log-odds at the mean of all features.
        mean: The mean of each feature in the fitted samples.
        scale: The standard deviation of each feature, 1 for a constant one.
    """

    weights: Float[Tensor, " d"]
    bias: Float[Tensor, ""]
    mean: Float[Tensor, " d"]
    scale: Float[Tensor, " d"]

    def probability(self, features: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
        """Compute the probability that an answer is wrong.

        Args:
            features: The features of each answer.

        Returns:
            The probabilities.
        """
        each = (features.double() - self.mean) / self.scale
        return torch.sigmoid(each @ self.weights + self.bias)


@dataclass(frozen=True, eq=False)
class DetectorComparison:
    """Detectors from signals, from the length, and from both, on samples left out of the fit.

    Args:
        signals: Probability of each sample from the signals.
        length: Probability of each sample from the length alone: the control.
        both: Probability of each sample from the signals and the length.
        wrong: Which answers are wrong.
    """

    signals: Float[Tensor, " n"]
    length: Float[Tensor, " n"]
    both: Float[Tensor, " n"]
    wrong: Bool[Tensor, " n"]

    @property
    def auroc(self) -> dict[str, float]:
        """The area under the ROC curve of each detector; 0.5 is chance."""
        return {name: area_under_roc(one, self.wrong) for name, one in self._each().items()}

    @property
    def brier(self) -> dict[str, float]:
        """The mean squared error of each probability: lower is better calibrated and sharper."""
        truth = self.wrong.double()
        return {name: float((one - truth).square().mean()) for name, one in self._each().items()}

    def _each(self) -> dict[str, Float[Tensor, " n"]]:
        return {"signals": self.signals, "length": self.length, "both": self.both}


def fit_detector(
    features: Float[Tensor, "n d"], wrong: Bool[Tensor, " _"], l2: float = 1.0
) -> LinearDetector:
    """Fit a logistic regression with an L2 penalty on its weights, not on its bias.

    Minimizes `sum of log losses + l2 / 2 |w|^2` over standardized features, so that the mean
    probability of the fitted samples is the share of wrong answers.

    Args:
        features: The features of each answer, such as signals averaged over its words.
        wrong: Which answers are wrong.
        l2: The weight of the penalty.

    Returns:
        The detector.

    Raises:
        ValueError: A feature is not finite, all answers are alike, the samples differ in number, or
            `l2` is not positive.

    Example:
        >>> features = torch.tensor([[0.1], [0.2], [0.8], [0.9]])
        >>> detector = fit_detector(features, torch.tensor([True, True, False, False]))
        >>> (detector.probability(features) > 0.5).tolist()
        [True, True, False, False]
    """
    _check(features, wrong)
    if l2 <= 0:
        raise ValueError(f"l2 must be positive, got {l2}: separable samples have no other fit")
    values, truth = features.detach().double(), wrong.double()
    mean, scale = values.mean(dim=0), values.std(dim=0, correction=0)
    scale = torch.where(scale > 0, scale, 1.0)
    each = (values - mean) / scale
    found = torch.zeros(each.shape[1] + 1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [found],
        max_iter=STEPS,
        line_search_fn="strong_wolfe",
        tolerance_grad=1e-10,
        tolerance_change=1e-14,
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        scores = each @ found[1:] + found[0]
        total = torch.nn.functional.binary_cross_entropy_with_logits(scores, truth, reduction="sum")
        total = total + l2 / 2 * found[1:].square().sum()
        total.backward()
        return total

    with torch.enable_grad():
        optimizer.step(loss)
    found = found.detach()
    return LinearDetector(found[1:], found[0], mean, scale)


def area_under_roc(scores: Float[Tensor, " n"], wrong: Bool[Tensor, " _"]) -> float:
    """Compute the probability that a wrong answer scores above a right one; ties count half.

    Args:
        scores: The score of each answer.
        wrong: Which answers are wrong.

    Returns:
        The area under the ROC curve; NaN without both kinds of answers.

    Raises:
        ValueError: A score is NaN, which has no rank, or the samples differ in number.

    Example:
        >>> area_under_roc(torch.tensor([0.9, 0.4, 0.4]), torch.tensor([True, True, False]))
        0.75
    """
    if len(scores) != len(wrong):
        raise ValueError(f"expected one score per answer, got {len(scores)} for {len(wrong)}")
    if bool(scores.isnan().any()):
        raise ValueError(f"{int(scores.isnan().sum())} scores are NaN: leave these answers out")
    low, high = scores[~wrong].double(), scores[wrong].double()
    if not len(low) or not len(high):
        return float("nan")
    ordered = low.sort().values
    below = torch.searchsorted(ordered, high)
    up_to = torch.searchsorted(ordered, high, right=True)
    return float((below + up_to).double().mean() / 2 / len(low))


def compare_detectors(
    features: Float[Tensor, "n d"],
    length: Float[Tensor, " _"] | Int[Tensor, " _"],
    wrong: Bool[Tensor, " _"],
    folds: int = 5,
    l2: float = 1.0,
    seed: int = 0,
) -> DetectorComparison:
    """Fit detectors from signals, from the length and from both, by cross-validation.

    Each sample is scored by detectors that were fitted on the other folds.

    Args:
        features: The signals of each answer.
        length: The length of each answer, in tokens or words.
        wrong: Which answers are wrong.
        folds: The number of folds.
        l2: As for `fit_detector`.
        seed: Draws the folds.

    Returns:
        The probabilities of each sample.

    Raises:
        ValueError: As for `fit_detector`, or a kind of answer is rarer than the folds.

    Example:
        >>> draw = torch.Generator().manual_seed(0)
        >>> length, noise = torch.rand(200, generator=draw), torch.rand(200, 2, generator=draw)
        >>> wrong = torch.rand(200, generator=draw) < length     # only the length matters
        >>> found = compare_detectors(noise, length, wrong).auroc
        >>> found["length"] > 0.7 > found["signals"]
        True
    """
    _check(features, wrong)
    if len(length) != len(wrong):
        raise ValueError(f"expected one length per answer, got {len(length)} for {len(wrong)}")
    fewest = int(min(wrong.sum(), (~wrong).sum()))
    if not 2 <= folds <= fewest:
        raise ValueError(
            f"folds must be from 2 to {fewest}, the rarer kind of answers, got {folds}"
        )
    # In half precision, lengths above 256 or 2048 would be rounded.
    features, lengths = features.double(), length[:, None].double()
    fold = torch.empty(len(wrong), dtype=torch.long)
    draw = torch.Generator().manual_seed(seed)
    for kind in (wrong, ~wrong):  # the same share of wrong answers in every fold
        places = kind.nonzero()[:, 0]
        fold[places[torch.randperm(len(places), generator=draw)]] = (
            torch.arange(len(places)) % folds
        )

    def left_out(given: Tensor) -> Tensor:
        scores = torch.empty(len(wrong), dtype=torch.float64)
        for number in range(folds):
            out = fold == number
            scores[out] = fit_detector(given[~out], wrong[~out], l2).probability(given[out])
        return scores

    both = torch.cat([features, lengths], dim=1)
    return DetectorComparison(left_out(features), left_out(lengths), left_out(both), wrong)


def _check(features: Float[Tensor, "n d"], wrong: Bool[Tensor, " _"]) -> None:
    if len(features) != len(wrong):
        raise ValueError(f"expected features of each answer, got {len(features)} for {len(wrong)}")
    if not bool(features.isfinite().all()):
        raise ValueError(
            f"{int((~features.isfinite()).sum())} features are not finite: leave out samples "
            "without a signal, or replace it"
        )
    if not 0 < int(wrong.sum()) < len(wrong):
        raise ValueError(
            f"expected right and wrong answers, got {int(wrong.sum())} wrong of {len(wrong)}"
        )
