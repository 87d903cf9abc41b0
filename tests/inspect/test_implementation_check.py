"""Differences between attention implementations: against hand-made computations, and planted."""

import math
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overt.capture import hf_interface
from overt.errors import RunError
from overt.inspect import output_difference, weight_difference
from overt.inspect.implementation_check import (
    HEADER,
    ImplementationDifference,
    compare_implementations,
)
from tests.experiments import foreign

transformers = foreign.transformers
SIZES = foreign.SIZES
PLAIN = ["eager", "sdpa"]


def tokens(rows: int = 2, padded: int = 0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 30, (rows, 9), generator=draw)
    mask = torch.ones_like(ids)
    mask[-1, :padded] = 0
    return {"input_ids": ids, "attention_mask": mask}


def bert() -> Any:
    config = transformers.BertConfig(vocab_size=30, max_position_embeddings=40, **SIZES)
    return foreign.lively(transformers.BertModel(config))


def gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=30, n_positions=40, n_embd=32, n_layer=2, n_head=4, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    return foreign.lively(transformers.GPT2LMHeadModel(config))


def llama(layers: int = 2) -> Any:
    sizes = {**SIZES, "num_hidden_layers": layers, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(
        vocab_size=30, max_position_embeddings=64, bos_token_id=None, eos_token_id=None, **sizes
    )
    return foreign.lively(transformers.LlamaForCausalLM(config))


def vit() -> Any:
    config = transformers.ViTConfig(image_size=32, patch_size=8, **SIZES)
    return foreign.lively(transformers.ViTForImageClassification(config))


def bart() -> Any:
    config = transformers.BartConfig(
        vocab_size=30, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, pad_token_id=0,
        max_position_embeddings=40, bos_token_id=2, eos_token_id=3, decoder_start_token_id=2,
        forced_eos_token_id=None,
    )  # fmt: skip
    return foreign.lively(transformers.BartForConditionalGeneration(config))


def llava() -> Any:
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(image_size=32, patch_size=8, **SIZES),
        text_config=transformers.LlamaConfig(
            vocab_size=30, max_position_embeddings=64, num_key_value_heads=2, **SIZES
        ),
        image_token_id=4,
        image_seq_length=16,
        vision_feature_layer=-1,
    )
    return foreign.lively(transformers.LlavaForConditionalGeneration(config))


def pixels() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))}


def pictured_tokens() -> dict[str, Tensor]:
    ids = torch.cat([torch.full((1, 16), 4), tokens(1)["input_ids"]], dim=1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **pixels()}


def paired_tokens() -> dict[str, Tensor]:
    return {**tokens(padded=2), "decoder_input_ids": tokens()["input_ids"][:, :4]}


@pytest.mark.parametrize(
    ("make", "inputs", "output", "maps", "generates"),
    [
        (bert, partial(tokens, padded=3), "last hidden states", 2, False),
        (gpt2, partial(tokens, padded=3), "logits", 2, True),
        (llama, partial(tokens, padded=3), "logits", 2, True),
        (vit, pixels, "logits", 2, False),
        (bart, paired_tokens, "logits", 6, True),
        (llava, pictured_tokens, "logits", 4, True),
    ],
)
def test_eager_and_sdpa_agree(
    make: Callable[[], Any],
    inputs: Callable[[], dict[str, Tensor]],
    output: str,
    maps: int,
    generates: bool,
) -> None:
    """Padding, grouped heads, cross-attention and image encoders are no differences."""
    model, given = make(), inputs()
    eager, sdpa = compare_implementations(model, given, PLAIN, new_tokens=3)
    assert (eager.reference, sdpa.reference) == ("sdpa", "a second run")
    assert (eager.output, eager.maps, sdpa.maps) == (output, maps, maps)
    assert eager.map_max is not None and 0 < eager.map_max < 1e-5
    assert eager.output_max is not None and 0 < eager.output_max < 1e-4
    # The weights that the model returns are those that were captured.
    assert eager.returned_max == 0 and sdpa.returned_max is None
    assert sdpa.map_max == sdpa.output_max == 0
    assert eager.same_argmax == (1 if output == "logits" else None)
    assert (eager.tokens, eager.first_token) == (3 if generates else None, None)
    assert eager.problems() == sdpa.problems() == [] and eager.notes == ()


