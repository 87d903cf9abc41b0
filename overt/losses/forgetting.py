"""Losses against forgetting: distillation and elastic weight consolidation.

"Attending Self-Attention" (Samaran et al. 2021) finds every fine-tuned model below its pretrained
start and suggests distillation; its code has elastic weight consolidation, which the paper does not
mention. To preserve the attention of the first model, use `kl` with its maps as targets.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from overt.losses.attention_losses import at_least_float32
from overt.losses.loss import Loss

BatchT = TypeVar("BatchT")
Score = Callable[[nn.Module, BatchT], Float[Tensor, " b"]]  # one log-likelihood per sample


# --- distillation


def distillation(
    prediction: Float[Tensor, "b c"], teacher: Float[Tensor, "b c"], temperature: float = 2.0
) -> Loss:
    """Compute `t^2 KL(teacher || prediction)` of logits divided by a temperature t.

    Hinton, Vinyals and Dean 2015, https://arxiv.org/abs/1503.02531; the factor t^2 makes the size
    of gradients independent of the temperature. The teacher gets no gradient.

    Args:
        prediction: The logits of the student.
        teacher: The logits of the teacher.
        temperature: The temperature t.

    Returns:
        The loss, one row per sample.

    Raises:
        ValueError: The temperature is not positive and finite, or the logits differ in shape.

    Example:
        >>> logits = torch.tensor([[1.0, 2.0]])
        >>> distillation(logits, logits).mean()
        tensor(0.)
    """
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be positive and finite, got {temperature}")
    if prediction.shape != teacher.shape:
        raise ValueError(
            "student and teacher must have logits of the same shape, got "
            f"{tuple(prediction.shape)} and {tuple(teacher.shape)}"
        )
    ours = (at_least_float32(prediction) / temperature).log_softmax(dim=-1)
    theirs = (at_least_float32(teacher.detach()) / temperature).log_softmax(dim=-1)
    difference = (theirs.exp() * (theirs - ours)).sum()
    count = torch.full((), float(len(prediction)), device=difference.device)
    return Loss(temperature**2 * difference, count)


def feature_distillation(
    states: Float[Tensor, "b k d"],
    teacher: Float[Tensor, "b k d"],
    present: Bool[Tensor, "b k"],
) -> Loss:
    """Compute the mean squared difference of hidden states.

    Args:
        states: The states of the student.
        teacher: The states of the teacher, which get no gradient.
        present: Which positions are not padding.

    Returns:
        The loss, one row per position.

    Example:
        >>> states, present = torch.ones(1, 2, 3), torch.tensor([[True, False]])
        >>> feature_distillation(states, torch.zeros(1, 2, 3), present).mean()
        tensor(1.)
    """
    if states.shape != teacher.shape or present.shape != states.shape[:-1]:
        raise ValueError(
            "student and teacher must have states of the same shape, and present that of their "
            f"positions, got {tuple(states.shape)}, {tuple(teacher.shape)} and "
            f"{tuple(present.shape)}"
        )
    difference = (
        (at_least_float32(states) - at_least_float32(teacher.detach())).square().mean(dim=-1)
    )
    return Loss(torch.where(present, difference, 0).sum(), present.sum())


# --- elastic weight consolidation


def fisher_diagonal(
    model: nn.Module, batches: Iterable[BatchT], score: Score[BatchT]
) -> dict[str, Float[Tensor, "..."]]:
    """Compute the mean squared gradient of each parameter over samples.

    This is the diagonal of the Fisher information if `score` returns the log-likelihood of labels
    sampled from the model (`sampled_log_likelihood`); with the labels of a dataset it is the
    empirical Fisher, which differs. One backward pass per sample. The mode of the model is not
    changed: call eval() first to disable dropout.

    Args:
        model: The model.
        batches: The batches to average over.
        score: Returns one log-likelihood per sample.

    Returns:
        One tensor per parameter that requires a gradient, by name.

    Raises:
        ValueError: There are no samples.

    Example:
        >>> model = nn.Linear(2, 3)
        >>> def score(model, batch):
        ...     return sampled_log_likelihood(model(batch))
        >>> found = fisher_diagonal(model, [torch.rand(4, 2)], score)
        >>> found["weight"].shape
        torch.Size([3, 2])
    """
    named = {name: one for name, one in model.named_parameters() if one.requires_grad}
    total = {name: torch.zeros_like(one, dtype=torch.float32) for name, one in named.items()}
    count = 0
    for batch in batches:
        scores = score(model, batch)
        for at, one in enumerate(scores):
            gradients = torch.autograd.grad(
                one, list(named.values()), retain_graph=at + 1 < len(scores), allow_unused=True
            )
            for name, gradient in zip(named, gradients, strict=True):
                if gradient is not None:
                    total[name] += gradient.float().square()
        count += len(scores)
    if not count:
        raise ValueError("batches has no samples")
    return {name: value / count for name, value in total.items()}


def sampled_log_likelihood(
    logits: Float[Tensor, "b c"], generator: torch.Generator | None = None
) -> Float[Tensor, " b"]:
    """Sample one label per sample from the model's own distribution and return its log-likelihood.

    Args:
        logits: The logits of the model.
        generator: The random generator.

    Returns:
        One log-likelihood per sample.

    Example:
        >>> sampled_log_likelihood(torch.zeros(2, 4)).exp()
        tensor([0.2500, 0.2500])
    """
    logs = at_least_float32(logits).log_softmax(dim=-1)
    labels = torch.multinomial(logs.detach().exp(), 1, generator=generator)
    return logs.gather(1, labels)[:, 0]


class ElasticWeightConsolidation(nn.Module):
    """Penalise the distance of parameters from their current values, weighted by importance.

    Calling it with a model returns `1/2 sum F (p - p0)^2` (Kirkpatrick et al. 2017,
    https://arxiv.org/abs/1612.00796, eq. 3, whose lambda is the weight of the loss). Parameters
    added later, such as a new head, are free. Use it as a loss module: `SupervisedModel(net,
    ewc=ElasticWeightConsolidation(net, fisher_diagonal(...)))`.

    Args:
        model: The model whose current parameters are the reference.
        importance: The weight F of each parameter, by name; None gives all the weight one (L2
            towards the start).

    Raises:
        ValueError: `importance` names an unknown parameter or has a wrong shape.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> penalty = ElasticWeightConsolidation(model)
        >>> with torch.no_grad():
        ...     _ = model.weight.add_(1)
        >>> round(penalty(model).mean().item(), 4)
        1.0
    """

    def __init__(self, model: nn.Module, importance: Mapping[str, Tensor] | None = None) -> None:
        super().__init__()
        named = dict(model.named_parameters())
        unknown = sorted(set(importance or {}) - set(named))
        if unknown:
            raise ValueError(
                f"importance has {unknown[0]!r}, which is not a parameter of the model"
            )
        self.names = tuple(named if importance is None else importance)
        for at, name in enumerate(self.names):
            weight = torch.ones_like(named[name]) if importance is None else importance[name]
            if weight.shape != named[name].shape:
                raise ValueError(
                    f"the importance of {name} has the shape {tuple(weight.shape)}, the parameter "
                    f"has {tuple(named[name].shape)}"
                )
            self.register_buffer(f"start_{at}", named[name].detach().clone())
            self.register_buffer(f"weight_{at}", weight.detach().clone())

    def forward(self, model: nn.Module) -> Loss:
        """Return the penalty, counted once per batch."""
        named = dict(model.named_parameters())
        missing = [name for name in self.names if name not in named]
        if missing:
            raise ValueError(
                f"the model has no parameter {missing[0]!r}, which has a reference value"
            )
        total = torch.zeros((), device=next(iter(named.values())).device)
        for at, name in enumerate(self.names):
            start, weight = self.get_buffer(f"start_{at}"), self.get_buffer(f"weight_{at}")
            change = at_least_float32(named[name]) - at_least_float32(start)
            total = total + 0.5 * (at_least_float32(weight) * change.square()).sum()
        return Loss(total, torch.ones((), device=total.device))
