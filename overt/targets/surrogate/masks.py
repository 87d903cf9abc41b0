"""Masks that remove parts of an input in the search for surrogate targets.

A `MaskGenerator` is a frozen dataclass; called with a batch it returns its `MaskCandidates`. Number
0 of every sample removes nothing. Masks are computed on demand, so memory does not depend on their
number.

Random grids follow "Self Supervision for Attention Networks", section 4.2; shifted ones follow
Petsiuk, Das and Saenko, "RISE", BMVC 2018, https://arxiv.org/abs/1806.07421, section 3.2.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import comb, prod
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from overt.targets.surrogate.counter_rng import bernoulli, random_bits, sample_distinct, stream_keys
from overt.targets.surrogate.removable import RemovablePositions, Units, each_position

MAX_CELLS = 62  # a grid of so many cells fits into one int64


@runtime_checkable
class MaskedSamples(Protocol):
    """The samples of a batch and the positions that masks can remove."""

    @property
    def ids(self) -> tuple[str, ...]: ...
    @property
    def positions(self) -> Mapping[str, RemovablePositions]: ...


@runtime_checkable
class MaskCandidates(Protocol):
    """The masks of every sample of a batch, by number; 0 removes nothing."""

    @property
    def name(self) -> str:
        """The span that the masks remove from."""
        ...

    @property
    def counts(self) -> Int[Tensor, " b"]:
        """The number of masks of each sample, including number 0."""
        ...

    def take(self, rows: Int[Tensor, " n"], numbers: Int[Tensor, " n"]) -> Float[Tensor, "n k"]:
        """Return masks by number, each of the sample in its row: 1 keeps and 0 removes."""
        ...


@runtime_checkable
class BinaryMaskCandidates(MaskCandidates, Protocol):
    """Candidates defined by bits that can be flipped, for `greedy_refine`."""

    @property
    def sizes(self) -> Int[Tensor, " b"]:
        """The number of bits of each sample."""
        ...

    def bits(self, rows: Int[Tensor, " n"], numbers: Int[Tensor, " n"]) -> Bool[Tensor, "n c"]:
        """Return the bits of masks by number; bits beyond the size of a sample are on."""
        ...

    def draw(self, rows: Int[Tensor, " n"], bits: Bool[Tensor, "n c"]) -> Float[Tensor, "n k"]:
        """Return the masks of any bits, on the device of the bits."""
        ...


@runtime_checkable
class MaskGenerator(Protocol):
    """The masks of the span `name`: a frozen dataclass, so that its settings can be stored."""

    @property
    def name(self) -> str: ...
    def __call__(self, samples: MaskedSamples) -> MaskCandidates: ...


# --- no masks


@dataclass(frozen=True)
class NoMask:
    """No masks: the result is the model's own map on the whole input.

    Args:
        name: The name of the span.

    Example:
        >>> from overt.targets.surrogate import masked_batch
        >>> from overt.testing import PlantedCell, toy_batch
        >>> with masked_batch(PlantedCell((2, 2), cell=0), toy_batch(1), ["image"]) as masked:
        ...     NoMask()(masked).counts
        tensor([1])
    """

    name: str = "image"

    def __call__(self, samples: MaskedSamples) -> MaskCandidates:
        """Return candidates with number 0 only."""
        positions = _positions(samples, self.name)
        nothing = np.empty((len(positions), 1, 0), dtype=np.int64)
        return _RemoveWordsCandidates(
            self.name, each_position(positions), nothing, np.ones(len(positions), np.int64)
        )


# --- images


@dataclass(frozen=True)
class GridMasks:
    """Random binary grids, upsampled smoothly to the feature map, and the mask of ones.

    The grid has ceil(side / scale) cells per side. The paper writes W/s x H/s with s = 6 on 14 x 14
    cells, which is not an integer; in RISE s is the number of cells itself. If there are at most
    `count` grids in total, all of them are used and nothing is random; else `count` are drawn for
    each sample, and duplicates are evaluated once.

    Args:
        count: The number of grids per sample.
        scale: Cells of the feature map per cell of the grid.
        grid: Rows and columns of the grid, instead of `scale`.
        keep: The probability of a kept cell.
        seed: The random seed.
        name: The name of the span.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> from overt.targets.surrogate import masked_batch
        >>> from overt.testing import PlantedCell, toy_batch
        >>> with masked_batch(PlantedCell((2, 2), cell=0), toy_batch(1), ["image"]) as masked:
        ...     GridMasks(grid=(2, 2))(masked).counts  # all 2^4 grids
        tensor([16])
    """

    count: int = 500
    scale: int = 6
    grid: tuple[int, int] | None = None
    keep: float = 0.5
    seed: int = 0
    name: str = "image"

    def __post_init__(self) -> None:
        _check(self.count, self.keep, self.grid, self.scale)

    def __call__(self, samples: MaskedSamples) -> BinaryMaskCandidates:
        """Return the grids of every sample of a batch."""
        positions = _positions(samples, self.name)
        side = self._side(positions)
        cells = prod(side)
        if cells <= MAX_CELLS and 2**cells <= self.count:
            return _GridCandidates(
                self.name, _all_grids(cells)[None].expand(len(positions), -1, -1), positions, side
            )
        keys = stream_keys(samples.ids, self.seed, f"grids {self.name}")
        drawn = bernoulli(keys, self.count * cells, self.keep).reshape(-1, self.count, cells)
        whole = np.ones_like(drawn[:, :1])
        found, counts = unique_rows(np.concatenate([whole, drawn], axis=1))
        return _GridCandidates(
            self.name, torch.from_numpy(found), positions, side, torch.from_numpy(counts)
        )

    def _side(self, positions: RemovablePositions) -> tuple[int, int]:
        height, width = _grid_shape(positions, self.name)
        if self.grid is not None:
            return self.grid
        return -(-height // self.scale), -(-width // self.scale)


@dataclass(frozen=True)
class ShiftedGridMasks:
    """Random grids with a random offset, as in RISE: masks are not aligned to a fixed grid.

    A grid is upsampled to one cell more than the feature map in each direction, and a window of the
    size of the map is cut out at random. There are too many masks to enumerate; duplicates are
    evaluated once.

    Args:
        count: The number of masks per sample.
        scale: Cells of the feature map per cell of the grid.
        grid: Rows and columns of the grid, instead of `scale`.
        keep: The probability of a kept cell.
        seed: The random seed.
        name: The name of the span.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> from overt.targets.surrogate import masked_batch
        >>> from overt.testing import PlantedCell, toy_batch
        >>> with masked_batch(PlantedCell((2, 2), cell=0), toy_batch(1), ["image"]) as masked:
        ...     ShiftedGridMasks(count=3, grid=(2, 2))(masked).counts <= 4
        tensor([True])
    """

    count: int = 500
    scale: int = 6
    grid: tuple[int, int] | None = None
    keep: float = 0.5
    seed: int = 0
    name: str = "image"

    def __post_init__(self) -> None:
        _check(self.count, self.keep, self.grid, self.scale)

    def __call__(self, samples: MaskedSamples) -> MaskCandidates:
        """Return the shifted grids of every sample of a batch."""
        positions = _positions(samples, self.name)
        height, width = _grid_shape(positions, self.name)
        rows, columns = self.grid or (-(-height // self.scale), -(-width // self.scale))
        step = -(-height // rows), -(-width // columns)
        keys = stream_keys(samples.ids, self.seed, f"shifted {self.name}")
        drawn = bernoulli(keys, self.count * rows * columns, self.keep)
        drawn = drawn.reshape(-1, self.count, rows * columns)
        moves = stream_keys(samples.ids, self.seed, f"shifts {self.name}")
        shift = random_bits(moves, 2 * self.count).reshape(-1, self.count, 2) % np.array(
            step, np.uint64
        )
        whole = np.ones_like(drawn[:, :1]), np.zeros_like(shift[:, :1])
        drawn, shift = np.concatenate([whole[0], drawn], 1), np.concatenate([whole[1], shift], 1)
        flags = _as_bits(shift.astype(np.int64), max(step))
        # a grid of ones is the whole input for any offset
        flags &= ~drawn.all(axis=2, keepdims=True)
        found, counts = unique_rows(np.concatenate([drawn, flags], axis=2))
        cells = rows * columns
        return _ShiftedGridCandidates(
            self.name,
            torch.from_numpy(found[..., :cells]),
            torch.from_numpy(_as_numbers(found[..., cells:])),
            (height, width),
            (rows, columns),
            torch.from_numpy(counts),
        )


def upsample_grids(
    grids: Bool[Tensor, "n r c"] | Float[Tensor, "n r c"], shape: tuple[int, int]
) -> Float[Tensor, "n y x"]:
    """Upsample grids to a feature map: bilinear, corners not aligned, within [0, 1].

    One linear interpolation per direction, so that ones stay exactly one and zeros exactly zero,
    which `interpolate` does not guarantee.
    """
    found = grids.float()
    for axis in (2, 1):  # columns first, while the tensors are small
        near, far, step = _interpolation(grids.shape[axis], shape[axis - 1], grids.device)
        first, second = found.index_select(axis, near), found.index_select(axis, far)
        found = first.lerp_(second, step if axis == 2 else step[:, None])
    return found.clamp_(0, 1)


@lru_cache(maxsize=64)
def _interpolation(cells: int, size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return the two cells around each of `size` positions, and the interpolation weight."""
    place = (torch.arange(size, dtype=torch.float64) + 0.5) * cells / size - 0.5
    place = place.clamp(0, cells - 1)
    near = place.floor().long()
    found = near, (near + 1).clamp_max(cells - 1), (place - near).float()
    return found[0].to(device), found[1].to(device), found[2].to(device)


