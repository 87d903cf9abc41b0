"""Pretrained Transformer text classifier whose attention can be supervised.

The model and tokenizer come from Hugging Face. Attention is captured from outside, so fused
kernels stay in use. Batches need tokens of the model's own tokenizer: pass
`reader=HubTokenizer(net.tokenizer)` to the dataset.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from overt import io
from overt.data.batch import Batch
from overt.errors import UserError
from overt.nn.config_checks import check_config, limit_allocations, tensor_sizes
from overt.nn.inner_checkpoint import quiet_transformers
from overt.nn.output import Output
from overt.nn.wrappers.map_selection import last_layer
from overt.nn.wrappers.wrapped_model import ReduceTrace, WrappedInputs, wrap


@dataclass(frozen=True, eq=False)
class TokenFeatures(WrappedInputs):
    """Transformer inputs with the embeddings of their tokens."""

    embedded: Float[Tensor, "b n d"]

    def pooled(self) -> Float[Tensor, "b d"]:
        """Return the mean over the embeddings, independent of attention."""
        there = self.batch.token_mask[..., None].to(self.embedded.dtype)
        return (self.embedded * there).sum(dim=1) / there.sum(dim=1).clamp_min(1)


class TextTransformer(nn.Module):
    """Hugging Face sequence classifier as an `AttentionModel`.

    A mask over "text" hides tokens from every query in every layer.

    Args:
        model: a Hugging Face model for sequence classification.
        tokenizer: its tokenizer; it needs a class token.
        reduce: selects the output maps from the trace. By default the attention from the class
            token to the text tokens in the last layer, per head, before dropout.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertForSequenceClassification, BertTokenizer
        >>> special = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4}
        >>> tokenizer = BertTokenizer(vocab={**special, "a": 5, "dog": 6})
        >>> sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
        >>> config = BertConfig(vocab_size=7, intermediate_size=16, num_labels=3, **sizes)
        >>> model = TextTransformer(BertForSequenceClassification(config), tokenizer).eval()
        >>> tokens = torch.tensor(tokenizer(["a dog"])["input_ids"])  # [CLS] a dog [SEP]
        >>> output = model(Batch(ids=("one",), tokens=tokens, token_mask=tokens > 0))
        >>> output.prediction.shape, output.attention_to("text").weights.shape
        (torch.Size([1, 3]), torch.Size([1, 1, 2, 1, 4]))
    """

    def __init__(self, model: nn.Module, tokenizer: Any, reduce: ReduceTrace = last_layer) -> None:
        super().__init__()
        if getattr(tokenizer, "cls_token_id", None) is None:
            raise UserError("the tokenizer has no class token, which the text classifier needs")
        self.tokenizer = tokenizer
        self.adopted = wrap(model, tokenizer=tokenizer, reduce=reduce)  # name of saved weights

    @property
    def model(self) -> Any:
        """The Hugging Face model."""
        return self.adopted.model

    def encode(self, batch: Batch) -> TokenFeatures:
        """Embed the tokens; the layers run in `decide`."""
        if batch.tokens is None or batch.token_mask is None:
            raise ValueError("batch.tokens is None: expected tokens of the model's own tokenizer")
        inputs = self.adopted.encode(batch)
        # for `pooled` only: the model embeds the tokens again in `decide`
        embedded = self.model.get_input_embeddings()(batch.tokens)
        return TokenFeatures(inputs.batch, inputs.layout, embedded)

    def decide(self, features: TokenFeatures, mask: Mapping[str, Tensor] | None = None) -> Output:
        """Classify the text and return the map over its tokens."""
        return self.adopted.decide(features, mask)

    def forward(self, batch: Batch) -> Output:
        """Classify a batch of texts."""
        return self.decide(self.encode(batch))

    def config(self) -> dict[str, Any]:
        """Return the config of the Hugging Face model."""
        values: dict[str, Any] = self.model.config.to_dict()
        return values

    def save_pretrained(self, folder: Path | str) -> None:
        """Write config, weights and tokenizer in the Hugging Face format."""
        with quiet_transformers(), io.atomic_folder(Path(folder)) as temporary:
            self.model.save_pretrained(temporary, safe_serialization=True)
            self.tokenizer.save_pretrained(temporary)

    def load_pretrained(self, folder: Path | str) -> "TextTransformer":
        """Load weights written by `save_pretrained`."""
        self.adopted.load_pretrained(folder)
        return self

    @classmethod
    def from_pretrained(cls, folder: Path | str) -> "TextTransformer":
        """Load a folder written by `save_pretrained`, in eval mode."""
        io.verify(Path(folder))
        return _load(Path(folder)).eval()


def load_for_finetuning(folder: Path | str, classes: int) -> TextTransformer:
    """Load a pretrained encoder from a local folder and add a new classification layer.

    Nothing is downloaded, no code in the folder is run, and weights must be safetensors. The new
    layer is initialised from torch's global random stream: seed it first.

    Args:
        folder: a Hugging Face model folder.
        classes: number of classes.

    Raises:
        UserError: the folder cannot be loaded as a text classifier.
    """
    return _load(Path(folder), num_labels=classes)


def _load(folder: Path, **more: Any) -> TextTransformer:
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} is not a Hugging Face model folder: config.json is missing")
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    check_config(folder / "config.json", io.read_json(folder / "config.json"))
    try:
        with quiet_transformers(), limit_allocations(str(folder), tensor_sizes(folder)):
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            model = AutoModelForSequenceClassification.from_pretrained(
                folder, local_files_only=True, use_safetensors=True, **more
            )
    except (OSError, ValueError) as error:
        why = str(error).strip().splitlines()[0]
        raise UserError(f"{folder} cannot be loaded as a text classifier: {why}") from error
    return TextTransformer(model, tokenizer)
