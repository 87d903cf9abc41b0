"""A loss before it is divided: a sum and what it was summed over."""

from dataclasses import dataclass

from jaxtyping import Float, Num
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Loss:
    """The sum of a loss over `count` rows.

    Only the training loop divides, once, by the count over all processes and accumulation steps:
    a mean of means is wrong as soon as two of them count different numbers of rows. A batch-level
    loss (MMD, CORAL) is one row by itself and cannot be accumulated.
    """

    total: Float[Tensor, ""]
    count: Num[Tensor, ""]
    weight: float = 1.0
    batch_level: bool = False

    def __mul__(self, weight: float) -> "Loss":
        """The same loss counted `weight` times as much."""
        return Loss(self.total, self.count, self.weight * weight, self.batch_level)

    __rmul__ = __mul__

    def mean(self) -> Float[Tensor, ""]:
        """The loss of one row, for a loop of your own on one process; 0 when there are no rows."""
        return self.weight * self.total / self.count.clamp_min(1)
