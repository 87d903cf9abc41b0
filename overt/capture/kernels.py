"""The Triton kernels behind `launching`: log-shares of rows, what rows cost, and their gradients.

A kernel holds some rows of one head and goes along the keys: twice for log-shares, once for the
normaliser and once for what is written, and once for costs, which are sums. Products of sixteen-bit
numbers are summed in float32; those of float32 are not rounded to TF32. Where queries and keys lie
is told by numbers, a place a layer, keys after queries.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl

FORMATS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
# A kernel is compiled anew for a number that is 1 or that 16 divides: not for these, which change
# from batch to batch and say nothing about where rows of keys or targets begin.
OF_A_BATCH = ("samples", "count", "start")


@triton.jit
def _head(samples, heads, groups):
    """Which head of which sample in which layer a program is about, and its group of keys."""
    program = tl.program_id(0).to(tl.int64)  # times a size or a stride it may pass 32 bits
    h = program % heads
    return (
        program,
        program // (samples * heads),
        program // heads % samples,
        h,
        h // (heads // groups),
    )


@triton.jit
def _row_block(
    places, rows, layer, b, h, count, query_b, query_h, query_n,
    FORMAT: tl.constexpr, ALIGNED: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """The rows of one head that take part; positions of -1 are those of row 0."""
    s = tl.arange(0, BS)
    d = tl.arange(0, BD)
    at = tl.load(rows + b * count + s, mask=s < count, other=0)
    at = tl.maximum(at, 0)
    place = tl.load(places + layer).to(tl.pointer_type(FORMAT))
    if ALIGNED:  # said of the pointer: what is said of a number is lost when it becomes one
        place = tl.multiple_of(place, 16)
    base = place + b * query_b + h * query_h
    there = (s < count)[:, None] & (d < D)[None, :]
    return tl.load(base + at[:, None] * query_n + d[None, :], mask=there, other=0.0)


@triton.jit
def _key_block(
    places, layer, b, g, first, layers, long, start, key_b, key_g, key_n,
    FORMAT: tl.constexpr, ALIGNED: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Some keys of one group of heads, from `first` on."""
    r = first + tl.arange(0, BR)
    d = tl.arange(0, BD)
    place = tl.load(places + layers + layer).to(tl.pointer_type(FORMAT))
    if ALIGNED:  # said of the pointer: what is said of a number is lost when it becomes one
        place = tl.multiple_of(place, 16)
    base = place + b * key_b + g * key_g
    there = (r < long)[:, None] & (d < D)[None, :]
    return tl.load(base + (start + r)[:, None] * key_n + d[None, :], mask=there, other=0.0)


