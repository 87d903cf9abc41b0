"""Generation with an evicted cache is generation whose evicted keys are hidden, head by head."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

import overt  # noqa: E402
from overt.capture import Bias, Call  # noqa: E402
from overt.nn.cache_eviction import (  # noqa: E402
    ScoreRule,
    accumulated_attention,
    evict_cache,
    observation_window,
    prefill,
    random_scores,
    recent,
    score_cache,
)
from tests.nn.cache_eviction.decoders import make_decoder, make_prompt  # noqa: E402

STEPS = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
STEPS |= {"return_dict_in_generate": True, "output_logits": True}
SNAP = partial(observation_window, window=3, kernel=3)
RULES: dict[str, tuple[ScoreRule, dict[str, int]]] = {
    "heavy hitters": (accumulated_attention, {"last": 3}),
    "snap": (SNAP, {}),
    "sinks": (recent, {"first": 2}),
    "random": (partial(random_scores, generator=torch.Generator().manual_seed(0)), {}),
}


def logits(output: Any) -> Tensor:
    return torch.stack(output.logits, dim=1)


def hide_positions(positions: dict[int, Tensor], prompt: int) -> Bias:
    """Hide what was evicted from later tokens, per head: the slow copy keeps the whole cache."""

    def bias(call: Call) -> Tensor:
        b, h, q, k = call.shape
        found = torch.zeros(b, h, 1, k)
        layer = int(call.module.layer_idx)  # type: ignore[arg-type]
        if k == q or layer not in positions:
            return found
        kept = positions[layer]
        for i in range(b):
            for head in range(h):
                group = head // (h // kept.shape[1])
                gone = set(range(prompt)) - set(kept[i, group].tolist())
                found[i, head, 0, list(gone)] = -torch.inf
        return found

    return Bias(bias)


def generate_slowly(model: Any, positions: dict[int, Tensor], **inputs: Any) -> Any:
    prompt = next(iter(positions.values())).max() + 1
    with overt.watch(model, edit=hide_positions(positions, int(prompt))):
        return model.generate(**inputs, **STEPS)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        *(("llama", rule) for rule in RULES),
        ("gpt2", "heavy hitters"),
        ("gpt2", "snap"),
        ("qwen2", "snap"),
        ("qwen2 with windows", "heavy hitters"),
        ("mistral without windows", "heavy hitters"),
    ],
)
def test_generation_equals_that_with_evicted_keys_hidden(name: str, rule: str) -> None:
    model, prompt = make_decoder(name), make_prompt(padding=(0, 3))
    score, protected = RULES[rule]
    with evict_cache(model, keep=5, score=score, **protected) as evicted:
        output = model.generate(**prompt, **STEPS)
    layers = [0] if name == "qwen2 with windows" else [0, 1]
    assert sorted(evicted.positions) == layers
    held = [layer.keys.shape[2] for layer in output.past_key_values.layers]
    assert [held[layer] for layer in layers] == [5 + 3] * len(layers)  # the last is not read
    assert output.past_key_values.get_seq_length() == 12 + 3
    slow = generate_slowly(model, evicted.positions, **prompt)
    torch.testing.assert_close(logits(output), logits(slow), atol=2e-5, rtol=1e-4)
    plain = model.generate(**prompt, **STEPS)
    torch.testing.assert_close(logits(output)[:, 0], logits(plain)[:, 0])  # of the full prompt
    assert (logits(output) - logits(plain)).abs().max() > 1e-2


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "qwen2 with windows"])
def test_keeping_everything_changes_nothing(name: str) -> None:
    model, prompt = make_decoder(name), make_prompt(padding=(0, 3))
    with evict_cache(model, keep=12) as evicted:
        output = model.generate(**prompt, **STEPS)
    assert not evicted.positions
    assert torch.equal(logits(output), logits(model.generate(**prompt, **STEPS)))


def test_evicting_what_gets_no_attention_changes_nothing() -> None:
    model, prompt = make_decoder("llama"), make_prompt(padding=(0, 3))
    hidden = 6

    def hide(call: Call) -> Tensor:  # until it is evicted, nobody attends to it
        found = torch.zeros(call.shape[-1])
        found[hidden] = -torch.inf if call.shape[-1] == call.shape[-2] else 0
        return found

    def keep_hidden(call: Call) -> Tensor:
        found = torch.zeros(call.shape[-1])
        found[hidden] = -torch.inf
        return found

    with overt.watch(model, edit=Bias(keep_hidden)):
        plain = model.generate(**prompt, **STEPS)
    with overt.watch(model, edit=Bias(hide)), evict_cache(model, keep=11, last=1) as evicted:
        output = model.generate(**prompt, **STEPS)
    everything = list(range(12))
    for positions in evicted.positions.values():
        assert positions[0].tolist() == [everything[:hidden] + everything[hidden + 1 :]] * 2
    torch.testing.assert_close(logits(output)[:1], logits(plain)[:1], atol=2e-5, rtol=1e-4)


def test_padding_is_never_kept_in_place_of_a_token() -> None:
    model, prompt = make_decoder("gpt2"), make_prompt(padding=(0, 3, 9))
    with evict_cache(model, keep=5) as evicted:
        batch = logits(model.generate(**prompt, **STEPS))
    for positions in evicted.positions.values():
        assert positions[1].min() >= 3
        assert positions[2, :, 2:].tolist() == [[9, 10, 11]] * 4  # all that there is
        assert positions[2, :, :2].max() < 9
    for i, padding in enumerate((0, 3, 9)):  # each sample is what it is alone
        alone = {key: value[i : i + 1, padding:] for key, value in prompt.items()}
        with evict_cache(model, keep=5):
            other = logits(model.generate(**alone, **STEPS))
        torch.testing.assert_close(batch[i : i + 1], other, atol=2e-5, rtol=1e-4)


def test_beams_take_their_evicted_cache_along() -> None:
    model, prompt = make_decoder("llama"), make_prompt(padding=(0, 3))
    beams = {**prompt, "num_beams": 3}
    with evict_cache(model, keep=5, score=SNAP) as evicted:
        output = model.generate(**beams, **STEPS)
    slow = generate_slowly(model, evicted.positions, **beams)
    assert torch.equal(output.sequences, slow.sequences)
    torch.testing.assert_close(output.sequences_scores, slow.sequences_scores)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("padding", [(0, 0), (0, 3)])
def test_a_prefilled_cache_is_continued_at_its_true_positions(
    name: str, padding: tuple[int, int]
) -> None:
    model, prompt = make_decoder(name), make_prompt(padding=padding)
    question = torch.tensor([[7, 8, 9], [5, 6, 7]])
    both = {
        "input_ids": torch.cat([prompt["input_ids"], question], dim=1),
        "attention_mask": torch.cat([prompt["attention_mask"], torch.ones_like(question)], dim=1),
    }
    cache = prefill(model, keep=5, score=SNAP, **prompt)
    assert cache.get_seq_length() == 12
    first = model.generate(**both, past_key_values=copy.deepcopy(cache), **STEPS)
    again = model.generate(**both, past_key_values=copy.deepcopy(cache), **STEPS)
    assert torch.equal(first.sequences, again.sequences)
    with evict_cache(model, keep=5, score=SNAP) as evicted:
        prefill(model, keep=12, **prompt)
    assert evicted.positions
    full = prefill(model, keep=12, **prompt)
    assert full.layers[0].keys.shape[2] == 12
    with overt.watch(model, edit=hide_positions(evicted.positions, 12)):
        slow = model.generate(**both, past_key_values=full, **STEPS)
    torch.testing.assert_close(logits(first), logits(slow), atol=2e-5, rtol=1e-4)


class Wrapper(nn.Module):
    """As PEFT wraps a model: any arguments, and `generate` of the model inside."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def generate(self, **kwargs: Any) -> Any:
        return self.model.generate(**kwargs)


