"""Concentration metrics: entropy, effective support, Gini, Hoyer, sinks and head redundancy."""

import math

import pytest
import scipy.spatial.distance
import scipy.stats
import torch

from overt.attention import AttentionMap, Kind, words
from overt.metrics import entropy, gini, head_redundancy, sink_mass, uniform_map
from overt.metrics.concentration import effective_support, hoyer


def test_entropy_agrees_with_scipy_over_visible_keys(generator):
    weights = torch.rand(8, 6, generator=generator)
    weights[:, 1] = 0
    seen = torch.rand(8, 6, generator=generator) > 0.2
    found = entropy(AttentionMap.from_cells(weights, words(6), seen))
    for b in range(8):
        expected = scipy.stats.entropy(weights[b][seen[b]].double().numpy())
        assert float(found[b]) == pytest.approx(float(expected), abs=1e-6)


def test_entropy_and_effective_support_count_visible_keys():
    seen = torch.tensor([[True] * 8, [True] * 3 + [False] * 5, [True] + [False] * 7])
    even = uniform_map(AttentionMap.from_cells(torch.ones(3, 8), words(8), seen))
    expected = torch.tensor([math.log(8), math.log(3), 0.0])
    torch.testing.assert_close(entropy(even), expected)
    torch.testing.assert_close(effective_support(even), torch.tensor([8.0, 3.0, 1.0]))


def test_entropy_and_effective_support_match_examples_by_hand():
    made = AttentionMap.from_cells(torch.tensor([[0.5, 0.25, 0.25], [0.0, 0.0, 7.0]]), words(3))
    torch.testing.assert_close(entropy(made), torch.tensor([1.5 * math.log(2), 0.0]))
    torch.testing.assert_close(effective_support(made), torch.tensor([1 / 0.375, 1.0]))


# --- sparsity


def test_gini_is_half_the_mean_difference_over_the_mean(generator):
    weights = torch.rand(6, 7, generator=generator)
    weights[:, 2] = 0
    seen = torch.rand(6, 7, generator=generator) > 0.2
    found = gini(AttentionMap.from_cells(weights, words(7), seen))
    for b in range(6):
        there = weights[b][seen[b]].double()
        apart = (there[:, None] - there[None, :]).abs().mean()
        assert float(found[b]) == pytest.approx(float(apart / (2 * there.mean())), abs=1e-6)


def test_sparsity_of_uniform_and_one_hot_maps():
    seen = torch.tensor([[True] * 5, [True] * 4 + [False], [True] + [False] * 4])
    weights = torch.tensor([[1.0] * 5, [0, 3.0, 0, 0, 9], [2.0] + [9.0] * 4])
    made = AttentionMap.from_cells(weights, words(5), seen)
    torch.testing.assert_close(gini(made), torch.tensor([0.0, 0.75, 0.0]))
    assert hoyer(made)[:2].tolist() == pytest.approx([0, 1], abs=1e-6)
    assert hoyer(made)[2].isnan()  # undefined for one key


def test_hoyer_matches_an_example_by_hand():
    made = AttentionMap.from_cells(torch.tensor([[3.0, 4.0, 0.0, 0.0]]), words(4))
    assert float(hoyer(made)) == pytest.approx((2 - 7 / 5) / (2 - 1))


# --- all rows of a sample


def test_sink_mass_is_the_mean_over_rows_with_weight(generator):
    seen = torch.ones(2, 3, 4, dtype=torch.bool)
    seen[1, 2] = False  # a padded query
    scores = torch.randn(2, 2, 3, 3, 4, generator=generator)
    made = AttentionMap.from_scores(scores, words(4), words(3), seen)
    sinks = torch.tensor([[True, False, False, False], [True, False, False, True]])
    found = sink_mass(made, sinks)
    first = made.weights[0, ..., 0].mean()
    second = (made.weights[1, :, :, :2, 0] + made.weights[1, :, :, :2, 3]).mean()
    torch.testing.assert_close(found, torch.stack([first, second]))
    signed = AttentionMap(scores, words(4), words(3), kind=Kind.SIGNED)
    with pytest.raises(ValueError, match="signed"):
        sink_mass(signed, sinks)


def test_head_redundancy_agrees_with_scipy_pair_by_pair(generator):
    made = AttentionMap.from_scores(
        2 * torch.randn(3, 2, 4, 2, 5, generator=generator), words(5), words(2)
    )
    found = head_redundancy(made)
    for b in range(3):
        alike = []
        for layer in range(2):
            for query in range(2):
                rows = made.weights[b, layer, :, query].double().numpy()
                alike += [
                    1 - scipy.spatial.distance.jensenshannon(rows[i], rows[j], base=2) ** 2
                    for i in range(4)
                    for j in range(i)
                ]
        assert float(found[b]) == pytest.approx(sum(alike) / len(alike), abs=1e-6)


def test_redundancy_is_one_for_equal_heads_and_zero_for_disjoint_heads():
    same = AttentionMap(torch.eye(4)[[1, 1]].reshape(1, 1, 2, 1, 4), words(4))
    apart = AttentionMap(torch.eye(4)[[1, 2]].reshape(1, 1, 2, 1, 4), words(4))
    assert head_redundancy(same).tolist() == [1] and head_redundancy(apart).tolist() == [0]
    with pytest.raises(ValueError, match="at least 2 heads"):
        head_redundancy(same.head(0))
    blind = AttentionMap(torch.zeros(1, 1, 2, 1, 4), words(4))
    assert head_redundancy(blind).isnan().all()


@pytest.mark.parametrize("measure", [entropy, effective_support, gini, hoyer])
def test_negative_weights_give_nan(measure):
    weights = torch.tensor([[-1.0, 2, 0, 0], [1, 2, 0, 0], [-1, 0, 0, 0]])
    found = measure(AttentionMap.from_cells(weights, words(4)))
    assert found.isnan().tolist() == [True, False, True]


def test_negative_rows_are_left_out_of_the_mean():
    rows = torch.tensor([[0.5, 0.5, 0.0], [-1.0, 2.0, 0.0]])
    values = rows.expand(1, 1, 2, 2, 3)
    made = AttentionMap(values, words(3), words(2), kind=Kind.AMOUNT)
    assert float(sink_mass(made, torch.tensor([[True, False, False]]))) == pytest.approx(0.5)
    assert float(head_redundancy(made)) == pytest.approx(1)
    negative = AttentionMap(values[:, :, :, 1:], words(3), words(1), kind=Kind.AMOUNT)
    assert sink_mass(negative, torch.tensor([[True, False, False]])).isnan().all()
    assert head_redundancy(negative).isnan().all()


def test_one_sink_mask_applies_to_all_samples(generator):
    made = AttentionMap.from_cells(torch.rand(2, 3, generator=generator), words(3))
    mask = torch.tensor([True, False, False])
    assert torch.equal(sink_mass(made, mask), sink_mass(made, mask.expand(2, 3)))
    with pytest.raises(ValueError, match=r"\(3,\).*\(2, 3\).*\(4,\)"):
        sink_mass(made, torch.ones(4, dtype=torch.bool))
