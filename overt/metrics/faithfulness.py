"""Faithfulness by removal: how the answer changes without the attended cells.

`decide` takes a mask over the keys, 1 to keep and 0 to remove, and returns the logits of the
classes. It is called with the same samples each time, so everything before the mask is computed
once:

    features = model.encode(batch)
    decide = lambda keep: model.decide(features, {"image": keep}).prediction
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from overt.attention import AttentionMap
from overt.metrics.argument_checks import check_count
from overt.metrics.localization import support_mask
from overt.metrics.metric import SampleScores, declare_metric, mask_undefined, single_row
from overt.metrics.top_cells import Choose, mass_cells, random_order, same_count_cells

Decide = Callable[[Float[Tensor, "b k"]], Float[Tensor, "b c"]]


# --- effect of removing cells


@dataclass(frozen=True, eq=False)
class RemovalEffect:
    """Scores of removing a set of cells: see the metrics of the same names."""

    deletion: SampleScores
    insertion: SampleScores
    flips: SampleScores


def removal_effect(decide: Decide, cells: Bool[Tensor, "b k"]) -> RemovalEffect:
    """Compute `deletion`, `insertion` and `flips` of the same cells in three calls of `decide`."""
    return _removal_effect(decide, cells, class_probabilities(decide, torch.ones_like(cells)))


@declare_metric("deletion", "probability", higher_is_better=True, low=-1.0, high=1.0)
def deletion(decide: Decide, cells: Bool[Tensor, "b k"]) -> SampleScores:
    """Compute how far the probability of the prediction falls without the attended cells.

    Args:
        decide: Returns the logits given a mask of kept keys.
        cells: The cells to remove.

    Returns:
        One difference per sample; NaN without a cell to remove.
    """
    return removal_effect(decide, cells).deletion


@declare_metric("insertion", "probability", higher_is_better=True, low=0.0, high=1.0)
def insertion(decide: Decide, cells: Bool[Tensor, "b k"]) -> SampleScores:
    """Compute the probability of the prediction with only the attended cells.

    Args:
        decide: Returns the logits given a mask of kept keys.
        cells: The cells to keep.

    Returns:
        One probability per sample; NaN without a cell.
    """
    return removal_effect(decide, cells).insertion


@declare_metric("flips", "share", higher_is_better=True, low=0.0, high=1.0)
def flips(decide: Decide, cells: Bool[Tensor, "b k"]) -> SampleScores:
    """Compute whether the prediction changes without the attended cells: 1 or 0 per sample.

    Args:
        decide: Returns the logits given a mask of kept keys.
        cells: The cells to remove.

    Returns:
        One score per sample; NaN where logits are NaN, or without a cell to remove.
    """
    return removal_effect(decide, cells).flips


@dataclass(frozen=True, eq=False)
class RemovalContrast:
    """Effect of removing the attended cells, compared with random and with true cells.

    Args:
        attended: Effect of the attended cells.
        random: Mean effect of as many random cells.
        truth: Effect of the cells of the truth; None without a truth.
    """

    attended: RemovalEffect
    random: RemovalEffect
    truth: RemovalEffect | None

    @property
    def beyond_random(self) -> SampleScores:
        """Compute how much more the probability falls with the attended than with random cells."""
        return self.attended.deletion - self.random.deletion

    @property
    def beyond_truth(self) -> SampleScores:
        """Compute the same against the cells of the truth; about 0 if the map finds them."""
        if self.truth is None:
            raise ValueError("beyond_truth needs a truth: pass one to contrast_removal")
        return self.attended.deletion - self.truth.deletion


def contrast_removal(
    decide: Decide,
    attention: AttentionMap,
    truth: AttentionMap | None,
    generator: torch.Generator,
    choose: Choose = mass_cells,
    draws: int = 4,
) -> RemovalContrast:
    """Remove the attended cells, as many random cells, and the true cells, from the same samples.

    All random numbers come from `generator`: the same state gives the same scores.

    Args:
        decide: Returns the logits given a mask of kept keys.
        attention: A map with one row per sample.
        truth: The true cells, if known.
        generator: The source of random numbers.
        choose: Selects the attended cells: `mass_cells`, or `partial(top_cells, count=5)`. Ties are
            broken at random, so that a constant map does as well as random cells.
        draws: Number of random sets of cells to average.

    Returns:
        The effects.

    Raises:
        ValueError: `draws` is below 1.

    Example:
        >>> from overt import words
        >>> def decide(keep):  # the answer has probability 0.9 with word 0, and 0.5 without it
        ...     right = 0.5 + 0.4 * keep[:, 0]
        ...     return torch.stack([right, 1 - right], dim=1).log()
        >>> attention = AttentionMap.from_cells(torch.tensor([[0.7, 0.1, 0.1, 0.1]]), words(4))
        >>> generator = torch.Generator().manual_seed(0)
        >>> found = contrast_removal(decide, attention, None, generator, draws=100)
        >>> found.attended.deletion, found.random.deletion  # random: 0.4 in about 1 of 4 draws
        (tensor([0.4000]), tensor([0.1000]))
    """
    draws = check_count("draws", draws)
    _, seen = single_row(attention)
    # drawn before ties are broken, so that the random cells do not depend on `choose`
    shuffles = [random_order(seen, generator) for _ in range(draws)]
    # --- three sets of the same size: attended, random and (if known) true cells
    cells = choose(attention, generator)
    whole = class_probabilities(decide, torch.ones_like(cells))
    by_chance = [
        _removal_effect(decide, same_count_cells(cells, seen, mixed), whole) for mixed in shuffles
    ]
    return RemovalContrast(
        attended=_removal_effect(decide, cells, whole),
        random=RemovalEffect(
            # the mean over draws reduces the noise of the control, not of the metric
            deletion=torch.stack([one.deletion for one in by_chance]).mean(dim=0),
            insertion=torch.stack([one.insertion for one in by_chance]).mean(dim=0),
            flips=torch.stack([one.flips for one in by_chance]).mean(dim=0),
        ),
        truth=None if truth is None else _removal_effect(decide, support_mask(truth), whole),
    )


def _removal_effect(
    decide: Decide, cells: Bool[Tensor, "b k"], whole: Float[Tensor, "b c"]
) -> RemovalEffect:
    without, alone = class_probabilities(decide, ~cells), class_probabilities(decide, cells)
    answer = whole.argmax(dim=-1, keepdim=True)
    # nothing is removed without attended cells: no effect to speak of
    some = cells.any(dim=-1) & ~whole.isnan().any(dim=-1)
    # the probability of the prediction on the whole input, whatever is predicted afterwards
    fallen = (whole.gather(-1, answer) - without.gather(-1, answer))[:, 0]
    other = (without.argmax(dim=-1, keepdim=True) != answer)[:, 0]
    return RemovalEffect(
        deletion=mask_undefined(fallen, some),
        insertion=mask_undefined(alone.gather(-1, answer)[:, 0], some),
        flips=mask_undefined(other.double(), some & ~without.isnan().any(dim=-1)),
    )


@torch.no_grad()
def class_probabilities(decide: Decide, keep: Bool[Tensor, "b k"]) -> Float[Tensor, "b c"]:
    """Compute the class probabilities with only the kept cells, without a gradient."""
    logits = decide(keep.float())
    if not isinstance(logits, Tensor) or logits.ndim != 2 or logits.is_complex():
        given = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else ""
        raise TypeError(
            "decide must return a tensor of real logits (b, classes), got "
            f"{given or type(logits).__name__}"
        )
    if len(logits) != len(keep):
        raise ValueError(
            f"decide must return logits per mask, got {len(logits)} for {len(keep)} masks: if it "
            "cannot repeat its samples, use at_once=1"
        )
    if logits.shape[-1] < 2:
        raise ValueError(f"decide must return logits of at least 2 classes, got {logits.shape[-1]}")
    # float64: differences of probabilities near 1 are small
    return logits.double().softmax(dim=-1)
