"""ROUGE-L: agreement with pycocoevalcap and the longest common subsequence."""

import random

import numpy as np
import pytest

from overt.metrics.captions.rouge import common_length, rouge_l
from tests.metrics.captions.examples import random_captions, to_pycocoevalcap


def reference_common_length(one, other):
    table = [[0] * (len(other) + 1) for _ in range(len(one) + 1)]
    for i, a in enumerate(one):
        for j, b in enumerate(other):
            table[i + 1][j + 1] = (
                table[i][j] + 1 if a == b else max(table[i][j + 1], table[i + 1][j])
            )
    return table[-1][-1]


def test_rouge_agrees_with_pycocoevalcap():
    published = pytest.importorskip("pycocoevalcap.rouge.rouge", reason="no pycocoevalcap")
    candidates, references = random_captions(200)
    _, theirs = published.Rouge().compute_score(*to_pycocoevalcap(candidates, references))
    found = rouge_l(candidates, references).numpy()
    np.testing.assert_allclose(found, theirs, rtol=0, atol=1e-12)


def test_bitwise_common_length_agrees_with_dynamic_programming():
    dice = random.Random(0)
    for _ in range(300):
        one, other = ([dice.choice("abcd") for _ in range(dice.randrange(90))] for _ in range(2))
        assert common_length(one, other) == reference_common_length(one, other)


def test_score_matches_an_example_by_hand():
    """Two words of three in order: P = 2/3, R = 2/4."""
    found = rouge_l([["a", "red", "dog"]], [[["a", "dog", "is", "red"]]])
    p, r, beta = 2 / 3, 2 / 4, 1.2
    assert float(found[0]) == pytest.approx((1 + beta**2) * p * r / (r + beta**2 * p))


def test_no_common_words_score_zero():
    assert rouge_l([["a"], []], [[["b"]], [["b"]]]).tolist() == [0, 0]


def test_different_counts_and_missing_references_raise():
    with pytest.raises(ValueError, match="1 and 0"):
        rouge_l([["a"]], [])
    with pytest.raises(ValueError, match="one reference"):
        rouge_l([["a"]], [[]])
