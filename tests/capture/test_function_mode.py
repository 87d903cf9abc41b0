"""The routes: SDPA and multi-head attention here, compiled ones in `compiled.py`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from overt.capture import Route, watch
from tests.capture import compiled
from tests.capture.toys import FusedAttention, oracle


@pytest.fixture
def x():
    torch.manual_seed(1)
    return torch.randn(2, 6, 16)


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("causal", [False, True])
def test_sdpa(x, groups, causal):
    model = FusedAttention(groups=groups, causal=causal)
    with watch(model) as trace:
        model(x)
    weights = oracle(model, x)
    assert trace.calls[0].route is Route.SDPA and trace.calls[0].causal is causal
    torch.testing.assert_close(trace.map().weights[:, 0].double(), weights, rtol=0, atol=1e-6)


def test_sdpa_called_with_keywords_and_with_other_numbers_of_axes():
    class Odd(nn.Module):
        def forward(self, x):
            first = F.scaled_dot_product_attention(query=x, key=x, value=x, scale=0.1)
            return first + F.scaled_dot_product_attention(
                x[None, None], x[None, None], x[None, None]
            )

    x = torch.randn(2, 5, 8)
    model = Odd()
    with watch(model) as trace:
        model(x)
    assert [call.shape for call in trace] == [(2, 1, 5, 5), (1, 2, 5, 5)]
    expected = (x @ x.transpose(1, 2) * 0.1).softmax(-1)
    torch.testing.assert_close(trace.map(0).weights[:, 0, 0], expected)
    with watch(model, edit=lambda call, weights: weights):
        torch.testing.assert_close(model(x), model(x))


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("need", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_multi_head_attention(first, need, bias):
    torch.manual_seed(0)
    model = nn.MultiheadAttention(16, 4, batch_first=first, bias=bias).eval()
    query, memory = torch.randn(3, 3, 16), torch.randn(3, 3, 16)
    for key in (query, memory):
        out, weights = model(query, key, key, average_attn_weights=False)
        with watch(model) as trace:
            found, averaged = model(query, key, key, need_weights=need)
        torch.testing.assert_close(found, out)
        torch.testing.assert_close(trace.map().weights[:, 0], weights)
        assert trace.calls[0].cross is (key is memory)
        assert trace.calls[0].route is (Route.SOFTMAX if need else Route.SDPA)
        assert (averaged is not None) is need


def test_multi_head_attention_with_sizes_of_its_own_and_added_keys():
    model = nn.MultiheadAttention(
        16, 4, kdim=8, vdim=12, add_bias_kv=True, add_zero_attn=True, batch_first=True
    ).eval()
    query, key, value = torch.randn(2, 3, 16), torch.randn(2, 5, 8), torch.randn(2, 5, 12)
    _, weights = model(query, key, value, average_attn_weights=False)
    with watch(model) as trace:
        model(query, key, value, need_weights=False)
    torch.testing.assert_close(trace.map().weights[:, 0], weights)


@pytest.mark.parametrize("graph", [True, False])
def test_the_fast_path_of_transformer_layers_is_seen(x, graph):
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    hidden = torch.zeros(2, 6, dtype=torch.bool)
    hidden[1, 4:] = True
    with torch.set_grad_enabled(graph):
        plain = model(x, src_key_padding_mask=hidden)
        with watch(model) as trace:
            out = model(x, src_key_padding_mask=hidden)
    torch.testing.assert_close(out[~hidden], plain[~hidden], rtol=1e-5, atol=1e-5)
    assert len(trace) == 2
    assert not trace.map().check().weights[1, ..., 4:].any()


def test_decoders_look_at_themselves_and_at_the_memory(x):
    model = nn.Transformer(16, 4, 1, 2, 32, batch_first=True).eval()
    causal = nn.Transformer.generate_square_subsequent_mask(4)
    with watch(model) as trace:
        model(x, x[:, :4], tgt_mask=causal)
    kinds = [(call.name, call.cross, call.causal) for call in trace]
    assert kinds == [
        ("encoder.layers.0.self_attn", False, False),
        ("decoder.layers.0.self_attn", False, True),
        ("decoder.layers.0.multihead_attn", True, False),
        ("decoder.layers.1.self_attn", False, True),
        ("decoder.layers.1.multihead_attn", True, False),
    ]


@pytest.mark.long
def test_compiled_models():
    """In a process of its own: the shape checks of these tests cannot be compiled."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.capture.compiled"],
        check=False,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == [name for name in vars(compiled) if name.startswith("check_")]


