"""Scores of the same rows and keys in many layers, at the price of those scores.

Plain autograd would save a copy of the keys in every layer, in float32 at that, make a dozen small
nodes a layer, and hold the gradients of all layers at once. One function for all layers saves
nothing that attention itself has not saved: queries and keys as they are. It multiplies many layers
at once, so that small layers cost few launches, and never more of them than fit in little memory.

Nothing here asks a device for a value: a step that is supervised never waits for its own results.
On a CUDA card log-shares are made by kernels of our own (`launching`) where Triton is installed; a
cross-entropy is summed there without them (`costs`). A graph that is being compiled calls the same
kernels as operators (`operators`), and elsewhere gets the same arithmetic as plain operations.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from overt.capture import launching, operators

Index = slice | Tensor  # positions, the same for every sample or one row a sample
Part = Callable[[Tensor], None]  # adds the gradient of some rows to a whole one when it is due
ALL = slice(None)
AT_ONCE = {"cpu": 2**21}  # bytes of stacked rows and keys: what a cache holds
ELSEWHERE = 2**26  # on a card: large enough to keep it busy, small beside any step


class Tap:
    """A place in the graph, made while the model runs, where gradients of rows are brought later.

    The gradient of a few rows is a whole tensor of zeros but for those rows. Made when a loss is
    traced back, those of all layers would exist at once, on top of every activation. A tap is
    told how to make the rows, and adds them when the backward pass has come to its layer. Give its
    `tensor` to attention, and to nothing else: then they are added into the gradient that attention
    has made, and no tensor of zeros is made at all.
    """

    def __init__(self, tensor: Tensor, parts: "list[tuple[int, Part]]") -> None:
        self.tensor = tensor
        self.parts = parts

    def bring(self, part: Part) -> None:
        """The gradient of some rows, for the backward pass that is under way."""
        self.parts.append((torch._C._current_graph_task_id(), part))


def tap(*tensors: Tensor) -> tuple[Tap, ...]:
    """Taps of tensors whose gradients come together, as those of queries and keys: one node."""
    parts: list[list[tuple[int, Part]]] = [[] for _ in tensors]
    return tuple(map(Tap, _Tapped.apply(parts, *tensors), parts))


class _Tapped(torch.autograd.Function):
    """The tensors themselves; to their gradients is added what was brought to their taps."""

    @staticmethod
    def forward(ctx: Any, parts: list[list[Any]], *tensors: Tensor) -> Any:
        """The same values. The graph knows the parts and not the taps, which know the graph."""
        ctx.set_materialize_grads(False)
        ctx.parts = parts
        ctx.like = [(one.shape, one.dtype, one.device) for one in tensors]
        return tuple(one.view_as(one) for one in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """The rows in their places, and whatever came along the graph."""
        return None, *map(_with_rows, gradients, ctx.parts, ctx.like)


def _with_rows(whole: Tensor | None, brought: list[Any], like: tuple[Any, ...]) -> Tensor | None:
    """A gradient with the rows that this backward pass has brought; what an earlier left, goes."""
    now = torch._C._current_graph_task_id()
    parts = [part for task, part in brought if task == now]
    brought.clear()
    if not parts:
        return whole
    if whole is None:
        shape, dtype, device = like
        whole = torch.zeros(shape, dtype=dtype, device=device)
    elif torch.is_grad_enabled() or _overlaps(whole):  # to be differentiated again, or expanded
        whole = whole.clone()
    for part in parts:
        part(whole)
    return whole


def _overlaps(values: Tensor) -> bool:
    """Whether some places of memory stand for many values, so that none can be written alone."""
    sides = zip(values.shape, values.stride(), strict=True)
    return any(size > 1 and not stride for size, stride in sides)


# --- products and their softmax


def products(
    queries: Sequence[Float[Tensor, "b h q d"] | Tap],
    keys: Sequence[Float[Tensor, "b g k d"] | Tap],
    rows: Index,
    columns: Index,
    scale: float = 1.0,
) -> Float[Tensor, "l b h s r"]:
    """`scale query . key` of some rows and keys in every layer, in float32 at least, with gradient.

    The scale is on the rows of the queries, which are fewer than the products.
    """
    tensors, taps = _given(queries, keys)
    if torch.compiler.is_compiling():
        return _multiplied(tensors, rows, columns, scale)
    return _Products.apply(rows, columns, scale, None, taps, *tensors)


def log_shares(
    queries: Sequence[Float[Tensor, "b h q d"] | Tap],
    keys: Sequence[Float[Tensor, "b g k d"] | Tap],
    rows: Index,
    columns: Index,
    scale: float = 1.0,
    visible: Bool[Tensor, "b #s r"] | None = None,
) -> Float[Tensor, "l b h s r"]:
    """The log-softmax of the products over the columns that each row may see; -inf for the others.

    A row that sees nothing is -inf throughout, and has no gradient. Of the products and their
    softmax only the result is kept, which is what the gradient is made from.
    """
    tensors, taps = _given(queries, keys)
    hidden = None if visible is None or _all_seen(visible) else ~visible[:, None]
    if not torch.compiler.is_compiling():
        return _Products.apply(rows, columns, scale, (hidden,), taps, *tensors)
    if not _fits(tensors, rows, columns) or not isinstance(columns, slice):
        return _shared(_multiplied(tensors, rows, columns, scale), hidden)
    half = len(tensors) // 2
    span = range(tensors[-1].shape[2])[columns]
    return operators.log_shares(
        tensors[:half],
        tensors[half:],
        _listed(rows, tensors[0]),
        span.start,
        span.stop,
        scale,
        hidden,
    )


def fused(
    queries: Sequence[Float[Tensor, "b h q d"] | Tap],
    keys: Sequence[Float[Tensor, "b g k d"] | Tap],
    rows: Index,
    columns: Index,
) -> bool:
    """Whether `costs` can be asked for: on a card that has the kernels."""
    tensors, _ = _given(queries, keys)
    return not torch.compiler.is_compiling() and _fits(tensors, rows, columns)


def costs(
    queries: Sequence[Float[Tensor, "b h q d"] | Tap],
    keys: Sequence[Float[Tensor, "b g k d"] | Tap],
    rows: Index,
    columns: Index,
    scale: float,
    visible: Bool[Tensor, "b #s r"] | None,
    wanted: Float[Tensor, "b s r"],
    nothing: float,
) -> Float[Tensor, "l b h s"]:
    """`-sum over the columns of wanted times log_shares`, none of which is written to memory.

    Only where `fused` says so. A hidden column has a log-share of `nothing`, and no gradient;
    neither has `wanted`. Backward, shares are computed again from queries and keys.
    """
    tensors, taps = _given(queries, keys)
    hidden = None if visible is None or _all_seen(visible) else ~visible[:, None]
    found: Tensor = _Costs.apply(rows, columns, scale, (hidden,), wanted, nothing, taps, *tensors)
    return found


def _given(queries: Sequence[Any], keys: Sequence[Any]) -> tuple[list[Tensor], list[Tap | None]]:
    given = [*queries, *keys]
    taps = [one if isinstance(one, Tap) else None for one in given]
    return [one.tensor if isinstance(one, Tap) else one for one in given], taps


def _all_seen(visible: Tensor) -> bool:
    """Whether a mask is known to hide nothing: asked where that costs no waiting."""
    known = visible.device.type == "cpu" and not torch.compiler.is_compiling()
    return known and bool(visible.all())


class _Products(torch.autograd.Function):
    """Products of many layers at once; the gradient goes to the rows and keys that took part."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Index,
        columns: Index,
        scale: float,
        softmax: tuple[Tensor | None] | None,
        taps: list[Tap | None],
        *tensors: Tensor,
    ) -> Tensor:
        """The scores, or with `softmax`, which holds what is hidden, their logarithmic shares."""
        ctx.rows, ctx.columns, ctx.scale, ctx.taps = rows, columns, scale, taps
        ctx.softmax = softmax
        if softmax is None:
            ctx.save_for_backward(*tensors)
            return _multiplied(tensors, rows, columns, scale)
        on_card = _on_card(tensors, ctx)
        if on_card is not None:
            found = on_card.log_shares()
        else:
            found = _shared(_multiplied(tensors, rows, columns, scale), softmax[0])
        ctx.save_for_backward(*tensors, found)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Each layer's gradient, brought to its tap or made whole."""
        gradient, tensors = gradients[0], list(ctx.saved_tensors)
        logs = None if ctx.softmax is None else tensors.pop()
        # not to be differentiated again: that is for plain operations
        on_card = None if torch.is_grad_enabled() or logs is None else _on_card(tensors, ctx)
        if on_card is not None and logs is not None:
            slopes = gradient.float().contiguous()
            rows, sums = on_card.of_rows(slopes, logs)
            given = slopes, logs, sums
            if _untapped(ctx, tensors):
                put = partial(on_card.put_keys, given)
                return (None,) * 5 + _wholes(on_card, rows, put, tensors)
            parts = _parts_on_card(on_card, rows, partial(on_card.add_to_keys, given))
        else:
            if logs is not None:
                gradient = _unshared(gradient, logs, ctx.softmax[0])
            parts = _parts(gradient, tensors, ctx)
        return (None,) * 5 + _all_handed(parts, tensors, ctx)


