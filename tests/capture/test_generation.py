"""The attention of generated tokens is that of one eager pass over what was written."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from overt.attention import AttentionMap, Kind, Span
from overt.capture import generation
from overt.capture.edits import Bias
from overt.capture.generation import GenerationResult, generate
from overt.capture.session import watch
from overt.capture.state import STATE
from overt.geometry import PixelGeometry

transformers = pytest.importorskip("transformers")

WORDS, END = 40, 2
TEXT = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": END,
}  # fmt: skip
PAIR = {
    "vocab_size": WORDS, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": END,
    "decoder_start_token_id": 1, "forced_eos_token_id": None, "dropout": 0.0,
}  # fmt: skip
PICTURE = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "image_size": 24, "patch_size": 8, "model_type": "clip_vision_model",
}  # fmt: skip

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": WORDS}
        | {"bos_token_id": 1, "eos_token_id": END, "pad_token_id": 0},
    ),
    "llama": ("LlamaForCausalLM", "LlamaConfig", TEXT),
    "mistral": (
        "MistralForCausalLM",
        "MistralConfig",
        {**TEXT, "head_dim": 8, "sliding_window": 4},
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**TEXT, "head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8}
        | {"attn_logit_softcapping": 2.0},
    ),
    "llava": (
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {"text_config": {**TEXT, "model_type": "llama"}, "vision_config": PICTURE}
        | {"image_token_index": WORDS - 1, "vision_feature_layer": -1},
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
        | {"vocab_size": WORDS, "decoder_start_token_id": 0, "eos_token_id": END}
        | {"dropout_rate": 0.0},
    ),
    "bart": ("BartForConditionalGeneration", "BartConfig", {**PAIR, "max_position_embeddings": 64}),
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {**PAIR, "num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 30}
        | {"begin_suppress_tokens": None, "suppress_tokens": None},
    ),
}  # fmt: skip

# The searches; a sampled one draws from the seed of its test.
SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "beams": {"num_beams": 3, "num_return_sequences": 2, "do_sample": False},
    "sample": {"do_sample": True, "num_return_sequences": 2},
    "sampled beams": {"num_beams": 3, "do_sample": True},
}


def made(name: str, attention: str = "sdpa") -> nn.Module:
    """A tiny model whose attention is far from even, and that ends some of its sentences early."""
    kind, config, settings = MODELS[name]
    built = getattr(transformers, kind)._from_config(
        getattr(transformers, config)(**settings), attn_implementation=attention
    )
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight_name, weight in sorted(built.named_parameters()):
            if weight.ndim > 1:
                noise = torch.randn(weight.shape, generator=draw)
                weight.copy_(noise * (1.5 / weight.shape[-1]) ** 0.5)
                if name == "t5" and weight_name.endswith("q.weight"):
                    weight.mul_(8**-0.5)  # T5 does not scale its scores
            elif "norm" not in weight_name.lower():
                weight.add_(torch.randn(weight.shape, generator=draw) * 0.2)
    return built.eval()


def eager(model: nn.Module) -> nn.Module:
    """The same model, attending step by step."""
    twin = type(model)._from_config(model.config, attn_implementation="eager")
    twin.load_state_dict(model.state_dict())
    return twin.eval()


def words(count: int = 9, padded: int = 3) -> dict[str, Tensor]:
    """Two prompts; the second is shorter and padded on the left."""
    draw = torch.Generator().manual_seed(2)
    ids = torch.randint(3, WORDS - 2, (2, count), generator=draw)
    mask = torch.ones(2, count, dtype=torch.long)
    mask[1, :padded] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def inputs(name: str) -> dict[str, Tensor]:
    if name == "whisper":
        return {"input_features": noise(2, 8, 24)}
    given = words(14 if name == "llava" else 9)
    if name in ("t5", "bart"):  # encoders are padded on the right
        given = {key: value.flip(1) for key, value in given.items()}
    if name == "llava":
        given["input_ids"][:, 4:13] = WORDS - 1
        given["pixel_values"] = noise(2, 3, 24, 24)
    return given


def over(sequences: Tensor, start: int) -> Tensor:
    """Which new tokens come after the end of their sequence, token by token."""
    gone = torch.zeros(len(sequences), sequences.shape[1] - start, dtype=torch.bool)
    for i, row in enumerate(sequences[:, start:].tolist()):
        if END in row:
            gone[i, row.index(END) + 1 :] = True
    return gone


def taught(
    model: nn.Module, given: dict[str, Tensor], sequences: Tensor, own: str = "attentions"
) -> Tensor:
    """The maps (b, l, h, q, k) of one eager pass over the sequences that were written."""
    times = len(sequences) // len(next(iter(given.values())))
    given = {key: value.repeat_interleave(times, dim=0) for key, value in given.items()}
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = sequences
    else:
        new = sequences.shape[1] - given["input_ids"].shape[1]
        mask = torch.nn.functional.pad(given["attention_mask"], (0, new), value=1)
        given |= {"input_ids": sequences, "attention_mask": mask}
        given["position_ids"] = (mask.cumsum(dim=1) - 1).clamp_min(0)
    with torch.no_grad():
        output = eager(model)(**given, output_attentions=True)
    return torch.stack(getattr(output, own), dim=1)


def expected(whole: Tensor, sequences: Tensor, start: int) -> Tensor:
    """The rows from which the tokens after `start` were written, zero after the end."""
    rows = whole[:, :, :, start - 1 : sequences.shape[1] - 1]
    return rows * ~over(sequences, start)[:, None, None, :, None]


def same(found: GenerationResult, wanted: Tensor) -> None:
    found.attention.check()
    assert found.attention.weights.shape == wanted.shape
    torch.testing.assert_close(found.attention.weights, wanted, atol=1e-6, rtol=0)
    assert torch.equal(found.attention.visible, (wanted > 0).any(dim=(1, 2)))
    assert wanted.max() > 0.25, "an even map would show nothing"


# --- equal to one pass over the final sequence


@pytest.mark.long
@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "gemma2", "llava"])
def test_new_tokens_over_the_prompt_in_decoders(name: str, search: str) -> None:
    model = made(name, "eager" if name == "gemma2" else "sdpa")
    given = inputs(name)
    found = generate(model, **given, **SEARCHES[search], max_new_tokens=7)
    prompt = given["input_ids"].shape[1]
    sequences = found.output.sequences
    whole = taught(model, given, sequences)
    same(found, expected(whole, sequences, prompt)[..., :prompt])


@pytest.mark.long
@pytest.mark.parametrize("search", ["greedy", "beams", "sample"])
@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
@pytest.mark.parametrize("own", ["cross_attentions", "decoder_attentions"])
def test_new_tokens_over_the_encoder_and_over_each_other(name: str, search: str, own: str) -> None:
    model, given = made(name), inputs(name)
    crosses = own == "cross_attentions"
    where = None if crosses else (lambda call: not call.cross)
    keys = None if crosses else slice(0, 8)
    found = generate(
        model, keys, where=where, **given, **SEARCHES[search], max_new_tokens=7, min_new_tokens=7
    )
    sequences = found.output.sequences
    wanted = expected(taught(model, given, sequences, own), sequences, 1)
    same(found, wanted if crosses else with_future(wanted, 8))


@pytest.mark.long
@pytest.mark.parametrize("search", ["greedy", "beams"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize(
    "cache",
    [
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"prefill_chunk_size": 4},  # 9 tokens: the last part has one, as a new token has
        {"prefill_chunk_size": 2, "cache_implementation": "static"},
    ],
    ids=str,
)
def test_every_cache_gives_the_same_rows(name: str, search: str, cache: dict[str, Any]) -> None:
    model = made(name, "eager" if name == "gemma2" else "sdpa")
    given = words(padded=0 if "prefill_chunk_size" in cache else 3)
    found = generate(model, slice(0, 12), **given, **SEARCHES[search], **cache, max_new_tokens=7)
    sequences = found.output.sequences
    wanted = expected(taught(model, given, sequences), sequences, 9)
    same(found, with_future(wanted, 12))


@pytest.mark.long
@pytest.mark.parametrize(
    "cache", [{"use_cache": False}, {"cache_implementation": "static"}], ids=str
)
@pytest.mark.parametrize("own", ["cross_attentions", "decoder_attentions"])
def test_every_cache_of_an_encoder_decoder(own: str, cache: dict[str, Any]) -> None:
    model, given = made("t5"), inputs("t5")
    where, keys = (None, None) if own[0] == "c" else (lambda call: not call.cross, slice(0, 8))
    settings = {**given, **SEARCHES["beams"], **cache, "max_new_tokens": 5}
    found = generate(model, keys, where=where, **settings)
    sequences = found.output.sequences
    wanted = expected(taught(model, given, sequences, own), sequences, 1)
    same(found, wanted if keys is None else with_future(wanted, 8))


@pytest.mark.newer("transformers>=5")
def test_a_captioner_made_of_two_models_each_of_which_could_write() -> None:
    encoder = transformers.ViTConfig(**{k: v for k, v in PICTURE.items() if k != "model_type"})
    decoder = transformers.GPT2Config(**MODELS["gpt2"][2], add_cross_attention=True)
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    model = transformers.VisionEncoderDecoderModel(config).eval()
    given = {"pixel_values": noise(2, 3, 24, 24)}
    found = generate(model, **given, **SEARCHES["beams"], max_new_tokens=5, min_new_tokens=5,
                     decoder_start_token_id=1, pad_token_id=0, eos_token_id=END)  # fmt: skip
    model.set_attn_implementation("eager")
    with torch.no_grad():
        output = model(given["pixel_values"].repeat_interleave(2, dim=0), output_attentions=True,
                       decoder_input_ids=found.output.sequences)  # fmt: skip
    whole = torch.stack(output.cross_attentions, dim=1)
    wanted = expected(whole, found.output.sequences, 1)
    torch.testing.assert_close(found.attention.weights, wanted, atol=1e-6, rtol=0)


@pytest.mark.long
@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("search", ["greedy", "beams"])
def test_a_decoder_that_crosses_to_an_image_looks_at_the_image(search: str, cache: bool) -> None:
    """BLIP is no encoder-decoder by its configuration, and reads the image as one."""
    text = {key: value for key, value in TEXT.items() if key != "num_key_value_heads"}
    text |= {"encoder_hidden_size": 32, "is_decoder": True, "sep_token_id": END}
    config = transformers.BlipConfig(text_config=text, vision_config=PICTURE)
    model = transformers.BlipForConditionalGeneration(config).eval()
    given = {"pixel_values": noise(2, 3, 24, 24), "input_ids": torch.tensor([[1, 5], [1, 7]])}
    settings = {**SEARCHES[search], "max_new_tokens": 4, "min_new_tokens": 4, "use_cache": cache}
    found = generate(model, **given, **settings)
    sequences = found.output.sequences
    copies = len(sequences) // 2
    with torch.no_grad():
        states = model.vision_model(given["pixel_values"]).last_hidden_state
        model.text_decoder.set_attn_implementation("eager")
        output = model.text_decoder(
            sequences, encoder_hidden_states=states.repeat_interleave(copies, dim=0),
            output_attentions=True, use_cache=False,
        )  # fmt: skip
    whole = torch.stack(output.cross_attentions, dim=1)
    assert found.attention.weights.shape[-1] == 10  # nine cells and the class token
    prompt = sequences.shape[1] - found.attention.weights.shape[3]
    torch.testing.assert_close(
        found.attention.weights, expected(whole, sequences, prompt), atol=1e-6, rtol=0
    )
    own = generate(model, where=lambda call: not call.cross, **given, **settings)
    assert own.attention.weights.shape[-1] == prompt


@pytest.mark.newer("transformers>=5")
def test_an_image_encoder_inside_the_pass_is_left_out() -> None:
    """GIT puts its image before the prompt, and reads it in the first pass."""
    text = {key: value for key, value in TEXT.items() if key != "num_key_value_heads"}
    config = transformers.GitConfig(vision_config=PICTURE, **text)
    model = transformers.GitForCausalLM(config).eval()
    ids, pixels = words(padded=0)["input_ids"], noise(2, 3, 24, 24)
    found = generate(model, input_ids=ids, pixel_values=pixels, do_sample=False, max_new_tokens=4)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        output = model(found.output.sequences, pixel_values=pixels, output_attentions=True)
    whole, first = torch.stack(output.attentions, dim=1), 10 + 9  # cells and class token, prompt
    gone = over(found.output.sequences, 9)[:, None, None, :, None]
    wanted = whole[:, :, :, first - 1 : -1, :first] * ~gone
    torch.testing.assert_close(found.attention.weights, wanted, atol=1e-6, rtol=0)


@pytest.mark.long
def test_a_prompt_of_embeddings() -> None:
    model, given = made("llama"), words()
    embedded = {**given, "inputs_embeds": model.get_input_embeddings()(given["input_ids"]).detach()}
    del embedded["input_ids"]
    for search in ("greedy", "beams"):
        plain = generate(model, **given, **SEARCHES[search], max_new_tokens=5)
        found = generate(model, **embedded, **SEARCHES[search], max_new_tokens=5)
        assert torch.equal(found.output.sequences, plain.output.sequences[:, 9:])
        torch.testing.assert_close(found.attention.weights, plain.attention.weights)


def test_a_prompt_that_is_in_the_cache_already() -> None:
    model, given = made("mistral"), words(padded=0)
    with torch.no_grad():
        past = model(given["input_ids"][:, :6], use_cache=True).past_key_values
    found = generate(model, **given, past_key_values=past, do_sample=False, max_new_tokens=5)
    sequences = found.output.sequences
    same(found, expected(taught(model, given, sequences), sequences, 9)[..., :9])


def test_calls_kept_without_each_outlive_a_cache_that_moves() -> None:
    kind, config, settings = MODELS["mistral"]
    settings = {**settings, "num_key_value_heads": 4}  # else keys are copied for the heads
    model = getattr(transformers, kind)(getattr(transformers, config)(**settings)).eval()
    with watch(model) as trace, watch(model, each=lambda call: call.weights()) as live:
        model.generate(words(3, padded=0)["input_ids"], max_new_tokens=8, min_new_tokens=8,
                       do_sample=False, cache_implementation="static")  # fmt: skip
    for call, weights in zip(trace.calls, live.results, strict=True):
        torch.testing.assert_close(call.weights(), weights)


def with_future(rows: Tensor, count: int) -> Tensor:
    """The first `count` keys; those past the last query do not exist yet, and are zero."""
    return torch.nn.functional.pad(rows, (0, max(count - rows.shape[-1], 0)))[..., :count]


# --- what is asked for, and no more


def test_keys_stand_at_other_places_in_each_sample() -> None:
    model, given = made("llama"), words()
    at = torch.tensor([[2, 0, -1], [8, 4, 3]])
    found = generate(model, at, **given, **SEARCHES["beams"], max_new_tokens=5)
    sequences = found.output.sequences
    whole = expected(taught(model, given, sequences), sequences, 9)
    at = at.repeat_interleave(2, dim=0)
    wanted = torch.stack([whole[i][..., at[i].clamp_min(0)] for i in range(4)])
    same(found, wanted * (at >= 0)[:, None, None, None])
    assert not found.attention.visible[:2, :, 2].any()
    assert found.attention.kind is Kind.SUBPROBABILITY


@pytest.mark.newer("transformers>=5")
def test_a_span_keeps_its_name_shape_and_geometry() -> None:
    model, given = made("llava"), inputs("llava")
    photos = PixelGeometry.join([PixelGeometry.identity(1, (24, 24))] * 2)
    photos = replace(photos, offset=torch.tensor([[0.0, 0], [3, 5]], dtype=torch.float64))
    image = Span("image", (3, 3), slice(4, 13), photos)
    seen = []

    def looking(row: AttentionMap) -> AttentionMap:
        seen.append(row.keys.find("image").geometry.offset[:, 1].tolist())
        return row

    found = generate(model, image, reduce=looking, **given, **SEARCHES["beams"], max_new_tokens=4)
    assert seen[0] == [0, 0, 0, 5, 5, 5]
    kept = found.attention.keys.find("image")
    assert kept.shape == (3, 3) and kept.geometry.offset[:, 1].tolist() == [0, 0, 5, 5]
    sequences = found.output.sequences
    same(found, expected(taught(model, given, sequences), sequences, 14)[..., 4:13])


@pytest.mark.long
def test_layers_heads_and_a_reduction_of_each_token() -> None:
    model, given = made("llama"), words()
    settings = {**given, **SEARCHES["beams"], "max_new_tokens": 5}
    whole = generate(model, **settings).attention
    some = generate(model, layers=[1], heads=[3, 0], **settings).attention
    torch.testing.assert_close(some.weights, whole.weights[:, [1]][:, :, [3, 0]])
    mean = generate(model, reduce=lambda row: row.over_heads().over_layers(), **settings).attention
    torch.testing.assert_close(mean.weights, whole.over_heads().over_layers().weights)
    assert mean.kind is Kind.SUBPROBABILITY
    most = generate(model, reduce=lambda row: row.over_layers(torch.amax), **settings).attention
    torch.testing.assert_close(most.weights, whole.weights.amax(dim=1, keepdim=True))
    assert most.kind is Kind.AMOUNT
    with pytest.raises(ValueError, match=r"6 samples.*query"):
        generate(model, reduce=lambda row: row.select(torch.tensor([0])), **settings)


def test_rows_end_where_a_sequence_ends() -> None:
    model, given = made("llama"), words()
    settings = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 0}
    free = generate(model, **given, **settings, eos_token_id=None)
    first, second = free.output.sequences[:, 9:].tolist()
    stop = next(token for token in first[1:] if token not in second)
    found = generate(model, **given, **settings, eos_token_id=[stop])
    rows = first.index(stop) + 1
    assert found.attention.rows[0].tolist() == [n < rows for n in range(6)]
    assert found.attention.rows[1].all()
    assert not found.attention.weights[0, :, :, rows:].any()
    torch.testing.assert_close(found.attention.weights[1], free.attention.weights[1])
    config = transformers.GenerationConfig(**settings, eos_token_id=stop)
    again = generate(model, **given, generation_config=config)
    assert config.return_dict_in_generate is not True, "the user's own is left alone"
    torch.testing.assert_close(again.attention.weights, found.attention.weights)


class Tensors:
    """Every tensor storage that is reachable from an object, by its address."""

    def __init__(self, *roots: Any) -> None:
        self.bytes: dict[int, int] = {}
        for root in roots:
            self._add(root, set())

    def _add(self, thing: Any, met: set[int]) -> None:
        if id(thing) in met or isinstance(thing, (nn.Module, type)):
            return
        met.add(id(thing))
        if isinstance(thing, Tensor):
            storage = thing.untyped_storage()
            self.bytes[storage.data_ptr()] = storage.nbytes()
        elif isinstance(thing, dict):
            for value in thing.values():
                self._add(value, met)
        elif isinstance(thing, (list, tuple)):
            for value in thing:
                self._add(value, met)
        elif hasattr(thing, "__dict__"):
            self._add(vars(thing), met)


@pytest.mark.parametrize("search", ["greedy", "beams"])
def test_nothing_is_kept_but_the_rows_asked_for(
    search: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is held while the model writes depends on the keys asked for, not on the prompt."""
    model, held = made("llama"), {}
    settings = {"keys": slice(2, 5), "layers": [0], "heads": [1], **SEARCHES[search]}
    generate(model, **settings, **words(), max_new_tokens=2)  # from now on its routes are known
    choose = generation._TokenRows.__call__

    def measuring(self: Any, written: Tensor, scores: Tensor) -> Tensor:
        result = choose(self, written, scores)
        waiting = [] if self.waiting is None else self.waiting.queries
        kept = Tensors(self.tokens, self.layers, waiting, STATE.events.since(None))
        held[written.shape[1]] = sum(kept.bytes.values())
        return result

    monkeypatch.setattr(generation._TokenRows, "__call__", measuring)
    sizes = []
    for count in (9, 40):
        held.clear()
        given = words(count, padded=0)
        generate(model, **settings, **given, max_new_tokens=6, min_new_tokens=6)
        sizes.append(list(held.values()))
    assert sizes[0] == sizes[1]
    rows = 2 * (3 if search == "beams" else 1)
    one = rows * 3 * (4 + 1)  # three weights in float32 and three bits of mask a row
    if search == "beams":  # each row is read when its token is generated
        assert sizes[0] == [one * step for step in range(1, 7)]
    else:  # later tokens wait: one query of four heads of eight numbers for each sample
        query = rows * 4 * 8 * 4
        assert sizes[0] == [one, 2 * one, *(2 * one + query * step for step in range(1, 5))]


