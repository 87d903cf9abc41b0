"""`AttributionMap`: an attention map with what its method guarantees."""

from dataclasses import dataclass, replace

from jaxtyping import Float, Int
from torch import Tensor

from overt.attention import AttentionMap


@dataclass(frozen=True, eq=False)
class AttributionMap(AttentionMap):
    """An `AttentionMap` with numbers that say how far it can be trusted.

    Args:
        change: For methods whose weights add up to it: the score of each sample minus its score at
            the baseline.
        error: For methods that sample: the standard error of each weight.
        fit: For methods that fit a linear model: its weighted R² on each sample.

    Example:
        >>> import torch
        >>> from overt.attention import Kind, words
        >>> values = torch.tensor([[[[[1.0, 2.0]]]]])
        >>> found = AttributionMap(values, words(2), kind=Kind.SIGNED, change=torch.tensor([3.5]))
        >>> found.gap
        tensor([0.5000])
    """

    change: Float[Tensor, " b"] | None = None
    error: Float[Tensor, "b 1 1 1 k"] | None = None
    fit: Float[Tensor, " b"] | None = None

    @property
    def gap(self) -> Float[Tensor, " b"]:
        """The part of the change of the score that the weights do not add up to, per sample.

        For integrated gradients it is the error of the numerical integral.

        Raises:
            ValueError: The method does not promise such a sum.
        """
        if self.change is None:
            raise ValueError("the weights of this method do not add up to a change of the score")
        return self.change.to(self.values.device) - self.weights.flatten(1).sum(dim=1)

    def normalize(self) -> AttentionMap:
        """Return the map with rows that sum to one; the numbers of the former weights are left out.

        Returns:
            A map of probabilities.

        Raises:
            ValueError: The weights are signed.
        """
        return AttentionMap.normalize(replace(self, change=None, error=None, fit=None))

    def select(self, rows: Int[Tensor, " n"]) -> "AttributionMap":
        """Return some samples.

        Args:
            rows: The indices of the samples, in the order of the result.

        Returns:
            The map of these samples.
        """
        # without numbers of other samples in between
        plain = AttentionMap.select(replace(self, change=None, error=None, fit=None), rows)
        assert isinstance(plain, AttributionMap)  # `replace` keeps the class
        return replace(
            plain,
            change=None if self.change is None else self.change[rows],
            error=None if self.error is None else self.error[rows],
            fit=None if self.fit is None else self.fit[rows],
        )
