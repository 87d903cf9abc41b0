"""Attention pooling: softmax over present keys, dtypes."""

import math

import pytest
import torch

from overt.attention import words
from overt.nn.attention_pool import attention_pool


def test_pooling_weights_are_a_softmax_over_present_keys(generator):
    scores = torch.randn(2, 4, 3, dtype=torch.float64, generator=generator)
    values = torch.randn(2, 4, 5, dtype=torch.float64, generator=generator)
    present = torch.tensor([[True, True, False, True], [False] * 4])
    summary, attention = attention_pool(scores, values, words(4), present)
    attention.check()
    for head in range(3):
        raised = [math.exp(scores[0, k, head]) if present[0, k] else 0.0 for k in range(4)]
        weights = [one / sum(raised) for one in raised]
        assert attention.weights[0, 0, head, 0].tolist() == pytest.approx(weights)
        expected = sum(w * values[0, k] for k, w in enumerate(weights))
        torch.testing.assert_close(summary[0, head], expected)
    assert not summary[1].any() and not attention.weights[1].any()


def test_half_precision_has_float32_weights_and_half_precision_summary():
    scores, values = torch.zeros(1, 3, 1).bfloat16(), torch.ones(1, 3, 2).bfloat16()
    summary, attention = attention_pool(scores, values, words(3))
    assert attention.weights.dtype == torch.float32 and summary.dtype == torch.bfloat16
    assert attention.mask is None
