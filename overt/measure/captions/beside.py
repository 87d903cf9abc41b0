"""CIDEr-D of captions that lie on a card: every n-gram beside every one of the references.

The same numbers as `Consensus`, to 1e-9, made of comparisons of whole tensors: no caption leaves
the card and nothing in it is waited for, so that it can be recorded. An n-gram is a number, its
tokens in 16 bits each; `Consensus` sorts such numbers and searches, this compares all with all.
Captions are short. What costs on a card is not how much is compared but how many kernels there
are: some forty, for all lengths of n-grams at once.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import pad

from overt.measure.captions.cider import ORDER, SCALE, SIGMA, Consensus, Frequencies, Ids

BITS = 16  # of a token in the number of an n-gram: 0 is no token, so the first id is 1
MOST = 2**BITS - 2  # ids are below this
ABSENT = -1  # what stands in the place of n-grams that a reference is too short for


class Beside(nn.Module):
    """CIDEr-D against the references of all images, which are buffers: `.to(device)` moves them.

    `references` and `frequencies` are those of `Consensus`; ids are below 65,534, those of captions
    too, which are not looked at to find out. Call it with tokens, a mask of those that are there,
    which stand first, and the number of the image of each caption.
    """

    said: Int[Tensor, "t j n"]
    squares: Float[Tensor, "t n"]
    lengths: Float[Tensor, " t"]
    texts: Int[Tensor, "a m"]
    share: Float[Tensor, "a m"]
    known: Int[Tensor, " g"]
    rare: Float[Tensor, " g"]
    shifts: Int[Tensor, " n"]

    def __init__(
        self, references: Sequence[Sequence[Ids]], frequencies: Frequencies | None = None
    ) -> None:
        super().__init__()
        scores = Consensus(references, frequencies)
        codes = _codes([np.asarray(text, np.int64) for text in chain.from_iterable(references)])
        there = np.lib.stride_tricks.sliding_window_view(codes, ORDER, axis=1)
        shifts = BITS * np.arange(ORDER)
        self._keep("said", np.where(there > 0, np.cumsum(there << shifts, axis=-1), ABSENT))
        self._keep("squares", np.stack(scores.norms, axis=-1) ** 2)
        self._keep("lengths", scores.lengths.astype(np.float64))
        many = np.arange(scores.per_image.max()) < scores.per_image[:, None]
        self._keep("texts", np.where(many, scores.first[:, None] + np.arange(many.shape[1]), 0))
        self._keep("share", SCALE / ORDER * many / scores.per_image[:, None])
        keys, rare = _table(scores)
        self._keep("known", keys)
        self._keep("rare", rare**2)
        self._keep("shifts", shifts)

    def _keep(self, name: str, values: np.ndarray) -> None:
        self.register_buffer(name, torch.from_numpy(np.ascontiguousarray(values)))

    def __len__(self) -> int:
        return len(self.texts)

    @torch.no_grad()
    def forward(
        self, tokens: Int[Tensor, "r i"], mask: Bool[Tensor, "r i"], images: Int[Tensor, " r"]
    ) -> Float[Tensor, " r"]:
        """The score of every caption, 0 to 10."""
        codes = pad((tokens + 1) * mask, (0, ORDER)).unfold(1, ORDER, 1)
        there = codes != 0  # the last token of an n-gram is there only if all of it is
        grams = (codes << self.shifts).cumsum(dim=-1) * there
        weight = self._rare(grams) * there
        count = (grams[:, :, None] == grams[:, None]).sum(dim=2, dtype=torch.float64)
        texts = self.texts[images]
        held = (grams[:, None, :, None] == self.said[texts][:, :, None]).sum(
            dim=3, dtype=torch.float64
        )
        # an n-gram stands at as many places as it is counted: each has its share of the product
        both = torch.minimum(count[:, None], held) * held * (weight / count)[:, None]
        norm = (count * weight).sum(dim=1)[:, None] * self.squares[texts]
        alike = (both.sum(dim=2) / norm.clamp_min(1e-60).sqrt()).sum(dim=-1)
        # lengths are counted in bigrams, as published
        apart = there[..., 1].sum(dim=1, dtype=torch.float64)[:, None] - self.lengths[texts]
        alike = alike * (apart.square() / (-2 * SIGMA**2)).exp() * self.share[images]
        return alike.sum(dim=-1)

    def _rare(self, grams: Int[Tensor, "r i n"]) -> Float[Tensor, "r i n"]:
        """How rare each n-gram is, squared; the last number is that of what nobody ever said."""
        at = torch.searchsorted(self.known, grams)
        return torch.where(self.known[at] == grams, self.rare[at], self.rare[-1])


def _codes(texts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Texts as rows of codes, each with as many absent ones at its end as the longest n-gram."""
    if any(len(one) and (one.min() < 0 or one.max() >= MOST) for one in texts):
        raise ValueError(f"captions are compared by ids from 0 to {MOST - 1}: use Consensus")
    rows = np.zeros((len(texts), max(map(len, texts)) + ORDER), np.int64)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text)] = text + 1
    return rows


def _table(scores: Consensus) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The numbers of all n-grams that are known, sorted, and how rare each is.

    Behind them stands a number that is no n-gram, as rare as what nobody ever said.
    """
    every, first = [], np.zeros(0, np.int64)
    before = np.zeros(0, np.int64)
    for n, table in enumerate(scores.frequencies.tables):
        keys = table.keys.astype(np.int64)  # of `Consensus`: what comes before, and the last token
        by_number = np.zeros(len(keys), np.int64)
        if n == 0:
            by_number[table.numbers] = keys + 1
            first = by_number
        else:
            last = first[keys & (2**32 - 1)]
            by_number[table.numbers] = before[keys >> 32] + (last << (BITS * n))
        every.append(by_number)
        before = by_number
    grams = np.concatenate(every)
    if len(first) and first.max() > MOST:
        raise ValueError(f"captions are compared by ids from 0 to {MOST - 1}: use Consensus")
    rare = np.concatenate([one[:-1] for one in scores.rare])
    order = np.argsort(grams)
    return (
        np.append(grams[order], np.iinfo(np.int64).max),
        np.append(rare[order], scores.rare[0][-1]),
    )


def in_one(lots: Sequence[Tensor]) -> Tensor:
    """Rows of several lots under each other, as wide as the widest; what is missing is zero."""
    width = max(one.shape[1] for one in lots)
    short = [width - one.shape[1] for one in lots]
    return torch.cat([pad(one, (0, n)) if n else one for one, n in zip(lots, short, strict=True)])
