"""Accuracy of answers: classification, VQA and WUPS."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from overt.data.vqa_answers import AnswerMatching, official_answers, vqa_scores
from overt.losses.attention_losses import check_labels, check_logits, check_soft_labels
from overt.metrics.metric import SampleScores, declare_metric, mask_undefined


@declare_metric("accuracy", "share", higher_is_better=True, low=0.0, high=1.0)
def accuracy(logits: Float[Tensor, "b c"], labels: Int[Tensor, " b"]) -> SampleScores:
    """Compute whether the largest logit is that of the label: 1 or 0 per sample.

    A label beyond the classes raises an error on a CPU. On a GPU, where the check would
    synchronize, such a sample is NaN.

    Args:
        logits: Scores of the classes.
        labels: The right classes; negative where unknown.

    Returns:
        One score per sample; NaN where the label is negative or a logit is NaN.

    Example:
        >>> logits = torch.tensor([[2.0, 1.0], [2.0, 1.0], [2.0, 1.0]])
        >>> accuracy(logits, torch.tensor([0, 1, -1]))  # right, wrong, and without a label
        tensor([1., 0., nan])
    """
    check_logits(logits, labels)
    there = has_valid_label(labels, logits.shape[-1]) & ~logits.isnan().any(dim=-1)
    return mask_undefined((logits.argmax(dim=-1) == labels).double(), there)


def has_valid_label(labels: Int[Tensor, " b"], classes: int) -> Bool[Tensor, " b"]:
    """Return which samples have a label; negative labels are unknown.

    On a CPU, where it needs no synchronization, a label beyond the classes raises an error.
    """
    beyond = labels >= classes
    # reading the mask would synchronize a GPU
    if beyond.device.type == "cpu":
        check_labels(labels, beyond, classes, "below 0")
    return (labels >= 0) & ~beyond


@declare_metric("soft accuracy", "share", higher_is_better=True, low=0.0, high=1.0)
def soft_accuracy(logits: Float[Tensor, "b c"], answers: Float[Tensor, "b c"]) -> SampleScores:
    """Compute the score of the answer with the largest logit, given a score of every class.

    With `vqa_scores` this is VQA accuracy. A question that no class answers counts 0.

    Args:
        logits: Scores of the classes.
        answers: What each class is worth as an answer.

    Returns:
        One score per sample; NaN where a logit is NaN.

    Example:
        >>> soft_accuracy(torch.tensor([[2.0, 1.0]]), torch.tensor([[0.3, 1.0]]))
        tensor([0.3000])
    """
    check_soft_labels(logits, answers)
    worth = answers.gather(-1, logits.argmax(dim=-1, keepdim=True))[:, 0]
    return mask_undefined(worth, ~logits.isnan().any(dim=-1))


@declare_metric("VQA accuracy", "share", higher_is_better=True, low=0.0, high=1.0)
def vqa_accuracy(
    answers: Sequence[str],
    truths: Sequence[Sequence[str]],
    reading: AnswerMatching = official_answers,
) -> SampleScores:
    """Compute the VQA accuracy of answers as strings, given the answers of people.

    Args:
        answers: One answer per question.
        truths: The answers of people to each question.
        reading: How spellings are normalized: `official_answers` is the official evaluation,
            `normalize_answers` treats both sides alike, `exact_answers` compares strings.

    Returns:
        One score per question.

    Example:
        >>> vqa_accuracy(["yes"], [["yes"] * 2 + ["no"] * 8])  # (2 (1/3) + 8 (2/3)) / 10
        tensor([0.6000])
    """
    _check_answers(answers, truths)
    found = [_answer_score(*reading(*one)) for one in zip(answers, truths, strict=True)]
    return torch.tensor(found, dtype=torch.float32)


@declare_metric("reachable VQA accuracy", "share", higher_is_better=None, low=0.0, high=1.0)
def vqa_accuracy_upper_bound(
    truths: Sequence[Sequence[str]],
    reading: AnswerMatching = official_answers,
    spell: Callable[[str], str] = str,
) -> SampleScores:
    """Compute the best VQA accuracy that any answer of people reaches.

    Args:
        truths: The answers of people to each question.
        reading: As in `vqa_accuracy`.
        spell: How the classes of a model spell an answer: `normalize_answer` for normalized
            classes. What is lost by that is lost to every such model.

    Returns:
        One score per question; 0 where it cannot be answered.

    Example:
        >>> vqa_accuracy_upper_bound([["red"] * 10, ["red"] * 2 + ["blue"] * 2 + list("abcdef")])
        tensor([1.0000, 0.6000])
    """
    _refuse_strings(truths, "people's answers")
    found = []
    for given in truths:
        # dict.fromkeys: each distinct answer once, in a fixed order
        worth = [_answer_score(*reading(spell(answer), given)) for answer in dict.fromkeys(given)]
        found.append(max(worth, default=0.0))
    return torch.tensor(found, dtype=torch.float32)


@declare_metric("WUPS", "share", higher_is_better=True, low=0.0, high=1.0)
def wups(
    answers: Sequence[Sequence[str]],
    truths: Sequence[Sequence[str]],
    alike: Callable[[str, str], float],
    threshold: float = 0.9,
) -> SampleScores:
    """Compute WUPS, the similarity in meaning of two sets of answers.

    Malinowski and Fritz 2014, section 2.3. Every answer is matched with the most similar true
    answer, and the other way round. Similarities are multiplied, and the smaller product counts.
    With threshold 1 and `alike` 1 for equal words only, this is accuracy over sets, where a miss of
    similarity 0 counts 0.

    Args:
        answers: The set of answers per question.
        truths: The set of true answers per question.
        alike: Returns the similarity of two words from 0 to 1, such as Wu-Palmer similarity over
            WordNet.
        threshold: Similarities below it count a tenth.

    Returns:
        One score per question.
    """
    _check_answers(answers, truths)
    _refuse_strings(answers, "answers")

    def worth(one: str, other: str) -> float:
        found = 1.0 if one == other else alike(one, other)
        # below the threshold a similarity counts a tenth (WUPS 0.9)
        return found if found >= threshold else 0.1 * found

    found = []
    for given, true in zip(answers, truths, strict=True):
        # an empty product would be 1: two empty sets agree, one empty set does not
        if not given or not true:
            found.append(float(not given and not true))
            continue
        # both directions: `there` punishes answers too many, `back` answers that are missing
        there = math.prod(max(worth(a, t) for t in true) for a in given)
        back = math.prod(max(worth(a, t) for a in given) for t in true)
        found.append(min(there, back))
    return torch.tensor(found, dtype=torch.float32)


@declare_metric("chance", "share", higher_is_better=None, low=0.0, high=1.0)
def majority_accuracy(
    labels: Int[Tensor, " b"], groups: Sequence[str] | None = None
) -> SampleScores:
    """Compute the accuracy of always answering with the most common label of the sample's group.

    The labels are those of the evaluation, so no answer that ignores the input does better.

    Args:
        labels: The right classes; negative where unknown.
        groups: The group of each sample; one group by default.

    Returns:
        One score per sample, 0 or 1.
    """
    names = ["all"] * len(labels) if groups is None else groups
    numbers = labels.tolist()
    seen: dict[str, Counter[int]] = defaultdict(Counter)
    for name, label in zip(names, numbers, strict=True):
        if label >= 0:
            seen[name][label] += 1
    common = {name: counted.most_common(1)[0][0] for name, counted in seen.items()}
    # -1 for a group without labels: it equals no valid label
    guesses = torch.tensor([common.get(name, -1) for name in names], device=labels.device)
    return mask_undefined((guesses == labels).double(), labels >= 0)


def split_by_group(values: SampleScores, groups: Sequence[str]) -> dict[str, Tensor]:
    """Split scores by group, groups in alphabetical order."""
    if len(values) != len(groups):
        raise ValueError(
            f"values and groups must have the same length, got {len(values)} and {len(groups)}"
        )
    rows: dict[str, list[int]] = defaultdict(list)
    for at, name in enumerate(groups):
        rows[name].append(at)
    return {name: values[rows[name]] for name in sorted(rows)}


def _check_answers(answers: Sequence[object], truths: Sequence[Sequence[str]]) -> None:
    if isinstance(answers, str):
        raise ValueError(f"answers must be a list, got the string {answers[:30]!r}")
    if len(answers) != len(truths):
        raise ValueError(
            f"answers and truths must have the same length, got {len(answers)} and {len(truths)}"
        )
    _refuse_strings(truths, "people's answers")


def _refuse_strings(many: Sequence[Sequence[str]], what: str) -> None:
    """Raise for a string instead of a list of answers: its letters would be the answers."""
    # index 0 is the whole sequence, which may itself be a string
    for at, given in enumerate([many, *many]):
        if isinstance(given, str):
            where = f" to question {at - 1}" if at else ""
            raise ValueError(
                f"{what}{where} must be a list of answers, got the string {given[:30]!r}: "
                "put it into a list"
            )


def _answer_score(answer: str, truths: Sequence[str]) -> float:
    return _vqa_score(sum(truth == answer for truth in truths), len(truths)) if truths else 0.0


@cache
def _vqa_score(agreeing: int, people: int) -> float:
    return float(vqa_scores(torch.tensor([[float(agreeing)]]), people))
