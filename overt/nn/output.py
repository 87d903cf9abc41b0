"""Output types and protocols shared by all models."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from overt.attention import AttentionMap
from overt.data.batch import Batch


@dataclass(frozen=True, eq=False)
class Output:
    """Prediction of a model, the attention behind it, and named extras.

    Args:
        prediction: logits or scores, one row per sample.
        attention: one map per kind of key, distinguished by its layout: image cells, words.
        extras: auxiliary losses and counts, such as a penalty or the number of kept cells.

    Example:
        >>> import torch
        >>> from overt.attention import grid
        >>> attention = AttentionMap.from_cells(torch.ones(2, 4), grid(2, 2))
        >>> output = Output(torch.zeros(2, 3), (attention,))
        >>> output.attention_to("image").weights.shape
        torch.Size([2, 1, 1, 1, 4])
    """

    prediction: Float[Tensor, "b c"]
    attention: tuple[AttentionMap, ...] = ()
    extras: Mapping[str, Tensor] = field(default_factory=dict)

    def attention_to(self, name: str) -> AttentionMap:
        """Return the map over the span called `name`.

        Args:
            name: name of a span in the key layout, such as "image" or "text".

        Returns:
            The first attention map with that span.

        Raises:
            ValueError: no map has such a span; the message lists the available names.
        """
        for attention in self.attention:
            if any(span.name == name for span in attention.keys.spans):
                return attention
        names = [span.name for attention in self.attention for span in attention.keys.spans]
        remedy = ""
        if "positions" in names:  # a layout that nobody gave
            remedy = "; name positions by a layout, such as wrap(model, layout=overt.words(count))"
        raise ValueError(
            f"no attention over {name!r}: expected one of {names or 'no spans'}{remedy}"
        )


@runtime_checkable
class AttentionModel(Protocol):
    """Protocol of a model in two stages: `encode`, then `decide`.

    `encode` does the expensive part once. `decide` can run many times on the same features, each
    time with other masks (by span name: 1 keeps, 0 removes). Calling the model runs
    `decide(encode(batch))`.

    Example:
        >>> import torch
        >>> from overt.testing import PlantedCell, toy_batch
        >>> model = PlantedCell((2, 2), cell=0)  # predicts from cell 0 only
        >>> features = model.encode(toy_batch(1))
        >>> output = model.decide(features, {"image": torch.tensor([[0.0, 1.0, 1.0, 1.0]])})
        >>> output.prediction.abs().tolist()
        [[0.0, 0.0]]
    """

    def encode(self, batch: Batch) -> Any:
        """Return the features of a batch."""
        ...

    def decide(self, features: Any, mask: Mapping[str, Tensor] | None = None) -> Output:
        """Return the output for features; a mask may remove some of them."""
        ...

    def __call__(self, batch: Batch) -> Output:
        """Return the output for a batch."""
        ...


@runtime_checkable
class DecoderState(Protocol):
    """Decoding state of each sample. Immutable."""

    def reorder(self, rows: Int[Tensor, " n"]) -> "DecoderState":
        """Return the state of the given rows in their order; rows may repeat, as in beam search."""
        ...


@runtime_checkable
class Decoder(Protocol):
    """Protocol of an autoregressive model: encode once, then generate token by token.

    `step` takes the last token and returns the logits of the next one, the attention of that
    position, and the next state. Earlier states stay valid, as beam search and sampling need them.

    Example:
        >>> from overt.testing import Copier, toy_batch
        >>> model, batch = Copier(), toy_batch(2)  # copies its input word by word
        >>> state = model.start(model.encode(batch))
        >>> for token in batch.tokens[:, :2].T:
        ...     output, state = model.step(state, token)
        >>> output.prediction.argmax(dim=-1) == batch.tokens[:, 1]
        tensor([True, True])
    """

    def encode(self, batch: Batch) -> Any:
        """Return the features of a batch."""
        ...

    def start(self, features: Any) -> DecoderState:
        """Return the state before the first token."""
        ...

    def step(self, state: Any, tokens: Int[Tensor, " b"]) -> tuple[Output, DecoderState]:
        """Return the logits of the next token with their attention, and the new state."""
        ...