class _Costs(torch.autograd.Function):
    """Cross-entropies of the rows of many layers with their targets; for kernels alone."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Index,
        columns: Index,
        scale: float,
        softmax: tuple[Tensor | None],
        wanted: Tensor,
        nothing: float,
        taps: list[Tap | None],
        *tensors: Tensor,
    ) -> Tensor:
        """The costs; kept are two numbers a row, and the targets."""
        ctx.rows, ctx.columns, ctx.scale, ctx.taps = rows, columns, scale, taps
        ctx.softmax, ctx.nothing = softmax, nothing
        on_card = _on_card(tensors, ctx)
        assert on_card is not None
        made = on_card.costs(wanted, nothing)
        ctx.save_for_backward(*tensors, *made.kept)
        return made.values

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Each layer's gradient, as that of log-shares is handed on."""
        *tensors, levels, masses, wanted = ctx.saved_tensors
        on_card = None if torch.is_grad_enabled() else _on_card(tensors, ctx)
        if on_card is None:
            parts = _parts_of_costs(gradients[0], tensors, wanted, ctx)
        else:
            slopes, kept = gradients[0].float().contiguous(), (levels, masses, wanted)
            given, whole = (slopes, *kept), _untapped(ctx, tensors)
            if whole and on_card.groups == on_card.sizes[2]:
                return (None,) * 7 + _both(partial(on_card.put_costs, given), tensors)
            rows = on_card.rows_of_costs(slopes, kept)
            if whole:
                put = partial(on_card.put_costs_to_keys, given)
                return (None,) * 7 + _wholes(on_card, rows, put, tensors)
            parts = _parts_on_card(on_card, rows, partial(on_card.add_costs_to_keys, given))
        return (None,) * 7 + _all_handed(parts, tensors, ctx)


