"""Calls of several layers: which can be computed at once, and what they see."""

from collections.abc import Iterable, Sequence

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from overt.capture.block_scores import ALL, GradTap, Index, block_log_softmax, block_scores
from overt.capture.call import Call, QKCall


def group_stackable(calls: Sequence[Call]) -> list[list[int]]:
    """Group calls whose weights `stacked_weights` computes at once; returns their indices.

    Args:
        calls: Calls of one forward pass. Others than `QKCall`s are groups of one.
    """
    groups: list[list[int]] = []
    for place, call in enumerate(calls):
        fitting = (group for group in groups if _can_stack(calls[group[0]], call))
        group = next(fitting, None)
        if group is None:
            groups.append([place])
        else:
            group.append(place)
    return groups


def stacked_weights(calls: Sequence[Call], rows: slice) -> Float[Tensor, "b l h s k"]:
    """Compute the weights of the same rows in several calls that `group_stackable` has grouped.

    Few operations for all layers: a generated token has little else to compute, so that launching
    operations per layer would dominate.
    """
    sources = [call.source for call in calls if isinstance(call.source, QKCall)]
    if len(sources) < 2:
        return torch.stack([call.weights(rows) for call in calls], dim=1)
    first, (queries, keys) = sources[0], taps_or_tensors(sources)
    if is_mask_only(first) and first.softcap is None and first.sinks is None:
        seen = calls[0].visible(rows, ALL)
        logs = block_log_softmax(queries, keys, rows, ALL, first.scale, seen)
        return rearrange(logs.exp(), "l b h s k -> b l h s k")
    scores = first.apply_bias_and_mask(
        block_scores(queries, keys, rows, ALL, first.scale), rows, None
    )
    if first.sinks is not None:  # keys without a value
        sinks = torch.stack([one.sinks for one in sources if one.sinks is not None])
        sinks = rearrange(sinks.to(scores.dtype), "l h -> l 1 h 1 1")
        scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1)
    # A fully masked row has no weight; its softmax would be NaN.
    empty = scores.isneginf().all(dim=-1, keepdim=True)
    weights = torch.where(empty, 0, scores).softmax(dim=-1).masked_fill(empty, 0)
    return rearrange(weights[..., : first.shape[3]], "l b h s k -> b l h s k")


def _can_stack(first: Call, other: Call) -> bool:
    one, two = first.source, other.source
    if not isinstance(one, QKCall) or not isinstance(two, QKCall) or first.cross != other.cross:
        return False
    # A mask must be the same tensor: to compare values would synchronize a GPU.
    return (
        all(source.score_mod is None and source.mask_mod is None for source in (one, two))
        and one.softcap == two.softcap
        and (one.sinks is None) == (two.sinks is None)
        and one.query.shape == two.query.shape
        and one.key.shape == two.key.shape
        and one.query.device == two.query.device
        and one.query.dtype == two.query.dtype
        and one.scale == two.scale
        and one.causal == two.causal
        and _is_same_tensor(one.bias, two.bias)
        and _is_same_tensor(one.allowed, two.allowed)
    )


def _is_same_tensor(one: Tensor | None, two: Tensor | None) -> bool:
    """Return whether two masks are views of the same entries: each layer makes its own view."""
    if one is None or two is None or one is two:
        return one is two
    return (
        one.device == two.device
        and one.dtype == two.dtype
        and one.shape == two.shape
        and one.stride() == two.stride()
        and one.data_ptr() == two.data_ptr()
    )


def stack_layers(layers: Iterable[Tensor]) -> Tensor:
    """Stack tensors (b, ...) of several layers to (b, l, ...), on the device of the first layer.

    A large model may have its layers on several devices. Each is moved as it is computed, so that
    the other devices need memory for one layer only.
    """
    made: list[Tensor] = []
    for layer in layers:
        made.append(layer.to(made[0].device) if made else layer)
    return torch.stack(made, dim=1)


def visible_in_any(
    calls: Sequence[Call], rows: Index, keys: Index
) -> Bool[Tensor, "b #s r"] | None:
    """Return which keys are visible in any layer; layers may differ (sliding windows)."""
    found: Tensor | None = None
    before: tuple[object, ...] | None = None
    for call in calls:
        source = call.source
        now = (
            (source.bias, source.allowed, source.causal, source.mask_mod)
            if isinstance(source, QKCall)
            else None
        )
        if now is not None and before is not None and _same_objects(now, before):
            continue  # layers that share one mask
        before = now
        seen = call.visible(rows, keys)
        if seen is None:
            return None
        # Layers may be on several devices; the result is on that of the first.
        found = seen if found is None else found | seen.to(found.device)
    return found


def _same_objects(one: tuple[object, ...], other: tuple[object, ...]) -> bool:
    return all(mine is theirs for mine, theirs in zip(one, other, strict=True))


def stackable_sources(calls: Sequence[Call]) -> list[QKCall] | None:
    """Return the sources of the calls, if one function can multiply them all; else None."""
    sources = [call.source for call in calls if isinstance(call.source, QKCall)]
    if len(sources) < len(calls):
        return None
    first = sources[0]
    alike = all(
        one.plain
        and one.query.device == first.query.device
        and one.key.shape == first.key.shape
        and one.scale == first.scale
        and one.bias is first.bias
        and one.allowed is first.allowed
        and one.causal == first.causal
        for one in sources
    )
    return sources if alike else None


def taps_or_tensors(
    sources: Sequence[QKCall],
) -> tuple[list[Tensor | GradTap], list[Tensor | GradTap]]:
    """Queries and keys of all layers, or their taps."""
    pairs = [(one.query, one.key) if one.taps is None else one.taps for one in sources]
    return [query for query, _ in pairs], [key for _, key in pairs]


def is_mask_only(source: QKCall) -> bool:
    """Whether the mask of a block is all that changes the scores: no bias, no mask per head."""
    allowed = source.allowed
    alike = allowed is None or allowed.ndim < 3 or allowed.shape[-3] == 1
    return source.bias is None and alike
