"""CIDEr-D on a GPU: every n-gram is compared with every n-gram of the references.

Equal to `CiderDScorer` to 1e-9, and made of operations on whole tensors: no caption leaves the GPU
and nothing synchronizes, so that it can be captured in a CUDA graph. An n-gram is an integer with
16 bits per token; `CiderDScorer` sorts and searches such integers, this module compares all pairs.
Captions are short, so the cost is the number of kernels, not of comparisons: about forty for all
lengths of n-grams together.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import pad

from overt.metrics.captions.cider import ORDER, SCALE, SIGMA, CiderDScorer, DocumentFrequencies, Ids

BITS = 16  # bits per token in an n-gram; 0 means no token, so ids are shifted by 1
MAX_IDS = 2**BITS - 2  # ids are below this
ABSENT = -1  # placeholder for n-grams beyond the end of a reference


class CiderDScorerGPU(nn.Module):
    """Scorer of CIDEr-D whose references are buffers: `.to(device)` moves them.

    Call it with tokens, a mask of the tokens that exist, which come first, and the image of each
    caption. Token ids must be below 65,534; ids of candidates are not checked, which would
    synchronize.

    Args:
        references: As for `CiderDScorer`.
        frequencies: As for `CiderDScorer`.

    Example:
        >>> scorer = CiderDScorerGPU([[[5, 6, 7, 8]], [[9, 10, 11, 12]]])
        >>> tokens = torch.tensor([[5, 6, 7, 8]])
        >>> scorer(tokens, torch.ones(1, 4, dtype=torch.bool), torch.tensor([0])).round(decimals=3)
        tensor([10.], dtype=torch.float64)
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
        self, references: Sequence[Sequence[Ids]], frequencies: DocumentFrequencies | None = None
    ) -> None:
        super().__init__()
        scores = CiderDScorer(references, frequencies)
        codes = _codes([np.asarray(text, np.int64) for text in chain.from_iterable(references)])
        there = np.lib.stride_tricks.sliding_window_view(codes, ORDER, axis=1)
        shifts = BITS * np.arange(ORDER)
        self._keep("said", np.where(there > 0, np.cumsum(there << shifts, axis=-1), ABSENT))
        self._keep("squares", np.stack(scores.norms, axis=-1) ** 2)
        self._keep("lengths", scores.lengths.astype(np.float64))
        many = np.arange(scores.per_image.max()) < scores.per_image[:, None]
        self._keep("texts", np.where(many, scores.first[:, None] + np.arange(many.shape[1]), 0))
        scale = (
            SCALE / ORDER if scores.defined else np.nan
        )  # as in `CiderDScorer`: all weights are 0
        self._keep("share", scale * many / scores.per_image[:, None])
        keys, rare = _ngram_table(scores)
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
        """Score every caption, from 0 to 10."""
        codes = pad((tokens + 1) * mask, (0, ORDER)).unfold(1, ORDER, 1)
        there = codes != 0  # the last token of an n-gram exists only if all of it does
        grams = (codes << self.shifts).cumsum(dim=-1) * there
        weight = self._rare(grams) * there
        count = (grams[:, :, None] == grams[:, None]).sum(dim=2, dtype=torch.float64)
        texts = self.texts[images]
        in_reference = (grams[:, None, :, None] == self.said[texts][:, :, None]).sum(
            dim=3, dtype=torch.float64
        )
        # an n-gram occurs `count` times in the tensor: each occurrence has its share of the product
        both = (
            torch.minimum(count[:, None], in_reference) * in_reference * (weight / count)[:, None]
        )
        norm = (count * weight).sum(dim=1)[:, None] * self.squares[texts]
        alike = (both.sum(dim=2) / norm.clamp_min(1e-60).sqrt()).sum(dim=-1)
        # lengths are counted in bigrams, as published
        apart = there[..., 1].sum(dim=1, dtype=torch.float64)[:, None] - self.lengths[texts]
        alike = alike * (apart.square() / (-2 * SIGMA**2)).exp() * self.share[images]
        return alike.sum(dim=-1)

    def _rare(self, grams: Int[Tensor, "r i n"]) -> Float[Tensor, "r i n"]:
        """Return the squared rarity of each n-gram; the last entry is for unknown ones."""
        at = torch.searchsorted(self.known, grams)
        return torch.where(self.known[at] == grams, self.rare[at], self.rare[-1])


def _codes(texts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Convert texts to rows of codes, padded by the length of the longest n-gram."""
    if any(len(one) and (one.min() < 0 or one.max() >= MAX_IDS) for one in texts):
        raise ValueError(f"token ids must be from 0 to {MAX_IDS - 1}: use CiderDScorer")
    rows = np.zeros((len(texts), max(map(len, texts)) + ORDER), np.int64)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text)] = text + 1
    return rows


def _ngram_table(scores: CiderDScorer) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return all known n-grams, sorted, and their rarity; the last entry is for unknown ones."""
    every, first = [], np.zeros(0, np.int64)
    before = np.zeros(0, np.int64)
    for n, table in enumerate(scores.frequencies.tables):
        keys = table.keys.astype(
            np.int64
        )  # packed by `CiderDScorer`: number of the prefix, last token
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
    if len(first) and first.max() > MAX_IDS:
        raise ValueError(f"token ids must be from 0 to {MAX_IDS - 1}: use CiderDScorer")
    rare = np.concatenate([one[:-1] for one in scores.rare])
    order = np.argsort(grams)
    return (
        np.append(grams[order], np.iinfo(np.int64).max),
        np.append(rare[order], scores.rare[0][-1]),
    )


def pad_and_concatenate(lots: Sequence[Tensor]) -> Tensor:
    """Concatenate rows of several tensors, padded with zeros to the widest."""
    width = max(one.shape[1] for one in lots)
    short = [width - one.shape[1] for one in lots]
    return torch.cat([pad(one, (0, n)) if n else one for one, n in zip(lots, short, strict=True)])
