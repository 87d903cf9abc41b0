"""CIDEr and CIDEr-D: agreement with pycocoevalcap and with the definition."""

import math
from collections import Counter

import numpy as np
import pytest
import torch

from overt.errors import CorruptFileError, UserError
from overt.metrics.captions.cider import (
    CiderDScorer,
    DocumentFrequencies,
    cider,
    cider_d,
    document_frequencies,
    words_to_ids,
)
from tests.metrics.captions.examples import flickr8k_captions, random_captions, to_pycocoevalcap


def ngrams(text, n):
    return Counter(tuple(text[at : at + n]) for at in range(len(text) - n + 1))


def reference_cider(candidates, references, corpus, clip, sigma):
    """Compute the score from its definition, with dictionaries, n-gram by n-gram."""
    scores = []
    for words, others in zip(candidates, references, strict=True):
        total = 0.0
        for n in range(1, 5):
            seen = Counter(g for texts in corpus for g in {g for t in texts for g in ngrams(t, n)})

            def weigh(text, n=n, seen=seen):
                return {
                    g: tf * (math.log(len(corpus)) - math.log(max(1, seen[g])))
                    for g, tf in ngrams(text, n).items()
                }

            ours = weigh(words)
            for other in others:
                theirs = weigh(other)
                dot = sum(
                    (min(w, theirs.get(g, 0.0)) if clip else w) * theirs.get(g, 0.0)
                    for g, w in ours.items()
                )
                norm = math.sqrt(
                    sum(w * w for w in ours.values()) * sum(w * w for w in theirs.values())
                )
                apart = max(0, len(words) - 1) - max(0, len(other) - 1)
                far = 1.0 if sigma is None else math.exp(-(apart**2) / (2 * sigma**2))
                total += (dot / norm if norm else 0.0) * far / len(others)
        scores.append(10 * total / 4)
    return scores


def test_cider_d_agrees_with_pycocoevalcap_to_1e_9():
    published = pytest.importorskip("pycocoevalcap.cider.cider", reason="no pycocoevalcap")
    candidates, references = random_captions(300)
    _, theirs = published.Cider().compute_score(*to_pycocoevalcap(candidates, references))
    np.testing.assert_allclose(cider_d(candidates, references).numpy(), theirs, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("score", "clip", "sigma"), [(cider_d, True, 6.0), (cider, False, None)])
def test_scores_agree_with_the_definition(score, clip, sigma):
    candidates, references = random_captions(25, seed=1)
    expected = reference_cider(candidates, references, references, clip, sigma)
    np.testing.assert_allclose(score(candidates, references).numpy(), expected, atol=1e-12)


def test_cider_of_the_only_reference_is_ten_without_length_penalty():
    references = [[["a", "red", "dog", "runs"]], [["one", "blue", "cat", "sits"]]]
    assert cider([one[0] for one in references], references).tolist() == pytest.approx([10, 10])
    twice = [one[0] * 2 for one in references]
    assert bool((cider(twice, references) > 8).all())
    assert bool((cider_d(twice, references) < 7).all())


def test_frequencies_of_another_corpus_and_unknown_n_grams_are_used():
    _, corpus = random_captions(40, seed=2)
    candidates, references = random_captions(10, seed=3)
    references[0].append("zebra quagga zebra".split())
    candidates[0] = "zebra quagga zebra".split()
    all_corpus, all_references, (ours,) = words_to_ids(corpus, references, [candidates])
    score = CiderDScorer(all_references, document_frequencies(all_corpus))
    expected = reference_cider(candidates, references, corpus, True, 6.0)
    np.testing.assert_allclose(score(ours), expected, atol=1e-12)


def test_an_image_can_have_several_candidates_in_any_order():
    candidates, references = random_captions(12, seed=4)
    (ours,), theirs = words_to_ids([candidates], references)
    score = CiderDScorer(theirs)
    alone = score(ours)
    images = [3, 3, 0, 11, 3]
    np.testing.assert_array_equal(score([ours[at] for at in images], images), alone[images])
    one_by_one = [float(score([ours[at]], [at])[0]) for at in range(12)]
    np.testing.assert_allclose(alone, one_by_one, atol=1e-12)


def test_large_ids_are_exact():
    candidates, references = random_captions(30, seed=5)
    (ours,), theirs = words_to_ids([candidates], references)
    far = 2**32 - 40  # no two of four such ids fit into one number of 64 bits unpacked
    moved = [[[far + at for at in text] for text in texts] for texts in theirs]
    mine = [[far + at for at in text] for text in ours]
    np.testing.assert_array_equal(CiderDScorer(moved)(mine), CiderDScorer(theirs)(ours))
    with pytest.raises(ValueError, match="must be from 0"):
        CiderDScorer([[[2**32]]])
    with pytest.raises(ValueError, match="must be from 0"):
        CiderDScorer([[[1]]])([[-1]])


