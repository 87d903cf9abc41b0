"""A pretrained Transformer as a text classifier whose attention can be supervised.

The Transformer is Hugging Face's, with its tokenizer; its attention is watched from outside, so
fused kernels stay on. Batches hold the tokens of its own tokenizer: give the data set
`reader=HubTokenizer(net.tokenizer)`.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from overt import files
from overt.data.batch import Batch
from overt.errors import BadInput
from overt.models.adopting.adopted import Read, Reduce, adopt
from overt.models.adopting.looking import last
from overt.models.output import Output


@dataclass(frozen=True, eq=False)
class Tokens(Read):
    """Texts as the Transformer gets them, with the embeddings of their tokens."""

    embedded: Float[Tensor, "b n d"]

    def pooled(self) -> Float[Tensor, "b d"]:
        """The mean of the embeddings: what the text is, whatever is attended to."""
        there = self.batch.token_mask[..., None].to(self.embedded.dtype)
        return (self.embedded * there).sum(dim=1) / there.sum(dim=1).clamp_min(1)


class TextTransformer(nn.Module):
    """A Hugging Face model for the classification of texts, with our face.

    `reduce` makes the maps of the output: by default what the class token, from which the model
    answers, takes from the tokens of the text in the last layer, in every head, as it is before
    dropout. A mask over "text" hides tokens from every query in every layer.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, reduce: Reduce = last) -> None:
        super().__init__()
        if getattr(tokenizer, "cls_token_id", None) is None:
            raise BadInput("a text classifier answers from a class token; this tokenizer has none")
        self.tokenizer = tokenizer
        self.adopted = adopt(model, tokenizer=tokenizer, reduce=reduce)

    @property
    def model(self) -> Any:
        """The Hugging Face model."""
        return self.adopted.model

    def encode(self, batch: Batch) -> Tokens:
        """The tokens and their embeddings; the layers run when there is something to decide."""
        if batch.tokens is None or batch.token_mask is None:
            raise ValueError("a Transformer needs a batch with the tokens of its own tokenizer")
        found = self.adopted.encode(batch)
        embedded = self.model.get_input_embeddings()(batch.tokens)
        return Tokens(found.batch, found.layout, embedded)

    def decide(self, features: Tokens, mask: Mapping[str, Tensor] | None = None) -> Output:
        """Classes, and the map over the tokens of the text."""
        return self.adopted.decide(features, mask)

    def forward(self, batch: Batch) -> Output:
        """Classes of a batch of texts."""
        return self.decide(self.encode(batch))

    def config(self) -> dict[str, Any]:
        """The Hugging Face model's own values."""
        values: dict[str, Any] = self.model.config.to_dict()
        return values

    def save_pretrained(self, folder: Path | str) -> None:
        """Write a folder that Hugging Face reads as its own: config, weights and tokenizer."""
        with _quiet(), files.writing(Path(folder)) as temporary:
            self.model.save_pretrained(temporary, safe_serialization=True)
            self.tokenizer.save_pretrained(temporary)

    @classmethod
    def from_pretrained(cls, folder: Path | str) -> "TextTransformer":
        """Read a folder written by `save_pretrained`, in eval mode."""
        files.verify(Path(folder))
        return _opened(Path(folder)).eval()


def finetune(folder: Path | str, classes: int) -> TextTransformer:
    """A pretrained encoder from a folder on disk, with a new layer for `classes` on top.

    Nothing is fetched, no code in the folder is run, and weights are safetensors. The new layer is
    drawn from torch's random numbers: set their seed first.
    """
    return _opened(Path(folder), num_labels=classes)


def _opened(folder: Path, **more: Any) -> TextTransformer:
    if not (folder / "config.json").is_file():
        raise BadInput(f"{folder} holds no Transformer: config.json is missing")
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    try:
        with _quiet():
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            model = AutoModelForSequenceClassification.from_pretrained(
                folder, local_files_only=True, use_safetensors=True, **more
            )
    except (OSError, ValueError) as error:
        why = str(error).strip().splitlines()[0]
        raise BadInput(f"{folder} cannot be opened as a text classifier: {why}") from error
    return TextTransformer(model, tokenizer)


@contextmanager
def _quiet() -> Iterator[None]:
    """No bars, and no word about the new layer, which is what was asked for; as before after it."""
    from transformers.utils import logging

    told, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(told)
        if bars:
            logging.enable_progress_bar()
