"""What to show of an adopted model: from all that was seen to one map a kind of input."""

import torch
from jaxtyping import Bool
from torch import Tensor

from overt.attention import POINT, AttentionMap, Kind, Layout, words
from overt.capture.call import Call, Written
from overt.capture.seen import Layouts, Seen

SERVANTS = ("class", "distillation", "registers", "special")  # tokens that stand for no input


def last(seen: Seen) -> tuple[AttentionMap, ...]:
    """What decides in the last layer: a map over each kind of input, all heads, one row.

    The row is that of the token called "class", or of the only query there is, or of the last
    token of a causal model; without any of these, the mean over all queries. Padding is no query.
    Each map is renormalised over its own keys: what goes to the class token itself, to registers
    and to separators is left out.
    """
    return _looks(Seen([_fitting(seen)[-1]], seen.layout))


def every(seen: Seen) -> tuple[AttentionMap, ...]:
    """The same for all layers that look at the same keys as the last one, stacked."""
    calls = _fitting(seen)
    return _looks(Seen([one for one in calls if one.shape == calls[-1].shape], seen.layout))


def _fitting(seen: Seen) -> list[Call]:
    """The calls whose positions the layout describes; one query alone needs no description."""
    queries, keys = pair_of(seen.layout)
    found = [
        call
        for call in seen.calls
        if (keys is None or call.shape[3] == len(keys))
        and (queries is None or call.shape[2] in (1, len(queries)))
    ]
    if not found:
        sizes = sorted({call.shape[2:] for call in seen.calls})
        wanted = (len(queries or ()), len(keys or ()))
        raise ValueError(
            f"the layout has {wanted[0]} queries and {wanted[1]} keys, and the attention of the "
            f"model (queries, keys) = {sizes}; give adopt() the layout of one of these, or reduce="
        )
    return found


def _looks(seen: Seen) -> tuple[AttentionMap, ...]:
    first = seen.calls[0]
    b, _, q, k = first.shape
    queries, keys = pair_of(seen.layout)
    if keys is None:
        keys = positions(k)
    if queries is None or q == 1:
        queries = POINT if q == 1 else positions(q)
    seen = seen.within((queries, keys))
    names = [span.name for span in keys.spans]
    names = [name for name in names if name not in SERVANTS] or names
    signed = any(call.kind is Kind.SIGNED for call in seen)
    block = seen.block if signed else seen.log_block
    if q == 1 or any(span.name == "class" for span in queries.spans):
        row = queries.spans[0].name if q == 1 else "class"
        return tuple(block(row, name) for name in names)
    everywhere = torch.arange(q, device=_device(first)).expand(b, q)
    there = _there(first)
    if first.causal:
        found = everywhere if there is None else torch.where(there, everywhere, 0)
        return tuple(block(found.amax(dim=1, keepdim=True), name) for name in names)
    return tuple(_mean(block(everywhere, name), there) for name in names)


def _mean(attention: AttentionMap, there: Bool[Tensor, "b q"] | None) -> AttentionMap:
    """The mean over the queries that are there and see some of the keys."""
    rows = attention.rows if there is None else attention.rows & there
    share = rows / rows.sum(dim=1, keepdim=True).clamp_min(1)
    weights = attention.weights * share[:, None, None, :, None].to(attention.values.dtype)
    return AttentionMap(
        weights.sum(dim=3, keepdim=True),
        attention.keys,
        POINT,
        (attention.visible & rows[..., None]).any(dim=1, keepdim=True),
        attention.kind,
    )


def _there(call: Call) -> Bool[Tensor, "b q"] | None:
    """Which queries are no padding: in self-attention, those at which somebody may look."""
    if call.cross or call.shape[2] != call.shape[3]:
        return None
    seen = call.visible()
    return None if seen is None else seen.any(dim=1)


def pair_of(layout: Layouts | None) -> tuple[Layout | None, Layout | None]:
    """The layouts of queries and of keys."""
    if layout is None:
        return None, None
    return layout if isinstance(layout, tuple) else (layout, layout)


def positions(count: int) -> Layout:
    """Positions of which nothing is known but their number."""
    return words(count, "positions")


def _device(call: Call) -> torch.device:
    source = call.source
    return source.used.device if isinstance(source, Written) else source.query.device
