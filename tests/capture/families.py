"""Tiny random models of many families, and how far what is seen is from what each says itself.

`python -m tests.capture.families` writes docs/parity.md.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from overt.attention import Kind
from overt.capture.call import Call
from overt.capture.discovery import attention_modules
from overt.capture.session import watch
from overt.capture.trace import AttentionTrace

Inputs = dict[str, Any]
Reference = Callable[[nn.Module, Inputs], Sequence[Tensor]]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "parity.md"


# --- the sizes of everything

WORDS, IMAGE = 60, 59  # how many words there are, and the word that stands for a part of a picture
COMMON = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
NAMES = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TEXT = {**COMMON, **NAMES, "intermediate_size": 48, "max_position_embeddings": 40}
GROUPED = {**TEXT, "num_key_value_heads": 2, "head_dim": 8}
PATCHES = {**COMMON, "intermediate_size": 48, "image_size": 24, "patch_size": 8}
GPT = {**NAMES, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 40}
T5 = {**NAMES, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
T5 |= {"decoder_start_token_id": 0}
SEQ2SEQ = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48}
SEQ2SEQ |= {"decoder_ffn_dim": 48, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
BART = {**SEQ2SEQ, **NAMES, "max_position_embeddings": 40, "decoder_start_token_id": 2}


# --- what models are fed


def noise(*shape: int) -> Tensor:
    """Numbers that are the same each time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def targets() -> Tensor:
    """Words for a decoder."""
    return torch.randint(5, 55, (2, 5), generator=torch.Generator().manual_seed(4))


