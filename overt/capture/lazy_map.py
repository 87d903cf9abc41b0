"""An attention map of a block whose values are computed on first access.

The cross-entropy of a block with its target does not need the block itself. On a GPU, a kernel sums
it (`fused_cross_entropy`); the log-softmax of all layers would otherwise be written, read four
times, and saved for the backward pass in float32.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from overt.attention import AttentionMap, Form, Kind, Layout
from overt.capture.block_scores import GradTap, Index, block_log_softmax, fused_cross_entropy


@dataclass(frozen=True, eq=False)
class BlockInputs:
    """Queries and keys of many layers, with the rows and columns of a block.

    `has_grad` is whether results computed from them have a gradient: the grad mode at creation.
    """

    queries: list[Tensor | GradTap]
    keys: list[Tensor | GradTap]
    rows: Index
    columns: Index
    scale: float
    mask: Bool[Tensor, "b #s r"] | None
    has_grad: bool

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Samples, layers, heads."""
        query = self.query
        return len(query), len(self.queries), query.shape[1]

    @property
    def query(self) -> Tensor:
        """The queries of the first layer."""
        first = self.queries[0]
        return first.tensor if isinstance(first, GradTap) else first

    def log_softmax(self) -> Float[Tensor, "b l h s r"]:
        """Compute the log-softmax over the visible keys of each row."""
        with torch.set_grad_enabled(self.has_grad):
            return block_log_softmax(**self._arguments()).transpose(0, 1)

    def cross_entropy(
        self, target: Float[Tensor, "b s r"], log_eps: float
    ) -> Float[Tensor, "b l h s"]:
        """Compute the cross-entropy of each row with its target."""
        with torch.set_grad_enabled(self.has_grad):
            made = fused_cross_entropy(**self._arguments(), target=target, log_eps=log_eps)
            return made.transpose(0, 1)

    def _arguments(self) -> dict[str, Any]:
        return {
            "queries": self.queries,
            "keys": self.keys,
            "rows": self.rows,
            "columns": self.columns,
            "scale": self.scale,
            "visible": self.mask,
        }


class LazyAttentionMap(AttentionMap):
    """An `AttentionMap` whose `values` are computed on first access."""

    _inputs: BlockInputs | None = None  # a map made from this one by `replace` has its values

    @staticmethod
    def from_inputs(inputs: BlockInputs, queries: Layout, keys: Layout) -> "LazyAttentionMap":
        """Return the map of a block with these layouts, as log-probabilities."""
        made = object.__new__(LazyAttentionMap)  # there are no values to validate yet
        fields = {
            "keys": keys,
            "queries": queries,
            "mask": inputs.mask,
            "kind": Kind.PROBABILITY,
            "form": Form.LOG,
            "_inputs": inputs,
        }
        for name, value in fields.items():
            object.__setattr__(made, name, value)
        return made

    def __getattr__(self, name: str) -> Any:
        """Compute `values` on first access; called for missing attributes only."""
        if name != "values" or self._inputs is None:
            raise AttributeError(f"an attention map has no {name!r}")
        # The field has no default, so the class has no attribute of this name, and access ends here
        # until the instance has one.
        found = self._inputs.log_softmax()
        object.__setattr__(self, "values", found)
        return found

    @property
    def pending(self) -> BlockInputs | None:
        """The inputs that the values will be computed from; None once they are computed."""
        return None if "values" in vars(self) else self._inputs

    @property
    def shape(self) -> tuple[int, ...]:
        """Samples, layers, heads, queries, keys; does not compute the values."""
        if self.pending is None:
            return super().shape
        return *self.pending.sizes, len(self.queries), len(self.keys)

    @property
    def visible(self) -> Bool[Tensor, "b q k"]:
        """Which keys each query may see; does not compute the values."""
        if self.pending is None:
            return super().visible
        b, _, _, q, k = self.shape
        if self.mask is None:
            return torch.ones(b, q, k, dtype=torch.bool, device=self.pending.query.device)
        return self.mask.expand(b, q, k)

    def __len__(self) -> int:
        return self.shape[0]

    def restrict_keys(self, among: Bool[Tensor, "b k"]) -> AttentionMap:
        """Return the map renormalized over some of its keys, still lazy if this one is."""
        mask = self.visible & among[:, None]
        if self.pending is None:
            return replace(self, mask=mask).normalize()
        inputs = replace(self.pending, mask=mask)
        return LazyAttentionMap.from_inputs(inputs, self.queries, self.keys)

    def fused_cross_entropy(
        self, target: Float[Tensor, "b #l #h q k"], log_eps: float
    ) -> Float[Tensor, "b l h q"] | None:
        """Compute `-sum_k t log a` of each row without computing the values.

        Args:
            target: Target distribution t; the same for all layers and heads, without gradient.
            log_eps: Value of the log where the attention a is zero.

        Returns:
            The cross-entropy. None if the values are needed: targets that differ by layer or head
            or have a gradient, values that are computed already, and under `torch.compile`, where
            only the log-softmax is available.
        """
        b, _, _, q, k = self.shape
        alike = tuple(target.shape) == (b, 1, 1, q, k) and not target.requires_grad
        if self.pending is None or not alike or torch.compiler.is_compiling():
            return None
        return self.pending.cross_entropy(target[:, 0, 0], log_eps)