def unique_rows(
    drawn: NDArray[np.bool_],
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Return the distinct rows of each sample in their order, and how many there are.

    Rows beyond that number are undefined.
    """
    samples, rows, cells = drawn.shape
    if cells <= MAX_CELLS:
        codes = drawn.astype(np.int64) @ (np.int64(1) << np.arange(cells, dtype=np.int64))
        codes = codes.astype(np.uint16) if cells <= 16 else codes  # 16-bit codes sort much faster
    else:
        codes = np.empty((samples, rows), dtype=np.int64)
        for sample, one in enumerate(np.packbits(drawn, axis=2)):
            codes[sample] = np.unique(one, axis=0, return_inverse=True)[1].reshape(-1)
    order = codes.argsort(axis=1, kind="stable")
    ordered = np.take_along_axis(codes, order, axis=1)
    new = np.ones_like(ordered, dtype=bool)
    new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    first = np.empty_like(new)
    np.put_along_axis(first, order, new, axis=1)
    kept = (~first).argsort(axis=1, kind="stable")
    counts = first.sum(axis=1).astype(np.int64)
    kept = kept[:, : int(counts.max(initial=1))]
    return drawn[np.arange(samples)[:, None], kept], counts


@dataclass(frozen=True, eq=False)
class _GridCandidates:
    """Grids by number; bits are the cells, row by row."""

    name: str
    grids: Bool[Tensor, "b m c"]
    positions: RemovablePositions
    side: tuple[int, int]
    found: Int[Tensor, " b"] | None = None

    @property
    def counts(self) -> Int[Tensor, " b"]:
        b, m, _ = self.grids.shape
        return torch.full((b,), m) if self.found is None else self.found

    @property
    def sizes(self) -> Int[Tensor, " b"]:
        b, _, c = self.grids.shape
        return torch.full((b,), c)

    def bits(self, rows: Int[Tensor, " n"], numbers: Int[Tensor, " n"]) -> Bool[Tensor, "n c"]:
        return self.grids[rows, numbers]

    def draw(self, rows: Int[Tensor, " n"], bits: Bool[Tensor, "n c"]) -> Float[Tensor, "n k"]:
        height, width = self.positions.shape
        return upsample_grids(bits.unflatten(1, self.side), (height, width)).flatten(1)

    def take(self, rows: Int[Tensor, " n"], numbers: Int[Tensor, " n"]) -> Float[Tensor, "n k"]:
        return self.draw(rows, self.bits(rows, numbers))


@dataclass(frozen=True, eq=False)
class _ShiftedGridCandidates:
    """Grids by number, each with the offset of its window."""

    name: str
    grids: Bool[Tensor, "b m c"]
    shifts: Int[Tensor, "b m 2"]
    shape: tuple[int, int]
    side: tuple[int, int]
    counts: Int[Tensor, " b"]

    def take(self, rows: Int[Tensor, " n"], numbers: Int[Tensor, " n"]) -> Float[Tensor, "n k"]:
        (height, width), (r, c) = self.shape, self.side
        large = -(-height // r) * (r + 1), -(-width // c) * (c + 1)
        found = upsample_grids(self.grids[rows, numbers].unflatten(1, self.side), large)
        down, right = self.shifts[rows, numbers].unbind(1)
        y = (down[:, None] + torch.arange(height))[:, :, None]
        x = (right[:, None] + torch.arange(width))[:, None]
        return found[torch.arange(len(rows))[:, None, None], y, x].flatten(1)


@lru_cache(maxsize=8)
def _all_grids(cells: int) -> Bool[Tensor, "m c"]:
    """Return all grids, from all ones to all zeros."""
    numbers = torch.arange(2**cells - 1, -1, -1)
    return (numbers[:, None] >> torch.arange(cells)) & 1 == 1


def _as_bits(shift: NDArray[np.int64], most: int) -> NDArray[np.bool_]:
    """Encode the two offsets of each mask as bits, so that they count in comparisons of masks."""
    digits = max(1, (most - 1).bit_length())
    bits = (shift[..., None] >> np.arange(digits)) & 1 == 1
    return bits.reshape(*shift.shape[:2], 2 * digits)


def _as_numbers(bits: NDArray[np.bool_]) -> NDArray[np.int64]:
    digits = bits.shape[-1] // 2
    parts = bits.reshape(*bits.shape[:2], 2, digits).astype(np.int64)
    return parts @ (np.int64(1) << np.arange(digits, dtype=np.int64))


# --- words


@dataclass(frozen=True)
class RemoveWords:
    """Remove a few words, by default every pair: n (n - 1) / 2 masks (section 3.2).

    A text with more than `count` choices uses `count` of them, smaller sizes first and the rest at
    random. A text with fewer words than a size has no choice of that size. Padding that the model
    hides from its attention is never removed; a model that attends to padding can lose it.

    Args:
        sizes: How many words are removed at once: (1, 2) means each word and each pair.
        count: The largest number of masks per text.
        seed: The random seed.
        units: What is removed as a unit: `each_position` or `whole_words`.
        name: The name of the span.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> RemoveWords(sizes=(1, 2)).count  # at most so many masks per text
        1000
    """

    sizes: tuple[int, ...] = (2,)
    count: int = 1000
    seed: int = 0
    units: Units = each_position
    name: str = "text"

    def __post_init__(self) -> None:
        _check_words(self.sizes, self.count)

    def __call__(self, samples: MaskedSamples) -> BinaryMaskCandidates:
        """Return the choices of every text of a batch."""
        return _RemoveWordsCandidates(self.name, *_word_choices(self, samples, "WithoutWords"))


@dataclass(frozen=True)
class KeepWords:
    """Keep a few words and remove all others (section 4.5, figure 6).

    Args:
        sizes: How many words are kept at once.
        count: The largest number of masks per text.
        seed: The random seed.
        units: What is kept as a unit: `each_position` or `whole_words`.
        name: The name of the span.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> KeepWords(sizes=(2,), seed=1).sizes
        (2,)
    """

    sizes: tuple[int, ...] = (2,)
    count: int = 1000
    seed: int = 0
    units: Units = each_position
    name: str = "text"

    def __post_init__(self) -> None:
        _check_words(self.sizes, self.count)

    def __call__(self, samples: MaskedSamples) -> BinaryMaskCandidates:
        """Return the choices of every text of a batch."""
        return _KeepWordsCandidates(self.name, *_word_choices(self, samples, "OnlyWords"))


def combinations_at(words: int, size: int, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the combinations of `size` out of `words` words at `ranks`, as (m, size).

    Combinatorial number system: all combinations of the first three words come before any with the
    fourth, and so on. A combination is computed from its rank alone, without a list of all.
    """
    left = ranks.copy()
    found = np.empty((len(ranks), size), dtype=np.int64)
    for place in range(size, 0, -1):
        before = np.array([comb(last, place) for last in range(words + 1)], dtype=np.int64)
        last = np.searchsorted(before, left, side="right") - 1
        found[:, place - 1], left = last, left - before[last]
    return found


def _word_choices(
    masks: RemoveWords | KeepWords, samples: MaskedSamples, stream: str
) -> tuple[Int[Tensor, "b k"], NDArray[np.int64], NDArray[np.int64]]:
    """Return the unit of every position, the words of every choice (-1: none), and their number.

    `stream` names the random stream. Committed results depend on it, so it never changes.
    """
    units = masks.units(_positions(samples, masks.name))
    keys = stream_keys(samples.ids, masks.seed, f"{stream} {masks.name}")
    lengths = (units.amax(dim=1) + 1).tolist() if units.shape[1] else [0] * len(units)
    rows = [
        _choices_of_text(words, masks.sizes, masks.count, key)
        for words, key in zip(lengths, keys, strict=True)
    ]
    counts = np.array([len(row) for row in rows], dtype=np.int64)
    found = np.full((len(rows), max(counts, default=1), max(masks.sizes)), -1, dtype=np.int64)
    for row, one in zip(found, rows, strict=True):
        row[: len(one)] = one
    return units, found, counts


def _choices_of_text(
    words: int, sizes: Sequence[int], budget: int, key: np.uint64
) -> NDArray[np.int64]:
    """Return number 0, which chooses no words, and at most `budget` choices of one text."""
    found = np.full((1, max(sizes)), -1, dtype=np.int64)
    for size in sorted(sizes):
        total = comb(words, size)
        if total >= 2**62:
            raise ValueError(
                f"more than 2^62 choices of {size} words out of {words}: use smaller sizes"
            )
        left = budget + 1 - len(found)
        chosen = combinations_at(words, size, sample_distinct(key, total, min(total, left)))
        padding = ((0, 0), (0, max(sizes) - size))
        found = np.concatenate([found, np.pad(chosen, padding, constant_values=-1)])
    return found


class _WordCandidates:
    """Choices of words by number; a bit is a word, as defined by `units`."""

    def __init__(
        self,
        name: str,
        units: Int[Tensor, "b k"],
        chosen: NDArray[np.int64],
        counts: NDArray[np.int64],
    ) -> None:
        self.name, self.units = name, units
        self.chosen, self.counts = torch.from_numpy(chosen), torch.from_numpy(counts)
        self.sizes = units.amax(dim=1) + 1 if units.shape[1] else torch.zeros_like(self.counts)

    def marked(self, rows: Int[Tensor, " n"], numbers: Int[Tensor, " n"]) -> Bool[Tensor, "n c"]:
        """Return which words are chosen."""
        words = self.chosen[rows, numbers]
        found = torch.zeros(len(rows), int(self.sizes.max()) + 1, dtype=torch.bool)
        last = found.shape[1] - 1  # a spare column for -1
        return found.scatter(1, torch.where(words < 0, last, words), True)[:, :-1]

    def draw(self, rows: Int[Tensor, " n"], bits: Bool[Tensor, "n c"]) -> Float[Tensor, "n k"]:
        units = self.units[rows].to(bits.device, non_blocking=True)
        return torch.where(units < 0, True, bits.gather(1, units.clamp_min(0))).float()


class _RemoveWordsCandidates(_WordCandidates):
    def bits(self, rows: Int[Tensor, " n"], numbers: Int[Tensor, " n"]) -> Bool[Tensor, "n c"]:
        return ~self.marked(rows, numbers)

    def take(self, rows: Int[Tensor, " n"], numbers: Int[Tensor, " n"]) -> Float[Tensor, "n k"]:
        return self.draw(rows, self.bits(rows, numbers))


class _KeepWordsCandidates(_WordCandidates):
    def bits(self, rows: Int[Tensor, " n"], numbers: Int[Tensor, " n"]) -> Bool[Tensor, "n c"]:
        beyond = torch.arange(int(self.sizes.max())) >= self.sizes[rows, None]
        return self.marked(rows, numbers) | (numbers == 0)[:, None] | beyond

    def take(self, rows: Int[Tensor, " n"], numbers: Int[Tensor, " n"]) -> Float[Tensor, "n k"]:
        return self.draw(rows, self.bits(rows, numbers))


# --- checks


def _positions(samples: MaskedSamples, name: str) -> RemovablePositions:
    if name not in samples.positions:
        raise ValueError(f"no span {name!r} to mask; the batch has {[*samples.positions]}")
    return samples.positions[name]


def _grid_shape(positions: RemovablePositions, name: str) -> tuple[int, int]:
    if len(positions.shape) != 2:
        raise ValueError(
            f"grid masks need a span with rows and columns, {name!r} has the shape "
            f"{positions.shape}"
        )
    return positions.shape[0], positions.shape[1]


def _check(count: int, keep: float, grid: tuple[int, int] | None, scale: int) -> None:
    if count < 1 or scale < 1 or not 0 <= keep <= 1 or min(grid or (1, 1)) < 1:
        raise ValueError(
            "count, scale and the sides of a grid must be at least 1 and keep in [0, 1], got "
            f"{count}, {scale}, {grid} and {keep}"
        )


def _check_words(sizes: tuple[int, ...], count: int) -> None:
    if not sizes or min(sizes) < 1 or len(set(sizes)) < len(sizes) or count < 1:
        raise ValueError(
            f"sizes must be different positive numbers and count at least 1, got {sizes} and "
            f"{count}"
        )
