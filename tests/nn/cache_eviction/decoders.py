"""Tiny decoders with random weights, and left-padded prompts."""

from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor

WORDS = 40
TEXT = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "initializer_range": 0.5,
}  # fmt: skip
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", TEXT),
    "gpt2": (
        "GPT2",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": WORDS}
        | {"bos_token_id": 1, "eos_token_id": None, "initializer_range": 0.5},
    ),
    "qwen2": ("Qwen2", TEXT),
    "qwen2 with windows": (  # sliding windows in the last layer
        "Qwen2",
        {**TEXT, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "mistral": ("Mistral", {**TEXT, "head_dim": 8, "sliding_window": 5}),
    "mistral without windows": ("Mistral", {**TEXT, "head_dim": 8, "sliding_window": None}),
}


@cache
def make_decoder(name: str, attention: str = "sdpa") -> Any:
    """Return a model, with the same weights for each attention implementation."""
    kind, sizes = CONFIGS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes)
    head = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    model = getattr(transformers, kind + head)(config).eval()
    model.set_attn_implementation(attention)
    return model


def make_prompt(n: int = 12, padding: tuple[int, ...] = (0, 3)) -> dict[str, Tensor]:
    """Return random tokens, padded on the left."""
    drawn = torch.Generator().manual_seed(1)
    ids = torch.randint(3, WORDS, (len(padding), n), generator=drawn)
    mask = (torch.arange(n) >= torch.tensor(padding)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def eager_weights(name: str, prompt: dict[str, Tensor]) -> list[Tensor]:
    """The weights (b h q k) of each layer, as the model returns them."""
    mask = prompt["attention_mask"]
    positions = (mask.cumsum(dim=1) - 1).masked_fill(mask == 0, 0)
    with torch.no_grad():
        output = make_decoder(name, "eager")(
            **prompt, position_ids=positions, output_attentions=True
        )
    return list(output.attentions)
