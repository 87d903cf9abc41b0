"""The captured attention calls of a model; weights are computed when they are read."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from overt.attention import AttentionMap, Form, Kind, Layout, Span
from overt.capture import _torch_compat, attention_statistics
from overt.capture.attention_statistics import (
    AttentionStatistics,
    KeySet,
    TopKeys,
    span_masks,
)
from overt.capture.block_scores import (
    ALL,
    Index,
    block_log_softmax,
    block_scores,
    can_fuse,
)
from overt.capture.call import Call, QKCall
from overt.capture.lazy_map import BlockInputs, LazyAttentionMap
from overt.capture.stacked_calls import (
    is_mask_only,
    stack_layers,
    stackable_sources,
    taps_or_tensors,
    visible_in_any,
)

Accumulator = TypeVar("Accumulator")
Where = str | Int[Tensor, "b _"]  # the name of a span, or positions per sample, -1 for none
Spans = Sequence[str] | Mapping[str, KeySet]  # names of the layout, or groups of keys by name
Queries = Bool[Tensor, "b q"] | str  # which queries count: a mask, or the name of a span
Layouts = Layout | tuple[Layout, Layout]  # of both axes, or of queries and of keys


class AttentionTrace:
    """The attention calls of a model, in the order in which they were made.

    Only queries, keys and masks are stored. Weights are computed when they are read, with a
    gradient if the model ran with one; a block costs only its own size. `calls` grows while the
    model is being watched. If the layers are on several devices, stacked maps, blocks and
    statistics are on the device of the first one.

    Args:
        calls: The calls, or a function that returns the calls so far.
        layout: Meaning of the positions, for both axes or as a pair (queries, keys).
        notes: What could not be verified, and what is not available; shown by `repr`.

    Attributes:
        results: What `watch(each=...)` returned for each call.

    Example:
        >>> import overt, torch
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)
        >>> with overt.watch(layer) as trace:
        ...     _ = layer(torch.randn(1, 5, 8))
        >>> trace.names
        ('self_attn',)
        >>> trace.block(torch.tensor([[4]]), torch.tensor([[0, 1]])).weights.shape
        torch.Size([1, 1, 2, 1, 2])
    """

    def __init__(
        self,
        calls: Sequence[Call] | Callable[[], Sequence[Call]],
        layout: Layouts | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self._calls = calls
        self.layout = layout
        self.results: list[Any] = []
        self.notes = list(notes)

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
        """Show the number of calls and a line per kind, numbers in names replaced by `*`."""
        kinds = Counter(
            f"{re.sub(r'[0-9]+', '*', call.name) or 'the model'}: {call.summary()}"
            for call in self.calls
        )
        lines = [f"  {count} of {kind}" for kind, count in kinds.items()]
        head = f"AttentionTrace({len(self)} calls)"
        return "\n".join([head, *lines, *(f"  {note}" for note in self.notes)])

    @property
    def names(self) -> tuple[str, ...]:
        """The name of the module behind each call."""
        return tuple(call.name for call in self.calls)

    # --- selecting calls

    def where(self, keep: Callable[[Call], bool]) -> "AttentionTrace":
        """Return the calls for which `keep` is true, such as `lambda call: call.cross`."""
        return AttentionTrace([call for call in self.calls if keep(call)], self.layout, self.notes)

    def at(self, step: int) -> "AttentionTrace":
        """Return the calls of one forward pass of the model; -1 is the last."""
        steps = sorted({call.step for call in self.calls})
        if not -len(steps) <= step < len(steps):
            raise ValueError(f"step {step} is out of range: there are {len(steps)} forward passes")
        return self.where(lambda call: call.step == steps[step])

    def heads(self, indices: Sequence[int]) -> "AttentionTrace":
        """Return the calls restricted to some of their heads."""
        return AttentionTrace([call.heads(indices) for call in self.calls], self.layout, self.notes)

    def layer(self, layer: int | str) -> "AttentionTrace":
        """Return the trace of one layer, by index (-1 is the last) or by the name of its module."""
        return AttentionTrace([self.call(layer)], self.layout, self.notes)

    def with_layout(self, layout: Layouts) -> "AttentionTrace":
        """Return the same calls with a layout."""
        return AttentionTrace(self.calls, layout, self.notes)

    # --- reading weights

    def map(self, layer: int | str | None = None) -> AttentionMap:
        """Compute the whole map of one layer, or of all layers, stacked.

        Args:
            layer: Index of the call, or the name of its module; None for all.

        Raises:
            ValueError: If the layers have different sizes; read them one by one.
        """
        calls = self.calls if layer is None else (self.call(layer),)
        queries, keys = self.layouts(calls)
        kinds = {call.kind for call in calls}
        values = stack_layers(call.weights() for call in calls)
        return AttentionMap(
            values, keys, queries, visible_in_any(calls, ALL, ALL), _most_general(kinds)
        )

    def maps(self) -> Iterator[AttentionMap]:
        """Yield the whole map of each layer, so that only one of them is in memory.

        Each is on the device of its layer.
        """
        for place in range(len(self.calls)):
            yield self.map(place)

    def block(
        self, query: Where, key: Where, rows: Int[Tensor, "b s"] | None = None
    ) -> AttentionMap:
        """Compute the weights from `query` to `key` in all layers, as the model used them.

        The weights are normalized over all keys of the model, so rows sum to less than one.
        `.normalize()` renormalizes them over the block; for a loss, `log_block` does so at a
        fraction of the cost.

        Args:
            query: Name of a span (needs a layout), or positions (b, n), -1 for none.
            key: The same for the keys.
            rows: Some positions within `query`, (b, s); None for all.

        Returns:
            The map (b, l, h, s, r), as log-weights unless weights are signed.
        """
        self.check_stackable()
        at, to, queries, keys, mask = self._resolve_block(query, key, rows)
        if any(call.kind is Kind.SIGNED for call in self.calls):
            values = stack_layers(call.weights(at, to) for call in self.calls)
            values = values if mask is None else values * _expand_mask(mask)
            return AttentionMap(values, keys, queries, mask, Kind.SIGNED)
        values = stack_layers(call.log_weights(at, to) for call in self.calls)
        values = values if mask is None else values.masked_fill(~_expand_mask(mask), -torch.inf)
        kind = _most_general({Kind.SUBPROBABILITY} | {call.kind for call in self.calls})
        return AttentionMap(values, keys, queries, mask, kind, Form.LOG)

    def log_block(
        self, query: Where, key: Where, rows: Int[Tensor, "b s"] | None = None
    ) -> AttentionMap:
        """Compute the log-weights of a block, renormalized over its own keys, for use in a loss.

        The normalizer over all keys cancels, so nothing outside the block is computed: s rows and r
        keys cost s x r scores per head, independent of the sequence length. On a GPU with Triton,
        the block itself is computed on first access only: see `lazy_map`.

        Args:
            query: Name of a span (needs a layout), or positions (b, n), -1 for none.
            key: The same for the keys.
            rows: Some positions within `query`, (b, s); None for all.
        """
        self.check_stackable()
        at, to, queries, keys, mask = self._resolve_block(query, key, rows)
        sources = stackable_sources(self.calls)
        if sources is None:
            scores = stack_layers(call.scores(at, to) for call in self.calls)
            return AttentionMap.from_scores(scores, keys, queries, mask)
        first, (q_layers, k_layers) = sources[0], taps_or_tensors(sources)
        if not is_mask_only(first):
            scores = first.apply_bias_and_mask(
                block_scores(q_layers, k_layers, at, to, first.scale), at, to
            )
            scores = rearrange(scores, "l b h s r -> b l h s r")
            return AttentionMap.from_scores(scores, keys, queries, mask)
        if can_fuse(q_layers, k_layers, at, to):
            has_grad = torch.is_grad_enabled()
            inputs = BlockInputs(q_layers, k_layers, at, to, first.scale, mask, has_grad)
            return LazyAttentionMap.from_inputs(inputs, queries, keys)
        logs = block_log_softmax(q_layers, k_layers, at, to, first.scale, mask).transpose(0, 1)
        return AttentionMap(logs, keys, queries, mask, Kind.PROBABILITY, Form.LOG)

    def reduce(
        self, step: Callable[[Accumulator, AttentionMap], Accumulator], start: Accumulator
    ) -> Accumulator:
        """Fold the maps from the first layer to the last; only one of them is in memory.

        Maps of layers on other devices are moved to that of the first layer.
        `trace.reduce(lambda total, one: total + one.weights.mean(dim=2), 0)` sums the head means.
        """
        state, device = start, None
        for one in self.maps():
            device = device or one.values.device
            state = step(state, one if one.values.device == device else one.to(device))
        return state

    # --- statistics without the matrix

    def statistics(
        self,
        received: bool = False,
        entropy: bool = False,
        top_k: int | None = None,
        spans: Spans | None = None,
        queries: Queries | None = None,
        layer: int | str | None = None,
    ) -> AttentionStatistics:
        """Compute several statistics in one pass over blocks of rows, in memory linear in length.

        The results are measures, without gradient. For a loss, use `log_block`.

        Args:
            received: Whether to sum the weights on each key over the queries.
            entropy: Whether to compute the entropy of each query, in nats.
            top_k: Number of largest keys per query; None for none.
            spans: Names of spans of the keys, or masks or positions of keys by name.
            queries: The queries that count in `received` and in means: a mask (b, q), or the name
                of a span. By default all that exist, see `capture.statistics`.
            layer: Index of the call, or the name of its module; None for all.

        Returns:
            The requested statistics, with the axes b, l, h, ...

        Raises:
            ValueError: The layers have different sizes (use `layer_statistics`), nothing is
                requested, a name or size does not match, or `entropy` of signed weights.

        Example:
            >>> import overt, torch
            >>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)
            >>> with overt.watch(layer) as trace:
            ...     _ = layer(torch.randn(1, 5, 8))
            >>> found = trace.statistics(received=True, top_k=2, spans={"first": [0]})
            >>> found.received.shape, found.top.indices.shape
            (torch.Size([1, 1, 2, 5]), torch.Size([1, 1, 2, 5, 2]))
            >>> found.mean_span_shares["first"].shape
            torch.Size([1, 1, 2])
        """
        calls = self.calls if layer is None else (self.call(layer),)
        AttentionTrace(calls).check_stackable()
        groups = self._span_masks(spans, calls)
        counted = self._query_mask(queries, calls)
        found = [
            attention_statistics.statistics(call, received, entropy, top_k, groups, counted)
            for call in calls
        ]
        return AttentionStatistics.stack(found)

    def layer_statistics(
        self,
        received: bool = False,
        entropy: bool = False,
        top_k: int | None = None,
        spans: Spans | None = None,
        queries: Queries | None = None,
    ) -> Iterator[AttentionStatistics]:
        """Yield the statistics of each layer, which may have different sizes.

        Args:
            received: See `statistics`, as all other arguments.
            entropy: The same.
            top_k: The same.
            spans: The same.
            queries: The same.
        """
        for place in range(len(self.calls)):
            yield self.statistics(received, entropy, top_k, spans, queries, place)

    def received(
        self, mean: bool = False, queries: Queries | None = None, layer: int | str | None = None
    ) -> Float[Tensor, "b l h k"]:
        """Compute how much attention each key receives, without the matrix.

        Args:
            mean: Whether to divide the sum over the queries by their number.
            queries: The queries that count, see `statistics`.
            layer: Index of the call, or the name of its module; None for all.

        Example:
            >>> import overt, torch
            >>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)
            >>> with overt.watch(layer) as trace:
            ...     _ = layer(torch.randn(1, 5, 8))
            >>> trace.received().sum(dim=-1).round()  # each of the five queries has one to give
            tensor([[[5., 5.]]])
        """
        found = self.statistics(received=True, queries=queries, layer=layer)
        return found.mean_received if mean else attention_statistics.given(found.received)

    def entropy(self, layer: int | str | None = None) -> Float[Tensor, "b l h q"]:
        """Compute the entropy of each query in nats, without the matrix; 0 without visible keys.

        Args:
            layer: Index of the call, or the name of its module; None for all.
        """
        return attention_statistics.given(self.statistics(entropy=True, layer=layer).entropy)

    def top_k(self, k: int, layer: int | str | None = None) -> TopKeys:
        """Find the `k` largest keys of each query, without the matrix.

        Args:
            k: The number of keys.
            layer: Index of the call, or the name of its module; None for all.
        """
        return attention_statistics.given(self.statistics(top_k=k, layer=layer).top)

    def span_shares(
        self,
        spans: Spans | None = None,
        mean: bool = False,
        queries: Queries | None = None,
        layer: int | str | None = None,
    ) -> dict[str, Float[Tensor, "b l h *q"]]:
        """Compute the share of attention on each span of the keys, without the matrix.

        Args:
            spans: Names of spans, or masks or positions of keys by name; None for all spans.
            mean: Whether to average over the queries.
            queries: The queries that count in the mean, see `statistics`.
            layer: Index of the call, or the name of its module; None for all.

        Returns:
            The share of each query, or their mean, by the name of the span.
        """
        if spans is None:
            calls = self.calls if layer is None else (self.call(layer),)
            spans = [span.name for span in self._named_layouts("spans", calls)[1].spans]
        found = self.statistics(spans=spans, queries=queries, layer=layer)
        if mean:
            return found.mean_span_shares
        return dict(attention_statistics.given(found.span_shares))

    def sink_mass(
        self,
        keys: KeySet = (0,),
        mean: bool = False,
        queries: Queries | None = None,
        layer: int | str | None = None,
    ) -> Float[Tensor, "b l h *q"]:
        """Compute the share of attention on sink keys, such as the first token.

        Args:
            keys: The sinks: a mask of keys, (k,) or (b, k), or positions.
            mean: Whether to average over the queries.
            queries: The queries that count in the mean, see `statistics`.
            layer: Index of the call, or the name of its module; None for all.

        Returns:
            The share of each query, or their mean.
        """
        return self.span_shares({"sinks": keys}, mean, queries, layer)["sinks"]

    def _span_masks(
        self, spans: Spans | None, calls: Sequence[Call]
    ) -> Mapping[str, KeySet] | None:
        if spans is None or isinstance(spans, Mapping):
            return spans
        names = [spans] if isinstance(spans, str) else list(spans)
        keys = self._named_layouts(f"spans {names}", calls)[1]
        masks = span_masks(
            Layout(tuple(keys.find(name) for name in names), len(keys)), calls[0].shape[0]
        )
        return dict(masks)

    def _query_mask(
        self, queries: Queries | None, calls: Sequence[Call]
    ) -> Bool[Tensor, "b q"] | None:
        if not isinstance(queries, str):
            return queries
        layout = self._named_layouts(f"queries {queries!r}", calls)[0]
        only = Layout((layout.find(queries),), len(layout))
        return span_masks(only, calls[0].shape[0])[queries]

    def _named_layouts(self, what: str, calls: Sequence[Call]) -> tuple[Layout, Layout]:
        if self.layout is None:
            raise ValueError(
                f"{what} are names, which need a layout: use watch(model, layout=...), or give "
                "masks or positions"
            )
        return self.layouts(calls)

    # --- helpers

    def check_stackable(self) -> None:
        """Raise if there are no calls, or calls of different shapes, which cannot be stacked."""
        if not self.calls:
            raise ValueError("there are no calls to read; all of them were filtered out")
        shapes = {call.shape for call in self.calls}
        if len(shapes) > 1:
            named = {call.shape: call.name for call in reversed(self.calls)}
            listed = ", ".join(f"{named[shape]!r} {shape}" for shape in sorted(shapes))
            raise ValueError(
                f"calls with different shapes (b, h, q, k) cannot be stacked: {listed}; select "
                "some with trace.where(lambda call: call.cross), trace.at(step) or trace.map(layer)"
            )
        starts = Counter(
            (call.name, call.step, call.invocation)
            for call in self.calls
            if call.invocation is not None
        )
        for (name, _, _), times in starts.items():
            if times > 1:
                raise ValueError(
                    f"{name or 'the model'} computed attention {times} times in one forward pass, "
                    "such as one head or chunk after the other: these calls are not layers; read "
                    "them one by one with trace.maps(), or select some with trace.where(...)"
                )
        if len({call.cross for call in self.calls}) > 1:  # sequences may have equal lengths
            raise ValueError(
                "self-attention and cross-attention have different keys and cannot be stacked; "
                "select one with trace.where(lambda call: call.cross), or not call.cross"
            )

    def call(self, layer: int | str) -> Call:
        """Return one call, by its index or by the name of its module."""
        if isinstance(layer, str):
            found = [call for call in self.calls if call.name == layer]
            if not found:
                raise ValueError(f"no call of {layer!r} was captured, only of {list(self.names)}")
            if len(found) > 1:
                raise ValueError(
                    f"{layer!r} was called {len(found)} times; select a pass with trace.at(step)"
                )
            return found[0]
        if not -len(self.calls) <= layer < len(self.calls):
            raise ValueError(f"layer {layer} is out of range: there are {len(self.calls)} calls")
        return self.calls[layer]

    def layouts(self, calls: Sequence[Call]) -> tuple[Layout, Layout]:
        """Return the layouts of the queries and keys of these calls, unnamed by default."""
        AttentionTrace(calls).check_stackable()
        _, _, q, k = calls[0].shape
        if self.layout is None:
            return unnamed_layout(q), unnamed_layout(k)
        queries, keys = self.layout if isinstance(self.layout, tuple) else (self.layout,) * 2
        for what, layout, found in (("queries", queries, q), ("keys", keys, k)):
            if len(layout) != found:
                raise ValueError(
                    f"the layout of the {what} has {len(layout)} positions, but "
                    f"{calls[0].name or 'the model'} has {found}; select calls with where(...), or "
                    "use watch(layout=(queries, keys))"
                )
        return queries, keys

    def _resolve_block(
        self, query: Where, key: Where, rows: Tensor | None
    ) -> tuple[Index, Index, Layout, Layout, Bool[Tensor, "b #s r"] | None]:
        """Return positions of rows and keys, the layouts of the block, and its visibility mask."""
        if self.layout is None and (isinstance(query, str) or isinstance(key, str)):
            name = query if isinstance(query, str) else key
            raise ValueError(
                f"{name!r} is the name of a span, which needs a layout: use "
                "watch(model, layout=overt.layout_of(model, inputs)), or give positions (b, n)"
            )
        all_queries, all_keys = self.layouts(self.calls)
        at, queries = resolve_positions(all_queries, query)
        if rows is not None:
            if not isinstance(rows, Tensor) or rows.ndim != 2:
                found = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
                raise TypeError(f"rows must be a tensor (b, s) of positions, got {found}")
            at, queries = _select_rows(at, rows), unnamed_layout(rows.shape[1], "rows")
        to, keys = resolve_positions(all_keys, key)
        b = self.calls[0].shape[0]
        for index, layout in ((at, all_queries), (to, all_keys)):
            if isinstance(index, Tensor):
                _check_positions(index, b, len(layout))
        mask = visible_in_any(self.calls, at, to)
        for index, axis in ((at, -1), (to, -2)):
            if isinstance(index, Tensor):
                there = (index >= 0).unsqueeze(axis)
                mask = there if mask is None else mask & there.to(mask.device)
        if mask is not None:
            s = len(queries) if mask.shape[1] > 1 else 1
            # Positions may be on another device than the model.
            mask = mask.to(_device(self.calls[0])).expand(b, s, len(keys))
        return at, to, queries, keys, mask


def _device(call: Call) -> torch.device:
    source = call.source
    return (source.query if isinstance(source, QKCall) else source.used).device


def unnamed_layout(count: int, name: str = "positions") -> Layout:
    """Return a layout with one span of positions without meaning."""
    return Layout((Span(name, (count,), slice(0, count)),), count)


def resolve_positions(layout: Layout, where: Where) -> tuple[Index, Layout]:
    """Return the positions of a span, or the given positions, and their layout."""
    if isinstance(where, str):
        return layout.find(where).index, layout.only(where)
    if not isinstance(where, Tensor) or where.ndim != 2:
        found = f"of shape {tuple(where.shape)}" if isinstance(where, Tensor) else repr(where)
        raise TypeError(
            "expected the name of a span or positions (b, n), such as torch.tensor([[0]]) for one "
            f"sample, got {found}"
        )
    return where, unnamed_layout(where.shape[1])


def _check_positions(index: Tensor, b: int, count: int) -> None:
    if len(index) != b:
        raise ValueError(f"positions have {len(index)} samples, the batch has {b}")
    if index.is_floating_point() or index.dtype == torch.bool:
        raise TypeError(f"positions must be integers, got {index.dtype}")
    at_hand = index.device.type == "cpu" and not torch.compiler.is_compiling()
    if at_hand and bool((index >= count).any()):  # on a GPU this would synchronize
        raise ValueError(f"position {int(index.max())} is out of range for {count} positions")


def _select_rows(at: Index, rows: Int[Tensor, "b s"]) -> Int[Tensor, "b s"]:
    """Return positions of the whole axis, from positions counted within `at`."""
    count = len(range(at.stop)[at]) if isinstance(at, slice) else at.shape[1]
    if rows.device.type == "cpu" and not torch.compiler.is_compiling():
        if bool((rows >= count).any()):
            raise ValueError(f"row {int(rows.max())} is out of range for {count} query positions")
    else:  # reading the maximum would synchronize the GPU
        _torch_compat.assert_async(
            (rows < count).all(), f"rows out of range for {count} query positions"
        )
    if isinstance(at, slice):
        found = (at.start or 0) + rows * (at.step or 1)
    else:
        found = at.to(rows.device).gather(1, rows.clamp_min(0))
    return torch.where(rows < 0, -1, found)


def _expand_mask(mask: Bool[Tensor, "b q k"]) -> Bool[Tensor, "b 1 1 q k"]:
    return rearrange(mask, "b q k -> b 1 1 q k")


def _most_general(kinds: set[Kind]) -> Kind:
    """Return the most general of these kinds."""
    order = (Kind.PROBABILITY, Kind.SUBPROBABILITY, Kind.AMOUNT, Kind.SIGNED)
    return max(kinds, key=order.index)
