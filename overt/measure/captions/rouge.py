"""ROUGE-L: the longest common subsequence of a caption and its references.

Lin, "ROUGE: A Package for Automatic Evaluation of Summaries", 2004,
https://aclanthology.org/W04-1013, section 3, as evaluation of captions uses it.
"""

from collections.abc import Sequence

import torch

from overt.measure.measured import Measured, measured

BETA = 1.2  # how much more recall counts than precision


@measured("ROUGE-L", "score", higher_is_better=True, low=0.0, high=1.0)
def rouge_l(
    candidates: Sequence[Sequence[str]], references: Sequence[Sequence[Sequence[str]]]
) -> Measured:
    """F of the best precision and the best recall over the references, with beta 1.2.

    The two may come from different references, as in the published scorer.
    """
    if len(candidates) != len(references):
        raise ValueError(f"{len(candidates)} candidates for {len(references)} sets of references")
    return torch.tensor(
        [_score(words, others) for words, others in zip(candidates, references, strict=True)],
        dtype=torch.float64,
    )


def _score(words: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    if not references:
        raise ValueError("a candidate needs at least one reference")
    common = [common_length(words, other) for other in references]
    precision = max(common) / max(1, len(words))
    recall = max(n / max(1, len(other)) for n, other in zip(common, references, strict=True))
    if not precision or not recall:
        return 0.0
    return (1 + BETA**2) * precision * recall / (recall + BETA**2 * precision)


def common_length(one: Sequence[str], other: Sequence[str]) -> int:
    """The length of the longest common subsequence.

    A row of the usual table differs by 0 or 1 from place to place, so a row is a number with a bit
    a place, and one addition makes the next row (Hyyro 2004).

    >>> common_length("a b c d".split(), "b x d a".split())
    2
    """
    places: dict[str, int] = {}
    for at, word in enumerate(one):
        places[word] = places.get(word, 0) | 1 << at
    whole = (1 << len(one)) - 1
    row = whole
    for word in other:
        hit = row & places.get(word, 0)
        row = ((row + hit) | (row - hit)) & whole
    return len(one) - row.bit_count()
