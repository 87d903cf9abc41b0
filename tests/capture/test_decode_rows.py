"""Rows read from the arguments of the interface are those that the function mode captures."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overt.capture import decode_rows, generation, stacked_calls
from overt.capture.decode_rows import decode_call
from overt.capture.edits import Bias
from overt.capture.generation import GenerationResult, generate
from overt.capture.hf_interface import register_interface
from overt.capture.session import watch
from overt.capture.state import STATE
from tests.capture import test_generation as plain
from tests.capture.test_generation import TEXT, words
from tests.kernel_subprocess import run_cases

transformers = pytest.importorskip("transformers")

WINDOW = {"head_dim": 8, "sliding_window": 5}
PLACES = {"vocab_size": 40, "hidden_size": 32, "max_position_embeddings": 64, "pad_token_id": 0}
plain.MODELS |= {
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", TEXT),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**TEXT, **WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
        | {"query_pre_attn_scalar": 8},
    ),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {**PLACES, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        | {"word_embed_proj_dim": 32, "bos_token_id": 1, "eos_token_id": 2},
    ),
}
WAIT = {"gpt2", "llama", "qwen2", "opt"}  # all layers append to the cache
SEARCHES = {
    "greedy": {"do_sample": False},
    "beams": {"num_beams": 3, "num_return_sequences": 2, "do_sample": False},
}
CACHES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "chunks": {"prefill_chunk_size": 4},
}


class Ways:
    """Counts how the layers of decode steps were captured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.recorded = self.waited = self.captured = 0
        recorded, computed = generation._TokenRows.on_interface, decode_rows.DeferredRows.rows
        called = generation._TokenRows.on_call

        def on_interface(rows: Any, *given: Any) -> bool:
            found = recorded(rows, *given)
            self.recorded += found
            return found

        def on_call(rows: Any, call: Any) -> None:
            self.captured += 1
            called(rows, call)

        def compute(rows: Any, count: int | None = None) -> Any:
            self.waited += len(rows)
            return computed(rows, count)

        monkeypatch.setattr(generation._TokenRows, "on_interface", on_interface)
        monkeypatch.setattr(generation._TokenRows, "on_call", on_call)
        monkeypatch.setattr(decode_rows.DeferredRows, "rows", compute)


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Ways:
    return Ways(monkeypatch)


def learned(name: str, attention: str = "sdpa") -> nn.Module:
    """A model that was watched before, so that its routes are known."""
    model = plain.made(name, attention)
    with torch.no_grad(), watch(model):
        model(**words())
    return model


