"""Remove and retrain (ROAR): what is lost without the attended keys, after training again.

Hooker, Erhan, Kindermans and Kim, "A Benchmark for Interpretability Methods in Deep Neural
Networks", NeurIPS 2019, https://arxiv.org/abs/1806.10758 (ROAR); Madsen, Meade, Adlakha and Reddy,
"Evaluating the Faithfulness of Importance Measures in NLP by Recursively Masking Allegedly
Important Tokens and Retraining", 2022, https://arxiv.org/abs/2110.08412 (recursive ROAR).

A model that was never trained on inputs with holes may fail because of the holes alone. A model
that was trained on them fails only because of the missing content. The caller trains: `retrain`
takes the keys to keep in each training and test sample, and returns one score per test sample and
the maps of the new model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from overt.attention import AttentionMap
from overt.metrics.argument_checks import check_generator, check_shares
from overt.metrics.metric import SampleScores, declare_metric, mask_undefined, single_row
from overt.metrics.top_cells import argsort_descending, first_cells, random_order

SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)


@dataclass(frozen=True, eq=False)
class RetrainedModel:
    """A model trained on the kept keys: the score of each test sample, and its maps."""

    score: SampleScores
    train: AttentionMap
    test: AttentionMap


Retrain = Callable[[Bool[Tensor, "n k"], Bool[Tensor, "b k"]], RetrainedModel]
RoarVariant = Callable[[RetrainedModel, Retrain, torch.Generator, Sequence[float]], "RoarResult"]


@dataclass(frozen=True, eq=False)
class RoarResult:
    """Scores of each test sample as keys are removed: the most attended ones, and random ones.

    Args:
        shares: The requested shares of removed keys; the first is 0.
        removed: The share of each test sample's keys that was removed: keys are whole, so with few
            keys it differs from the requested share.
        score: Scores without the most attended keys.
        random: Scores without as many random keys.
    """

    shares: tuple[float, ...]
    removed: Float[Tensor, "s b"]
    score: Float[Tensor, "s b"]
    random: Float[Tensor, "s b"]

    @property
    def faithfulness(self) -> SampleScores:
        """Compute the mean height of the random curve above the curve of attended keys.

        RACU of Madsen et al., section 4.3, but as an area over the removed shares and not as a
        share of the area below random, which is not defined per sample. NaN where none of the
        shares was a whole key.
        """
        between = torch.trapezoid((self.random - self.score).double(), self.removed, dim=0)
        width = self.removed[-1] - self.removed[0]
        return mask_undefined(between / torch.where(width > 0, width, 1), width > 0)


def roar(
    whole: RetrainedModel,
    retrain: Retrain,
    generator: torch.Generator,
    shares: Sequence[float] = SHARES,
) -> RoarResult:
    """Remove the keys that the fully trained model attends to, and train again, share by share.

    Trains two models per share, one of them without random keys. The random keys of a share are
    among those of the next, as the attended keys are.

    Args:
        whole: The model trained on everything.
        retrain: Trains a model on the kept keys of training and test samples.
        generator: The source of random numbers.
        shares: Shares of keys to remove, in increasing order.

    Returns:
        The scores at each share.

    Raises:
        ValueError: The shares are not increasing, or not above 0 and at most 1.
    """
    return _roar(whole, retrain, generator, shares, lambda latest: whole)


def recursive_roar(
    whole: RetrainedModel,
    retrain: Retrain,
    generator: torch.Generator,
    shares: Sequence[float] = SHARES,
) -> RoarResult:
    """Run `roar` with each share chosen by the maps of the model that was trained last.

    Removed keys stay removed. Where two keys are redundant, the first model may attend to either;
    only a model that has lost one shows that it needed the other. The arguments are those of
    `roar`.
    """
    return _roar(whole, retrain, generator, shares, lambda latest: latest)


@declare_metric("ROAR", "score", higher_is_better=True, low=-1.0, high=1.0, version=2)
def roar_faithfulness(
    whole: RetrainedModel,
    retrain: Retrain,
    generator: torch.Generator,
    shares: Sequence[float] = SHARES,
    remove: RoarVariant = recursive_roar,
) -> SampleScores:
    """Compute how much more retrained models lose without attended keys than without random ones.

    Scores must be from 0 to 1, such as right or wrong.

    Args:
        whole: The model trained on everything.
        retrain: Trains a model on the kept keys of training and test samples.
        generator: The source of random numbers.
        shares: Shares of keys to remove, in increasing order.
        remove: `roar` or `recursive_roar`.

    Returns:
        One score per test sample.

    Example:
        >>> from overt import words
        >>> maps = AttentionMap.from_cells(torch.tensor([[0.7, 0.1, 0.1, 0.1]]), words(4))
        >>> def retrain(train, test):  # right as long as word 0 is kept
        ...     return RetrainedModel(test[:, 0].float(), maps, maps)
        >>> whole = RetrainedModel(torch.ones(1), maps, maps)
        >>> generator = torch.Generator().manual_seed(0)
        >>> result = recursive_roar(whole, retrain, generator, shares=(0.25, 0.5, 0.75))
        >>> result.score.flatten(), result.random.flatten()
        (tensor([1., 0., 0., 0.]), tensor([1., 1., 1., 1.]))
        >>> generator = torch.Generator().manual_seed(0)
        >>> roar_faithfulness(whole, retrain, generator, shares=(0.25, 0.5, 0.75))
        tensor([0.8333])
    """
    return remove(whole, retrain, generator, shares).faithfulness


def _roar(
    whole: RetrainedModel,
    retrain: Retrain,
    generator: torch.Generator,
    shares: Sequence[float],
    judge: Callable[[RetrainedModel], RetrainedModel],
) -> RoarResult:
    shares = check_shares(shares, zero=False)
    seen = single_row(whole.train)[1], single_row(whole.test)[1]
    noise = [_noise(one, generator) for one in seen]
    kept, latest = seen, whole
    scores, chance = [whole.score], [whole.score]
    removed = [torch.zeros(len(whole.score), dtype=torch.float64, device=whole.score.device)]
    for share in shares:
        maps = judge(latest)
        kept = (
            _keep_mask(seen[0], kept[0], single_row(maps.train)[0], generator, share),
            _keep_mask(seen[1], kept[1], single_row(maps.test)[0], generator, share),
        )
        gone = (seen[1] & ~kept[1]).sum(dim=-1) / seen[1].sum(dim=-1).clamp_min(1).double()
        removed.append(gone.to(removed[0]))
        latest = retrain(*kept)
        scores.append(latest.score)
        others = [_keep_mask(*one, generator, share) for one in zip(seen, seen, noise, strict=True)]
        chance.append(retrain(others[0], others[1]).score)
    found = (torch.stack(one) for one in (removed, scores, chance))
    return RoarResult((0.0, *shares), *found)


def _keep_mask(
    seen: Bool[Tensor, "b k"],
    kept: Bool[Tensor, "b k"],
    weights: Float[Tensor, "b k"],
    generator: torch.Generator,
    share: float,
) -> Bool[Tensor, "b k"]:
    """Return the keys left at a share: earlier removals first, then the most attended keys."""
    # infinite weight keeps removed keys first, so that each share contains the one before
    scores = weights.masked_fill(~kept, torch.inf).masked_fill(~seen, -torch.inf)
    count = (share * seen.sum(dim=-1, keepdim=True)).round().long()
    return seen & ~first_cells(argsort_descending(scores, random_order(seen, generator)), count)


def _noise(seen: Bool[Tensor, "b k"], generator: torch.Generator) -> Float[Tensor, "b k"]:
    """Draw one random order of the keys for all shares."""
    device = check_generator(generator).device
    noise = torch.rand(seen.shape, generator=generator, device=device)
    return noise.to(seen.device)
