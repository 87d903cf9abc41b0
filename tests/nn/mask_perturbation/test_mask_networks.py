"""Mask networks: shapes, values by hand, constant and random masks."""

import pytest
import torch

from overt.nn.mask_perturbation.fusion import AttentionShape
from overt.nn.mask_perturbation.mask_networks import (
    ConstantMask,
    LinearMask,
    QueryKeyMask,
    RandomMask,
    linear,
    query_key,
)

SHAPE = AttentionShape(heads=2, groups=2, width=3)


def inputs(keys=5, groups=2):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 2, 4, 3, generator=generator)
    return query, torch.randn(2, groups, keys, 3, generator=generator)


@pytest.mark.parametrize("make", [query_key, linear(7), RandomMask, ConstantMask])
def test_mask_has_a_value_in_0_1_per_head_word_and_region(make):
    mask = make(SHAPE)(*inputs())
    assert mask.shape == (2, 2, 4, 5)
    assert bool(((mask >= 0) & (mask <= 1)).all())


def test_query_key_mask_by_hand():
    torch.manual_seed(0)
    network, (query, key) = QueryKeyMask(SHAPE), inputs()
    torch.nn.init.normal_(network.bias)
    found = network(query, key)
    b, h, q, k = 1, 1, 2, 3
    asked = network.query(torch.cat([query[b, 0, q], query[b, 1, q]]))[3 * h : 3 * h + 3]
    known = network.key(torch.cat([key[b, 0, k], key[b, 1, k]]))[3 * h : 3 * h + 3]
    expected = torch.sigmoid(asked @ known / 3**0.5 + network.bias[h])
    torch.testing.assert_close(found[b, h, q, k], expected)


def test_heads_with_shared_keys_have_separate_masks():
    network = QueryKeyMask(AttentionShape(heads=2, groups=1, width=3))
    mask = network(*inputs(groups=1))
    assert mask.shape == (2, 2, 4, 5) and not torch.allclose(mask[:, 0], mask[:, 1])


def test_linear_mask_follows_the_paper():
    torch.manual_seed(0)
    network, (query, key) = LinearMask(SHAPE, 7), inputs()
    state = torch.cat([query[0, 0, 1], query[0, 1, 1]])
    expected = network.linear(state).sigmoid().view(2, 7)[1, :5]
    torch.testing.assert_close(network(query, key)[0, 1, 1], expected)
    torch.testing.assert_close(
        network(query, key), network(query, key * 2)
    )  # does not depend on keys
    with pytest.raises(ValueError, match=r"8 regions.* 7"):
        network(*inputs(keys=8))


def test_constant_and_random_masks_ignore_their_inputs():
    query, key = inputs()
    constant = ConstantMask(SHAPE)(query, key)
    assert constant.unique().numel() == 1
    torch.manual_seed(0)
    one = RandomMask(SHAPE)(query, key)
    torch.manual_seed(0)
    assert torch.equal(one, RandomMask(SHAPE)(query * 0, key * 0))
