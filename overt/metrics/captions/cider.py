"""CIDEr and CIDEr-D on token ids: exact, and fast enough for a reward.

Vedantam, Zitnick and Parikh, "CIDEr: Consensus-based Image Description Evaluation", CVPR 2015,
https://arxiv.org/abs/1411.5726. Tables call CIDEr-D simply CIDEr: it is `cider_d` here and `Cider`
in pycocoevalcap, with which it agrees to 1e-9.

An n-gram is an integer: the number of its first n-1 tokens and that of its last, packed in 64 bits
and looked up in a sorted table. Nothing is hashed, so any vocabulary is exact. References are
counted and weighted once; scoring is sorting and searching.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from overt.errors import CorruptFileError, UserError
from overt.io import read_arrays, write_arrays
from overt.metrics.captions.validation import check_captions
from overt.metrics.metric import SampleScores, declare_metric

ORDER = 4  # n-grams of one to four tokens
SIGMA = 6.0  # standard deviation of the length penalty (section 6.2)
SCALE = 10.0

Ids = Sequence[int] | NDArray[np.integer]
Numbers = NDArray[np.int64]
Reals = NDArray[np.float64]

Product = Callable[[Reals, Reals], Reals]  # weights of one n-gram in candidate and reference
Penalty = Callable[[Reals], Reals]  # difference in length


def clipped_product(candidate: Reals, reference: Reals) -> Reals:
    """Compute `min(c, r) r`, so that repeating an n-gram does not pay (CIDEr-D)."""
    return np.minimum(candidate, reference) * reference


def gaussian_penalty(difference: Reals) -> Reals:
    """Compute `exp(-d^2 / 2 sigma^2)` of the difference in length d (CIDEr-D)."""
    return np.exp(-(difference**2) / (2 * SIGMA**2))


def no_penalty(difference: Reals) -> Reals:
    """Return ones: no length penalty (CIDEr)."""
    return np.ones_like(difference)


# --- n-grams as integers


@dataclass(frozen=True, eq=False)
class NgramTable:
    """Known n-grams of one length, as sorted keys, with the number of each.

    A key has the number of the first n-1 tokens in its upper half and that of the last token in its
    lower half; for a single token it is the id.
    """

    keys: NDArray[np.uint64]
    numbers: Numbers

    def find(self, keys: NDArray[np.uint64]) -> Numbers:
        """Return the number of each key; unknown keys get numbers after the known ones."""
        return self._search(keys)[0]

    def learn(self, keys: NDArray[np.uint64]) -> tuple["NgramTable", Numbers]:
        """Return the table with new keys added, and the number of each key."""
        found, unknown = self._search(keys)
        size = len(self.keys)
        numbers = np.arange(size, size + len(unknown))
        if not size:
            return NgramTable(unknown, numbers), found
        merged = np.concatenate([self.keys, unknown])
        order = np.argsort(merged)
        return NgramTable(merged[order], np.concatenate([self.numbers, numbers])[order]), found

    def _search(self, keys: NDArray[np.uint64]) -> tuple[Numbers, NDArray[np.uint64]]:
        """The number of each key, and the keys that are not known, sorted."""
        size = len(self.keys)
        if not size:
            unknown, found = np.unique(keys, return_inverse=True)
            return found, unknown
        at = np.searchsorted(self.keys, keys)
        at[at == size] = 0
        found = np.where(self.keys[at] == keys, self.numbers[at], -1)
        new = found < 0
        unknown, which = np.unique(keys[new], return_inverse=True)
        found[new] = size + which
        return found, unknown


EMPTY = NgramTable(np.empty(0, np.uint64), np.empty(0, np.int64))


@dataclass(frozen=True, eq=False)
class NgramCounts:
    """N-grams of one length in many texts: number, text and count, sorted by text and number."""

    numbers: Numbers
    texts: Numbers
    counts: Reals


def _pad(texts: Sequence[Ids]) -> tuple[NDArray[np.uint64], Numbers]:
    """Pad texts to rows of one array, and return their lengths."""
    if any(isinstance(text, (str, bytes)) for text in texts):
        raise ValueError("captions must be lists of token ids, got a string: encode it first")
    lengths = np.fromiter((len(text) for text in texts), np.int64, len(texts))
    rows = np.zeros((len(texts), int(lengths.max(initial=0))), dtype=np.uint64)
    there = np.arange(rows.shape[1]) < lengths[:, None]
    if lengths.sum():
        ids = _concatenate(texts, int(lengths.sum()))
        if (ids < 0).any() or (ids >> 32).any():
            raise ValueError("token ids must be from 0 to 2^32 - 1")
        rows[there] = ids
    return rows, lengths


def _concatenate(texts: Sequence[Ids], count: int) -> Numbers:
    if isinstance(texts[0], np.ndarray):
        return np.concatenate([np.asarray(text, dtype=np.int64) for text in texts])
    return np.fromiter(chain.from_iterable(texts), np.int64, count)


def _ngrams(
    texts: Sequence[Ids], number: Callable[[int, NDArray[np.uint64]], Numbers]
) -> list[tuple[Numbers, Numbers]]:
    """Return, for n = 1 to 4, the number of each n-gram and its text."""
    tokens, lengths = _pad(texts)
    rows, longest = tokens.shape
    found = []
    of_tokens = of_prefix = tokens
    for n in range(1, ORDER + 1):
        width = max(0, longest - n + 1)
        there = np.arange(width) < (lengths - n + 1)[:, None]
        keys = tokens
        if n > 1:
            keys = (of_prefix[:, :width] << np.uint64(32)) | of_tokens[:, n - 1 :]
        numbers = number(n, keys[there])
        found.append((numbers, np.nonzero(there)[0]))
        of_prefix = np.zeros((rows, width), dtype=np.uint64)
        of_prefix[there] = numbers
        of_tokens = of_prefix if n == 1 else of_tokens
    return found


def _count_ngrams(numbers: Numbers, texts: Numbers) -> NgramCounts:
    """Count the n-grams of each text."""
    size = int(numbers.max(initial=0)) + 1
    pairs, counts = np.unique(texts * size + numbers, return_counts=True)
    return NgramCounts(pairs % size, pairs // size, counts.astype(np.float64))


# --- document frequencies


@dataclass(frozen=True, eq=False)
class DocumentFrequencies:
    """Number of images, of `documents`, whose captions contain each n-gram, for n = 1 to 4.

    By default the images are those of the references. For a reward they are those of the training
    set, counted once: `document_frequencies(references)`, then `save`.

    Args:
        tables: The n-grams, one table per n.
        images: The number of images of each n-gram, by n.
        documents: The number of images.

    Example:
        >>> document_frequencies([[[5, 6]], [[5, 7]]]).documents
        2
    """

    tables: tuple[NgramTable, ...]
    images: tuple[Numbers, ...]
    documents: int

    def save(self, path: Path) -> None:
        """Write one `.npz` file."""
        arrays = {"documents": np.array([self.documents])}
        for n, (table, images) in enumerate(zip(self.tables, self.images, strict=True), start=1):
            arrays |= {f"keys{n}": table.keys, f"numbers{n}": table.numbers, f"images{n}": images}
        write_arrays(path, arrays)

    @classmethod
    def load(cls, path: Path) -> "DocumentFrequencies":
        """Read what `save` wrote; raise `CorruptFileError` for anything else."""
        arrays = read_arrays(path)
        wanted = {f"{kind}{n}" for kind in ("keys", "numbers", "images") for n in range(1, 5)}
        if set(arrays) != wanted | {"documents"} or arrays["documents"].shape != (1,):
            raise CorruptFileError(f"{path} holds no document frequencies: count them again.")
        tables, images = [], []
        for n in range(1, ORDER + 1):
            keys, numbers = arrays[f"keys{n}"], arrays[f"numbers{n}"]
            kinds = [(keys, np.uint64), (numbers, np.int64), (arrays[f"images{n}"], np.int64)]
            whole = all(one.dtype == kind and one.shape == keys.shape for one, kind in kinds)
            if not (whole and keys.ndim == 1 and (keys[1:] > keys[:-1]).all()):
                raise CorruptFileError(
                    f"{path}: the table of {n}-grams is damaged: count them again."
                )
            if not np.array_equal(np.sort(numbers), np.arange(len(numbers))):
                raise CorruptFileError(
                    f"{path}: {n}-grams are not numbered consecutively: count them again."
                )
            tables.append(NgramTable(keys, numbers))
            images.append(arrays[f"images{n}"])
        return cls(tuple(tables), tuple(images), int(arrays["documents"][0]))


def document_frequencies(references: Sequence[Sequence[Ids]]) -> DocumentFrequencies:
    """Count in how many images each n-gram occurs.

    Args:
        references: The captions of each image, as token ids.

    Returns:
        The frequencies.

    Example:
        >>> frequencies = document_frequencies([[[5, 6]], [[5, 7]]])  # token ids
        >>> sorted(frequencies.images[0].tolist())  # one word is in both images
        [1, 1, 2]
    """
    return _count_references(references, None)[0]


@dataclass(frozen=True, eq=False)
class _ReferenceNgrams:
    """N-grams of one length in references, sorted by image and n-gram.

    Entries `starts[i]` to `starts[i + 1]` are the references with the n-gram `keys[i]`, which is
    `image * size + number`: their index, the count, and the n-gram.
    """

    keys: Numbers
    starts: Numbers
    texts: Numbers
    counts: Reals
    numbers: Numbers


def _count_references(
    references: Sequence[Sequence[Ids]], known: DocumentFrequencies | None
) -> tuple[DocumentFrequencies, list[_ReferenceNgrams], Numbers]:
    """Return frequencies with all n-grams of the references, their counts, and their images."""
    per_image = np.fromiter((len(many) for many in references), np.int64, len(references))
    if not len(per_image) or not per_image.all():
        raise UserError("every image needs at least one reference")
    image = np.repeat(np.arange(len(references)), per_image)
    tables = list(known.tables) if known is not None else [EMPTY] * ORDER

    def learn(n: int, keys: NDArray[np.uint64]) -> Numbers:
        tables[n - 1], numbers = tables[n - 1].learn(keys)
        return numbers

    grams = _ngrams([text for many in references for text in many], learn)
    said, images = [], []
    for n, (numbers, texts) in enumerate(grams):
        size = len(tables[n].keys)
        said.append(_reference_ngrams(_count_ngrams(numbers, texts), image, size))
        if known is None:
            images.append(np.bincount(said[n].keys % max(1, size), minlength=size))
        else:
            images.append(np.pad(known.images[n], (0, size - len(known.images[n]))))
    documents = len(references) if known is None else known.documents
    return DocumentFrequencies(tuple(tables), tuple(images), documents), said, image


def _reference_ngrams(counted: NgramCounts, image: Numbers, size: int) -> _ReferenceNgrams:
    keys = image[counted.texts] * size + counted.numbers
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    first = np.flatnonzero(np.diff(keys, prepend=-1))
    return _ReferenceNgrams(
        keys[first],
        np.append(first, len(keys)),
        counted.texts[order],
        counted.counts[order],
        counted.numbers[order],
    )


# --- scores


class CiderDScorer:
    """Scorer of candidates against the references of their images, which are weighted once.

    Call it with candidates as token ids and the image of each; several candidates may be of one
    image. CIDEr and CIDEr-D differ in `product` and `penalty`. Where no n-gram of the references is
    rarer than another, as with references of one image alone, every weight is log(1) = 0: scores
    are NaN, and `defined` is False.

    Args:
        references: The captions of each image, as token ids.
        frequencies: Document frequencies; counted on the references by default, as in evaluation.
        product: Product of the weights of an n-gram in candidate and reference.
        penalty: Penalty of the difference in length.

    Example:
        >>> scorer = CiderDScorer([[[5, 6, 7, 8]], [[9, 10, 11, 12]]])
        >>> len(scorer), scorer.defined
        (2, True)
    """

    def __init__(
        self,
        references: Sequence[Sequence[Ids]],
        frequencies: DocumentFrequencies | None = None,
        product: Product = clipped_product,
        penalty: Penalty = gaussian_penalty,
    ) -> None:
        self.product, self.penalty = product, penalty
        self.frequencies, self._said, image = _count_references(references, frequencies)
        everything = float(np.log(float(self.frequencies.documents)))
        # by number; the last entry is for unknown n-grams, which are the rarest
        self.rare = [
            everything - np.log(np.maximum(1.0, np.append(images, 1)))
            for images in self.frequencies.images
        ]
        self.per_image = np.bincount(image, minlength=len(references))
        self.first = np.cumsum(self.per_image) - self.per_image
        lengths = np.fromiter((len(text) for many in references for text in many), np.int64)
        self.lengths = np.maximum(lengths - 1, 0)  # counted in bigrams, as published
        self._weights, self.norms = [], []
        for n, said in enumerate(self._said):
            weights = said.counts * self.rare[n][said.numbers]
            self._weights.append(weights)
            squares = np.bincount(said.texts, weights=weights**2, minlength=len(image))
            self.norms.append(np.sqrt(squares))
        self.defined = any(norm.any() for norm in self.norms) or not lengths.any()

    def __len__(self) -> int:
        return len(self.per_image)

    def __call__(self, candidates: Sequence[Ids], images: Iterable[int] | None = None) -> Reals:
        """Score every candidate, from 0 to 10; by default candidate i is of image i.

        NaN where the references have no weight: see the class.
        """
        of = np.fromiter(range(len(candidates)) if images is None else images, np.int64)
        if len(of) != len(candidates):
            raise ValueError(
                f"candidates and images must be as many, got {len(candidates)} and {len(of)}"
            )
        if len(of) and not (of.min() >= 0 and of.max() < len(self)):
            raise ValueError(f"images must be from 0 to {len(self) - 1}")
        if not len(of):
            return np.zeros(0)
        many = self.per_image[of]
        candidate = np.repeat(np.arange(len(of)), many)  # every candidate with every reference
        reference = _expand_ranges(self.first[of], many)
        to_pair = np.cumsum(many) - many - self.first[of]  # offset from a reference to its pair
        tables = self.frequencies.tables
        grams = _ngrams(candidates, lambda n, keys: tables[n - 1].find(keys))
        total = np.zeros(len(candidate))
        for n, (numbers, texts) in enumerate(grams):
            ours = _count_ngrams(numbers, texts)
            weights, norms = self._weigh(n, ours, len(of))
            said = self._said[n]
            size = len(tables[n].keys)
            known = np.flatnonzero(ours.numbers < size)
            if not len(known) or not len(said.keys):
                continue
            wanted = of[ours.texts[known]] * size + ours.numbers[known]
            at = np.searchsorted(said.keys, wanted)
            at[at == len(said.keys)] = 0
            hit = np.flatnonzero(said.keys[at] == wanted)
            at, gram = at[hit], known[hit]
            holders = said.starts[at + 1] - said.starts[at]
            entry, gram = _expand_ranges(said.starts[at], holders), np.repeat(gram, holders)
            both = self.product(weights[gram], self._weights[n][entry])
            pair = to_pair[ours.texts[gram]] + said.texts[entry]
            dots = np.bincount(pair, weights=both, minlength=len(reference))
            norm = norms[candidate] * self.norms[n][reference]
            total += np.divide(dots, norm, out=np.zeros(len(norm)), where=norm > 0)
        lengths = np.fromiter((max(0, len(one) - 1) for one in candidates), np.int64, len(of))
        total *= self.penalty((lengths[candidate] - self.lengths[reference]).astype(np.float64))
        scale = SCALE / ORDER if self.defined else np.nan
        return scale * np.bincount(candidate, weights=total, minlength=len(of)) / many

    def _weigh(self, n: int, counted: NgramCounts, texts: int) -> tuple[Reals, Reals]:
        """Return counts times rarity of each n-gram, and the norm of every text."""
        rare = self.rare[n]
        weights = counted.counts * rare[np.minimum(counted.numbers, len(rare) - 1)]
        squares = np.bincount(counted.texts, weights=weights**2, minlength=texts)
        return weights, np.sqrt(squares)


def _expand_ranges(starts: Numbers, lengths: Numbers) -> Numbers:
    """Concatenate `start, start + 1, ...` of every range."""
    before = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum())) + np.repeat(starts - before, lengths)


# --- metrics of words


@declare_metric("CIDEr-D", "score", higher_is_better=True, low=0.0, high=10.0)
def cider_d(
    candidates: Sequence[Sequence[str]],
    references: Sequence[Sequence[Sequence[str]]],
) -> SampleScores:
    """Compute CIDEr-D of each candidate, which tables and evaluation servers call CIDEr.

    Document frequencies are counted on these references, so the score of a caption depends on its
    set. Tables multiply by 100: a mean of 1.2 here is 120 there.

    Args:
        candidates: One caption per image, as lists of words.
        references: The references of each image.

    Returns:
        One score per caption. NaN where the references are of one image, or all images have the
        same captions: n-grams are weighted by rarity, so all weights are 0. The published scorer
        returns 0 there. Score several images together.

    Example:
        >>> texts = ["a red cat sits", "my big dog runs"]
        >>> cider_d([one.split() for one in texts], [[one.split()] for one in texts])
        tensor([10., 10.], dtype=torch.float64)
    """
    return _score_words(candidates, references, clipped_product, gaussian_penalty)


@declare_metric("CIDEr", "score", higher_is_better=True, low=0.0, high=10.0)
def cider(
    candidates: Sequence[Sequence[str]],
    references: Sequence[Sequence[Sequence[str]]],
) -> SampleScores:
    """Compute CIDEr as first defined: cosines without clipping or length penalty (eq. 2-3).

    The paper stems words first; here words are compared as given.

    Args:
        candidates: One caption per image, as lists of words.
        references: The references of each image.

    Returns:
        One score per caption; NaN for the references of one image, as `cider_d`.

    Example:
        >>> texts = ["a red cat sits", "my big dog runs"]
        >>> cider([one.split() for one in texts], [[one.split()] for one in texts])
        tensor([10., 10.], dtype=torch.float64)
    """
    return _score_words(candidates, references, np.multiply, no_penalty)


def words_to_ids(
    *many: Sequence[Sequence[Sequence[str]]],
) -> list[list[list[list[int]]]]:
    """Convert words to ids, the same word to the same id in all texts."""
    ids: dict[str, int] = {}
    return [
        [[[ids.setdefault(word, len(ids)) for word in text] for text in texts] for texts in one]
        for one in many
    ]


def _score_words(
    candidates: Sequence[Sequence[str]],
    references: Sequence[Sequence[Sequence[str]]],
    product: Product,
    penalty: Penalty,
) -> SampleScores:
    check_captions(candidates, references)
    (ours,), theirs = words_to_ids([candidates], references)
    scores = CiderDScorer(theirs, None, product, penalty)(ours)
    return torch.from_numpy(scores)
