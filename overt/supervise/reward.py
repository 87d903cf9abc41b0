"""What a captioner learns from: the next word of a caption, and a reward for captions of its own.

Rennie, Marcheret, Mroueh, Ross and Goel, "Self-Critical Sequence Training for Image Captioning",
CVPR 2017, https://arxiv.org/abs/1612.00563; eq. 11 and 12 of Fei, AAAI 2022. Rewards, decoders and
baselines are callables: `overt.measure.captions.Consensus` is the usual reward.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import ArrayLike
from torch import Tensor

from overt.supervise.loss import Loss

Rewards = Float[Tensor, "b s"]  # of the s captions drawn of each image
Baseline = Callable[[Rewards], Float[Tensor, "b #s"]]


def next_words(
    logits: Float[Tensor, "b n v"],
    tokens: Int[Tensor, "b n"],
    mask: Bool[Tensor, "b n"],
    smoothing: float = 0.0,
) -> Loss:
    """`-log p` of every token (eq. 11), summed over those of the mask; one row a token."""
    losses = torch.nn.functional.cross_entropy(  # words in the last axis, where they lie together
        logits.float().flatten(0, 1),
        tokens.flatten(),
        reduction="none",
        label_smoothing=smoothing,
    )
    return Loss(losses.where(mask.flatten(), 0).sum(), mask.sum())


def log_probabilities(
    logits: Float[Tensor, "b n v"], tokens: Int[Tensor, "b n"], never: tuple[int, ...] = ()
) -> Float[Tensor, "b n"]:
    """`log p` of every token; `never` are tokens that drawing leaves out, and so must this."""
    logits = logits.float()
    if never:
        forbidden = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
        forbidden[list(never)] = True
        logits = logits.masked_fill(forbidden, -torch.inf)
    return logits.log_softmax(dim=-1).gather(2, tokens[..., None])[..., 0]


# --- baselines


def mean_of_all(rewards: Rewards) -> Float[Tensor, "b 1"]:
    """The mean reward of an image's captions (Cornia et al. 2020, over beams)."""
    return rewards.mean(dim=1, keepdim=True)


def mean_of_others(rewards: Rewards) -> Rewards:
    """The mean reward of the other captions of the image: a baseline without bias.

    With all of them, the caption itself among them, the gradient is (s - 1) / s of this one's.
    """
    s = rewards.shape[1]
    if s < 2:
        raise ValueError("a caption has no others to be compared with: draw two an image or more")
    return (rewards.sum(dim=1, keepdim=True) - rewards) / (s - 1)


def given(rewards: Float[Tensor, " b"]) -> Baseline:
    """One known number an image: the reward of its greedy caption (Rennie et al.)."""
    return lambda _: rewards[:, None]


# --- a step


@runtime_checkable
class Drawn(Protocol):
    """Captions that were drawn: those of one image stand together, as `decoding.sample` has it."""

    @property
    def tokens(self) -> Tensor:
        """The tokens with the end, padded: (b s) rows."""
        ...

    @property
    def mask(self) -> Tensor:
        """Which tokens belong to the captions."""
        ...


Score = Callable[[Sequence[Sequence[int]], Sequence[int]], ArrayLike]


def by_tokens(score: Score, images: Sequence[int], draws: int) -> Callable[[Drawn], Rewards]:
    """A reward that reads the tokens of captions: `score(texts, images)`, such as a `Consensus`.

    `images` are numbers of the images of a batch among all that `score` has references of, and
    `draws` captions are drawn of each. The end is among the tokens: references must have it too.
    """
    of = [image for image in images for _ in range(draws)]

    def reward(drawn: Drawn) -> Rewards:
        if len(drawn.tokens) != len(of):
            raise ValueError(
                f"{len(drawn.tokens)} captions of {len(images)} images are not {draws} of each"
            )
        rows = zip(drawn.tokens.tolist(), drawn.mask.sum(dim=1).tolist(), strict=True)
        scores = score([row[:count] for row, count in rows], of)
        found = torch.as_tensor(scores, dtype=torch.float64).reshape(len(images), draws)
        return found.to(drawn.tokens.device)

    return reward


@dataclass(frozen=True, eq=False)
class Critique:
    """The loss of a self-critical step, and what to watch.

    `reward` is the mean of what was drawn, `best` of the best an image, `baseline` of what it was
    held against; `spread` is the standard deviation of the difference. `idle` is the share of
    images whose captions all have the same reward as their baseline: they teach nothing. `length`
    is the mean number of tokens: rewards are sometimes won by it.
    """

    loss: Loss
    reward: float
    best: float
    baseline: float
    spread: float
    idle: float
    length: float


def self_critical(
    draw: Callable[[], Drawn],
    reward: Callable[[Drawn], Rewards],
    tell: Callable[[Drawn], Float[Tensor, "r n"]],
    baseline: Baseline = mean_of_others,
) -> Critique:
    """One step of eq. 12: `-(r - b) log p(y)`, summed over captions y that the model drew.

    `draw()` draws captions and `reward` judges them, both without gradient, and so is the baseline.
    `tell` gives the log-probability of each token with gradient: of all tokens at once, which
    costs one pass in the place of a graph over all steps. The loss has a row a caption.
    """
    with torch.no_grad():
        drawn = draw()
        rewards = reward(drawn)
        rows = len(drawn.tokens)
        if rewards.numel() != rows:
            raise ValueError(f"{rewards.numel()} rewards for {rows} captions")
        if not rewards.isfinite().all():
            raise ValueError("a reward is not finite")
        held = baseline(rewards).to(rewards).expand_as(rewards)
        advantage = rewards - held
        watched = _watched(rewards, held, drawn.mask)  # before the next pass, not to wait for that
    told = tell(drawn)
    texts = told.where(drawn.mask.to(told.device), 0).sum(dim=-1)
    total = -(advantage.flatten().to(texts) * texts).sum()
    return Critique(Loss(total, torch.full((), float(rows), device=total.device)), *watched)


def _watched(
    rewards: Float[Tensor, "b s"], held: Float[Tensor, "b s"], mask: Bool[Tensor, "r n"]
) -> list[float]:
    """What a `Critique` tells beside its loss, asked of the device at once."""
    advantage = (rewards - held).double()
    found = [
        rewards.double().mean(),
        rewards.amax(dim=1).double().mean(),
        held.double().mean(),
        advantage.std(correction=0),
        (advantage.abs().amax(dim=1) < 1e-9).double().mean(),
        mask.sum(dim=-1).double().mean().to(rewards.device),
    ]
    return torch.stack(found).tolist()
