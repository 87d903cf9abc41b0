"""Tiny models of every type that the installed transformers can build without downloads.

Sizes are set by the names that configs share, so a new type needs no entry here. A type whose
config needs more than that raises while it is built, and counts as not built.
"""

import copy
import inspect
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING

LARGEST = 30_000_000  # parameters; a config that ignores the sizes below is left out
LENGTH, WRITTEN, SIDE = 11, 7, 32  # tokens read, tokens written, pixels

SIZES = {
    32: "hidden_size d_model n_embd embed_dim dim d_embed embedding_size encoder_hidden_size "
    "decoder_hidden_size moe_intermediate_size image_size",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers "
    "num_encoder_layers num_decoder_layers num_key_value_heads type_vocab_size num_experts "
    "num_local_experts n_routed_experts eos_token_id",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads "
    "decoder_attention_heads",
    64: "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff d_inner n_inner hidden_dim",
    8: "head_dim d_kv d_head patch_size qk_nope_head_dim qk_rope_head_dim v_head_dim rotary_dim",
    16: "q_lora_rank kv_lora_rank",
    99: "vocab_size",
    128: "max_position_embeddings n_positions",
    1: "num_experts_per_tok bos_token_id decoder_start_token_id",
    0: "pad_token_id",
}


def types() -> list[str]:
    """Return every model type of AutoModel."""
    return sorted(CONFIG_MAPPING)


def shrink(config: Any, depth: int = 0) -> None:
    """Set the sizes of a config, and of the configs inside it, to small ones."""
    for size, names in SIZES.items():
        for name in names.split():
            if type(getattr(config, name, None)) is int:
                setattr(config, name, size)
    for inner in list(vars(config).values()):
        if isinstance(inner, transformers.PretrainedConfig) and depth < 3:
            shrink(inner, depth + 1)
    kinds = getattr(config, "layer_types", None)
    if isinstance(kinds, list | tuple) and kinds:
        config.layer_types = (list(dict.fromkeys(kinds)) * 2)[:2]


def build(kind: str, attention: str) -> nn.Module:
    """Build a tiny model of a type with random weights, the same at each call."""
    config = CONFIG_MAPPING[kind]()
    shrink(config)
    model_class = MODEL_MAPPING[type(config)]
    if isinstance(model_class, list | tuple):
        model_class = model_class[0]

    def build_one() -> Any:
        return model_class._from_config(copy.deepcopy(config), attn_implementation=attention)

    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in build_one().parameters())
    if count > LARGEST:
        raise ValueError(f"{kind} has {count} parameters")
    torch.manual_seed(0)
    model: nn.Module = build_one().eval()
    return model


def inputs(model: Any) -> dict[str, Tensor]:
    """Make inputs of two samples, the second of them padded."""
    names, main = inspect.signature(model.forward).parameters, model.main_input_name
    torch.manual_seed(1)
    if main == "pixel_values":
        side = getattr(model.config, "image_size", SIDE)
        side = side if isinstance(side, int) else SIDE
        channels = getattr(model.config, "num_channels", 3) or 3
        return {main: torch.randn(2, channels, side, side)}
    if main == "input_values":
        return {main: torch.randn(2, 4000)}
    if main == "input_features":
        return {main: torch.randn(2, 80, 200)}
    if main != "input_ids":
        raise ValueError(f"{type(model).__name__} takes {main}")
    found = {main: torch.randint(3, 90, (2, LENGTH))}
    if "attention_mask" in names:
        found["attention_mask"] = torch.ones(2, LENGTH, dtype=torch.long)
        found["attention_mask"][1, -3:] = 0
    if "decoder_input_ids" in names:
        found["decoder_input_ids"] = torch.randint(3, 90, (2, WRITTEN))
    media = getattr(model.config, "image_token_id", None) is not None
    if "pixel_values" in names and hasattr(model.config, "vision_config") and not media:
        found["pixel_values"] = torch.randn(2, 3, SIDE, SIDE)
    return found


def tensors(value: object) -> Iterator[Tensor]:
    """Yield all tensors of a nested output."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from tensors(one)


def returned_weights(output: Any) -> list[Tensor]:
    """Return the attention weights in the output of a model."""
    names = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")
    found = [one for name in names for one in tensors(getattr(output, name, None))]
    return [one for one in found if one.ndim >= 3]