# --- edits


def hide(at: Tensor) -> Callable[[Any], Tensor]:
    """A bias that hides one key of each sample from every query."""

    def make(call: Any) -> Tensor | None:
        b, _, _, k = call.shape
        own = at.repeat_interleave(b // len(at))
        hidden = torch.arange(k) == own[:, None]
        return torch.zeros(b, 1, 1, k).masked_fill(hidden[:, None, None], -torch.inf)

    return make


@pytest.mark.long
@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("cache", [None, "static"])
def test_an_edit_of_the_prompt_is_the_same_while_writing(search: str, cache: str | None) -> None:
    """Hidden from all while writing, hidden from all in one pass over what was written."""
    model, given = made("llama"), words(padded=0)
    bias = Bias(hide(torch.tensor([3, 5])))
    settings = {**given, **SEARCHES[search], "max_new_tokens": 6, "cache_implementation": cache}
    torch.manual_seed(0)
    plain = generate(model, **settings)
    torch.manual_seed(0)
    found = generate(model, edit=bias, **settings)
    assert not torch.equal(plain.output.sequences, found.output.sequences)
    sequences = found.output.sequences
    with torch.no_grad(), watch(model, edit=bias) as trace:
        model(sequences)
    whole = trace.map().weights
    assert whole[0, ..., 3].max() == 0
    same(found, expected(whole, sequences, 9)[..., :9])


def test_an_edit_of_weights_is_the_same_while_writing() -> None:
    """Half of what goes to one key goes nowhere, in every layer and step, beams and all."""
    model, given = made("gpt2"), words(padded=0)

    def halve(call: Any, weights: Tensor) -> Tensor:
        factor = torch.ones(weights.shape[-1])
        factor[4] = 0.5
        return weights * factor

    found = generate(model, edit=halve, **given, **SEARCHES["beams"], max_new_tokens=5)
    sequences = found.output.sequences
    with torch.no_grad(), watch(model, edit=halve) as trace:
        model(sequences)
    same(found, expected(trace.map().weights, sequences, 9)[..., :9])
    assert found.attention.kind is Kind.AMOUNT


class Kernels(TorchDispatchMode):
    """The attention kernels that run, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "attention" in str(func):
            self.ran.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_bias_stays_on_the_fused_kernel() -> None:
    model, given = made("gpt2"), words(padded=0)
    settings = {**given, "do_sample": False, "max_new_tokens": 3, "min_new_tokens": 3}
    with Kernels() as plain:
        model.generate(**settings)
    with Kernels() as biased:
        generate(model, edit=Bias(hide(torch.tensor([3, 5]))), **settings)
    assert biased.ran == plain.ran
    assert len(plain.ran) == 2 * 3 and "flash" in plain.ran[0]


# --- rejected inputs


class Silent(nn.Module):
    """A model that cannot write."""


def test_what_cannot_be_followed_is_refused() -> None:
    model, given = made("llama"), words(padded=0)
    with pytest.raises(ValueError, match="assistant_model"):
        generate(model, **given, assistant_model=made("llama"))
    with pytest.raises(ValueError, match="prompt_lookup_num_tokens"):
        generate(model, **given, prompt_lookup_num_tokens=2)
    config = transformers.GenerationConfig(prompt_lookup_num_tokens=2)
    with pytest.raises(ValueError, match="prompt_lookup_num_tokens"):
        generate(model, **given, generation_config=config)
    with pytest.raises(ValueError, match="custom_generate"):
        generate(model, **given, custom_generate=lambda **_: None)
    with pytest.raises(ValueError, match="ran twice"):
        generate(model, **given, guidance_scale=2.0, max_new_tokens=3)
    with pytest.raises(ValueError, match=r"Silent.*generate"):
        generate(Silent())
    with pytest.raises(ValueError, match="needs a stop"):
        generate(model, slice(3, None), **given)
    with pytest.raises(ValueError, match="negative positions"):
        generate(model, slice(-3, 8), **given)
    with pytest.raises(ValueError, match=r"3 samples.* 2 seq"):
        generate(model, torch.zeros(3, 1, dtype=torch.long), **given)
    with pytest.raises(ValueError, match="no attention call"):
        generate(model, where=lambda call: False, **given, max_new_tokens=2)


def test_a_prompt_is_not_taken_for_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `model.generate(ids)`; one prompt fitted, and the model wrote from nothing."""
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)  # as for users
    with pytest.raises(TypeError, match="model, input_ids="):
        generate(made("llama"), torch.tensor([[5, 6, 7]]), max_new_tokens=2)
    with pytest.raises(TypeError, match=r"find\('image'\)"):
        generate(made("llama"), keys="image", **words(padded=0))  # type: ignore[arg-type]


