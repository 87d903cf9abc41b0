"""Questions as vectors: a recurrent network over the words, or which words there are."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from overt.data.batch import Batch
from overt.errors import BadInput
from overt.models.text import Words


@runtime_checkable
class QuestionReader(Protocol):
    """Words in, one vector of `width` features a question out."""

    width: int

    def encode(self, batch: Batch) -> Words:
        """The words of a batch as features."""
        ...

    def __call__(
        self, words: Words, mask: Mapping[str, Tensor] | None = None
    ) -> Float[Tensor, "b e"]: ...

    def config(self) -> dict[str, Any]:
        """Plain values from which `question_reader_from` builds the same module."""
        ...


class Recurrent(nn.Module):
    """The last state of an LSTM over embedded words, in the order in which they stand.

    A removed word is read as a blank; padding is not read at all.
    """

    backwards = False

    def __init__(self, vocabulary: int, word: int = 300, state: int = 512) -> None:
        super().__init__()
        self.sizes = {"vocabulary": vocabulary, "word": word, "state": state}
        self.width = state
        self.embed = nn.Embedding(vocabulary, word, padding_idx=0)
        self.read = nn.LSTM(word, state, batch_first=True)

    def encode(self, batch: Batch) -> Words:
        """The embeddings of the words."""
        tokens, present = _words(batch)
        return Words(self.embed(tokens), present, batch.text)

    def forward(
        self, words: Words, mask: Mapping[str, Tensor] | None = None
    ) -> Float[Tensor, "b e"]:
        """The state after the last word; zeros where there is none."""
        values = words.masked(mask, words.values.new_zeros(words.values.shape[-1]))
        length = words.present.sum(dim=1, keepdim=True)
        if self.backwards:
            places = torch.arange(values.shape[1], device=values.device)
            turned = (length - 1 - places).clamp_min(0)
            values = values.gather(1, turned[..., None].expand_as(values))
        states, _ = self.read(values)
        last = (length - 1).clamp_min(0)[..., None].expand(-1, -1, states.shape[-1])
        return torch.where(length > 0, states.gather(1, last)[:, 0], 0)

    def config(self) -> dict[str, Any]:
        """The sizes of the layers."""
        return {"kind": "backwards" if self.backwards else "forwards", **self.sizes}


class Backwards(Recurrent):
    """The same, from the last word to the first: how relation networks came to learn CLEVR."""

    backwards = True


class Bag(nn.Module):
    """Which words a question has, as 0 and 1: a question vector, without parameters.

    In Sort-of-CLEVR, where a question is a colour and a kind, this says what the 11 numbers of its
    vectors say.
    """

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.width = vocabulary

    def encode(self, batch: Batch) -> Words:
        """Every word as one of many."""
        tokens, present = _words(batch)
        every = torch.arange(self.width, device=tokens.device)
        values = (tokens[..., None] == every).to(torch.get_default_dtype())
        return Words(values, present, batch.text)

    def forward(
        self, words: Words, mask: Mapping[str, Tensor] | None = None
    ) -> Float[Tensor, "b e"]:
        """The words that are there and not removed."""
        values = words.masked(mask, words.values.new_zeros(self.width))
        return torch.where(words.present[..., None], values, 0).amax(dim=1)

    def config(self) -> dict[str, Any]:
        """The number of words."""
        return {"kind": "bag", "vocabulary": self.width}


def question_reader_from(config: Mapping[str, Any]) -> QuestionReader:
    """The reader that a saved model was made with."""
    sizes = {name: value for name, value in config.items() if name != "kind"}
    match config.get("kind"):
        case "forwards":
            return Recurrent(**sizes)
        case "backwards":
            return Backwards(**sizes)
        case "bag":
            return Bag(**sizes)
        case other:
            raise BadInput(f"reader of kind {other!r} is not one of forwards, backwards, bag")


def _words(batch: Batch) -> tuple[Tensor, Tensor]:
    if batch.tokens is None or batch.token_mask is None:
        raise ValueError("a reader of questions needs a batch with tokens")
    return batch.tokens, batch.token_mask
