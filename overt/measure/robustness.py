"""How easily is a classifier fooled? Images are changed a little, and its answers watched.

Images are numbers from 0 to 1, before any normalisation, so that `eps` is in the units of a pixel:
`8 / 255` is eight steps of a byte. What normalises belongs into the model's callable:

    classify = lambda images: model(batch_of((images * 255 - 110) / 70)).prediction
    with still(model):
        found = attacked(classify, images)

An image is fooled when its prediction is another one than before, whatever the label is (Jetley et
al., "Learn To Pay Attention", ICLR 2018, figure 6).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from overt.capture.resting import still
from overt.measure.measured import Measured, measured

Classify = Callable[[Float[Tensor, "b 3 y x"]], Float[Tensor, "b c"]]
Objective = Callable[[Float[Tensor, "b c"], Int[Tensor, " b"]], Float[Tensor, " b"]]

LEVELS = tuple(steps / 255 for steps in (1, 2, 4, 8, 16))  # those of figure 6


@runtime_checkable
class Attack(Protocol):
    """What makes images, at most `eps` away in any pixel, that are no longer taken for `labels`."""

    def __call__(
        self,
        classify: Classify,
        images: Float[Tensor, "b 3 y x"],
        labels: Int[Tensor, " b"],
        eps: float,
    ) -> Float[Tensor, "b 3 y x"]: ...


# --- what an attack raises


def lost_odds(logits: Float[Tensor, "b c"], labels: Int[Tensor, " b"]) -> Float[Tensor, " b"]:
    """The log-odds against each label: an attack on the cross-entropy (Goodfellow et al. 2014).

    Its slope is that of the cross-entropy over the probability of all other classes. Attacks take
    nothing but the sign, which is the same. The slope of the cross-entropy itself rounds to zero
    for a model that is sure of itself, which would then pass for robust.
    """
    others = logits.scatter(-1, labels[:, None], -torch.inf)
    return others.logsumexp(dim=-1) - logits.gather(-1, labels[:, None])[:, 0]


def lost_score(logits: Float[Tensor, "b c"], labels: Int[Tensor, " b"]) -> Float[Tensor, " b"]:
    """Minus the logit of each label, other classes aside: how section 2 of the paper puts it."""
    return -logits.gather(-1, labels[:, None])[:, 0]


def lost_margin(logits: Float[Tensor, "b c"], labels: Int[Tensor, " b"]) -> Float[Tensor, " b"]:
    """How far the best other class is above each label: above 0 the image is fooled."""
    own = logits.gather(-1, labels[:, None])
    others = logits.scatter(-1, labels[:, None], -torch.inf)
    return others.amax(dim=-1) - own[:, 0]


# --- attacks


def fgsm(
    classify: Classify,
    images: Float[Tensor, "b 3 y x"],
    labels: Int[Tensor, " b"],
    eps: float,
    objective: Objective = lost_odds,
) -> Float[Tensor, "b 3 y x"]:
    """Each pixel moved by `eps` to where the loss grows: the fast gradient sign method.

    One step, and no pixel leaves [0, 1]. Goodfellow et al., "Explaining and Harnessing Adversarial
    Examples", 2014, https://arxiv.org/abs/1412.6572.
    """
    _, slope = _climb(classify, images, labels, objective)
    return (images + eps * slope.sign()).clamp(0, 1)


def pgd(
    classify: Classify,
    images: Float[Tensor, "b 3 y x"],
    labels: Int[Tensor, " b"],
    eps: float,
    generator: torch.Generator,
    steps: int = 20,
    restarts: int = 1,
    objective: Objective = lost_odds,
) -> Float[Tensor, "b 3 y x"]:
    """Many small steps from a random start within `eps`: projected gradient descent.

    Madry et al., "Towards Deep Learning Models Resistant to Adversarial Attacks", 2017,
    https://arxiv.org/abs/1706.06083; a step is 2.5 `eps` / `steps`. The first image on any path
    that is taken for another class is kept, and what has been fooled is not started again. Random
    numbers are drawn sample by sample, all restarts at once: a sample gets the same ones
    in whatever portions a set is attacked.
    """
    if min(steps, restarts) < 1:
        raise ValueError(f"{steps} steps and {restarts} restarts: an attack needs one of each")
    starts = torch.stack([_uniform(restarts, one, generator) for one in images], dim=1)
    low, high = (images - eps).clamp_min(0), (images + eps).clamp_max(1)
    found = images.clone()
    left = torch.arange(len(images), device=images.device)
    for start in starts:
        begin = (images + eps * start)[left].clamp(low[left], high[left])
        reached, fooled = _path(
            classify,
            begin,
            labels[left],
            low[left],
            high[left],
            2.5 * eps / steps,
            steps,
            objective,
        )
        found[left] = reached
        left = left[~fooled]
        if not len(left):
            break
    return found


def _path(
    classify: Classify,
    at: Float[Tensor, "b 3 y x"],
    labels: Int[Tensor, " b"],
    low: Float[Tensor, "b 3 y x"],
    high: Float[Tensor, "b 3 y x"],
    step: float,
    steps: int,
    objective: Objective,
) -> tuple[Float[Tensor, "b 3 y x"], Tensor]:
    """Where one path ends: the first image on it that fools, else its last; and which fooled."""
    fooled = torch.zeros(len(at), dtype=torch.bool, device=at.device)
    for _ in range(steps):
        predicted, slope = _climb(classify, at, labels, objective)
        fooled |= predicted != labels
        if fooled.all():
            return at, fooled
        moved = (at + step * slope.sign()).clamp(low, high)
        at = torch.where(fooled[:, None, None, None], at, moved)
    return at, fooled | (_predicted(classify, at) != labels)


def _climb(
    classify: Classify,
    images: Float[Tensor, "b 3 y x"],
    labels: Int[Tensor, " b"],
    objective: Objective,
) -> tuple[Int[Tensor, " b"], Float[Tensor, "b 3 y x"]]:
    """What each image is taken for, and how the objective grows with its pixels.

    Only the gradient of the images is asked for: those of the parameters stay what they were.
    """
    with torch.inference_mode(False), torch.enable_grad():
        at = images.detach().clone().requires_grad_()
        logits = classify(at)
        slope = None
        if logits.requires_grad:
            precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
            total = objective(precise, labels.clone()).sum()
            (slope,) = torch.autograd.grad(total, at, allow_unused=True)
    if slope is None:
        raise ValueError(
            "the logits do not depend on the images in a way that gradients can follow: "
            "the model must neither detach nor round them"
        )
    return logits.detach().argmax(dim=-1), slope


def _uniform(
    restarts: int, like: Float[Tensor, "3 y x"], generator: torch.Generator
) -> Float[Tensor, "r 3 y x"]:
    noise = torch.rand((restarts, *like.shape), generator=generator, device=generator.device)
    return (2 * noise - 1).to(like)


# --- what becomes of the answers


@dataclass(frozen=True, eq=False)
class Attacked:
    """What each image is taken for before an attack, and at each strength after it.

    -1 stands for no class: the logits of the image are NaN.
    """

    eps: tuple[float, ...]
    clean: Int[Tensor, " b"]
    predictions: Int[Tensor, "e b"]

    @property
    def fooled(self) -> Float[Tensor, "e b"]:
        """1 where the prediction has changed, else 0; the mean of a row is the fooling rate.

        Not defined where there is no prediction, before the attack or after it.
        """
        known = (self.predictions >= 0) & (self.clean >= 0)
        return torch.where(known, (self.predictions != self.clean).float(), torch.nan)


def attacked(
    classify: Classify | nn.Module,
    images: Float[Tensor, "b 3 y x"],
    levels: tuple[float, ...] = LEVELS,
    attack: Attack = fgsm,
    portion: int = 256,
) -> Attacked:
    """What becomes of the answers under attacks of several strengths, `portion` images at a time.

    A module is held in evaluation mode for the time, and is left as found: modes, gradients and
    statistics. A function of a module is asked as it is; see `still`. PGD-20 with five restarts is
    `attack=partial(pgd, generator=generator, restarts=5)`.
    """
    if images.numel() and not (float(images.amin()) >= 0 and float(images.amax()) <= 1):
        raise ValueError(
            f"images from {float(images.amin()):g} to {float(images.amax()):g}: an attack needs "
            "pixels from 0 to 1, before they are normalised"
        )
    if not levels or min(levels) < 0:
        raise ValueError(f"an attack needs strengths of 0 or more, and was given {levels}")
    held: AbstractContextManager[object] = nullcontext()
    if isinstance(classify, nn.Module):
        held = still(classify)
    with held:
        portions = list(images.split(portion))
        clean = [_predicted(classify, some) for some in portions]
        after = [
            torch.cat(
                [
                    _predicted(classify, attack(classify, some, labels.clamp_min(0), eps))
                    for some, labels in zip(portions, clean, strict=True)
                ]
            )
            for eps in levels
        ]
    return Attacked(levels, torch.cat(clean), torch.stack(after))


@measured("fooling rate", "share", higher_is_better=False, low=0.0, high=1.0)
def fooling(
    classify: Classify | nn.Module,
    images: Float[Tensor, "b 3 y x"],
    eps: float,
    attack: Attack = fgsm,
    portion: int = 256,
) -> Measured:
    """1 where an attack of strength `eps` changes the prediction, else 0.

    Not defined where the logits are NaN, before the attack or after it.
    """
    return attacked(classify, images, (eps,), attack, portion).fooled[0]


@torch.no_grad()
def _predicted(classify: Classify, images: Float[Tensor, "b 3 y x"]) -> Int[Tensor, " b"]:
    """The class with the largest logit; -1 where one is NaN."""
    logits = classify(images)
    return torch.where(logits.isnan().any(dim=-1), -1, logits.argmax(dim=-1))
