"""Caption losses: next-token cross-entropy and self-critical sequence training.

Rennie, Marcheret, Mroueh, Ross and Goel, "Self-Critical Sequence Training for Image Captioning",
CVPR 2017, https://arxiv.org/abs/1612.00563; eq. 11 and 12 of Fei, AAAI 2022. Rewards, decoders and
baselines are callables: `overt.metrics.captions.Consensus` is the usual reward.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import ArrayLike
from torch import Tensor

from overt.losses.loss import Loss

Rewards = Float[Tensor, "b s"]  # of the s sampled captions of each image
Baseline = Callable[[Rewards], Float[Tensor, "b #s"]]


def next_token_cross_entropy(
    logits: Float[Tensor, "b n v"],
    tokens: Int[Tensor, "b n"],
    mask: Bool[Tensor, "b n"],
    smoothing: float = 0.0,
) -> Loss:
    """Compute `-log p` of every token (eq. 11).

    Args:
        logits: The logits of each position.
        tokens: The tokens of the captions.
        mask: Which tokens belong to the captions.
        smoothing: The label smoothing.

    Returns:
        The loss, one row per token of the mask.

    Raises:
        ValueError: Tokens or mask do not have the shape of the logits, the mask is not boolean,
            `smoothing` is not from 0 to 1, or, checked on the CPU only, a token of the mask is not
            in the vocabulary.

    Example:
        >>> tokens, mask = torch.tensor([[1, 2, 0]]), torch.tensor([[True, True, False]])
        >>> next_token_cross_entropy(torch.zeros(1, 3, 4), tokens, mask).mean()  # log 4
        tensor(1.3863)
    """
    for what, one in (("tokens", tokens), ("mask", mask)):
        if one.shape != logits.shape[:2]:
            raise ValueError(
                f"{what} must have the shape {tuple(logits.shape[:2])} of the logits, got "
                f"{tuple(one.shape)}: the logits of a position are for the next token, such as "
                "tokens[:, 1:]"
            )
    if mask.dtype is not torch.bool:
        raise ValueError(f"mask must be boolean, got {mask.dtype}: use mask.bool()")
    if not 0 <= smoothing <= 1:
        raise ValueError(f"smoothing must be from 0 to 1, got {smoothing}")
    # padding may be any number
    known = tokens.where(mask, 0)
    # on a GPU this would synchronize
    if known.device.type == "cpu" and known.numel():
        low, high = int(known.min()), int(known.max())
        if low < 0 or high >= logits.shape[-1]:
            raise ValueError(
                f"tokens must be from 0 to {logits.shape[-1] - 1}, got "
                f"{low if low < 0 else high}: exclude padding with the mask"
            )
    # flat, so that the vocabulary axis is last and contiguous
    losses = torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1),
        known.flatten(),
        reduction="none",
        label_smoothing=smoothing,
    )
    return Loss(losses.where(mask.flatten(), 0).sum(), mask.sum())


def log_probabilities(
    logits: Float[Tensor, "b n v"], tokens: Int[Tensor, "b n"], never: tuple[int, ...] = ()
) -> Float[Tensor, "b n"]:
    """Compute `log p` of every token.

    Args:
        logits: The logits of each position.
        tokens: The tokens.
        never: Tokens that sampling excludes; they are excluded here too.

    Returns:
        The log-probabilities.

    Example:
        >>> log_probabilities(torch.zeros(1, 2, 4), torch.tensor([[0, 3]])).exp()
        tensor([[0.2500, 0.2500]])
    """
    logits = logits.float()
    if never:
        forbidden = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
        forbidden[list(never)] = True
        logits = logits.masked_fill(forbidden, -torch.inf)
    return logits.log_softmax(dim=-1).gather(2, tokens[..., None])[..., 0]


# --- baselines


def mean_baseline(rewards: Rewards) -> Float[Tensor, "b 1"]:
    """Return the mean reward of the captions of an image (Cornia et al. 2020, over beams).

    Args:
        rewards: The rewards of the captions of each image.

    Returns:
        One baseline per image.

    Example:
        >>> mean_baseline(torch.tensor([[1.0, 2.0, 6.0]]))
        tensor([[3.]])
    """
    return rewards.mean(dim=1, keepdim=True)


def leave_one_out_baseline(rewards: Rewards) -> Rewards:
    """Return the mean reward of the other captions of the image, an unbiased baseline.

    With `mean_baseline`, which includes the caption itself, the gradient is (s - 1) / s of this
    one's.

    Args:
        rewards: The rewards of the captions of each image.

    Returns:
        One baseline per caption.

    Raises:
        ValueError: There is only one caption per image.

    Example:
        >>> leave_one_out_baseline(torch.tensor([[1.0, 2.0, 6.0]]))
        tensor([[4.0000, 3.5000, 1.5000]])
    """
    s = rewards.shape[1]
    if s < 2:
        raise ValueError(
            "the leave-one-out baseline needs at least two captions per image, got one"
        )
    return (rewards.sum(dim=1, keepdim=True) - rewards) / (s - 1)


def constant_baseline(rewards: Float[Tensor, " b"]) -> Baseline:
    """Return a baseline with one known reward per image.

    Such as the reward of its greedy caption (Rennie et al.).

    Args:
        rewards: The reward of each image.

    Returns:
        The baseline.
    """
    return lambda _: rewards[:, None]


# --- self-critical training


@runtime_checkable
class SampledCaptions(Protocol):
    """Sampled captions; those of one image are consecutive, as in `decoding.sample`."""

    @property
    def tokens(self) -> Tensor:
        """The padded tokens with the end token: (b s) rows."""
        ...

    @property
    def mask(self) -> Tensor:
        """Which tokens belong to the captions."""
        ...


Score = Callable[[Sequence[Sequence[int]], Sequence[int]], ArrayLike]


def token_reward(
    score: Score, images: Sequence[int], draws: int
) -> Callable[[SampledCaptions], Rewards]:
    """Return a reward computed from the tokens of captions.

    Args:
        score: Called as `score(texts, images)`, such as a `Consensus`. References must include the
            end token, because the captions do.
        images: The indices of the images of a batch among the references of `score`.
        draws: The number of captions per image.

    Returns:
        A function for the `reward` argument of `self_critical`; it raises `ValueError` if the
        number of captions is not `draws` per image.

    Example:
        >>> from types import SimpleNamespace
        >>> lengths = lambda texts, images: [float(len(text)) for text in texts]
        >>> drawn = SimpleNamespace(
        ...     tokens=torch.tensor([[5, 6, 2], [5, 2, 0]]),
        ...     mask=torch.tensor([[True, True, True], [True, True, False]]),
        ... )
        >>> token_reward(lengths, images=[0], draws=2)(drawn)
        tensor([[3., 2.]], dtype=torch.float64)
    """
    of = [image for image in images for _ in range(draws)]

    def reward(drawn: SampledCaptions) -> Rewards:
        if len(drawn.tokens) != len(of):
            raise ValueError(
                f"expected {draws} captions for each of {len(images)} images, got "
                f"{len(drawn.tokens)}"
            )
        rows = zip(drawn.tokens.tolist(), drawn.mask.sum(dim=1).tolist(), strict=True)
        scores = score([row[:count] for row, count in rows], of)
        found = torch.as_tensor(scores, dtype=torch.float64).reshape(len(images), draws)
        return found.to(drawn.tokens.device)

    return reward


@dataclass(frozen=True, eq=False)
class SelfCriticalStep:
    """The loss of a self-critical step, and statistics to monitor.

    Args:
        loss: The loss.
        reward: The mean reward of the sampled captions.
        best: The mean of the best reward per image.
        baseline: The mean baseline.
        spread: The standard deviation of reward minus baseline.
        idle: The share of images whose captions all have the reward of their baseline: no gradient.
        length: The mean number of tokens, because some rewards favour long captions.

    Example:
        >>> step = SelfCriticalStep(
        ...     Loss(torch.tensor(2.0), torch.tensor(2.0)),
        ...     reward=0.4,
        ...     best=0.6,
        ...     baseline=0.3,
        ...     spread=0.1,
        ...     idle=0.0,
        ...     length=9.5,
        ... )
        >>> step.loss.mean(), round(step.best - step.baseline, 2)
        (tensor(1.), 0.3)
    """

    loss: Loss
    reward: float
    best: float
    baseline: float
    spread: float
    idle: float
    length: float


def self_critical(
    draw: Callable[[], SampledCaptions],
    reward: Callable[[SampledCaptions], Rewards],
    log_probability: Callable[[SampledCaptions], Float[Tensor, "r n"]],
    baseline: Baseline = leave_one_out_baseline,
) -> SelfCriticalStep:
    """Compute one step of eq. 12: `-(r - b) log p(y)`, summed over sampled captions y.

    Sampling, reward and baseline run without gradients. The log-probabilities of all tokens are
    computed in one pass, which replaces a graph over all decoding steps.

    Args:
        draw: Samples captions from the model.
        reward: Scores the captions.
        log_probability: Returns the log-probability of each token, with gradients.
        baseline: Computes the baseline from the rewards.

    Returns:
        The loss, one row per caption, and statistics.

    Raises:
        ValueError: The number of rewards is wrong, or a reward is not finite.

    Example:
        >>> from types import SimpleNamespace
        >>> logits = torch.zeros(2, 2, 4, requires_grad=True)
        >>> tokens = torch.tensor([[1, 2], [3, 2]])
        >>> drawn = SimpleNamespace(tokens=tokens, mask=torch.ones(2, 2, dtype=torch.bool))
        >>> step = self_critical(
        ...     draw=lambda: drawn,
        ...     reward=lambda captions: torch.tensor([[1.0, 0.0]]),  # the first caption is better
        ...     log_probability=lambda captions: log_probabilities(logits, captions.tokens),
        ... )
        >>> step.loss.mean().backward()
        >>> logits.grad[0, 0].argmin(), step.reward  # the first caption becomes more likely
        (tensor(1), 0.5)
    """
    with torch.no_grad():
        drawn = draw()
        rewards = reward(drawn)
        rows = len(drawn.tokens)
        if rewards.numel() != rows:
            raise ValueError(f"expected {rows} rewards, one per caption, got {rewards.numel()}")
        if not rewards.isfinite().all():
            raise ValueError("a reward is not finite")
        expected = baseline(rewards).to(rewards).expand_as(rewards)
        advantage = rewards - expected
        # before the next pass: afterwards this synchronization would wait for it
        statistics = _statistics(rewards, expected, drawn.mask)
    logs = log_probability(drawn)
    texts = logs.where(drawn.mask.to(logs.device), 0).sum(dim=-1)
    total = -(advantage.flatten().to(texts) * texts).sum()
    return SelfCriticalStep(
        Loss(total, torch.full((), float(rows), device=total.device)), *statistics
    )


def _statistics(
    rewards: Float[Tensor, "b s"], expected: Float[Tensor, "b s"], mask: Bool[Tensor, "r n"]
) -> list[float]:
    """Compute the statistics of a `SelfCriticalStep` with one synchronization."""
    advantage = (rewards - expected).double()
    found = [
        rewards.double().mean(),
        rewards.amax(dim=1).double().mean(),
        expected.double().mean(),
        advantage.std(correction=0),
        (advantage.abs().amax(dim=1) < 1e-9).double().mean(),
        mask.sum(dim=-1).double().mean().to(rewards.device),
    ]
    return torch.stack(found).tolist()
