"""Deletion and insertion curves: the answer as more and more is removed, most attended first.

A map defines an order of the keys. Keys are removed in that order, or inserted into an empty input,
and the probability of the original prediction is recorded. `decide` runs the model; how keys are
removed is chosen in `removal`:

    decide = pixel_removal(classify, images, (7, 7), fill=blur_fill)
    curve = deletion_curve(decide, attention, generator)
    curve.removed, curve.probability

Keys are whole, so 0.1 of three keys is one key, a third of them. Areas are over the share that was
removed, not the requested share: with one or two keys these differ widely.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from overt.attention import AttentionMap
from overt.metrics.argument_checks import check_generator, check_shares
from overt.metrics.faithfulness import Decide, class_probabilities
from overt.metrics.metric import SampleScores, declare_metric, mask_undefined, single_row
from overt.metrics.top_cells import first_cells, rank_keys

TENTHS = tuple(tenth / 10 for tenth in range(11))
# shares of words that are removed, for comprehensiveness and sufficiency
BINS = (0.01, 0.05, 0.1, 0.2, 0.5)  # ERASER's

Keep = Callable[[Bool[Tensor, "b k"]], Bool[Tensor, "b k"]]


@dataclass(frozen=True, eq=False)
class PerturbationCurve:
    """Probability of the original prediction at each share of removed or inserted keys.

    Args:
        shares: The requested shares.
        removed: The share of each sample's keys that was removed, or kept for an insertion: whole
            keys over all keys.
        whole: The probability with all keys.
        probability: The probability at each share.
        changed: Where the prediction differs from the original one.
        there: False for a sample without keys, or with NaN logits.
    """

    shares: tuple[float, ...]
    removed: Float[Tensor, "s b"]
    whole: Float[Tensor, " b"]
    probability: Float[Tensor, "s b"]
    changed: Bool[Tensor, "s b"]
    there: Bool[Tensor, " b"]

    @property
    def area(self) -> SampleScores:
        """Compute the mean height over the removed shares, by trapezoids.

        NaN where the first and the last share are the same number of keys.
        """
        if len(self.shares) < 2:
            raise ValueError(f"an area needs at least 2 shares, got {len(self.shares)}")
        # over the shares that were removed: with few keys several requested shares are the same
        # step
        total = torch.trapezoid(self.probability, self.removed, dim=0)
        width = self.removed[-1] - self.removed[0]
        return mask_undefined(total / torch.where(width > 0, width, 1), self.there & (width > 0))

    @property
    def drop(self) -> SampleScores:
        """Compute how far the probability falls below that of the whole input, on average."""
        return mask_undefined(self.whole - self.probability.mean(dim=0), self.there)

    @property
    def step_drop(self) -> SampleScores:
        """Compute `drop` over distinct steps only: no number of keys counts twice."""
        new = torch.ones_like(self.removed, dtype=torch.bool)
        # the first step always counts
        new[1:] = self.removed[1:] != self.removed[:-1]
        mean = torch.where(new, self.probability, 0).sum(dim=0) / new.sum(dim=0)
        return mask_undefined(self.whole - mean, self.there)

    @property
    def flip_share(self) -> SampleScores:
        """Return the least removed share at which the prediction changes; 1 without any."""
        # amin over the steps, not the first step: the prediction may change back
        least = torch.where(self.changed, self.removed, 1.0).amin(dim=0)
        return mask_undefined(least, self.there & ~self.probability.isnan().any(dim=0))


def deletion_curve(
    decide: Decide,
    attention: AttentionMap,
    generator: torch.Generator,
    shares: Sequence[float] = TENTHS,
) -> PerturbationCurve:
    """Remove the most attended `shares` of the keys and record the probability of the prediction.

    Args:
        decide: Returns the logits given a mask of kept keys.
        attention: A map with one row per sample.
        generator: Breaks ties.
        shares: Shares of keys to remove, in increasing order.

    Returns:
        The curve.

    Raises:
        ValueError: The shares do not increase, or are not from 0 to 1.

    Example:
        >>> from overt import words
        >>> def decide(keep):  # the answer has probability 0.9 with word 0, and 0.5 without it
        ...     right = 0.5 + 0.4 * keep[:, 0]
        ...     return torch.stack([right, 1 - right], dim=1).log()
        >>> attention = AttentionMap.from_cells(torch.tensor([[0.7, 0.1, 0.1, 0.1]]), words(4))
        >>> generator = torch.Generator().manual_seed(0)
        >>> curve = deletion_curve(decide, attention, generator, shares=(0.0, 0.25, 1.0))
        >>> curve.probability.flatten().float()
        tensor([0.9000, 0.5000, 0.5000])
    """
    return _curve(decide, attention, generator, shares, lambda cells: ~cells)


def insertion_curve(
    decide: Decide,
    attention: AttentionMap,
    generator: torch.Generator,
    shares: Sequence[float] = TENTHS,
) -> PerturbationCurve:
    """Keep only the most attended `shares` of the keys; record the probability of the prediction.

    The arguments are those of `deletion_curve`.
    """
    return _curve(decide, attention, generator, shares, lambda cells: cells)


# --- scores


@declare_metric(
    "deletion area", "probability", higher_is_better=False, low=0.0, high=1.0, version=2
)
def deletion_area(
    decide: Decide,
    attention: AttentionMap,
    generator: torch.Generator,
    shares: Sequence[float] = TENTHS,
) -> SampleScores:
    """Compute the area under the deletion curve: low when the most attended keys decide.

    Over the share of keys that was removed, not the requested share. Petsiuk, Das and Saenko,
    "RISE", BMVC 2018, https://arxiv.org/abs/1806.07421, section 4.3.

    Args:
        decide: Returns the logits given a mask of kept keys.
        attention: A map with one row per sample.
        generator: Breaks ties.
        shares: Shares of keys to remove, in increasing order.

    Returns:
        One area per sample.

    Example:
        >>> from overt import words
        >>> def decide(keep):  # the answer has probability 0.9 with word 0, and 0.5 without it
        ...     right = 0.5 + 0.4 * keep[:, 0]
        ...     return torch.stack([right, 1 - right], dim=1).log()
        >>> attention = AttentionMap.from_cells(torch.tensor([[0.7, 0.1, 0.1, 0.1]]), words(4))
        >>> generator = torch.Generator().manual_seed(0)
        >>> deletion_area(decide, attention, generator, shares=(0.0, 0.5, 1.0))  # 0.9, 0.5, 0.5
        tensor([0.6000])
    """
    return deletion_curve(decide, attention, generator, shares).area


@declare_metric(
    "insertion area", "probability", higher_is_better=True, low=0.0, high=1.0, version=2
)
def insertion_area(
    decide: Decide,
    attention: AttentionMap,
    generator: torch.Generator,
    shares: Sequence[float] = TENTHS,
) -> SampleScores:
    """Compute the area under the insertion curve: high when the most attended keys suffice.

    Over the share of keys that was kept (RISE, section 4.3).

    Args:
        decide: Returns the logits given a mask of kept keys.
        attention: A map with one row per sample.
        generator: Breaks ties.
        shares: Shares of keys to keep, in increasing order.

    Returns:
        One area per sample.

    Example:
        >>> from overt import words
        >>> def decide(keep):  # the answer has probability 0.9 with word 0, and 0.5 without it
        ...     right = 0.5 + 0.4 * keep[:, 0]
        ...     return torch.stack([right, 1 - right], dim=1).log()
        >>> attention = AttentionMap.from_cells(torch.tensor([[0.7, 0.1, 0.1, 0.1]]), words(4))
        >>> generator = torch.Generator().manual_seed(0)
        >>> insertion_area(decide, attention, generator, shares=(0.0, 0.5, 1.0))  # 0.5, 0.9, 0.9
        tensor([0.8000])
    """
    return insertion_curve(decide, attention, generator, shares).area


@declare_metric(
    "flipping", "probability", higher_is_better=True, low=-1.0, high=1.0, version=2, key="flipping"
)
def aopc(
    decide: Decide,
    attention: AttentionMap,
    generator: torch.Generator,
    shares: Sequence[float] = TENTHS,
) -> SampleScores:
    """Compute the mean fall of the probability as pixels or words are removed (AOPC).

    Area over the perturbation curve: Samek, Binder, Montavon, Lapuschkin and Müller, "Evaluating
    the Visualization of What a Deep Neural Network Has Learned", 2017,
    https://arxiv.org/abs/1509.06321, eq. 12; the step without removal counts too, as there. Steps
    that remove no further key count once. In scorecards it is called `flipping`.

    Args:
        decide: Returns the logits given a mask of kept keys.
        attention: A map with one row per sample.
        generator: Breaks ties.
        shares: Shares of keys to remove, in increasing order.

    Returns:
        One mean per sample.

    Example:
        >>> from overt import words
        >>> def decide(keep):  # the answer has probability 0.9 with word 0, and 0.5 without it
        ...     right = 0.5 + 0.4 * keep[:, 0]
        ...     return torch.stack([right, 1 - right], dim=1).log()
        >>> attention = AttentionMap.from_cells(torch.tensor([[0.7, 0.1, 0.1, 0.1]]), words(4))
        >>> generator = torch.Generator().manual_seed(0)
        >>> aopc(decide, attention, generator, shares=(0.0, 0.5, 1.0))  # mean of 0, 0.4 and 0.4
        tensor([0.2667])
    """
    return deletion_curve(decide, attention, generator, shares).step_drop


@declare_metric("comprehensiveness", "probability", higher_is_better=True, low=-1.0, high=1.0)
def comprehensiveness(
    decide: Decide,
    attention: AttentionMap,
    generator: torch.Generator,
    shares: Sequence[float] = BINS,
) -> SampleScores:
    """Compute the mean fall of the probability without the most attended words (ERASER).

    DeYoung et al., "ERASER", 2020, https://arxiv.org/abs/1911.03429, section 4.2. At least one word
    is removed.

    Args:
        decide: Returns the logits given a mask of kept keys.
        attention: A map with one row per sample.
        generator: Breaks ties.
        shares: Shares of keys to remove, above 0 and in increasing order.

    Returns:
        One mean per sample.

    Example:
        >>> from overt import words
        >>> def decide(keep):  # the answer has probability 0.9 with word 0, and 0.5 without it
        ...     right = 0.5 + 0.4 * keep[:, 0]
        ...     return torch.stack([right, 1 - right], dim=1).log()
        >>> attention = AttentionMap.from_cells(torch.tensor([[0.7, 0.1, 0.1, 0.1]]), words(4))
        >>> comprehensiveness(decide, attention, torch.Generator().manual_seed(0))  # 0.9 - 0.5
        tensor([0.4000])
    """
    return deletion_curve(decide, attention, generator, check_shares(shares, zero=False)).drop


@declare_metric("sufficiency", "probability", higher_is_better=False, low=-1.0, high=1.0)
def sufficiency(
    decide: Decide,
    attention: AttentionMap,
    generator: torch.Generator,
    shares: Sequence[float] = BINS,
) -> SampleScores:
    """Compute the mean fall of the probability with only the most attended words (ERASER).

    Args:
        decide: Returns the logits given a mask of kept keys.
        attention: A map with one row per sample.
        generator: Breaks ties.
        shares: Shares of keys to keep, above 0 and in increasing order.

    Returns:
        One mean per sample.

    Example:
        >>> from overt import words
        >>> def decide(keep):  # the answer has probability 0.9 with word 0, and 0.5 without it
        ...     right = 0.5 + 0.4 * keep[:, 0]
        ...     return torch.stack([right, 1 - right], dim=1).log()
        >>> weights = torch.tensor([[0.7, 0.1, 0.1, 0.1], [0.1, 0.7, 0.1, 0.1]])
        >>> attention = AttentionMap.from_cells(weights, words(4))
        >>> sufficiency(decide, attention, torch.Generator().manual_seed(0), shares=(0.25,))
        tensor([0.0000, 0.4000])
    """
    return insertion_curve(decide, attention, generator, check_shares(shares, zero=False)).drop


@declare_metric("flip share", "share", higher_is_better=False, low=0.0, high=1.0, version=2)
def flip_share(
    decide: Decide,
    attention: AttentionMap,
    generator: torch.Generator,
    shares: Sequence[float] = TENTHS,
) -> SampleScores:
    """Compute the least share of keys, most attended first, whose removal changes the prediction.

    The share that was removed, in whole keys; not finer than `shares`. Serrano and Smith, "Is
    Attention Interpretable?", ACL 2019, https://arxiv.org/abs/1906.03731, section 5, set attention
    weights to zero instead: see `interventions`.

    Args:
        decide: Returns the logits given a mask of kept keys.
        attention: A map with one row per sample.
        generator: Breaks ties.
        shares: Shares of keys to remove, in increasing order.

    Returns:
        One share per sample; 1 where the prediction never changes, NaN where logits are NaN.
    """
    return deletion_curve(decide, attention, generator, shares).flip_share


def _curve(
    decide: Decide,
    attention: AttentionMap,
    generator: torch.Generator,
    shares: Sequence[float],
    keep: Keep,
) -> PerturbationCurve:
    shares, generator = check_shares(shares), check_generator(generator)
    _, seen = single_row(attention)
    # one order for all steps, so that each step removes a superset of the last
    order = rank_keys(attention, generator)
    whole = class_probabilities(decide, torch.ones_like(seen))
    # the prediction on the whole input, not the label: curves are about the model's own answer
    answer = whole.argmax(dim=-1, keepdim=True)
    heights, changed, removed = [], [], []
    for share in shares:
        cells = _first_share(order, seen, share)
        removed.append(cells.sum(dim=-1) / seen.sum(dim=-1).clamp_min(1).double())
        found = class_probabilities(decide, keep(cells))
        heights.append(found.gather(-1, answer)[:, 0])
        changed.append((found.argmax(dim=-1, keepdim=True) != answer)[:, 0])
    return PerturbationCurve(
        shares,
        torch.stack(removed).to(whole.device),
        whole.gather(-1, answer)[:, 0],
        torch.stack(heights),
        torch.stack(changed),
        seen.any(dim=-1)
        # a map without weights has no order, only random ties
        & (attention.weights != 0).flatten(1).any(dim=-1)
        & ~whole.isnan().any(dim=-1),
    )


def _first_share(
    order: Int[Tensor, "b k"], seen: Bool[Tensor, "b k"], share: float
) -> Bool[Tensor, "b k"]:
    """Select the first share of the visible keys, rounded; at least one for a positive share."""
    count = (share * seen.sum(dim=-1, keepdim=True)).round().long()
    return first_cells(order, count.clamp_min(1) if share > 0 else count) & seen