def test_what_the_models_own_settings_say_is_heeded() -> None:
    model, given = made("llama"), words(padded=0)
    model.generation_config.prompt_lookup_num_tokens = 2
    with pytest.raises(ValueError, match="prompt_lookup_num_tokens"):
        generate(model, **given)


@pytest.mark.long
def test_two_threads_write_with_one_model() -> None:
    model = made("llama")
    tasks = [
        {**words(count, padded=0), "do_sample": False, "max_new_tokens": 12, "min_new_tokens": 12}
        for count in (7, 11)
    ]
    alone = [generate(model, **task).attention.weights for task in tasks]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda task: generate(model, **task).attention.weights, tasks))
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_as_it_was(fails: bool) -> None:
    model, given = made("llama"), words()

    def hooks() -> list[tuple[int, int]]:
        return [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]

    before, config = hooks(), model.generation_config.to_dict()

    def fail(row: Any) -> Any:
        if fails:
            raise RuntimeError("stop")
        return row

    with pytest.raises(RuntimeError, match="stop") if fails else nullcontext():
        generate(model, reduce=fail, **given, max_new_tokens=2)
    assert hooks() == before
    assert model.generation_config.to_dict() == config
    assert STATE.sessions == [] and STATE.module_stack == []


def test_watching_does_not_change_what_is_written() -> None:
    model, given = made("llama"), words()
    settings = {**given, "do_sample": True, "max_new_tokens": 8}
    torch.manual_seed(3)
    alone = model.generate(**settings)
    torch.manual_seed(3)
    assert torch.equal(generate(model, **settings).output.sequences, alone)
    called = []

    def spy(ids: Tensor, scores: Tensor) -> Tensor:
        called.append(ids.shape[1])
        return scores

    processors = transformers.LogitsProcessorList([spy])
    generate(model, **given, max_new_tokens=2, min_new_tokens=2, logits_processor=processors)
    assert called == [9, 10] and len(processors) == 1


