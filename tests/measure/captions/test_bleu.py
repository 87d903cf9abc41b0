import math

import numpy as np
import pytest
import torch

from overt.measure.captions.bleu import bleu
from tests.measure.captions.examples import as_published, many


def test_bleu_agrees_with_pycocoevalcap():
    published = pytest.importorskip("pycocoevalcap.bleu.bleu", reason="no pycocoevalcap")
    candidates, references = many(200)
    whole, each = published.Bleu(4).compute_score(*as_published(candidates, references), verbose=0)
    found = bleu(candidates, references)
    np.testing.assert_allclose(found.corpus().numpy(), whole, rtol=0, atol=1e-12)
    np.testing.assert_allclose(found.each().T.numpy(), each, rtol=0, atol=1e-12)


def test_the_classic_example_by_hand():
    """Papineni et al., section 2.1: "the" is counted no more often than one reference has it."""
    references = ["the cat is on the mat".split(), "there is a cat on the mat".split()]
    found = bleu(["the the the the the the the".split()], [references])
    assert found.matched[0].tolist() == [2, 0, 0, 0] and found.said[0].tolist() == [7, 6, 5, 4]
    assert found.wanted.tolist() == [7]
    assert float(found.each()[0, 0]) == pytest.approx(2 / 7)


def test_short_captions_pay():
    found = bleu([["a", "dog"]], [[["a", "dog", "runs", "fast"]]])
    assert float(found.corpus()[0]) == pytest.approx(math.exp(1 - 4 / 2))


def test_of_two_lengths_as_near_the_shorter_is_wanted():
    assert bleu([["a"] * 5], [[["a"] * 6, ["a"] * 4]]).wanted.tolist() == [4]


def test_rows_can_be_drawn_again():
    candidates, references = many(20)
    found = bleu(candidates, references)
    rows = torch.tensor([3, 3, 17])
    again = bleu([candidates[at] for at in rows], [references[at] for at in rows])
    torch.testing.assert_close(found.select(rows).corpus(), again.corpus())
    assert len(found) == 20 and len(found.select(rows)) == 3


def test_an_empty_caption_is_worth_nothing():
    assert bleu([[]], [[["a"]]]).each().max() < 1e-6


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="1 candidates for 2"):
        bleu([["a"]], [[["a"]], [["b"]]])
    with pytest.raises(ValueError, match="at least one reference"):
        bleu([["a"]], [[]])
