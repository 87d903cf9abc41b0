"""What every model of ours returns."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from overt.attention import AttentionMap
from overt.data.batch import Batch


@dataclass(frozen=True, eq=False)
class Output:
    """A prediction, the attention behind it, and named extras.

    `attention` holds one map a kind of key, told apart by their layouts: cells of the image, words
    of the question. `extras` are auxiliary losses and counts, such as a penalty or cells kept.
    """

    prediction: Float[Tensor, "b c"]
    attention: tuple[AttentionMap, ...] = ()
    extras: Mapping[str, Tensor] = field(default_factory=dict)

    def looking_at(self, name: str) -> AttentionMap:
        """The map over the span called `name`; an unknown name is answered with those there are."""
        for one in self.attention:
            if any(span.name == name for span in one.keys.spans):
                return one
        names = [span.name for one in self.attention for span in one.keys.spans]
        raise ValueError(f"no attention over {name!r}; this model attends to {names or 'nothing'}")


@runtime_checkable
class Model(Protocol):
    """The face of every model: what it sees, apart from what it makes of it.

    `encode` does the expensive part once; `decide` can then be asked again and again with masks by
    span name, 1 to keep and 0 to remove. Calling the model is `decide(encode(batch))`.
    """

    def encode(self, batch: Batch) -> Any:
        """The features of a batch."""
        ...

    def decide(self, features: Any, mask: Mapping[str, Tensor] | None = None) -> Output:
        """The output for features, of which a mask may remove some."""
        ...

    def __call__(self, batch: Batch) -> Output:
        """The output for a batch."""
        ...


@runtime_checkable
class State(Protocol):
    """How far a decoder has come with each sample; a value, never changed in place."""

    def reorder(self, rows: Int[Tensor, " n"]) -> "State":
        """The state of the samples named, in their order; one may be named twice, as beams do."""
        ...


@runtime_checkable
class Decoder(Protocol):
    """A model that writes: what it sees is encoded once, then one token follows another.

    `step` takes the token that was just written and gives the logits of the next one, with the
    attention of that one position, and the state to go on from. An old state stays good: beams
    and sampling go back to it.
    """

    def encode(self, batch: Batch) -> Any:
        """The features of a batch."""
        ...

    def start(self, features: Any) -> State:
        """The state before the first token."""
        ...

    def step(self, state: Any, tokens: Int[Tensor, " b"]) -> tuple[Output, State]:
        """The logits of the next token, where the model looked for it, and the new state."""
        ...
