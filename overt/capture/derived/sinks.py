"""Attention sinks: positions that nearly every query looks at, whatever they hold.

Xiao, Tian, Chen, Han and Lewis, "Efficient Streaming Language Models with Attention Sinks", ICLR
2024, https://arxiv.org/abs/2309.17453; for images Darcet, Oquab, Mairal and Bojanowski, "Vision
Transformers Need Registers", ICLR 2024, https://arxiv.org/abs/2309.16588. A first token, a
separator or a patch of plain sky takes the weight that a head has no use for. A map without it is
another map: ask for it by `without_sinks`, nothing here does so unasked.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from overt.attention import AttentionMap, Form, Kind, Layout
from overt.capture.call import Call
from overt.capture.derived.maps import portion_size, portions
from overt.capture.seen import Seen
from overt.geometry import TextGeometry


@dataclass(frozen=True)
class Sink:
    """A position that takes far more than its share in one layer of one sample.

    `share` is its weight and `fair` what an even spread would give it, means over queries and
    heads; `often` is the share of queries and heads in which it takes far more. `position` is -1
    for a learned sink, which takes weight and stands nowhere.
    """

    sample: int
    layer: str
    position: int
    name: str
    share: float
    fair: float
    often: float


def find_sinks(
    seen: Seen,
    times: float = 5.0,
    often: float = 0.5,
    tokens: Sequence[Sequence[str]] | None = None,
) -> list[Sink]:
    """The positions that take over `times` their share in over `often` of all queries and heads.

    The share of a key is one over the keys that a query may see. Queries that see no more than
    `times` keys cannot tell and are not counted, nor is padding. Sinks are listed by sample, by
    layer, and the largest first. Names are those of `tokens`, or of the layout, or a position.
    """
    if times <= 1 or not 0 <= often < 1:
        raise ValueError(f"times is above 1 and often from 0 to below 1, not {times} and {often}")
    seen.check_alike()
    _, keys = seen.layouts(seen.calls)
    found = []
    for place, call in enumerate(seen.calls):
        share, fair, taken = _columns(call, times)
        for sample, position in (taken > often).nonzero().tolist():
            at = position if position < call.shape[3] else -1
            name = _name(sample, at, keys, tokens)
            numbers = (float(part[sample, position]) for part in (share, fair, taken))
            found.append((sample, place, Sink(sample, call.name, at, name, *numbers)))
    return [one for *_, one in sorted(found, key=lambda it: (it[0], it[1], -it[2].share))]


def without_sinks(attention: AttentionMap, sinks: Sequence[Sink]) -> AttentionMap:
    """The map without the positions of these sinks, each row renormalised over what is left.

    A sink of any layer is left out of all of them: choose among `sinks` before, if need be. The
    mask of the result hides them, so that measures do not count them as keys.
    """
    if attention.kind is Kind.SIGNED:
        raise ValueError("signed weights do not renormalise; take their positive part first")
    b, _, _, _, k = attention.values.shape
    kept = torch.ones(b, 1, k, dtype=torch.bool)
    for sink in sinks:
        if sink.sample >= b or sink.position >= k:
            raise ValueError(f"{sink} is not in a map of {b} samples and {k} keys")
        if sink.position >= 0:
            kept[sink.sample, 0, sink.position] = False
    kept = kept.to(attention.values.device)
    mask = kept if attention.mask is None else attention.mask & kept
    nothing = -torch.inf if attention.form is Form.LOG else 0.0
    values = attention.values.masked_fill(~kept[:, None, None], nothing)
    return replace(attention, values=values, mask=mask).normalize()


def _columns(call: Call, times: float) -> tuple[Float[Tensor, "b m"], ...]:
    """Of each column its mean weight, its mean even share, and how often it takes far more.

    With a learned sink there is one column more, of what it took.
    """
    b, _, q, k = call.shape
    shown = call.visible()
    shown = torch.ones(b, 1, k, dtype=torch.bool) if shown is None else shown.cpu()
    counted = _counted(shown, q, times)
    total = counted.sum(dim=-1, keepdim=True).clamp_min(1)
    learned = call.kind is Kind.SUBPROBABILITY
    share, fair, taken = torch.zeros(3, b, k + learned, dtype=torch.float64).unbind()
    with torch.no_grad():
        for rows in portions(q, portion_size(call)):
            weights = call.weights(rows).cpu()
            part = shown.expand(b, q, k)[:, rows]
            even = part / part.sum(dim=-1, keepdim=True).clamp_min(1)
            if learned:
                weights = torch.cat([weights, 1 - weights.sum(dim=-1, keepdim=True)], dim=-1)
                even = torch.cat([even, even.amax(dim=-1, keepdim=True)], dim=-1)
            here = counted[:, rows].double()
            more = (weights > times * even[:, None]).double().mean(dim=1)
            share += torch.einsum("bqk,bq->bk", weights.double().mean(dim=1), here)
            fair += torch.einsum("bqk,bq->bk", even.double(), here)
            taken += torch.einsum("bqk,bq->bk", more, here)
    return share / total, fair / total, taken / total


def _counted(shown: Bool[Tensor, "b #q k"], q: int, times: float) -> Bool[Tensor, "b q"]:
    """The queries that can tell: they see enough keys, and are no padding themselves."""
    b, _, k = shown.shape
    enough = (shown.sum(dim=-1) > times).expand(b, q)
    if not bool(enough.any()):
        raise ValueError(
            f"no query sees more than {times:g} keys, so none can give one {times:g} times its "
            "share; lower `times`"
        )
    return enough & shown.any(dim=1) if q == k else enough


def _name(sample: int, position: int, keys: Layout, tokens: Sequence[Sequence[str]] | None) -> str:
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
