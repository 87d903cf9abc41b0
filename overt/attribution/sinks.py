"""Attention sinks: positions that nearly every query attends to, regardless of their content.

Xiao, Tian, Chen, Han and Lewis, "Efficient Streaming Language Models with Attention Sinks", ICLR
2024, https://arxiv.org/abs/2309.17453; for images Darcet, Oquab, Mairal and Bojanowski, "Vision
Transformers Need Registers", ICLR 2024, https://arxiv.org/abs/2309.16588. A first token, a
separator or a uniform patch takes the weight that a head does not need. No function removes sinks
implicitly: use `remove_sinks`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from overt.attention import AttentionMap, Form, Kind, Layout
from overt.attribution.raw_attention import default_chunk, row_chunks
from overt.capture.call import Call
from overt.capture.trace import AttentionTrace
from overt.geometry import TextGeometry


@dataclass(frozen=True)
class Sink:
    """A position with far more than its uniform share of attention in one layer of one sample.

    Args:
        sample: The index of the sample.
        layer: The name of the layer.
        position: The key position; -1 for a learned sink, which has no position.
        name: The token, span or position.
        share: The mean weight over queries and heads.
        uniform_share: The mean weight that uniform attention would give it.
        frequency: The share of queries and heads in which it exceeds the ratio.

    Example:
        >>> sink = Sink(0, "layers.3", 0, "[CLS]", share=0.6, uniform_share=0.05, frequency=0.9)
        >>> round(sink.share / sink.uniform_share)
        12
    """

    sample: int
    layer: str
    position: int
    name: str
    share: float
    uniform_share: float
    frequency: float


def find_sinks(
    trace: AttentionTrace,
    ratio: float = 5.0,
    frequency: float = 0.5,
    tokens: Sequence[Sequence[str]] | None = None,
) -> list[Sink]:
    """Find the positions that exceed `ratio` times the uniform share in most queries and heads.

    The uniform share is one over the number of visible keys. Padding is not counted, nor are
    queries with at most `ratio` visible keys, which cannot exceed the ratio.

    Args:
        trace: A trace of `overt.watch`.
        ratio: How many times the uniform share a sink must exceed.
        frequency: The share of queries and heads in which it has to do so.
        tokens: The tokens of each sample, for names; else the layout or the position is used.

    Returns:
        The sinks by sample, by layer, largest first.

    Raises:
        ValueError: An argument is out of range, or no query has enough visible keys.

    Example:
        >>> from overt import watch
        >>> generator = torch.manual_seed(0)
        >>> layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        >>> x = torch.randn(1, 20, 8)
        >>> with watch(layer) as trace:
        ...     out = layer(x, x, x)
        >>> find_sinks(trace)  # random weights have no sink
        []
    """
    if ratio <= 1 or not 0 <= frequency < 1:
        raise ValueError(
            f"ratio must be above 1 and frequency in [0, 1), got {ratio} and {frequency}"
        )
    trace.check_stackable()
    _, keys = trace.layouts(trace.calls)
    found = []
    for place, call in enumerate(trace.calls):
        share, uniform, taken = _column_statistics(call, ratio)
        for sample, position in (taken > frequency).nonzero().tolist():
            at = position if position < call.shape[3] else -1
            name = _sink_name(sample, at, keys, tokens)
            numbers = (float(part[sample, position]) for part in (share, uniform, taken))
            found.append((sample, place, Sink(sample, call.name, at, name, *numbers)))
    return [one for *_, one in sorted(found, key=lambda it: (it[0], it[1], -it[2].share))]


def remove_sinks(attention: AttentionMap, sinks: Sequence[Sink]) -> AttentionMap:
    """Mask sinks and renormalise each row over the remaining keys.

    A sink of any layer is removed from all layers: filter `sinks` first if needed. Metrics do not
    count the masked positions as keys.

    Args:
        attention: The map.
        sinks: The sinks to remove.

    Returns:
        A map of probabilities.

    Raises:
        ValueError: The weights are signed, or a sink is not in the map.

    Example:
        >>> from overt import words
        >>> attention = AttentionMap.from_cells(torch.tensor([[0.8, 0.1, 0.1]]), words(3))
        >>> sink = Sink(0, "layer", 0, "[CLS]", share=0.8, uniform_share=1 / 3, frequency=1.0)
        >>> remove_sinks(attention, [sink]).weights.flatten().tolist()
        [0.0, 0.5, 0.5]
    """
    if attention.kind is Kind.SIGNED:
        raise ValueError("signed weights cannot be normalised; take their positive part first")
    b, _, _, _, k = attention.values.shape
    kept = torch.ones(b, 1, k, dtype=torch.bool)
    for sink in sinks:
        if sink.sample >= b or sink.position >= k:
            raise ValueError(f"{sink} is not in a map of {b} samples and {k} keys")
        # A learned sink has no key to remove: normalizing the rows removes it.
        if sink.position >= 0:
            kept[sink.sample, 0, sink.position] = False
    kept = kept.to(attention.values.device)
    mask = kept if attention.mask is None else attention.mask & kept
    # Zero weight in the form of the map.
    fill = -torch.inf if attention.form is Form.LOG else 0.0
    values = attention.values.masked_fill(~kept[:, None, None], fill)
    return replace(attention, values=values, mask=mask).normalize()


def _column_statistics(call: Call, ratio: float) -> tuple[Float[Tensor, "b m"], ...]:
    """Return the mean weight, the mean uniform share and the frequency of each column.

    A learned sink adds a last column with its weight.
    """
    b, _, q, k = call.shape
    shown = call.visible()
    # Statistics on the CPU: weights come in chunks of rows and are summed in float64.
    shown = torch.ones(b, 1, k, dtype=torch.bool) if shown is None else shown.cpu()
    counted = _counted_queries(shown, q, ratio)
    total = counted.sum(dim=-1, keepdim=True).clamp_min(1)
    learned = call.kind is Kind.SUBPROBABILITY
    share, uniform, taken = torch.zeros(3, b, k + learned, dtype=torch.float64).unbind()
    with torch.no_grad():
        for rows in row_chunks(q, default_chunk(call)):
            weights = call.weights(rows).cpu()
            part = shown.expand(b, q, k)[:, rows]
            even = part / part.sum(dim=-1, keepdim=True).clamp_min(1)
            # The missing weight of each row is on the sink, whose uniform share is that of a
            # visible key.
            if learned:
                weights = torch.cat([weights, 1 - weights.sum(dim=-1, keepdim=True)], dim=-1)
                even = torch.cat([even, even.amax(dim=-1, keepdim=True)], dim=-1)
            here = counted[:, rows].double()
            more = (weights > ratio * even[:, None]).double().mean(dim=1)
            # Sums over the counted queries; the means over heads come first.
            share += torch.einsum("bqk,bq->bk", weights.double().mean(dim=1), here)
            uniform += torch.einsum("bqk,bq->bk", even.double(), here)
            taken += torch.einsum("bqk,bq->bk", more, here)
    return share / total, uniform / total, taken / total


def _counted_queries(shown: Bool[Tensor, "b #q k"], q: int, ratio: float) -> Bool[Tensor, "b q"]:
    """Return the queries with enough visible keys that are not padding."""
    b, _, k = shown.shape
    enough = (shown.sum(dim=-1) > ratio).expand(b, q)
    if not bool(enough.any()):
        raise ValueError(
            f"no query has more than {ratio:g} visible keys, so no key can exceed {ratio:g} times "
            "its uniform share; lower `ratio`"
        )
    return enough & shown.any(dim=1) if q == k else enough


def _sink_name(
    sample: int, position: int, keys: Layout, tokens: Sequence[Sequence[str]] | None
) -> str:
    if position < 0:
        return "learned sink"
    if tokens is not None:
        return tokens[sample][position]
    for span in keys.spans:
        index = span.index
        places = (
            list(range(len(keys)))[index] if isinstance(index, slice) else index[sample].tolist()
        )
        if span.name == "positions" or position not in places:
            continue
        at = places.index(position)
        if isinstance(span.geometry, TextGeometry):
            start, end = span.geometry.spans[sample, at].tolist()
            return f"{span.name} {at} {span.geometry.texts[sample][max(start, 0) : max(end, 0)]!r}"
        return span.name if len(span) == 1 else f"{span.name} {at}"
    return "first position" if position == 0 else f"position {position}"
