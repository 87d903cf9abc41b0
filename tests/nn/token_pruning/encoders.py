"""Tiny third-party encoders with random weights, by name, and inputs for each."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    BeitConfig,
    BeitForImageClassification,
    BertConfig,
    BertForSequenceClassification,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
    DeiTConfig,
    DeiTForImageClassification,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersForImageClassification,
    DINOv3ViTConfig,
    DINOv3ViTModel,
    RobertaConfig,
    RobertaForSequenceClassification,
    SiglipVisionConfig,
    SiglipVisionModel,
    ViTConfig,
    ViTForImageClassification,
)

from overt.nn.wrappers.hf_inputs import extract_prediction

SIDE = 6  # cells per side
SMALL: dict[str, Any] = {
    "image_size": 24, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 4,
    "num_attention_heads": 2, "intermediate_size": 24, "num_labels": 3, "initializer_range": 0.4,
}  # fmt: skip
WORDS: dict[str, Any] = {
    "vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 24, "num_labels": 3,
    "initializer_range": 0.4,
}  # fmt: skip


def vit(how: str = "sdpa", **more: Any) -> ViTForImageClassification:
    torch.manual_seed(0)
    model = ViTForImageClassification(ViTConfig(**{**SMALL, **more})).eval()
    model.set_attn_implementation(how)
    return model


def bert(how: str = "sdpa") -> BertForSequenceClassification:
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**WORDS)).eval()
    model.set_attn_implementation(how)
    return model


def _beit() -> nn.Module:
    model = BeitForImageClassification(
        BeitConfig(**SMALL, use_relative_position_bias=True, use_mean_pooling=False)
    )
    return _biased(model)


def _shared_beit() -> nn.Module:
    model = BeitForImageClassification(
        BeitConfig(**SMALL, use_shared_relative_position_bias=True, use_mean_pooling=False)
    )
    return _biased(model)


def _biased(model: nn.Module) -> nn.Module:
    """Initialise position biases randomly: they start as zeros, which tests nothing."""
    for name, weight in model.named_parameters():
        if "relative_position_bias" in name or "lambda" in name:
            nn.init.normal_(weight.data)
    return model


IMAGES: dict[str, Callable[[], nn.Module]] = {
    "ViT": lambda: ViTForImageClassification(ViTConfig(**SMALL)),
    "DeiT": lambda: DeiTForImageClassification(DeiTConfig(**SMALL)),
    "DINOv2 with registers": lambda: Dinov2WithRegistersForImageClassification(
        Dinov2WithRegistersConfig(**{**SMALL, "mlp_ratio": 2})
    ),
    "DINOv3": lambda: DINOv3ViTModel(DINOv3ViTConfig(**SMALL, num_register_tokens=2)),
    "BEiT": _beit,
    "BEiT with one bias": _shared_beit,
    "CLIP": lambda: CLIPVisionModelWithProjection(CLIPVisionConfig(**SMALL)),
    "SigLIP": lambda: SiglipVisionModel(SiglipVisionConfig(**SMALL)),
}
TEXTS: dict[str, Callable[[], nn.Module]] = {
    "BERT": lambda: BertForSequenceClassification(BertConfig(**WORDS)),
    "RoBERTa": lambda: RobertaForSequenceClassification(RobertaConfig(**WORDS)),
}
MODELS = {**IMAGES, **TEXTS}


def make_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().eval()


def inputs(name: str, count: int = 3) -> dict[str, Tensor]:
    """Make the inputs of a model: images, or texts of different lengths."""
    draw = torch.Generator().manual_seed(1)
    if name in IMAGES:
        side = SIDE * 4
        return {"pixel_values": torch.randn(count, 3, side, side, generator=draw)}
    ids = torch.randint(3, 20, (count, 12), generator=draw)
    there = torch.arange(12) < torch.tensor([12, 9, 7, 11])[:count, None]
    return {"input_ids": torch.where(there, ids, 1), "attention_mask": there.long()}


def predict(model: nn.Module, given: Mapping[str, Tensor]) -> Tensor:
    """Return the logits, the embedding or the pooled state."""
    output = model(**given)
    found = getattr(output, "image_embeds", None)
    return extract_prediction(output) if found is None else found
