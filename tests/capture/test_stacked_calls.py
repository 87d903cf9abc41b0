"""Stacked calls: the same weights as call by call, and as few groups as the masks allow."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from overt import watch
from overt.capture import Call, generate
from overt.capture.call import QKCall, Route
from overt.capture.generation import _TokenRows
from overt.capture.stacked_calls import group_stackable, stack_layers, stacked_weights

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 32,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}


def llama(**more: Any) -> nn.Module:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | more)).eval()


def test_layers_are_stacked_on_the_device_of_the_first() -> None:
    one, other = torch.rand(2, 3), torch.rand(2, 3)
    assert torch.equal(stack_layers([one, other]), torch.stack([one, other], dim=1))
    assert stack_layers([one.to("meta"), other]).is_meta


def windowed(**more: Any) -> nn.Module:
    """Return a model whose layers alternate between a sliding window and all keys."""
    torch.manual_seed(0)
    kinds = ["sliding_attention", "full_attention"] * 2
    settings = SIZES | {"sliding_window": 4, "layer_types": kinds} | more
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**settings)).eval()


def capped() -> nn.Module:
    """Return a model whose scores are capped, with eager attention."""
    torch.manual_seed(0)
    config = transformers.Gemma2Config(**SIZES | {"sliding_window": 4})
    return transformers.Gemma2ForCausalLM(config).eval()


def padded(left: bool = True) -> dict[str, torch.Tensor]:
    """Return two samples, the second with padding."""
    ids = torch.randint(1, 32, (2, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, slice(0, 3) if left else slice(4, 7)] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def captured(model: nn.Module, inputs: dict[str, torch.Tensor]) -> list[Call]:
    with torch.no_grad(), watch(model) as trace:
        model(**inputs)
    return list(trace.calls)


def assert_equal_call_by_call(calls: list[Call], rows: slice) -> list[list[int]]:
    groups = group_stackable(calls)
    assert sorted(place for group in groups for place in group) == list(range(len(calls)))
    for group in groups:
        some = [calls[place] for place in group]
        alone = torch.stack([call.weights(rows) for call in some], dim=1)
        torch.testing.assert_close(stacked_weights(some, rows), alone, atol=1e-6, rtol=1e-5)
    return groups


@pytest.mark.parametrize("rows", [slice(0, 7), slice(6, 7)])
def test_layers_with_one_mask_are_one_group(rows: slice) -> None:
    calls = captured(llama(), padded())
    assert assert_equal_call_by_call(calls, rows) == [[0, 1, 2, 3]]


def test_causal_layers_without_mask_are_one_group() -> None:
    ids = padded()["input_ids"].clamp_min(1)
    assert assert_equal_call_by_call(captured(llama(), {"input_ids": ids}), slice(2, 5)) == [
        [0, 1, 2, 3]
    ]


def test_layers_with_other_masks_are_other_groups() -> None:
    calls = captured(windowed(), padded())
    assert assert_equal_call_by_call(calls, slice(0, 7)) == [[0, 2], [1, 3]]


@pytest.mark.newer("transformers>=5")
def test_additive_masks_are_applied_to_all_layers() -> None:
    inputs = padded()
    bias = torch.randn(2, 1, 7, 7, generator=torch.Generator().manual_seed(2))
    bias[:, :, :, 5] = -torch.inf
    bias[0, :, 3] = -torch.inf  # a row without keys
    calls = captured(llama(), {"input_ids": inputs["input_ids"], "attention_mask": bias})
    assert assert_equal_call_by_call(calls, slice(0, 7)) == [[0, 1, 2, 3]]


@pytest.mark.newer("transformers>=5")
def test_capped_and_eager_calls_are_read_one_by_one() -> None:
    assert len(assert_equal_call_by_call(captured(capped(), padded()), slice(0, 7))) == 4


def test_layers_of_other_sizes_are_other_groups() -> None:
    few, many = captured(llama(), padded()), captured(llama(num_attention_heads=8), padded())
    groups = group_stackable([few[0], many[0], few[1], many[1]])
    assert [len(group) for group in groups] in ([1, 1, 1, 1], [2, 2])  # masks of two passes differ
    assert not any({0, 1} <= set(group) for group in groups)


# --- in generation


@pytest.mark.parametrize("make", [llama, windowed, capped])
@pytest.mark.parametrize("cache", [None, "static", "dynamic", "offloaded"])
def test_generated_rows_are_those_of_single_calls(
    make: Any, cache: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cache == "offloaded" and not torch.cuda.is_available():
        pytest.skip("offloaded caches need a GPU")
    model, arguments = make(), {**padded(), "max_new_tokens": 6, "do_sample": False}
    if cache is not None:
        arguments["cache_implementation"] = cache
    stacked = generate(model, **arguments)
    monkeypatch.setattr("overt.capture.generation._holds_keys", lambda cache: False)
    alone = generate(model, **arguments)
    assert torch.equal(stacked.output.sequences, alone.output.sequences)
    assert torch.equal(stacked.attention.visible, alone.attention.visible)
    torch.testing.assert_close(
        stacked.attention.weights, alone.attention.weights, atol=1e-6, rtol=1e-5
    )


def test_a_decoding_step_reads_all_layers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    read = _TokenRows._read_rows

    def count(self: _TokenRows, calls: list[Call]) -> Any:
        sizes.append(len(calls))
        return read(self, calls)

    monkeypatch.setattr(_TokenRows, "_read_rows", count)
    generate(llama(), **padded(), max_new_tokens=4, do_sample=False)
    # The prompt and the first token layer by layer, a comparison with one read of all layers,
    # and then one read per token.
    assert sizes == [1] * 4 + [1] * 4 + [4] + [4] * 2


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("hides", [False, True])
def test_caps_and_sinks_are_stacked(softcap: float | None, sinks: bool, hides: bool) -> None:
    draw = torch.Generator().manual_seed(3)
    mask = torch.rand(2, 1, 1, 9, generator=draw) > 0.4
    mask[1] = False  # a row without keys
    calls = []
    for layer in range(3):
        query, key = (torch.randn(2, h, n, 8, generator=draw) for h, n in ((4, 3), (2, 9)))
        source = QKCall(
            2 * query, key, 0.4, allowed=mask if hides else None, softcap=softcap,
            sinks=torch.randn(4, generator=draw) if sinks else None,
        )  # fmt: skip
        calls.append(Call(str(layer), nn.Identity(), source, Route.INTERFACE, False))
    assert assert_equal_call_by_call(calls, slice(2, 3)) == [[0, 1, 2]]
    other = replace(calls[0], source=replace(calls[0].source, softcap=9.0))
    assert group_stackable([*calls, other]) == [[0, 1, 2], [3]]
