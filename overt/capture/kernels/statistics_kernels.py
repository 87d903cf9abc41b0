"""Triton kernels behind `statistics_launch`: statistics of attention without the N x N matrix.

A program holds a block of queries of one head and iterates over the keys (`row_statistics`,
`largest_keys`), or holds a block of keys and iterates over the queries (`received_sums`). Scores
are computed again in each kernel; only one number per query, the log of its softmax denominator, is
stored in between. No program adds into memory of another, so results are the same bits each time.
Products of 16-bit floats are accumulated in float32; those of float32 are not rounded to TF32.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl


@triton.jit
def _head(heads, groups):
    """Return the program id, sample, head and key group of a program."""
    program = tl.program_id(0).to(tl.int64)  # products with strides may exceed 32 bits
    h = program % heads
    return program, program // heads, h, h // (heads // groups)


@triton.jit
def _load_rows(base, n, count, stride, D: tl.constexpr, BD: tl.constexpr):
    """Load rows of features."""
    d = tl.arange(0, BD)
    there = (n < count)[:, None] & (d < D)[None, :]
    return tl.load(base + n[:, None] * stride + d[None, :], mask=there, other=0.0)


@triton.jit
def _score_block(
    query, key, s, r, b, h, num_rows, num_keys, scale, softcap,
    bias, bias_b, bias_h, bias_s, bias_r, allowed, allowed_b, allowed_h, allowed_s, allowed_r,
    CAPPED: tl.constexpr, BIASED: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Return the scores of a block, -inf where a key is hidden or does not exist."""
    scores = tl.dot(query, tl.trans(key), input_precision=EXACT) * scale
    if CAPPED:  # tanh(x) = 2 sigmoid(2 x) - 1
        scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
    visible = (s < num_rows)[:, None] & (r < num_keys)[None, :]
    if BIASED:
        at = b * bias_b + h * bias_h + s[:, None] * bias_s + r[None, :] * bias_r
        scores += tl.load(bias + at, mask=visible, other=0.0).to(tl.float32)
    if MASKED:
        at = b * allowed_b + h * allowed_h + s[:, None] * allowed_s + r[None, :] * allowed_r
        visible = visible & (tl.load(allowed + at, mask=visible, other=0) != 0)
    if CAUSAL:
        visible = visible & (s[:, None] >= r[None, :])
    return tl.where(visible, scores, -float("inf"))


