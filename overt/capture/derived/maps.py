"""Maps read straight off one layer, and what every derived map shares: axes, rows, portions."""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Concatenate, ParamSpec

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from overt.attention import AttentionMap, Kind, Layout
from overt.capture.call import Call, Projected
from overt.capture.products import ALL, Index, unrounded
from overt.capture.seen import Seen, Where, resolve, visible_in

Fuse = Callable[..., Tensor]  # (weights, dim=, keepdim=True) -> weights: torch.mean, torch.amax
Rest = ParamSpec("Rest")


def exactly(
    make: Callable[Concatenate[Seen, Rest], AttentionMap],
) -> Callable[Concatenate[Seen, Rest], AttentionMap]:
    """The same function, with products in the precision of its inputs also under autocast."""

    @wraps(make)
    def exact(seen: Seen, *args: Rest.args, **kwargs: Rest.kwargs) -> AttentionMap:
        device = device_of(seen.calls[0]) if seen.calls else torch.device("cpu")
        with unrounded(device):
            return make(seen, *args, **kwargs)

    return exact


def raw(
    seen: Seen, layer: int | str = -1, rows: Where | None = None, fuse: Fuse = torch.mean
) -> AttentionMap:
    """The weights of one layer with its heads fused, for all queries or for the rows asked for.

    `rows` is the name of a span or positions a sample. The mean of probabilities is a probability;
    any other fusion gives amounts. For every head by itself there is `seen.map(layer)`.
    """
    one = Seen([seen.call(layer)], seen.layout)
    if rows is None:
        return one.map(0).over_heads(fuse)
    at, queries, keys = places(one, rows)
    call = one.calls[0]
    values = call.weights(at)
    mask = call.visible(at)
    if isinstance(at, Tensor):
        there = (at >= 0).to(values.device)
        values = values * there[:, None, :, None]
        mask = hidden_rows(mask, there, len(keys))
    return AttentionMap(values[:, None], keys, queries, mask, call.kind).over_heads(fuse)


def places(seen: Seen, rows: Where | None) -> tuple[Index, Layout, Layout]:
    """Where the rows asked for stand, their layout, and the layout of the keys."""
    queries, keys = seen.layouts(seen.calls)
    if rows is None:
        return ALL, queries, keys
    at, queries = resolve(queries, rows)
    if isinstance(at, Tensor) and len(at) != seen.calls[0].shape[0]:
        raise ValueError(f"rows of {len(at)} samples for a batch of {seen.calls[0].shape[0]}")
    if isinstance(at, Tensor):
        _within(at, seen.calls[0].shape[2])
    return at, queries, keys


def _within(at: Tensor, count: int) -> None:
    """Refuse positions that are not there; to ask a card is to wait for all that it has to do."""
    if at.device.type == "cpu" and not torch.compiler.is_compiling():
        if bool((at >= count).any()):
            raise ValueError(f"row {int(at.max())} is beyond the {count} queries")
    else:
        torch._assert_async((at < count).all(), f"a row is beyond the {count} queries")


def onto_itself(seen: Seen, what: str) -> None:
    """Refuse what cannot be followed from layer to layer: cross-attention, weights of any sign."""
    seen.check_alike()
    passes = len({call.step for call in seen.calls})
    if passes > 1:
        raise ValueError(
            f"{what} follows one pass through the model, and {passes} were seen; choose one with "
            "at(step)"
        )
    for call in seen.calls:
        _, _, q, k = call.shape
        if call.cross or q != k:
            raise ValueError(
                f"{what} needs self-attention of whole sequences, and {call.name or 'the model'} "
                f"looks from {q} queries at {k} keys"
                f"{' of another sequence' if call.cross else ''}; choose calls with where(...)"
            )
        if call.kind is Kind.SIGNED:
            raise ValueError(
                f"{what} follows shares of attention, and the weights of {call.name} were mixed "
                "after their softmax"
            )


def shared_mask(seen: Seen, rows: Index = ALL) -> Bool[Tensor, "b #s k"] | None:
    """Which keys each query may see in any of the layers; None when all see all."""
    return visible_in(seen.calls, rows, ALL)


def hidden_rows(
    mask: Bool[Tensor, "b #s k"] | None, there: Bool[Tensor, "b s"], k: int
) -> Bool[Tensor, "b s k"] | None:
    """The mask with the rows hidden that a sample does not have; a card is not asked for them."""
    if mask is None and there.is_cpu and bool(there.all()):
        return None
    b, s = there.shape
    seen = there[..., None].expand(b, s, k)
    return seen if mask is None else seen & mask.to(seen.device)


def listed(at: Index, b: int, length: int, device: torch.device) -> Int[Tensor, "b s"]:
    """Positions one row a sample, whether or not they are the same for all."""
    if isinstance(at, Tensor):
        return at.to(device)
    return torch.arange(length, device=device)[at].expand(b, -1)


def one_hot_rows(
    rows: Int[Tensor, "b s"], length: int, dtype: torch.dtype
) -> Float[Tensor, "b s k"]:
    """All weight of each row on its own position; nothing in a row that a sample does not have."""
    own = torch.nn.functional.one_hot(rows.clamp_min(0), length)
    return (own * (rows >= 0)[..., None]).to(dtype)


def portions(count: int, size: int) -> Iterator[slice]:
    """The slices that cut `count` rows into as few portions of at most `size`, about equal."""
    many = -(-count // size)
    for number in range(many):
        yield slice(count * number // many, count * (number + 1) // many)


def portion_size(call: Call) -> int:
    """How many rows of a call are worked on at a time: a few megabytes, some hundred on a GPU."""
    b, h, _, k = call.shape
    return max(8, (1 << (20 if device_of(call).type == "cpu" else 26)) // (b * h * k))


def device_of(call: Call) -> torch.device:
    """Where the tensors of a call are."""
    return _tensor(call).device


def precision_of(call: Call) -> torch.dtype:
    """In which precision a call is calculated with: single, or what it has when that is more."""
    return torch.promote_types(_tensor(call).dtype, torch.float32)


def _tensor(call: Call) -> Tensor:
    return call.source.query if isinstance(call.source, Projected) else call.source.used
