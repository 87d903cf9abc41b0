"""BLEU: agreement with pycocoevalcap, examples by hand and bad input."""

import math

import numpy as np
import pytest
import torch

from overt.metrics.captions.bleu import bleu
from tests.metrics.captions.examples import random_captions, to_pycocoevalcap


def test_bleu_agrees_with_pycocoevalcap():
    published = pytest.importorskip("pycocoevalcap.bleu.bleu", reason="no pycocoevalcap")
    candidates, references = random_captions(200)
    whole, each = published.Bleu(4).compute_score(
        *to_pycocoevalcap(candidates, references), verbose=0
    )
    found = bleu(candidates, references)
    np.testing.assert_allclose(found.corpus().numpy(), whole, rtol=0, atol=1e-12)
    np.testing.assert_allclose(found.each().T.numpy(), each, rtol=0, atol=1e-12)


def test_clipped_counts_match_the_example_of_the_paper():
    """Papineni et al., section 2.1: "the" counts at most as often as in one reference."""
    references = ["the cat is on the mat".split(), "there is a cat on the mat".split()]
    found = bleu(["the the the the the the the".split()], [references])
    assert found.matched[0].tolist() == [2, 0, 0, 0] and found.total[0].tolist() == [7, 6, 5, 4]
    assert found.reference_length.tolist() == [7]
    assert float(found.each()[0, 0]) == pytest.approx(2 / 7)


def test_short_captions_get_the_brevity_penalty():
    found = bleu([["a", "dog"]], [[["a", "dog", "runs", "fast"]]])
    assert float(found.corpus()[0]) == pytest.approx(math.exp(1 - 4 / 2))


def test_a_tie_of_reference_lengths_takes_the_shorter():
    assert bleu([["a"] * 5], [[["a"] * 6, ["a"] * 4]]).reference_length.tolist() == [4]


def test_scores_of_selected_rows_equal_scores_of_these_captions():
    candidates, references = random_captions(20)
    found = bleu(candidates, references)
    rows = torch.tensor([3, 3, 17])
    again = bleu([candidates[at] for at in rows], [references[at] for at in rows])
    torch.testing.assert_close(found.select(rows).corpus(), again.corpus())
    assert len(found) == 20 and len(found.select(rows)) == 3


def test_an_empty_caption_scores_zero():
    assert bleu([[]], [[["a"]]]).each().max() < 1e-6


def test_different_counts_and_missing_references_raise():
    with pytest.raises(ValueError, match="1 and 2"):
        bleu([["a"]], [[["a"]], [["b"]]])
    with pytest.raises(ValueError, match="one reference"):
        bleu([["a"]], [[]])
