"""A block of attention that is computed when somebody reads it.

The cross-entropy of a block with its target needs no share of the block by itself. On a card a
kernel sums it (`products.costs`) where the shares of all layers would otherwise be written, read
four times, and kept for the backward pass in float32.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from overt.attention import AttentionMap, Form, Kind, Layout
from overt.capture.products import Index, Tap, costs, log_shares


@dataclass(frozen=True, eq=False)
class Places:
    """Rows and keys of many layers, and whether what is made of them has a gradient."""

    queries: list[Tensor | Tap]
    keys: list[Tensor | Tap]
    rows: Index
    columns: Index
    scale: float
    mask: Bool[Tensor, "b #s r"] | None
    learns: bool

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Samples, layers, heads."""
        query = self.query
        return len(query), len(self.queries), query.shape[1]

    @property
    def query(self) -> Tensor:
        """That of the first layer."""
        first = self.queries[0]
        return first.tensor if isinstance(first, Tap) else first

    def log_shares(self) -> Float[Tensor, "b l h s r"]:
        """The log-softmax over the keys that each row may see."""
        with torch.set_grad_enabled(self.learns):
            return log_shares(**self._given()).transpose(0, 1)

    def costs(self, wanted: Float[Tensor, "b s r"], nothing: float) -> Float[Tensor, "b l h s"]:
        """The cross-entropy of each row with its target."""
        with torch.set_grad_enabled(self.learns):
            return costs(**self._given(), wanted=wanted, nothing=nothing).transpose(0, 1)

    def _given(self) -> dict[str, Any]:
        return {
            "queries": self.queries,
            "keys": self.keys,
            "rows": self.rows,
            "columns": self.columns,
            "scale": self.scale,
            "visible": self.mask,
        }


class Unread(AttentionMap):
    """A map whose values are there once they are asked for, and like any map from then on."""

    _places: Places | None = None  # a map made from this one by `replace` has its values

    @staticmethod
    def of(places: Places, queries: Layout, keys: Layout) -> "Unread":
        """The log-shares of rows and keys whose layouts are these."""
        made = object.__new__(Unread)  # there are no values that could be checked
        held = {
            "keys": keys,
            "queries": queries,
            "mask": places.mask,
            "kind": Kind.PROBABILITY,
            "form": Form.LOG,
            "_places": places,
        }
        for name, value in held.items():
            object.__setattr__(made, name, value)
        return made

    def __getattr__(self, name: str) -> Any:
        """The values, when they are asked for first; nothing else is missing."""
        if name != "values" or self._places is None:
            raise AttributeError(f"an attention map has no {name!r}")
        found = self._places.log_shares()
        object.__setattr__(self, "values", found)
        return found

    @property
    def unread(self) -> Places | None:
        """What the values would be made from; None when they are there."""
        return None if "values" in vars(self) else self._places

    @property
    def shape(self) -> tuple[int, ...]:
        """Samples, layers, heads, queries, keys; of values that need not be there."""
        if self.unread is None:
            return super().shape
        return *self.unread.sizes, len(self.queries), len(self.keys)

    @property
    def visible(self) -> Bool[Tensor, "b q k"]:
        """Which keys each query may see."""
        if self.unread is None:
            return super().visible
        b, _, _, q, k = self.shape
        if self.mask is None:
            return torch.ones(b, q, k, dtype=torch.bool, device=self.unread.query.device)
        return self.mask.expand(b, q, k)

    def __len__(self) -> int:
        return self.shape[0]

    def narrowed(self, among: Bool[Tensor, "b k"]) -> AttentionMap:
        """The map renormalised over some of its keys, still unread if it was."""
        mask = self.visible & among[:, None]
        if self.unread is None:
            return replace(self, mask=mask).normalize()
        return Unread.of(replace(self.unread, mask=mask), self.queries, self.keys)

    def costs(
        self, wanted: Float[Tensor, "b #l #h q k"], nothing: float
    ) -> Float[Tensor, "b l h q"] | None:
        """`-sum_k t log a` of each row, the logarithm of no weight being `nothing`.

        None where that is not known without the values: for targets that differ by layer or head,
        and for those that have a gradient. None, too, when the values are there, and in a graph
        that is being compiled, which takes log-shares alone.
        """
        b, _, _, q, k = self.shape
        alike = tuple(wanted.shape) == (b, 1, 1, q, k) and not wanted.requires_grad
        if self.unread is None or not alike or torch.compiler.is_compiling():
            return None
        return self.unread.costs(wanted[:, 0, 0], nothing)
