"""Attention weighed by what it carries: the size of the values, or what is lost without them.

Kobayashi, Kuribayashi, Yokoi and Inui, "Attention is Not Only a Weight: Analyzing Transformers with
Vector Norms", EMNLP 2020, https://arxiv.org/abs/2004.10102. Mohebbi, Zuidema, Chrupała and
Alishahi, "Quantifying Context Mixing in Transformers", EACL 2023, https://arxiv.org/abs/2301.12971.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from overt.attention import AttentionMap, Kind, Layout
from overt.capture.call import Call
from overt.capture.derived.maps import exactly, hidden_rows, places, shared_mask
from overt.capture.products import Index
from overt.capture.seen import Seen, Where, numbered
from overt.capture.watching import watch

Project = Callable[[Call], Float[Tensor, "o i"] | None]
Distance = Callable[[Float[Tensor, "b n d"], Float[Tensor, "b n d"]], Float[Tensor, "b n"]]

_LAST = ("out_proj", "o_proj", "c_proj", "out_lin", "proj", "to_out", "wo", "o", "dense", "output")


# --- the size of what is carried


def own_projection(call: Call) -> Float[Tensor, "o i"] | None:
    """The weight of the linear layer behind the heads, when the attention module holds it."""
    return _linear(call.module, _width(call))


def projection_in(model: nn.Module) -> Project:
    """Finds the linear layer behind the heads in the module, or beside it, as BERT has it."""

    def find(call: Call) -> Float[Tensor, "o i"] | None:
        found = own_projection(call)
        if found is not None or not call.name:
            return found
        above = model.get_submodule(call.name.rpartition(".")[0])
        beside = [child for name, child in above.named_children() if name in _LAST]
        for one in (above, *beside):
            found = _linear(one, _width(call))
            if found is not None:
                return found
        return None

    return find


@exactly
def value_norms(
    seen: Seen, rows: Where | None = None, project: Project = own_projection
) -> AttentionMap:
    """The length of what each key sends to each query through each head (Kobayashi et al. 2020).

    The weight times the norm of the value after the output projection, which `project(call)` gives
    as a matrix: `own_projection` looks into the attention module, `projection_in(model)` also
    beside it. Where there is none, the norm is that of the value alone, and a warning says so.
    """
    at, queries, keys = places(seen, rows)
    values = []
    for call, sent in zip(seen.calls, _sent(seen, project), strict=True):
        values.append(call.weights(at) * sent.norm(dim=-1).transpose(1, 2)[:, :, None])
    return _amounts(seen, torch.stack(values, dim=1), at, queries, keys)


@exactly
def summed_value_norms(
    seen: Seen, rows: Where | None = None, project: Project = own_projection
) -> AttentionMap:
    """The length of what each key sends to each query through all heads together.

    Heads may cancel each other, so it is not the sum of `value_norms`. The vectors themselves, one
    for each pair of positions, are never made: their lengths follow from the products of what the
    heads of one key send. Needs the output projection of every layer.
    """
    at, queries, keys = places(seen, rows)
    values = []
    for call, sent in zip(seen.calls, _sent(seen, project, needed=True), strict=True):
        weights = call.weights(at)
        products = sent @ sent.mT  # b k h h
        squares = torch.einsum("bhqk,bkhj,bjqk->bqk", weights, products, weights)
        positive = squares > 0  # the root has no gradient at zero
        values.append(torch.where(positive, torch.where(positive, squares, 1).sqrt(), 0)[:, None])
    return _amounts(seen, torch.stack(values, dim=1), at, queries, keys)


def _sent(seen: Seen, project: Project, needed: bool = False) -> list[Float[Tensor, "b k h o"]]:
    """What each head would add to the output if a key had all of its weight."""
    seen.check_alike()
    found, without = [], []
    for call in seen.calls:
        value, matrix = _value(call), project(call)
        h = call.shape[1]
        value = value.repeat_interleave(h // value.shape[1], dim=1).transpose(1, 2)
        value = value.to(torch.promote_types(value.dtype, torch.float32))
        if matrix is None:
            without.append(call.name)
            found.append(value)
            continue
        if matrix.shape[1] != h * value.shape[-1]:
            raise ValueError(
                f"a projection of {tuple(matrix.shape)} does not follow {h} heads of "
                f"{value.shape[-1]} features in {call.name or 'the model'}"
            )
        heads = matrix.to(value.dtype).unflatten(1, (h, -1))
        found.append(torch.einsum("bkhd,ohd->bkho", value, heads))
    if without:
        said = (
            f"no output projection was found in {without[0]!r}; give project=projection_in(model)"
        )
        if needed:
            raise ValueError(f"{said}: heads cannot be summed without it")
        warnings.warn(f"{said}. The norms are those of the values alone.", stacklevel=3)
    return found


def _value(call: Call) -> Float[Tensor, "b g k d"]:
    b, h, q, k = call.shape
    value = call.value
    if value is None or value.shape[-2] != k or value.numel() % (b * k * value.shape[-1]):
        raise ValueError(f"{call.name or 'the model'} does not show the values its weights met")
    value = value.reshape(b, -1, k, value.shape[-1])
    whole = call.output is None or call.output.numel() == b * h * q * value.shape[-1]
    if h % value.shape[1] or not whole or call.chosen is not None:
        raise ValueError(
            f"{call.name or 'the model'} has values of other heads than its weights; take heads of "
            "the finished map, not of what was seen"
        )
    return value


def _width(call: Call) -> int:
    value = call.value
    return 0 if value is None else call.shape[1] * value.shape[-1]


def _linear(module: nn.Module, width: int) -> Float[Tensor, "o i"] | None:
    """The weight (out, in) of a linear layer with a usual name that takes all heads at once."""
    children = dict(module.named_children())
    for name in _LAST:
        child = children.get(name)
        if isinstance(child, nn.Sequential) and len(child):
            child = child[0]
        weight = getattr(child, "weight", None)
        if not isinstance(weight, Tensor) or weight.ndim != 2:
            continue
        if type(child).__name__ == "Conv1D":  # GPT-2's linear layer, kept the other way round
            weight = weight.mT
        if weight.shape[1] == width:
            return weight
    return None


def _amounts(seen: Seen, values: Tensor, at: Index, queries: Layout, keys: Layout) -> AttentionMap:
    mask = shared_mask(seen, at)
    if isinstance(at, Tensor):
        there = (at >= 0).to(values.device)
        values = values * there[:, None, None, :, None]
        mask = hidden_rows(mask, there, len(keys))
    signed = any(call.kind is Kind.SIGNED for call in seen.calls)
    return AttentionMap(values, keys, queries, mask, Kind.SIGNED if signed else Kind.AMOUNT)


# --- what is lost without it


def cosine_distance(
    one: Float[Tensor, "b n d"], other: Float[Tensor, "b n d"]
) -> Float[Tensor, "b n"]:
    """One minus the cosine of the angle between vectors, never below zero by rounding."""
    return (1 - torch.nn.functional.cosine_similarity(one, other, dim=-1)).clamp_min(0)


def value_zeroing(
    run: Callable[[], Any],
    block: nn.Module,
    distance: Distance = cosine_distance,
    layout: Layout | None = None,
) -> AttentionMap:
    """How much each position of a layer changes without the value of each (Mohebbi et al. 2023).

    `run()` calls the model, and `block` is the layer: attention and all that follows up to its
    output. The block is run again on what it was given, once for each position, with the value of
    that position zero in every head of its self-attention, and the outputs are compared by
    `distance`. Nothing else changes. The paper divides each row by its sum: `.normalize()`. With a
    gradient every run is kept; use `torch.no_grad()` when there is nothing to train.
    """
    args, kwargs, before = _given(run, block)
    if kwargs.get("past_key_values") is not None:  # running again would add to it
        raise ValueError(
            "a layer with a cache does not run twice; call the model with use_cache=False"
        )
    with watch(block) as seen:
        again = _output(block(*args, **kwargs))
    if again.shape != before.shape or not torch.allclose(again, before, rtol=1e-4, atol=1e-5):
        raise ValueError(
            f"{type(block).__name__} does not give the same twice; put the model into evaluation "
            "mode, and run it without a cache"
        )
    call = _inward(seen)
    n = call.shape[3]
    without = Without(call.name)
    changes = []
    # calls are dropped as they come; the whole output is made by the same arithmetic as the others
    with watch(block, edit=without, each=lambda call: None):
        whole = _output(block(*args, **kwargs))
        for without.place in range(n):
            changes.append(distance(whole, _output(block(*args, **kwargs))))
    values = torch.stack(changes, dim=-1)
    mask = call.visible()
    if mask is not None:
        values = values * mask
    layout = layout or numbered(n)
    return AttentionMap(values[:, None, None], layout, layout, mask, Kind.AMOUNT)


class Without:
    """An edit that takes the value of one position away, from the module called `name`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.place: int | None = None

    def __call__(self, call: Call, weights: Float[Tensor, "b h q k"]) -> Float[Tensor, "b h q k"]:
        """The weights, zero on that position: what a value of zero gives, whatever its weight."""
        if self.place is None or call.name != self.name:
            return weights
        kept = torch.ones_like(weights[0, 0, 0])
        kept[self.place] = 0
        return weights * kept


def _given(run: Callable[[], Any], block: nn.Module) -> tuple[Any, Any, Tensor]:
    """What a block was given by the model, and what it gave out."""
    found: list[tuple[Any, Any, Tensor]] = []

    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        found.append((args, kwargs, _output(output)))

    handle = block.register_forward_hook(note, with_kwargs=True)
    try:
        run()
    finally:
        handle.remove()
    if len(found) != 1:
        raise ValueError(
            f"the block {type(block).__name__} ran {len(found)} times; `run` should call the model "
            "that holds it, once"
        )
    return found[0]


def _output(given: Any) -> Float[Tensor, "b n d"]:
    """The features that a block gave out, alone or first of several."""
    first = given[0] if isinstance(given, (tuple, list)) else given
    if not isinstance(first, Tensor) or first.ndim != 3:
        raise ValueError("a block gives out features (b, n, d); name a layer of the model")
    return first


def _inward(seen: Seen) -> Call:
    """The one call in which a block looks at its own positions."""
    found = [call for call in seen.calls if not call.cross and call.shape[2] == call.shape[3]]
    if len(found) != 1:
        raise ValueError(
            f"the block looks at its own positions {len(found)} times; name a block that does once"
        )
    return found[0]
