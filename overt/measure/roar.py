"""Is anything left to learn from once the attended parts are gone? Models are trained again.

Hooker, Erhan, Kindermans and Kim, "A Benchmark for Interpretability Methods in Deep Neural
Networks", NeurIPS 2019, https://arxiv.org/abs/1806.10758 (ROAR); Madsen, Meade, Adlakha and Reddy,
"Evaluating the Faithfulness of Importance Measures in NLP by Recursively Masking Allegedly
Important Tokens and Retraining", 2022, https://arxiv.org/abs/2110.08412 (recursive ROAR).

A model that was never shown such holes may fail for their sake alone. One that was trained on them
fails only for what is missing. The training is the caller's: `retrain` takes which keys are kept in
each training and test sample, and answers with one score a test sample and the maps of the model it
has trained.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from overt.attention import AttentionMap
from overt.measure.cells import descending, first, shuffle
from overt.measure.measured import Measured, measured, row

SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)


@dataclass(frozen=True, eq=False)
class Retrained:
    """A model trained on what was kept: the score of each test sample, and all of its maps."""

    score: Measured
    train: AttentionMap
    test: AttentionMap


Retrain = Callable[[Bool[Tensor, "n k"], Bool[Tensor, "b k"]], Retrained]
Remove = Callable[[Retrained, Retrain, torch.Generator, Sequence[float]], "Roar"]


@dataclass(frozen=True, eq=False)
class Roar:
    """The score of each test sample when a share of its keys is gone, and when random ones are.

    The first of `shares` is 0: nothing is gone.
    """

    shares: tuple[float, ...]
    score: Float[Tensor, "s b"]
    random: Float[Tensor, "s b"]

    @property
    def faithfulness(self) -> Measured:
        """How much lower the curve is than that of random keys: the mean height between them.

        Madsen et al., section 4.3 (RACU), as an area over the shares and not as a share of the area
        below random, which is not defined a sample at a time.
        """
        at = torch.tensor(self.shares, dtype=torch.float64, device=self.score.device)
        between = torch.trapezoid((self.random - self.score).double(), at, dim=0)
        return (between / (at[-1] - at[0])).float()


def roar(
    whole: Retrained,
    retrain: Retrain,
    generator: torch.Generator,
    shares: Sequence[float] = SHARES,
) -> Roar:
    """Remove what the model trained on everything attends to, and train again, share by share.

    `whole` is that model. Two trainings a share, one of them without random keys; the random keys
    of a share are among those of the next, as the attended ones are.
    """
    return _roar(whole, retrain, generator, shares, lambda latest: whole)


def recursive_roar(
    whole: Retrained,
    retrain: Retrain,
    generator: torch.Generator,
    shares: Sequence[float] = SHARES,
) -> Roar:
    """The same, but each share is chosen by the maps of the model that was trained last.

    What is gone stays gone. Where two keys say the same, the first model may attend to either, and
    only a model that has lost one shows that it needed the other.
    """
    return _roar(whole, retrain, generator, shares, lambda latest: latest)


@measured("ROAR", "score", higher_is_better=True, low=-1.0, high=1.0)
def roar_faithfulness(
    whole: Retrained,
    retrain: Retrain,
    generator: torch.Generator,
    shares: Sequence[float] = SHARES,
    remove: Remove = recursive_roar,
) -> Measured:
    """How much more is lost with the attended keys than with random ones, after training again.

    `remove` is `roar` or `recursive_roar`. Scores are from 0 to 1, such as right or wrong.
    """
    return remove(whole, retrain, generator, shares).faithfulness


def _roar(
    whole: Retrained,
    retrain: Retrain,
    generator: torch.Generator,
    shares: Sequence[float],
    judge: Callable[[Retrained], Retrained],
) -> Roar:
    if not shares or list(shares) != sorted(set(shares)) or shares[0] <= 0 or shares[-1] > 1:
        raise ValueError(f"shares must grow, above 0 and to 1 at most: {list(shares)}")
    seen = row(whole.train)[1], row(whole.test)[1]
    noise = [_noise(one, generator) for one in seen]
    kept, latest = seen, whole
    scores, chance = [whole.score], [whole.score]
    for share in shares:
        maps = judge(latest)
        kept = (
            _kept(seen[0], kept[0], row(maps.train)[0], generator, share),
            _kept(seen[1], kept[1], row(maps.test)[0], generator, share),
        )
        latest = retrain(*kept)
        scores.append(latest.score)
        others = [_kept(*one, generator, share) for one in zip(seen, seen, noise, strict=True)]
        chance.append(retrain(others[0], others[1]).score)
    return Roar((0.0, *shares), torch.stack(scores), torch.stack(chance))


def _kept(
    seen: Bool[Tensor, "b k"],
    kept: Bool[Tensor, "b k"],
    weights: Float[Tensor, "b k"],
    generator: torch.Generator,
    share: float,
) -> Bool[Tensor, "b k"]:
    """What is left when a share of the keys is gone: first those gone before, then the largest."""
    scores = weights.masked_fill(~kept, torch.inf).masked_fill(~seen, -torch.inf)
    count = (share * seen.sum(dim=-1, keepdim=True)).round().long()
    return seen & ~first(descending(scores, shuffle(seen, generator)), count)


def _noise(seen: Bool[Tensor, "b k"], generator: torch.Generator) -> Float[Tensor, "b k"]:
    """The same random order of the keys for every share."""
    noise = torch.rand(seen.shape, generator=generator, device=generator.device)
    return noise.to(seen.device)