def _parts_of_costs(
    gradient: Tensor, tensors: Sequence[Tensor], wanted: Tensor, ctx: Any
) -> list[Part]:
    """The same by plain operations, which can be differentiated again."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # of those that learn nothing the gradient is thrown away, but torch refuses to make it
        given = [one if one.requires_grad else one.detach().requires_grad_() for one in tensors]
        logs = _shared(_multiplied(given, ctx.rows, ctx.columns, ctx.scale), ctx.softmax[0])
        logs = torch.where(logs.isneginf(), ctx.nothing, logs)
        found = -(wanted[:, None] * logs).sum(dim=-1)
        slopes = torch.autograd.grad(found, given, gradient, create_graph=again)
    return [partial(_add, one) for one in slopes]


def _add(part: Tensor, whole: Tensor) -> None:
    whole += part


def _all_handed(parts: Sequence[Part], tensors: Sequence[Tensor], ctx: Any) -> tuple[Any, ...]:
    needed = ctx.needs_input_grad[-len(tensors) :]
    return tuple(
        _handed(part, like, tap) if wanted else None
        for part, like, tap, wanted in zip(parts, tensors, ctx.taps, needed, strict=True)
    )


def _fits(tensors: Sequence[Tensor], rows: Index, columns: Index) -> bool:
    """Whether the kernels know such a call."""
    half = len(tensors) // 2
    queries, keys = tensors[:half], tensors[half:]
    if not isinstance(columns, slice) or columns.step not in (None, 1):
        return False
    few = launching.fit(queries, keys, _length(queries[0], rows))
    return few and _length(keys[0], columns) > 0


def _on_card(tensors: Sequence[Tensor], ctx: Any) -> "launching.Layers | None":
    """The kernels for a call on a card that has them and a call that they know; None otherwise."""
    half = len(tensors) // 2
    queries, keys = tensors[:half], tensors[half:]
    if not _fits(tensors, ctx.rows, ctx.columns):
        return None
    rows = _listed(ctx.rows, queries[0])
    return launching.Layers(queries, keys, rows, ctx.columns, ctx.scale, ctx.softmax[0])


def _listed(rows: Index, query: Tensor) -> Int[Tensor, "b s"]:
    """Positions as numbers, on the device of the queries."""
    if isinstance(rows, slice):
        places = range(query.shape[2])[rows]
        at = torch.arange(places.start, places.stop, places.step, device=query.device)
        return at.expand(len(query), -1)
    return rows.to(query.device)


def _parts_on_card(
    layers: "launching.Layers",
    rows: Float[Tensor, "l b h s d"],
    add: Callable[[int, Tensor], None],
) -> list[Part]:
    """How to add the gradient of each layer's rows, and after them of each layer's keys."""
    at = layers.rows.clamp_min(0)
    of_rows = [partial(_place, one, at) for one in rows]
    return [*of_rows, *(partial(add, layer) for layer in range(len(rows)))]


def _untapped(ctx: Any, tensors: Sequence[Tensor]) -> bool:
    """Whether all gradients are wanted whole: no tap adds them to others."""
    none = all(one is None for one in ctx.taps)
    return none and all(ctx.needs_input_grad[-len(tensors) :])


def _both(put: Callable[[Tensor, Tensor], None], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Whole gradients of queries and keys, which one kernel writes."""
    half = len(tensors) // 2
    queries, keys = _room(tensors[:half]), _room(tensors[half:])
    put(queries, keys)
    return *queries.unbind(), *keys.unbind()