def words(count: int = 7) -> Inputs:
    """Two sentences; the second is shorter and padded."""
    ids = torch.randint(5, 55, (2, count), generator=torch.Generator().manual_seed(2))
    mask = torch.ones(2, count, dtype=torch.long)
    mask[1, count - 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def translation() -> Inputs:
    """Two sentences, and what a decoder has written so far."""
    return {**words(), "decoder_input_ids": targets()}


def picture(side: int = 24) -> Inputs:
    """Two pictures of noise."""
    return {"pixel_values": noise(2, 3, side, side)}


def picture_and_words() -> Inputs:
    """Two pictures, each with a sentence."""
    return {**words(), **picture()}


def words_around(places: int) -> Inputs:
    """Sentences in which some words stand for the parts of a picture."""
    given = words(places + 5)
    given["input_ids"][:, 2 : 2 + places] = IMAGE
    return given


def merged_picture() -> Inputs:
    """A picture of 4 x 6 patches in each of two samples, of which 2 x 2 become one token."""
    given = words_around(6)
    kinds = (given["input_ids"] == IMAGE).long()
    sizes = torch.tensor([[1, 4, 6], [1, 4, 6]])
    patches = noise(48, 3 * 2 * 8 * 8)
    return {**given, "pixel_values": patches, "image_grid_thw": sizes, "mm_token_type_ids": kinds}


# --- what models say about their own attention


def says(read: Callable[[Any], Sequence[Tensor]]) -> Reference:
    """The maps that a model returns when it is asked for them."""
    return lambda model, inputs: read(model(**inputs, output_attentions=True))


def encoder_decoder(output: Any) -> Sequence[Tensor]:
    """The encoder's, then self and cross of each layer of the decoder."""
    turns = zip(output.decoder_attentions, output.cross_attentions, strict=True)
    return [*output.encoder_attentions, *(one for turn in turns for one in turn)]


def towers(output: Any) -> Sequence[Tensor]:
    """Those of the pictures, then those of the words."""
    return [*output.vision_model_output.attentions, *output.text_model_output.attentions]


own = says(lambda output: output.attentions)


def taken(model: nn.Module, inputs: Inputs) -> Sequence[Tensor]:
    """Every softmax that the model takes, for models that return no maps, or not all."""
    with softmaxes() as found:
        model(**inputs)
    return found


def asked(model: nn.Module, inputs: Inputs) -> Sequence[Tensor]:
    """What each `nn.MultiheadAttention` answers when it is asked for the weights of its heads."""
    found = []
    plain = nn.MultiheadAttention.forward

    def asking(self: nn.MultiheadAttention, *args: Any, **kwargs: Any) -> Any:
        kwargs |= {"need_weights": True, "average_attn_weights": False}
        output, weights = plain(self, *args, **kwargs)
        found.append(weights)
        return output, weights

    with mock.patch.object(nn.MultiheadAttention, "forward", asking):
        model(**inputs)
    return found


@contextmanager
def softmaxes() -> Iterator[list[Tensor]]:
    """Every softmax over the last axis of something with three axes or more, as it is taken."""
    found: list[Tensor] = []
    softmax = torch.softmax  # F.softmax would come back here

    def spying(given: Tensor, dim: int, *_: Any, dtype: Any = None, **__: Any) -> Tensor:
        result = softmax(given, dim=dim, dtype=dtype)
        if given.ndim > 2 and dim in (-1, given.ndim - 1):
            found.append(result)
        return result

    with (
        mock.patch.object(F, "softmax", spying),
        mock.patch.object(Tensor, "softmax", spying),
    ):
        yield found


class Double(TorchFunctionMode):
    """Many models take their softmax in float32 whatever comes in; here float64 stays."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("dtype") == torch.float32 and "softmax" in getattr(func, "__name__", ""):
            kwargs = {**kwargs, "dtype": None}
        return func(*args, **kwargs)


# --- the families


@dataclass(frozen=True)
class Family:
    """A kind of model: how it is built, what it is fed, and how it is asked for its own maps.

    `calls` has a letter for each call: s for self, c for causal and x for cross-attention.
    """

    name: str
    build: Callable[[str], nn.Module]
    inputs: Callable[[], Inputs]
    reference: Reference
    calls: str
    implementations: tuple[str, ...] = ("eager", "sdpa", "overt")
    kind: Kind = Kind.PROBABILITY
    single: bool = False  # the model rounds its scores to float32 whatever it runs in


def hf(model: str, **settings: Any) -> Callable[[str], nn.Module]:
    """How to build a Hugging Face model from its class and the settings of its configuration."""

    def build(implementation: str) -> nn.Module:
        import transformers

        from overt.capture import hf_interface

        hf_interface.register_interface()
        kind = getattr(transformers, model)
        given: Any = implementation
        if "backbone_config" in settings:
            given = {"": implementation, "backbone_config": "eager"}  # it does not attend
        torch.manual_seed(0)
        made = kind._from_config(kind.config_class(**settings), attn_implementation=given)
        assert made.config._attn_implementation == implementation
        return lively(made)

    return build


def lively(model: nn.Module) -> nn.Module:
    """The same model with weights that make its attention far from even, and no dropout."""
    draw = torch.Generator().manual_seed(1)
    for name, weight in sorted(model.named_parameters()):
        with torch.no_grad():
            drawn = torch.randn(weight.shape, generator=draw)
            if "norm" in name.lower() or "backbone" in name:
                continue
            if weight.ndim > 1:
                weight.copy_(drawn * 0.8 * weight.shape[-1] ** -0.5)
            else:
                weight.add_(drawn * 0.2)
    return model.eval()


class Encoder(nn.Module):
    """`nn.TransformerEncoder` with padding."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True)
        self.inner = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor, absent: Tensor) -> Tensor:
        return self.inner(x, src_key_padding_mask=absent)


class Decoder(nn.Module):
    """`nn.TransformerDecoder` with a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(32, 4, 48, batch_first=True)
        self.inner = nn.TransformerDecoder(layer, 2)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.inner(x, memory, tgt_mask=mask, tgt_is_causal=True)


class MultiHead(nn.Module):
    """`nn.MultiheadAttention` from one sequence to another."""

    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.need_weights = need_weights
        self.inner = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.inner(x, memory, memory, need_weights=self.need_weights)[0]


def plain(kind: Callable[[], nn.Module]) -> Callable[[str], nn.Module]:
    """How to build a model of PyTorch's own layers, which have one way to attend."""

    def build(_: str) -> nn.Module:
        torch.manual_seed(0)
        return lively(kind())

    return build


