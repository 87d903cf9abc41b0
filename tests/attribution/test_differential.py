"""Differential attention: the signed map that the model multiplies its values with."""

import pytest
import torch

from overt.attention import Kind
from overt.attribution import differential
from overt.capture import watch
from overt.capture.discovery import is_differential
from tests.capture.toys import FusedAttention, Stack


def make_model(way: str):
    transformers = pytest.importorskip("transformers")
    config = transformers.DiffLlamaConfig(
        vocab_size=20,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        lambda_std_dev=0.5,
        attn_implementation=way,
    )
    torch.manual_seed(0)
    return transformers.DiffLlamaModel(config).eval()


@pytest.mark.parametrize("way", ["eager", "sdpa"])
@torch.no_grad()
@pytest.mark.newer("transformers>=5")
def test_differential_map_times_values_equals_the_layer_output(way):
    net, given = make_model(way), []
    for layer in net.layers:
        layer.self_attn.groupnorm.register_forward_pre_hook(lambda _, args: given.append(args[0]))
    with watch(net) as trace:
        net(torch.arange(6)[None])
    assert "differential(trace)" in repr(trace)
    shown = differential(trace)
    assert len(shown) == 2 and {call.kind for call in shown} == {Kind.SIGNED}
    for at, call in enumerate(shown):
        assert call.shape == (1, 2, 6, 6)
        values = [one.value[:, :2] for one in trace if one.module is call.module]
        output = torch.cat([call.weights() @ one for one in values], dim=-1)
        torch.testing.assert_close(output.transpose(1, 2), given[at], rtol=1e-4, atol=1e-5)


def test_gradients_reach_both_maps_and_lambda():
    net = make_model("sdpa")
    with watch(net) as trace:
        net(torch.arange(6)[None])
    differential(trace).map(0).weights.square().sum().backward()
    attention = net.layers[0].self_attn
    assert all(one.grad.abs().sum() > 0 for one in (attention.q_proj.weight, attention.lambda_q2))


def test_other_models_raise():
    net = Stack(FusedAttention())
    with watch(net) as trace:
        net(torch.randn(1, 3, 16))
    assert not is_differential(net.layers[0])
    with pytest.raises(ValueError, match="lambda_q1.*lambda_k1.*lambda_q2.*lambda_k2"):
        differential(trace)


def test_selected_heads_raise():
    net = make_model("sdpa")
    with watch(net, heads=[0, 1]) as trace:
        net(torch.arange(6)[None])
    with pytest.raises(ValueError, match=r"subtracted.*pairs"):
        differential(trace)