class Folded(nn.Module):
    """Heads in the batch, or windows before the heads; SDPA takes any axes in front."""

    num_heads = 2

    def forward(self, x, mask):
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)


@pytest.mark.parametrize(
    ("axes", "masked"),
    [((3, 4, 2), (4, 1)), ((3, 4, 2), (3, 1, 2)), ((3, 2, 4), (4,))],
)
@pytest.mark.parametrize("boolean", [True, False])
def test_masks_follow_folded_heads_and_windows(axes, masked, boolean):
    torch.manual_seed(0)
    x, mask, model = torch.randn(*axes, 5, 4), torch.randn(*masked, 5, 5), Folded()
    bias = mask
    if boolean:
        mask = (mask > 0) | torch.eye(5, dtype=torch.bool)
        bias = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    with watch(model) as trace:
        out = model(x, mask)
    expected = (x @ x.mT / 2 + bias).softmax(-1)
    if axes == (3, 2, 4):  # windows behind the heads
        expected = expected.movedim(1, 2)
    torch.testing.assert_close(trace.map().weights, expected.reshape(-1, 1, 2, 5, 5))
    with watch(model, edit=lambda call, weights: weights):
        torch.testing.assert_close(model(x, mask), out)


class FoldsItself(Folded):
    """Heads that are split off the features and folded into the batch, behind it or before it."""

    def __init__(self, before):
        super().__init__()
        self.before = before

    def forward(self, x, mask):
        x = x.unflatten(-1, (2, 4)).permute((2, 0, 1, 3) if self.before else (0, 2, 1, 3))
        return super().forward(x.flatten(0, 1), mask)


@pytest.mark.parametrize("masked", [6, 1])
@pytest.mark.parametrize("boolean", [True, False])
@pytest.mark.parametrize("before", [True, False])
def test_masks_follow_heads_that_are_folded_into_the_batch(masked, boolean, before):
    torch.manual_seed(0)
    x, mask, model = torch.randn(3, 5, 8), torch.randn(masked, 5, 5), FoldsItself(before)
    bias = mask
    if boolean:
        mask = (mask > 0) | torch.eye(5, dtype=torch.bool)
        bias = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    with watch(model) as trace:
        out = model(x, mask)
    heads = x.unflatten(-1, (2, 4)).permute((2, 0, 1, 3) if before else (0, 2, 1, 3))
    bias = bias.expand(6, 5, 5).unflatten(0, heads.shape[:2])
    expected = (heads @ heads.mT / 2 + bias).softmax(-1)
    torch.testing.assert_close(
        trace.map().weights[:, 0], expected.transpose(0, 1) if before else expected
    )
    with watch(model, edit=lambda call, weights: weights):
        torch.testing.assert_close(model(x, mask), out)


def test_heads_that_may_be_samples_are_refused_by_the_name_of_their_module():
    with (
        pytest.raises(NotImplementedError, match=r"\(6,\) of Folded"),
        watch(model := Folded()),
    ):
        model(torch.randn(6, 5, 4), None)


def test_what_torch_func_does_to_a_model_is_left_alone(x):
    model = FusedAttention()
    expected = torch.func.grad(lambda one: model(one).square().sum())(x)
    with watch(model):
        found = torch.func.grad(lambda one: model(one).square().sum())(x)
    torch.testing.assert_close(found, expected)


def test_forward_mode_differentiation_is_left_alone(x):
    from torch.autograd import forward_ad
    from torch.nn.attention import SDPBackend, sdpa_kernel

    model = FusedAttention()
    with sdpa_kernel(SDPBackend.MATH), forward_ad.dual_level():
        expected = forward_ad.unpack_dual(model(forward_ad.make_dual(x, x))).tangent
        with watch(model):
            found = forward_ad.unpack_dual(model(forward_ad.make_dual(x, x))).tangent
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("first", [True, False])
def test_keys_with_positions_added_to_queries_too_are_no_cross_attention(first):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attend = nn.MultiheadAttention(16, 4, batch_first=first)

        def forward(self, x, other):
            both = x + 1
            return self.attend(both, both, x)[0] + self.attend(both, other, other)[0]

    with watch(model := Block()) as trace:
        model(torch.randn(3, 3, 16), torch.randn(3, 3, 16))
    assert [call.cross for call in trace.calls] == [False, True]
