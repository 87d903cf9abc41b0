"""Triton kernels behind `triton_launch`: log-softmax and cross-entropy of rows, and gradients.

A program holds some rows of one head and iterates over the keys: twice for the log-softmax, once
for its normalizer and once for the output; once for the cross-entropy, which is a sum. Products of
16-bit floats are accumulated in float32; those of float32 are not rounded to TF32. `pointers` holds
the addresses of the queries of all layers, then of the keys.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl

FORMATS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
# Triton recompiles for integers that are 1 or divisible by 16. Not for these: they vary from batch
# to batch and do not affect alignment.
VARY_PER_BATCH = ("samples", "num_rows", "start")


@triton.jit
def _head(samples, heads, groups):
    """Return the program id, layer, sample, head and key group of a program."""
    program = tl.program_id(0).to(tl.int64)  # products with strides may exceed 32 bits
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
    pointers, rows, layer, b, h, num_rows, query_b, query_h, query_n,
    FORMAT: tl.constexpr, ALIGNED: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Load the selected rows of one head; position -1 loads row 0."""
    s = tl.arange(0, BS)
    d = tl.arange(0, BD)
    at = tl.load(rows + b * num_rows + s, mask=s < num_rows, other=0)
    at = tl.maximum(at, 0)
    place = tl.load(pointers + layer).to(tl.pointer_type(FORMAT))
    if ALIGNED:  # a hint on the integer would be lost in the cast to a pointer
        place = tl.multiple_of(place, 16)
    base = place + b * query_b + h * query_h
    there = (s < num_rows)[:, None] & (d < D)[None, :]
    return tl.load(base + at[:, None] * query_n + d[None, :], mask=there, other=0.0)


