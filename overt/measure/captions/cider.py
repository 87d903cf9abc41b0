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
from itertools import chain
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
        return self._search(keys)[0]

    def learn(self, keys: NDArray[np.uint64]) -> tuple["Table", Numbers]:
        """The table with new keys in it, and the number of each key."""
        found, strange = self._search(keys)
        size = len(self.keys)
        numbers = np.arange(size, size + len(strange))
        if not size:
            return Table(strange, numbers), found
        merged = np.concatenate([self.keys, strange])
        order = np.argsort(merged)
        return Table(merged[order], np.concatenate([self.numbers, numbers])[order]), found

    def _search(self, keys: NDArray[np.uint64]) -> tuple[Numbers, NDArray[np.uint64]]:
        """The number of each key, and the keys that are not known, sorted."""
        size = len(self.keys)
        if not size:
            strange, found = np.unique(keys, return_inverse=True)
            return found, strange
        at = np.searchsorted(self.keys, keys)
        at[at == size] = 0
        found = np.where(self.keys[at] == keys, self.numbers[at], -1)
        new = found < 0
        strange, which = np.unique(keys[new], return_inverse=True)
        found[new] = size + which
        return found, strange


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
        ids = _joined(texts, int(lengths.sum()))
        if (ids < 0).any() or (ids >> 32).any():
            raise ValueError("token ids of captions run from 0 to 2^32 - 1")
        rows[there] = ids
    return rows, lengths


def _joined(texts: Sequence[Ids], count: int) -> Numbers:
    if isinstance(texts[0], np.ndarray):
        return np.concatenate([np.asarray(text, dtype=np.int64) for text in texts])
    return np.fromiter(chain.from_iterable(texts), np.int64, count)


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


@dataclass(frozen=True, eq=False)
class _Said:
    """The n-grams of one length in references, by image and then by n-gram.

    Entry `starts[i]` to `starts[i + 1]` are the references that hold the n-gram of `keys[i]`, which
    is `image * size + number`: their numbers, how often they have it, and the n-gram.
    """

    keys: Numbers
    starts: Numbers
    texts: Numbers
    counts: Reals
    numbers: Numbers


def _read(
    references: Sequence[Sequence[Ids]], known: Frequencies | None
) -> tuple[Frequencies, list[_Said], Numbers]:
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
    said, images = [], []
    for n, (numbers, texts) in enumerate(grams):
        size = len(tables[n].keys)
        said.append(_said(_counted(numbers, texts), image, size))
        if known is None:
            images.append(np.bincount(said[n].keys % max(1, size), minlength=size))
        else:
            images.append(np.pad(known.images[n], (0, size - len(known.images[n]))))
    documents = len(references) if known is None else known.documents
    return Frequencies(tuple(tables), tuple(images), documents), said, image


def _said(counted: Counted, image: Numbers, size: int) -> _Said:
    keys = image[counted.texts] * size + counted.numbers
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    first = np.flatnonzero(np.diff(keys, prepend=-1))
    return _Said(
        keys[first],
        np.append(first, len(keys)),
        counted.texts[order],
        counted.counts[order],
        counted.numbers[order],
    )


# --- scores


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
        self.frequencies, self._said, image = _read(references, frequencies)
        everything = float(np.log(float(self.frequencies.documents)))
        # by number, and at the end that of what nobody ever said, which is as rare as can be
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
        to_pair = np.cumsum(many) - many - self.first[of]  # from a reference to its pair
        tables = self.frequencies.tables
        grams = _grams(candidates, lambda n, keys: tables[n - 1].find(keys))
        total = np.zeros(len(candidate))
        for n, (numbers, texts) in enumerate(grams):
            ours = _counted(numbers, texts)
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
            entry, gram = _runs(said.starts[at], holders), np.repeat(gram, holders)
            both = self.product(weights[gram], self._weights[n][entry])
            pair = to_pair[ours.texts[gram]] + said.texts[entry]
            dots = np.bincount(pair, weights=both, minlength=len(reference))
            norm = norms[candidate] * self.norms[n][reference]
            total += np.divide(dots, norm, out=np.zeros(len(norm)), where=norm > 0)
        lengths = np.fromiter((max(0, len(one) - 1) for one in candidates), np.int64, len(of))
        total *= self.penalty((lengths[candidate] - self.lengths[reference]).astype(np.float64))
        return SCALE / ORDER * np.bincount(candidate, weights=total, minlength=len(of)) / many

    def _weigh(self, n: int, counted: Counted, texts: int) -> tuple[Reals, Reals]:
        """Counts times how rare each n-gram is, and the norm of every text."""
        rare = self.rare[n]
        weights = counted.counts * rare[np.minimum(counted.numbers, len(rare) - 1)]
        squares = np.bincount(counted.texts, weights=weights**2, minlength=texts)
        return weights, np.sqrt(squares)


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
