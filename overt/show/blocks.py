"""The same part of every layer and head of one sample; it exists when it is asked for."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float

from overt.attention import AttentionMap, Form, Layout
from overt.capture.seen import Seen
from overt.show.figure import finite
from overt.show.panel import labels, positions

ROWS = 256  # of a block that exist at a time

Part = str | range | None  # of an axis: a span by its name, some positions, or all of it


@dataclass(frozen=True, eq=False)
class Blocks:
    """Weights from `query` to `key` in any layer and head of a map, or of what was watched.

    Of a watched model (`Seen`) a block is computed when it is asked for, `ROWS` rows at a time, and
    only that block. Weights are as the model used them: nothing is normalised.
    """

    source: AttentionMap | Seen
    query: Part = None
    key: Part = None
    row: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.source, Seen):
            self.source.check_alike()
        elif not isinstance(self.source, AttentionMap):
            raise TypeError(
                "give what watch has seen, or an AttentionMap: show.from_layers(attentions) makes "
                f"one of the layers that a model returns; this is of type "
                f"{type(self.source).__name__}"
            )
        for part, layout in zip((self.query, self.key), self.layouts, strict=True):
            if isinstance(part, range) and not set(part) <= set(range(len(layout))):
                raise ValueError(f"there are positions 0 to {len(layout) - 1}, not all of {part}")
        if not 0 <= self.row < self._samples:
            raise ValueError(f"there are samples 0 to {self._samples - 1}, not {self.row}")

    @property
    def _samples(self) -> int:
        source = self.source
        return source.calls[0].shape[0] if isinstance(source, Seen) else source.values.shape[0]

    @property
    def layers(self) -> int:
        """How many layers there are."""
        source = self.source
        return len(source.calls) if isinstance(source, Seen) else source.values.shape[1]

    @property
    def heads(self) -> int:
        """How many heads a layer has."""
        source = self.source
        return source.calls[0].shape[1] if isinstance(source, Seen) else source.values.shape[2]

    @property
    def layer_names(self) -> tuple[str, ...]:
        """The module behind each layer where it is known, else its number."""
        if isinstance(self.source, Seen):
            return tuple(name or f"layer {at}" for at, name in enumerate(self.source.names))
        return tuple(f"layer {at}" for at in range(self.layers))

    @property
    def layouts(self) -> tuple[Layout, Layout]:
        """What the whole axes of queries and keys are."""
        if isinstance(self.source, Seen):
            return self.source.layouts(self.source.calls)
        return self.source.queries, self.source.keys

    @property
    def places(self) -> tuple[list[int], list[int]]:
        """Where queries and keys of the block stand along the axes; -1: the sample has none."""
        found = []
        for part, layout in zip((self.query, self.key), self.layouts, strict=True):
            if isinstance(part, str):
                found.append(positions(layout.find(part), self.row))
            else:
                found.append(list(range(len(layout)) if part is None else part))
        return found[0], found[1]

    @property
    def shape(self) -> tuple[int, int]:
        """How many queries and keys a block has."""
        queries, keys = self.places
        return len(queries), len(keys)

    def names(self, tokens: Sequence[str] | None = None) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What each query and key of the block is, in a word.

        `tokens` name the positions of the whole axis of keys, and of queries where both axes are as
        long as each other.
        """
        found = []
        layouts = self.layouts
        same = len(layouts[0]) == len(layouts[1])
        for axis, layout in enumerate(layouts):
            own = tokens if tokens is not None and (axis or same) else labels(layout, self.row)
            if len(own) != len(layout):
                raise ValueError(f"{len(own)} tokens for {len(layout)} positions")
            found.append(tuple("" if at < 0 else str(own[at]) for at in self.places[axis]))
        return found[0], found[1]

    def rows(self, layer: int, head: int, rows: Sequence[int]) -> Float[np.ndarray, "r k"]:
        """Some rows of a block, counted within it; what is not finite cannot be drawn."""
        queries, keys = self.places
        at = torch.tensor([queries[n] for n in rows], dtype=torch.long)
        to = torch.tensor(keys, dtype=torch.long)
        with torch.no_grad():
            if isinstance(self.source, Seen):
                found = self._computed(self.source, layer, head, at, to)
            else:
                found = self.source.values[self.row, layer, head].detach().cpu()
                found = found[at.clamp_min(0)][:, to.clamp_min(0)]
                found = found.exp() if self.source.form is Form.LOG else found
                found = found * ((at >= 0)[:, None] & (to >= 0)[None])
        weights = found.float().cpu().numpy()
        finite(weights)
        return weights

    def _computed(
        self, seen: Seen, layer: int, head: int, at: torch.Tensor, to: torch.Tensor
    ) -> torch.Tensor:
        call = seen.calls[layer].heads([head])
        device = call.value.device if call.value is not None else at.device
        both = [one.to(device).expand(call.shape[0], -1) for one in (at, to)]
        return Seen([call]).block(both[0], both[1]).weights[self.row, 0, 0]

    def whole(self, layer: int, head: int, down: int = 1, across: int = 1) -> np.ndarray:
        """A block in full, or made coarse: the largest of every `down` x `across` weights.

        The largest and not the mean, because a single strong weight must not vanish. No more than
        `ROWS` rows exist in full at a time.
        """
        count = self.shape[0]
        portion = max(down, ROWS // down * down)
        parts = [
            shrunk(self.rows(layer, head, range(at, min(at + portion, count))), down, across)
            for at in range(0, count, portion)
        ]
        return np.concatenate(parts) if parts else np.zeros((0, self.shape[1]), np.float32)

    def sample(self, layer: int, head: int, side: int) -> Float[np.ndarray, "r c"]:
        """A small picture of a block: at most `side` of its rows, evenly spread, keys made coarse.

        It costs `side` rows however long the input is.
        """
        count, keys = self.shape
        step = max(1, -(-count // side))
        return shrunk(self.rows(layer, head, range(0, count, step)), 1, max(1, -(-keys // side)))


def shrunk(weights: Float[np.ndarray, "r c"], down: int, across: int) -> Float[np.ndarray, "R C"]:
    """The largest weight of each `down` x `across` cells."""
    padded = np.pad(weights, [(0, -weights.shape[0] % down), (0, -weights.shape[1] % across)])
    cut = padded.reshape(padded.shape[0] // down, down, padded.shape[1] // across, across)
    return cut.max(axis=(1, 3))
