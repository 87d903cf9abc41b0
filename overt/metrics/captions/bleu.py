"""BLEU-1 to BLEU-4: the n-gram precision of captions.

Papineni, Roukos, Ward and Zhu, "BLEU: a Method for Automatic Evaluation of Machine Translation",
ACL 2002, https://aclanthology.org/P02-1040.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from overt.metrics.captions.validation import check_captions

ORDER = 4
TINY, SMALL = 1e-15, 1e-9  # avoid 0 / 0, as in the published scorers


@dataclass(frozen=True, eq=False)
class Bleu:
    """Statistics of BLEU, one row per caption.

    BLEU of many captions is a ratio of sums, not a mean: `corpus`. For an interval, resample rows
    with `select` and compute `corpus` of each draw.

    Args:
        matched: N-grams that are in some reference, by n.
        total: N-grams of the caption, by n.
        length: Length of the caption.
        reference_length: Length of the reference.

    Example:
        >>> found = bleu([["a", "cat"]], [[["a", "cat"]]])
        >>> found.length, found.corpus()[:2]
        (tensor([2]), tensor([1.0000, 1.0000], dtype=torch.float64))
    """

    matched: Int[Tensor, "b n"]
    total: Int[Tensor, "b n"]
    length: Int[Tensor, " b"]
    reference_length: Int[Tensor, " b"]

    def __len__(self) -> int:
        return len(self.length)

    def select(self, rows: Int[Tensor, " m"]) -> "Bleu":
        """Select captions by index, in this order; an index may be repeated."""
        return Bleu(
            self.matched[rows], self.total[rows], self.length[rows], self.reference_length[rows]
        )

    def corpus(self) -> Float[Tensor, " n"]:
        """Compute BLEU-1 to BLEU-4 of all captions together."""
        matched, total = self.matched.sum(dim=0)[None], self.total.sum(dim=0)[None]
        return _bleu(matched, total, self.length.sum()[None], self.reference_length.sum()[None])[0]

    def each(self) -> Float[Tensor, "b n"]:
        """Compute BLEU-1 to BLEU-4 of every caption by itself; often 0 for n = 4."""
        return _bleu(self.matched, self.total, self.length, self.reference_length)


def bleu(
    candidates: Sequence[Sequence[str]], references: Sequence[Sequence[Sequence[str]]]
) -> Bleu:
    """Count the n-grams of each candidate that are in its references, clipped per reference.

    The reference length is that of the reference nearest in length, the shorter one of ties.

    Args:
        candidates: One caption per image, as lists of words.
        references: The references of each image.

    Returns:
        The statistics; `.corpus()` is BLEU of the set.

    Example:
        >>> bleu([["a", "cat"]], [[["a", "dog"]]]).corpus()[0].round(decimals=3).item()
        0.5
    """
    check_captions(candidates, references)
    matched, total, reference_length = [], [], []
    for words, others in zip(candidates, references, strict=True):
        most: Counter[tuple[str, ...]] = Counter()
        for other in others:
            most |= _ngrams(other)
        common = [0] * ORDER
        for gram, count in _ngrams(words).items():
            common[len(gram) - 1] += min(count, most[gram])
        matched.append(common)
        total.append([max(0, len(words) - n) for n in range(ORDER)])
        reference_length.append(
            min((abs(len(other) - len(words)), len(other)) for other in others)[1]
        )
    return Bleu(
        torch.tensor(matched).reshape(-1, ORDER),
        torch.tensor(total).reshape(-1, ORDER),
        torch.tensor([len(words) for words in candidates], dtype=torch.long),
        torch.tensor(reference_length, dtype=torch.long),
    )


def _ngrams(words: Sequence[str]) -> Counter[tuple[str, ...]]:
    many = range(1, ORDER + 1)
    return Counter(tuple(words[at : at + n]) for n in many for at in range(len(words) - n + 1))


def _bleu(matched: Tensor, total: Tensor, length: Tensor, reference_length: Tensor) -> Tensor:
    shares = (matched.double() + TINY) / (total.double() + SMALL)
    order = torch.arange(1, ORDER + 1, dtype=torch.float64)
    means = shares.cumprod(dim=-1) ** (1 / order)
    ratio = (length.double() + TINY) / (reference_length.double() + SMALL)
    brevity = torch.where(ratio < 1, (1 - 1 / ratio).exp(), 1.0)
    return means * brevity[:, None]
