"""Question encoders: an LSTM over the words, or a bag of words."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from overt.data.batch import Batch
from overt.errors import UserError
from overt.nn.text_classifier import WordFeatures


@runtime_checkable
class QuestionEncoder(Protocol):
    """Protocol of a question encoder with `width` output features."""

    width: int

    def encode(self, batch: Batch) -> WordFeatures:
        """Return the features of the words."""
        ...

    def __call__(
        self, words: WordFeatures, mask: Mapping[str, Tensor] | None = None
    ) -> Float[Tensor, "b e"]: ...

    def config(self) -> dict[str, Any]:
        """Return plain values from which `question_encoder_from_config` builds the same module."""
        ...


class LSTMQuestionEncoder(nn.Module):
    """Last state of an LSTM over the embedded words.

    A masked word is replaced by zeros; padding is not read.

    Args:
        vocabulary: number of tokens; token 0 is padding.
        word: features of a word.
        state: features of the question.
    """

    backwards = False

    def __init__(self, vocabulary: int, word: int = 300, state: int = 512) -> None:
        super().__init__()
        self.sizes = {"vocabulary": vocabulary, "word": word, "state": state}
        self.width = state
        self.embed = nn.Embedding(vocabulary, word, padding_idx=0)
        self.read = nn.LSTM(word, state, batch_first=True)

    def encode(self, batch: Batch) -> WordFeatures:
        """Embed the words."""
        tokens, present = _require_tokens(batch)
        return WordFeatures(self.embed(tokens), present, batch.text)

    def forward(
        self, words: WordFeatures, mask: Mapping[str, Tensor] | None = None
    ) -> Float[Tensor, "b e"]:
        """Return the state after the last word; zeros for an empty question."""
        values = words.masked(mask, words.values.new_zeros(words.values.shape[-1]))
        length = words.present.sum(dim=1, keepdim=True)
        if self.backwards:
            places = torch.arange(values.shape[1], device=values.device)
            # only the words are reversed: padding stays at the end
            turned = (length - 1 - places).clamp_min(0)
            values = values.gather(1, turned[..., None].expand_as(values))
        states, _ = self.read(values)
        # the LSTM also reads padding, but the state is taken before it
        last = (length - 1).clamp_min(0)[..., None].expand(-1, -1, states.shape[-1])
        return torch.where(length > 0, states.gather(1, last)[:, 0], 0)

    def config(self) -> dict[str, Any]:
        """Return the sizes of the layers."""
        return {"kind": "backwards" if self.backwards else "forwards", **self.sizes}


class ReversedLSTMQuestionEncoder(LSTMQuestionEncoder):
    """LSTM over the words in reverse order, as relation networks use it on CLEVR."""

    backwards = True


class BagOfWordsEncoder(nn.Module):
    """Binary bag of words, without parameters.

    In Sort-of-CLEVR, where a question is a colour and a type, this is equivalent to the
    11-dimensional question vector.

    Args:
        vocabulary: number of tokens.
    """

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.width = vocabulary

    def encode(self, batch: Batch) -> WordFeatures:
        """Encode every word as one-hot."""
        tokens, present = _require_tokens(batch)
        vocabulary = torch.arange(self.width, device=tokens.device)
        # one-hot by comparison: nn.functional.one_hot checks its indices, which synchronizes a GPU
        values = (tokens[..., None] == vocabulary).to(torch.get_default_dtype())
        return WordFeatures(values, present, batch.text)

    def forward(
        self, words: WordFeatures, mask: Mapping[str, Tensor] | None = None
    ) -> Float[Tensor, "b e"]:
        """Return which words are present and not masked."""
        values = words.masked(mask, words.values.new_zeros(self.width))
        return torch.where(words.present[..., None], values, 0).amax(dim=1)

    def config(self) -> dict[str, Any]:
        """Return the number of tokens."""
        return {"kind": "bag", "vocabulary": self.width}


def question_encoder_from_config(config: Mapping[str, Any]) -> QuestionEncoder:
    """Build the question encoder of a saved model."""
    sizes = {name: value for name, value in config.items() if name != "kind"}
    match config.get("kind"):
        case "forwards":
            return LSTMQuestionEncoder(**sizes)
        case "backwards":
            return ReversedLSTMQuestionEncoder(**sizes)
        case "bag":
            return BagOfWordsEncoder(**sizes)
        case other:
            raise UserError(
                f"unknown question encoder {other!r}: expected forwards, backwards or bag"
            )


def _require_tokens(batch: Batch) -> tuple[Tensor, Tensor]:
    if batch.tokens is None or batch.token_mask is None:
        raise ValueError("batch.tokens is None: a question encoder needs a batch with tokens")
    return batch.tokens, batch.token_mask
