"""Are the answers right?"""

from collections import Counter, defaultdict
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from overt.measure.measured import Measured, defined, measured


@measured("accuracy", "share", higher_is_better=True, low=0.0, high=1.0)
def accuracy(logits: Float[Tensor, "b c"], labels: Int[Tensor, " b"]) -> Measured:
    """1 where the largest logit is the label's, else 0; not defined where the label is negative."""
    return defined((logits.argmax(dim=-1) == labels).double(), labels >= 0)


def vqa_scores(counts: Float[Tensor, "b c"], annotators: int = 10) -> Float[Tensor, "b c"]:
    """The score of each answer that `counts` of the annotators gave (Antol et al. 2015).

    An answer is worth `min(n / 3, 1)`, and each annotator in turn is left out, so that people can
    be scored by the same rule: the mean over all choices of 9 out of 10.

    >>> vqa_scores(torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0]]))
    tensor([[0.0000, 0.3000, 0.6000, 0.9000, 1.0000]])
    """
    own_left_out = ((counts - 1).clamp_min(0) / 3).clamp_max(1)
    other_left_out = (counts / 3).clamp_max(1)
    return (counts * own_left_out + (annotators - counts) * other_left_out) / annotators


@measured("soft accuracy", "share", higher_is_better=True, low=0.0, high=1.0)
def soft_accuracy(logits: Float[Tensor, "b c"], answers: Float[Tensor, "b c"]) -> Measured:
    """What the answer with the largest logit is worth; `answers` scores every class.

    With `vqa_scores` this is the accuracy of VQA. A question that no class answers counts 0.
    """
    return answers.gather(-1, logits.argmax(dim=-1, keepdim=True))[:, 0].float()


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
