"""Hard attention by kernels of our own on a CUDA card, for as many cells as are kept.

How many cells a sample keeps is known to the card alone, and nobody asks it: a step waits for
nothing and can be recorded, whatever its samples keep. Kept cells are read where they stand, one
list of them for the whole batch, so that no sample is filled up; room is set aside for all cells.
What is written here by kernels is done elsewhere by plain operations (`selection`, `aggregate`).
"""

from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from overt.capture.launching import FORMATS, INTERPRETED, installed

CELLS = 1024  # of a sample, at most: a kernel holds the scores of all
CELL = 2048  # features of a cell, at most
WIDE = 256  # features of a head, at most
SHARED = 160 * 1024  # bytes that a program has to be able to share: data-centre cards from A100 on
PIECE = 32  # cells of a sample that are looked at together
LAUNCH = {"num_warps": 8, "num_stages": 1}  # few pieces: to load ahead only takes room from others
PARTS = 8  # of the rows, in which the gradient of the layer is summed


def _reachable(tensor: Tensor) -> bool:
    """Whether kernels can work on a tensor: on a card, and not while a compiler looks on."""
    there = installed() and (tensor.is_cuda or INTERPRETED) and tensor.numel() > 0
    return there and not torch.compiler.is_compiling()


def can_choose(scores: Float[Tensor, "b k"]) -> bool:
    """Whether the kernels can take these scores: in float32, and not too many."""
    return _reachable(scores) and scores.dtype == torch.float32 and scores.shape[1] <= CELLS


def can_list(kept: Bool[Tensor, "b k"]) -> bool:
    """Whether the kernels can list these cells."""
    return _reachable(kept) and kept.shape[1] <= CELLS


def can_look(cells: Float[Tensor, "b k d"], weight: Float[Tensor, "t d"], heads: int) -> bool:
    """Whether the kernels can take these cells and this layer of queries and keys.

    Their pieces are those of a data-centre card, and do not fit into smaller ones. Products of
    float32 are in TF32 there, so that torch has to allow it
    (`torch.set_float32_matmul_precision("high")`).
    """
    if not (_reachable(cells) and _roomy(cells.device)):
        return False
    kind = _format(cells)
    rounded = torch.get_float32_matmul_precision() != "highest" or INTERPRETED
    return (
        kind in FORMATS
        and cells.dtype in FORMATS
        and (kind != torch.float32 or rounded)
        and cells.shape[1] <= CELLS
        and cells.shape[:2].numel() * max(weight.shape) < 2**40
        and cells.shape[:2].numel() < 2**31
        and cells.shape[2] <= CELL
        and weight.shape[0] // (2 * heads) <= WIDE
    )


def _format(cells: Tensor) -> torch.dtype:
    """The format of products: that of the cells, or what torch chooses by itself."""
    kind = cells.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else cells.dtype


# --- which cells stay


def best(scores: Float[Tensor, "b k"], count: Int[Tensor, "b 1"]) -> Bool[Tensor, "b k"]:
    """The `count` largest of every sample, the first of equals; cells that are not there are not.

    One kernel for a sort and what comes after it: a cell's rank is how many come before it.
    """
    from overt.models.hard import kernels

    b, k = scores.shape
    scores = scores.contiguous()
    kept = torch.empty_like(scores, dtype=torch.uint8)
    with _there(scores):
        kernels.best[(b,)](kept, scores, count.contiguous(), k, BK=_power(k), BJ=16)
    return kept.view(torch.bool)


def above_uniform(scores: Float[Tensor, "b k"]) -> Bool[Tensor, "b k"]:
    """The cells whose softmax beats 1/k over k cells, and at least one (eq. 6)."""
    from overt.models.hard import kernels

    b, k = scores.shape
    scores = scores.contiguous()
    kept = torch.empty_like(scores, dtype=torch.uint8)
    margin = 4 * torch.finfo(torch.float32).eps
    with _there(scores):
        kernels.above_uniform[(b,)](kept, scores, k, margin, BK=_power(k))
    return kept.view(torch.bool)


def first_rows(kept: Bool[Tensor, "b k"], count: int) -> Int[Tensor, " n"]:
    """The numbers of `count` cells of each sample among all cells: kept ones first, in order."""
    from overt.models.hard import kernels

    b, k = kept.shape
    rows = torch.empty(b * count, dtype=torch.long, device=kept.device)
    with _there(kept):
        kernels.first_rows[(b,)](rows, kept.contiguous().view(torch.uint8), k, count, BK=_power(k))
    return rows


# --- what the kept cells see in each other


