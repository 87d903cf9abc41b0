"""Tiny third-party models with random weights, wrapped."""

import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    ViTConfig,
    ViTForImageClassification,
)

from overt.attention import Layout, Span, grid, words
from overt.data.batch import Batch
from overt.nn.wrappers.wrapped_model import WrappedModel, wrap


class TinyProcessor:
    """An image processor's pixel statistics."""

    image_mean = (0.5, 0.4, 0.3)
    image_std = (0.5, 0.6, 0.7)


def bert(how: str = "sdpa") -> BertForSequenceClassification:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=12, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=16, num_labels=3, initializer_range=0.5,
    )  # fmt: skip
    config._attn_implementation = how
    return BertForSequenceClassification(config)


def vit(how: str = "sdpa") -> ViTForImageClassification:
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=32, patch_size=8, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=16, num_labels=3, initializer_range=0.2,
    )  # fmt: skip
    config._attn_implementation = how
    return ViTForImageClassification(config)


def pixels(batch: Batch) -> Tensor:
    """Normalize the images of a batch as `TinyProcessor` does, one per sample."""
    mean, spread = (
        torch.tensor(one)[:, None, None]
        for one in (TinyProcessor.image_mean, TinyProcessor.image_std)
    )
    return (batch.images[batch.image_index] / 255 - mean) / spread


def image_layout(batch: Batch) -> Layout:
    patches = grid(4, 4, geometry=batch.sample_geometry)
    return words(1, "class") + patches


def text_layout(batch: Batch) -> Layout:
    n = batch.tokens.shape[1]
    text = Span("text", (n,), slice(0, n), batch.text)
    return Layout((Span("class", (1,), slice(0, 1)), text), n)


def wrapped_vit(how: str = "sdpa", **more: object) -> WrappedModel:
    return wrap(vit(how), layout=image_layout, processor=TinyProcessor(), **more)


def wrapped_bert(how: str = "sdpa", **more: object) -> WrappedModel:
    return wrap(bert(how), layout=text_layout, **more)
