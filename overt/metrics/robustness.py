"""Adversarial robustness of a classifier: FGSM and PGD attacks, and the fooling rate.

Images are numbers from 0 to 1, before any normalization, so that `eps` is in units of a pixel: `8 /
255` is eight steps of a byte. The callable normalizes:

    classify = lambda images: model(batch_of((images * 255 - 110) / 70)).prediction
    with eval_mode(model):
        found = evaluate_attack(classify, images)

An image is fooled when its prediction changes, whatever the label (Jetley et al., "Learn To Pay
Attention", ICLR 2018, figure 6).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from overt.capture.eval_mode import eval_mode
from overt.metrics.argument_checks import check_count, check_generator, check_positive
from overt.metrics.metric import SampleScores, declare_metric

Classify = Callable[[Float[Tensor, "b 3 y x"]], Float[Tensor, "b c"]]
Objective = Callable[[Float[Tensor, "b c"], Int[Tensor, " b"]], Float[Tensor, " b"]]

LEVELS = tuple(steps / 255 for steps in (1, 2, 4, 8, 16))  # as in figure 6


@runtime_checkable
class Attack(Protocol):
    """Protocol of an attack: change images by at most `eps` per pixel to leave their labels."""

    def __call__(
        self,
        classify: Classify,
        images: Float[Tensor, "b 3 y x"],
        labels: Int[Tensor, " b"],
        eps: float,
    ) -> Float[Tensor, "b 3 y x"]: ...


# --- objectives that an attack increases


def negative_log_odds(
    logits: Float[Tensor, "b c"], labels: Int[Tensor, " b"]
) -> Float[Tensor, " b"]:
    """Compute the log-odds against each label: an attack on the cross-entropy.

    Goodfellow et al. 2014. Its gradient is that of the cross-entropy over the probability of all
    other classes. Attacks only use the sign, which is the same. The gradient of the cross-entropy
    itself rounds to zero for a confident model, which would then look robust.
    """
    others = logits.scatter(-1, labels[:, None], -torch.inf)
    return others.logsumexp(dim=-1) - logits.gather(-1, labels[:, None])[:, 0]


def negative_logit(logits: Float[Tensor, "b c"], labels: Int[Tensor, " b"]) -> Float[Tensor, " b"]:
    """Compute minus the logit of each label, ignoring other classes (section 2 of the paper)."""
    return -logits.gather(-1, labels[:, None])[:, 0]


def misclassification_margin(
    logits: Float[Tensor, "b c"], labels: Int[Tensor, " b"]
) -> Float[Tensor, " b"]:
    """Compute how far the best other class is above each label: above 0 the image is fooled."""
    own = logits.gather(-1, labels[:, None])
    others = logits.scatter(-1, labels[:, None], -torch.inf)
    return others.amax(dim=-1) - own[:, 0]


# --- attacks


def fgsm(
    classify: Classify,
    images: Float[Tensor, "b 3 y x"],
    labels: Int[Tensor, " b"],
    eps: float,
    objective: Objective = negative_log_odds,
) -> Float[Tensor, "b 3 y x"]:
    """Attack images with the fast gradient sign method (FGSM).

    One step of `eps` per pixel, clipped to [0, 1]. Goodfellow et al., "Explaining and Harnessing
    Adversarial Examples", 2014, https://arxiv.org/abs/1412.6572.

    Args:
        classify: Returns the logits of images.
        images: Pixels from 0 to 1.
        labels: The classes to attack.
        eps: The largest change of a pixel.
        objective: What the attack increases.

    Returns:
        The attacked images.
    """
    eps = check_positive("eps", eps, zero=True)
    _, slope = _input_gradient(classify, images, labels, objective)
    return (images + eps * slope.sign()).clamp(0, 1)


def pgd(
    classify: Classify,
    images: Float[Tensor, "b 3 y x"],
    labels: Int[Tensor, " b"],
    eps: float,
    generator: torch.Generator,
    steps: int = 20,
    restarts: int = 1,
    objective: Objective = negative_log_odds,
) -> Float[Tensor, "b 3 y x"]:
    """Attack images with projected gradient descent (PGD) from random starts within `eps`.

    Madry et al., "Towards Deep Learning Models Resistant to Adversarial Attacks", 2017,
    https://arxiv.org/abs/1706.06083; the step size is 2.5 `eps` / `steps`. The first misclassified
    image on any path is kept, and a fooled image is not started again. Random numbers are drawn per
    sample, all restarts at once: they do not depend on how a dataset is split into portions.

    Args:
        classify: Returns the logits of images.
        images: Pixels from 0 to 1.
        labels: The classes to attack.
        eps: The largest change of a pixel.
        generator: The source of random numbers.
        steps: Steps per start.
        restarts: Number of random starts.
        objective: What the attack increases.

    Returns:
        The attacked images.

    Raises:
        ValueError: `steps` or `restarts` is below 1.
    """
    steps, restarts = check_count("steps", steps), check_count("restarts", restarts)
    eps = check_positive("eps", eps, zero=True)
    starts = torch.stack([_uniform_start(restarts, one, generator) for one in images], dim=1)
    low, high = (images - eps).clamp_min(0), (images + eps).clamp_max(1)
    found = images.clone()
    left = torch.arange(len(images), device=images.device)
    for start in starts:
        begin = (images + eps * start)[left].clamp(low[left], high[left])
        reached, fooled = _attack_path(
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


def _attack_path(
    classify: Classify,
    at: Float[Tensor, "b 3 y x"],
    labels: Int[Tensor, " b"],
    low: Float[Tensor, "b 3 y x"],
    high: Float[Tensor, "b 3 y x"],
    step: float,
    steps: int,
    objective: Objective,
) -> tuple[Float[Tensor, "b 3 y x"], Tensor]:
    """Follow one path to its first misclassified image or its end; return which are fooled too."""
    fooled = torch.zeros(len(at), dtype=torch.bool, device=at.device)
    for _ in range(steps):
        predicted, slope = _input_gradient(classify, at, labels, objective)
        fooled |= predicted != labels
        if fooled.all():
            return at, fooled
        moved = (at + step * slope.sign()).clamp(low, high)
        at = torch.where(fooled[:, None, None, None], at, moved)
    return at, fooled | (_predict(classify, at) != labels)


def _input_gradient(
    classify: Classify,
    images: Float[Tensor, "b 3 y x"],
    labels: Int[Tensor, " b"],
    objective: Objective,
) -> tuple[Int[Tensor, " b"], Float[Tensor, "b 3 y x"]]:
    """Return the predictions and the gradient of the objective by the images.

    Gradients of parameters are not computed and stay as they were.
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
            "the logits have no gradient by the images: the model must not detach or round them"
        )
    return logits.detach().argmax(dim=-1), slope


