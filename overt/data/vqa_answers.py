"""VQA answers: soft scores of ten human answers, and normalisation of spelling.

Antol et al., "VQA: Visual Question Answering", ICCV 2015, and its evaluation program
(https://github.com/GT-Vision-Lab/VQA, current version): answers are compared after punctuation is
removed, numbers are written in digits, articles dropped and contractions given their apostrophe.
"""

import re
from collections.abc import Callable, Sequence

from jaxtyping import Float
from torch import Tensor

AnswerMatching = Callable[[str, Sequence[str]], tuple[str, list[str]]]

PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
DIGITS = {
    word: str(number)
    for number, word in enumerate("zero one two three four five six seven eight nine ten".split())
} | {"none": "0"}
ARTICLES = ("a", "an", "the")
ONE_APOSTROPHE = """
    ain't aren't can't could've couldn't didn't doesn't don't hadn't hasn't haven't he'd he's how'd
    how'll how's I'm I've isn't it'd it'll ma'am mightn't might've mustn't must've needn't not've
    o'clock oughtn't shan't should've shouldn't somebody'll somebody's someone'd someone'll
    someone's something'd something'll that's there'd there're there's they'd they'll they're
    they've 'twas wasn't we've weren't what'll what're what's what've when's where'd where's
    where've who'd who'll who's who've why'll why're why's won't would've wouldn't y'all you'd
    you'll you're you've
"""
SEVERAL_APOSTROPHES = """
    couldn't've hadn't've he'd've I'd've it'd've mightn't've 'ow's'at she'd've shouldn't've
    somebody'd've someone'd've something'd've there'd've they'd've we'd've who'd've wouldn't've
    y'all'll y'all'd've you'd've
"""


def _without_one(word: str) -> list[str]:
    """Return the spellings of a word with one of its apostrophes missing."""
    places = [place for place, letter in enumerate(word) if letter == "'"]
    return [word[:place] + word[place + 1 :] for place in places]


CONTRACTIONS = {
    wrong: right
    for right in (*ONE_APOSTROPHE.split(), *SEVERAL_APOSTROPHES.split())
    for wrong in _without_one(right)
} | {"somebody'd": "somebodyd"}  # reversed in the official program, so here too


def vqa_scores(counts: Float[Tensor, "b c"], annotators: int = 10) -> Float[Tensor, "b c"]:
    """Return the VQA score of each answer that `counts` of the annotators gave (Antol et al. 2015).

    An answer is worth `min(n / 3, 1)`, and each annotator in turn is left out, so that people can
    be scored by the same rule: the mean over all choices of 9 out of 10.

    >>> import torch
    >>> vqa_scores(torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0]]))
    tensor([[0.0000, 0.3000, 0.6000, 0.9000, 1.0000]])
    """
    own_left_out = ((counts - 1).clamp_min(0) / 3).clamp_max(1)
    other_left_out = (counts / 3).clamp_max(1)
    return (counts * own_left_out + (annotators - counts) * other_left_out) / annotators


def people_share(counts: Float[Tensor, "b c"], annotators: int = 10) -> Float[Tensor, "b c"]:
    """Return the share of people who gave each answer.

    With these as weights, cross-entropy is the mean over people of their answer's negative
    log-probability, the loss of Show, Ask, Attend and Answer (Kazemi and Elqursh 2017).
    """
    return counts / annotators


def without_punctuation(answer: str) -> str:
    """Remove punctuation from an answer like the official program.

    A mark with a space beside it is removed, another becomes a space; in an answer with a comma
    between digits all marks are removed. A full stop is kept before a digit.

    >>> without_punctuation("1,000 t-shirts, u.s.")
    '1000 tshirts us'
    """
    joined = re.search(r"\d,\d", answer) is not None
    found = answer
    for mark in PUNCTUATION:
        alone = f"{mark} " in answer or f" {mark}" in answer
        found = found.replace(mark, "" if joined or alone else " ")
    return re.sub(r"\.(?!\d)", "", found, count=32)


def normalize_answer(answer: str) -> str:
    """Normalise an answer like the official evaluation program of VQA.

    >>> normalize_answer("The two dogs, dont!")
    "2 dogs don't"

    Args:
        answer: An answer as people wrote it.

    Returns:
        The answer in lower case, without punctuation and articles, with digits.
    """
    words = [DIGITS.get(word, word) for word in without_punctuation(_tidy(answer)).lower().split()]
    return " ".join(CONTRACTIONS.get(word, word) for word in words if word not in ARTICLES)


def exact_answers(answer: str, truths: Sequence[str]) -> tuple[str, list[str]]:
    """Compare answers letter by letter."""
    return answer, list(truths)


def normalize_answers(answer: str, truths: Sequence[str]) -> tuple[str, list[str]]:
    """Compare answers after normalising both sides."""
    return normalize_answer(answer), [normalize_answer(truth) for truth in truths]


def official_answers(answer: str, truths: Sequence[str]) -> tuple[str, list[str]]:
    """Compare answers like the official program: normalised, but only where people differ.

    Where all people answered "the dog", a model whose classes are normalised answers "dog" and is
    wrong.
    """
    truths = [_tidy(truth) for truth in truths]
    if len(set(truths)) < 2:
        return _tidy(answer), truths
    return normalize_answers(answer, truths)


def official_answers_2015(answer: str, truths: Sequence[str]) -> tuple[str, list[str]]:
    """Compare answers like the program of 2015, which older results use.

    Predicted answers are normalised; human answers lose only their punctuation, and only where
    people differ. Where people answered "two" or "the dog" no prediction can be right.
    """
    if len(set(truths)) < 2:
        return normalize_answer(answer), list(truths)
    return normalize_answer(answer), [without_punctuation(truth) for truth in truths]


def _tidy(answer: str) -> str:
    return answer.replace("\n", " ").replace("\t", " ").strip()
