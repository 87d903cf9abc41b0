"""`overt doctor MODEL`: every attention module, how it was seen, and how far from eager it is."""

from typing import Any

import pytest
import torch

from overt.errors import BadInput
from overt.recipes import checkup
from overt.recipes.checkup import HEADER, Checkup, Module, examine
from overt.recipes.opening import Subject, open_model
from tests.recipes import foreign

transformers = foreign.transformers
GROUPED = {**foreign.SIZES, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> foreign.Shelf:
    return foreign.Shelf(tmp_path_factory.mktemp("models"))


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
    subject = open_model(shelf[name])
    found = examine(subject)
    assert [one.kind for one in found.modules] == kinds
    assert {one.route for one in found.modules} == {"scaled_dot_product_attention"}
    assert all(one.off is not None and one.off < 1e-4 for one in found.modules)
    assert ["tried on", f"{how}, through its own processors"] in found.facts
    assert found.problem == "" and subject.model.config._attn_implementation == "sdpa"
    assert found.verdict().startswith(f"{len(kinds)} of {len(kinds)} attention modules ran")


def test_registers_are_counted(shelf: foreign.Shelf) -> None:
    assert ["registers", "3"] in examine(open_model(shelf["dino"])).facts
    timm = torch.nn.Module()
    timm.reg_token = torch.nn.Parameter(torch.zeros(1, 4, 8))
    assert checkup._registers(timm, None) == 4


def made(kind: str, **settings: Any) -> Subject:
    config = getattr(transformers, f"{kind}Config")(vocab_size=30, **{**GROUPED, **settings})
    return Subject(kind, foreign.lively(getattr(transformers, f"{kind}ForCausalLM")(config)))


def test_learned_sinks_and_caps_are_named_and_compared_for_real() -> None:
    """These models are eager already: they are compared with the fused way, not with themselves."""
    gemma = examine(made("Gemma2"))
    assert [one.softcap for one in gemma.modules] == ["50", "50"]
    oss = examine(made("GptOss", num_local_experts=2, num_experts_per_tok=1))
    assert [one.sinks for one in oss.modules] == ["learned", "learned"]
    for found in (gemma, oss):
        assert all(one.off is not None and 0 < one.off < 1e-4 for one in found.modules)
        assert found.problem == ""
        assert ["tried on", "random numbers, by its config"] in found.facts


def test_a_model_that_has_one_way_only_is_not_said_to_agree() -> None:
    config = transformers.ViltConfig(vocab_size=30, image_size=32, patch_size=8, **foreign.SIZES)
    found = examine(Subject("vilt", transformers.ViltModel(config).eval()))
    assert [one.off for one in found.modules] == [None, None]
    assert {one.advice for one in found.modules} == {"nothing: the weights are the model's own"}
    assert "compared" not in found.verdict()


class FusingAttention(torch.nn.Module):
    """Attention with timm's switch."""

    def __init__(self) -> None:
        super().__init__()
        self.fused_attn = True
        self.qkv = torch.nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).reshape(1, -1, 3, 2, 4).permute(2, 0, 3, 1, 4)
        if self.fused_attn:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return (q * 4**-0.5 @ k.mT).softmax(dim=-1) @ v


def test_the_switch_of_timm_is_turned_and_turned_back() -> None:
    model = torch.nn.Sequential(FusingAttention()).eval()
    found = examine(Subject("timm", model, transform=lambda picture: torch.randn(5, 8)))
    (one,) = found.modules
    assert one.route == "scaled_dot_product_attention" and one.off is not None and one.off < 1e-6
    assert model[0].fused_attn is True


class SidewaysAttention(torch.nn.Module):
    """Weights that no route sees: a softmax over another axis than the last."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = (x.mT @ x).softmax(dim=1)
        return x @ weights


class Half(torch.nn.Module):
    """One attention that can be seen, and one that cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        self.odd = SidewaysAttention()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.odd(self.plain(x, x, x)[0])


def test_a_module_that_cannot_be_seen_is_named_with_the_remedy() -> None:
    subject = Subject("half", Half().eval(), transform=lambda picture: torch.randn(5, 8))
    found = examine(subject)
    assert "1 of 2 attention modules ran and were not seen: 'odd'" in found.problem
    assert "scaled_dot_product_attention" in found.problem
    seen, unseen = found.modules
    assert (seen.name, seen.heads, seen.kind) == ("plain", "2", "self")
    assert unseen.line()[1:] == ["odd", *[""] * 6, "did not run, or was not seen"]


def test_a_difference_is_a_problem(shelf: foreign.Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = open_model(shelf["bert"])
    real = checkup._otherwise

    def wrong(model: Any, asked: Any) -> dict[str, Any]:
        with torch.no_grad():
            weight = model.encoder.layer[1].attention.self.query.weight
            weight.mul_(2)
            try:
                return real(model, asked)
            finally:
                weight.div_(2)

    monkeypatch.setattr(checkup, "_otherwise", wrong)
    found = examine(subject)
    assert found.problem.startswith("1 attention modules differ from eager by more than 1e-04")
    assert "encoder.layer.1.attention.self" in found.problem


def test_not_a_number_is_a_problem_too() -> None:
    modules = [
        Module(n, "a", route="x", off=off) for n, off in enumerate((1e-9, float("nan"), 0.0))
    ]
    assert "off by nan at most" in Checkup([], modules, 1e-4).verdict()
    assert checkup._disagreeing(modules, 1e-4) == [modules[1]]


def test_tolerance_follows_the_number_format() -> None:
    linear = torch.nn.Linear(2, 2)
    assert checkup._tolerance(linear) == 1e-4
    assert checkup._tolerance(linear.double()) == 1e-10
    assert checkup._tolerance(linear.bfloat16()) == 5e-2


def test_a_model_that_nothing_is_known_of_is_refused() -> None:
    class Odd(torch.nn.Module):
        config = transformers.PreTrainedConfig()

    with pytest.raises(BadInput, match="config does not say how to make up its input_ids"):
        checkup.made_up(Subject("odd", Odd()))


def test_a_row_has_a_cell_for_every_column() -> None:
    assert len(Module(0, "a").line()) == len(HEADER)
