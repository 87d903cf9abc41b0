"""`overt doctor MODEL`: attention modules, their capture, and differences from eager."""

from typing import Any

import pytest
import torch

from overt.errors import UserError
from overt.inspect import model_check
from overt.inspect.implementation_check import ImplementationDifference
from overt.inspect.load_model import load_model
from overt.inspect.loaded_model import LoadedModel
from overt.inspect.model_check import HEADER, ModelReport, ModuleReport, examine
from tests.experiments import foreign

transformers = foreign.transformers
GROUPED = {**foreign.SIZES, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> foreign.Shelf:
    return foreign.Shelf(tmp_path_factory.mktemp("models"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "kinds", "how"),
    [
        ("bert", ["self"] * 2, "a text"),
        ("gpt2", ["causal"] * 2, "a text"),
        ("t5", ["self", "self", "causal", "cross", "causal", "cross"], "a text"),
        ("vit", ["self"] * 2, "noise"),
        ("clip", ["causal", "causal", "self", "self"], "a text and noise"),
        ("llava", ["self", "self", "causal", "causal"], "a text and noise"),
    ],
)
def test_fused_models_agree_with_eager(
    shelf: foreign.Shelf, name: str, kinds: list[str], how: str
) -> None:
    loaded = load_model(shelf[name])
    found = examine(loaded)
    assert [one.kind for one in found.modules] == kinds
    assert {one.route for one in found.modules} == {"scaled_dot_product_attention"}
    assert all(one.off is not None and one.off < 1e-4 for one in found.modules)
    assert ["test input", f"{how}, through its own processors"] in found.facts
    assert found.problem == "" and loaded.model.config._attn_implementation == "sdpa"
    assert found.verdict().startswith(f"{len(kinds)} of {len(kinds)} attention modules ran")


@pytest.mark.long
def test_registers_are_counted(shelf: foreign.Shelf) -> None:
    assert ["registers", "3"] in examine(load_model(shelf["dino"])).facts
    timm = torch.nn.Module()
    timm.reg_token = torch.nn.Parameter(torch.zeros(1, 4, 8))
    assert model_check._registers(timm, None) == 4


def make_model(kind: str, **settings: Any) -> LoadedModel:
    config = getattr(transformers, f"{kind}Config")(vocab_size=30, **{**GROUPED, **settings})
    return LoadedModel(kind, foreign.lively(getattr(transformers, f"{kind}ForCausalLM")(config)))


def test_learned_sinks_and_softcaps_are_reported_and_compared() -> None:
    """These models are eager by default: they are compared with a fused kernel."""
    gemma = examine(make_model("Gemma2"))
    assert [one.softcap for one in gemma.modules] == ["50", "50"]
    oss = examine(make_model("GptOss", num_local_experts=2, num_experts_per_tok=1))
    assert [one.sinks for one in oss.modules] == ["learned", "learned"]
    for found in (gemma, oss):
        assert all(one.off is not None and 0 < one.off < 1e-4 for one in found.modules)
        assert found.problem == ""
        assert ["test input", "random numbers, by config"] in found.facts


def test_a_model_with_one_implementation_is_not_reported_as_compared() -> None:
    config = transformers.ViltConfig(vocab_size=30, image_size=32, patch_size=8, **foreign.SIZES)
    found = examine(LoadedModel("vilt", transformers.ViltModel(config).eval()))
    assert [one.off for one in found.modules] == [None, None]
    assert {one.advice for one in found.modules} == {"none: the model computes the weights itself"}
    assert "compared" not in found.verdict()


class SwitchableAttention(torch.nn.Module):
    """Attention with the `fused_attn` switch of timm."""

    def __init__(self) -> None:
        super().__init__()
        self.fused_attn = True
        self.qkv = torch.nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).reshape(1, -1, 3, 2, 4).permute(2, 0, 3, 1, 4)
        if self.fused_attn:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return (q * 4**-0.5 @ k.mT).softmax(dim=-1) @ v


def test_the_fused_switch_of_timm_is_restored() -> None:
    model = torch.nn.Sequential(SwitchableAttention()).eval()
    found = examine(LoadedModel("timm", model, transform=lambda picture: torch.randn(5, 8)))
    (one,) = found.modules
    assert one.route == "scaled_dot_product_attention" and one.off is not None and one.off < 1e-6
    assert model[0].fused_attn is True


class OtherAxisAttention(torch.nn.Module):
    """A softmax over an axis that is not the last, which is not captured."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = (x.mT @ x).softmax(dim=1)
        return x @ weights


class HalfCaptured(torch.nn.Module):
    """One attention module that is captured, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        self.odd = OtherAxisAttention()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.odd(self.plain(x, x, x)[0])


def test_an_uncaptured_module_is_reported_with_advice() -> None:
    loaded = LoadedModel("half", HalfCaptured().eval(), transform=lambda picture: torch.randn(5, 8))
    found = examine(loaded)
    assert "1 of 2 attention modules ran and were not captured: 'odd'" in found.problem
    assert "scaled_dot_product_attention" in found.problem
    captured, missed = found.modules
    assert (captured.name, captured.heads, captured.kind) == ("plain", "2", "self")
    assert missed.line()[1:] == ["odd", *[""] * 6, "did not run or was not captured"]


