"""CIDEr and CIDEr-D on token ids: exact, and fast enough to be a reward.

Vedantam, Zitnick and Parikh, "CIDEr: Consensus-based Image Description Evaluation", CVPR 2015,
https://arxiv.org/abs/1411.5726. What tables call CIDEr is CIDEr-D: `cider_d` here, and `Cider` of
pycocoevalcap, with which it agrees to 1e-9.

An n-gram is a number: that of its first n-1 tokens and that of its last, packed in 64 bits and
looked up in a sorted table. Nothing is hashed, so any vocabulary is exact; references are counted
and weighted once, and scoring is sorting and searching.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from overt.errors import BadInput, Damaged
from overt.files import read_arrays, write_arrays
from overt.measure.measured import Measured, measured

ORDER = 4  # n-grams of one to four tokens
SIGMA = 6.0  # how fast a difference in length is punished (section 6.2)
SCALE = 10.0

Ids = Sequence[int] | NDArray[np.integer]
Numbers = NDArray[np.int64]
Reals = NDArray[np.float64]

Product = Callable[[Reals, Reals], Reals]  # of the weights of one n-gram in candidate, reference
Penalty = Callable[[Reals], Reals]  # of the difference in length


def clipped(candidate: Reals, reference: Reals) -> Reals:
    """`min(c, r) r`: repeating an n-gram does not pay (CIDEr-D)."""
    return np.minimum(candidate, reference) * reference


def gaussian(difference: Reals) -> Reals:
    """`exp(-d^2 / 2 sigma^2)` of the difference in length d (CIDEr-D)."""
    return np.exp(-(difference**2) / (2 * SIGMA**2))


def whatever_length(difference: Reals) -> Reals:
    """No penalty (CIDEr)."""
    return np.ones_like(difference)


# --- n-grams as numbers


@dataclass(frozen=True, eq=False)
class Table:
    """The n-grams of one length that are known, as sorted keys, with the number of each.

    A key holds the number of the first n-1 tokens in its upper half and that of the last token in
    its lower half; of a single token it is the id.
    """

    keys: NDArray[np.uint64]
    numbers: Numbers

    def find(self, keys: NDArray[np.uint64]) -> Numbers:
        """The number of each key; keys that are not known are numbered on from the known."""
        size = len(self.keys)
        if size:
            at = np.searchsorted(self.keys, keys)
            at[at == size] = 0
            found = np.where(self.keys[at] == keys, self.numbers[at], -1)
        else:
            found = np.full(len(keys), -1, dtype=np.int64)
        new = found < 0
        if new.any():
            found[new] = size + np.unique(keys[new], return_inverse=True)[1]
        return found

    def learn(self, keys: NDArray[np.uint64]) -> tuple["Table", Numbers]:
        """The table with new keys in it, and the number of each key."""
        found = self.find(keys)
        fresh, first = np.unique(found, return_index=True)
        fresh, first = fresh[fresh >= len(self.keys)], first[fresh >= len(self.keys)]
        if not len(fresh):
            return self, found
        merged = np.concatenate([self.keys, keys[first]])
        order = np.argsort(merged, kind="stable")
        return Table(merged[order], np.concatenate([self.numbers, fresh])[order]), found


EMPTY = Table(np.empty(0, np.uint64), np.empty(0, np.int64))


@dataclass(frozen=True, eq=False)
class Counted:
    """N-grams of one length in many texts: number, text and count, by text and then by number."""

    numbers: Numbers
    texts: Numbers
    counts: Reals


def _padded(texts: Sequence[Ids]) -> tuple[NDArray[np.uint64], Numbers]:
    """Texts as rows of one array, and their lengths."""
    lengths = np.fromiter((len(text) for text in texts), np.int64, len(texts))
    rows = np.zeros((len(texts), int(lengths.max(initial=0))), dtype=np.uint64)
    there = np.arange(rows.shape[1]) < lengths[:, None]
    if lengths.sum():
        ids = np.concatenate([np.asarray(text, dtype=np.int64) for text in texts])
        if (ids < 0).any() or (ids >> 32).any():
            raise ValueError("token ids of captions run from 0 to 2^32 - 1")
        rows[there] = ids
    return rows, lengths


def _grams(
    texts: Sequence[Ids], number: Callable[[int, NDArray[np.uint64]], Numbers]
) -> list[tuple[Numbers, Numbers]]:
    """For n = 1 to 4 the number of each n-gram and its text; `number(n, keys)` gives the first."""
    tokens, lengths = _padded(texts)
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


def _counted(numbers: Numbers, texts: Numbers) -> Counted:
    """Each n-gram of each text once, with how often it is there."""
    size = int(numbers.max(initial=0)) + 1
    pairs, counts = np.unique(texts * size + numbers, return_counts=True)
    return Counted(pairs % size, pairs // size, counts.astype(np.float64))


# --- how rare an n-gram is


@dataclass(frozen=True, eq=False)
class Frequencies:
    """In how many of `documents` images the captions hold each n-gram, for n = 1 to 4.

    The images are those of the references by default. For a reward they are those of the training
    set, counted once: `document_frequencies(references)`, then `save`.
    """

    tables: tuple[Table, ...]
    images: tuple[Numbers, ...]
    documents: int

    def save(self, path: Path) -> None:
        """Write one `.npz` file."""
        arrays = {"documents": np.array([self.documents])}
        for n, (table, images) in enumerate(zip(self.tables, self.images, strict=True), start=1):
            arrays |= {f"keys{n}": table.keys, f"numbers{n}": table.numbers, f"images{n}": images}
        write_arrays(path, arrays)

    @classmethod
    def load(cls, path: Path) -> "Frequencies":
        """Read what `save` wrote; anything else is `Damaged`."""
        arrays = read_arrays(path)
        wanted = {f"{kind}{n}" for kind in ("keys", "numbers", "images") for n in range(1, 5)}
        if set(arrays) != wanted | {"documents"} or arrays["documents"].shape != (1,):
            raise Damaged(f"{path} holds no document frequencies; count them again.")
        tables, images = [], []
        for n in range(1, ORDER + 1):
            keys, numbers = arrays[f"keys{n}"], arrays[f"numbers{n}"]
            kinds = [(keys, np.uint64), (numbers, np.int64), (arrays[f"images{n}"], np.int64)]
            whole = all(one.dtype == kind and one.shape == keys.shape for one, kind in kinds)
            if not (whole and keys.ndim == 1 and (keys[1:] > keys[:-1]).all()):
                raise Damaged(f"{path}: the table of {n}-grams is not whole; count them again.")
            if not np.array_equal(np.sort(numbers), np.arange(len(numbers))):
                raise Damaged(f"{path}: {n}-grams are not numbered through; count them again.")
            tables.append(Table(keys, numbers))
            images.append(arrays[f"images{n}"])
        return cls(tuple(tables), tuple(images), int(arrays["documents"][0]))


def document_frequencies(references: Sequence[Sequence[Ids]]) -> Frequencies:
    """Count in how many images each n-gram is said; `references` are the captions of each image."""
    return _read(references, None)[0]


def _read(
    references: Sequence[Sequence[Ids]], known: Frequencies | None
) -> tuple[Frequencies, list[Counted], Numbers]:
    """The frequencies with every n-gram of the references in them, these counted, and whose."""
    per_image = np.fromiter((len(many) for many in references), np.int64, len(references))
    if not len(per_image) or not per_image.all():
        raise BadInput("every image needs a reference; there is one without, or there are none")
    image = np.repeat(np.arange(len(references)), per_image)
    tables = list(known.tables) if known is not None else [EMPTY] * ORDER

    def learn(n: int, keys: NDArray[np.uint64]) -> Numbers:
        tables[n - 1], numbers = tables[n - 1].learn(keys)
        return numbers

    grams = _grams([text for many in references for text in many], learn)
    counted, images = [], []
    for n, (numbers, texts) in enumerate(grams):
        counted.append(_counted(numbers, texts))
        size = len(tables[n].keys)
        if known is None:
            each = np.unique(image[counted[n].texts] * size + counted[n].numbers) % max(1, size)
            images.append(np.bincount(each, minlength=size))
        else:
            images.append(np.pad(known.images[n], (0, size - len(known.images[n]))))
    documents = len(references) if known is None else known.documents
    return Frequencies(tuple(tables), tuple(images), documents), counted, image


# --- scores


@dataclass(frozen=True, eq=False)
class _Weighted:
    """References' n-grams of one length: numbers and tf-idf weights by text, and texts' norms."""

    numbers: Numbers
    weights: Reals
    starts: Numbers
    norms: Reals


class Consensus:
    """Candidates against the references of their images; references are weighted here, once.

    `references` are the captions of each image as token ids. `frequencies` say how rare an n-gram
    is; without them they are counted on the references, as evaluation does. `product` and `penalty`
    are what CIDEr and CIDEr-D differ in. Call it with ids of candidates and the number of the image
    of each: several candidates may describe one image.
    """

    def __init__(
        self,
        references: Sequence[Sequence[Ids]],
        frequencies: Frequencies | None = None,
        product: Product = clipped,
        penalty: Penalty = gaussian,
    ) -> None:
        self.product, self.penalty = product, penalty
        self.frequencies, counted, image = _read(references, frequencies)
        self.log_documents = float(np.log(float(self.frequencies.documents)))
        self.per_image = np.bincount(image, minlength=len(references))
        self.first = np.cumsum(self.per_image) - self.per_image
        lengths = [len(text) for many in references for text in many]
        self.lengths = np.maximum(np.array(lengths) - 1, 0)  # counted in bigrams, as published
        self._rare = [
            self.log_documents - np.log(np.maximum(1.0, many)) for many in self.frequencies.images
        ]
        self._references = [self._weigh(n, one, len(image)) for n, one in enumerate(counted)]

    def __len__(self) -> int:
        return len(self.per_image)

    def __call__(self, candidates: Sequence[Ids], images: Iterable[int] | None = None) -> Reals:
        """The score of every candidate, 0 to 10; of image 0, 1, 2 ... where no images are given."""
        of = np.fromiter(range(len(candidates)) if images is None else images, np.int64)
        if len(of) != len(candidates):
            raise ValueError(f"{len(candidates)} candidates for {len(of)} images")
        if len(of) and not (of.min() >= 0 and of.max() < len(self)):
            raise ValueError(f"there are references of images 0 to {len(self) - 1}, not of others")
        if not len(of):
            return np.zeros(0)
        many = self.per_image[of]
        candidate = np.repeat(np.arange(len(of)), many)  # every candidate beside every reference
        reference = _runs(self.first[of], many)
        tables = self.frequencies.tables
        grams = _grams(candidates, lambda n, keys: tables[n - 1].find(keys))
        total = np.zeros(len(candidate))
        for n, (numbers, texts) in enumerate(grams):
            counted = _counted(numbers, texts)
            theirs = self._references[n]
            ours = self._weigh(n, counted, len(of))
            lengths = theirs.starts[reference + 1] - theirs.starts[reference]
            entry = _runs(theirs.starts[reference], lengths)
            pair = np.repeat(np.arange(len(reference)), lengths)
            size = len(tables[n].keys)
            known = counted.numbers < size
            have = counted.texts[known] * size + counted.numbers[known]
            if not len(have) or not len(entry):
                continue
            want = candidate[pair] * size + theirs.numbers[entry]
            at = np.searchsorted(have, want)
            at[at == len(have)] = 0
            hit = have[at] == want
            both = self.product(ours.weights[known][at[hit]], theirs.weights[entry[hit]])
            dots = np.bincount(pair[hit], weights=both, minlength=len(reference))
            norms = ours.norms[candidate] * theirs.norms[reference]
            total += np.divide(dots, norms, out=np.zeros(len(norms)), where=norms > 0)
        ours_long = np.maximum([len(one) - 1 for one in candidates], 0)
        total *= self.penalty((ours_long[candidate] - self.lengths[reference]).astype(np.float64))
        return SCALE / ORDER * np.bincount(candidate, weights=total, minlength=len(of)) / many

    def _weigh(self, n: int, counted: Counted, texts: int) -> _Weighted:
        """Counts times how rare each n-gram is; one that nobody ever said is as rare as can be."""
        rare = self._rare[n]
        known = counted.numbers < len(rare)
        idf = np.full(len(known), self.log_documents)
        idf[known] = rare[counted.numbers[known]]
        weights = counted.counts * idf
        norms = np.sqrt(np.bincount(counted.texts, weights=weights**2, minlength=texts))
        starts = np.searchsorted(counted.texts, np.arange(texts + 1))
        return _Weighted(counted.numbers, weights, starts, norms)


def _runs(starts: Numbers, lengths: Numbers) -> Numbers:
    """`start, start + 1, ...` of every run, one after the other."""
    before = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum())) + np.repeat(starts - before, lengths)


# --- measures of texts


@measured("CIDEr-D", "score", higher_is_better=True, low=0.0, high=10.0)
def cider_d(
    candidates: Sequence[Sequence[str]],
    references: Sequence[Sequence[Sequence[str]]],
) -> Measured:
    """CIDEr-D of each candidate, from words: what evaluation servers and tables call CIDEr.

    Document frequencies are counted on these references, so the score of one caption depends on
    the set it is scored in. Tables print it times 100: a mean of 1.2 here is their 120.
    """
    return _of_words(candidates, references, clipped, gaussian)


@measured("CIDEr", "score", higher_is_better=True, low=0.0, high=10.0)
def cider(
    candidates: Sequence[Sequence[str]],
    references: Sequence[Sequence[Sequence[str]]],
) -> Measured:
    """CIDEr as first defined: plain cosines, neither clipped nor punished for length (eq. 2-3).

    The paper takes stems of words before; words are compared as they are given here.
    """
    return _of_words(candidates, references, np.multiply, whatever_length)


def numbered(
    *many: Sequence[Sequence[Sequence[str]]],
) -> list[list[list[list[int]]]]:
    """Texts of words as texts of ids, the same word the same id in all of them."""
    ids: dict[str, int] = {}
    return [
        [[[ids.setdefault(word, len(ids)) for word in text] for text in texts] for texts in one]
        for one in many
    ]


def _of_words(
    candidates: Sequence[Sequence[str]],
    references: Sequence[Sequence[Sequence[str]]],
    product: Product,
    penalty: Penalty,
) -> Measured:
    if len(candidates) != len(references):
        raise ValueError(f"{len(candidates)} candidates for {len(references)} sets of references")
    (ours,), theirs = numbered([candidates], references)
    scores = Consensus(theirs, None, product, penalty)(ours)
    return torch.from_numpy(scores)
