"""Are the answers right?"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from overt.data.answers import Reading, as_published, vqa_scores
from overt.measure.measured import Measured, defined, measured
from overt.supervise.losses import check_labels


@measured("accuracy", "share", higher_is_better=True, low=0.0, high=1.0)
def accuracy(logits: Float[Tensor, "b c"], labels: Int[Tensor, " b"]) -> Measured:
    """1 where the largest logit is the label's, else 0.

    Not defined where the label is negative, or a logit is NaN. A label that is no class is refused
    on a CPU; on a card, which would have to wait for it, its sample is not defined.
    """
    there = labelled(labels, logits.shape[-1]) & ~logits.isnan().any(dim=-1)
    return defined((logits.argmax(dim=-1) == labels).double(), there)


def labelled(labels: Int[Tensor, " b"], classes: int) -> Bool[Tensor, " b"]:
    """Which samples are labelled with a class; below 0 none is known.

    On a CPU, where it costs no wait, a label that is no class is told in a sentence.
    """
    beyond = labels >= classes
    if beyond.device.type == "cpu":
        check_labels(labels, beyond, classes, "below 0")
    return (labels >= 0) & ~beyond


@measured("soft accuracy", "share", higher_is_better=True, low=0.0, high=1.0)
def soft_accuracy(logits: Float[Tensor, "b c"], answers: Float[Tensor, "b c"]) -> Measured:
    """What the answer with the largest logit is worth; `answers` scores every class.

    With `vqa_scores` this is the accuracy of VQA. A question that no class answers counts 0. Not
    defined where a logit is NaN.
    """
    worth = answers.gather(-1, logits.argmax(dim=-1, keepdim=True))[:, 0]
    return defined(worth, ~logits.isnan().any(dim=-1))


@measured("VQA accuracy", "share", higher_is_better=True, low=0.0, high=1.0)
def vqa_accuracy(
    answers: Sequence[str], truths: Sequence[Sequence[str]], reading: Reading = as_published
) -> Measured:
    """What each answer is worth to the people who answered the same question: `vqa_scores`.

    `reading` says how spellings are made alike: `as_published` is the official evaluation,
    `normalized` treats both sides alike, `as_said` compares letters.
    """
    if len(answers) != len(truths):
        raise ValueError(f"{len(answers)} answers to {len(truths)} questions")
    found = [_worth(*reading(*one)) for one in zip(answers, truths, strict=True)]
    return torch.tensor(found, dtype=torch.float32)


@measured("reachable VQA accuracy", "share", higher_is_better=None, low=0.0, high=1.0)
def reachable(
    truths: Sequence[Sequence[str]],
    reading: Reading = as_published,
    spell: Callable[[str], str] = str,
) -> Measured:
    """The most that any of people's own answers is worth: 0 where a question cannot be answered.

    `spell` is what a model's classes make of an answer: `normalize` where the classes were
    normalised. What is lost then is lost to every such model, whatever it learns.
    """
    found = []
    for given in truths:
        worth = [_worth(*reading(spell(answer), given)) for answer in dict.fromkeys(given)]
        found.append(max(worth, default=0.0))
    return torch.tensor(found, dtype=torch.float32)


@measured("WUPS", "share", higher_is_better=True, low=0.0, high=1.0)
def wups(
    answers: Sequence[Sequence[str]],
    truths: Sequence[Sequence[str]],
    alike: Callable[[str, str], float],
    threshold: float = 0.9,
) -> Measured:
    """How alike two sets of answers are in meaning (Malinowski and Fritz 2014, section 2.3).

    Every answer is held against the most similar true one, and the other way round; similarities
    are multiplied and the smaller product counts. `alike` gives the similarity of two words from 0
    to 1, as Wu and Palmer's does over WordNet; below `threshold` it is worth a tenth. With the
    threshold 1 and `alike` 1 for equal words only this is accuracy over sets, where a miss of
    similarity 0 counts 0.
    """
    if len(answers) != len(truths):
        raise ValueError(f"{len(answers)} answers to {len(truths)} questions")

    def worth(one: str, other: str) -> float:
        found = 1.0 if one == other else alike(one, other)
        return found if found >= threshold else 0.1 * found

    found = []
    for given, true in zip(answers, truths, strict=True):
        if not given or not true:
            found.append(float(not given and not true))
            continue
        there = math.prod(max(worth(a, t) for t in true) for a in given)
        back = math.prod(max(worth(a, t) for a in given) for t in true)
        found.append(min(there, back))
    return torch.tensor(found, dtype=torch.float32)


@measured("chance", "share", higher_is_better=None, low=0.0, high=1.0)
def chance(labels: Int[Tensor, " b"], groups: Sequence[str] | None = None) -> Measured:
    """The accuracy of giving the most common label of the sample's group every time.

    The labels are those it is scored on: no answer that ignores the input does better.
    """
    names = ["all"] * len(labels) if groups is None else groups
    numbers = labels.tolist()
    seen: dict[str, Counter[int]] = defaultdict(Counter)
    for name, label in zip(names, numbers, strict=True):
        if label >= 0:
            seen[name][label] += 1
    common = {name: counted.most_common(1)[0][0] for name, counted in seen.items()}
    guesses = torch.tensor([common.get(name, -1) for name in names], device=labels.device)
    return defined((guesses == labels).double(), labels >= 0)


def by_group(values: Measured, groups: Sequence[str]) -> dict[str, Tensor]:
    """The numbers of each group, groups in the order of their names."""
    if len(values) != len(groups):
        raise ValueError(f"{len(values)} numbers for {len(groups)} groups")
    rows: dict[str, list[int]] = defaultdict(list)
    for at, name in enumerate(groups):
        rows[name].append(at)
    return {name: values[rows[name]] for name in sorted(rows)}


def _worth(answer: str, truths: Sequence[str]) -> float:
    return _score(sum(truth == answer for truth in truths), len(truths)) if truths else 0.0


@cache
def _score(agreeing: int, people: int) -> float:
    return float(vqa_scores(torch.tensor([[float(agreeing)]]), people))