class SplitAttention(torch.nn.Module):
    """Two parts of the weights multiply different values, which capture rejects."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = (x @ x.mT).softmax(-1)
        return weights[..., :2] @ x[..., :2, :] + weights[..., 2:] @ x[..., 2:, :]


def test_a_module_rejected_during_the_forward_pass_is_a_problem() -> None:
    model = HalfCaptured().eval()
    model.odd = SplitAttention()
    found = examine(LoadedModel("cut", model, transform=lambda picture: torch.randn(5, 8)))
    assert "SplitAttention" in found.problem
    assert [one.name for one in found.modules if one.route] == ["plain"]


@pytest.mark.long
def test_a_difference_is_a_problem(shelf: foreign.Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_model(shelf["bert"])
    real = model_check._other_calls

    def wrong(model: Any, prepared: Any) -> dict[str, Any]:
        with torch.no_grad():
            weight = model.encoder.layer[1].attention.self.query.weight
            weight.mul_(2)
            try:
                return real(model, prepared)
            finally:
                weight.div_(2)

    monkeypatch.setattr(model_check, "_other_calls", wrong)
    found = examine(loaded)
    assert found.problem.startswith("1 attention modules differ from eager by more than 1e-04")
    assert "encoder.layer.1.attention.self" in found.problem


def test_nan_differences_are_a_problem() -> None:
    modules = [
        ModuleReport(n, "a", route="x", off=off) for n, off in enumerate((1e-9, float("nan"), 0.0))
    ]
    assert "largest error nan" in ModelReport([], modules, 1e-4).verdict()
    assert model_check._inexact_modules(modules, 1e-4) == [modules[1]]


def test_the_tolerance_depends_on_the_dtype() -> None:
    linear = torch.nn.Linear(2, 2)
    assert model_check._tolerance(linear) == 1e-4
    assert model_check._tolerance(linear.double()) == 1e-10
    assert model_check._tolerance(linear.bfloat16()) == 5e-2


def test_a_model_without_known_inputs_is_rejected() -> None:
    class Odd(torch.nn.Module):
        config = transformers.PreTrainedConfig()

    with pytest.raises(UserError, match=r"size.*input_ids"):
        model_check.make_test_input(LoadedModel("odd", Odd()))


def test_a_report_row_has_one_cell_per_column() -> None:
    assert len(ModuleReport(0, "a").line()) == len(HEADER)


def make_hybrid(kind: str, **settings: Any) -> LoadedModel:
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=30, **{**foreign.SIZES, "num_key_value_heads": 2, **settings}
    )
    return LoadedModel(kind, foreign.lively(transformers.AutoModelForCausalLM.from_config(config)))


@pytest.mark.parametrize(
    ("kind", "settings", "missing", "attends"),
    [
        (
            "Jamba",
            {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4, "num_experts": 2},
            ("model.layers.0.mamba", "recurrence"),
            "model.layers.1.self_attn",
        ),
        (
            "Qwen3Next",
            {
                "layer_types": ["linear_attention", "full_attention"],
                "head_dim": 8,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "linear_key_head_dim": 8,
                "linear_value_head_dim": 8,
                "num_experts": 2,
                "num_experts_per_tok": 1,
            },
            ("model.layers.0.linear_attn", "recurrence"),
            "model.layers.1.self_attn",
        ),
        (
            "Lfm2",
            {"layer_types": ["full_attention", "conv"]},
            ("model.layers.1.conv", "convolution"),
            "model.layers.0.self_attn",
        ),
    ],
)
def test_layers_without_softmax_attention_are_listed(
    kind: str, settings: dict[str, Any], missing: tuple[str, str], attends: str
) -> None:
    loaded = make_hybrid(kind, **settings)
    found = examine(loaded)
    names = [one.name for one in found.modules]
    assert names == sorted([missing[0], attends]) and found.unweighted == (missing[0],)
    (without,) = (one for one in found.modules if one.name == missing[0])
    assert (without.kind, without.route) == (missing[1], "")
    assert ("without=" in without.advice) is (missing[1] == "recurrence")
    assert found.problem == "" and found.verdict().startswith("1 of 1 attention modules ran")
    assert found.verdict().endswith("1 module without attention weights.")


def test_the_comparison_of_implementations_is_part_of_the_report(shelf: foreign.Shelf) -> None:
    options = model_check.ComparisonOptions(("bfloat16",))
    found = model_check.check_model(str(shelf["vit"]), comparison=options)
    rows = [(one.implementation, one.dtype) for one in found.differences if not one.reason]
    assert rows == [
        ("eager", "float32"), ("sdpa", "float32"), ("sdpa", "bfloat16"), ("eager", "bfloat16"),
    ]  # fmt: skip
    assert found.problem == ""
    assert model_check.check_model(str(shelf["vit"])).differences == ()


def test_an_implementation_that_differs_is_a_problem(
    shelf: foreign.Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = ImplementationDifference("eager", "float32", "sdpa", maps=1, map_max=0.3)
    monkeypatch.setattr(model_check, "compare_implementations", lambda *args, **named: (wrong,))
    options = model_check.ComparisonOptions()
    found = model_check.check_model(str(shelf["vit"]), comparison=options)
    assert found.problem == wrong.verdict() and "0.3" not in found.verdict()


def test_unknown_types_are_rejected() -> None:
    with pytest.raises(UserError, match="'int8'"):
        model_check.ComparisonOptions(("int8",))
