"""Nothing is silently empty."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from overt.capture import UncapturedAttentionError, watch
from overt.capture.coverage import check_coverage
from overt.capture.discovery import looks_like_attention, recurrent_modules
from overt.capture.state import FLEX
from tests.capture.toys import FusedAttention, Stack


class HiddenAttention(nn.Module):
    """Attention that nobody can see."""

    def forward(self, x, mask=None):
        return x


def test_a_model_without_attention():
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(72, 4), nn.Softmax(-1))
    with (
        pytest.raises(UncapturedAttentionError, match=r"attention.*grad_cam"),
        watch(model),
    ):
        model(torch.randn(1, 3, 8, 8))


def test_a_model_that_was_not_called():
    with (
        pytest.raises(UncapturedAttentionError, match="was not called"),
        watch(FusedAttention()),
    ):
        pass


def test_only_another_part_was_called():
    model = nn.ModuleDict({"eye": FusedAttention(), "head": nn.Linear(16, 2)})
    model.forward = model["head"].forward
    with (
        pytest.raises(UncapturedAttentionError, match=r"ModuleDict.*'eye'"),
        watch(model),
    ):
        model(torch.randn(1, 2, 16))


def test_modules_that_ran_unseen_are_named_with_a_remedy():
    model = Stack(FusedAttention(), HiddenAttention(), HiddenAttention())
    x = torch.randn(1, 3, 16)
    missed = r"2 of 3 .* 'layers.1', 'layers.2'\. HiddenAttention"
    with pytest.raises(UncapturedAttentionError, match=missed), watch(model):
        model(x)
    with watch(model, layers=[0]) as trace:
        model(x)
    assert len(trace) == 1


def test_seen_fewer_times_than_run():
    class Sometimes(FusedAttention):
        def forward(self, x, mask=None):
            return super().forward(x) if len(x) > 1 else x

    class SometimesAttention(Sometimes):
        pass

    model = Stack(SometimesAttention())

    def twice():
        with watch(model):
            model(torch.randn(2, 3, 16))
            model(torch.randn(1, 3, 16))

    with pytest.raises(UncapturedAttentionError, match="1 of 1"):
        twice()


def test_hugging_face_modules_are_told_how_to_switch():
    module = HiddenAttention()
    module.config = type("Config", (), {"_attn_implementation": "magic"})()
    with pytest.raises(UncapturedAttentionError, match=r'set_attn_implementation\("sdpa"\)'):
        check_coverage(module, module, {module}, [(module,), module], [])
    module.config._attn_implementation = "sdpa"
    with pytest.raises(UncapturedAttentionError, match=r'set_attn_implementation\("eager"\)'):
        check_coverage(module, module, {module}, [(module,), module], [])
    module.config._attn_implementation = "eager"  # there is nothing left to switch to
    with pytest.raises(UncapturedAttentionError, match="a custom kernel") as refused:
        check_coverage(module, module, {module}, [(module,), module], [])
    assert "set_attn" not in str(refused.value)


def test_flex_attention_of_nobody():
    module = HiddenAttention()
    with pytest.raises(UncapturedAttentionError, match="FlexAttention"):
        check_coverage(module, module, set(), [(FLEX, None)], [])


def test_an_error_of_the_model_is_not_hidden_by_ours():
    model = Stack(HiddenAttention())
    with pytest.raises(ZeroDivisionError), watch(model):
        model(torch.randn(1, 2, 16) / (1 // 0))


class Pool(nn.Module):
    """One query for each sample, in a class that is not named like attention."""

    def __init__(self):
        super().__init__()
        self.score = nn.Linear(16, 1)

    def forward(self, x, mask=None):
        return (self.score(x).softmax(1) * x).sum(1, keepdim=True)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.attention = FusedAttention(), Pool()

    def forward(self, x):
        return self.attention(self.encoder(x))


def test_a_module_that_layers_names_is_attention_whatever_its_class_is_called():
    model, x = Classifier(), torch.randn(2, 5, 16)
    with watch(model, layers=["attention"]) as trace:
        model(x)
    weights = model.attention.score(model.encoder(x)).softmax(1)
    torch.testing.assert_close(trace.map().weights[:, 0, 0, 0], weights[..., 0])
    with watch(model) as trace:  # declared for that block, and not for good
        model(x)
    assert trace.names == ("encoder",)


def test_modules_are_declared_to_be_attention():
    model, x = Classifier(), torch.randn(2, 5, 16)
    with watch(model, attention=["attention"]) as trace:
        model(x)
    assert trace.names == ("encoder", "attention")
    with watch(model, attention=["attention"], layers=[-1]) as trace:
        model(x)
    assert trace.names == ("attention",)
    with pytest.raises(ValueError, match=r"\['pool'\].* 'pool'"):
        watch(model, attention=["pool"])
    with pytest.raises(TypeError, match=r"attention.*list"):
        watch(model, attention="attention")


def test_a_declared_module_that_does_not_attend_is_an_error():
    model = Classifier()
    for declared in ({"layers": ["attention.score"]}, {"attention": ["attention.score"]}):
        with (
            pytest.raises(UncapturedAttentionError, match=r"'attention\.score'"),
            watch(model, **declared),
        ):
            model(torch.randn(2, 5, 16))


def test_modules_are_left_out_by_name_and_by_pattern():
    model = Stack(FusedAttention(), HiddenAttention(), FusedAttention(), HiddenAttention())
    x = torch.randn(1, 3, 16)
    leaves = r"without=\['layers.1', 'layers.3'\]\), which leaves 'layers.0', 'layers.2'"
    with pytest.raises(UncapturedAttentionError, match=leaves), watch(model):
        model(x)
    for without in (["layers.1", "layers.3"], ["layers.[13]"]):
        with watch(model, without=without) as trace:
            model(x)
        assert trace.names == ("layers.0", "layers.2")
    with pytest.raises(ValueError, match=r"module 'layers.9'"):
        watch(model, without=["layers.9"])


def test_what_one_watcher_leaves_out_another_may_want():
    model, x = Stack(FusedAttention(), FusedAttention()), torch.randn(1, 3, 16)
    with watch(model) as every, watch(model, without=["layers.0"]) as some:
        model(x)
    assert every.names == ("layers.0", "layers.1") and some.names == ("layers.1",)


SIZES = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
MIXED = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
HYBRIDS = {
    "Jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "num_experts": 2},
    "Bamba": {"attn_layer_indices": [1], "mamba_chunk_size": 8, **MIXED},
    "FalconH1": {"mamba_d_ssm": 64, "mamba_chunk_size": 8, "head_dim": 8, **MIXED},
    "RecurrentGemma": {"lru_width": 32, "block_types": ["recurrent", "attention"]},
    "Qwen3Next": {
        "layer_types": ["linear_attention", "full_attention"],
        "head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_experts": 2,
        "num_experts_per_tok": 1,
    },
    "NemotronH": {
        "layers_block_type": ["mamba", "attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 1,
        "chunk_size": 8,
        "head_dim": 8,
    },
}


@pytest.mark.parametrize("name", HYBRIDS)
@torch.no_grad()
@pytest.mark.newer("transformers>=5")
def test_recurrences_beside_attention_are_named(name):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(**SIZES, **HYBRIDS[name])
    model, tokens = transformers.AutoModel.from_config(config).eval(), torch.arange(6)[None]
    recurrent = recurrent_modules(model)
    assert recurrent
    with (
        pytest.raises(UncapturedAttentionError, match=r"recurrence") as found,
        watch(model),
    ):
        model(tokens)
    assert all(repr(one) in str(found.value) for one in recurrent)
    with watch(model, without=list(recurrent)) as trace:
        model(tokens)
    assert len(trace) and not set(trace.names) & set(recurrent)
    listed = f"no attention weights (recurrences, convolutions): {len(recurrent)} module"
    assert listed in repr(trace)


@torch.no_grad()
def test_convolutions_in_place_of_attention_are_listed():
    transformers = pytest.importorskip("transformers")
    config = transformers.Lfm2Config(**SIZES, layer_types=["conv", "full_attention"])
    model = transformers.Lfm2Model(config).eval()
    with watch(model) as trace:
        model(torch.arange(6)[None])
    assert trace.names == ("layers.1.self_attn",)
    assert "convolutions): 1 module of 'layers.*.conv'" in repr(trace)


@torch.no_grad()
def test_lightning_attention_is_linear():
    transformers = pytest.importorskip("transformers")
    kinds = ["linear_attention", "full_attention"]
    config = transformers.MiniMaxConfig(
        **SIZES, layer_types=kinds, num_local_experts=2, num_experts_per_tok=1, head_dim=8
    )
    model = transformers.MiniMaxModel(config).eval()
    assert list(recurrent_modules(model)) == ["layers.0.self_attn"]
    with watch(model, without=["layers.0.self_attn"]) as trace:
        model(torch.arange(6)[None])
    assert trace.names == ("layers.1.self_attn",)


def test_vmap_is_refused_in_a_sentence():
    model, x = Stack(FusedAttention()), torch.randn(3, 1, 6, 16)
    with pytest.raises(NotImplementedError, match=r"FusedAttention .*vmap"):  # noqa: SIM117
        with watch(model):
            torch.vmap(model)(x)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused_in_a_sentence(layout):
    parts = [torch.randn(3, 16), torch.randn(5, 16)]
    x = torch.nested.nested_tensor(parts, layout=layout)
    if layout is torch.strided:
        model = nn.MultiheadAttention(16, 4, batch_first=True).eval()
        inputs = (x, x, x)
    else:
        model, inputs = FusedAttention(), (x,)
    with pytest.raises(NotImplementedError, match=r"jagged.*to_padded_tensor"):  # noqa: SIM117
        with torch.no_grad(), watch(model):
            model(*inputs)


def test_nested_tensors_in_a_module_without_a_name_are_refused():
    class Block(nn.Module):
        def forward(self, x):
            return torch.nested.to_padded_tensor((x @ x.transpose(-1, -2)).softmax(-1) @ x, 0)

    x = torch.nested.nested_tensor([torch.randn(3, 16), torch.randn(5, 16)])
    model = nn.Sequential(Block())
    with pytest.raises(NotImplementedError, match=r"Block.*nested"), watch(model):
        model(x)


def test_traced_parts_are_named():
    x = torch.randn(2, 5, 16)
    traced = torch.jit.trace(FusedAttention(), (x,))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = FusedAttention(), traced

        def forward(self, x):
            return self.two(self.one(x))

    with (
        pytest.raises(UncapturedAttentionError, match=r"'two'.*TorchScript"),
        watch(model := Model()),
    ):
        model(x)
    with watch(model, without=["two"]) as trace:
        model(x)
    assert trace.names == ("one",)


@pytest.mark.parametrize(
    ("name", "attends"),
    [
        ("SelfAttentionWithBias", True),
        ("AttentionWithoutNorm", True),
        ("RotaryAttention", True),
        ("AttentionNoBias", True),
        ("AttentionBias", False),
        ("AttentionRotaryEmbedding", False),
        ("AttentionOutput", False),
    ],
)
def test_names_of_classes(name, attends):
    assert looks_like_attention(type(name, (nn.Module,), {})()) is attends


def test_advice_does_not_leave_out_what_works():
    class MixedStreams(nn.Module):
        """Weights over streams beside the attention of a layer, as in DeepSeek-V4."""

        def __init__(self):
            super().__init__()
            self.attention, self.mix = FusedAttention(), nn.Linear(16, 16)

        def forward(self, x, mask=None):
            weights = self.mix(x).unflatten(-1, (4, 4)).exp()
            weights = weights / weights.sum(-1, keepdim=True)
            return self.attention(x) + (weights @ x.unflatten(-1, (4, 4))).flatten(2)

    model, x = Stack(MixedStreams(), MixedStreams()), torch.randn(2, 6, 16)
    with pytest.raises(UncapturedAttentionError) as found, watch(model):
        model(x)
    assert "which leaves" not in str(found.value) and "layers=[...]" in str(found.value)
    with watch(model, layers=["layers.0.attention"]) as trace:
        model(x)
    assert len(trace) == 1


def test_projections_named_like_attention_do_not_hide_the_attention_around_them():
    class AttentionProjection(nn.Linear):
        """As in CvT."""

    class SelfAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key = AttentionProjection(16, 16), AttentionProjection(16, 16)

        def forward(self, x, mask=None):
            return F.scaled_dot_product_attention(
                self.query(x)[:, None], self.key(x)[:, None], x[:, None]
            )[:, 0]

    with watch(model := Stack(SelfAttention())) as trace:
        model(torch.randn(2, 6, 16))
    assert trace.names == ("layers.0",)
