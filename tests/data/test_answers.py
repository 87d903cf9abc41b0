import itertools
import re

import pytest
import torch

from overt.data.answers import (
    CONTRACTIONS,
    as_first_published,
    as_published,
    as_said,
    normalize,
    normalized,
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
    """Character by character, from the words of the program's rule."""
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
def test_normal_forms_by_hand(answer, expected):
    assert normalize(answer) == expected


def test_doing_it_twice_is_doing_it_once_but_for_marks_that_meet():
    for answer in ANSWERS:
        assert normalize(normalize(answer)) == normalize(answer)


def test_contractions_miss_one_apostrophe():
    assert len(CONTRACTIONS) == 118  # the program has two more that change nothing
    for wrong, right in CONTRACTIONS.items():
        if wrong != "somebody'd":
            assert wrong.replace("'", "") == right.replace("'", "") and len(wrong) == len(right) - 1
    assert not [word for word in CONTRACTIONS if re.search(r"\s", word)]


def test_readings():
    truths = ["two", "two", "2", "the two"]
    assert as_said("two", truths) == ("two", truths)
    assert normalized("two", truths) == ("2", ["2", "2", "2", "2"])
    assert as_published("two.", truths) == ("2", ["2", "2", "2", "2"])
    assert as_published("two ", ["two", "two\n"]) == ("two", ["two", "two"])  # all agree
    assert as_first_published("two.", truths) == ("2", truths)
    assert as_first_published("two", ["two", "two"]) == ("2", ["two", "two"])


@pytest.mark.parametrize("annotators", [10, 5])
def test_vqa_scores_agree_with_every_choice_of_annotators(annotators):
    for count in range(annotators + 1):
        people = [True] * count + [False] * (annotators - count)
        choices = list(itertools.combinations(people, annotators - 1))
        expected = sum(min(sum(chosen) / 3, 1) for chosen in choices) / len(choices)
        found = vqa_scores(torch.tensor([[float(count)]]), annotators)
        assert float(found) == pytest.approx(expected)


def test_shares_weigh_the_people(generator):
    counts = torch.tensor([[7.0, 3.0, 0.0]])
    logits = torch.randn(1, 3, generator=generator)
    loss = -(people_share(counts) * logits.log_softmax(-1)).sum()
    people = [0] * 7 + [1] * 3
    slow = sum(-logits.log_softmax(-1)[0, answer] for answer in people) / 10
    torch.testing.assert_close(loss, slow)
