"""The same block of the attention matrix in every layer and head of one sample, computed lazily."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float

from overt.attention import AttentionMap, Form, Layout
from overt.capture.trace import AttentionTrace
from overt.viz.panel import position_labels, span_positions
from overt.viz.photo_overlay import check_finite

CHUNK_ROWS = 256  # computed at a time

AxisPart = str | range | None  # part of an axis: a span by name, positions, or all


@dataclass(frozen=True, eq=False)
class HeadBlocks:
    """Weights from `query` to `key` in any layer and head of a map or a trace.

    For an `AttentionTrace` only the requested block is computed, `CHUNK_ROWS` rows at a time.
    Weights are not renormalized.
    """

    source: AttentionMap | AttentionTrace
    query: AxisPart = None
    key: AxisPart = None
    row: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.source, AttentionTrace):
            self.source.check_stackable()
        elif not isinstance(self.source, AttentionMap):
            raise TypeError(
                f"expected an AttentionTrace or an AttentionMap, got {type(self.source).__name__}; "
                "viz.from_layers(attentions) converts the attentions that a model returns"
            )
        for part, layout in zip((self.query, self.key), self.layouts, strict=True):
            if isinstance(part, range) and not set(part) <= set(range(len(layout))):
                raise ValueError(f"{part} is out of range: positions are 0 to {len(layout) - 1}")
        samples = self._counts[0]
        if not 0 <= self.row < samples:
            raise ValueError(f"sample {self.row} is out of range: samples are 0 to {samples - 1}")

    @property
    def _counts(self) -> tuple[int, int, int]:
        """Number of samples, layers and heads."""
        if isinstance(self.source, AttentionTrace):
            samples, heads = self.source.calls[0].shape[:2]
            return samples, len(self.source.calls), heads
        samples, layers, heads = self.source.values.shape[:3]
        return samples, layers, heads

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self._counts[1]

    @property
    def heads(self) -> int:
        """Number of heads per layer."""
        return self._counts[2]

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Module name of each layer, or its number if the name is unknown."""
        if isinstance(self.source, AttentionTrace):
            return tuple(name or f"layer {at}" for at, name in enumerate(self.source.names))
        return tuple(f"layer {at}" for at in range(self.layers))

    @property
    def layouts(self) -> tuple[Layout, Layout]:
        """Layouts of the whole query and key axes."""
        if isinstance(self.source, AttentionTrace):
            return self.source.layouts(self.source.calls)
        return self.source.queries, self.source.keys

    @property
    def positions(self) -> tuple[list[int], list[int]]:
        """Positions of the block's queries and keys along the axes; -1 if a sample lacks one."""
        found = []
        for part, layout in zip((self.query, self.key), self.layouts, strict=True):
            if isinstance(part, str):
                found.append(span_positions(layout.find(part), self.row))
            else:
                found.append(list(range(len(layout)) if part is None else part))
        return found[0], found[1]

    @property
    def shape(self) -> tuple[int, int]:
        """Number of queries and keys of the block."""
        queries, keys = self.positions
        return len(queries), len(keys)

    def names(self, tokens: Sequence[str] | None = None) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return a name for each query and key of the block.

        `tokens` name the positions of the whole key axis, and of the query axis if both have the
        same length.
        """
        found = []
        layouts = self.layouts
        same = len(layouts[0]) == len(layouts[1])
        for axis, layout in enumerate(layouts):
            own = tokens if axis or same else None
            own = position_labels(layout, self.row) if own is None else own
            if len(own) != len(layout):
                raise ValueError(
                    f"got {len(own)} tokens for {len(layout)} positions: both need the same length"
                )
            found.append(tuple("" if at < 0 else str(own[at]) for at in self.positions[axis]))
        return found[0], found[1]

    def rows(self, layer: int, head: int, rows: Sequence[int]) -> Float[np.ndarray, "r k"]:
        """Return some rows of the block, indexed within it; raise if a weight is not finite."""
        queries, keys = self.positions
        at = torch.tensor([queries[n] for n in rows], dtype=torch.long)
        to = torch.tensor(keys, dtype=torch.long)
        with torch.no_grad():
            if isinstance(self.source, AttentionTrace):
                found = self._computed(self.source, layer, head, at, to)
            else:
                found = self.source.values[self.row, layer, head].detach().cpu()
                found = found[at.clamp_min(0)][:, to.clamp_min(0)]
                found = found.exp() if self.source.form is Form.LOG else found
                found = found * ((at >= 0)[:, None] & (to >= 0)[None])
        weights = found.float().cpu().numpy()
        check_finite(weights)
        return weights

    def _computed(
        self, trace: AttentionTrace, layer: int, head: int, at: torch.Tensor, to: torch.Tensor
    ) -> torch.Tensor:
        call = trace.calls[layer].heads([head])
        device = call.value.device if call.value is not None else at.device
        both = [one.to(device).expand(call.shape[0], -1) for one in (at, to)]
        return AttentionTrace([call]).block(both[0], both[1]).weights[self.row, 0, 0]

    def matrix(self, layer: int, head: int, down: int = 1, across: int = 1) -> np.ndarray:
        """Return the block, or the maxima of each `down` x `across` weights.

        The maximum rather than the mean, so that a single strong weight stays visible. At most
        `CHUNK_ROWS` rows are in memory at full size.
        """
        count = self.shape[0]
        portion = max(down, CHUNK_ROWS // down * down)
        parts = [
            max_pool(self.rows(layer, head, range(at, min(at + portion, count))), down, across)
            for at in range(0, count, portion)
        ]
        return np.concatenate(parts) if parts else np.zeros((0, self.shape[1]), np.float32)

    def thumbnail(self, layer: int, head: int, side: int) -> Float[np.ndarray, "r c"]:
        """Return at most `side` evenly spaced rows of the block, with max-pooled keys.

        The cost is `side` rows, however long the input is.
        """
        count, keys = self.shape
        step = max(1, -(-count // side))
        return max_pool(self.rows(layer, head, range(0, count, step)), 1, max(1, -(-keys // side)))


def max_pool(weights: Float[np.ndarray, "r c"], down: int, across: int) -> Float[np.ndarray, "R C"]:
    """Return the maximum of each `down` x `across` block, padded with zeros."""
    padded = np.pad(weights, [(0, -weights.shape[0] % down), (0, -weights.shape[1] % across)])
    cut = padded.reshape(padded.shape[0] // down, down, padded.shape[1] // across, across)
    return cut.max(axis=(1, 3))
