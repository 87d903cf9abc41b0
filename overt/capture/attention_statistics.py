"""Statistics of attention without the N x N matrix: which keys receive it, entropy, largest keys.

Weights are computed in blocks of rows of bounded size, reduced, and dropped. Memory is linear in
the sequence length, and all statistics of a call share one pass over its rows. The functions take
one `Call`, so they also work while the model runs: `watch(model, each=capture.received)` stores
neither queries nor keys. On a GPU with Triton, kernels compute them (`kernels.statistics_launch`).

Axis letters:  b batch  l layer  h head  g group of heads that share keys  q query  k key  d feature
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from overt.attention import Kind, Layout
from overt.capture import _torch_compat, block_scores
from overt.capture.call import (
    Call,
    MaskMod,
    MaterializedCall,
    QKCall,
    ScoreMod,
    select_block,
)
from overt.capture.kernels import statistics_launch
from overt.capture.kernels.statistics_launch import RowSums
from overt.capture.stacked_calls import stack_layers
from overt.capture.state import STATE

# A mask of keys, (k,) for all samples or (b, k) per sample; or positions for all samples.
KeySet = Bool[Tensor, "*b k"] | Sequence[int]
Source = QKCall | MaterializedCall
Result = TypeVar("Result")

MIN_ROWS = 64  # rows of a block before it is split by samples and heads: few rows multiply slowly


@dataclass(frozen=True, eq=False)
class TopKeys:
    """The largest weights of each query, in descending order.

    Args:
        weights: The weights; 0 where a query has fewer keys with a weight.
        indices: The positions of the keys; -1 where a query has fewer keys with a weight.

    Example:
        >>> import overt
        >>> layer, x = torch.nn.MultiheadAttention(8, 2, batch_first=True), torch.rand(1, 5, 8)
        >>> with overt.watch(layer) as trace:
        ...     _ = layer(x, x, x)
        >>> trace.top_k(3).indices.shape  # batch, layers, heads, queries, keys
        torch.Size([1, 1, 2, 5, 3])
    """

    weights: Float[Tensor, "b *l h q n"]
    indices: Int[Tensor, "b *l h q n"]


@dataclass(frozen=True, eq=False)
class AttentionStatistics:
    """Statistics of one call, or of several layers on the axis `l`; None if not requested.

    Args:
        counted: The queries in `received` and in means: see `statistics`.
        received: Sum of the weights on each key over the counted queries.
        entropy: Entropy of each query over its keys, in nats.
        top: The largest keys of each query.
        span_shares: Share of the attention of each query on each named group of keys.

    Example:
        >>> import overt
        >>> layer, x = torch.nn.MultiheadAttention(8, 2, batch_first=True), torch.rand(1, 5, 8)
        >>> with overt.watch(layer) as trace:
        ...     _ = layer(x, x, x)
        >>> found = trace.statistics(received=True, entropy=True)
        >>> found.received.shape, found.entropy.shape, found.top
        (torch.Size([1, 1, 2, 5]), torch.Size([1, 1, 2, 5]), None)
    """

    counted: Bool[Tensor, "b *l q"]
    received: Float[Tensor, "b *l h k"] | None = None
    entropy: Float[Tensor, "b *l h q"] | None = None
    top: TopKeys | None = None
    span_shares: Mapping[str, Float[Tensor, "b *l h q"]] | None = None

    @property
    def mean_received(self) -> Float[Tensor, "b *l h k"]:
        """The mean weight on each key over the counted queries; 0 if there are none.

        Raises:
            ValueError: `received` was not requested.
        """
        if self.received is None:
            raise ValueError("mean_received needs statistics(received=True)")
        return self.received / self._count

    @property
    def mean_span_shares(self) -> dict[str, Float[Tensor, "b *l h"]]:
        """The mean share of each span over the counted queries; 0 if there are none.

        Raises:
            ValueError: `span_shares` was not requested.
        """
        if self.span_shares is None:
            raise ValueError("mean_span_shares needs statistics(spans=...)")
        kept, count = self.counted.unsqueeze(-2), self._count[..., 0]
        return {
            name: torch.where(kept, shares, 0).sum(dim=-1) / count
            for name, shares in self.span_shares.items()
        }

    @property
    def _count(self) -> Int[Tensor, "b *l 1 1"]:
        return self.counted.sum(dim=-1).clamp_min(1)[..., None, None]

    @staticmethod
    def stack(layers: Sequence["AttentionStatistics"]) -> "AttentionStatistics":
        """Stack the statistics of calls with equal shapes on an axis of layers.

        Args:
            layers: The statistics of each call, all with the same statistics requested.

        Returns:
            The statistics with the axes b, l, h, ...
        """
        first = layers[0]
        tops = [one.top for one in layers if one.top is not None]
        shares = [one.span_shares for one in layers if one.span_shares is not None]
        return AttentionStatistics(
            stack_layers(one.counted for one in layers),
            _stack_given([one.received for one in layers]),
            _stack_given([one.entropy for one in layers]),
            None
            if first.top is None
            else TopKeys(
                stack_layers(one.weights for one in tops),
                stack_layers(one.indices for one in tops),
            ),
            None
            if first.span_shares is None
            else {name: stack_layers(one[name] for one in shares) for name in first.span_shares},
        )


def _stack_given(found: Sequence[Tensor | None]) -> Tensor | None:
    given = [one for one in found if one is not None]
    return stack_layers(given) if given else None


@contextmanager
def _outside_capture(device: torch.device) -> Iterator[None]:
    """Disable gradients and autocast, and hide operations from the capture modes.

    Inside `watch(each=...)` these would take exponentials that are multiplied for attention.
    """
    with ExitStack() as undo:
        undo.enter_context(torch.no_grad())
        undo.enter_context(block_scores.no_autocast(device))
        if STATE.sessions:
            undo.enter_context(_torch_compat.without_torch_function())
        if STATE.dispatch_mode is not None:
            undo.enter_context(_torch_compat.without_dispatch_modes())
        yield


# --- statistics of one call


def statistics(
    call: Call,
    received: bool = False,
    entropy: bool = False,
    top_k: int | None = None,
    spans: Layout | Mapping[str, KeySet] | None = None,
    queries: Bool[Tensor, "b q"] | None = None,
) -> AttentionStatistics:
    """Compute several statistics of a call in one pass over its rows, without gradient.

    Computed in at least float32. Queries without visible keys have entropy 0 and give nothing to
    any key. Probability that learned sinks drop counts for nothing: entropy and shares are of the
    rest, which is normalized, as in `overt.metrics`.

    Args:
        call: A call of a trace, or the argument of `watch(each=...)`.
        received: Whether to sum the weights on each key.
        entropy: Whether to compute the entropy of each query.
        top_k: Number of largest keys per query; None for none.
        spans: Groups of keys, by name: a layout of the keys, or masks or positions.
        queries: The queries that count in `received` and in means. By default, those with a visible
            key; in self-attention, without padding: positions whose key no query sees. Padding that
            sees itself is not recognized: pass the attention mask of the tokenizer, as bool.

    Returns:
        The requested statistics, with the axes b, h, ...

    Raises:
        ValueError: Nothing is requested, a size does not match, or `entropy` of signed weights.

    Example:
        >>> import overt
        >>> from overt import capture
        >>> layer, x = torch.nn.MultiheadAttention(8, 2, batch_first=True), torch.rand(1, 5, 8)
        >>> with overt.watch(layer, each=lambda call: capture.statistics(call, top_k=2)) as trace:
        ...     _ = layer(x, x, x)
        >>> trace.results[0].top.weights.shape  # batch, heads, queries, keys
        torch.Size([1, 2, 5, 2])
    """
    b, h, q, k = call.shape
    if not received and not entropy and top_k is None and spans is None:
        raise ValueError("no statistic is requested: pass received, entropy, top_k or spans")
    if entropy and call.kind is Kind.SIGNED:
        raise ValueError(
            "entropy needs non-negative weights, but those of "
            f"{call.name or 'the model'} are signed: they were changed after the softmax; leave "
            "these calls out with trace.where(lambda call: call.kind is not overt.Kind.SIGNED), or "
            "use received, top_k or span_shares"
        )
    if top_k is not None and not 1 <= top_k <= k:
        raise ValueError(f"top_k must be 1 to {k}, the number of keys, got {top_k}")
    like = _tensor(call.source)
    precise = torch.promote_types(like.dtype, torch.float32)
    with _outside_capture(like.device):
        groups = {} if spans is None else _named_masks(spans, (b, k), like.device)
        counted = (
            _counted_queries(call) if queries is None else _check_queries(queries, (b, q), like)
        )
        sums = RowSums(
            _zeros(like, b, h, k) if received else None,
            _zeros(like, b, h, q) if entropy else None,
            None if top_k is None else _zeros(like, b, h, q, top_k),
            None if top_k is None else like.new_full((b, h, q, top_k), -1, dtype=torch.long),
            _zeros(like, b, h, q, len(groups)) if groups else None,
        )
        masks = torch.stack(list(groups.values()), dim=-1).to(precise) if groups else None
        source, counts = call.source, counted.to(precise)
        if (
            isinstance(source, QKCall)
            and statistics_launch.supports(source, sums)
            and statistics_launch.agrees(source, sums, counts, masks, _reduce_in_blocks, call.name)
        ):
            statistics_launch.reduce_rows(source, sums, counts, masks)
        else:
            _reduce_in_blocks(source, sums, counts, masks)
    shares = None if spans is None else dict(zip(groups, _unbind_last(sums.shares), strict=True))
    top = None if top_k is None else TopKeys(given(sums.weights), given(sums.indices))
    return AttentionStatistics(counted, sums.received, sums.entropy, top, shares)


def _zeros(like: Tensor, *sizes: int) -> Tensor:
    return like.new_zeros(sizes, dtype=torch.promote_types(like.dtype, torch.float32))


def _unbind_last(values: Tensor | None) -> Sequence[Tensor]:
    return () if values is None else values.unbind(dim=-1)


def received(
    call: Call, mean: bool = False, queries: Bool[Tensor, "b q"] | None = None
) -> Float[Tensor, "b h k"]:
    """Compute how much attention each key receives: the sum of its weights over the queries.

    Args:
        call: A call of a trace, or the argument of `watch(each=...)`.
        mean: Whether to divide by the number of queries.
        queries: The queries that count, see `statistics`.

    Returns:
        The attention that each key receives, in each head.

    Raises:
        ValueError: The shape of `queries` does not match.

    Example:
        >>> import overt
        >>> from overt import capture
        >>> layer, x = torch.nn.MultiheadAttention(8, 2, batch_first=True), torch.rand(1, 5, 8)
        >>> with overt.watch(layer, each=capture.received) as trace:  # stores no queries or keys
        ...     _ = layer(x, x, x)
        >>> trace.results[0].sum(dim=-1).round()  # each of the five queries has one to give
        tensor([[5., 5.]])
    """
    found = statistics(call, received=True, queries=queries)
    return found.mean_received if mean else given(found.received)


def entropy(call: Call) -> Float[Tensor, "b h q"]:
    """Compute the entropy of each query: 0 for one key, log n for n equal keys.

    Args:
        call: A call of a trace, or the argument of `watch(each=...)`.

    Returns:
        The entropies in nats; 0 for a query without visible keys.

    Raises:
        ValueError: The weights are signed.

    Example:
        >>> import overt
        >>> from overt import capture
        >>> layer, x = torch.nn.MultiheadAttention(8, 2, batch_first=True), torch.zeros(1, 5, 8)
        >>> with overt.watch(layer, each=capture.entropy) as trace:
        ...     _ = layer(x, x, x)
        >>> trace.results[0][0, 0]  # log 5
        tensor([1.6094, 1.6094, 1.6094, 1.6094, 1.6094])
    """
    return given(statistics(call, entropy=True).entropy)


def top_k(call: Call, k: int) -> TopKeys:
    """Find the `k` largest keys of each query.

    Args:
        call: A call of a trace, or the argument of `watch(each=...)`.
        k: The number of keys.

    Returns:
        Their weights and positions, in descending order; the order of equal weights is not defined.

    Raises:
        ValueError: There are fewer than `k` keys.

    Example:
        >>> import overt
        >>> from overt import capture
        >>> layer, x = torch.nn.MultiheadAttention(8, 2, batch_first=True), torch.rand(1, 5, 8)
        >>> with overt.watch(layer, each=lambda call: capture.top_k(call, 3)) as trace:
        ...     _ = layer(x, x, x)
        >>> trace.results[0].indices.shape  # batch, heads, queries, keys
        torch.Size([1, 2, 5, 3])
    """
    return given(statistics(call, top_k=k).top)


def span_shares(
    call: Call,
    spans: Layout | Mapping[str, KeySet],
    mean: bool = False,
    queries: Bool[Tensor, "b q"] | None = None,
) -> dict[str, Float[Tensor, "b h *q"]]:
    """Compute the share of attention on each span of the keys.

    Args:
        call: A call of a trace, or the argument of `watch(each=...)`.
        spans: A layout of the keys, or masks or positions of keys by name.
        mean: Whether to average over the queries.
        queries: The queries that count in the mean, see `statistics`.

    Returns:
        The share of each query, or their mean, by the name of the span.

    Raises:
        ValueError: A size does not match.

    Example:
        >>> import overt
        >>> from functools import partial
        >>> from overt import capture
        >>> layer, x = torch.nn.MultiheadAttention(8, 2, batch_first=True), torch.zeros(1, 5, 8)
        >>> layout = overt.words(1, "class") + overt.grid(2, 2)
        >>> with overt.watch(layer, each=partial(capture.span_shares, spans=layout)) as trace:
        ...     _ = layer(x, x, x)
        >>> trace.results[0]["image"][:, 0]  # four of five keys
        tensor([[0.8000, 0.8000, 0.8000, 0.8000, 0.8000]])
    """
    found = statistics(call, spans=spans, queries=queries)
    return found.mean_span_shares if mean else dict(given(found.span_shares))


def sink_mass(
    call: Call,
    keys: KeySet = (0,),
    mean: bool = False,
    queries: Bool[Tensor, "b q"] | None = None,
) -> Float[Tensor, "b h *q"]:
    """Compute the share of attention on sink keys, such as the first token.

    Args:
        call: A call of a trace, or the argument of `watch(each=...)`.
        keys: The sinks: a mask of keys, (k,) or (b, k) if samples are padded on the left, or
            positions; negative ones count from the end.
        mean: Whether to average over the queries.
        queries: The queries that count in the mean, see `statistics`.

    Returns:
        The share of each query, or their mean.

    Raises:
        ValueError: A size does not match.

    Example:
        >>> import overt
        >>> from overt import capture
        >>> layer, x = torch.nn.MultiheadAttention(8, 2, batch_first=True), torch.zeros(1, 5, 8)
        >>> with overt.watch(layer, each=lambda call: capture.sink_mass(call, mean=True)) as trace:
        ...     _ = layer(x, x, x)
        >>> trace.results[0]
        tensor([[0.2000, 0.2000]])
    """
    return span_shares(call, {"sinks": keys}, mean, queries)["sinks"]


def given(value: Result | None) -> Result:
    """Return a result that was requested, for type checkers."""
    assert value is not None  # it was requested
    return value


# --- arguments


def span_masks(
    layout: Layout, b: int, device: torch.device | str = "cpu"
) -> dict[str, Bool[Tensor, "b n"]]:
    """Return which positions of an axis belong to each span, per sample.

    Args:
        layout: The layout of the axis.
        b: The number of samples.
        device: The device of the masks.

    Raises:
        ValueError: The layout has another number of samples.

    Example:
        >>> from overt import grid, words
        >>> span_masks(words(1, "class") + grid(1, 2), 1)["image"]
        tensor([[False,  True,  True]])
    """
    found = {}
    for span in layout.spans:
        # the last column takes the positions that a sample does not have (-1)
        mask = torch.zeros(b, len(layout) + 1, dtype=torch.bool, device=device)
        if isinstance(span.index, slice):
            mask[:, : len(layout)][:, span.index] = True
        elif len(span.index) != b:
            raise ValueError(
                f"span {span.name!r} has positions of {len(span.index)} samples, the batch has {b}"
            )
        else:
            at = span.index.to(device)
            mask.scatter_(1, torch.where(at < 0, len(layout), at), True)
        found[span.name] = mask[:, :-1]
    return found


def _named_masks(
    spans: Layout | Mapping[str, KeySet], sizes: tuple[int, int], device: torch.device
) -> dict[str, Bool[Tensor, "b k"]]:
    """Return groups of keys as masks per sample."""
    b, k = sizes
    if isinstance(spans, Layout):
        if len(spans) != k:
            raise ValueError(f"the layout has {len(spans)} positions, the call has {k} keys")
        return span_masks(spans, b, device)
    return {name: _mask_of_keys(name, keys, sizes, device) for name, keys in spans.items()}


def _mask_of_keys(
    name: str, keys: KeySet, sizes: tuple[int, int], device: torch.device
) -> Bool[Tensor, "b k"]:
    b, k = sizes
    if isinstance(keys, Tensor) and keys.dtype == torch.bool:
        if tuple(keys.shape) not in ((k,), (b, k)):
            raise ValueError(
                f"the mask {name!r} must have the shape ({k},) or ({b}, {k}), got "
                f"{tuple(keys.shape)}"
            )
        return keys.to(device).expand(b, k)
    positions = [int(one) for one in keys]
    wrong = [one for one in positions if not -k <= one < k]
    if wrong:
        raise ValueError(f"positions {wrong} of {name!r} are out of range for {k} keys")
    mask = torch.zeros(k, dtype=torch.bool)
    mask[positions] = True
    return mask.to(device).expand(b, k)


def _check_queries(
    queries: Bool[Tensor, "b q"], sizes: tuple[int, int], like: Tensor
) -> Bool[Tensor, "b q"]:
    if queries.dtype != torch.bool or tuple(queries.shape) != sizes:
        raise ValueError(
            f"queries must be a bool tensor of shape {sizes}, got {queries.dtype} of shape "
            f"{tuple(queries.shape)}"
        )
    return queries.to(like.device)


def _counted_queries(call: Call) -> Bool[Tensor, "b q"]:
    """Return the queries that exist: with a visible key and, in self-attention, not padding."""
    source, (b, h, q, k) = call.source, call.shape
    like = _tensor(source)
    found = torch.ones(b, q, dtype=torch.bool, device=like.device)
    if not _hides_keys(source):
        return found
    seen = torch.zeros(b, k, dtype=torch.bool, device=like.device)
    for rows in _row_blocks(q, 4 * b * h * k, like.device):
        shown = call.visible(rows)
        if shown is None:
            return found
        shown = shown.expand(b, -1, k)
        found[:, rows] = shown.any(dim=-1)
        even = call.even_rows(rows)  # padding that attends evenly sees its own key
        seen |= (shown if even is None else shown & ~even[..., None]).any(dim=1)
    return found & seen if q == k and not call.cross else found


def _hides_keys(source: Source) -> bool:
    """Return whether a mask, a bias or the logits may hide keys from all queries."""
    if isinstance(source, MaterializedCall):
        return source.logits is not None
    given = source.allowed, source.bias, source.score_mod, source.mask_mod
    return any(one is not None for one in given)


# --- blocks


def _reduce_in_blocks(
    source: Source,
    sums: RowSums,
    counted: Float[Tensor, "b q"],
    groups: Float[Tensor, "b k m"] | None,
) -> None:
    """Write the statistics of a call into `sums`, by plain operations on blocks of its rows."""
    for samples, heads, part in _parts(source):
        some = None if groups is None else groups[samples]
        _reduce_rows(part, sums.restrict(samples, heads), counted[samples], some)


def _reduce_rows(
    source: Source,
    sums: RowSums,
    counted: Float[Tensor, "b q"],
    groups: Float[Tensor, "b k m"] | None,
) -> None:
    """Compute the weights of some samples and heads block by block, and reduce them into `sums`.

    On a GPU, `kernels.statistics_launch` replaces this function.

    Args:
        source: A call, restricted to these samples and heads.
        sums: Zeros (-1 for indices) of the same samples and heads.
        counted: 1 for queries that count in `received`, else 0.
        groups: 1 for the keys of each group, else 0.
    """
    b, h, q, k = source.shape
    if isinstance(source, QKCall):
        # converted once, not per block; keys shared by several heads are not repeated
        source = replace(source, key=source.key.to(counted.dtype))
    for rows in _row_blocks(q, counted.element_size() * b * h * k, counted.device):
        columns = _visible_columns(source, rows)
        if columns.start == columns.stop:
            continue  # no key is visible
        weights = _block_weights(source, rows, columns).to(counted.dtype)
        if sums.received is not None:
            here = rearrange(counted[:, rows], "b s -> b 1 1 s")
            sums.received[:, :, columns] += (here @ weights)[:, :, 0]
        if sums.weights is not None and sums.indices is not None:
            most = min(sums.weights.shape[-1], weights.shape[-1])
            top = weights.topk(most, dim=-1)
            at = top.indices + columns.start
            sums.weights[:, :, rows, :most] = top.values
            none = top.values == 0 if source.kind is not Kind.SIGNED else None
            sums.indices[:, :, rows, :most] = at if none is None else at.masked_fill(none, -1)
        if sums.entropy is None and sums.shares is None:
            continue
        total = weights.sum(dim=-1)
        total = torch.where(total == 0, 1, total)
        if sums.shares is not None and groups is not None:
            found = weights.flatten(1, 2) @ groups[:, columns]  # heads are rows: no key is repeated
            found = found.unflatten(1, weights.shape[1:3])
            signed = source.kind is Kind.SIGNED  # their sum may be zero
            sums.shares[:, :, rows] = found if signed else found / total[..., None]
        if sums.entropy is not None:
            # with p = w / W:  -sum p log p = log W - sum (w log w) / W, and 0 log 0 = 0
            terms = torch.special.entr(weights).sum(dim=-1)
            sums.entropy[:, :, rows] = (total.log() + terms / total).clamp_min(0)


def _block_weights(source: Source, rows: slice, columns: slice) -> Float[Tensor, "b h s r"]:
    """Compute the weights of some rows, which see no keys outside of the columns."""
    if isinstance(source, MaterializedCall):
        return source.used[:, :, rows, columns]
    query, key = source.query[:, :, rows], source.key[:, :, columns]
    scores = _multiply_groups(query.to(key.dtype), key).mul_(source.scale)
    scores = source.apply_bias_and_mask(scores, rows, columns)
    largest = scores.amax(dim=-1, keepdim=True)
    sinks = None
    if source.sinks is not None:
        sinks = rearrange(source.sinks.to(scores.dtype), "h -> 1 h 1 1")
        largest = torch.maximum(largest, sinks)
    largest = torch.where(largest.isneginf(), 0, largest)  # a row without visible keys
    weights = (scores - largest).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks - largest).exp()
    return weights.div_(torch.where(total == 0, 1, total))


def _multiply_groups(
    query: Float[Tensor, "b h s d"], key: Float[Tensor, "b g r d"]
) -> Float[Tensor, "b h s r"]:
    """Compute `query . key`; heads of a group are rows of one product, so no key is repeated."""
    grouped = rearrange(query, "b (g n) s d -> b g (n s) d", g=key.shape[1])
    scores = grouped @ key.transpose(-1, -2)
    return rearrange(scores, "b g (n s) r -> b (g n) s r", s=query.shape[2])


def _visible_columns(source: Source, rows: slice) -> slice:
    """Return a range of keys outside of which no key is visible to these rows.

    Skips blocks that causal masks and sliding windows hide. Reading the range synchronizes a GPU,
    once per block of rows.
    """
    _, _, q, k = source.shape
    if isinstance(source, MaterializedCall):
        return slice(0, k)
    stop = min(k, rows.stop) if source.causal else k
    shown = replace(source, causal=False).key_mask(rows, slice(0, stop))
    seen = None if shown is None else shown.flatten(0, -2).any(dim=0)
    if source.bias is not None:  # other low scores hide keys only from rows with a higher score
        shown = ~select_block(source.bias, rows, slice(0, stop), (q, k)).isneginf()
        given = shown.flatten(0, -2).any(dim=0)
        seen = given if seen is None else seen & given
    if seen is None:
        return slice(0, stop)
    at = seen.expand(stop).nonzero()[:, 0]
    if not len(at):
        return slice(0, 0)
    first, last = at[[0, -1]].tolist()
    return slice(first, last + 1)


def _tensor(source: Source) -> Tensor:
    return source.query if isinstance(source, QKCall) else source.used


def _row_blocks(count: int, row_bytes: int, device: torch.device) -> Iterator[slice]:
    """Yield slices of rows whose weights fit into the budget of the device, at least one row."""
    size = max(1, _budget(device) // max(1, row_bytes))
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def _budget(device: torch.device) -> int:
    known = block_scores.MAX_CHUNK_BYTES
    return known.get(device.type, block_scores.MAX_CHUNK_BYTES_GPU)


def _parts(source: Source) -> Iterator[tuple[slice, slice, Source]]:
    """Yield samples and heads whose rows are computed together, and the call restricted to them.

    Heads that share keys stay together. Small calls are one part; of large ones, a part has as many
    samples or groups of heads as leave `MIN_ROWS` rows to a block.
    """
    b, h, q, k = source.shape
    like, g = _tensor(source), source.key.shape[1] if isinstance(source, QKCall) else h
    width = torch.promote_types(like.dtype, torch.float32).itemsize
    fitting = _budget(like.device) // max(1, width * (h // g) * min(q, MIN_ROWS) * k)
    groups = min(g, max(1, fitting))
    count = max(1, fitting // g)
    for first in range(0, b, count):
        samples = slice(first, min(first + count, b))
        for start in range(0, g, groups):
            some = slice(start, min(start + groups, g))
            heads = slice(some.start * (h // g), some.stop * (h // g))
            yield samples, heads, _restrict(source, samples, heads, some)


def _restrict(source: Source, samples: slice, heads: slice, groups: slice) -> Source:
    """Return views of some samples and heads of a call."""
    if isinstance(source, MaterializedCall):
        return MaterializedCall(source.used[samples, heads], source.kind)
    offsets = samples.start, heads.start
    # Several heads share the keys of one group. FlexAttention's functions get the numbers of the
    # whole batch. Statistics have no gradient, so the part needs no taps.
    return replace(
        source,
        query=source.query[samples, heads],
        key=source.key[samples, groups],
        bias=_restrict_mask(source.bias, samples, heads),
        allowed=_restrict_mask(source.allowed, samples, heads),
        sinks=None if source.sinks is None else source.sinks[heads],
        score_mod=None if source.score_mod is None else _shift_score(source.score_mod, offsets),
        mask_mod=None if source.mask_mod is None else _shift_mask(source.mask_mod, offsets),
        taps=None,
    )


def _restrict_mask(values: Tensor | None, samples: slice, heads: slice) -> Tensor | None:
    if values is None:
        return None
    values = values.reshape((1,) * (4 - values.ndim) + tuple(values.shape))
    values = values[samples] if values.shape[0] > 1 else values
    return values[:, heads] if values.shape[1] > 1 else values


def _shift_score(score_mod: ScoreMod, offsets: tuple[int, int]) -> ScoreMod:
    """Return a score_mod that counts samples and heads from these offsets."""
    return lambda score, b, h, q, k: score_mod(score, b + offsets[0], h + offsets[1], q, k)


def _shift_mask(mask_mod: MaskMod, offsets: tuple[int, int]) -> MaskMod:
    return lambda b, h, q, k: mask_mod(b + offsets[0], h + offsets[1], q, k)