def shifted_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **others: Any
) -> tuple[Tensor, Tensor]:
    """Eager attention at another temperature: a faulty implementation."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.mT * others["scaling"] * 3
    weights = (scores + attention_mask).softmax(dim=-1)
    return (weights @ value).transpose(1, 2), weights


@pytest.fixture
def shifted() -> str:
    from transformers.masking_utils import AttentionMaskInterface, eager_mask

    hf_interface.register("shifted", shifted_attention)
    AttentionMaskInterface.register("shifted", eager_mask)
    return "shifted"


def expected_weights(model: Any, given: Mapping[str, Tensor], factor: float) -> Tensor:
    """Compute the weights of the only layer by hand, from its projections."""
    layer, kept = model.model.layers[0].self_attn, {}
    hooks = [
        getattr(layer, name).register_forward_hook(
            lambda module, args, out, name=name: kept.update({name: out})
        )
        for name in ("q_proj", "k_proj")
    ]
    with torch.no_grad():
        model(**given)
    for hook in hooks:
        hook.remove()
    b, n, _ = kept["q_proj"].shape
    q = kept["q_proj"].view(b, n, 4, 8).transpose(1, 2)
    k = kept["k_proj"].view(b, n, 2, 8).transpose(1, 2).repeat_interleave(2, 1)
    # Rotary position embeddings: pairs (i, i + 4) turn by position times frequency.
    angles = torch.arange(n)[:, None] * 10000.0 ** (-torch.arange(0, 8, 2) / 8)
    turn = torch.polar(torch.ones_like(angles), angles)
    q, k = (torch.view_as_real(torch.complex(x[..., :4], x[..., 4:]) * turn) for x in (q, k))
    scores = torch.einsum("bhqdc, bhkdc -> bhqk", q, k) / math.sqrt(8) * factor
    return scores.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), -math.inf).softmax(-1)


def generate_by_hand(model: Any, ids: Tensor, count: int) -> Tensor:
    """Generate greedily without a cache."""
    start = ids.shape[1]
    for _ in range(count):
        with torch.no_grad():
            ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], dim=1)
    return ids[:, start:]


def test_a_faulty_implementation_is_measured_as_by_hand(shifted: str) -> None:
    model, given = llama(layers=1), tokens()
    faulty, eager = compare_implementations(model, given, [shifted, "eager"], new_tokens=8)
    off = expected_weights(model, given, 3) - expected_weights(model, given, 1)
    assert faulty.map_max == pytest.approx(float(off.abs().max()), abs=1e-5)
    assert faulty.map_module == "model.layers.0.self_attn"
    with torch.no_grad():
        right, written = model(**given).logits, generate_by_hand(model, given["input_ids"], 8)
        model.set_attn_implementation(shifted)
        wrong, other = model(**given).logits, generate_by_hand(model, given["input_ids"], 8)
    assert faulty.output_max == pytest.approx(float((wrong - right).abs().max()), rel=1e-4)
    assert faulty.output_mean == pytest.approx(float((wrong - right).abs().mean()), rel=1e-4)
    same = float((wrong.argmax(-1) == right.argmax(-1)).float().mean())
    assert faulty.same_argmax == pytest.approx(same) and same < 1
    (differs,) = (written != other).any(dim=0).nonzero(as_tuple=True)
    assert (faulty.tokens, faulty.first_token) == (8, int(differs[0]))
    assert faulty.problems() == ["maps of model.layers.0.self_attn", "logits"]
    assert f"differ from token {int(differs[0]) + 1} of 8 on" in faulty.verdict()
    assert eager.problems() == []


def test_a_model_that_is_loaded_with_a_faulty_implementation_differs_from_all(shifted: str) -> None:
    model = llama()
    model.set_attn_implementation(shifted)
    found = compare_implementations(model, tokens(), PLAIN, new_tokens=0)
    assert [one.reference for one in found] == [shifted] * 2
    assert all(one.problems() for one in found)
    assert model.config._attn_implementation == shifted


def unmasked_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **others: Any
) -> tuple[Tensor, None]:
    """A registered function for which transformers makes no mask, so that tokens see later ones."""
    output = nn.functional.scaled_dot_product_attention(query, key, value)
    return output.transpose(1, 2), None


def test_a_forgotten_mask_is_reported() -> None:
    hf_interface.register("unmasked", unmasked_attention)
    (found,) = compare_implementations(gpt2(), tokens(), ["unmasked"], new_tokens=0)
    assert found.problems()[0].startswith("maps of transformer.h.")
    assert found.map_max is not None and found.map_max > 0.1


def test_layers_are_compared_in_groups_with_the_same_result(
    shifted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No maps of several layers are held, and rows are compared in blocks."""
    compare = partial(compare_implementations, new_tokens=0)
    model, given, names = gpt2(), tokens(), ["eager"]
    model.set_attn_implementation("eager")
    held, widths = [], []
    whole = compare(model, given, names)
    real, blocks = weight_difference._hold, weight_difference.row_blocks
    monkeypatch.setattr(weight_difference, "MAX_HELD", 1)
    monkeypatch.setattr(output_difference, "BLOCK", 100)
    monkeypatch.setattr(
        weight_difference, "_hold", lambda *args: held.append(real(*args)) or held[-1]
    )
    monkeypatch.setattr(
        weight_difference, "row_blocks", lambda *args: widths.append(len([*blocks(*args)])) or
        blocks(*args),
    )  # fmt: skip
    assert compare(model, given, names) == whole
    assert [len(calls) for calls in held] == [1] * 2 and max(widths) > 1