@triton.jit
def _seen_block(
    hidden, b, first, count, long, hidden_b, hidden_s,
    HIDES: tl.constexpr, BS: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Which of some keys each row sees."""
    s = tl.arange(0, BS)
    r = first + tl.arange(0, BR)
    seen = (s < count)[:, None] & (r < long)[None, :]
    if HIDES:
        at = hidden + b * hidden_b + s[:, None] * hidden_s + r[None, :]
        seen = seen & (tl.load(at, mask=seen, other=1) == 0)
    return seen


@triton.jit
def _slope_block(
    slopes, logs, sums, base, first, count, long,
    BS: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """The gradient of some scores from that of their log-shares."""
    s = tl.arange(0, BS)
    r = first + tl.arange(0, BR)
    there = (s < count)[:, None] & (r < long)[None, :]
    at = base + s[:, None] * long + r[None, :]
    log = tl.load(logs + at, mask=there, other=-float("inf"))
    slope = tl.load(slopes + at, mask=there, other=0.0)
    seen = log > -float("inf")
    return tl.where(seen, slope - tl.exp(log) * sums[:, None], 0.0)


@triton.jit(do_not_specialize=OF_A_BATCH)
def log_shares(
    out, hidden, hidden_b, hidden_s, HIDES: tl.constexpr, places, rows,
    layers, samples, heads, groups, count, long, start, scale,
    query_b, query_h, query_n, key_b, key_g, key_n,
    FORMAT: tl.constexpr, EXACT: tl.constexpr, ALIGNED: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """One head of one sample in one layer."""
    program, layer, b, h, g = _head(samples, heads, groups)
    query = _row_block(
        places, rows, layer, b, h, count, query_b, query_h, query_n, FORMAT, ALIGNED, D, BD, BS
    )
    most = tl.full([BS], -float("inf"), tl.float32)
    total = tl.zeros([BS], tl.float32)
    for first in range(0, long, BR):
        key = _key_block(
            places, layer, b, g, first, layers, long, start, key_b, key_g, key_n,
            FORMAT, ALIGNED, D, BD, BR,
        )  # fmt: skip
        seen = _seen_block(hidden, b, first, count, long, hidden_b, hidden_s, HIDES, BS, BR)
        scores = tl.dot(query, tl.trans(key), input_precision=EXACT) * scale
        scores = tl.where(seen, scores, -float("inf"))
        more = tl.maximum(most, tl.max(scores, 1))
        safe = tl.where(more == -float("inf"), 0.0, more)
        total = total * tl.exp(most - safe) + tl.sum(tl.exp(scores - safe[:, None]), 1)
        most = more
    level = tl.where(total > 0, tl.where(most == -float("inf"), 0.0, most) + tl.log(total), 0.0)
    s = tl.arange(0, BS)
    base = out + program * count * long
    for first in range(0, long, BR):
        key = _key_block(
            places, layer, b, g, first, layers, long, start, key_b, key_g, key_n,
            FORMAT, ALIGNED, D, BD, BR,
        )  # fmt: skip
        seen = _seen_block(hidden, b, first, count, long, hidden_b, hidden_s, HIDES, BS, BR)
        scores = tl.dot(query, tl.trans(key), input_precision=EXACT) * scale
        found = tl.where(seen, scores - level[:, None], -float("inf"))
        r = first + tl.arange(0, BR)
        there = (s < count)[:, None] & (r < long)[None, :]
        tl.store(base + s[:, None] * long + r[None, :], found, mask=there)


@triton.jit(do_not_specialize=OF_A_BATCH)
def to_rows(
    made, sums, slopes, logs, JOINS: tl.constexpr, places, rows,
    layers, samples, heads, groups, count, long, start, scale,
    query_b, query_h, query_n, key_b, key_g, key_n,
    FORMAT: tl.constexpr, EXACT: tl.constexpr, ALIGNED: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """The gradient of the rows of one head of one sample in one layer."""
    program, layer, b, _, g = _head(samples, heads, groups)
    base = program * count * long
    s = tl.arange(0, BS)
    d = tl.arange(0, BD)
    total = tl.zeros([BS], tl.float32)
    for first in range(0, long, BR):
        r = first + tl.arange(0, BR)
        there = (s < count)[:, None] & (r < long)[None, :]
        at = base + s[:, None] * long + r[None, :]
        seen = tl.load(logs + at, mask=there, other=-float("inf")) > -float("inf")
        total += tl.sum(tl.where(seen, tl.load(slopes + at, mask=there, other=0.0), 0.0), 1)
    tl.store(sums + program * count + s, total, mask=s < count)
    found = tl.zeros([BS, BD], tl.float32)
    for first in range(0, long, BR):
        slope = _slope_block(slopes, logs, total, base, first, count, long, BS, BR)
        key = _key_block(
            places, layer, b, g, first, layers, long, start, key_b, key_g, key_n,
            FORMAT, ALIGNED, D, BD, BR,
        )  # fmt: skip
        found += tl.dot(slope.to(FORMAT), key, input_precision=EXACT)
    if JOINS:  # rows of one position have the sum of them all, each
        at = tl.maximum(tl.load(rows + b * count + s, mask=s < count, other=0), 0)
        same = (at[:, None] == at[None, :]) & (s < count)[None, :]
        found = tl.dot(same.to(tl.float32), found, input_precision="ieee")
    at = made + (program * count + s[:, None]) * D + d[None, :]
    there = (s < count)[:, None] & (d < D)[None, :]
    tl.store(at, (found * scale).to(FORMAT), mask=there)


@triton.jit
def _group(samples, groups, layer):
    """Which group of keys of which sample a program is about, and the layer, from `layer` on."""
    program = tl.program_id(0).to(tl.int64)
    after = program // (samples * groups)
    return after, layer + after, program // groups % samples, program % groups


@triton.jit
def _put_keys(
    found, whole, whole_l, whole_b, whole_g, whole_n, begin, after, b, g, first, long,
    ADDS: tl.constexpr, FORMAT: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Gradients of some keys: added to what is there, or written over it."""
    r = first + tl.arange(0, BR)
    d = tl.arange(0, BD)
    there = (r < long)[:, None] & (d < D)[None, :]
    base = whole + after * whole_l + b * whole_b + g * whole_g
    place = base + (begin + r)[:, None] * whole_n + d[None, :]
    if ADDS:
        found += tl.load(place, mask=there, other=0.0).to(tl.float32)
    tl.store(place, found.to(FORMAT), mask=there)


@triton.jit(do_not_specialize=(*OF_A_BATCH, "layer", "begin"))
def to_keys(
    whole, whole_l, whole_b, whole_g, whole_n, begin, ADDS: tl.constexpr, layer,
    slopes, logs, sums, places, rows,
    layers, samples, heads, groups, count, long, start, scale,
    query_b, query_h, query_n, key_b, key_g, key_n,
    FORMAT: tl.constexpr, EXACT: tl.constexpr, ALIGNED: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Some keys of one group of heads of one sample, in one layer."""
    after, layer, b, g = _group(samples, groups, layer)
    first = tl.program_id(1) * BR
    s = tl.arange(0, BS)
    each = heads // groups
    found = tl.zeros([BR, BD], tl.float32)
    for one in range(each):
        h = g * each + one
        at = (layer * samples + b) * heads + h
        total = tl.load(sums + at * count + s, mask=s < count, other=0.0)
        slope = _slope_block(slopes, logs, total, at * count * long, first, count, long, BS, BR)
        query = _row_block(
            places, rows, layer, b, h, count, query_b, query_h, query_n,
            FORMAT, ALIGNED, D, BD, BS,
        )  # fmt: skip
        found += tl.dot(tl.trans(slope).to(FORMAT), query, input_precision=EXACT)
    _put_keys(
        found * scale, whole, whole_l, whole_b, whole_g, whole_n, begin, after, b, g, first, long,
        ADDS, FORMAT, D, BD, BR,
    )  # fmt: skip


# --- the cost of rows that have a target, of which nothing as large as the rows is written


@triton.jit
def _wanted_block(
    wanted, b, first, count, long, BS: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """How much of each row its target gives to some keys."""
    s = tl.arange(0, BS)
    r = first + tl.arange(0, BR)
    there = (s < count)[:, None] & (r < long)[None, :]
    return tl.load(wanted + (b * count + s[:, None]) * long + r[None, :], mask=there, other=0.0)


@triton.jit
def _cost_slope_block(
    scores, seen, want, levels, masses, slopes, at, count, BS: tl.constexpr
):  # fmt: skip
    """The gradient of some scores from those of the costs of their rows."""
    s = tl.arange(0, BS)
    level = tl.load(levels + at * count + s, mask=s < count, other=0.0)
    mass = tl.load(masses + at * count + s, mask=s < count, other=0.0)
    slope = tl.load(slopes + at * count + s, mask=s < count, other=0.0)
    share = tl.exp(tl.where(seen, scores - level[:, None], -float("inf")))
    return tl.where(seen, slope[:, None] * (share * mass[:, None] - want), 0.0)


@triton.jit(do_not_specialize=OF_A_BATCH)
def costs(
    out, levels, masses, wanted, nothing, hidden, hidden_b, hidden_s, HIDES: tl.constexpr,
    places, rows, layers, samples, heads, groups, count, long, start, scale,
    query_b, query_h, query_n, key_b, key_g, key_n,
    FORMAT: tl.constexpr, EXACT: tl.constexpr, ALIGNED: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """The cross-entropies of one head of one sample in one layer, and what their gradient needs."""
    program, layer, b, h, g = _head(samples, heads, groups)
    query = _row_block(
        places, rows, layer, b, h, count, query_b, query_h, query_n, FORMAT, ALIGNED, D, BD, BS
    )
    most = tl.full([BS], -float("inf"), tl.float32)
    total = tl.zeros([BS], tl.float32)
    met = tl.zeros([BS], tl.float32)
    mass = tl.zeros([BS], tl.float32)
    missed = tl.zeros([BS], tl.float32)
    for first in range(0, long, BR):
        key = _key_block(
            places, layer, b, g, first, layers, long, start, key_b, key_g, key_n,
            FORMAT, ALIGNED, D, BD, BR,
        )  # fmt: skip
        seen = _seen_block(hidden, b, first, count, long, hidden_b, hidden_s, HIDES, BS, BR)
        want = _wanted_block(wanted, b, first, count, long, BS, BR)
        scores = tl.dot(query, tl.trans(key), input_precision=EXACT) * scale
        met += tl.sum(tl.where(seen, want * scores, 0.0), 1)
        mass += tl.sum(tl.where(seen, want, 0.0), 1)
        missed += tl.sum(tl.where(seen, 0.0, want), 1)
        scores = tl.where(seen, scores, -float("inf"))
        more = tl.maximum(most, tl.max(scores, 1))
        safe = tl.where(more == -float("inf"), 0.0, more)
        total = total * tl.exp(most - safe) + tl.sum(tl.exp(scores - safe[:, None]), 1)
        most = more
    level = tl.where(total > 0, tl.where(most == -float("inf"), 0.0, most) + tl.log(total), 0.0)
    s = tl.arange(0, BS)
    at = program * count + s
    tl.store(out + at, level * mass - met - nothing * missed, mask=s < count)
    tl.store(levels + at, level, mask=s < count)
    tl.store(masses + at, mass, mask=s < count)


@triton.jit(do_not_specialize=OF_A_BATCH)
def costs_to_rows(
    made, slopes, levels, masses, wanted, hidden, hidden_b, hidden_s, HIDES: tl.constexpr,
    places, rows, layers, samples, heads, groups, count, long, start, scale,
    query_b, query_h, query_n, key_b, key_g, key_n,
    FORMAT: tl.constexpr, EXACT: tl.constexpr, ALIGNED: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """The gradient of the rows of one head of one sample in one layer, from that of their costs."""
    program, layer, b, h, g = _head(samples, heads, groups)
    query = _row_block(
        places, rows, layer, b, h, count, query_b, query_h, query_n, FORMAT, ALIGNED, D, BD, BS
    )
    found = tl.zeros([BS, BD], tl.float32)
    for first in range(0, long, BR):
        key = _key_block(
            places, layer, b, g, first, layers, long, start, key_b, key_g, key_n,
            FORMAT, ALIGNED, D, BD, BR,
        )  # fmt: skip
        seen = _seen_block(hidden, b, first, count, long, hidden_b, hidden_s, HIDES, BS, BR)
        want = _wanted_block(wanted, b, first, count, long, BS, BR)
        scores = tl.dot(query, tl.trans(key), input_precision=EXACT) * scale
        slope = _cost_slope_block(scores, seen, want, levels, masses, slopes, program, count, BS)
        found += tl.dot(slope.to(FORMAT), key, input_precision=EXACT)
    s = tl.arange(0, BS)
    d = tl.arange(0, BD)
    at = made + (program * count + s[:, None]) * D + d[None, :]
    there = (s < count)[:, None] & (d < D)[None, :]
    tl.store(at, (found * scale).to(FORMAT), mask=there)


@triton.jit(do_not_specialize=(*OF_A_BATCH, "layer", "begin"))
def costs_to_keys(
    whole, whole_l, whole_b, whole_g, whole_n, begin, ADDS: tl.constexpr, layer,
    slopes, levels, masses, wanted, hidden, hidden_b, hidden_s, HIDES: tl.constexpr,
    places, rows, layers, samples, heads, groups, count, long, start, scale,
    query_b, query_h, query_n, key_b, key_g, key_n,
    FORMAT: tl.constexpr, EXACT: tl.constexpr, ALIGNED: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Some keys of one group of heads of one sample, in one layer, from the costs of the rows."""
    after, layer, b, g = _group(samples, groups, layer)
    first = tl.program_id(1) * BR
    each = heads // groups
    key = _key_block(
        places, layer, b, g, first, layers, long, start, key_b, key_g, key_n,
        FORMAT, ALIGNED, D, BD, BR,
    )  # fmt: skip
    seen = _seen_block(hidden, b, first, count, long, hidden_b, hidden_s, HIDES, BS, BR)
    want = _wanted_block(wanted, b, first, count, long, BS, BR)
    found = tl.zeros([BR, BD], tl.float32)
    for one in range(each):
        h = g * each + one
        query = _row_block(
            places, rows, layer, b, h, count, query_b, query_h, query_n,
            FORMAT, ALIGNED, D, BD, BS,
        )  # fmt: skip
        scores = tl.dot(query, tl.trans(key), input_precision=EXACT) * scale
        at = (layer * samples + b) * heads + h
        slope = _cost_slope_block(scores, seen, want, levels, masses, slopes, at, count, BS)
        found += tl.dot(tl.trans(slope).to(FORMAT), query, input_precision=EXACT)
    _put_keys(
        found * scale, whole, whole_l, whole_b, whole_g, whole_n, begin, after, b, g, first, long,
        ADDS, FORMAT, D, BD, BR,
    )  # fmt: skip


@triton.jit
def _zero_rows(
    base, step, first, last, FORMAT: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Zeros from row `first` up to `last`."""
    d = tl.arange(0, BD)
    for at in range(first, last, BR):
        r = at + tl.arange(0, BR)
        there = (r < last)[:, None] & (d < D)[None, :]
        nothing = tl.zeros([BR, BD], tl.float32).to(FORMAT)
        tl.store(base + r[:, None] * step + d[None, :], nothing, mask=there)


@triton.jit(do_not_specialize=(*OF_A_BATCH, "all_queries", "all_keys"))
def costs_to_both(
    of_queries, queries_l, queries_b, queries_h, queries_n, all_queries,
    of_keys, keys_l, keys_b, keys_h, keys_n, all_keys,
    slopes, levels, masses, wanted, hidden, hidden_b, hidden_s, HIDES: tl.constexpr,
    places, rows, layers, samples, heads, groups, count, long, start, scale,
    query_b, query_h, query_n, key_b, key_g, key_n,
    FORMAT: tl.constexpr, EXACT: tl.constexpr, ALIGNED: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Whole gradients of one head of one sample in one layer, whose keys are no other head's."""
    program, layer, b, h, g = _head(samples, heads, groups)
    query = _row_block(
        places, rows, layer, b, h, count, query_b, query_h, query_n, FORMAT, ALIGNED, D, BD, BS
    )
    found = tl.zeros([BS, BD], tl.float32)
    base = of_keys + layer * keys_l + b * keys_b + h * keys_h
    _zero_rows(base, keys_n, 0, start, FORMAT, D, BD, BR)
    for first in range(0, long, BR):
        key = _key_block(
            places, layer, b, g, first, layers, long, start, key_b, key_g, key_n,
            FORMAT, ALIGNED, D, BD, BR,
        )  # fmt: skip
        seen = _seen_block(hidden, b, first, count, long, hidden_b, hidden_s, HIDES, BS, BR)
        want = _wanted_block(wanted, b, first, count, long, BS, BR)
        scores = tl.dot(query, tl.trans(key), input_precision=EXACT) * scale
        slope = _cost_slope_block(scores, seen, want, levels, masses, slopes, program, count, BS)
        found += tl.dot(slope.to(FORMAT), key, input_precision=EXACT)
        made = tl.dot(tl.trans(slope).to(FORMAT), query, input_precision=EXACT) * scale
        _put_keys(
            made, of_keys, keys_l, keys_b, keys_h, keys_n, start, layer, b, h, first, long,
            False, FORMAT, D, BD, BR,
        )  # fmt: skip
    _zero_rows(base, keys_n, start + long, all_keys, FORMAT, D, BD, BR)
    # rows go to their positions, those of one position as their sum, and zeros to all others
    s = tl.arange(0, BS)
    d = tl.arange(0, BD)
    at = tl.maximum(tl.load(rows + b * count + s, mask=s < count, other=0), 0)
    part = (found * scale).to(FORMAT)
    base = of_queries + layer * queries_l + b * queries_b + h * queries_h
    for first in range(0, all_queries, BR):
        n = first + tl.arange(0, BR)
        match = (n[:, None] == at[None, :]) & (s < count)[None, :]
        placed = tl.dot(match.to(FORMAT), part, input_precision=EXACT)
        there = (n < all_queries)[:, None] & (d < D)[None, :]
        tl.store(base + n[:, None] * queries_n + d[None, :], placed.to(FORMAT), mask=there)
