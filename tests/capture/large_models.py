"""A tiny Llama with attention that is far from even, loaded as large models are."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

LAYERS = tuple(f"model.layers.{layer}.self_attn" for layer in range(3))


def llama(**settings: Any) -> nn.Module:
    """Return a causal language model with three layers, always with the same weights."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    ends = {"vocab_size": 32, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    config = transformers.LlamaConfig(**{**sizes, **heads, **ends, **settings})
    model = transformers.LlamaForCausalLM(config)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                noise = torch.randn(weight.shape, generator=draw)
                weight.copy_(noise * 2 / weight.shape[-1] ** 0.5)
    return model.eval()


def eager_weights(model: nn.Module, **inputs: Tensor) -> Tensor:
    """Return the maps (b, l, h, q, k) that the model returns itself with eager attention."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        found = model(**inputs, output_attentions=True, use_cache=False).attentions
    model.set_attn_implementation(before)
    return torch.stack(found, dim=1)
