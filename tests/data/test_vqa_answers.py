import itertools
import re

import pytest
import torch

from overt.data.vqa_answers import (
    CONTRACTIONS,
    exact_answers,
    normalize_answer,
    normalize_answers,
    official_answers,
    official_answers_2015,
    people_share,
    vqa_scores,
    without_punctuation,
)

ANSWERS = [
    "two",
    "The dog.",
    "u.s.",
    "1,000",
    "3.5 ft",
    "t-shirt",
    "black & white",
    "red, white",
    "red,white",
    "(none)",
    "dont know",
    "a",
    "",
    "yes!",
    "what's up?",
    "black/white",
    "1,000 t-shirts, ok",
    "\tan apple\n",
    "5 o'clock",
    "oclock",
    'say "hi"',
]


def slow_punctuation(text: str) -> str:
    """Character by character, after the rule of the official program."""
    marks = [";", "/", "[", "]", '"', "{", "}", "(", ")", "=", "+", "\\", "_", "-", ">", "<"]
    marks += ["@", "`", ",", "?", "!"]
    comma = any(
        a.isdecimal() and b == "," and c.isdecimal()
        for a, b, c in zip(text, text[1:], text[2:], strict=False)
    )
    out = ""
    for letter in text:
        if letter not in marks:
            out += letter
        elif not (comma or letter + " " in text or " " + letter in text):
            out += " "
    kept = ""
    for at, letter in enumerate(out):
        if letter != "." or (at + 1 < len(out) and out[at + 1].isdecimal()):
            kept += letter
    return kept


@pytest.mark.parametrize("answer", ANSWERS)
def test_punctuation_agrees_with_a_slow_copy(answer):
    assert without_punctuation(answer) == slow_punctuation(answer)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("two", "2"),
        ("None", "0"),
        ("ten dogs", "10 dogs"),
        ("The dog.", "dog"),
        ("a", ""),
        ("an apple and the pear", "apple and pear"),
        ("dont", "don't"),
        ("couldnt've", "couldn't've"),
        ("t-shirt", "t shirt"),
        ("1,000", "1000"),
        ("3.5", "3.5"),
        ("red, white", "red white"),
        ("  YES\n", "yes"),
    ],
)
def test_normalize_answer_gives_the_expected_form(answer, expected):
    assert normalize_answer(answer) == expected


def test_normalize_answer_is_idempotent():
    for answer in ANSWERS:
        assert normalize_answer(normalize_answer(answer)) == normalize_answer(answer)


def test_contractions_lack_one_apostrophe():
    assert len(CONTRACTIONS) == 118  # the official program has two more that change nothing
    for wrong, right in CONTRACTIONS.items():
        if wrong != "somebody'd":
            assert wrong.replace("'", "") == right.replace("'", "") and len(wrong) == len(right) - 1
    assert not [word for word in CONTRACTIONS if re.search(r"\s", word)]


def test_answer_comparisons_normalize_as_documented():
    truths = ["two", "two", "2", "the two"]
    assert exact_answers("two", truths) == ("two", truths)
    assert normalize_answers("two", truths) == ("2", ["2", "2", "2", "2"])
    assert official_answers("two.", truths) == ("2", ["2", "2", "2", "2"])
    assert official_answers("two ", ["two", "two\n"]) == ("two", ["two", "two"])  # all agree
    assert official_answers_2015("two.", truths) == ("2", truths)
    assert official_answers_2015("two", ["two", "two"]) == ("2", ["two", "two"])


@pytest.mark.parametrize("annotators", [10, 5])
def test_vqa_scores_agree_with_every_choice_of_annotators(annotators):
    for count in range(annotators + 1):
        people = [True] * count + [False] * (annotators - count)
        choices = list(itertools.combinations(people, annotators - 1))
        expected = sum(min(sum(chosen) / 3, 1) for chosen in choices) / len(choices)
        found = vqa_scores(torch.tensor([[float(count)]]), annotators)
        assert float(found) == pytest.approx(expected)


def test_people_share_weights_the_loss_by_annotators(generator):
    counts = torch.tensor([[7.0, 3.0, 0.0]])
    logits = torch.randn(1, 3, generator=generator)
    loss = -(people_share(counts) * logits.log_softmax(-1)).sum()
    people = [0] * 7 + [1] * 3
    expected = sum(-logits.log_softmax(-1)[0, answer] for answer in people) / 10
    torch.testing.assert_close(loss, expected)