def sequence(name: str, shape: tuple[int, ...] | None = None) -> Callable[[], Inputs]:
    """A sequence of features, and what else the model takes."""
    more = words()["attention_mask"] == 0 if shape is None else noise(*shape)
    return lambda: {"x": noise(2, 7, 32), name: more}


BY_HAND = ("eager",)  # written out in the model's file, which knows no other way
NO_SDPA = ("eager", "overt")
TORCH = ("torch",)
ONE_EXPERT = {"num_experts_per_tok": 1, "experts_implementation": "eager"}
ALIBI = {**NAMES, "hidden_size": 32, "n_layer": 2, "n_head": 4}
MPT = {**NAMES, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 40, "expansion_ratio": 2}
DISTIL = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "vocab_size": WORDS}
SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4]}
SPEECH = {"num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 20}
RESNET = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
RESNET |= {"layer_type": "basic", "out_features": ["stage2"]}
QWEN_TEXT = {**GROUPED, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
QWEN_TEXT["rope_parameters"]["mrope_section"] = [2, 1, 1]
QWEN_SIGHT = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2}
QWEN_SIGHT |= {"patch_size": 8}
LLAVA_TEXT = {**GROUPED, "model_type": "llama"}
LLAVA_SIGHT = {**PATCHES, "model_type": "clip_vision_model"}
LXMERT = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "l_layers": 1}
LXMERT |= {"x_layers": 2, "r_layers": 1, "visual_feat_dim": 12, "visual_pos_dim": 4}
BLIP_TEXT = {**TEXT, "encoder_hidden_size": 32, "is_decoder": True}
TWO = {"text_config": TEXT, "vision_config": PATCHES}


def regions() -> Inputs:
    """Sentences, and three regions of a picture."""
    return {**words(), "visual_feats": noise(2, 3, 12), "visual_pos": noise(2, 3, 4)}