def seen_by_all(
    cells: Float[Tensor, "b k d"],
    kept: Bool[Tensor, "b k"],
    weight: Float[Tensor, "t d"],
    heads: int,
    scale: float,
) -> Float[Tensor, "b h d"]:
    """The mix of cells that all kept cells of a sample look at together (eq. 7 before its values).

    `weight` is that of the layer of queries and then keys. A sample that keeps nothing sees zeros.
    The gradient cannot be differentiated again.
    """
    mix: Tensor = _Seen.apply(cells, weight, kept, heads, scale, _format(cells))
    return mix


class _Seen(torch.autograd.Function):
    """Queries, keys, shares and the mix over the list of kept cells, and their gradient.

    Shares are not kept, but made again out of the logarithms of their sums.
    """

    @staticmethod
    def forward(
        ctx: Any,
        cells: Tensor,
        weight: Tensor,
        kept: Tensor,
        heads: int,
        scale: float,
        kind: torch.dtype,
    ) -> Tensor:
        ctx.look = partial(_Look, heads=heads, scale=scale)
        look = ctx.look(cells.contiguous(), weight.to(kind).contiguous(), listed(kept))
        both = look.queries_and_keys()
        levels, shares = look.levels(both)
        ctx.save_for_backward(look.cells, look.weight, *look.listed, both, levels, shares)
        ctx.kind = weight.dtype
        return look.mixes(shares)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, ...]:
        cells, weight, *listed, both, levels, shares = ctx.saved_tensors
        look = ctx.look(cells, weight, tuple(listed))
        above = above.contiguous()
        of_both, turned = look.of_both(above, both, levels)
        of_cells = look.of_cells(of_both, shares, above) if ctx.needs_input_grad[0] else None
        of_weight = look.of_weight(turned).to(ctx.kind) if ctx.needs_input_grad[1] else None
        return of_cells, of_weight, None, None, None, None