def test_padding_is_found_inside_of_a_wrapper() -> None:
    model, prompt = make_decoder("llama"), make_prompt(padding=(0, 9))
    wrapper = Wrapper(model)
    kept = []
    for call in (lambda: wrapper.generate(**prompt, **STEPS), lambda: wrapper(**prompt)):
        with evict_cache(wrapper, keep=5) as evicted:
            call()
        kept.append(evicted.positions[0][1, :, 2:].tolist())
    assert kept == [[[9, 10, 11]] * 2] * 2
    # given by position
    with evict_cache(model, keep=5) as evicted:
        model(prompt["input_ids"], prompt["attention_mask"])
    assert evicted.positions[0][1, :, 2:].tolist() == [[9, 10, 11]] * 2


def test_padding_is_found_after_an_interrupted_pass() -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    model, prompt = make_decoder("llama"), make_prompt(padding=(0, 0))
    with evict_cache(model, keep=5) as expected:
        model(**prompt)
    with evict_cache(model, keep=5) as evicted:
        handle = model.model.layers[0].register_forward_pre_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            model(**make_prompt(padding=(0, 9)))
        handle.remove()
        model(**prompt)
    assert torch.equal(evicted.positions[0], expected.positions[0])


def test_several_prompts_in_one_block_and_a_model_left_as_it_was() -> None:
    model = make_decoder("llama")
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    with evict_cache(model, keep=5) as evicted:
        for n in (12, 9, 4):
            model.generate(**make_prompt(n, padding=(0,)), **STEPS)
            assert len(evicted.positions) == (0 if n == 4 else 2)
            for positions in evicted.positions.values():
                assert positions.max() < n
    assert [len(module._forward_pre_hooks) for module in model.modules()] == hooks
    plain = model.generate(**make_prompt(), **STEPS)
    assert plain.past_key_values.layers[0].keys.shape[2] == 12 + 3