FAMILIES = (
    # words
    Family("BERT", hf("BertModel", **TEXT), words, own, "ss"),
    Family("DistilBERT", hf("DistilBertModel", **DISTIL), words, own, "ss"),
    Family("ALBERT, one layer called twice", hf("AlbertModel", **TEXT), words, own, "ss"),
    Family("GPT-2", hf("GPT2LMHeadModel", **GPT), words, own, "cc"),
    Family("Llama, grouped heads", hf("LlamaForCausalLM", **GROUPED), words, own, "cc"),
    Family(
        "Mistral, sliding window",
        hf("MistralForCausalLM", **GROUPED, sliding_window=3),
        words,
        own,
        "cc",
    ),
    Family(
        "Gemma 2, capped scores, sliding window",
        hf("Gemma2ForCausalLM", **GROUPED, sliding_window=3, attn_logit_softcapping=2.0),
        words,
        own,
        "cc",
        NO_SDPA,
    ),
    Family(
        "GPT-OSS, learned sinks, experts",
        hf("GptOssForCausalLM", **GROUPED, sliding_window=3, num_local_experts=2, **ONE_EXPERT),
        words,
        own,
        "cc",
        NO_SDPA,
        Kind.SUBPROBABILITY,
    ),
    Family(
        "Mixtral, experts",
        hf("MixtralForCausalLM", **GROUPED, num_local_experts=4, **ONE_EXPERT),
        words,
        own,
        "cc",
    ),
    Family("BLOOM, ALiBi", hf("BloomForCausalLM", **ALIBI), words, own, "cc", BY_HAND),
    Family("MPT, ALiBi", hf("MptForCausalLM", **MPT), words, own, "cc", BY_HAND, single=True),
    Family(
        "Falcon, ALiBi",
        hf("FalconForCausalLM", **TEXT, alibi=True, multi_query=False, parallel_attn=False),
        words,
        own,
        "cc",
        BY_HAND,
    ),
    Family(
        "T5, position bias",
        hf("T5ForConditionalGeneration", **T5),
        translation,
        says(encoder_decoder),
        "sscxcx",
    ),
    Family(
        "MT5, position bias",
        hf("MT5ForConditionalGeneration", **T5),
        translation,
        says(encoder_decoder),
        "sscxcx",
    ),
    Family(
        "BART",
        hf("BartForConditionalGeneration", **BART),
        translation,
        says(encoder_decoder),
        "sscxcx",
    ),
    # sound
    Family(
        "Whisper",
        hf("WhisperForConditionalGeneration", **BART, **SPEECH),
        lambda: {"input_features": noise(2, 8, 24), "decoder_input_ids": targets()},
        says(encoder_decoder),
        "sscxcx",
    ),
    # pictures
    Family("ViT", hf("ViTModel", **PATCHES), picture, own, "ss"),
    Family("DINOv2", hf("Dinov2Model", **PATCHES), picture, own, "ss"),
    Family(
        "DINOv2 with registers",
        hf("Dinov2WithRegistersModel", **PATCHES, num_register_tokens=4),
        picture,
        own,
        "ss",
    ),
    Family(
        "Swin, shifted windows",
        hf("SwinModel", **SWIN, window_size=4),
        lambda: picture(32),
        taken,
        "ssss",
    ),
    Family(
        "DETR",
        hf("DetrModel", **SEQ2SEQ, num_queries=5, backbone_config=RESNET),
        lambda: picture(32),
        says(encoder_decoder),
        "sssxsx",
    ),
    # pictures and words
    Family(
        "CLIP, both towers",
        hf("CLIPModel", **TWO, projection_dim=16),
        picture_and_words,
        says(towers),
        "sscc",
    ),
    Family(
        "SigLIP, both towers and the head that pools",
        hf("SiglipModel", **TWO),
        picture_and_words,
        taken,
        "ssxss",
    ),
    Family(
        "LLaVA",
        hf(
            "LlavaForConditionalGeneration",
            text_config=LLAVA_TEXT,
            vision_config=LLAVA_SIGHT,
            image_token_index=IMAGE,
            vision_feature_layer=-1,
        ),
        lambda: {**words_around(9), **picture()},
        taken,
        "sscc",
    ),
    Family(
        "Qwen2-VL, each picture by itself, 2 x 2 merged",
        hf(
            "Qwen2VLForConditionalGeneration",
            text_config=QWEN_TEXT,
            vision_config=QWEN_SIGHT,
            image_token_id=IMAGE,
            vision_start_token_id=3,
            vision_end_token_id=4,
        ),
        merged_picture,
        taken,
        "sssscc",
    ),
    Family(
        "ViLT",
        hf("ViltModel", **{**TEXT, **PATCHES}),
        lambda: {**picture_and_words(), "pixel_mask": torch.ones(2, 24, 24, dtype=torch.long)},
        own,
        "ss",
        BY_HAND,
    ),
    Family(
        "VisualBERT",
        hf("VisualBertModel", **TEXT, visual_embedding_dim=12),
        lambda: {**words(), "visual_embeds": noise(2, 3, 12)},
        own,
        "ss",
        BY_HAND,
    ),
    Family(
        "LXMERT, one cross layer for both ways",
        hf("LxmertModel", **LXMERT, vocab_size=WORDS),
        regions,
        taken,
        "ssxxssxxss",
        BY_HAND,
    ),
    Family(
        "BLIP",
        hf("BlipForConditionalGeneration", text_config=BLIP_TEXT, vision_config=PATCHES),
        picture_and_words,
        taken,
        "sscxcx",
        BY_HAND,
    ),
    # PyTorch's own layers
    Family("nn.TransformerEncoder", plain(Encoder), sequence("absent"), asked, "ss", TORCH),
    Family(
        "nn.TransformerDecoder",
        plain(Decoder),
        sequence("memory", (2, 5, 32)),
        asked,
        "cxcx",
        TORCH,
    ),
    Family(
        "nn.MultiheadAttention, need_weights=True",
        plain(lambda: MultiHead(True)),
        sequence("memory", (2, 5, 32)),
        asked,
        "x",
        TORCH,
    ),
    Family(
        "nn.MultiheadAttention, need_weights=False",
        plain(lambda: MultiHead(False)),
        sequence("memory", (2, 5, 32)),
        asked,
        "x",
        TORCH,
    ),
)