@triton.jit
def row_statistics(
    levels, entropies, shares, groups_of_keys, num_groups, sinks,
    queries, keys, heads, groups, num_rows, num_keys, scale, softcap,
    query_b, query_h, query_n, key_b, key_g, key_n,
    bias, bias_b, bias_h, bias_s, bias_r, allowed, allowed_b, allowed_h, allowed_s, allowed_r,
    CAPPED: tl.constexpr, BIASED: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    SINKS: tl.constexpr, ENTROPY: tl.constexpr, SHARES: tl.constexpr, EXACT: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Compute log-denominators, entropies and shares of groups of keys for a block of queries."""
    program, b, h, g = _head(heads, groups)
    first_row = tl.program_id(1) * BS
    s = first_row + tl.arange(0, BS).to(tl.int64)
    query = _load_rows(queries + b * query_b + h * query_h, s, num_rows, query_n, D, BD)
    # Online softmax: the maximum, the sum of exponentials relative to it, and the sum of the
    # exponentials times their arguments.
    most = tl.full([BS], -float("inf"), tl.float32)
    total = tl.zeros([BS], tl.float32)
    moment = tl.zeros([BS], tl.float32)
    part = tl.zeros([BS, BM], tl.float32)
    stop = num_keys
    if CAUSAL:
        stop = tl.minimum(num_keys, first_row + BS)
    for first in range(0, stop, BR):
        r = first + tl.arange(0, BR).to(tl.int64)
        key = _load_rows(keys + b * key_b + g * key_g, r, num_keys, key_n, D, BD)
        scores = _score_block(
            query, key, s, r, b, h, num_rows, num_keys, scale, softcap,
            bias, bias_b, bias_h, bias_s, bias_r,
            allowed, allowed_b, allowed_h, allowed_s, allowed_r,
            CAPPED, BIASED, MASKED, CAUSAL, EXACT,
        )  # fmt: skip
        more = tl.maximum(most, tl.max(scores, 1))
        # Without a visible key so far, -inf - -inf would be NaN.
        safe = tl.where(more == -float("inf"), 0.0, more)
        before = tl.where(most == -float("inf"), 0.0, most - safe)
        factor = tl.exp(before)
        inside = tl.where(scores == -float("inf"), 0.0, scores - safe[:, None])
        powers = tl.where(scores == -float("inf"), 0.0, tl.exp(inside))
        if ENTROPY:
            moment = factor * (moment + before * total) + tl.sum(powers * inside, 1)
        total = factor * total + tl.sum(powers, 1)
        if SHARES:
            m = tl.arange(0, BM)
            there = (r < num_keys)[:, None] & (m < num_groups)[None, :]
            at = groups_of_keys + (b * num_keys + r[:, None]) * num_groups + m[None, :]
            member = tl.load(at, mask=there, other=0.0)
            part = factor[:, None] * part + tl.dot(powers, member, input_precision="ieee")
        most = more
    seen = total > 0
    divisor = tl.where(seen, total, 1.0)
    out = program * num_rows + s
    if ENTROPY:
        found = tl.maximum(tl.log(divisor) - moment / divisor, 0.0)
        tl.store(entropies + out, tl.where(seen, found, 0.0), mask=s < num_rows)
    if SHARES:
        m = tl.arange(0, BM)
        there = (s < num_rows)[:, None] & (m < num_groups)[None, :]
        at = shares + out[:, None] * num_groups + m[None, :]
        tl.store(at, part / divisor[:, None], mask=there)
    level = tl.where(seen, most, 0.0)
    if SINKS:  # keys without a value are part of the denominator
        sink = tl.load(sinks + h).to(tl.float32)
        level = tl.where(seen, tl.maximum(most, sink), sink)
        total = total * tl.exp(tl.where(seen, most - level, 0.0)) + tl.exp(sink - level)
        divisor = tl.where(total > 0, total, 1.0)
    tl.store(levels + out, level + tl.log(divisor), mask=s < num_rows)


@triton.jit
def received_sums(
    received, counted, levels,
    queries, keys, heads, groups, num_rows, num_keys, scale, softcap,
    query_b, query_h, query_n, key_b, key_g, key_n,
    bias, bias_b, bias_h, bias_s, bias_r, allowed, allowed_b, allowed_h, allowed_s, allowed_r,
    CAPPED: tl.constexpr, BIASED: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    EXACT: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Sum the weights on a block of keys over the queries that count."""
    program, b, h, g = _head(heads, groups)
    first_key = tl.program_id(1) * BR
    r = first_key + tl.arange(0, BR).to(tl.int64)
    key = _load_rows(keys + b * key_b + g * key_g, r, num_keys, key_n, D, BD)
    total = tl.zeros([BR], tl.float32)
    start = 0
    if CAUSAL:  # earlier queries do not see these keys
        start = first_key // BS * BS
    for first in range(start, num_rows, BS):
        s = first + tl.arange(0, BS).to(tl.int64)
        query = _load_rows(queries + b * query_b + h * query_h, s, num_rows, query_n, D, BD)
        scores = _score_block(
            query, key, s, r, b, h, num_rows, num_keys, scale, softcap,
            bias, bias_b, bias_h, bias_s, bias_r,
            allowed, allowed_b, allowed_h, allowed_s, allowed_r,
            CAPPED, BIASED, MASKED, CAUSAL, EXACT,
        )  # fmt: skip
        level = tl.load(levels + program * num_rows + s, mask=s < num_rows, other=0.0)
        count = tl.load(counted + b * num_rows + s, mask=s < num_rows, other=0.0)
        total += tl.sum(tl.exp(scores - level[:, None]) * count[:, None], 0)
    tl.store(received + program * num_keys + r, total, mask=r < num_keys)


@triton.jit
def largest_keys(
    weights, indices, top, levels,
    queries, keys, heads, groups, num_rows, num_keys, scale, softcap,
    query_b, query_h, query_n, key_b, key_g, key_n,
    bias, bias_b, bias_h, bias_s, bias_r, allowed, allowed_b, allowed_h, allowed_s, allowed_r,
    CAPPED: tl.constexpr, BIASED: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    EXACT: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr,
    BS: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Find the largest keys of a block of queries, in any order; -1 where there are fewer."""
    program, b, h, g = _head(heads, groups)
    first_row = tl.program_id(1) * BS
    s = first_row + tl.arange(0, BS).to(tl.int64)
    query = _load_rows(queries + b * query_b + h * query_h, s, num_rows, query_n, D, BD)
    t = tl.arange(0, BT)
    # Places that are not needed hold +inf, so that they are never the smallest.
    best = tl.where((t < top)[None, :], tl.full([BS, BT], -float("inf"), tl.float32), float("inf"))
    where = tl.full([BS, BT], -1, tl.int64)
    stop = num_keys
    if CAUSAL:
        stop = tl.minimum(num_keys, first_row + BS)
    for first in range(0, stop, BR):
        columns = tl.arange(0, BR)
        r = first + columns.to(tl.int64)
        key = _load_rows(keys + b * key_b + g * key_g, r, num_keys, key_n, D, BD)
        scores = _score_block(
            query, key, s, r, b, h, num_rows, num_keys, scale, softcap,
            bias, bias_b, bias_h, bias_s, bias_r,
            allowed, allowed_b, allowed_h, allowed_s, allowed_r,
            CAPPED, BIASED, MASKED, CAUSAL, EXACT,
        )  # fmt: skip
        # While a row has a larger key in this block than the smallest one that it holds.
        largest = tl.max(scores, 1)
        smallest = tl.min(best, 1)
        open_rows = tl.max((largest > smallest).to(tl.int32), 0)
        while open_rows > 0:
            at = tl.argmax(scores, 1)
            place = tl.argmin(best, 1)
            takes = (largest > smallest)[:, None]
            here = (t[None, :] == place[:, None]) & takes
            best = tl.where(here, largest[:, None], best)
            where = tl.where(here, (first + at).to(tl.int64)[:, None], where)
            scores = tl.where((columns[None, :] == at[:, None]) & takes, -float("inf"), scores)
            largest = tl.max(scores, 1)
            smallest = tl.min(best, 1)
            open_rows = tl.max((largest > smallest).to(tl.int32), 0)
    level = tl.load(levels + program * num_rows + s, mask=s < num_rows, other=0.0)
    at = (program * num_rows + s[:, None]) * top + t[None, :]
    there = (s < num_rows)[:, None] & (t < top)[None, :]
    tl.store(weights + at, tl.exp(best - level[:, None]), mask=there)
    tl.store(indices + at, where, mask=there)
