"""Restrict the gradient of a loss to some parameters, wherever `backward` is called.

The loss of the mask networks is the captioner's own loss with the opposite sign. In a plain
training loop, where `backward` reaches everything, it would make the captioner worse.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from overt.losses.loss import Loss

RestrictGradient = Callable[[dict[str, Loss], Sequence[nn.Parameter]], dict[str, Loss]]


def restrict_gradient(
    losses: dict[str, Loss], parameters: Sequence[nn.Parameter]
) -> dict[str, Loss]:
    """Return the same losses with a gradient on `parameters` only.

    Values, gradients on these parameters and their scale are unchanged under `backward`,
    `torch.autograd.grad`, a `GradScaler` and DistributedDataParallel. The parameters must be plain
    tensors.

    Args:
        losses: losses by name.
        parameters: parameters that keep their gradient.

    Returns:
        The losses by name.

    Raises:
        ValueError: the parameters are sharded, as by `fully_shard`.

    Example:
        >>> kept, other = (nn.Parameter(torch.ones(())) for _ in range(2))
        >>> losses = restrict_gradient({"task": Loss(kept * other, torch.ones(()))}, [kept])
        >>> losses["task"].mean().backward()
        >>> kept.grad, other.grad
        (tensor(1.), None)
    """
    learned = [one for one in parameters if one.requires_grad]
    # of all parameters, only a DTensor has placements
    if any(hasattr(one, "placements") for one in learned):
        raise ValueError(
            "cannot restrict the gradient of sharded parameters: use align(..., "
            "restrict=restricted_by_fit) and backward(inputs=aligner.mask_parameters()), as fit "
            "does"
        )
    # "harm" and "penalty" come from one forward pass: the first backward must not free its graph
    graph = _GraphUses(sum(one.total.requires_grad for one in losses.values()))
    return {
        name: replace(one, total=_restrict(one.total, learned, graph))
        for name, one in losses.items()
    }


def restricted_by_fit(
    losses: dict[str, Loss], parameters: Sequence[nn.Parameter]
) -> dict[str, Loss]:
    """Return the losses unchanged, for `fit`, which restricts each backward pass itself.

    Not for a plain training loop: there the loss of the masks would reach the captioner.

    Args:
        losses: The losses by name.
        parameters: The parameters that `fit` gives a gradient.

    Returns:
        The same losses.

    Example:
        >>> losses = {"task": Loss(torch.ones(()), torch.ones(()))}
        >>> restricted_by_fit(losses, []) is losses
        True
    """
    return losses


class _GraphUses:
    """Count the losses that still need a shared graph, so that the last one can free it."""

    def __init__(self, losses: int) -> None:
        self.left = losses

    def retain(self) -> bool:
        """Return whether the graph is needed after this backward pass."""
        self.left -= 1
        # True inside backward(retain_graph=True)
        keeps = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
        return self.left > 0 or bool(keeps())


class _RestrictedLoss(torch.autograd.Function):
    """Identity on a loss; its backward pass goes through the inner graph to some parameters."""

    @staticmethod
    def forward(ctx: Any, inner: list[Tensor], graph: _GraphUses, *parameters: Tensor) -> Tensor:
        # the loss comes inside a list, which autograd does not look into: the outer graph then has
        # edges to `parameters` only, so backward cannot reach the captioner
        ctx.inner, ctx.graph, ctx.parameters = inner[0], graph, parameters
        # clone: an output that shares memory with the detached loss could be changed in place
        return inner[0].detach().clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        found = torch.autograd.grad(
            ctx.inner, ctx.parameters, gradient, retain_graph=ctx.graph.retain(), allow_unused=True
        )
        return None, None, *found


def _restrict(total: Tensor, parameters: Sequence[nn.Parameter], graph: _GraphUses) -> Tensor:
    if not total.requires_grad:
        return total
    # nothing may learn from this loss, for example with RandomMask
    if not parameters:
        return total.detach()
    found: Tensor = _RestrictedLoss.apply([total], graph, *parameters)
    return found