def test_scores_of_the_block_are_those_of_score_cache() -> None:
    model, prompt = make_decoder("llama"), make_prompt(padding=(0, 3))
    scores = score_cache(model, accumulated_attention, **prompt)
    with evict_cache(model, keep=4) as evicted:
        model.generate(**prompt, **STEPS)
    # padding stays in front, so the largest of the second layer are found among real tokens only
    largest = scores[:, 1].topk(4, dim=-1).indices.sort(dim=-1).values
    assert torch.equal(evicted.positions[1], largest)


# --- what cannot be evicted


@pytest.mark.parametrize(
    ("name", "attention", "settings", "message"),
    [
        ("mistral", "sdpa", {}, "sliding window"),
        ("llama", "eager", {}, "written out.*sdpa"),
        ("llama", "sdpa", {"use_cache": False}, "use_cache=True"),
        ("llama", "sdpa", {"cache_implementation": "static"}, "StaticCache"),
        ("llama", "sdpa", {"prefill_chunk_size": 7}, "prefill_chunk_size"),
    ],
)
def test_errors_say_what_to_do(
    name: str, attention: str, settings: dict[str, Any], message: str
) -> None:
    model, prompt = make_decoder(name, attention), make_prompt(padding=(0, 0))
    with pytest.raises(ValueError, match=message), evict_cache(model, keep=5):
        model.generate(**prompt, **{**STEPS, **settings})


def test_a_cache_that_forgets_the_windows_is_refused() -> None:
    model, prompt = make_decoder("qwen2 with windows"), make_prompt(padding=(0, 0))
    with pytest.raises(ValueError, match=r"config=model"), evict_cache(model, keep=5):
        model(**prompt, past_key_values=transformers.DynamicCache())


def test_padding_on_the_right_is_refused() -> None:
    model, prompt = make_decoder("llama"), make_prompt(padding=(0, 3))
    prompt = {key: value.flip(1) for key, value in prompt.items()}
    with pytest.raises(ValueError, match="padding_side"):
        prefill(model, keep=5, **prompt)
    with pytest.raises(ValueError, match=r"\(2, 1, 12, 12\)"):
        prefill(model, keep=5, **prompt | {"attention_mask": torch.ones(2, 1, 12, 12).bool()})


def test_a_position_bias_is_refused() -> None:
    model, prompt = make_decoder("llama"), make_prompt(padding=(0, 0))

    def slope(call: Call) -> Tensor:
        return torch.arange(call.shape[-1]) * -0.1

    with (
        pytest.raises(ValueError, match="ALiBi"),
        overt.watch(model, edit=Bias(slope)),
        evict_cache(model, keep=5),
    ):
        model.generate(**prompt, **STEPS)


def test_an_encoder_decoder_is_refused() -> None:
    sizes = {"vocab_size": 40, "d_model": 16, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(**sizes, d_kv=8, decoder_start_token_id=0, pad_token_id=0)
    model = transformers.T5ForConditionalGeneration(config).eval()
    with pytest.raises(ValueError, match="encoder-decoder"), evict_cache(model, keep=5):
        model.generate(input_ids=torch.arange(3, 12)[None], max_new_tokens=3)


def test_arguments_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)  # as for users
    model, prompt = make_decoder("llama"), make_prompt(padding=(0, 0))
    with pytest.raises(ValueError, match="keep=3.*last=2"):
        prefill(model, keep=3, first=2, last=2, **prompt)
    with pytest.raises(ValueError, match=r"got \(2, 4, 12\)"):
        prefill(model, keep=3, score=lambda cached: torch.rand(2, 4, 12), **prompt)