def test_the_model_is_left_as_it_was() -> None:
    model, given = llava().train(), pictured_tokens()
    model.model.vision_tower.config._attn_implementation_internal = "eager"
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    state, grad = torch.get_rng_state(), model.lm_head.weight.grad
    modes = [part.training for part in model.modules()]
    found = compare_implementations(
        model, given, ["sdpa", "eager"], compiler=lambda one: one, new_tokens=1
    )
    assert [one.reference for one in found][:2] == ["mixed (eager, sdpa)"] * 2
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert [part.training for part in model.modules()] == modes
    assert model.lm_head.weight.grad is grad and model.config._attn_implementation == "sdpa"
    assert model.model.vision_tower.config._attn_implementation == "eager"
    assert "forward" not in vars(model)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    # The model can still return its weights.
    model.set_attn_implementation("eager")
    assert len(model.eval()(**given, output_attentions=True).attentions) == 2


def test_other_types_are_compared_with_the_model_as_loaded() -> None:
    found = compare_implementations(llama(), tokens(), PLAIN, [torch.bfloat16], new_tokens=0)
    rows = [(one.implementation, one.dtype, one.reference) for one in found]
    assert rows[2:] == [
        ("sdpa", "bfloat16", "sdpa in float32"),
        ("eager", "bfloat16", "sdpa"),
    ]
    for one in found[2:]:
        assert one.problems() == [] and one.map_max is not None and 1e-4 < one.map_max < 5e-2
    assert found[2].verdict().startswith("Under sdpa in bfloat16 and sdpa in float32, maps differ")
    assert found[3].verdict().startswith("Under eager and sdpa in bfloat16, maps differ")


def test_the_compiled_model_runs_forward_and_generates() -> None:
    compiled: list[Any] = []

    def compiler(part: Any) -> Any:
        compiled.append(part)
        return part

    model = gpt2()
    (one,) = compare_implementations(model, tokens(1), [], compiler=compiler, new_tokens=2)
    assert (one.implementation, one.reference, one.maps) == ("compiled", "sdpa", 2)
    assert one.problems() == [] and (one.tokens, one.first_token) == (2, None)
    assert model in compiled and any(getattr(part, "__self__", 0) is model for part in compiled)
    assert "forward" not in vars(model)


COMPILED = """
import torch
from functools import partial
from overt.inspect.implementation_check import compare_implementations
from transformers import GPT2Config, GPT2LMHeadModel

sizes = {"vocab_size": 16, "n_positions": 16, "n_embd": 8, "n_layer": 2, "n_head": 2}
model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)).eval()
compiler = partial(torch.compile, backend="aot_eager")
compare = partial(
    compare_implementations, model, {"input_ids": torch.tensor([[1, 2, 3]])}, [], compiler=compiler
)
(one,) = compare(new_tokens=2)
assert (one.maps, one.tokens, one.first_token, one.problems()) == (2, 2, None, []), one
model.set_attn_implementation("eager")
(one,) = compare(new_tokens=0)
assert one.map_max is None and one.output_max < 1e-5, one
assert one.notes[0].startswith("no maps: 2 of 2 attention modules ran"), one
print("compared", "forward" in vars(model), torch.is_grad_enabled())
"""


@pytest.mark.long
def test_compiled_models_are_compared() -> None:
    """In a process of its own: the type checks of this one are compiled too, which takes minutes.

    Eager attention is not captured inside of a compiled model, but its outputs are compared.
    """
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], capture_output=True, text=True, check=False
    )
    assert done.stdout == "compared False True\n", done.stdout + done.stderr


def test_what_cannot_run_is_reported_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def why(model: Any, inputs: Any, name: str = "flash_attention_2") -> str:
        (found,) = compare_implementations(model, inputs, [name], new_tokens=0)
        assert found.verdict() == f"{name} in float32 cannot run here: {found.reason}."
        assert found.line()[-1] == f"cannot run here: {found.reason}"
        assert "\n" not in found.reason and found.problems() == []
        return found.reason

    from transformers import utils

    monkeypatch.setattr(utils, "is_flash_attn_2_available", lambda: False)
    assert "flash-attn" in why(vit(), pixels())
    monkeypatch.setattr(utils, "is_flash_attn_2_available", lambda: True)
    assert "on cpu" in why(vit(), pixels())
    config = transformers.ViltConfig(vocab_size=30, image_size=32, patch_size=8, **SIZES)
    vilt, given = transformers.ViltModel(config).eval(), {**tokens(1), **pixels()}
    assert "ViltModel" in why(vilt, given) and "ViltModel" in why(vilt, given, "sdpa")