def _uniform_start(
    restarts: int, like: Float[Tensor, "3 y x"], generator: torch.Generator
) -> Float[Tensor, "r 3 y x"]:
    device = check_generator(generator).device
    noise = torch.rand((restarts, *like.shape), generator=generator, device=device)
    return (2 * noise - 1).to(like)


# --- evaluation


@dataclass(frozen=True, eq=False)
class AttackResult:
    """Predictions before an attack and at each strength; -1 where logits are NaN."""

    eps: tuple[float, ...]
    clean: Int[Tensor, " b"]
    predictions: Int[Tensor, "e b"]

    @property
    def fooled(self) -> Float[Tensor, "e b"]:
        """1 where the prediction changes, else 0; the mean of a row is the fooling rate.

        NaN where there is no prediction before or after the attack.
        """
        known = (self.predictions >= 0) & (self.clean >= 0)
        return torch.where(known, (self.predictions != self.clean).float(), torch.nan)


def evaluate_attack(
    classify: Classify | nn.Module,
    images: Float[Tensor, "b 3 y x"],
    levels: tuple[float, ...] = LEVELS,
    attack: Attack = fgsm,
    portion: int = 256,
) -> AttackResult:
    """Attack images at several strengths and return the predictions.

    A module is put into evaluation mode meanwhile and restored afterwards: modes, gradients and
    statistics. A function of a module is called unchanged; see `eval_mode`. PGD-20 with five
    restarts is `attack=partial(pgd, generator=generator, restarts=5)`.

    Args:
        classify: Returns the logits of images.
        images: Pixels from 0 to 1.
        levels: The strengths `eps`.
        attack: The attack.
        portion: Images per call.

    Returns:
        The predictions before and after.

    Raises:
        ValueError: Pixels are not from 0 to 1, or there is no strength, or a negative one.
    """
    if images.numel() and not (float(images.amin()) >= 0 and float(images.amax()) <= 1):
        raise ValueError(
            f"pixels must be from 0 to 1, before normalization, got {float(images.amin()):g} to "
            f"{float(images.amax()):g}"
        )
    if not levels:
        raise ValueError(f"levels must have at least one strength, got {levels}")
    levels = tuple(check_positive("each of levels", level, zero=True) for level in levels)
    portion = check_count("portion", portion)
    evaluating: AbstractContextManager[object] = nullcontext()
    if isinstance(classify, nn.Module):
        evaluating = eval_mode(classify)
    with evaluating:
        portions = list(images.split(portion))
        clean = [_predict(classify, some) for some in portions]
        after = [
            torch.cat(
                [
                    _predict(classify, attack(classify, some, labels.clamp_min(0), eps))
                    for some, labels in zip(portions, clean, strict=True)
                ]
            )
            for eps in levels
        ]
    return AttackResult(levels, torch.cat(clean), torch.stack(after))


@declare_metric("fooling rate", "share", higher_is_better=False, low=0.0, high=1.0)
def fooling_rate(
    classify: Classify | nn.Module,
    images: Float[Tensor, "b 3 y x"],
    eps: float,
    attack: Attack = fgsm,
    portion: int = 256,
) -> SampleScores:
    """Compute whether an adversarial attack changes the prediction: 1 or 0 per sample.

    Args:
        classify: Returns the logits of images.
        images: Pixels from 0 to 1.
        eps: The largest change of a pixel.
        attack: The attack.
        portion: Images per call.

    Returns:
        One score per sample; NaN where logits are NaN before or after the attack.
    """
    return evaluate_attack(classify, images, (eps,), attack, portion).fooled[0]


@torch.no_grad()
def _predict(classify: Classify, images: Float[Tensor, "b 3 y x"]) -> Int[Tensor, " b"]:
    """Return the class with the largest logit; -1 where a logit is NaN."""
    logits = classify(images)
    return torch.where(logits.isnan().any(dim=-1), -1, logits.argmax(dim=-1))