def _wholes(
    layers: "launching.Layers",
    rows: Float[Tensor, "l b h s d"],
    put: Callable[[Tensor, int], None],
    tensors: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    """Whole gradients of queries and keys, those of all layers made at once."""
    half = len(tensors) // 2
    queries, keys = _room(tensors[:half]).zero_(), _room(tensors[half:])
    at = layers.rows.clamp_min(0)[:, None, :, None].expand(rows.shape)
    queries.scatter_add_(3, at, rows)
    start, count = layers.start, layers.sizes[-1]
    for outside in (keys[:, :, :, :start], keys[:, :, :, start + count :]):
        _zero(outside)
    put(keys, start)
    return *queries.unbind(), *keys.unbind()


def _zero(some: Float[Tensor, "l b h n d"]) -> None:
    """Zeros: a slice is filled number by number, so by numbers of eight bytes where it can be."""
    each = 8 // some.element_size()
    wide = some.stride(-1) == 1 and all(
        one % each == 0 for one in (*some.stride()[:-1], some.shape[-1])
    )
    (some.view(torch.int64) if wide else some).zero_()


def _room(likes: Sequence[Tensor]) -> Float[Tensor, "l b h n d"]:
    """Memory for gradients, laid out as a compiled graph takes them, or it would copy them.

    It takes them contiguous, or, in PyTorch after 2.11, as what it gave out.
    """
    like, known = likes[0], sys.modules.get("torch._functorch.config")
    as_given = getattr(known, "guess_tangent_strides_as_outputs", False)
    layout = torch.preserve_format if as_given else torch.contiguous_format
    strides = torch.empty_like(like, device="meta", memory_format=layout).stride()
    sizes = len(likes), *like.shape
    return torch.empty_strided(
        sizes, (like.numel(), *strides), dtype=like.dtype, device=like.device
    )


def _parts(gradient: Tensor, tensors: Sequence[Tensor], ctx: Any) -> list[Part]:
    """How to make the gradient of each layer's rows, and after them of each layer's keys.

    The rows are few, and those of many layers are made at once. The keys are many: each layer's are
    made when it is due, and not before.
    """
    count = len(tensors) // 2
    queries, keys = tensors[:count], tensors[count:]
    rows, columns = _ready(ctx.rows, gradient.device), _ready(ctx.columns, gradient.device)
    g, s = keys[0].shape[1], gradient.shape[3]
    of_rows, of_keys = list[Part](), list[Part]()
    with unrounded(gradient.device):
        for some in _groups(queries, keys, rows, columns):
            slopes = _by_group(gradient[some], g)
            if _as_they_lie(keys, columns):
                made = _multiplied_each(slopes, [one[:, :, columns] for one in keys[some]])
            else:
                made = slopes @ _stacked(keys[some], columns)
            made = _by_head(made.mul_(ctx.scale), s)
            of_rows += [partial(_place, one, rows) for one in made.to(queries[0].dtype)]
            at = _by_group(_stacked(queries[some], rows).mul_(ctx.scale), g)
            of_keys += [partial(_turned, *pair, columns) for pair in zip(slopes, at, strict=True)]
    return of_rows + of_keys


def _turned(
    slopes: Float[Tensor, "b g s r"], rows: Float[Tensor, "b g s d"], index: Index, whole: Tensor
) -> None:
    with unrounded(rows.device):
        _place(slopes.transpose(-1, -2) @ rows, index, whole)


def _handed(part: Part, like: Tensor, tap: Tap | None) -> Any:
    """Nothing when a tap has taken the part; else the part as a gradient of the whole."""
    if tap is not None:
        tap.bring(part)
        return None
    whole = torch.zeros_like(like)
    part(whole)
    return whole


# --- arithmetic on all layers


def unrounded(device: torch.device) -> AbstractContextManager[Any]:
    """Arithmetic as it is written, whatever autocast is about to make of it."""
    known = device.type in ("cpu", "cuda") or torch.amp.is_autocast_available(device.type)
    if not known or not torch.is_autocast_enabled(device.type):  # a block costs more than to ask
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def _multiplied(
    tensors: Sequence[Tensor], rows: Index, columns: Index, scale: float
) -> Float[Tensor, "l b h s r"]:
    count = len(tensors) // 2
    queries, keys = tensors[:count], tensors[count:]
    rows, columns = _ready(rows, keys[0].device), _ready(columns, keys[0].device)
    g = keys[0].shape[1]
    with unrounded(tensors[0].device):
        found = []
        for some in _groups(queries, keys, rows, columns):
            at = _stacked(queries[some], rows)
            grouped = _by_group(at.mul_(scale), g)
            if _as_they_lie(keys, columns):
                turned = [one[:, :, columns].transpose(-1, -2) for one in keys[some]]
                scores = _multiplied_each(grouped, turned)
            else:
                scores = grouped @ _stacked(keys[some], columns).transpose(-1, -2)
            found.append(_by_head(scores, at.shape[3]))
        return found[0] if len(found) == 1 else torch.cat(found)


def _as_they_lie(keys: Sequence[Tensor], columns: Index) -> bool:
    """Whether keys can be multiplied without a copy of them.

    They need no other format, lie in the memory of a CPU, and nobody will differentiate it.
    """
    precise = keys[0].dtype in (torch.float32, torch.float64)
    known = not torch.is_grad_enabled() and not torch.compiler.is_compiling()
    return isinstance(columns, slice) and keys[0].device.type == "cpu" and precise and known


def _multiplied_each(
    values: Float[Tensor, "l b g m x"], keys: Sequence[Float[Tensor, "b g x y"]]
) -> Float[Tensor, "l b g m y"]:
    """Sample by sample, because the heads of all samples are no batch that can be read in place."""
    found = values.new_empty(*values.shape[:-1], keys[0].shape[-1])
    for layer, key in enumerate(keys):
        for sample, one in enumerate(key):
            torch.bmm(values[layer, sample], one, out=found[layer, sample])
    return found


def _shared(scores: Float[Tensor, "l b h s r"], hidden: Tensor | None) -> Tensor:
    """Finite scores to log-shares; they hide nothing, so the small mask says what is empty."""
    if hidden is None:
        return scores.log_softmax(dim=-1)
    empty = hidden.all(dim=-1, keepdim=True)
    # the gradient of a softmax over nothing is NaN even where it is thrown away
    logs = scores.masked_fill_(hidden & ~empty, -torch.inf).log_softmax(dim=-1)
    return logs.masked_fill(empty, -torch.inf)


def _unshared(gradient: Tensor, logs: Tensor, hidden: Tensor | None) -> Tensor:
    """The gradient of the scores from that of their log-shares."""
    if hidden is not None:
        gradient = gradient.masked_fill(hidden, 0)
    return torch._log_softmax_backward_data(gradient, logs, -1, logs.dtype)


def _groups(
    queries: Sequence[Tensor], keys: Sequence[Tensor], rows: Index, columns: Index
) -> Iterator[slice]:
    """Runs of layers that are multiplied at once, as many as memory of little size holds."""
    query, key = queries[0], keys[0]
    width = torch.promote_types(query.dtype, torch.float32).itemsize * query.shape[-1]
    held = _length(query, rows) * query.shape[1] + _length(key, columns) * key.shape[1]
    most = AT_ONCE.get(query.device.type, ELSEWHERE)
    step = max(1, most // max(1, width * held * len(query)))
    for start in range(0, len(queries), step):
        yield slice(start, min(start + step, len(queries)))


def _length(tensor: Tensor, index: Index) -> int:
    return len(range(tensor.shape[2])[index]) if isinstance(index, slice) else index.shape[1]


def _ready(index: Index, device: torch.device) -> Index:
    """Positions to gather by, on the device; -1 reads and gets the first, and is hidden."""
    return index if isinstance(index, slice) else index.to(device).clamp_min(0)


def _stacked(tensors: Sequence[Tensor], index: Index) -> Float[Tensor, "l b h s d"]:
    """Rows of many layers in memory of their own, in float32 at least; a slice is never indexed."""
    if isinstance(index, slice):
        found = torch.stack([one[:, :, index] for one in tensors])
    else:
        b, h, _, d = tensors[0].shape
        places = index[:, None, :, None].expand(b, h, -1, d)
        found = torch.stack([one.gather(2, places) for one in tensors])
    return found.to(torch.promote_types(found.dtype, torch.float32))


def _by_group(values: Float[Tensor, "l b h s d"], g: int) -> Float[Tensor, "l b g m d"]:
    l, b, h, s, d = values.shape
    return values.reshape(l, b, g, h // g * s, d)


def _by_head(values: Float[Tensor, "l b g m d"], s: int) -> Float[Tensor, "l b h s d"]:
    l, b, g, m, d = values.shape
    return values.reshape(l, b, g * m // max(1, s), s, d)


def _place(part: Tensor, index: Index, whole: Tensor) -> None:
    """Add a part to the whole at its place; a position that was used twice gets both."""
    if isinstance(index, slice):
        whole[:, :, index] += part
    else:
        places = index[:, None, :, None].expand_as(part)
        whole.scatter_add_(2, places, part.to(whole.dtype))


def take(values: Tensor, index: Index | None, dim: int) -> Tensor:
    """The positions `index` along one axis of (b, h, n, m); -1 reads the first, to be hidden."""
    if not isinstance(index, Tensor):
        if index is None or index == ALL:
            return values
        return values[:, :, index] if dim == 2 else values[..., index]
    at = index.to(values.device).clamp_min(0)
    at = at[:, None, :, None] if dim == 2 else at[:, None, None, :]
    sizes = [len(index), *values.shape[1:]]
    sizes[dim] = at.shape[dim]
    if values.shape[0] != len(index):
        values = values.expand(len(index), *values.shape[1:])
    return values.gather(dim, at.expand(sizes))
