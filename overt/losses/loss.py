"""`Loss`: a sum and the count it is divided by."""

from dataclasses import dataclass

from jaxtyping import Float, Num
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Loss:
    """The sum of a loss over `count` rows, before division.

    The training loop divides once by the count over all processes and accumulation steps: a mean of
    means is wrong if the counts differ. A batch-level loss (MMD, CORAL) counts as one row and
    cannot be accumulated.

    Args:
        total: The sum over rows.
        count: The number of rows.
        weight: The factor of the loss in the objective.
        batch_level: Whether the loss compares whole batches.

    Example:
        >>> import torch
        >>> loss = 0.5 * Loss(torch.tensor(6.0), torch.tensor(3))
        >>> loss.mean()
        tensor(1.)
        >>> torch.tensor(2.0) + loss  # a task loss and a loss on attention, on one process
        tensor(3.)
    """

    total: Float[Tensor, ""]
    count: Num[Tensor, ""]
    weight: float = 1.0
    batch_level: bool = False

    def __mul__(self, weight: float) -> "Loss":
        """Return the loss with its weight multiplied by `weight`."""
        return Loss(self.total, self.count, self.weight * weight, self.batch_level)

    __rmul__ = __mul__

    def __truediv__(self, parts: float) -> "Loss":
        """Return the loss with its weight divided by `parts`, such as accumulation steps."""
        return Loss(self.total, self.count, self.weight / parts, self.batch_level)

    def __add__(self, other: "Loss | Float[Tensor, ''] | float") -> Float[Tensor, ""]:
        """Return the sum of two weighted means, such as `task_loss + attention_loss`."""
        return self.mean() + (other.mean() if isinstance(other, Loss) else other)

    __radd__ = __add__

    def backward(self) -> None:
        """Compute the gradients of the weighted mean."""
        self.mean().backward()

    def item(self) -> float:
        """Return the weighted mean as a number; this synchronizes the GPU."""
        return self.mean().item()

    def mean(self) -> Float[Tensor, ""]:
        """Return the weighted mean per row, for a loop on one process; 0 if there are no rows."""
        return self.weight * self.total / self.count.clamp_min(1)
