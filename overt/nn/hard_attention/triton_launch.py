"""Hard attention with Triton kernels on CUDA GPUs, over the kept cells only.

The number of kept cells stays on the GPU, so a step needs no synchronization and can be captured
in a CUDA graph. Kept cells are read in place through one list for the whole batch; samples are not
padded, and buffers have room for all cells. `selection` and `aggregate` have the same in plain
PyTorch.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from overt.capture.kernels.triton_launch import FORMATS, INTERPRETED, triton_installed

MAX_CELLS = 1024  # per sample: a kernel holds all scores of a sample
MAX_FEATURES = 2048  # of a cell
MAX_HEAD_WIDTH = 256  # features of a head
MIN_SHARED_MEMORY = 160 * 1024  # bytes per program: data-centre GPUs from A100 on
BLOCK_ROWS = 32  # cells of a sample per block
LAUNCH = {"num_warps": 8, "num_stages": 1}  # few blocks: prefetching only takes shared memory
SPLIT_K = 8  # parts of the rows in which the weight gradient is summed


def _triton_runs_on(tensor: Tensor) -> bool:
    """Return whether kernels can run on a tensor: on a GPU, and not while compiling."""
    # INTERPRETED: Triton's interpreter runs the kernels on the CPU, for tests
    there = triton_installed() and (tensor.is_cuda or INTERPRETED) and tensor.numel() > 0
    return there and not torch.compiler.is_compiling()


def supports_scores(scores: Float[Tensor, "b k"]) -> bool:
    """Return whether the kernels support these scores: float32, and not too many."""
    return (
        _triton_runs_on(scores) and scores.dtype == torch.float32 and scores.shape[1] <= MAX_CELLS
    )


def supports_mask(kept: Bool[Tensor, "b k"]) -> bool:
    """Return whether the kernels support this number of cells."""
    return _triton_runs_on(kept) and kept.shape[1] <= MAX_CELLS


def supports_attention(
    cells: Float[Tensor, "b k d"], weight: Float[Tensor, "t d"], heads: int
) -> bool:
    """Return whether the kernels support these cells and this projection of queries and keys.

    Their blocks need the shared memory of a data-centre GPU. Products of float32 use TF32, which
    torch must allow (`torch.set_float32_matmul_precision("high")`).
    """
    if not (_triton_runs_on(cells) and _has_shared_memory(cells.device)):
        return False
    kind = _format(cells)
    rounded = torch.get_float32_matmul_precision() != "highest" or INTERPRETED
    return (
        # the list of kept cells is int32, hence the limit of 2**31 cells below
        kind in FORMATS
        and cells.dtype in FORMATS
        and (kind != torch.float32 or rounded)
        and cells.shape[1] <= MAX_CELLS
        and cells.shape[:2].numel() * max(weight.shape) < 2**40
        and cells.shape[:2].numel() < 2**31
        and cells.shape[2] <= MAX_FEATURES
        and weight.shape[0] // (2 * heads) <= MAX_HEAD_WIDTH
    )


def _format(cells: Tensor) -> torch.dtype:
    """Return the dtype of matrix products: that of the cells, or of autocast."""
    kind = cells.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else cells.dtype


# --- selection


def top_cells(scores: Float[Tensor, "b k"], count: Int[Tensor, "b 1"]) -> Bool[Tensor, "b k"]:
    """Keep the `count` largest cells of each sample; ties go to the first.

    One kernel instead of a sort: the rank of a cell is the number of cells before it.
    """
    from overt.nn.hard_attention import triton_kernels

    b, k = scores.shape
    scores = scores.contiguous()
    kept = torch.empty_like(scores, dtype=torch.uint8)
    with _device_of(scores):
        triton_kernels.top_cells[(b,)](
            kept, scores, count.contiguous(), k, BK=_next_power_of_two(k), BJ=16
        )
    return kept.view(torch.bool)


def above_uniform(scores: Float[Tensor, "b k"]) -> Bool[Tensor, "b k"]:
    """Keep the cells whose softmax exceeds 1/k over k cells, and at least one (eq. 6)."""
    from overt.nn.hard_attention import triton_kernels

    b, k = scores.shape
    scores = scores.contiguous()
    kept = torch.empty_like(scores, dtype=torch.uint8)
    # the rounding margin of `selection.keep_above_uniform`
    margin = 4 * torch.finfo(torch.float32).eps
    with _device_of(scores):
        triton_kernels.above_uniform[(b,)](kept, scores, k, margin, BK=_next_power_of_two(k))
    return kept.view(torch.bool)


def kept_first_rows(kept: Bool[Tensor, "b k"], count: int) -> Int[Tensor, " n"]:
    """Return the row numbers of `count` cells of each sample: kept ones first, in order."""
    from overt.nn.hard_attention import triton_kernels

    b, k = kept.shape
    rows = torch.empty(b * count, dtype=torch.long, device=kept.device)
    with _device_of(kept):
        triton_kernels.kept_first_rows[(b,)](
            rows, kept.contiguous().view(torch.uint8), k, count, BK=_next_power_of_two(k)
        )
    return rows


# --- attention between kept cells


def summed_attention(
    cells: Float[Tensor, "b k d"],
    kept: Bool[Tensor, "b k"],
    weight: Float[Tensor, "t d"],
    heads: int,
    scale: float,
) -> Float[Tensor, "b h d"]:
    """Mix the cells by the attention they receive from all kept cells of their sample (eq. 7).

    Values are not projected yet. A sample that keeps no cell gives zeros. No double backward.

    Args:
        cells: all cells.
        kept: mask of the kept cells.
        weight: projection to queries, then keys.
        heads: number of heads.
        scale: factor on the scores.
    """
    mix: Tensor = _TritonSummedAttention.apply(cells, weight, kept, heads, scale, _format(cells))
    return mix


class _TritonSummedAttention(torch.autograd.Function):
    """Queries, keys, attention and mixture over the list of kept cells, with their gradient.

    Attention weights are not stored but recomputed from their log-sum-exp.
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
        ctx.launch = partial(_AttentionLaunch, heads=heads, scale=scale)
        # autocast does not reach Triton kernels: the projection is cast here
        launch = ctx.launch(cells.contiguous(), weight.to(kind).contiguous(), list_kept(kept))
        both = launch.queries_and_keys()
        levels, shares = launch.levels(both)
        ctx.save_for_backward(launch.cells, launch.weight, *launch.listed, both, levels, shares)
        ctx.kind = weight.dtype
        return launch.mixes(shares)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, ...]:
        cells, weight, *listed, both, levels, shares = ctx.saved_tensors
        launch = ctx.launch(cells, weight, tuple(listed))
        above = above.contiguous()
        of_both, turned = launch.of_both(above, both, levels)
        of_cells = launch.of_cells(of_both, shares, above) if ctx.needs_input_grad[0] else None
        of_weight = launch.of_weight(turned).to(ctx.kind) if ctx.needs_input_grad[1] else None
        return of_cells, of_weight, None, None, None, None