def test_empty_and_short_captions_have_a_score():
    references = [[["a", "dog"]], [["a", "cat", "sits", "still", "here"]], [["one"]]]
    scores = cider_d([[], ["cat"], ["one"]], references)
    assert scores[0] == 0 and scores.isfinite().all() and scores[2] == pytest.approx(2.5)
    assert len(CiderDScorer([[[1, 2]]])([], [])) == 0


def test_arrays_and_lists_of_ids_give_the_same_score():
    score = CiderDScorer([[[1, 2, 3]], [[4, 5]]])
    assert score([np.array([1, 2]), [4, 5]]).tolist() == score([[1, 2], np.array([4, 5])]).tolist()


def test_frequencies_are_equal_after_save_and_load(tmp_path):
    candidates, references = random_captions(15, seed=6)
    (ours,), theirs = words_to_ids([candidates], references)
    counted = document_frequencies(theirs)
    counted.save(tmp_path / "df.npz")
    again = DocumentFrequencies.load(tmp_path / "df.npz")
    assert again.documents == 15
    np.testing.assert_array_equal(CiderDScorer(theirs, again)(ours), CiderDScorer(theirs)(ours))


@pytest.mark.parametrize("harm", ["name", "order", "shape", "numbers"])
def test_corrupt_frequencies_raise(tmp_path, harm):
    counted = document_frequencies([[[1, 2, 3, 4, 5]], [[3, 4, 6, 7, 1]]])
    counted.save(tmp_path / "df.npz")
    with np.load(tmp_path / "df.npz") as found:
        arrays = dict(found)
    match harm:
        case "name":
            arrays.pop("keys3")
        case "order":
            arrays["keys2"] = arrays["keys2"][::-1]
        case "shape":
            arrays["images1"] = arrays["images1"][:-1]
        case _:
            arrays["numbers1"] = arrays["numbers1"] * 0
    np.savez(tmp_path / "df.npz", **arrays)
    with pytest.raises(CorruptFileError, match="count them again"):
        DocumentFrequencies.load(tmp_path / "df.npz")


def test_invalid_references_and_indices_raise():
    with pytest.raises(UserError, match="reference"):
        CiderDScorer([[[1]], []])
    with pytest.raises(ValueError, match="0 to 0"):
        CiderDScorer([[[1]]])([[1]], [1])
    with pytest.raises(ValueError, match="2 and 1"):
        CiderDScorer([[[1]]])([[1], [1]], [0])
    with pytest.raises(ValueError, match="1 and 2"):
        cider_d([["a"]], [[["a"]], [["b"]]])


def test_metrics_declare_direction_and_dtype():
    assert cider_d.info.higher_is_better and cider.info.high == 10
    assert cider_d([["a"]], [[["a"]]]).dtype is torch.float64


def test_captions_of_flickr8k_agree_with_pycocoevalcap_to_1e_9(data_root):
    published = pytest.importorskip("pycocoevalcap.cider.cider", reason="no pycocoevalcap")
    candidates, references = flickr8k_captions(data_root, 600)
    _, theirs = published.Cider().compute_score(*to_pycocoevalcap(candidates, references))
    np.testing.assert_allclose(cider_d(candidates, references).numpy(), theirs, rtol=0, atol=1e-9)


@pytest.mark.parametrize("score", [cider, cider_d])
def test_one_image_gives_nan(score):
    """log(1 / 1) = 0 is the weight of every n-gram: 0 would be the score of the worst caption."""
    one = ["a", "brown", "dog", "runs"]
    assert score([one], [[one]]).isnan().all()
    assert score([one, one], [[one], [one]]).isnan().all()  # all images described alike
    two = ["two", "cats", "sleep"]
    found = score([one, two], [[one], [two]])
    assert not found.isnan().any() and (found > 0).all()


def test_a_single_image_scores_with_frequencies_of_others():
    references = [[[1, 2, 3, 4]], [[5, 6, 7]], [[8, 9]]]
    alone = CiderDScorer(references[:1])
    assert not alone.defined and np.isnan(alone([[1, 2, 3, 4]])).all()
    counted = CiderDScorer(references[:1], document_frequencies(references))
    assert counted.defined and counted([[1, 2, 3, 4]])[0] == pytest.approx(10)
