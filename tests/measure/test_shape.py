import math

import pytest
import scipy.stats
import torch

from overt.attention import AttentionMap, words
from overt.measure import effective_support, entropy, uniform


def test_entropy_agrees_with_scipy_over_visible_keys(generator):
    weights = torch.rand(8, 6, generator=generator)
    weights[:, 1] = 0
    seen = torch.rand(8, 6, generator=generator) > 0.2
    found = entropy(AttentionMap.from_cells(weights, words(6), seen))
    for b in range(8):
        expected = scipy.stats.entropy(weights[b][seen[b]].double().numpy())
        assert float(found[b]) == pytest.approx(float(expected), abs=1e-6)


def test_both_count_the_keys_a_row_may_see():
    seen = torch.tensor([[True] * 8, [True] * 3 + [False] * 5, [True] + [False] * 7])
    even = uniform(AttentionMap.from_cells(torch.ones(3, 8), words(8), seen))
    expected = torch.tensor([math.log(8), math.log(3), 0.0])
    torch.testing.assert_close(entropy(even), expected)
    torch.testing.assert_close(effective_support(even), torch.tensor([8.0, 3.0, 1.0]))


def test_values_by_hand():
    made = AttentionMap.from_cells(torch.tensor([[0.5, 0.25, 0.25], [0.0, 0.0, 7.0]]), words(3))
    torch.testing.assert_close(entropy(made), torch.tensor([1.5 * math.log(2), 0.0]))
    torch.testing.assert_close(effective_support(made), torch.tensor([1 / 0.375, 1.0]))
