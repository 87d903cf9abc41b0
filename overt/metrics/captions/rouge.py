"""ROUGE-L: the longest common subsequence of a caption and its references.

Lin, "ROUGE: A Package for Automatic Evaluation of Summaries", 2004,
https://aclanthology.org/W04-1013, section 3, as used for captions.
"""

from collections.abc import Sequence

import torch

from overt.metrics.captions.validation import check_captions
from overt.metrics.metric import SampleScores, declare_metric

BETA = 1.2  # weight of recall relative to precision


@declare_metric("ROUGE-L", "score", higher_is_better=True, low=0.0, high=1.0)
def rouge_l(
    candidates: Sequence[Sequence[str]], references: Sequence[Sequence[Sequence[str]]]
) -> SampleScores:
    """Compute ROUGE-L: the F score of the longest common subsequence with the references.

    Precision and recall are the best over the references, with beta 1.2; they may come from
    different references, as in the published scorer.

    Args:
        candidates: One caption per image, as lists of words.
        references: The references of each image.

    Returns:
        One score per caption.

    Example:
        >>> rouge_l([["a", "cat"]], [[["a", "cat"], ["a", "dog"]]])
        tensor([1.], dtype=torch.float64)
    """
    check_captions(candidates, references)
    return torch.tensor(
        [_score(words, others) for words, others in zip(candidates, references, strict=True)],
        dtype=torch.float64,
    )


def _score(words: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    common = [common_length(words, other) for other in references]
    precision = max(common) / max(1, len(words))
    recall = max(n / max(1, len(other)) for n, other in zip(common, references, strict=True))
    if not precision or not recall:
        return 0.0
    return (1 + BETA**2) * precision * recall / (recall + BETA**2 * precision)


def common_length(one: Sequence[str], other: Sequence[str]) -> int:
    """Compute the length of the longest common subsequence.

    A row of the dynamic program grows by 0 or 1 from place to place, so a row is an integer with
    one bit per place, and one addition computes the next row (Hyyro 2004).

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
