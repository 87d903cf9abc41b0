"""BLEU-1 to BLEU-4: how many n-grams of a caption are in some reference.

Papineni, Roukos, Ward and Zhu, "BLEU: a Method for Automatic Evaluation of Machine Translation",
ACL 2002, https://aclanthology.org/P02-1040.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

ORDER = 4
TINY, SMALL = 1e-15, 1e-9  # so that nothing out of nothing is 0, as published scorers have it


@dataclass(frozen=True, eq=False)
class Bleu:
    """What BLEU is made of, one row a caption: n-grams in some reference, n-grams, two lengths.

    BLEU of many captions is no mean of theirs, but a ratio of sums: `corpus`. For an interval, draw
    rows with `select` and take the corpus of each draw.
    """

    matched: Int[Tensor, "b n"]
    said: Int[Tensor, "b n"]
    length: Int[Tensor, " b"]
    wanted: Int[Tensor, " b"]

    def __len__(self) -> int:
        return len(self.length)

    def select(self, rows: Int[Tensor, " m"]) -> "Bleu":
        """The captions named, in their order; one may be named twice."""
        return Bleu(self.matched[rows], self.said[rows], self.length[rows], self.wanted[rows])

    def corpus(self) -> Float[Tensor, " n"]:
        """BLEU-1 to BLEU-4 of all captions together."""
        matched, said = self.matched.sum(dim=0)[None], self.said.sum(dim=0)[None]
        return _bleu(matched, said, self.length.sum()[None], self.wanted.sum()[None])[0]

    def each(self) -> Float[Tensor, "b n"]:
        """BLEU-1 to BLEU-4 of every caption by itself; often 0 for n = 4."""
        return _bleu(self.matched, self.said, self.length, self.wanted)


def bleu(
    candidates: Sequence[Sequence[str]], references: Sequence[Sequence[Sequence[str]]]
) -> Bleu:
    """Count n-grams of each candidate in its references, at most as often as one of them has it.

    The length wanted is that of the reference nearest in length, the shorter of two equals.
    """
    if len(candidates) != len(references):
        raise ValueError(f"{len(candidates)} candidates for {len(references)} sets of references")
    matched, said, wanted = [], [], []
    for words, others in zip(candidates, references, strict=True):
        if not others:
            raise ValueError("a candidate needs at least one reference")
        most: Counter[tuple[str, ...]] = Counter()
        for other in others:
            most |= _grams(other)
        common = [0] * ORDER
        for gram, count in _grams(words).items():
            common[len(gram) - 1] += min(count, most[gram])
        matched.append(common)
        said.append([max(0, len(words) - n) for n in range(ORDER)])
        wanted.append(min((abs(len(other) - len(words)), len(other)) for other in others)[1])
    return Bleu(
        torch.tensor(matched).reshape(-1, ORDER),
        torch.tensor(said).reshape(-1, ORDER),
        torch.tensor([len(words) for words in candidates], dtype=torch.long),
        torch.tensor(wanted, dtype=torch.long),
    )


def _grams(words: Sequence[str]) -> Counter[tuple[str, ...]]:
    many = range(1, ORDER + 1)
    return Counter(tuple(words[at : at + n]) for n in many for at in range(len(words) - n + 1))


def _bleu(matched: Tensor, said: Tensor, length: Tensor, wanted: Tensor) -> Tensor:
    shares = (matched.double() + TINY) / (said.double() + SMALL)
    order = torch.arange(1, ORDER + 1, dtype=torch.float64)
    means = shares.cumprod(dim=-1) ** (1 / order)
    ratio = (length.double() + TINY) / (wanted.double() + SMALL)
    brief = torch.where(ratio < 1, (1 - 1 / ratio).exp(), 1.0)
    return means * brief[:, None]
