"""Validation of captions: a string in place of a list of words or texts raises."""

import pytest

from overt.metrics import captions
from overt.metrics.captions.validation import check_captions, check_strings, check_texts

WORDS, OTHERS = ["a", "dog"], [["a", "cat"], ["one", "cat"]]
WRONG = {
    "candidates is a string": ("a dog", [OTHERS] * 5),
    "a candidate is a string": ([WORDS, "a dog"], [OTHERS, OTHERS]),
    "a reference is a string": ([WORDS, WORDS], [OTHERS, ["a cat", "one cat"]]),
    "the references of an image are a string": ([WORDS], ["a cat"]),
    "references is a string": ([WORDS] * 5, "a cat"),
}
SCORERS = (
    *(captions.bleu, captions.rouge_l, captions.meteor, captions.cider, captions.cider_d),
    *(captions.spice, captions.meteor_java),
)


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("score", [check_captions, *SCORERS], ids=lambda one: one.__name__)
def test_strings_instead_of_lists_of_words_raise(score, wrong):
    """Without this check two strings of five letters would get a BLEU score."""
    with pytest.raises(ValueError, match=r"list.*string '\w"):
        score(*WRONG[wrong])


@pytest.mark.parametrize("score", [check_captions, *SCORERS], ids=lambda one: one.__name__)
def test_different_counts_and_missing_references_raise(score):
    with pytest.raises(ValueError, match="1 and 2"):
        score([WORDS], [OTHERS, OTHERS])
    with pytest.raises(ValueError, match="candidate 1"):
        score([WORDS, WORDS], [OTHERS, []])


def test_candidate_texts_are_strings_and_references_are_lists(monkeypatch):
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)  # as for users
    check_texts(["a dog"], [["a cat", "one cat"]])
    for score in (check_texts, captions.caption_scores):
        with pytest.raises(ValueError, match=r"ref.*candidate 0"):
            score(["a dog"], ["a cat"])
        with pytest.raises(ValueError, match="candidates"):
            score("a dog", [["a cat"]] * 5)
        with pytest.raises(ValueError, match=r"list.*candidate 0"):
            score([WORDS], [["a cat"]])
    with pytest.raises(ValueError, match="got 0"):
        captions.caption_scores([], [])


def test_one_string_instead_of_a_list_of_texts_raises():
    check_strings(["a dog"], "texts")
    for score in (lambda text: check_strings(text, "texts"), captions.tokenize_java):
        with pytest.raises(ValueError, match="texts .*'a dog'"):
            score("a dog")


def test_strings_instead_of_token_ids_raise(monkeypatch):
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)  # as for users
    with pytest.raises(ValueError, match="token ids, got"):
        captions.CiderDScorer([["12", "34"]])
    with pytest.raises(ValueError, match="token ids, got"):
        captions.document_frequencies([["12"]])
    with pytest.raises(ValueError, match="token ids, got"):
        captions.CiderDScorer([[[1, 2]], [[3]]])(["12"], [0])