def failing_attention(*args: Any, **others: Any) -> Any:
    raise NotImplementedError("no kernel for these sizes.\nSee the long manual.")


def test_an_implementation_that_fails_is_reported_and_the_others_are_compared() -> None:
    hf_interface.register("failing", failing_attention)
    model = gpt2()
    failing, eager = compare_implementations(model, tokens(), ["failing", "eager"], new_tokens=0)
    assert failing.reason == "no kernel for these sizes" and eager.maps == 2
    assert model.config._attn_implementation == "sdpa"


class SwitchableAttention(nn.Module):
    """Attention with the `fused_attn` switch of timm; the eager path has another scale."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.fused_attn, self.factor = True, factor
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).reshape(1, -1, 3, 2, 4).permute(2, 0, 3, 1, 4)
        if self.fused_attn:
            return nn.functional.scaled_dot_product_attention(q, k, v)
        return (q * self.factor * 4**-0.5 @ k.mT).softmax(dim=-1) @ v


@pytest.mark.parametrize("factor", [1, 9])
def test_models_of_timm_are_switched_by_their_flag(factor: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(SwitchableAttention(factor)).eval()
    found = compare_implementations(
        model, {"x": torch.randn(1, 5, 8)}, forward=lambda model, inputs: model(inputs["x"])
    )
    assert [one.implementation for one in found if not one.reason] == ["eager", "sdpa"]
    assert bool(found[0].problems()) is (factor == 9) and found[0].output == "outputs"
    assert model[0].fused_attn is True


def test_recurrences_beside_attention_are_left_out() -> None:
    config = transformers.JambaConfig(
        vocab_size=30, num_key_value_heads=2, attn_layer_period=2, attn_layer_offset=1,
        mamba_d_state=4, num_experts=2, **SIZES
    )  # fmt: skip
    model = foreign.lively(transformers.JambaForCausalLM(config))
    (found,) = compare_implementations(model, tokens(1), ["eager"], new_tokens=1)
    assert (found.maps, found.notes, found.problems()) == (1, (), [])


def test_a_full_context_generates_nothing_and_says_so() -> None:
    ids = torch.ones(1, 40, dtype=torch.long)
    (found,) = compare_implementations(gpt2(), {"input_ids": ids}, ["eager"])
    assert found.tokens is None and "40" in found.notes[0] and found.maps == 2


@pytest.mark.parametrize(
    ("changed", "kind", "message"),
    [
        ({"model": "gpt2"}, TypeError, "torch.nn.Module"),
        ({"implementations": "eager"}, TypeError, r"\['eager'\]"),
        ({"implementations": ["fast"]}, ValueError, "'fast'"),
        ({"implementations": ["someone/kernel"]}, ValueError, "'someone/kernel'"),
        ({"dtypes": ["bfloat16"]}, ValueError, "'bfloat16'"),
        ({"dtypes": [torch.int8]}, ValueError, "torch.int8"),
        ({"new_tokens": -1}, ValueError, "-1"),
        ({"inputs": {"input_ids": torch.tensor([[99]])}}, RunError, "GPT2LMHeadModel"),
    ],
)
def test_wrong_arguments_are_rejected(
    changed: dict[str, Any], kind: type[Exception], message: str
) -> None:
    arguments = {"model": gpt2(), "inputs": tokens(), **changed}
    with pytest.raises(kind, match=message):
        compare_implementations(**arguments)


def test_not_a_number_is_a_problem() -> None:
    for one in ({"map_max": math.nan}, {"output": "logits", "output_max": math.nan}):
        assert ImplementationDifference("eager", "float32", "sdpa", **one).problems()


def test_outputs_are_judged_by_their_size() -> None:
    made = partial(ImplementationDifference, "eager", "float32", "sdpa", output="logits")
    assert made(output_max=1e-2, output_scale=1e4).problems() == []
    assert made(output_max=1e-2, output_scale=1.0).problems() == ["logits"]


def test_rounding_between_two_types_is_no_problem_but_nan_is() -> None:
    made = partial(ImplementationDifference, "sdpa", "bfloat16", "sdpa in float32")
    assert made(map_max=0.2).problems() == [] and made(map_max=math.nan).problems()


def test_a_row_has_one_cell_per_column() -> None:
    one = ImplementationDifference("eager", "float32", "sdpa", tokens=8, first_token=3)
    assert len(one.line()) == len(HEADER) and one.line()[6] == "differ from token 4 of 8 on"
    assert one.verdict().endswith("generated tokens differ from token 4 of 8 on.")
