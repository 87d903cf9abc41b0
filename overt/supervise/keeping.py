"""Against forgetting: stay near what a model knew before it was taught where to look.

"Attending Self-Attention" (Samaran et al. 2021) finds every fine-tuned model below the one it began
with and suggests distillation; its code has elastic weight consolidation, of which the paper says
nothing. To keep the attention of the first model, `kl` with its maps for a target will do.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from overt.supervise.loss import Loss
from overt.supervise.losses import precise

Given = TypeVar("Given")
Score = Callable[[nn.Module, Given], Float[Tensor, " b"]]  # log-likelihoods, one a sample


# --- distillation


def distillation(
    prediction: Float[Tensor, "b c"], teacher: Float[Tensor, "b c"], temperature: float = 2.0
) -> Loss:
    """`t^2 KL(teacher || prediction)` of logits divided by a temperature t, summed over samples.

    Hinton, Vinyals and Dean 2015, https://arxiv.org/abs/1503.02531; t^2 keeps gradients of one size
    whatever the temperature. No gradient goes to the teacher.
    """
    if temperature <= 0:
        raise ValueError(f"a temperature of {temperature}; it is above 0")
    ours = (precise(prediction) / temperature).log_softmax(dim=-1)
    theirs = (precise(teacher.detach()) / temperature).log_softmax(dim=-1)
    apart = (theirs.exp() * (theirs - ours)).sum()
    count = torch.full((), float(len(prediction)), device=apart.device)
    return Loss(temperature**2 * apart, count)


def same_states(
    states: Float[Tensor, "b k d"],
    teacher: Float[Tensor, "b k d"],
    present: Bool[Tensor, "b k"],
) -> Loss:
    """The mean over features of the squared difference, summed over positions that are there."""
    apart = (precise(states) - precise(teacher.detach())).square().mean(dim=-1)
    return Loss(torch.where(present, apart, 0).sum(), present.sum())


# --- elastic weight consolidation


def fisher(
    model: nn.Module, batches: Iterable[Given], score: Score[Given]
) -> dict[str, Float[Tensor, "..."]]:
    """How much each parameter matters: the mean over samples of its squared gradient.

    The diagonal of the Fisher information where `score(model, batch)` gives the log-likelihood of
    labels that are drawn from the model itself (`drawn`); with labels of a data set it is the
    empirical Fisher, another thing. One backward pass a sample. The model's mode is not changed:
    call eval() first to leave dropout out.
    """
    named = {name: one for name, one in model.named_parameters() if one.requires_grad}
    total = {name: torch.zeros_like(one, dtype=torch.float32) for name, one in named.items()}
    count = 0
    for batch in batches:
        scores = score(model, batch)
        for at, one in enumerate(scores):
            slopes = torch.autograd.grad(
                one, list(named.values()), retain_graph=at + 1 < len(scores), allow_unused=True
            )
            for name, slope in zip(named, slopes, strict=True):
                if slope is not None:
                    total[name] += slope.float().square()
        count += len(scores)
    if not count:
        raise ValueError("there are no samples from which to tell what matters")
    return {name: value / count for name, value in total.items()}


def drawn(
    logits: Float[Tensor, "b c"], generator: torch.Generator | None = None
) -> Float[Tensor, " b"]:
    """The log-likelihood of one label a sample, drawn from what the model itself believes."""
    logs = precise(logits).log_softmax(dim=-1)
    labels = torch.multinomial(logs.detach().exp(), 1, generator=generator)
    return logs.gather(1, labels)[:, 0]


class Anchor(nn.Module):
    """Parameters as they are now, held the more strongly the more they matter.

    `anchor(model)` is `1/2 sum F (p - p0)^2` (Kirkpatrick et al. 2017,
    https://arxiv.org/abs/1612.00796, eq. 3, whose lambda is the loss's weight). Parameters that the
    model has gained since, such as a new head, are free. Without `importance` all count alike (L2
    towards the start). The anchor is a teacher: `Taught(net, anchor=Anchor(net, fisher(...)))`.
    """

    def __init__(self, model: nn.Module, importance: Mapping[str, Tensor] | None = None) -> None:
        super().__init__()
        named = dict(model.named_parameters())
        unknown = sorted(set(importance or {}) - set(named))
        if unknown:
            raise ValueError(f"the model has no parameter {unknown[0]!r} that could matter")
        self.names = tuple(named if importance is None else importance)
        for at, name in enumerate(self.names):
            weight = torch.ones_like(named[name]) if importance is None else importance[name]
            if weight.shape != named[name].shape:
                raise ValueError(
                    f"the importance of {name} has shape {tuple(weight.shape)}, and the parameter "
                    f"{tuple(named[name].shape)}"
                )
            self.register_buffer(f"start_{at}", named[name].detach().clone())
            self.register_buffer(f"weight_{at}", weight.detach().clone())

    def forward(self, model: nn.Module) -> Loss:
        """How far the model has gone; counted once a batch, however large."""
        named = dict(model.named_parameters())
        missing = [name for name in self.names if name not in named]
        if missing:
            raise ValueError(f"the model has lost {missing[0]!r}, which was to be held")
        total = torch.zeros((), device=next(iter(named.values())).device)
        for at, name in enumerate(self.names):
            start, weight = self.get_buffer(f"start_{at}"), self.get_buffer(f"weight_{at}")
            away = precise(named[name]) - precise(start)
            total = total + 0.5 * (precise(weight) * away.square()).sum()
        return Loss(total, torch.ones((), device=total.device))
