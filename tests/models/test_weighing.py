import math

import pytest
import torch

from overt.attention import words
from overt.models.weighing import weigh


def test_sums_are_weighed_by_a_softmax_over_the_keys_there_are(generator):
    scores = torch.randn(2, 4, 3, dtype=torch.float64, generator=generator)
    values = torch.randn(2, 4, 5, dtype=torch.float64, generator=generator)
    present = torch.tensor([[True, True, False, True], [False] * 4])
    summary, attention = weigh(scores, values, words(4), present)
    attention.check()
    for head in range(3):
        raised = [math.exp(scores[0, k, head]) if present[0, k] else 0.0 for k in range(4)]
        weights = [one / sum(raised) for one in raised]
        assert attention.weights[0, 0, head, 0].tolist() == pytest.approx(weights)
        expected = sum(w * values[0, k] for k, w in enumerate(weights))
        torch.testing.assert_close(summary[0, head], expected)
    assert not summary[1].any() and not attention.weights[1].any()


def test_half_precision_is_weighed_in_full_and_summed_as_it_came():
    scores, values = torch.zeros(1, 3, 1).bfloat16(), torch.ones(1, 3, 2).bfloat16()
    summary, attention = weigh(scores, values, words(3))
    assert attention.weights.dtype == torch.float32 and summary.dtype == torch.bfloat16
    assert attention.mask is None