def listed(kept: Bool[Tensor, "b k"]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """How many cells each sample keeps, where they end in the list, the list, and rows in it."""
    from overt.models.hard import kernels

    b, k = kept.shape
    many = kept.sum(dim=1, dtype=torch.int32)
    ends = many.cumsum(dim=0, dtype=torch.int32)
    at, place = (torch.empty(b * k, dtype=torch.int32, device=kept.device) for _ in range(2))
    with _there(kept):
        marks = kept.contiguous().view(torch.uint8)
        kernels.places[(b,)](at, place, marks, many, ends, k, BK=_power(k))
    return many, ends, at, place


class _Look:
    """Cells, a layer, and the list of the cells that are kept: what every kernel is given."""

    def __init__(
        self,
        cells: Float[Tensor, "b k d"],
        weight: Float[Tensor, "t d"],
        listed: tuple[Tensor, ...],
        heads: int,
        scale: float,
    ) -> None:
        self.cells, self.weight, self.heads, self.scale = cells, weight, heads, scale
        self.listed = listed
        self.many, self.ends, self.at, self.place = listed
        self.last = self.ends[-1:]
        self.samples, self.long, self.width = cells.shape
        self.room, self.both = len(self.at), len(weight)

    def queries_and_keys(self) -> Float[Tensor, "n t"]:
        """Of every kept cell; what comes after the last has never been written."""
        from overt.models.hard import kernels

        both = self._empty(self.room, self.both, dtype=self.weight.dtype)
        blocks, launch = _sizes(self.weight.dtype)
        with _there(self.cells):
            kernels.queries_and_keys[(self._programs(self.both, blocks),)](
                both, self.cells, self.at, self.last, self.weight, self.both,
                D=self.width, FORMAT=self._format(), EXACT=_exact(), **blocks, **launch,
            )  # fmt: skip
        return both

    def levels(
        self, both: Float[Tensor, "n t"]
    ) -> tuple[Float[Tensor, "n h"], Float[Tensor, "n h"]]:
        """The logarithm of the sum of each cell's looks, and how much each gets of all of them."""
        from overt.models.hard import kernels

        level, share = (self._empty(self.room, self.heads) for _ in range(2))
        grid = (self.samples * self.heads,)
        with _there(self.cells):
            given = both, *self._list(), self.scale
            kernels.levels[grid](level, share, *given, **self._sides())
            kernels.shares[grid](share, level, *given, **self._sides())
        return level, share

    def mixes(self, share: Float[Tensor, "n h"]) -> Float[Tensor, "b h d"]:
        """The cells of each sample, as much of each as it gets."""
        from overt.models.hard import kernels

        mix = self.weight.new_empty(self.samples, self.heads, self.width)
        with _there(self.cells):
            kernels.mixes[(self.samples * self.heads, -(-self.width // 128))](
                mix, share, self.cells, self.at, *self._list(), self.width, BQ=16, BD=128
            )
        return mix

    def of_both(
        self,
        above: Float[Tensor, "b h d"],
        both: Float[Tensor, "n t"],
        level: Float[Tensor, "n h"],
    ) -> tuple[Float[Tensor, "n t"], Float[Tensor, "t n"]]:
        """The gradient of queries and keys from that of the mixes, as they lie, and turned."""
        from overt.models.hard import kernels

        slope, means = (self._empty(self.room, self.heads) for _ in range(2))
        made = torch.empty_like(both)
        turned = self._empty(self.both, self.room, dtype=both.dtype)
        grid = (self.samples * self.heads,)
        kind = {"FORMAT": self._format()}
        with _there(self.cells):
            kernels.slopes[grid](
                slope, above, self.cells, self.at, *self._list(), self.width, BQ=16, BD=128
            )
            for kernel in (kernels.to_queries, kernels.to_keys):  # keys need what queries found
                kernel[grid](
                    made, turned, self.room, means, slope, level, both, *self._list(), self.scale,
                    **kind, **self._sides(),
                )  # fmt: skip
        return made, turned

    def of_cells(
        self,
        of_both: Float[Tensor, "n t"],
        share: Float[Tensor, "n h"],
        above: Float[Tensor, "b h d"],
    ) -> Float[Tensor, "b k d"]:
        """The gradient of all cells: zero for those that are left out."""
        from overt.models.hard import kernels

        made = torch.empty_like(self.cells)
        blocks, launch = _sizes(self.weight.dtype)
        rows = 16
        with _there(self.cells):
            kernels.by_their_share[(-(-self.room // rows),)](
                made, share, above, self.place, self.room, self.long, self.heads,
                D=self.width, BD=_power(self.width), BM=rows,
            )  # fmt: skip
            kernels.to_cells[(self._programs(self.width, blocks),)](
                made, of_both, self.weight.mT.contiguous(), self.at, self.last, self.width,
                N=self.both, EXACT=_exact(), **blocks, **launch,
            )  # fmt: skip
        return made

    def of_weight(self, turned: Float[Tensor, "t n"]) -> Float[Tensor, "t d"]:
        """The gradient of the layer, in parts that are added up in the same order every time."""
        from overt.models.hard import kernels

        parts = self._empty(PARTS, self.both * self.width)
        cells = self._empty(self.width, self.room, dtype=self.weight.dtype)
        blocks, launch = _sizes(self.weight.dtype)
        pieces = -(-self.both // blocks["BM"]) * -(-self.width // blocks["BN"])
        with _there(self.cells):
            kernels.turned_cells[(4 * _processors(self.cells.device),)](
                cells, self.cells, self.at, self.last, self.room, self.width,
                FORMAT=self._format(), BM=32, BD=64,
            )  # fmt: skip
            kernels.to_weight[(pieces, PARTS)](
                parts, turned, cells, self.last, self.room, self.both, self.width,
                EXACT=_exact(), **blocks, **launch,
            )  # fmt: skip
        return parts.sum(dim=0).unflatten(0, (self.both, self.width))

    def _empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.cells.device)

    def _programs(self, columns: int, blocks: dict[str, int]) -> int:
        """As many programs as run at once, or fewer where there is less to do."""
        pieces = -(-self.room // blocks["BM"]) * -(-columns // blocks["BN"])
        return min(pieces, 2 * _processors(self.cells.device))

    def _list(self) -> tuple[Tensor, Tensor, int]:
        return self.many, self.ends, self.heads

    def _format(self) -> Any:
        from overt.models.hard.kernels import FORMATS as formats

        return formats[self.weight.dtype]

    def _sides(self) -> dict[str, Any]:
        """The sizes of a head, and of a piece of its rows."""
        wide = self.both // (2 * self.heads)
        sizes = {"W": wide, "BW": max(16, _power(wide)), "BQ": PIECE, "EXACT": _exact()}
        return sizes if INTERPRETED else {**sizes, **LAUNCH}


def _exact() -> str:
    """How products of float32 are rounded; to an interpreter, not at all."""
    return "ieee" if INTERPRETED else "tf32"


def _sizes(kind: torch.dtype) -> tuple[dict[str, int], dict[str, int]]:
    """The pieces that products are made in, and how a card is to run them."""
    if INTERPRETED:
        return {"BM": 16, "BN": 32, "BK": 16}, {}
    deep = 32 if kind == torch.float32 else 64
    return {"BM": 128, "BN": 128, "BK": deep}, {"num_warps": 8, "num_stages": 3}


@cache
def _roomy(device: torch.device) -> bool:
    """Whether a card has room for the pieces that kernels work on."""
    if device.type != "cuda":
        return True
    found = torch.cuda.get_device_properties(device)
    return getattr(found, "shared_memory_per_block_optin", 0) >= SHARED


@cache
def _processors(device: torch.device) -> int:
    """How many processors a card has."""
    if device.type != "cuda":
        return 2
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _there(tensor: Tensor) -> AbstractContextManager[Any]:
    """On the card of a tensor, whichever is the present one."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def _power(size: int) -> int:
    """The next power of two."""
    return 1 << max(0, size - 1).bit_length()