def test_a_tokenizer_names_the_generated_tokens_and_those_of_the_prompt() -> None:
    model = made("gpt2")
    prompt = torch.tensor([[0, 7, 8, 9], [5, 6, 7, 8]])

    class Letters:
        def decode(self, ids: list[int], **_: Any) -> str:
            return "".join(f" w{n}" for n in ids).lstrip()

    settings: dict[str, Any] = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    settings |= {"input_ids": prompt, "attention_mask": (prompt > 0).long()}
    for more, copies in (({}, 1), ({"num_beams": 3, "num_return_sequences": 2}, 2)):
        found = generate(model, **settings, **more, tokenizer=Letters())
        new, text = found.attention.queries.find("new"), found.attention.keys.find("text")
        for row, sequence in enumerate(found.output.sequences.tolist()):
            spoken = [f"w{n}" for n in sequence]
            assert new.geometry.tokens(row) == spoken[4:]
            assert text.geometry.tokens(row)[1:] == spoken[1:4]
            assert text.geometry.tokens(row)[0] == ("" if row < copies else "w5")
    plain = generate(model, **settings).attention
    assert plain.keys.find("keys").geometry is None and plain.queries.find("new").geometry is None
    # positions that are not the whole prompt keep the name and geometry that they have
    part = generate(model, slice(1, 3), **settings, tokenizer=Letters()).attention
    assert part.keys.find("keys").geometry is None


@pytest.mark.parametrize("inputs", [{"input_ids": torch.ones(1, 2)}, "a text"])
def test_inputs_by_position_are_refused(inputs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)  # as for users
    with pytest.raises(TypeError, match=r"model, \*\*"):
        generate(made("gpt2"), inputs, max_new_tokens=2)