@triton.jit
def _key_block(
    pointers, layer, b, g, first, layers, num_keys, start, key_b, key_g, key_n,
    FORMAT: tl.constexpr, ALIGNED: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Load a block of keys of one group of heads, from `first` on."""
    r = first + tl.arange(0, BR)
    d = tl.arange(0, BD)
    place = tl.load(pointers + layers + layer).to(tl.pointer_type(FORMAT))
    if ALIGNED:  # a hint on the integer would be lost in the cast to a pointer
        place = tl.multiple_of(place, 16)
    base = place + b * key_b + g * key_g
    there = (r < num_keys)[:, None] & (d < D)[None, :]
    return tl.load(base + (start + r)[:, None] * key_n + d[None, :], mask=there, other=0.0)


@triton.jit
def _visible_block(
    hidden, b, first, num_rows, num_keys, hidden_b, hidden_s,
    MASKED: tl.constexpr, BS: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Return which keys of a block each row may see."""
    s = tl.arange(0, BS)
    r = first + tl.arange(0, BR)
    visible = (s < num_rows)[:, None] & (r < num_keys)[None, :]
    if MASKED:
        at = hidden + b * hidden_b + s[:, None] * hidden_s + r[None, :]
        visible = visible & (tl.load(at, mask=visible, other=1) == 0)
    return visible


@triton.jit
def _score_gradient_block(
    slopes, logs, sums, base, first, num_rows, num_keys,
    BS: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Return the gradient of a block of scores from that of their log-softmax."""
    s = tl.arange(0, BS)
    r = first + tl.arange(0, BR)
    there = (s < num_rows)[:, None] & (r < num_keys)[None, :]
    at = base + s[:, None] * num_keys + r[None, :]
    log = tl.load(logs + at, mask=there, other=-float("inf"))
    slope = tl.load(slopes + at, mask=there, other=0.0)
    visible = log > -float("inf")
    return tl.where(visible, slope - tl.exp(log) * sums[:, None], 0.0)


@triton.jit
def _sum_equal_rows(found, rows, b, num_rows, ONCE: tl.constexpr, BS: tl.constexpr):
    """Sum the gradients of rows that share a position, always in the same order.

    Every such row holds the sum; with ONCE the first holds it and the others are zero, so that
    adding all rows into memory by atomic operations gives the same bits each time.
    """
    s = tl.arange(0, BS)
    at = tl.maximum(tl.load(rows + b * num_rows + s, mask=s < num_rows, other=0), 0)
    same = (at[:, None] == at[None, :]) & (s < num_rows)[None, :]
    if ONCE:
        earlier = same & (s[None, :] < s[:, None])
        same = same & (tl.sum(earlier.to(tl.int32), 1) == 0)[:, None]
    return tl.dot(same.to(tl.float32), found, input_precision="ieee")


@triton.jit(do_not_specialize=VARY_PER_BATCH)
def row_log_softmax(
    out, hidden, hidden_b, hidden_s, MASKED: tl.constexpr, pointers, rows,
    layers, samples, heads, groups, num_rows, num_keys, start, scale,
    query_b, query_h, query_n, key_b, key_g, key_n,
    FORMAT: tl.constexpr, EXACT: tl.constexpr, ALIGNED: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Compute the log-softmax of one head of one sample in one layer."""
    program, layer, b, h, g = _head(samples, heads, groups)
    query = _row_block(
        pointers, rows, layer, b, h, num_rows, query_b, query_h, query_n, FORMAT, ALIGNED, D, BD, BS
    )
    # First pass, online softmax: the running maximum, and the sum of exponentials relative to it.
    most = tl.full([BS], -float("inf"), tl.float32)
    total = tl.zeros([BS], tl.float32)
    for first in range(0, num_keys, BR):
        key = _key_block(
            pointers, layer, b, g, first, layers, num_keys, start, key_b, key_g, key_n,
            FORMAT, ALIGNED, D, BD, BR,
        )  # fmt: skip
        visible = _visible_block(
            hidden, b, first, num_rows, num_keys, hidden_b, hidden_s, MASKED, BS, BR
        )
        scores = tl.dot(query, tl.trans(key), input_precision=EXACT) * scale
        scores = tl.where(visible, scores, -float("inf"))
        more = tl.maximum(most, tl.max(scores, 1))
        # Without a visible key so far, exp(-inf - -inf) would be NaN.
        safe = tl.where(more == -float("inf"), 0.0, more)
        total = total * tl.exp(most - safe) + tl.sum(tl.exp(scores - safe[:, None]), 1)
        most = more
    # Log-sum of the row; 0 for an empty row, whose scores are all -inf.
    level = tl.where(total > 0, tl.where(most == -float("inf"), 0.0, most) + tl.log(total), 0.0)
    s = tl.arange(0, BS)
    # Second pass: the scores are computed again and written minus the log-sum.
    base = out + program * num_rows * num_keys
    for first in range(0, num_keys, BR):
        key = _key_block(
            pointers, layer, b, g, first, layers, num_keys, start, key_b, key_g, key_n,
            FORMAT, ALIGNED, D, BD, BR,
        )  # fmt: skip
        visible = _visible_block(
            hidden, b, first, num_rows, num_keys, hidden_b, hidden_s, MASKED, BS, BR
        )
        scores = tl.dot(query, tl.trans(key), input_precision=EXACT) * scale
        found = tl.where(visible, scores - level[:, None], -float("inf"))
        r = first + tl.arange(0, BR)
        there = (s < num_rows)[:, None] & (r < num_keys)[None, :]
        tl.store(base + s[:, None] * num_keys + r[None, :], found, mask=there)


@triton.jit(do_not_specialize=VARY_PER_BATCH)
def row_gradient(
    made, sums, slopes, logs, ONCE: tl.constexpr, pointers, rows,
    layers, samples, heads, groups, num_rows, num_keys, start, scale,
    query_b, query_h, query_n, key_b, key_g, key_n,
    FORMAT: tl.constexpr, EXACT: tl.constexpr, ALIGNED: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the rows of one head of one sample in one layer."""
    program, layer, b, _, g = _head(samples, heads, groups)
    base = program * num_rows * num_keys
    s = tl.arange(0, BS)
    d = tl.arange(0, BD)
    # d score = slope - softmax * sum of the slopes, so the sums come first; the kernel for the keys
    # reads them again.
    total = tl.zeros([BS], tl.float32)
    for first in range(0, num_keys, BR):
        r = first + tl.arange(0, BR)
        there = (s < num_rows)[:, None] & (r < num_keys)[None, :]
        at = base + s[:, None] * num_keys + r[None, :]
        visible = tl.load(logs + at, mask=there, other=-float("inf")) > -float("inf")
        total += tl.sum(tl.where(visible, tl.load(slopes + at, mask=there, other=0.0), 0.0), 1)
    tl.store(sums + program * num_rows + s, total, mask=s < num_rows)
    # d query = scale * d score @ keys.
    found = tl.zeros([BS, BD], tl.float32)
    for first in range(0, num_keys, BR):
        slope = _score_gradient_block(slopes, logs, total, base, first, num_rows, num_keys, BS, BR)
        key = _key_block(
            pointers, layer, b, g, first, layers, num_keys, start, key_b, key_g, key_n,
            FORMAT, ALIGNED, D, BD, BR,
        )  # fmt: skip
        found += tl.dot(slope.to(FORMAT), key, input_precision=EXACT)
    found = _sum_equal_rows(found, rows, b, num_rows, ONCE, BS)
    at = made + (program * num_rows + s[:, None]) * D + d[None, :]
    there = (s < num_rows)[:, None] & (d < D)[None, :]
    tl.store(at, (found * scale).to(FORMAT), mask=there)


@triton.jit
def _group(samples, groups, layer):
    """Return the layer offset, layer, sample and key group of a program."""
    program = tl.program_id(0).to(tl.int64)
    after = program // (samples * groups)
    return after, layer + after, program // groups % samples, program % groups


@triton.jit
def _store_keys(
    found, whole, whole_l, whole_b, whole_g, whole_n, begin, after, b, g, first, num_keys,
    ADDS: tl.constexpr, FORMAT: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Store the gradients of a block of keys, or add them with ADDS."""
    r = first + tl.arange(0, BR)
    d = tl.arange(0, BD)
    there = (r < num_keys)[:, None] & (d < D)[None, :]
    base = whole + after * whole_l + b * whole_b + g * whole_g
    place = base + (begin + r)[:, None] * whole_n + d[None, :]
    # Added in float32 and rounded once.
    if ADDS:
        found += tl.load(place, mask=there, other=0.0).to(tl.float32)
    tl.store(place, found.to(FORMAT), mask=there)


@triton.jit(do_not_specialize=(*VARY_PER_BATCH, "layer", "begin"))
def key_gradient(
    whole, whole_l, whole_b, whole_g, whole_n, begin, ADDS: tl.constexpr, layer,
    slopes, logs, sums, pointers, rows,
    layers, samples, heads, groups, num_rows, num_keys, start, scale,
    query_b, query_h, query_n, key_b, key_g, key_n,
    FORMAT: tl.constexpr, EXACT: tl.constexpr, ALIGNED: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of a block of keys of one group of heads in one layer."""
    after, layer, b, g = _group(samples, groups, layer)
    first = tl.program_id(1) * BR
    s = tl.arange(0, BS)
    # One program sums over all heads that share its keys, so no atomic operation is needed.
    each = heads // groups
    found = tl.zeros([BR, BD], tl.float32)
    for one in range(each):
        h = g * each + one
        at = (layer * samples + b) * heads + h
        total = tl.load(sums + at * num_rows + s, mask=s < num_rows, other=0.0)
        slope = _score_gradient_block(
            slopes, logs, total, at * num_rows * num_keys, first, num_rows, num_keys, BS, BR
        )
        query = _row_block(
            pointers, rows, layer, b, h, num_rows, query_b, query_h, query_n,
            FORMAT, ALIGNED, D, BD, BS,
        )  # fmt: skip
        found += tl.dot(tl.trans(slope).to(FORMAT), query, input_precision=EXACT)
    _store_keys(
        found * scale, whole, whole_l, whole_b, whole_g, whole_n, begin, after, b, g, first,
        num_keys, ADDS, FORMAT, D, BD, BR,
    )  # fmt: skip


# --- cross-entropy of rows with their targets; the softmax is never written to memory


@triton.jit
def _target_block(
    target, b, first, num_rows, num_keys, BS: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Load the targets of a block of keys."""
    s = tl.arange(0, BS)
    r = first + tl.arange(0, BR)
    there = (s < num_rows)[:, None] & (r < num_keys)[None, :]
    return tl.load(
        target + (b * num_rows + s[:, None]) * num_keys + r[None, :], mask=there, other=0.0
    )


@triton.jit
def _cross_entropy_gradient_block(
    scores, visible, expected, log_sums, target_masses, slopes, at, num_rows, BS: tl.constexpr
):  # fmt: skip
    """Return the gradient of a block of scores from that of the cross-entropy of their rows."""
    s = tl.arange(0, BS)
    level = tl.load(log_sums + at * num_rows + s, mask=s < num_rows, other=0.0)
    mass = tl.load(target_masses + at * num_rows + s, mask=s < num_rows, other=0.0)
    slope = tl.load(slopes + at * num_rows + s, mask=s < num_rows, other=0.0)
    # The gradient of -sum t log softmax is softmax * sum t - t.
    share = tl.exp(tl.where(visible, scores - level[:, None], -float("inf")))
    return tl.where(visible, slope[:, None] * (share * mass[:, None] - expected), 0.0)


@triton.jit(do_not_specialize=VARY_PER_BATCH)
def cross_entropy(
    out, log_sums, target_masses, target, log_eps, hidden, hidden_b, hidden_s,
    MASKED: tl.constexpr, pointers, rows, layers, samples, heads, groups,
    num_rows, num_keys, start, scale,
    query_b, query_h, query_n, key_b, key_g, key_n,
    FORMAT: tl.constexpr, EXACT: tl.constexpr, ALIGNED: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Compute the cross-entropies of one head of one sample in one layer.

    Also stores the log-sum of each row and its target mass on visible keys for the backward pass.
    """
    program, layer, b, h, g = _head(samples, heads, groups)
    query = _row_block(
        pointers, rows, layer, b, h, num_rows, query_b, query_h, query_n, FORMAT, ALIGNED, D, BD, BS
    )
    most = tl.full([BS], -float("inf"), tl.float32)
    total = tl.zeros([BS], tl.float32)
    # -sum t log a = log-sum * mass - sum t * score - log_eps * hidden mass, in one pass over the
    # keys.
    target_score = tl.zeros([BS], tl.float32)
    mass = tl.zeros([BS], tl.float32)
    hidden_mass = tl.zeros([BS], tl.float32)
    for first in range(0, num_keys, BR):
        key = _key_block(
            pointers, layer, b, g, first, layers, num_keys, start, key_b, key_g, key_n,
            FORMAT, ALIGNED, D, BD, BR,
        )  # fmt: skip
        visible = _visible_block(
            hidden, b, first, num_rows, num_keys, hidden_b, hidden_s, MASKED, BS, BR
        )
        expected = _target_block(target, b, first, num_rows, num_keys, BS, BR)
        scores = tl.dot(query, tl.trans(key), input_precision=EXACT) * scale
        target_score += tl.sum(tl.where(visible, expected * scores, 0.0), 1)
        mass += tl.sum(tl.where(visible, expected, 0.0), 1)
        hidden_mass += tl.sum(tl.where(visible, 0.0, expected), 1)
        scores = tl.where(visible, scores, -float("inf"))
        more = tl.maximum(most, tl.max(scores, 1))
        safe = tl.where(more == -float("inf"), 0.0, more)
        total = total * tl.exp(most - safe) + tl.sum(tl.exp(scores - safe[:, None]), 1)
        most = more
    level = tl.where(total > 0, tl.where(most == -float("inf"), 0.0, most) + tl.log(total), 0.0)
    s = tl.arange(0, BS)
    at = program * num_rows + s
    tl.store(out + at, level * mass - target_score - log_eps * hidden_mass, mask=s < num_rows)
    tl.store(log_sums + at, level, mask=s < num_rows)
    tl.store(target_masses + at, mass, mask=s < num_rows)


@triton.jit(do_not_specialize=VARY_PER_BATCH)
def cross_entropy_row_gradient(
    made, slopes, log_sums, target_masses, target, hidden, hidden_b, hidden_s, MASKED: tl.constexpr,
    pointers, rows, layers, samples, heads, groups, num_rows, num_keys, start, scale,
    query_b, query_h, query_n, key_b, key_g, key_n,
    FORMAT: tl.constexpr, EXACT: tl.constexpr, ALIGNED: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the rows of one head from that of their cross-entropies."""
    program, layer, b, h, g = _head(samples, heads, groups)
    query = _row_block(
        pointers, rows, layer, b, h, num_rows, query_b, query_h, query_n, FORMAT, ALIGNED, D, BD, BS
    )
    found = tl.zeros([BS, BD], tl.float32)
    for first in range(0, num_keys, BR):
        key = _key_block(
            pointers, layer, b, g, first, layers, num_keys, start, key_b, key_g, key_n,
            FORMAT, ALIGNED, D, BD, BR,
        )  # fmt: skip
        visible = _visible_block(
            hidden, b, first, num_rows, num_keys, hidden_b, hidden_s, MASKED, BS, BR
        )
        expected = _target_block(target, b, first, num_rows, num_keys, BS, BR)
        scores = tl.dot(query, tl.trans(key), input_precision=EXACT) * scale
        slope = _cross_entropy_gradient_block(
            scores, visible, expected, log_sums, target_masses, slopes, program, num_rows, BS
        )
        found += tl.dot(slope.to(FORMAT), key, input_precision=EXACT)
    found = _sum_equal_rows(found, rows, b, num_rows, True, BS)
    s = tl.arange(0, BS)
    d = tl.arange(0, BD)
    at = made + (program * num_rows + s[:, None]) * D + d[None, :]
    there = (s < num_rows)[:, None] & (d < D)[None, :]
    tl.store(at, (found * scale).to(FORMAT), mask=there)


@triton.jit(do_not_specialize=(*VARY_PER_BATCH, "layer", "begin"))
def cross_entropy_key_gradient(
    whole, whole_l, whole_b, whole_g, whole_n, begin, ADDS: tl.constexpr, layer,
    slopes, log_sums, target_masses, target, hidden, hidden_b, hidden_s, MASKED: tl.constexpr,
    pointers, rows, layers, samples, heads, groups, num_rows, num_keys, start, scale,
    query_b, query_h, query_n, key_b, key_g, key_n,
    FORMAT: tl.constexpr, EXACT: tl.constexpr, ALIGNED: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of a block of keys of one group from that of the cross-entropies."""
    after, layer, b, g = _group(samples, groups, layer)
    first = tl.program_id(1) * BR
    each = heads // groups
    key = _key_block(
        pointers, layer, b, g, first, layers, num_keys, start, key_b, key_g, key_n,
        FORMAT, ALIGNED, D, BD, BR,
    )  # fmt: skip
    visible = _visible_block(
        hidden, b, first, num_rows, num_keys, hidden_b, hidden_s, MASKED, BS, BR
    )
    expected = _target_block(target, b, first, num_rows, num_keys, BS, BR)
    found = tl.zeros([BR, BD], tl.float32)
    for one in range(each):
        h = g * each + one
        query = _row_block(
            pointers, rows, layer, b, h, num_rows, query_b, query_h, query_n,
            FORMAT, ALIGNED, D, BD, BS,
        )  # fmt: skip
        scores = tl.dot(query, tl.trans(key), input_precision=EXACT) * scale
        at = (layer * samples + b) * heads + h
        slope = _cross_entropy_gradient_block(
            scores, visible, expected, log_sums, target_masses, slopes, at, num_rows, BS
        )
        found += tl.dot(tl.trans(slope).to(FORMAT), query, input_precision=EXACT)
    _store_keys(
        found * scale, whole, whole_l, whole_b, whole_g, whole_n, begin, after, b, g, first,
        num_keys, ADDS, FORMAT, D, BD, BR,
    )  # fmt: skip


@triton.jit
def _zero_rows(
    base, step, first, last, FORMAT: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Store zeros from row `first` up to `last`."""
    d = tl.arange(0, BD)
    for at in range(first, last, BR):
        r = at + tl.arange(0, BR)
        there = (r < last)[:, None] & (d < D)[None, :]
        zeros = tl.zeros([BR, BD], tl.float32).to(FORMAT)
        tl.store(base + r[:, None] * step + d[None, :], zeros, mask=there)


@triton.jit(do_not_specialize=(*VARY_PER_BATCH, "all_queries", "all_keys"))
def cross_entropy_gradients(
    of_queries, queries_l, queries_b, queries_h, queries_n, all_queries,
    of_keys, keys_l, keys_b, keys_h, keys_n, all_keys,
    slopes, log_sums, target_masses, target, hidden, hidden_b, hidden_s, MASKED: tl.constexpr,
    pointers, rows, layers, samples, heads, groups, num_rows, num_keys, start, scale,
    query_b, query_h, query_n, key_b, key_g, key_n,
    FORMAT: tl.constexpr, EXACT: tl.constexpr, ALIGNED: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Compute whole gradients of one head in one layer, if no other head shares its keys."""
    program, layer, b, h, g = _head(samples, heads, groups)
    query = _row_block(
        pointers, rows, layer, b, h, num_rows, query_b, query_h, query_n, FORMAT, ALIGNED, D, BD, BS
    )
    found = tl.zeros([BS, BD], tl.float32)
    base = of_keys + layer * keys_l + b * keys_b + h * keys_h
    # The gradients are allocated without being filled: zeros before and after the selected keys.
    _zero_rows(base, keys_n, 0, start, FORMAT, D, BD, BR)
    for first in range(0, num_keys, BR):
        key = _key_block(
            pointers, layer, b, g, first, layers, num_keys, start, key_b, key_g, key_n,
            FORMAT, ALIGNED, D, BD, BR,
        )  # fmt: skip
        visible = _visible_block(
            hidden, b, first, num_rows, num_keys, hidden_b, hidden_s, MASKED, BS, BR
        )
        expected = _target_block(target, b, first, num_rows, num_keys, BS, BR)
        scores = tl.dot(query, tl.trans(key), input_precision=EXACT) * scale
        slope = _cross_entropy_gradient_block(
            scores, visible, expected, log_sums, target_masses, slopes, program, num_rows, BS
        )
        found += tl.dot(slope.to(FORMAT), key, input_precision=EXACT)
        made = tl.dot(tl.trans(slope).to(FORMAT), query, input_precision=EXACT) * scale
        _store_keys(
            made, of_keys, keys_l, keys_b, keys_h, keys_n, start, layer, b, h, first, num_keys,
            False, FORMAT, D, BD, BR,
        )  # fmt: skip
    _zero_rows(base, keys_n, start + num_keys, all_keys, FORMAT, D, BD, BR)
    # place rows at their positions, summed per position, and zeros elsewhere
    s = tl.arange(0, BS)
    d = tl.arange(0, BD)
    at = tl.maximum(tl.load(rows + b * num_rows + s, mask=s < num_rows, other=0), 0)
    part = (found * scale).to(FORMAT)
    base = of_queries + layer * queries_l + b * queries_b + h * queries_h
    for first in range(0, all_queries, BR):
        n = first + tl.arange(0, BR)
        # A product with a one-hot matrix sums rows at equal positions in a fixed order.
        match = (n[:, None] == at[None, :]) & (s < num_rows)[None, :]
        placed = tl.dot(match.to(FORMAT), part, input_precision=EXACT)
        there = (n < all_queries)[:, None] & (d < D)[None, :]
        tl.store(base + n[:, None] * queries_n + d[None, :], placed.to(FORMAT), mask=there)