def family(name: str) -> Family:
    """The family whose name begins so."""
    return next(one for one in FAMILIES if one.name.startswith(name))


# --- how far what is seen is from what the model says


@dataclass(frozen=True)
class Parity:
    """The largest differences: absolute for weights, relative for gradients and log-blocks."""

    maps: int
    modules: int
    routes: tuple[str, ...]
    weights: float
    gradients: float
    logs: float
    calls: str
    kinds: frozenset[Kind]


@cache
def parity(one: Family, implementation: str, dtype: torch.dtype = torch.float32) -> Parity:
    """How far what is seen of a model is from what the same model on "eager" says itself."""
    precise = Double if dtype == torch.float64 else nullcontext
    inputs = cast(one.inputs(), dtype)
    model = one.build(one.implementations[0]).to(dtype)
    with precise():
        torch.manual_seed(5)  # ViLT picks its patches at random
        wanted = list(one.reference(model, inputs))
    theirs = gradients(wanted, model)

    model = one.build(implementation).to(dtype)
    with watch(model) as trace, precise():
        torch.manual_seed(5)
        model(**inputs)
    assert len(trace) == len(wanted), (
        f"{len(wanted)} maps, and {len(trace)} were captured: {trace.names}"
    )
    wanted = [said.reshape(call.shape) for said, call in zip(wanted, trace, strict=True)]
    ours = gradients([call.weights() for call in trace], model)
    return Parity(
        maps=len(trace),
        modules=len(attention_modules(model)),
        routes=tuple(sorted({call.route.name.lower() for call in trace})),
        weights=max(apart(c.weights(), w) for c, w in zip(trace, wanted, strict=True)),
        gradients=apart(ours, theirs) / float(theirs.abs().max()),
        logs=max(log_block_apart(c, w) for c, w in zip(trace, wanted, strict=True)),
        calls="".join("x" if call.cross else "c" if call.causal else "s" for call in trace),
        kinds=frozenset(call.kind for call in trace),
    )


def cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """The inputs with their real numbers in another precision."""
    return {
        name: value.to(dtype) if value.is_floating_point() else value
        for name, value in inputs.items()
    }


def apart(one: Tensor, other: Tensor) -> float:
    """The largest difference; infinite when there is a NaN."""
    gap = (one - other).detach().abs().max()
    return float("inf") if bool(gap.isnan()) else float(gap)


def gradients(maps: Sequence[Tensor], model: nn.Module) -> Tensor:
    """The gradient of a random sum of all weights, to all parameters, as one vector."""
    draw = torch.Generator().manual_seed(6)
    total = sum(
        (weights.flatten() * torch.randn(weights.numel(), generator=draw).to(weights)).sum()
        for weights in maps
    )
    assert isinstance(total, Tensor)
    parameters = [p for _, p in sorted(model.named_parameters()) if p.requires_grad]
    found = torch.autograd.grad(total, parameters, allow_unused=True)
    return torch.cat(
        [
            (torch.zeros_like(p) if g is None else g).flatten()
            for p, g in zip(parameters, found, strict=True)
        ]
    )


def look(
    model: nn.Module, inputs: Inputs, inner: nn.Module | None = None
) -> tuple[AttentionTrace, Tensor]:
    """What is seen, and the gradient of the model's output and of all weights together."""
    with watch(model) as trace:
        torch.manual_seed(5)
        output = model(**inputs)
    tensors = [value for value in output.values() if isinstance(value, Tensor)]
    maps = [call.weights() for call in trace]
    return trace, gradients([*maps, tensors[0]], inner or model)


