"""Taking words or cells from an adopted model: no query of any layer sees them."""

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from overt.capture.call import Call
from overt.capture.edits import Bias
from overt.capture.seen import Layouts
from overt.models.adopting.looking import pair_of, positions

Masks = Mapping[str, Tensor]  # by span name: 1 to keep, 0 to remove


def hiding(kept: Float[Tensor, "b k"], fits: Callable[[Call], bool]) -> tuple[Bias, list[str]]:
    """An edit that hides keys from every query of the calls that fit, and the names of those met.

    A number between 0 and 1 multiplies the weights before they are normalised. Nothing is ever left
    with no key at all: a query of self-attention that has lost all keys sees itself, which nobody
    else does. A query of cross-attention that has lost all takes nothing: zeros.
    """
    met: list[str] = []
    there = kept > 0
    bias = torch.where(there, torch.where(there, kept, 1).log(), -torch.inf)

    def make(call: Call) -> Tensor | None:
        b, _, q, k = call.shape
        if (b, k) != tuple(kept.shape) or not fits(call):
            return None
        met.append(call.name)
        seen = call.visible()
        left = there[:, None] if seen is None else there[:, None] & seen
        blind = ~left.any(dim=-1, keepdim=True)
        added = bias[:, None]
        if not torch.compiler.is_compiling() and not bool(blind.any()):
            return added[:, None]
        if call.cross:
            return added[:, None]
        place = torch.arange(k, device=kept.device)
        own = place == (torch.arange(q, device=kept.device) + k - q)[:, None]
        return torch.where(blind, torch.where(own, 0.0, -torch.inf), added)[:, None]

    return Bias(make), met


def hidden_in(layout: Layouts | None) -> Callable[[Call], bool]:
    """Which calls of the right size are over the keys of the layout.

    With a layout for each axis, a decoder that looks at itself is over the other one, which may
    happen to be as long.
    """
    if isinstance(layout, tuple) and layout[0] is not layout[1]:
        return lambda call: call.cross or not ("decoder" in call.name or call.causal)
    return lambda call: True


def kept_keys(layout: Layouts | None, mask: Masks) -> Float[Tensor, "b k"]:
    """Masks over spans as one factor a key: the least of those that overlap."""
    _, keys = pair_of(layout)
    some = next(iter(mask.values()))
    if keys is None:
        keys = positions(some.shape[1])
    precise = torch.promote_types(some.dtype, torch.float32)
    kept = torch.ones(len(some), len(keys), dtype=precise, device=some.device)
    for name, one in mask.items():
        span = keys.find(name)
        if one.shape[1] != len(span):
            raise ValueError(
                f"a mask of {one.shape[1]} positions over {name!r}, which has {len(span)}"
            )
        at_hand = one.device.type == "cpu" and not torch.compiler.is_compiling()
        if at_hand and not bool(((one >= 0) & (one <= 1)).all()):  # a card would have to wait
            raise ValueError(f"the mask over {name!r} is 1 to keep and 0 to remove, or between")
        if isinstance(span.index, slice):
            at = torch.arange(len(keys), device=some.device)[span.index].expand(len(some), -1)
        else:
            at = span.index.to(some.device)
        # what stands nowhere goes behind the last key: among equals a gradient would be split
        place = torch.where(at >= 0, at, len(keys))
        spread = torch.ones(len(some), len(keys) + 1, dtype=precise, device=some.device)
        spread = spread.scatter(1, place, one.to(precise))[:, :-1]
        named = torch.zeros_like(spread, dtype=torch.bool)
        named = torch.nn.functional.pad(named, (0, 1)).scatter(1, place, True)[:, :-1]
        kept = torch.where(named & (spread <= kept), spread, kept)
    return kept
