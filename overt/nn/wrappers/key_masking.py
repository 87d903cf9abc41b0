"""Hide words or cells from a wrapped model by masking keys in every attention layer."""

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from overt.capture.call import Call
from overt.capture.edits import Bias
from overt.capture.trace import Layouts
from overt.nn.wrappers.map_selection import layout_pair, unnamed_positions

Masks = Mapping[str, Tensor]  # by span name: 1 to keep, 0 to remove


def mask_keys(
    kept: Float[Tensor, "b k"], matches: Callable[[Call], bool]
) -> tuple[Bias, list[str]]:
    """Return an edit that masks keys in the matching calls, and the list of masked calls.

    A weight between 0 and 1 multiplies the attention before normalisation. No softmax row becomes
    empty: a self-attention query that loses all keys attends to itself, which no other query does.
    A cross-attention query that loses all keys returns zeros.

    Args:
        kept: weight of each key: 1 keeps it, 0 hides it.
        matches: which calls to mask.
    """
    masked: list[str] = []
    there = kept > 0
    # the inner `where` keeps log(0) out of the graph: its gradient would be NaN, not zero
    bias = torch.where(there, torch.where(there, kept, 1).log(), -torch.inf)

    # called for each attention call: returns a bias on its scores, or None to leave it unchanged
    def make(call: Call) -> Tensor | None:
        b, _, q, k = call.shape
        # another sequence, or windows folded into the batch axis
        if (b, k) != tuple(kept.shape) or not matches(call):
            return None
        masked.append(call.name)
        seen = call.visible()
        # keys that are left for each query, under the model's own mask too
        left = there[:, None] if seen is None else there[:, None] & seen
        blind = ~left.any(dim=-1, keepdim=True)
        added = bias[:, None]
        # a compiled graph cannot branch on values: it always takes the general path below
        if not torch.compiler.is_compiling() and not bool(blind.any()):
            return added[:, None]
        # a cross-attention query has no own position to fall back to: the kernel returns zeros
        if call.cross:
            return added[:, None]
        place = torch.arange(k, device=kept.device)
        # with a cache there are fewer queries than keys: query i is key i + k - q
        own = place == (torch.arange(q, device=kept.device) + k - q)[:, None]
        return torch.where(blind, torch.where(own, 0.0, -torch.inf), added)[:, None]

    return Bias(make), masked


def call_filter(layout: Layouts | None) -> Callable[[Call], bool]:
    """Return a predicate for the calls that attend to the keys of the layout.

    With separate layouts for queries and keys, the decoder's self-attention is excluded: it may
    have the same length by coincidence.
    """
    if isinstance(layout, tuple) and layout[0] is not layout[1]:
        return lambda call: call.cross or not ("decoder" in call.name or call.causal)
    return lambda call: True


def key_weights(layout: Layouts | None, mask: Masks) -> Float[Tensor, "b k"]:
    """Combine masks over spans into one weight per key: the minimum where spans overlap."""
    _, keys = layout_pair(layout)
    some = next(iter(mask.values()))
    if keys is None:
        keys = unnamed_positions(some.shape[1])
    precise = torch.promote_types(some.dtype, torch.float32)
    kept = torch.ones(len(some), len(keys), dtype=precise, device=some.device)
    for name, one in mask.items():
        span = keys.find(name)
        if one.shape[1] != len(span):
            raise ValueError(
                f"the mask over {name!r} has {one.shape[1]} positions, expected {len(span)}"
            )
        checked = one.device.type == "cpu" and not torch.compiler.is_compiling()
        if checked and not bool(((one >= 0) & (one <= 1)).all()):  # would synchronize a GPU
            raise ValueError(f"the mask over {name!r} must have values from 0 to 1")
        if isinstance(span.index, slice):
            at = torch.arange(len(keys), device=some.device)[span.index].expand(len(some), -1)
        else:
            at = span.index.to(some.device)
        # absent positions go behind the last key: equal minima would share a gradient
        place = torch.where(at >= 0, at, len(keys))
        spread = torch.ones(len(some), len(keys) + 1, dtype=precise, device=some.device)
        spread = spread.scatter(1, place, one.to(precise))[:, :-1]
        named = torch.zeros_like(spread, dtype=torch.bool)
        named = torch.nn.functional.pad(named, (0, 1)).scatter(1, place, True)[:, :-1]
        # where instead of minimum, which splits the gradient between equal values
        kept = torch.where(named & (spread <= kept), spread, kept)
    return kept
