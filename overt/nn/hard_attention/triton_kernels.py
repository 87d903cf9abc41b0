"""Triton kernels of hard attention: selection of cells, and attention between kept cells.

The number of kept cells is known on the GPU only. `at` lists the kept cells, sample after sample,
by their index in the batch. `many` is the number per sample, and `ends` the end of each sample in
`at`; its last entry is the total. Rows of cells are read in place, not copied. Kernels whose work
depends on the total loop until it is done, whatever the launch grid.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl

TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


# --- selection


@triton.jit
def top_cells(kept, scores, counts, cells, BK: tl.constexpr, BJ: tl.constexpr):
    """Keep the largest cells of one sample, ties to the first; ranks are computed by counting."""
    b = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BK)
    nothing = -float("inf")
    own = tl.load(scores + b * cells + i, mask=i < cells, other=nothing)
    there = (own > nothing) & (own < float("inf"))
    own = tl.where(there, own, nothing)
    rank = tl.zeros([BK], tl.int32)
    for first in range(0, cells, BJ):
        j = first + tl.arange(0, BJ)
        other = tl.load(scores + b * cells + j, mask=j < cells, other=nothing)
        other = tl.where((other > nothing) & (other < float("inf")), other, nothing)
        # a cell's rank is the number of cells before it in a stable descending sort
        larger = other[None, :] > own[:, None]
        earlier = (other[None, :] == own[:, None]) & (j[None, :] < i[:, None])
        rank += tl.sum((larger | earlier).to(tl.int32), 1)
    count = tl.load(counts + b)
    tl.store(kept + b * cells + i, (there & (rank < count)).to(tl.uint8), mask=i < cells)


@triton.jit
def above_uniform(kept, scores, cells, margin, BK: tl.constexpr):
    """Keep the cells of one sample above the mean of their exponentials, and the largest cell."""
    b = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BK)
    nothing = -float("inf")
    own = tl.load(scores + b * cells + i, mask=i < cells, other=nothing)
    there = (own > nothing) & (own < float("inf"))
    own = tl.where(there, own, nothing)
    top = tl.max(own, 0)
    # a sample without cells has top -inf: -inf - -inf would be NaN
    safe = tl.where(top == nothing, 0.0, top)
    total = safe + tl.log(tl.maximum(tl.sum(tl.exp(own - safe), 0), 1e-30))
    many = tl.log(tl.maximum(tl.sum(there.to(tl.float32), 0), 1.0))
    level = total - many + margin * (tl.abs(total) + many)
    largest = i == tl.min(tl.where(own == top, i, BK), 0)
    found = there & ((own > level) | largest)
    tl.store(kept + b * cells + i, found.to(tl.uint8), mask=i < cells)


@triton.jit
def list_kept(at, place, kept, many, ends, cells, BK: tl.constexpr):
    """List the kept cells of one sample, and store the row of each cell in the list."""
    b = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BK)
    here = tl.load(kept + b * cells + i, mask=i < cells, other=0) != 0
    start = tl.load(ends + b) - tl.load(many + b)
    row = start + tl.cumsum(here.to(tl.int32), 0) - 1
    tl.store(at + row, (b * cells + i).to(tl.int32), mask=here)
    tl.store(place + b * cells + i, tl.where(here, row, -1), mask=i < cells)


@triton.jit
def kept_first_rows(rows, kept, cells, count, BK: tl.constexpr):
    """Store the row numbers of `count` cells of one sample: kept ones first, in order."""
    b = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BK)
    here = tl.load(kept + b * cells + i, mask=i < cells, other=0) != 0
    upto = tl.cumsum(here.to(tl.int32), 0)
    many = tl.sum(here.to(tl.int32), 0)
    # i - upto counts the dropped cells before this one
    goes = tl.where(here, upto - 1, many + i - upto)
    tl.store(rows + b * count + goes, b * cells + i, mask=(i < cells) & (goes < count))


# --- matrix products over the kept rows


@triton.jit
def queries_and_keys(
    both, cells, at, last, weight,
    N, D: tl.constexpr, FORMAT: tl.constexpr, EXACT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Apply a linear layer to the kept cells, block by block."""
    # the total is read on the GPU: the launch grid is fixed, and programs loop over the pieces
    total = tl.load(last)
    across = tl.cdiv(N, BN)
    pieces = tl.cdiv(total, BM) * across
    for piece in range(tl.program_id(0), pieces, tl.num_programs(0)):
        row = (piece // across) * BM + tl.arange(0, BM)
        n = (piece % across) * BN + tl.arange(0, BN)
        here = row < total
        # int64: cell * D may exceed 2**31 elements
        cell = tl.load(at + row, mask=here, other=0).to(tl.int64)
        found = tl.zeros([BM, BN], tl.float32)
        for first in range(0, D, BK):
            d = first + tl.arange(0, BK)
            x = tl.load(
                cells + cell[:, None] * D + d[None, :],
                mask=here[:, None] & (d < D)[None, :],
                other=0.0,
            )
            w = tl.load(
                weight + n[None, :] * D + d[:, None],
                mask=(n < N)[None, :] & (d < D)[:, None],
                other=0.0,
            )
            found = tl.dot(x.to(FORMAT), w, found, input_precision=EXACT)
        at_row = both + row.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(at_row, found.to(FORMAT), mask=here[:, None] & (n < N)[None, :])


@triton.jit(do_not_specialize=("count",))  # do not recompile for each batch size
def value_gradient(
    of_cells, shares, above, place, count, cells, heads,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Store the gradient of all cells through the mixture: 0 for dropped cells."""
    cell = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    d = tl.arange(0, BD)
    row = tl.load(place + cell, mask=cell < count, other=-1).to(tl.int64)
    sample = cell // cells
    there = (row >= 0)[:, None] & (d < D)[None, :]
    found = tl.zeros([BM, BD], tl.float32)
    for h in range(heads):
        # dropped cells have row -1: masked loads give 0, so their gradient is stored as 0
        share = tl.load(shares + row * heads + h, mask=row >= 0, other=0.0)
        at_head = above + (sample * heads + h)[:, None] * D + d[None, :]
        found += share[:, None] * tl.load(at_head, mask=there, other=0.0).to(tl.float32)
    whole = (cell < count)[:, None] & (d < D)[None, :]
    tl.store(of_cells + cell[:, None] * D + d[None, :], found, mask=whole)


@triton.jit
def add_projection_gradient(
    of_cells, of_both, turned, at, last,
    D, N: tl.constexpr, EXACT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Add the gradient of the kept cells through their queries and keys."""
    total = tl.load(last)
    across = tl.cdiv(D, BN)
    pieces = tl.cdiv(total, BM) * across
    for piece in range(tl.program_id(0), pieces, tl.num_programs(0)):
        row = (piece // across) * BM + tl.arange(0, BM)
        d = (piece % across) * BN + tl.arange(0, BN)
        here = row < total
        cell = tl.load(at + row, mask=here, other=0).to(tl.int64)
        there = here[:, None] & (d < D)[None, :]
        place = of_cells + cell[:, None] * D + d[None, :]
        # starts from what `value_gradient` stored, so the sum needs no atomics
        found = tl.load(place, mask=there, other=0.0).to(tl.float32)
        for first in range(0, N, BK):
            n = first + tl.arange(0, BK)
            g = tl.load(
                of_both + row.to(tl.int64)[:, None] * N + n[None, :],
                mask=here[:, None] & (n < N)[None, :],
                other=0.0,
            )
            w = tl.load(
                turned + d[None, :] * N + n[:, None],
                mask=(d < D)[None, :] & (n < N)[:, None],
                other=0.0,
            )
            found = tl.dot(g, w, found, input_precision=EXACT)
        tl.store(place, found, mask=there)


@triton.jit
def transpose_kept(
    turned, cells, at, last, room, D, FORMAT: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """Transpose the kept cells, as `weight_gradient` reads them."""
    total = tl.load(last)
    across = tl.cdiv(D, BD)
    pieces = tl.cdiv(total, BM) * across
    for piece in range(tl.program_id(0), pieces, tl.num_programs(0)):
        row = (piece // across) * BM + tl.arange(0, BM)
        d = (piece % across) * BD + tl.arange(0, BD)
        cell = tl.load(at + row, mask=row < total, other=0).to(tl.int64)
        there = (row < total)[:, None] & (d < D)[None, :]
        x = tl.load(cells + cell[:, None] * D + d[None, :], mask=there, other=0.0)
        place = turned + d.to(tl.int64)[:, None] * room + row[None, :]
        tl.store(place, tl.trans(x.to(FORMAT)), mask=tl.trans(there))


@triton.jit
def weight_gradient(
    parts, of_both, cells, last, room, N, D, EXACT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute a block of the weight gradient from one part of the rows; both inputs are transposed.

    Products of float32 need the summed axis to be contiguous.
    """
    across = tl.cdiv(D, BN)
    n = (tl.program_id(0) // across) * BM + tl.arange(0, BM)
    d = (tl.program_id(0) % across) * BN + tl.arange(0, BN)
    part = tl.program_id(1)
    total = tl.load(last)
    # parts are multiples of BK, so that only the last block of the last part is masked
    each = tl.cdiv(tl.cdiv(total, BK), tl.num_programs(1)) * BK
    end = tl.minimum(total, (part + 1) * each)
    found = tl.zeros([BM, BN], tl.float32)
    for first in range(part * each, end, BK):
        row = first + tl.arange(0, BK)
        g = tl.load(
            of_both + n.to(tl.int64)[:, None] * room + row[None, :],
            mask=(n < N)[:, None] & (row < end)[None, :],
            other=0.0,
        )
        x = tl.load(
            cells + d.to(tl.int64)[None, :] * room + row[:, None],
            mask=(d < D)[None, :] & (row < end)[:, None],
            other=0.0,
        )
        found = tl.dot(g, x, found, input_precision=EXACT)
    at_row = parts + (part.to(tl.int64) * N + n[:, None]) * D + d[None, :]
    tl.store(at_row, found, mask=(n < N)[:, None] & (d < D)[None, :])


# --- attention between the cells of a sample


@triton.jit
def _program_sample(many, ends, heads):
    """Return the head and sample of a program, its first row, and its number of rows."""
    program = tl.program_id(0)
    b = program // heads
    m = tl.load(many + b)
    return program % heads, b.to(tl.int64), (tl.load(ends + b) - m).to(tl.int64), m


@triton.jit
def _load_rows(
    both, start, first, m, column, wide, W: tl.constexpr, BW: tl.constexpr, BQ: tl.constexpr
):
    """Load a block of queries or keys of a sample, from `first` on."""
    i = first + tl.arange(0, BQ)
    w = tl.arange(0, BW)
    there = (i < m)[:, None] & (w < W)[None, :]
    place = both + (start + i)[:, None] * wide + column + w[None, :]
    return tl.load(place, mask=there, other=0.0)


@triton.jit
def _load_scalars(values, start, first, m, heads, h, BQ: tl.constexpr):
    """Load one number per row of a head."""
    i = first + tl.arange(0, BQ)
    return tl.load(values + (start + i) * heads + h, mask=i < m, other=0.0)


@triton.jit
def _weights(query, key, level, i, j, m, scale, EXACT: tl.constexpr, BQ: tl.constexpr):
    """Compute a block of attention weights; rows and columns beyond the last are 0."""
    # recomputed from the log-sum-exp in each pass, as in FlashAttention: no n x n buffer
    scores = tl.dot(query, tl.trans(key), input_precision=EXACT) * scale
    q = i + tl.arange(0, BQ)
    k = j + tl.arange(0, BQ)
    there = (q < m)[:, None] & (k < m)[None, :]
    return tl.where(there, tl.exp(tl.where(there, scores - level[:, None], 0.0)), 0.0)


@triton.jit
def log_sum_exp(
    level, share, both, many, ends, heads, scale,
    W: tl.constexpr, BW: tl.constexpr, BQ: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Compute the log-sum-exp of each query's scores.

    For a sample that fits into one block, also the attention that each key receives.
    """
    h, _, start, m = _program_sample(many, ends, heads)
    wide = 2 * heads * W
    for i in range(0, m, BQ):
        query = _load_rows(both, start, i, m, h * W, wide, W, BW, BQ)
        q = i + tl.arange(0, BQ)
        # online softmax: the running maximum and the sum scaled to it
        most = tl.full([BQ], -float("inf"), tl.float32)
        total = tl.zeros([BQ], tl.float32)
        for j in range(0, m, BQ):
            key = _load_rows(both, start, j, m, (heads + h) * W, wide, W, BW, BQ)
            scores = tl.dot(query, tl.trans(key), input_precision=EXACT) * scale
            k = j + tl.arange(0, BQ)
            scores = tl.where((k < m)[None, :], scores, -float("inf"))
            more = tl.maximum(most, tl.max(scores, 1))  # every block has at least one key
            raised = tl.exp(scores - more[:, None])
            total = total * tl.exp(most - more) + tl.sum(raised, 1)
            most = more
            # a single block holds every query and key: no second kernel is needed for the received
            # attention
            if m <= BQ:
                weights = tl.where((q < m)[:, None], raised / total[:, None], 0.0)
                tl.store(share + (start + k) * heads + h, tl.sum(weights, 0), mask=k < m)
        tl.store(level + (start + q) * heads + h, most + tl.log(total), mask=q < m)


@triton.jit
def attention_received(
    share, level, both, many, ends, heads, scale,
    W: tl.constexpr, BW: tl.constexpr, BQ: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Sum the attention that each key receives, for samples that `log_sum_exp` did not finish."""
    h, _, start, m = _program_sample(many, ends, heads)
    wide = 2 * heads * W
    if m > BQ:
        for j in range(0, m, BQ):
            key = _load_rows(both, start, j, m, (heads + h) * W, wide, W, BW, BQ)
            found = tl.zeros([BQ], tl.float32)
            for i in range(0, m, BQ):
                query = _load_rows(both, start, i, m, h * W, wide, W, BW, BQ)
                own = _load_scalars(level, start, i, m, heads, h, BQ)
                found += tl.sum(_weights(query, key, own, i, j, m, scale, EXACT, BQ), 0)
            k = j + tl.arange(0, BQ)
            tl.store(share + (start + k) * heads + h, found, mask=k < m)


@triton.jit
def mix_cells(
    mix, share, cells, at, many, ends, heads, D, BQ: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """Compute some features of the mixture of cells of one head and sample."""
    h, b, start, m = _program_sample(many, ends, heads)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    found = tl.zeros([BD], tl.float32)
    for j in range(0, m, BQ):
        k = j + tl.arange(0, BQ)
        cell = tl.load(at + start + k, mask=k < m, other=0).to(tl.int64)
        there = (k < m)[:, None] & (d < D)[None, :]
        x = tl.load(cells + cell[:, None] * D + d[None, :], mask=there, other=0.0)
        own = _load_scalars(share, start, j, m, heads, h, BQ)
        found += tl.sum(own[:, None] * x.to(tl.float32), 0)
    tl.store(mix + (b * heads + h) * D + d, found, mask=d < D)


@triton.jit
def received_gradient(
    slope, above, cells, at, many, ends, heads, D, BQ: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """Compute the gradient of the attention that each cell receives."""
    h, b, start, m = _program_sample(many, ends, heads)
    for j in range(0, m, BQ):
        k = j + tl.arange(0, BQ)
        cell = tl.load(at + start + k, mask=k < m, other=0).to(tl.int64)
        found = tl.zeros([BQ], tl.float32)
        for first in range(0, D, BD):
            d = first + tl.arange(0, BD)
            there = (k < m)[:, None] & (d < D)[None, :]
            x = tl.load(cells + cell[:, None] * D + d[None, :], mask=there, other=0.0)
            g = tl.load(above + (b * heads + h) * D + d, mask=d < D, other=0.0)
            found += tl.sum(x.to(tl.float32) * g.to(tl.float32)[None, :], 1)
        tl.store(slope + (start + k) * heads + h, found, mask=k < m)


@triton.jit
def _store_gradient(
    of_both, turned, found, start, first, m, column, wide, room,
    FORMAT: tl.constexpr, W: tl.constexpr, BW: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    """Store a gradient of queries or keys, and its transpose."""
    i = first + tl.arange(0, BQ)
    w = tl.arange(0, BW)
    found = found.to(FORMAT)
    there = (i < m)[:, None] & (w < W)[None, :]
    tl.store(of_both + (start + i)[:, None] * wide + column + w[None, :], found, mask=there)
    place = turned + (column + w).to(tl.int64)[:, None] * room + (start + i)[None, :]
    tl.store(place, tl.trans(found), mask=(w < W)[:, None] & (i < m)[None, :])


@triton.jit
def query_gradient(
    of_both, turned, room, means, slope, level, both, many, ends, heads, scale,
    FORMAT: tl.constexpr,
    W: tl.constexpr, BW: tl.constexpr, BQ: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the queries of one head and sample, and the row means.

    For a sample that fits into one block, also the gradient of the keys; the row means are only
    needed for the keys of larger samples.
    """
    h, _, start, m = _program_sample(many, ends, heads)
    wide = 2 * heads * W
    if m <= BQ:  # the weights are computed once
        query = _load_rows(both, start, 0, m, h * W, wide, W, BW, BQ)
        key = _load_rows(both, start, 0, m, (heads + h) * W, wide, W, BW, BQ)
        gets = _load_scalars(slope, start, 0, m, heads, h, BQ)
        own = _load_scalars(level, start, 0, m, heads, h, BQ)
        weights = _weights(query, key, own, 0, 0, m, scale, EXACT, BQ)
        # gradient of a softmax: w (g - sum w g), per row; g is the same for all queries of a key
        mean = tl.sum(weights * gets[None, :], 1)
        of_score = (weights * (gets[None, :] - mean[:, None]) * scale).to(FORMAT)
        found = tl.dot(of_score, key, input_precision=EXACT)
        _store_gradient(of_both, turned, found, start, 0, m, h * W, wide, room, FORMAT, W, BW, BQ)
        found = tl.dot(tl.trans(of_score), query, input_precision=EXACT)
        column = (heads + h) * W
        _store_gradient(of_both, turned, found, start, 0, m, column, wide, room, FORMAT, W, BW, BQ)
    else:
        for i in range(0, m, BQ):
            query = _load_rows(both, start, i, m, h * W, wide, W, BW, BQ)
            own = _load_scalars(level, start, i, m, heads, h, BQ)
            mean = tl.zeros([BQ], tl.float32)
            for j in range(0, m, BQ):
                key = _load_rows(both, start, j, m, (heads + h) * W, wide, W, BW, BQ)
                gets = _load_scalars(slope, start, j, m, heads, h, BQ)
                weights = _weights(query, key, own, i, j, m, scale, EXACT, BQ)
                mean += tl.sum(weights * gets[None, :], 1)
            found = tl.zeros([BQ, BW], tl.float32)
            for j in range(0, m, BQ):
                key = _load_rows(both, start, j, m, (heads + h) * W, wide, W, BW, BQ)
                gets = _load_scalars(slope, start, j, m, heads, h, BQ)
                weights = _weights(query, key, own, i, j, m, scale, EXACT, BQ)
                of_score = (weights * (gets[None, :] - mean[:, None]) * scale).to(FORMAT)
                found = tl.dot(of_score, key, found, input_precision=EXACT)
            q = i + tl.arange(0, BQ)
            tl.store(means + (start + q) * heads + h, mean, mask=q < m)
            _store_gradient(
                of_both, turned, found, start, i, m, h * W, wide, room, FORMAT, W, BW, BQ
            )


@triton.jit
def key_gradient(
    of_both, turned, room, means, slope, level, both, many, ends, heads, scale,
    FORMAT: tl.constexpr,
    W: tl.constexpr, BW: tl.constexpr, BQ: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the keys of one head and sample, unless `query_gradient` did."""
    h, _, start, m = _program_sample(many, ends, heads)
    wide = 2 * heads * W
    if m > BQ:
        for j in range(0, m, BQ):
            key = _load_rows(both, start, j, m, (heads + h) * W, wide, W, BW, BQ)
            gets = _load_scalars(slope, start, j, m, heads, h, BQ)
            found = tl.zeros([BQ, BW], tl.float32)
            for i in range(0, m, BQ):
                query = _load_rows(both, start, i, m, h * W, wide, W, BW, BQ)
                own = _load_scalars(level, start, i, m, heads, h, BQ)
                mean = _load_scalars(means, start, i, m, heads, h, BQ)
                weights = _weights(query, key, own, i, j, m, scale, EXACT, BQ)
                of_score = weights * (gets[None, :] - mean[:, None]) * scale
                found = tl.dot(tl.trans(of_score.to(FORMAT)), query, found, input_precision=EXACT)
            column = (heads + h) * W
            _store_gradient(
                of_both, turned, found, start, j, m, column, wide, room, FORMAT, W, BW, BQ
            )