def list_kept(kept: Bool[Tensor, "b k"]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """List the kept cells: count and end per sample, the list, and the row of each cell in it."""
    from overt.nn.hard_attention import triton_kernels

    b, k = kept.shape
    many = kept.sum(dim=1, dtype=torch.int32)
    ends = many.cumsum(dim=0, dtype=torch.int32)
    # room for all cells: the number of kept ones is not known on the host
    at, place = (torch.empty(b * k, dtype=torch.int32, device=kept.device) for _ in range(2))
    with _device_of(kept):
        # Triton loads bytes, not bools; the view copies nothing
        marks = kept.contiguous().view(torch.uint8)
        triton_kernels.list_kept[(b,)](at, place, marks, many, ends, k, BK=_next_power_of_two(k))
    return many, ends, at, place


class _AttentionLaunch:
    """Inputs of all kernels: cells, projection, and the list of kept cells."""

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
        # the total number of kept cells, as a pointer
        self.last = self.ends[-1:]
        self.samples, self.long, self.width = cells.shape
        self.room, self.both = len(self.at), len(weight)

    def queries_and_keys(self) -> Float[Tensor, "n t"]:
        """Project every kept cell; rows after the last are uninitialised."""
        from overt.nn.hard_attention import triton_kernels

        both = self._empty(self.room, self.both, dtype=self.weight.dtype)
        blocks, launch = _block_sizes(self.weight.dtype)
        with _device_of(self.cells):
            triton_kernels.queries_and_keys[(self._programs(self.both, blocks),)](
                both, self.cells, self.at, self.last, self.weight, self.both,
                D=self.width, FORMAT=self._format(), EXACT=_input_precision(), **blocks, **launch,
            )  # fmt: skip
        return both

    def levels(
        self, both: Float[Tensor, "n t"]
    ) -> tuple[Float[Tensor, "n h"], Float[Tensor, "n h"]]:
        """Return the log-sum-exp of each query's scores, and the attention each key receives."""
        from overt.nn.hard_attention import triton_kernels

        level, share = (self._empty(self.room, self.heads) for _ in range(2))
        grid = (self.samples * self.heads,)
        with _device_of(self.cells):
            given = both, *self._list(), self.scale
            triton_kernels.log_sum_exp[grid](level, share, *given, **self._sides())
            triton_kernels.attention_received[grid](share, level, *given, **self._sides())
        return level, share

    def mixes(self, share: Float[Tensor, "n h"]) -> Float[Tensor, "b h d"]:
        """Mix the cells of each sample by the attention they receive."""
        from overt.nn.hard_attention import triton_kernels

        # in the dtype of the products, as a linear layer under autocast returns
        mix = self.weight.new_empty(self.samples, self.heads, self.width)
        with _device_of(self.cells):
            triton_kernels.mix_cells[(self.samples * self.heads, -(-self.width // 128))](
                mix, share, self.cells, self.at, *self._list(), self.width, BQ=16, BD=128
            )
        return mix

    def of_both(
        self,
        above: Float[Tensor, "b h d"],
        both: Float[Tensor, "n t"],
        level: Float[Tensor, "n h"],
    ) -> tuple[Float[Tensor, "n t"], Float[Tensor, "t n"]]:
        """Return the gradient of queries and keys from that of the mixtures, and its transpose."""
        from overt.nn.hard_attention import triton_kernels

        slope, means = (self._empty(self.room, self.heads) for _ in range(2))
        made = torch.empty_like(both)
        turned = self._empty(self.both, self.room, dtype=both.dtype)
        grid = (self.samples * self.heads,)
        kind = {"FORMAT": self._format()}
        with _device_of(self.cells):
            triton_kernels.received_gradient[grid](
                slope, above, self.cells, self.at, *self._list(), self.width, BQ=16, BD=128
            )
            for kernel in (
                triton_kernels.query_gradient,
                triton_kernels.key_gradient,
            ):  # keys need what queries found
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
        """Return the gradient of all cells: zero for dropped ones."""
        from overt.nn.hard_attention import triton_kernels

        # order matters: the first kernel writes every cell, the second adds to the kept ones
        made = torch.empty_like(self.cells)
        blocks, launch = _block_sizes(self.weight.dtype)
        rows = 16
        with _device_of(self.cells):
            triton_kernels.value_gradient[(-(-self.room // rows),)](
                made, share, above, self.place, self.room, self.long, self.heads,
                D=self.width, BD=_next_power_of_two(self.width), BM=rows,
            )  # fmt: skip
            triton_kernels.add_projection_gradient[(self._programs(self.width, blocks),)](
                made, of_both, self.weight.mT.contiguous(), self.at, self.last, self.width,
                N=self.both, EXACT=_input_precision(), **blocks, **launch,
            )  # fmt: skip
        return made

    def of_weight(self, turned: Float[Tensor, "t n"]) -> Float[Tensor, "t d"]:
        """Return the gradient of the projection, summed in parts in a deterministic order."""
        from overt.nn.hard_attention import triton_kernels

        # split over the rows to fill the GPU; a sum of parts is deterministic, atomic adds are not
        parts = self._empty(SPLIT_K, self.both * self.width)
        cells = self._empty(self.width, self.room, dtype=self.weight.dtype)
        blocks, launch = _block_sizes(self.weight.dtype)
        pieces = -(-self.both // blocks["BM"]) * -(-self.width // blocks["BN"])
        with _device_of(self.cells):
            triton_kernels.transpose_kept[(4 * _multiprocessors(self.cells.device),)](
                cells, self.cells, self.at, self.last, self.room, self.width,
                FORMAT=self._format(), BM=32, BD=64,
            )  # fmt: skip
            triton_kernels.weight_gradient[(pieces, SPLIT_K)](
                parts, turned, cells, self.last, self.room, self.both, self.width,
                EXACT=_input_precision(), **blocks, **launch,
            )  # fmt: skip
        return parts.sum(dim=0).unflatten(0, (self.both, self.width))

    def _empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.cells.device)

    def _programs(self, columns: int, blocks: dict[str, int]) -> int:
        """Return the number of programs that run at once, or fewer if there is less to do."""
        pieces = -(-self.room // blocks["BM"]) * -(-columns // blocks["BN"])
        # a persistent grid: each program loops, so more than the GPU runs at once gains nothing
        return min(pieces, 2 * _multiprocessors(self.cells.device))

    def _list(self) -> tuple[Tensor, Tensor, int]:
        return self.many, self.ends, self.heads

    def _format(self) -> Any:
        from overt.nn.hard_attention.triton_kernels import TRITON_DTYPES as formats

        return formats[self.weight.dtype]

    def _sides(self) -> dict[str, Any]:
        """Return the sizes of a head and of a block of rows."""
        wide = self.both // (2 * self.heads)
        sizes = {
            "W": wide,
            # tl.arange needs powers of two, and tl.dot at least 16
            "BW": max(16, _next_power_of_two(wide)),
            "BQ": BLOCK_ROWS,
            "EXACT": _input_precision(),
        }
        return sizes if INTERPRETED else {**sizes, **LAUNCH}


def _input_precision() -> str:
    """Return how products of float32 are rounded; exact in the interpreter."""
    return "ieee" if INTERPRETED else "tf32"


def _block_sizes(kind: torch.dtype) -> tuple[dict[str, int], dict[str, int]]:
    """Return the block sizes of matrix products, and the launch options."""
    if INTERPRETED:
        return {"BM": 16, "BN": 32, "BK": 16}, {}
    # float32 blocks take twice the shared memory
    deep = 32 if kind == torch.float32 else 64
    return {"BM": 128, "BN": 128, "BK": deep}, {"num_warps": 8, "num_stages": 3}


@cache
def _has_shared_memory(device: torch.device) -> bool:
    """Return whether a GPU has enough shared memory for the blocks."""
    if device.type != "cuda":
        return True
    found = torch.cuda.get_device_properties(device)
    return getattr(found, "shared_memory_per_block_optin", 0) >= MIN_SHARED_MEMORY


@cache
def _multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU."""
    if device.type != "cuda":
        return 2
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Make the GPU of a tensor the current one."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def _next_power_of_two(size: int) -> int:
    """Return the next power of two."""
    return 1 << max(0, size - 1).bit_length()