def same(ours: AttentionTrace, theirs: AttentionTrace) -> None:
    """Hold two views of one model to each other, call by call."""
    for one, other in zip(ours, theirs, strict=True):
        assert (one.name, one.cross, one.causal) == (other.name, other.cross, other.causal)
        torch.testing.assert_close(one.weights(), other.weights(), rtol=0, atol=1e-6)


def close(ours: Tensor, theirs: Tensor) -> None:
    """Hold two gradients to each other, relative to the largest entry."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))


def log_block_apart(call: Call, wanted: Tensor) -> float:
    """How far a block of the call, renormalised as logarithms, is from that of given weights."""
    b, _, q, k = call.shape
    rows = torch.arange(q - 1, -1, -2).expand(b, -1)
    keys = torch.arange(0, k, 2).expand(b, -1)
    block = wanted.detach()[:, :, rows[0]][..., keys[0]]
    block = (block / block.sum(dim=-1, keepdim=True)).log()
    ours = AttentionTrace([call]).log_block(rows, keys).log_weights[:, 0].detach()
    there = block > -60  # below, float32 has no weights left to take a logarithm of
    assert bool((ours[block.isneginf()] < -60).all()), f"{call.name} shows what it hides"
    ours, block = ours[there], block[there]
    return apart(ours, block) / float(block.abs().max().clamp_min(1))


# --- the table

HEAD = """# Parity

Look up how exactly `overt.watch` captures each model family. `overt doctor` checks your own model:

```console
$ overt doctor hf:openai-community/gpt2
```

The reference is the attention that the same model returns under `attn_implementation="eager"`.
Every family is a tiny model with random weights; the numbers are the maximum over the listed
implementations and over all maps, rows and keys.

- **maps / modules**: attention calls captured in one forward pass, and attention modules in the
  model. A layer that is called twice gives two maps.
- **weights**: largest absolute difference, float32 (at most 1e-6) and float64 (at most 1e-12).
- **gradients**, **log-blocks**: largest difference relative to the largest entry, float32 (at most
  1e-5): of all parameters' gradients of a random sum of all weights, and of `trace.log_block`.

Notes:

- Falcon adds ALiBi twice on "eager" and once on "sdpa", so its two implementations differ. Each is
  captured as computed: weights times values equal the output that the model used.
- A factor that a model applies after the product of weights and values is not part of the weights,
  as with the sinks of Granite's sliding windows on "eager"; on "overt" they are part of the map.
- Weights whose slices are multiplied with different values (Pegasus-X) are an error. Attention
  without a softmax over keys (linear, hashed, state space) is an error that names its modules, also
  in models with other attention layers (Jamba, Bamba, Zamba, Qwen3-Next); use
  `watch(model, without=[...])` for the rest.

Generated by `python -m tests.capture.families`; a test compares it with a new run.

"""
COLUMNS = ("family", "implementations", "route", "maps / modules", "weights", "gradients")
COLUMNS += ("log-blocks", "weights, float64")


def row(one: Family) -> tuple[str, ...]:
    """What the table says of a family."""
    found = [parity(one, implementation) for implementation in one.implementations]
    exact = [parity(one, each, torch.float64) for each in one.implementations]
    routes = sorted({route for each in found for route in each.routes})
    return (
        one.name,
        ", ".join(one.implementations),
        ", ".join(routes),
        f"{found[0].maps} / {found[0].modules}",
        f"{max(each.weights for each in found):.0e}",
        f"{max(each.gradients for each in found):.0e}",
        f"{max(each.logs for each in found):.0e}",
        f"{max(each.weights for each in exact):.0e}",
    )


def page(families: Sequence[Family] = FAMILIES) -> str:
    """The whole page."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *(row(one) for one in families)]
    return HEAD + "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    import transformers

    transformers.logging.set_verbosity_error()
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
