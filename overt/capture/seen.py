"""What was seen of a model's attention: any part of it, computed when it is asked for."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from einops import rearrange
from jaxtyping import Bool, Int
from torch import Tensor

from overt.attention import AttentionMap, Form, Kind, Layout, Span
from overt.capture.call import Call, Projected
from overt.capture.products import ALL, Index, Tap, fused, log_shares, products
from overt.capture.unread import Places, Unread

State = TypeVar("State")
Where = str | Int[Tensor, "b _"]  # the name of a span, or positions, -1 where a sample has none
Layouts = Layout | tuple[Layout, Layout]  # of both axes, or of queries and of keys


class Seen:
    """The attention calls of a model, in the order in which they were made.

    Only queries, keys and masks are kept. A block costs its own size, a map is made when asked for,
    and everything has a gradient when the model had one. While the model is still watched,
    `calls` grows. `kept` is what `watch(each=)` has made of the calls that it took.
    """

    def __init__(
        self,
        calls: Sequence[Call] | Callable[[], Sequence[Call]],
        layout: Layouts | None = None,
    ) -> None:
        self._calls = calls
        self.layout = layout
        self.kept: list[Any] = []

    @property
    def calls(self) -> tuple[Call, ...]:
        """The calls so far."""
        return tuple(self._calls() if callable(self._calls) else self._calls)

    def close(self) -> None:
        """Fix the calls as they are now."""
        self._calls = self.calls

    def __len__(self) -> int:
        return len(self.calls)

    def __iter__(self) -> Iterator[Call]:
        return iter(self.calls)

    def __repr__(self) -> str:
        """How many calls there are, and a line for each kind of them, numbers in names left out."""
        kinds = Counter(
            f"{re.sub(r'[0-9]+', '*', call.name) or 'the model'}: {call.told()}"
            for call in self.calls
        )
        lines = [f"  {count} of {kind}" for kind, count in kinds.items()]
        return "\n".join([f"Seen({len(self)} calls)", *lines])

    @property
    def names(self) -> tuple[str, ...]:
        """The name of the module behind each call."""
        return tuple(call.name for call in self.calls)

    # --- choosing calls

    def where(self, keep: Callable[[Call], bool]) -> "Seen":
        """The calls that `keep` says yes to, such as `lambda call: call.cross`."""
        return Seen([call for call in self.calls if keep(call)], self.layout)

    def at(self, step: int) -> "Seen":
        """The calls of one forward pass of the model; -1 is the last."""
        steps = sorted({call.step for call in self.calls})
        if not -len(steps) <= step < len(steps):
            raise ValueError(f"step {step} was not seen; there are {len(steps)}")
        return self.where(lambda call: call.step == steps[step])

    def heads(self, chosen: Sequence[int]) -> "Seen":
        """The same calls for some of their heads."""
        return Seen([call.heads(chosen) for call in self.calls], self.layout)

    def within(self, layout: Layouts) -> "Seen":
        """The same calls with the meaning of their positions."""
        return Seen(self.calls, layout)

    # --- reading weights

    def map(self, layer: int | str | None = None) -> AttentionMap:
        """Whole maps: of one layer, by its place or its module's name, or of all, stacked.

        Layers of different sizes do not stack; ask for them one by one.
        """
        calls = self.calls if layer is None else (self.call(layer),)
        queries, keys = self.layouts(calls)
        kinds = {call.kind for call in calls}
        values = torch.stack([call.weights() for call in calls], dim=1)
        return AttentionMap(values, keys, queries, visible_in(calls, ALL, ALL), _widest(kinds))

    def maps(self) -> Iterator[AttentionMap]:
        """The whole map of each layer, one at a time, so that they never exist together."""
        for place in range(len(self.calls)):
            yield self.map(place)

    def block(
        self, query: Where, key: Where, rows: Int[Tensor, "b s"] | None = None
    ) -> AttentionMap:
        """The exact weights from `query` to `key` in every layer and head, as the model used them.

        `query` and `key` are names of spans (which need a layout) or positions a sample; `rows` are
        some of the query's positions, counted within it. Keys outside the block keep their share:
        rows sum to less than one. `.normalize()` divides by what is inside; for a loss, `log_block`
        does that at a fraction of the cost.
        """
        self.check_alike()
        at, to, queries, keys, mask = self._places(query, key, rows)
        if any(call.kind is Kind.SIGNED for call in self.calls):
            values = torch.stack([call.weights(at, to) for call in self.calls], dim=1)
            values = values if mask is None else values * _over(mask)
            return AttentionMap(values, keys, queries, mask, Kind.SIGNED)
        values = torch.stack([call.log_weights(at, to) for call in self.calls], dim=1)
        values = values if mask is None else values.masked_fill(~_over(mask), -torch.inf)
        kind = _widest({Kind.SUBPROBABILITY} | {call.kind for call in self.calls})
        return AttentionMap(values, keys, queries, mask, kind, Form.LOG)

    def log_block(
        self, query: Where, key: Where, rows: Int[Tensor, "b s"] | None = None
    ) -> AttentionMap:
        """The block renormalised over its own keys, as logarithms: what a loss should take.

        The division over all keys cancels, so nothing outside the block is computed: s rows and r
        keys cost s x r scores a head, whatever the length of the sequence. Where a card has kernels
        of ours, even those are computed once they are read: see `unread`.
        """
        self.check_alike()
        at, to, queries, keys, mask = self._places(query, key, rows)
        sources = _alike(self.calls)
        if sources is None:
            scores = torch.stack([call.scores(at, to) for call in self.calls], dim=1)
            return AttentionMap.from_scores(scores, keys, queries, mask)
        first, (given, taken) = sources[0], _tapped(sources)
        if not _in_the_mask(first):
            scores = first.shaped(products(given, taken, at, to, first.scale), at, to)
            scores = rearrange(scores, "l b h s r -> b l h s r")
            return AttentionMap.from_scores(scores, keys, queries, mask)
        if fused(given, taken, at, to):
            learns = torch.is_grad_enabled()
            places = Places(given, taken, at, to, first.scale, mask, learns)
            return Unread.of(places, queries, keys)
        logs = log_shares(given, taken, at, to, first.scale, mask).transpose(0, 1)
        return AttentionMap(logs, keys, queries, mask, Kind.PROBABILITY, Form.LOG)

    def reduce(self, step: Callable[[State, AttentionMap], State], start: State) -> State:
        """Fold the maps layer by layer, the first layer first; only one of them exists at a time.

        `seen.reduce(lambda total, one: total + one.weights.mean(dim=2), 0)` sums the mean heads.
        """
        state = start
        for one in self.maps():
            state = step(state, one)
        return state

    # --- helpers

    def check_alike(self) -> None:
        """Raise when there is no call, or calls of different sizes or kinds, which do not stack."""
        if not self.calls:
            raise ValueError("no call is left to read; were all of them filtered out?")
        shapes = {call.shape for call in self.calls}
        if len(shapes) > 1:
            named = {call.shape: call.name for call in reversed(self.calls)}
            listed = ", ".join(f"{named[shape]!r} {shape}" for shape in sorted(shapes))
            raise ValueError(
                f"calls of different sizes (b, h, q, k) do not stack: {listed}; choose some with "
                "seen.where(lambda call: call.cross), seen.at(step) or seen.map(layer)"
            )
        if len({call.cross for call in self.calls}) > 1:  # of one size where sequences are as long
            raise ValueError(
                "calls of self-attention and of cross-attention look at different keys and do not "
                "stack; choose some with seen.where(lambda call: call.cross), or not call.cross"
            )

    def call(self, layer: int | str) -> Call:
        """One call, by its place or by the name of its module."""
        if isinstance(layer, str):
            found = [call for call in self.calls if call.name == layer]
            if not found:
                raise ValueError(f"no call of {layer!r} was seen; there are {list(self.names)}")
            if len(found) > 1:
                raise ValueError(f"{layer!r} was called {len(found)} times; choose with at(step)")
            return found[0]
        if not -len(self.calls) <= layer < len(self.calls):
            raise ValueError(f"layer {layer} was not seen; there are {len(self.calls)} calls")
        return self.calls[layer]

    def layouts(self, calls: Sequence[Call]) -> tuple[Layout, Layout]:
        """What the queries and the keys of these calls are; numbers when no layout says it."""
        Seen(calls).check_alike()
        _, _, q, k = calls[0].shape
        if self.layout is None:
            return numbered(q), numbered(k)
        queries, keys = self.layout if isinstance(self.layout, tuple) else (self.layout,) * 2
        for what, layout, found in (("queries", queries, q), ("keys", keys, k)):
            if len(layout) != found:
                raise ValueError(
                    f"the layout of the {what} has {len(layout)} positions, but "
                    f"{calls[0].name or 'the model'} has {found}; choose calls with where(...), or "
                    "give watch(layout=(queries, keys))"
                )
        return queries, keys

    def _places(
        self, query: Where, key: Where, rows: Tensor | None
    ) -> tuple[Index, Index, Layout, Layout, Bool[Tensor, "b #s r"] | None]:
        """Rows and keys as positions, the layouts of the block, and what each row may see of it."""
        if self.layout is None and (isinstance(query, str) or isinstance(key, str)):
            name = query if isinstance(query, str) else key
            raise ValueError(
                f"{name!r} is the name of a span, and no layout says where it is; give "
                "watch(model, layout=...) or positions a sample"
            )
        all_queries, all_keys = self.layouts(self.calls)
        at, queries = resolve(all_queries, query)
        if rows is not None:
            if not isinstance(rows, Tensor) or rows.ndim != 2:
                found = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
                raise TypeError(f"rows are a row of numbers a sample, (b, s), and not {found}")
            at, queries = _picked(at, rows), numbered(rows.shape[1], "rows")
        to, keys = resolve(all_keys, key)
        b = self.calls[0].shape[0]
        for index, layout in ((at, all_queries), (to, all_keys)):
            if isinstance(index, Tensor):
                _check_positions(index, b, len(layout))
        mask = visible_in(self.calls, at, to)
        for index, axis in ((at, -1), (to, -2)):
            if isinstance(index, Tensor):
                there = (index >= 0).unsqueeze(axis)
                mask = there if mask is None else mask & there.to(mask.device)
        if mask is not None:
            s = len(queries) if mask.shape[1] > 1 else 1
            mask = mask.expand(b, s, len(keys))
        return at, to, queries, keys, mask


def numbered(count: int, name: str = "positions") -> Layout:
    """An axis of positions of which nothing is known."""
    return Layout((Span(name, (count,), slice(0, count)),), count)


def resolve(layout: Layout, where: Where) -> tuple[Index, Layout]:
    """Where a span or some positions stand, and the layout of nothing but them."""
    if isinstance(where, str):
        return layout.find(where).index, layout.alone(where)
    if not isinstance(where, Tensor) or where.ndim != 2:
        found = f"of shape {tuple(where.shape)}" if isinstance(where, Tensor) else repr(where)
        raise TypeError(
            "positions are the name of a span or a row of numbers a sample, such as "
            f"torch.tensor([[0]]) for one sample, not {found}"
        )
    return where, numbered(where.shape[1])


def _check_positions(index: Tensor, b: int, count: int) -> None:
    if len(index) != b:
        raise ValueError(f"positions of {len(index)} samples for a batch of {b}")
    if index.is_floating_point() or index.dtype == torch.bool:
        raise TypeError(f"positions are whole numbers, not {index.dtype}")
    at_hand = index.device.type == "cpu" and not torch.compiler.is_compiling()
    if at_hand and bool((index >= count).any()):  # to ask a card is to wait for all it has to do
        raise ValueError(f"position {int(index.max())} is beyond the {count} of its axis")


def _picked(at: Index, rows: Int[Tensor, "b s"]) -> Int[Tensor, "b s"]:
    """Positions of the whole axis, from positions counted within `at`."""
    count = len(range(at.stop)[at]) if isinstance(at, slice) else at.shape[1]
    if rows.device.type == "cpu" and not torch.compiler.is_compiling():
        if bool((rows >= count).any()):
            raise ValueError(f"row {int(rows.max())} is beyond the {count} positions of the query")
    else:  # to ask a card is to wait for all that it has to do
        torch._assert_async((rows < count).all(), f"a row is beyond the {count} of the query")
    if isinstance(at, slice):
        found = (at.start or 0) + rows * (at.step or 1)
    else:
        found = at.to(rows.device).gather(1, rows.clamp_min(0))
    return torch.where(rows < 0, -1, found)


def visible_in(calls: Sequence[Call], rows: Index, keys: Index) -> Bool[Tensor, "b #s r"] | None:
    """What any layer may see: layers that differ (sliding windows and full) are joined."""
    found: Tensor | None = None
    before: tuple[object, ...] | None = None
    for call in calls:
        source = call.source
        now = (
            (source.bias, source.allowed, source.causal, source.allow)
            if isinstance(source, Projected)
            else None
        )
        if now is not None and before is not None and _identical(now, before):
            continue  # one mask that every layer was given
        before = now
        seen = call.visible(rows, keys)
        if seen is None:
            return None
        found = seen if found is None else found | seen
    return found


def _identical(one: tuple[object, ...], other: tuple[object, ...]) -> bool:
    return all(mine is theirs for mine, theirs in zip(one, other, strict=True))


def _alike(calls: Sequence[Call]) -> list[Projected] | None:
    """What the calls are the products of, if one function can multiply them all; else None."""
    sources = [call.source for call in calls if isinstance(call.source, Projected)]
    if len(sources) < len(calls):
        return None
    first = sources[0]
    alike = all(
        one.plain
        and one.key.shape == first.key.shape
        and one.scale == first.scale
        and one.bias is first.bias
        and one.allowed is first.allowed
        and one.causal == first.causal
        for one in sources
    )
    return sources if alike else None


def _tapped(sources: Sequence[Projected]) -> tuple[list[Tensor | Tap], list[Tensor | Tap]]:
    """Queries and keys of all layers, or the taps where their gradients may be brought."""
    pairs = [(one.query, one.key) if one.taps is None else one.taps for one in sources]
    return [query for query, _ in pairs], [key for _, key in pairs]


def _in_the_mask(source: Projected) -> bool:
    """Whether the mask of a block says all that shapes the scores: no bias, and heads see alike."""
    allowed = source.allowed
    alike = allowed is None or allowed.ndim < 3 or allowed.shape[-3] == 1
    return source.bias is None and alike


def _over(mask: Bool[Tensor, "b q k"]) -> Bool[Tensor, "b 1 1 q k"]:
    return rearrange(mask, "b q k -> b 1 1 q k")


def _widest(kinds: set[Kind]) -> Kind:
    """The kind that promises no more than any of these."""
    order = (Kind.PROBABILITY, Kind.SUBPROBABILITY, Kind.AMOUNT, Kind.SIGNED)
    return max(kinds, key=order.index)