def by_the_mode(model: nn.Module, *args: Any, **settings: Any) -> GenerationResult:
    """Generate with every call captured by the function mode."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation._TokenRows, "record_decoding", lambda *_, **__: None)
        return generate(model, *args, **settings)


def same(found: GenerationResult, wanted: GenerationResult) -> None:
    assert torch.equal(found.output.sequences, wanted.output.sequences)
    found.attention.check()
    torch.testing.assert_close(found.attention.weights, wanted.attention.weights, atol=2e-6, rtol=0)
    assert torch.equal(found.attention.visible, wanted.attention.visible)
    assert found.attention.kind is wanted.attention.kind
    assert [one.name for one in found.attention.keys.spans] == [
        one.name for one in wanted.attention.keys.spans
    ]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_learned_model_is_recorded_without_the_mode(name: str, ways: Ways) -> None:
    model, given = learned(name), words()
    settings = {**given, **SEARCHES["greedy"], "max_new_tokens": 7, "min_new_tokens": 7}
    found = generate(model, **settings)
    # the prompt and the first new token by the mode, five more tokens from the arguments
    assert (ways.captured, ways.recorded) == (4, 10)
    assert ways.waited == (6 if name in WAIT else 0), "five, and the one that is compared"
    same(found, by_the_mode(model, **settings))


@pytest.mark.long
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen2", "opt", "mistral", "gemma3"])
def test_rows_are_those_of_the_mode(name: str, search: str, cache: str, ways: Ways) -> None:
    model = learned(name)
    given = words(padded=0 if cache == "chunks" else 3)
    settings = {**given, **SEARCHES[search], **CACHES[cache], "max_new_tokens": 7}
    for keys in (None, slice(0, 12), slice(2, 5), torch.tensor([[2, 0, -1, 11], [8, 4, 3, 9]])):
        found = generate(model, keys, **settings)
        assert ways.recorded
        assert bool(ways.waited) == (name in WAIT and search == "greedy")
        same(found, by_the_mode(model, keys, **settings))


@pytest.mark.long
@pytest.mark.parametrize("attention", ["eager", "overt"])
def test_softcaps_are_left_to_the_mode(attention: str, ways: Ways) -> None:
    register_interface()
    model = learned("gemma2", attention)
    settings = {**words(), **SEARCHES["greedy"], "max_new_tokens": 5, "min_new_tokens": 5}
    found = generate(model, slice(0, 12), **settings)
    assert not ways.recorded
    same(found, by_the_mode(model, slice(0, 12), **settings))
    whole = plain.taught(model, words(), found.output.sequences)
    wanted = plain.expected(whole, found.output.sequences, 9)
    plain.same(found, plain.with_future(wanted, 12))


@pytest.mark.long
@pytest.mark.parametrize("own", [None, lambda call: not call.cross])
def test_encoder_decoders(own: Any, ways: Ways) -> None:
    model, given = plain.made("bart"), plain.inputs("bart")
    with torch.no_grad(), watch(model):
        model(**given)
    settings = {**given, "do_sample": False, "max_new_tokens": 7, "min_new_tokens": 7}
    keys = None if own is None else slice(0, 6)
    found = generate(model, keys, where=own, **settings)
    assert ways.recorded
    same(found, by_the_mode(model, keys, where=own, **settings))


@pytest.mark.long
def test_layers_heads_and_a_reduction(ways: Ways) -> None:
    model = learned("llama")
    settings = {**words(), **SEARCHES["greedy"], "max_new_tokens": 6}
    for some in ({"layers": [1]}, {"heads": [3, 0]}, {"layers": [0], "heads": [-1]},
                 {"where": lambda call: call.name.startswith("model.layers.1")}):  # fmt: skip
        same(generate(model, **some, **settings), by_the_mode(model, **some, **settings))
    assert ways.waited
    rows = []

    def reduce(row: Any) -> Any:
        rows.append(row.weights.shape)
        return row.over_heads()

    waited = ways.waited
    found = generate(model, reduce=reduce, **settings)
    assert len(rows) == found.attention.shape[3] and ways.waited == waited, "as they are generated"
    same(found, by_the_mode(model, reduce=lambda row: row.over_heads(), **settings))


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_tokens_wait_in_groups(limit: int, ways: Ways, monkeypatch: pytest.MonkeyPatch) -> None:
    model = learned("llama")
    settings = {**words(), **SEARCHES["greedy"], "max_new_tokens": 9, "min_new_tokens": 9}
    wanted = by_the_mode(model, **settings)
    monkeypatch.setattr(decode_rows, "MAX_TOKENS", limit)
    same(generate(model, **settings), wanted)
    assert ways.waited == 8


@pytest.mark.parametrize("number", [torch.float64, torch.bfloat16])
def test_formats(number: torch.dtype, ways: Ways) -> None:
    model = plain.made("llama").to(number)
    with torch.no_grad(), watch(model):
        model(**words())
    settings = {**words(), **SEARCHES["greedy"], "max_new_tokens": 5, "min_new_tokens": 5}
    same(generate(model, **settings), by_the_mode(model, **settings))
    assert ways.waited == 4


def test_a_difference_is_reported_and_the_mode_is_used(
    ways: Ways, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = learned("llama")
    settings = {**words(), **SEARCHES["greedy"], "max_new_tokens": 5, "min_new_tokens": 5}
    wanted = by_the_mode(model, **settings)

    def wrong(*given: Any) -> Any:
        found = decode_call(*given)
        last = model.model.layers[1].self_attn
        return found._replace(scale=2 * found.scale) if found.module is last else found

    monkeypatch.setattr(generation, "decode_call", wrong)
    with pytest.warns(UserWarning, match=r"layers.1.self_attn"):
        found = generate(model, **settings)
    assert not ways.recorded
    same(found, wanted)


@pytest.mark.parametrize("search", SEARCHES)
def test_wrong_kernels_are_found(search: str, ways: Ways, monkeypatch: pytest.MonkeyPatch) -> None:
    model = learned("llama")
    settings = {**words(), **SEARCHES[search], "max_new_tokens": 5, "min_new_tokens": 5}
    wanted = by_the_mode(model, **settings)
    for module in (decode_rows, stacked_calls):
        right = module.block_log_softmax
        monkeypatch.setattr(module, "block_log_softmax", lambda *a, right=right: right(*a) - 0.01)
    with pytest.warns(UserWarning, match=r"layers\..*itself"):
        found = generate(model, **settings)
    assert not ways.recorded
    same(found, wanted)
    with pytest.warns(UserWarning, match=r"layers\..*itself"):
        same(by_the_mode(model, **settings), wanted)


def test_a_call_that_is_not_certain_is_captured_among_others(
    ways: Ways, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, met = learned("llama"), []
    settings = {**words(), **SEARCHES["greedy"], "max_new_tokens": 9, "min_new_tokens": 9}
    wanted = by_the_mode(model, **settings)
    ways.captured = 0

    def uncertain(*given: Any) -> Any:
        met.append(given)
        return None if len(met) in (7, 10) else decode_call(*given)

    monkeypatch.setattr(generation, "decode_call", uncertain)
    same(generate(model, **settings), wanted)
    # two of the prompt, two that are compared, two that are not certain
    assert (ways.captured, ways.recorded, ways.waited) == (6, 12, 6)


def test_a_cache_that_loses_keys_raises(ways: Ways) -> None:
    model = learned("llama")

    class Crop(transformers.LogitsProcessor):
        def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
            if ids.shape[1] == 13:
                for layer in cache.layers:
                    layer.keys, layer.values = layer.keys[:, :, :2], layer.values[:, :, :2]
            return scores

    cache = transformers.DynamicCache()
    crop = transformers.LogitsProcessorList([Crop()])
    with pytest.raises((RuntimeError, ValueError), match="12 keys|twice"):
        generate(model, input_ids=words(padded=0)["input_ids"], past_key_values=cache,
                 do_sample=False, max_new_tokens=8, logits_processor=crop)  # fmt: skip


def test_an_edit_or_an_outer_session_is_left_to_the_mode(ways: Ways) -> None:
    model = learned("llama")
    settings = {**words(padded=0), **SEARCHES["greedy"], "max_new_tokens": 4}
    edit = Bias(lambda call: torch.zeros(call.shape[-1]))
    generate(model, edit=edit, **settings)
    with watch(model) as trace:
        found = generate(model, **settings)
    assert not ways.recorded
    assert len(trace.calls) == 2 * found.attention.shape[3]
    assert STATE.decode_recorder is None


def arguments(**changed: Any) -> tuple[Any, dict[str, Any]]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward as function

    given = {"query": torch.rand(2, 4, 1, 8), "key": torch.rand(2, 2, 6, 8), "mask": None}
    given |= {name: changed.pop(name) for name in list(changed) if name in given}
    args = nn.Identity(), given["query"], given["key"], given["key"], given["mask"]
    with torch.no_grad():
        return decode_call(function, args, {"dropout": 0.0, **changed}), given


@pytest.mark.parametrize(
    "changed",
    [
        {"query": torch.rand(2, 4, 2, 8)},
        {"query": torch.rand(2, 4, 1, 8).double()},
        {"query": nn.Parameter(torch.rand(2, 4, 1, 8))},
        {"key": torch.rand(2, 3, 6, 8)},
        {"mask": torch.ones(2, 1, 1, 7, dtype=torch.bool)},
        {"mask": torch.ones(6, dtype=torch.bool)},
        {"dropout": 0.1},
        {"softcap": 30.0},
        {"position_bias": torch.zeros(1)},
        {"s_aux": torch.zeros(4)},
    ],
    ids=[
        "two queries",
        "two dtypes",
        "a parameter",
        "three key heads",
        "a longer mask",
        "a mask of one axis",
        "dropout",
        "softcap",
        "position bias",
        "sinks",
    ],
)
def test_what_is_not_certain_is_not_recorded(changed: dict[str, Any]) -> None:
    assert arguments(**changed)[0] is None


@pytest.mark.parametrize("mask", [None, torch.rand(2, 1, 1, 6) > 0.3, torch.randn(2, 1, 1, 6)])
def test_a_recorded_call_is_the_one_of_the_function(mask: Tensor | None) -> None:
    call, given = arguments(mask=mask, scaling=0.3, cache_position=torch.zeros(1))
    value = given["key"]
    weights = call.source.weights()
    wanted = torch.nn.functional.scaled_dot_product_attention(
        given["query"], given["key"], value, mask, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(weights @ value.repeat_interleave(2, dim=1), wanted)


def test_a_function_of_others_is_not_recorded() -> None:
    given = nn.Identity(), torch.rand(1, 1, 1, 8), torch.rand(1, 1, 2, 8), None, None
    with torch.no_grad():
        assert decode_call(arguments, given, {}) is None
    assert decode_call(arguments, given[:3], {}) is None


# --- compiled steps


@pytest.mark.long
@pytest.mark.newer("transformers>=5")
def test_compiled_steps_are_captured_or_raise() -> None:
    run_cases(Path(__file__).with_name("decode_rows_cases.py"), {})
