"""More model families: captured weights equal those that the models return.

Each is built small from its own config, and runs with its default implementation. The reference is
the same model under eager attention and `output_attentions=True`. Gradients, blocks and the other
implementations are compared for the families of test_families.py only.
"""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overt.capture import UncapturedAttentionError, watch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = pytest.mark.long

# Sizes of models, by the names that configs use for them.
SMALL: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim"), 48),
    **dict.fromkeys(("hidden_dim", "d_inner", "d_ff"), 48),
    **dict.fromkeys(("head_dim", "d_head", "d_kv", "patch_size"), 8),
    **dict.fromkeys(("num_key_value_heads", "num_local_experts", "num_experts"), 2),
    **dict.fromkeys(("num_sparse_encoder_layers", "num_sparse_decoder_layers"), 1),
    "vocab_size": 99,
    "max_position_embeddings": 64,
    "image_size": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
}
UNSET = {
    "funnel": {"num_hidden_layers"},
    "xlnet": {"max_position_embeddings"},
}  # these configs cannot set them
# Additional settings of single families.
MORE: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
        "num_experts_per_tok": 2, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 2,
    },
    "esm": {"position_embedding_type": "rotary", "vocab_size": 33, "pad_token_id": 1},
    "funnel": {"block_sizes": [1, 1], "architectures": ["FunnelModel"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "gptj": {"rotary_dim": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4},
    "perceiver": {
        "d_latents": 32, "num_latents": 5, "num_blocks": 1, "num_self_attends_per_block": 2,
        "num_self_attention_heads": 4, "num_cross_attention_heads": 4,
    },
}  # fmt: skip
ENCODERS = """bert-generation camembert convbert data2vec-text deberta deberta-v2 electra ernie esm
    funnel ibert megatron-bert modernbert mpnet rembert roberta roformer xlm xlnet""".split()
DECODERS = """cohere deepseek_v3 gemma gemma3_text glm gpt_bigcode gpt_neo gpt_neox gptj granite
    jamba llama4_text olmo2 opt persimmon phi phi3 qwen2 qwen3 smollm3 stablelm
    starcoder2""".split()
ENCODER_DECODERS = "blenderbot m2m_100 marian mbart switch_transformers umt5".split()
VISION = "beit data2vec-vision deit dinov3_vit dpt ijepa pvt vit_msn yolos".split()
AUDIO = "hubert wav2vec2".split()
FAMILIES = [*ENCODERS, *DECODERS, *ENCODER_DECODERS, *VISION, *AUDIO, "perceiver"]


def small_config(name: str) -> Any:
    """Make the config of a family with small sizes."""
    if name not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {name}")
    config = transformers.CONFIG_MAPPING[name]
    default = config()
    sizes = {
        key: value
        for key, value in SMALL.items()
        if key not in UNSET.get(name, ()) and isinstance(getattr(default, key, None), int)
    }
    return config(**{**sizes, **MORE.get(name, {})})


def scale_weights(model: nn.Module) -> nn.Module:
    """Scale the initial weights, so that attention is less uniform."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(3)
    return model.eval()


def inputs_of(model: nn.Module) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    takes = inspect.signature(model.forward).parameters
    if "pixel_values" in takes:
        return {"pixel_values": torch.randn(2, 3, 32, 32, generator=draw)}
    if "input_values" in takes:
        return {"input_values": torch.randn(2, 4000, generator=draw)}
    if "inputs" in takes:
        return {"inputs": torch.randn(2, 9, 32, generator=draw)}
    given = {"input_ids": torch.randint(4, 24, (2, 16), generator=draw)}
    if "decoder_input_ids" in takes:
        given["decoder_input_ids"] = torch.randint(4, 24, (2, 5), generator=draw)
    return given


def returned_weights(output: Any) -> list[Tensor]:
    """Return all attention weights that a model returns itself."""
    fields = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")
    return [one for field in fields for one in getattr(output, field, None) or ()]


@pytest.mark.parametrize("name", FAMILIES)
def test_captured_weights_equal_the_returned_weights(name: str) -> None:
    config = small_config(name)
    torch.manual_seed(0)
    model = scale_weights(transformers.AutoModel.from_config(config))
    given = inputs_of(model)
    recurrent = ["layers.*.mamba"] if name == "jamba" else []
    with torch.no_grad(), watch(model, without=recurrent) as trace:
        model(**given)
    eager = transformers.AutoModel.from_config(config, attn_implementation="eager").eval()
    eager.load_state_dict(model.state_dict())
    with torch.no_grad():
        theirs = returned_weights(eager(**given, output_attentions=True))
    ours = [call.weights() for call in trace]
    assert theirs and len(ours) == len(theirs)
    # a decoder alternates self- and cross-attention, and returns each kind separately
    for wanted in theirs:
        gaps = [(one - wanted).abs().max() for one in ours if one.shape == wanted.shape]
        assert gaps and min(gaps) <= 2e-5
    assert max(float(one.max() * one.shape[-1]) for one in ours) > 1.2, (
        "uniform maps would not test this"
    )


@pytest.mark.parametrize(
    ("name", "more", "length"),
    [
        ("longformer", {"attention_window": 4}, 16),
        ("big_bird", {"block_size": 4, "num_random_blocks": 1, "max_position_embeddings": 99}, 64),
        ("rwkv", {"attention_hidden_size": 32, "context_length": 32}, 16),
        ("fnet", {}, 16),
    ],
)
def test_models_without_softmax_over_all_keys_are_rejected(
    name: str, more: dict[str, Any], length: int
) -> None:
    default = transformers.CONFIG_MAPPING[name]()
    sizes = {key: value for key, value in SMALL.items() if hasattr(default, key)}
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(type(default)(**{**sizes, **more})).eval()
    ids = torch.randint(4, 24, (2, length))
    with (
        pytest.raises((UncapturedAttentionError, NotImplementedError)),
        torch.no_grad(),
        watch(model),
    ):
        model(input_ids=ids)
    with torch.no_grad():
        model(input_ids=ids)  # the model still runs
