"""Select the output maps of a wrapped model from its attention trace."""

from dataclasses import replace

import torch
from jaxtyping import Bool
from torch import Tensor

from overt.attention import GLOBAL_QUERY, AttentionMap, Kind, Layout, words
from overt.capture.call import Call, MaterializedCall
from overt.capture.trace import AttentionTrace, Layouts

NON_INPUT_SPANS = ("class", "distillation", "registers", "special")


def last_layer(trace: AttentionTrace) -> tuple[AttentionMap, ...]:
    """Return the attention of the deciding query in the last layer: one map per kind of input.

    The query is the class token, or the only query, or the last token of a causal model; otherwise
    the mean over all queries without padding. All heads are kept. Each map is renormalised over its
    own keys: attention to the class token, registers and separators is left out.

    Args:
        trace: captured attention of one forward pass.

    Returns:
        One map per input span, with one query.

    Example:
        >>> from overt import watch
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        >>> with watch(model, layout=words(5)) as trace:
        ...     _ = model(torch.rand(1, 5, 8))
        >>> (attention,) = last_layer(trace)
        >>> attention.weights.shape  # one layer, two heads; the mean over the five queries
        torch.Size([1, 1, 2, 1, 5])
    """
    return _maps_by_span(AttentionTrace([matching_calls(trace)[-1]], trace.layout))


def all_layers(trace: AttentionTrace) -> tuple[AttentionMap, ...]:
    """Return the maps of `last_layer` for all layers with the shape of the last one, stacked.

    Args:
        trace: captured attention of one forward pass.

    Returns:
        One map per input span, with one query and a layer axis.

    Example:
        >>> from overt import watch
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        >>> with watch(model, layout=words(5)) as trace:
        ...     _ = model(torch.rand(1, 5, 8))
        >>> (attention,) = all_layers(trace)
        >>> attention.weights.shape
        torch.Size([1, 3, 2, 1, 5])
    """
    calls = matching_calls(trace)
    return _maps_by_span(
        AttentionTrace([one for one in calls if one.shape == calls[-1].shape], trace.layout)
    )


def last_layer_of(trace: AttentionTrace, derived: AttentionMap) -> tuple[AttentionMap, ...]:
    """Return the maps of `last_layer` for a map of all positions, such as attention rollout.

    Args:
        trace: captured attention of one forward pass, which says which query decides.
        derived: a map with one layer, over the positions of the last matching call.

    Returns:
        One map per input span, with one query.

    Raises:
        ValueError: the map has other positions than the call.

    Example:
        >>> from overt import watch
        >>> from overt.attribution import rollout
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        >>> with watch(model, layout=words(5)) as trace:
        ...     _ = model(torch.rand(1, 5, 8))
        >>> (attention,) = last_layer_of(trace, rollout(trace))
        >>> attention.weights.shape
        torch.Size([1, 1, 1, 1, 5])
    """
    call = matching_calls(trace)[-1]
    b, layers, _, q, k = derived.shape
    if layers != 1 or (b, q, k) != (call.shape[0], *call.shape[2:]):
        raise ValueError(
            f"the map has (samples, layers, queries, keys) = {(b, layers, q, k)}, the call has "
            f"{(call.shape[0], 1, *call.shape[2:])}"
        )
    weights = derived.weights[:, 0]
    # a weight of zero is not a hidden key: only the mask of the call hides keys
    logits = weights.clamp_min(torch.finfo(weights.dtype).tiny).log()
    visible = call.visible()
    if visible is not None:
        logits = logits.masked_fill(~visible[:, None], -torch.inf)
    source = MaterializedCall(weights, derived.kind, logits)
    single = replace(call, source=source, value=None, output=None)
    return _maps_by_span(AttentionTrace([single], trace.layout))


def matching_calls(trace: AttentionTrace) -> list[Call]:
    """Return the calls whose positions the layout describes; a single query needs no layout."""
    queries, keys = layout_pair(trace.layout)
    calls = [
        call
        for call in trace.calls
        if (keys is None or call.shape[3] == len(keys))
        and (queries is None or call.shape[2] in (1, len(queries)))
    ]
    if not calls:
        sizes = sorted({call.shape[2:] for call in trace.calls})
        expected = (len(queries or ()), len(keys or ()))
        raise ValueError(
            f"the layout has (queries, keys) = {expected}, but the attention of the model has "
            f"{sizes}; pass wrap() a layout with one of these sizes, a function of the batch that "
            "returns it, or reduce="
        )
    return calls


def _maps_by_span(trace: AttentionTrace) -> tuple[AttentionMap, ...]:
    first = trace.calls[0]
    b, _, q, k = first.shape
    queries, keys = layout_pair(trace.layout)
    if keys is None:
        keys = unnamed_positions(k)
    if queries is None or q == 1:
        queries = GLOBAL_QUERY if q == 1 else unnamed_positions(q)
    trace = trace.with_layout((queries, keys))
    names = [span.name for span in keys.spans]
    # a model with special tokens only still gets a map
    names = [name for name in names if name not in NON_INPUT_SPANS] or names
    # signed weights have no logarithm
    signed = any(call.kind is Kind.SIGNED for call in trace)
    block = trace.block if signed else trace.log_block
    if q == 1 or any(span.name == "class" for span in queries.spans):
        row = queries.spans[0].name if q == 1 else "class"
        return tuple(block(row, name) for name in names)
    everywhere = torch.arange(q, device=_device(first)).expand(b, q)
    real = _real_queries(first)
    # only the last real token sees the whole text
    if first.causal:
        at = everywhere if real is None else torch.where(real, everywhere, 0)
        return tuple(block(at.amax(dim=1, keepdim=True), name) for name in names)
    return tuple(_mean_over_queries(block(everywhere, name), real) for name in names)


def _mean_over_queries(attention: AttentionMap, there: Bool[Tensor, "b q"] | None) -> AttentionMap:
    """Return the mean over the real queries that see at least one key."""
    rows = attention.rows if there is None else attention.rows & there
    # padding would pull the mean towards attention that means nothing
    share = rows / rows.sum(dim=1, keepdim=True).clamp_min(1)
    weights = attention.weights * share[:, None, None, :, None].to(attention.values.dtype)
    return AttentionMap(
        weights.sum(dim=3, keepdim=True),
        attention.keys,
        GLOBAL_QUERY,
        (attention.visible & rows[..., None]).any(dim=1, keepdim=True),
        attention.kind,
    )


def _real_queries(call: Call) -> Bool[Tensor, "b q"] | None:
    """Return which queries are not padding: in self-attention, positions that some query sees."""
    # masks are about keys: they say something about queries only where both are the same sequence
    if call.cross or call.shape[2] != call.shape[3]:
        return None
    seen = call.visible()
    return None if seen is None else seen.any(dim=1)


def layout_pair(layout: Layouts | None) -> tuple[Layout | None, Layout | None]:
    """Return the layouts of queries and keys."""
    if layout is None:
        return None, None
    return layout if isinstance(layout, tuple) else (layout, layout)


def unnamed_positions(count: int) -> Layout:
    """Return a layout of `count` positions without further meaning."""
    return words(count, "positions")


def _device(call: Call) -> torch.device:
    source = call.source
    return source.used.device if isinstance(source, MaterializedCall) else source.query.device
