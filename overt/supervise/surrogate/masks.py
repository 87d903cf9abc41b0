"""What to remove from an input in search of one on which the model is more sure of the truth.

A `Masks` is a plain value that says which masks there are; asked about a batch it gives
`Candidates`. Number 0 of every sample removes nothing. Masks are made when they are taken, so
memory does not depend on how many there are.

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

from overt.supervise.surrogate.draws import chances, distinct, draws, keys_of
from overt.supervise.surrogate.places import Places, Units, each_place

MOST_CELLS = 62  # of a grid that fits into one signed number


@runtime_checkable
class Asked(Protocol):
    """A batch about which masks are wanted: who its samples are, and what can be removed."""

    @property
    def ids(self) -> tuple[str, ...]: ...
    @property
    def places(self) -> Mapping[str, Places]: ...


@runtime_checkable
class Candidates(Protocol):
    """The masks of every sample of a batch, by number; 0 removes nothing."""

    @property
    def name(self) -> str:
        """The span that they remove from."""
        ...

    @property
    def counts(self) -> Int[Tensor, " b"]:
        """How many masks each sample has, number 0 among them."""
        ...

    def take(self, rows: Int[Tensor, " n"], numbers: Int[Tensor, " n"]) -> Float[Tensor, "n k"]:
        """Masks by number, each of the sample in its row: 1 keeps and 0 removes."""
        ...


@runtime_checkable
class Bits(Candidates, Protocol):
    """Candidates that are made of bits, any of which may be flipped: what `refine` walks on."""

    @property
    def sizes(self) -> Int[Tensor, " b"]:
        """How many bits each sample has."""
        ...

    def bits(self, rows: Int[Tensor, " n"], numbers: Int[Tensor, " n"]) -> Bool[Tensor, "n c"]:
        """The bits behind masks by number; those beyond a sample's size are on."""
        ...

    def draw(self, rows: Int[Tensor, " n"], bits: Bool[Tensor, "n c"]) -> Float[Tensor, "n k"]:
        """The masks of any bits, made on the device where the bits are."""
        ...


@runtime_checkable
class Masks(Protocol):
    """Which masks there are for the span `name`: a frozen dataclass, so that it can be recorded."""

    @property
    def name(self) -> str: ...
    def __call__(self, asked: Asked) -> Candidates: ...


# --- nothing


@dataclass(frozen=True)
class Whole:
    """No mask at all: what is found is the model's own map on the whole input."""

    name: str = "image"

    def __call__(self, asked: Asked) -> Candidates:
        """Number 0 and no other."""
        places = _of(asked, self.name)
        nothing = np.empty((len(places), 1, 0), dtype=np.int64)
        return _Without(self.name, each_place(places), nothing, np.ones(len(places), np.int64))


# --- images


