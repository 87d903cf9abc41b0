"""Inputs and calls of the attention contract."""

import torch
from torch import nn

from overt.attention import Kind
from overt.testing.attention_inputs import InputSizes, default_call, random_inputs, weights_to_map


def test_random_inputs_are_deterministic_with_the_given_sizes():
    one, two = (random_inputs(InputSizes(5, 7, 3), (2, 3), [6, 4]) for _ in range(2))
    assert one.queries.shape == (2, 3, 5) and one.keys.shape == (2, 6, 7)
    assert one.present.sum(dim=1).tolist() == [6, 4]
    assert torch.equal(one.keys, two.keys) and torch.equal(one.queries, two.queries)
    other = random_inputs(InputSizes(5, 7, 3), (2, 3), [6, 4], seed=1)
    assert not torch.equal(one.keys, other.keys)
    assert (
        one.grid_layout.find("image").shape == (2, 3)
        and len(one.text_layout) == 6
        and len(one.query_layout) == 3
    )


def test_self_attention_inputs_stay_one_tensor():
    given = random_inputs(InputSizes(queries=None), (2, 3), [6, 4, 2])
    for one in (given, given.clone(), given.to(torch.float64), given.select([2, 0])):
        assert one.queries is one.keys
    asked = random_inputs(InputSizes(), (2, 3), [6, 4, 2]).clone()
    assert asked.queries is not asked.keys


def test_inputs_are_converted_selected_and_cloned():
    given = random_inputs(InputSizes(), (2, 3), [6, 4, 2])
    assert given.to(torch.bfloat16).keys.dtype is torch.bfloat16
    assert given.to(torch.bfloat16).present.dtype is torch.bool
    assert {given.to("meta").keys.device.type, given.to("meta").present.device.type} == {"meta"}
    assert given.select([]).keys.shape == (0, 6, 8)
    copy = given.clone()
    copy.keys.zero_()
    assert given.keys.any()


def test_weights_to_map_keeps_the_heads():
    given = random_inputs(InputSizes(), (2, 3), [6, 4, 2])
    weights = given.present[:, None, None].float().expand(-1, 4, 2, -1)
    made = weights_to_map(weights / weights.sum(-1, keepdim=True), given).check()
    assert made.values.shape == (3, 1, 4, 2, 6) and made.kind is Kind.PROBABILITY


class UniformAttention(nn.Module):
    """Uniform attention that returns weights instead of a map."""

    def forward(self, queries, keys, present):
        weights = (present / present.sum(dim=1, keepdim=True))[:, None, None]
        weights = weights.expand(-1, 1, queries.shape[1], -1)
        return weights[:, 0] @ keys, weights


def test_default_call_accepts_modules_that_return_weights():
    given = random_inputs(InputSizes(), (2, 3), [6, 4, 2])
    output, attention = default_call(UniformAttention(), given)
    torch.testing.assert_close(output[1, 0], given.keys[1, :4].mean(dim=0))
    assert attention.check().values.shape == (3, 1, 1, 2, 6)
