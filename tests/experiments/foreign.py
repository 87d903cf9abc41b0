"""Tiny random models saved as by `transformers`: config, weights, tokenizer and processor.

The vocabulary is fixed; "grassland" is two tokens.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")

WORDS = "[PAD] [UNK] [CLS] [SEP] <image> a the small red ball lies on green grass ##land dog ran"
WORDS += " . , what is this chased cat"
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def tokenizer(framed: bool = True) -> Any:
    """Return a WordPiece tokenizer; `framed` adds [CLS] and [SEP]."""
    vocabulary = {word: number for number, word in enumerate(WORDS.split())}
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.normalizer = tokenizers.normalizers.BertNormalizer()
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    if framed:
        made.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        eos_token="[SEP]",
        additional_special_tokens=["<image>"],
        model_max_length=40,
    )


def lively(model: Any) -> Any:
    """Draw larger weights, so that attention is not uniform."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.copy_(0.3 * torch.randn(weight.shape, generator=draw))
    return model.eval()


def bert(folder: Path) -> Path:
    config = transformers.BertConfig(vocab_size=30, max_position_embeddings=40, **SIZES)
    lively(transformers.BertModel(config)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def gpt2(folder: Path) -> Path:
    config = transformers.GPT2Config(
        vocab_size=30, n_positions=40, n_embd=32, n_layer=2, n_head=4, bos_token_id=2,
        eos_token_id=3,
    )  # fmt: skip
    lively(transformers.GPT2LMHeadModel(config)).save_pretrained(folder)
    tokenizer(framed=False).save_pretrained(folder)
    return folder


def t5(folder: Path) -> Path:
    config = transformers.T5Config(
        vocab_size=30, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4,
        decoder_start_token_id=0, eos_token_id=3, pad_token_id=0,
    )  # fmt: skip
    lively(transformers.T5ForConditionalGeneration(config)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def vit(folder: Path) -> Path:
    names = {"id2label": {0: "ring", 1: "cube"}, "label2id": {"ring": 0, "cube": 1}}
    config = transformers.ViTConfig(image_size=32, patch_size=8, **names, **SIZES)
    lively(transformers.ViTForImageClassification(config)).save_pretrained(folder)
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder


def dino(folder: Path) -> Path:
    """DINOv2 with registers; its processor center-crops images."""
    config = transformers.Dinov2WithRegistersConfig(
        image_size=32, patch_size=8, num_register_tokens=3, mlp_ratio=1, **SIZES
    )
    lively(transformers.Dinov2WithRegistersModel(config)).save_pretrained(folder)
    transformers.BitImageProcessor(
        size={"shortest_edge": 40}, crop_size={"height": 32, "width": 32}
    ).save_pretrained(folder)
    return folder


def clip(folder: Path) -> Path:
    config = transformers.CLIPConfig(
        text_config={"vocab_size": 30, "max_position_embeddings": 40, "eos_token_id": 3, **SIZES},
        vision_config={"image_size": 32, "patch_size": 8, **SIZES},
    )
    lively(transformers.CLIPModel(config)).save_pretrained(folder)
    clip_processor().save_pretrained(folder)
    return folder


def clip_processor() -> Any:
    pixels = transformers.CLIPImageProcessor(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
    )
    return transformers.CLIPProcessor(pixels, tokenizer())


def blip(folder: Path) -> Path:
    """BLIP for VQA: image encoder, text encoder with cross-attention, and decoder."""
    marks = {"bos_token_id": 2, "eos_token_id": 3, "sep_token_id": 3, "pad_token_id": 0}
    text = {"vocab_size": 30, "encoder_hidden_size": 32, "max_position_embeddings": 40, **marks}
    config = transformers.BlipConfig(
        text_config={**text, **SIZES},
        vision_config={"image_size": 32, "patch_size": 8, **SIZES},
        image_text_hidden_size=32,
        projection_dim=32,
    )
    lively(transformers.BlipForQuestionAnswering(config)).save_pretrained(folder)
    pixels = transformers.BlipImageProcessor(size={"height": 32, "width": 32})
    transformers.BlipProcessor(pixels, tokenizer()).save_pretrained(folder)
    return folder


def llava(folder: Path) -> Path:
    """A language model with sixteen image tokens in its prompt."""
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(image_size=32, patch_size=8, **SIZES),
        text_config=transformers.LlamaConfig(
            vocab_size=30, max_position_embeddings=64, num_key_value_heads=2, **SIZES
        ),
        image_token_id=4,
        image_seq_length=16,
        vision_feature_layer=-1,
    )
    lively(transformers.LlavaForConditionalGeneration(config)).save_pretrained(folder)
    pixels = transformers.CLIPImageProcessor(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
    )
    words = tokenizer(framed=False)
    words.image_token = "<image>"
    transformers.LlavaProcessor(
        pixels, words, patch_size=8, vision_feature_select_strategy="default",
        image_token="<image>", num_additional_image_tokens=1,
    ).save_pretrained(folder)  # fmt: skip
    return folder


def spotter(folder: Path) -> Path:
    """A ViT whose class token attends to bright patches, by weights set by hand.

    Feature 0 of a patch is its brightness; queries and keys use feature 0 only.
    """
    config = transformers.ViTConfig(image_size=32, patch_size=4, **SIZES)
    model = transformers.ViTModel(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(1.0 if name.endswith("norm_before.weight") else 0.0)
        model.embeddings.patch_embeddings.projection.weight[0] = 1 / 48
        model.embeddings.position_embeddings[..., 1] = 1.0
        model.embeddings.cls_token[..., 1] = 1.0
        for layer in model.layers:
            layer.attention.q_proj.bias.fill_(4.0)
            layer.attention.k_proj.weight[::8, 0] = 4.0
    model.save_pretrained(folder)
    transformers.BitImageProcessor(
        size={"shortest_edge": 40}, crop_size={"height": 32, "width": 32},
        image_mean=[0.0] * 3, image_std=[1.0] * 3,
    ).save_pretrained(folder)  # fmt: skip
    return folder


class Shelf:
    """Model folders by name, each written on first access."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __getitem__(self, name: str) -> Path:
        folder = self.root / name
        return folder if folder.exists() else MAKERS[name](folder)


MAKERS = {make.__name__: make for make in (bert, gpt2, t5, vit, dino, clip, blip, llava, spotter)}


def photo(path: Path, size: tuple[int, int] = (60, 90)) -> Path:
    """Write a grey image of (height, width) with a bright square: rows 20-39, columns 40-59."""
    pixels = np.full((*size, 3), 90, dtype=np.uint8)
    pixels[20:40, 40:60] = (250, 220, 40)
    Image.fromarray(pixels).save(path)
    return path