@dataclass(frozen=True)
class Grids:
    """Random grids of zeros and ones, made smooth over the feature map, and the mask of ones.

    The grid has ceil(side / scale) cells a side, or is `grid`. The paper writes W/s x H/s with
    s = 6 on 14 x 14 cells, which is no whole number; RISE's s is the number of cells itself. Each
    cell is kept with probability `keep`. Where there are no more than `count` grids in all, every
    one of them is taken, and there is nothing random left; else `count` are drawn for each sample,
    and those drawn twice are asked once.
    """

    count: int = 500
    scale: int = 6
    grid: tuple[int, int] | None = None
    keep: float = 0.5
    seed: int = 0
    name: str = "image"

    def __post_init__(self) -> None:
        _check(self.count, self.keep, self.grid, self.scale)

    def __call__(self, asked: Asked) -> Bits:
        """The grids of every sample of a batch."""
        places = _of(asked, self.name)
        side = self._side(places)
        cells = prod(side)
        if cells <= MOST_CELLS and 2**cells <= self.count:
            return _Grids(self.name, _every(cells)[None].expand(len(places), -1, -1), places, side)
        keys = keys_of(asked.ids, self.seed, f"grids {self.name}")
        drawn = chances(keys, self.count * cells, self.keep).reshape(-1, self.count, cells)
        whole = np.ones_like(drawn[:, :1])
        found, counts = without_repeats(np.concatenate([whole, drawn], axis=1))
        return _Grids(self.name, torch.from_numpy(found), places, side, torch.from_numpy(counts))

    def _side(self, places: Places) -> tuple[int, int]:
        height, width = _plane(places, self.name)
        if self.grid is not None:
            return self.grid
        return -(-height // self.scale), -(-width // self.scale)


@dataclass(frozen=True)
class ShiftedGrids:
    """Random grids that begin at a random place, as in RISE: what is hidden is not tied to a grid.

    A grid is stretched over one cell more than the feature map has in each direction, and a window
    of the map's size is cut out at random. With shifts there are far more masks than grids, so
    none is enumerated; those drawn twice are asked once.
    """

    count: int = 500
    scale: int = 6
    grid: tuple[int, int] | None = None
    keep: float = 0.5
    seed: int = 0
    name: str = "image"

    def __post_init__(self) -> None:
        _check(self.count, self.keep, self.grid, self.scale)

    def __call__(self, asked: Asked) -> Candidates:
        """The shifted grids of every sample of a batch."""
        places = _of(asked, self.name)
        height, width = _plane(places, self.name)
        rows, columns = self.grid or (-(-height // self.scale), -(-width // self.scale))
        step = -(-height // rows), -(-width // columns)
        keys = keys_of(asked.ids, self.seed, f"shifted {self.name}")
        drawn = chances(keys, self.count * rows * columns, self.keep)
        drawn = drawn.reshape(-1, self.count, rows * columns)
        moves = keys_of(asked.ids, self.seed, f"shifts {self.name}")
        shift = draws(moves, 2 * self.count).reshape(-1, self.count, 2) % np.array(step, np.uint64)
        whole = np.ones_like(drawn[:, :1]), np.zeros_like(shift[:, :1])
        drawn, shift = np.concatenate([whole[0], drawn], 1), np.concatenate([whole[1], shift], 1)
        flags = _as_bits(shift.astype(np.int64), max(step))
        # a grid of ones is the whole input, wherever it begins
        flags &= ~drawn.all(axis=2, keepdims=True)
        found, counts = without_repeats(np.concatenate([drawn, flags], axis=2))
        cells = rows * columns
        return _Shifted(
            self.name,
            torch.from_numpy(found[..., :cells]),
            torch.from_numpy(_as_numbers(found[..., cells:])),
            (height, width),
            (rows, columns),
            torch.from_numpy(counts),
        )


def enlarge(
    grids: Bool[Tensor, "n r c"] | Float[Tensor, "n r c"], shape: tuple[int, int]
) -> Float[Tensor, "n y x"]:
    """Grids made smooth over a feature map: bilinear, corners not aligned, within [0, 1].

    Written as one step between two cells a direction, so that ones become exactly ones and zeros
    exactly zeros, which `interpolate` does not promise.
    """
    found = grids.float()
    for axis in (2, 1):  # columns first, while there is little to copy
        near, far, step = _steps(grids.shape[axis], shape[axis - 1], grids.device)
        first, second = found.index_select(axis, near), found.index_select(axis, far)
        found = first.lerp_(second, step if axis == 2 else step[:, None])
    return found.clamp_(0, 1)


@lru_cache(maxsize=64)
def _steps(cells: int, size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The two cells around each of `size` places, and how far each place is on the way."""
    place = (torch.arange(size, dtype=torch.float64) + 0.5) * cells / size - 0.5
    place = place.clamp(0, cells - 1)
    near = place.floor().long()
    found = near, (near + 1).clamp_max(cells - 1), (place - near).float()
    return found[0].to(device), found[1].to(device), found[2].to(device)


def without_repeats(
    drawn: NDArray[np.bool_],
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """The different rows of each sample in the order in which they came, and how many there are.

    Rows beyond that number are left over and mean nothing.
    """
    samples, rows, cells = drawn.shape
    if cells <= MOST_CELLS:
        codes = drawn.astype(np.int64) @ (np.int64(1) << np.arange(cells, dtype=np.int64))
        codes = codes.astype(np.uint16) if cells <= 16 else codes  # short ones sort far quicker
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
class _Grids:
    """Grids by number; bits are cells, row by row."""

    name: str
    grids: Bool[Tensor, "b m c"]
    places: Places
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
        height, width = self.places.shape
        return enlarge(bits.unflatten(1, self.side), (height, width)).flatten(1)

    def take(self, rows: Int[Tensor, " n"], numbers: Int[Tensor, " n"]) -> Float[Tensor, "n k"]:
        return self.draw(rows, self.bits(rows, numbers))


@dataclass(frozen=True, eq=False)
class _Shifted:
    """Grids by number, each with the place where its window begins."""

    name: str
    grids: Bool[Tensor, "b m c"]
    shifts: Int[Tensor, "b m 2"]
    shape: tuple[int, int]
    side: tuple[int, int]
    counts: Int[Tensor, " b"]

    def take(self, rows: Int[Tensor, " n"], numbers: Int[Tensor, " n"]) -> Float[Tensor, "n k"]:
        (height, width), (r, c) = self.shape, self.side
        large = -(-height // r) * (r + 1), -(-width // c) * (c + 1)
        found = enlarge(self.grids[rows, numbers].unflatten(1, self.side), large)
        down, right = self.shifts[rows, numbers].unbind(1)
        y = (down[:, None] + torch.arange(height))[:, :, None]
        x = (right[:, None] + torch.arange(width))[:, None]
        return found[torch.arange(len(rows))[:, None, None], y, x].flatten(1)


@lru_cache(maxsize=8)
def _every(cells: int) -> Bool[Tensor, "m c"]:
    """All grids, from the one of ones down to the one of zeros."""
    numbers = torch.arange(2**cells - 1, -1, -1)
    return (numbers[:, None] >> torch.arange(cells)) & 1 == 1


def _as_bits(shift: NDArray[np.int64], most: int) -> NDArray[np.bool_]:
    """Two shifts a mask as bits, so that they take part in what makes two masks the same."""
    digits = max(1, (most - 1).bit_length())
    bits = (shift[..., None] >> np.arange(digits)) & 1 == 1
    return bits.reshape(*shift.shape[:2], 2 * digits)


def _as_numbers(bits: NDArray[np.bool_]) -> NDArray[np.int64]:
    digits = bits.shape[-1] // 2
    parts = bits.reshape(*bits.shape[:2], 2, digits).astype(np.int64)
    return parts @ (np.int64(1) << np.arange(digits, dtype=np.int64))


# --- words


@dataclass(frozen=True)
class WithoutWords:
    """Every choice of a few words removed, by default two at a time: n (n - 1) / 2 (section 3.2).

    `sizes` are how many words are removed at once: (1, 2) means each word and each pair. A text
    with more than `count` choices has `count` of them, smaller sizes first and the rest at random.
    A text with fewer words than a size has no choice of that size. Padding is never touched.
    """

    sizes: tuple[int, ...] = (2,)
    count: int = 1000
    seed: int = 0
    units: Units = each_place
    name: str = "text"

    def __post_init__(self) -> None:
        _check_words(self.sizes, self.count)

    def __call__(self, asked: Asked) -> Bits:
        """The choices of every text of a batch."""
        return _Without(self.name, *_choices(self, asked))


@dataclass(frozen=True)
class OnlyWords:
    """Every choice of a few words kept and all others removed (section 4.5, figure 6)."""

    sizes: tuple[int, ...] = (2,)
    count: int = 1000
    seed: int = 0
    units: Units = each_place
    name: str = "text"

    def __post_init__(self) -> None:
        _check_words(self.sizes, self.count)

    def __call__(self, asked: Asked) -> Bits:
        """The choices of every text of a batch."""
        return _Only(self.name, *_choices(self, asked))


def choose(words: int, size: int, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
    """The choices of `size` words out of `words` that stand at `ranks`, as (m, size).

    All choices of the first three words come before any that has the fourth, and so on: a choice
    is found from its rank alone, without a list of all.
    """
    left = ranks.copy()
    found = np.empty((len(ranks), size), dtype=np.int64)
    for place in range(size, 0, -1):
        before = np.array([comb(last, place) for last in range(words + 1)], dtype=np.int64)
        last = np.searchsorted(before, left, side="right") - 1
        found[:, place - 1], left = last, left - before[last]
    return found


def _choices(
    masks: WithoutWords | OnlyWords, asked: Asked
) -> tuple[Int[Tensor, "b k"], NDArray[np.int64], NDArray[np.int64]]:
    """The unit of every position, the words of every choice (-1: one less), and how many."""
    units = masks.units(_of(asked, masks.name))
    keys = keys_of(asked.ids, masks.seed, f"{type(masks).__name__} {masks.name}")
    lengths = (units.amax(dim=1) + 1).tolist() if units.shape[1] else [0] * len(units)
    rows = [
        _chosen(words, masks.sizes, masks.count, key)
        for words, key in zip(lengths, keys, strict=True)
    ]
    counts = np.array([len(row) for row in rows], dtype=np.int64)
    found = np.full((len(rows), max(counts, default=1), max(masks.sizes)), -1, dtype=np.int64)
    for row, one in zip(found, rows, strict=True):
        row[: len(one)] = one
    return units, found, counts


def _chosen(words: int, sizes: Sequence[int], budget: int, key: np.uint64) -> NDArray[np.int64]:
    """Number 0, which chooses nothing, and then at most `budget` choices of one text."""
    found = np.full((1, max(sizes)), -1, dtype=np.int64)
    for size in sorted(sizes):
        total = comb(words, size)
        if total >= 2**62:
            raise ValueError(f"there are more than 2^62 choices of {size} words out of {words}")
        left = budget + 1 - len(found)
        chosen = choose(words, size, distinct(key, total, min(total, left)))
        padding = ((0, 0), (0, max(sizes) - size))
        found = np.concatenate([found, np.pad(chosen, padding, constant_values=-1)])
    return found


class _Chosen:
    """Choices of words by number; a bit is a word, or what `units` takes for one."""

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
        """Which words are chosen."""
        words = self.chosen[rows, numbers]
        found = torch.zeros(len(rows), int(self.sizes.max()) + 1, dtype=torch.bool)
        last = found.shape[1] - 1  # where what is no word goes
        return found.scatter(1, torch.where(words < 0, last, words), True)[:, :-1]

    def draw(self, rows: Int[Tensor, " n"], bits: Bool[Tensor, "n c"]) -> Float[Tensor, "n k"]:
        units = self.units[rows].to(bits.device, non_blocking=True)
        return torch.where(units < 0, True, bits.gather(1, units.clamp_min(0))).float()


class _Without(_Chosen):
    def bits(self, rows: Int[Tensor, " n"], numbers: Int[Tensor, " n"]) -> Bool[Tensor, "n c"]:
        return ~self.marked(rows, numbers)

    def take(self, rows: Int[Tensor, " n"], numbers: Int[Tensor, " n"]) -> Float[Tensor, "n k"]:
        return self.draw(rows, self.bits(rows, numbers))


class _Only(_Chosen):
    def bits(self, rows: Int[Tensor, " n"], numbers: Int[Tensor, " n"]) -> Bool[Tensor, "n c"]:
        beyond = torch.arange(int(self.sizes.max())) >= self.sizes[rows, None]
        return self.marked(rows, numbers) | (numbers == 0)[:, None] | beyond

    def take(self, rows: Int[Tensor, " n"], numbers: Int[Tensor, " n"]) -> Float[Tensor, "n k"]:
        return self.draw(rows, self.bits(rows, numbers))


# --- checks


def _of(asked: Asked, name: str) -> Places:
    if name not in asked.places:
        raise ValueError(f"masks over {name!r}, but the model was asked about {[*asked.places]}")
    return asked.places[name]


def _plane(places: Places, name: str) -> tuple[int, int]:
    if len(places.shape) != 2:
        raise ValueError(
            f"grids need a span with rows and columns, and {name!r} has the shape {places.shape}"
        )
    return places.shape[0], places.shape[1]


def _check(count: int, keep: float, grid: tuple[int, int] | None, scale: int) -> None:
    if count < 1 or scale < 1 or not 0 <= keep <= 1 or min(grid or (1, 1)) < 1:
        raise ValueError(
            "count, scale and the sides of a grid are at least 1 and keep within 0 and 1, not "
            f"{count}, {scale}, {grid} and {keep}"
        )


def _check_words(sizes: tuple[int, ...], count: int) -> None:
    if not sizes or min(sizes) < 1 or len(set(sizes)) < len(sizes) or count < 1:
        raise ValueError(
            f"sizes are different numbers of words from 1 on and count at least 1, not {sizes} "
            f"and {count}"
        )
