"""Compute scores of the same rows and keys in many layers, without computing whole maps.

Plain autograd would save a float32 copy of the keys in every layer, create a dozen small nodes per
layer, and keep the gradients of all layers at once. Here one autograd function covers all layers
and saves only what attention has saved anyway: queries and keys. It multiplies many layers at once,
so that small layers need few kernel launches, in chunks of bounded memory.

Nothing here synchronizes the GPU. On CUDA with Triton, the log-softmax is computed by Triton
kernels (`kernels.triton_launch`), and a cross-entropy is summed without materializing the
log-softmax (`fused_cross_entropy`). Under `torch.compile` the kernels are called as custom
operators (`kernels.custom_ops`) on a GPU; elsewhere plain operations do the same arithmetic.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from overt.capture import _torch_compat
from overt.capture.kernels import custom_ops, triton_launch

Index = slice | Tensor  # positions: a slice for all samples, or one row per sample
AddGradient = Callable[[Tensor], None]  # adds the gradient of some rows into a whole gradient
ALL = slice(None)
MAX_CHUNK_BYTES = {"cpu": 2**21}  # of stacked rows and keys per chunk: fits a CPU cache
MAX_CHUNK_BYTES_GPU = 2**26  # enough to keep a GPU busy, small beside a training step


# --- gradient taps


class GradTap:
    """A node of the autograd graph to which gradients of rows can be added later.

    The gradient of a few rows is a whole tensor, zero but for those rows. Created while a loss is
    differentiated, these tensors would exist for all layers at once, on top of every activation. A
    tap stores how to compute the rows, and adds them when the backward pass reaches its layer. Pass
    its `tensor` to attention only: then the rows are added into the gradient that attention has
    computed, and no tensor of zeros is created.
    """

    def __init__(self, tensor: Tensor, parts: "list[tuple[int, AddGradient]]") -> None:
        self.tensor = tensor
        self.parts = parts

    def defer(self, part: AddGradient) -> None:
        """Store the gradient of some rows for the running backward pass."""
        self.parts.append((_torch_compat.backward_pass_id(), part))


def tap_gradients(*tensors: Tensor) -> tuple[GradTap, ...]:
    """Return a tap for each tensor, with one autograd node for all of them."""
    parts: list[list[tuple[int, AddGradient]]] = [[] for _ in tensors]
    return tuple(map(GradTap, _TapGradients.apply(parts, *tensors), parts))


class _TapGradients(torch.autograd.Function):
    """The identity; backward adds the gradients deferred to the taps."""

    @staticmethod
    def forward(ctx: Any, parts: list[list[Any]], *tensors: Tensor) -> Any:
        """Return views. The node refers to `parts`, not to the taps: they would form a cycle."""
        # Otherwise autograd passes a tensor of zeros to backward for every view without a gradient:
        # the whole tensors that taps avoid.
        ctx.set_materialize_grads(False)
        ctx.parts = parts
        # Shapes, not tensors: saving the tensors would keep them alive until the backward pass.
        ctx.like = [(one.shape, one.dtype, one.device) for one in tensors]
        return tuple(one.view_as(one) for one in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """Return the incoming gradients plus the deferred rows."""
        return None, *map(_add_deferred, gradients, ctx.parts, ctx.like)


def _add_deferred(
    whole: Tensor | None, deferred: list[Any], like: tuple[Any, ...]
) -> Tensor | None:
    """Add the rows deferred in this backward pass; drop leftovers of earlier passes."""
    now = _torch_compat.backward_pass_id()
    parts = [part for task, part in deferred if task == now]
    deferred.clear()
    if not parts:
        return whole
    if whole is None:
        shape, dtype, device = like
        whole = torch.zeros(shape, dtype=dtype, device=device)
    elif torch.is_grad_enabled() or _is_expanded(whole):  # to be differentiated again, or expanded
        whole = whole.clone()
    for part in parts:
        part(whole)
    return whole


def _is_expanded(values: Tensor) -> bool:
    """Whether several entries share memory, so that the tensor cannot be written in place."""
    sides = zip(values.shape, values.stride(), strict=True)
    return any(size > 1 and not stride for size, stride in sides)


# --- scores and their softmax


def block_scores(
    queries: Sequence[Float[Tensor, "b h q d"] | GradTap],
    keys: Sequence[Float[Tensor, "b g k d"] | GradTap],
    rows: Index,
    columns: Index,
    scale: float = 1.0,
) -> Float[Tensor, "l b h s r"]:
    """Compute `scale query . key` of some rows and keys in every layer, in at least float32.

    The scale is applied to the rows of the queries, which are smaller than the scores.
    """
    tensors, taps = _unpack_taps(queries, keys)
    if torch.compiler.is_compiling():
        # There are no taps in a graph (`_make_taps` makes none), and plain operations are
        # differentiated by the compiler.
        return _score_layers(tensors, rows, columns, scale)
    return _BlockScores.apply(rows, columns, scale, None, taps, *tensors)


def block_log_softmax(
    queries: Sequence[Float[Tensor, "b h q d"] | GradTap],
    keys: Sequence[Float[Tensor, "b g k d"] | GradTap],
    rows: Index,
    columns: Index,
    scale: float = 1.0,
    visible: Bool[Tensor, "b #s r"] | None = None,
) -> Float[Tensor, "l b h s r"]:
    """Compute the log-softmax of the scores over the visible columns of each row, -inf elsewhere.

    A row without visible columns is -inf throughout and has no gradient. Only the result is saved
    for the backward pass.
    """
    tensors, taps = _unpack_taps(queries, keys)
    hidden = None if visible is None or _hides_nothing(visible) else ~visible[:, None]
    if not torch.compiler.is_compiling():
        return _BlockScores.apply(rows, columns, scale, (hidden,), taps, *tensors)
    if not _supported(tensors, rows, columns) or not isinstance(columns, slice):
        return _masked_log_softmax(_score_layers(tensors, rows, columns, scale), hidden)
    half = len(tensors) // 2
    # The schema of an operator has integers and no slice.
    span = range(tensors[-1].shape[2])[columns]
    return custom_ops.block_log_softmax(
        tensors[:half],
        tensors[half:],
        _row_indices(rows, tensors[0]),
        span.start,
        span.stop,
        scale,
        hidden,
    )


def can_fuse(
    queries: Sequence[Float[Tensor, "b h q d"] | GradTap],
    keys: Sequence[Float[Tensor, "b g k d"] | GradTap],
    rows: Index,
    columns: Index,
) -> bool:
    """Return whether `fused_cross_entropy` supports this call: on a GPU with Triton."""
    tensors, _ = _unpack_taps(queries, keys)
    return not torch.compiler.is_compiling() and _supported(tensors, rows, columns)


def fused_cross_entropy(
    queries: Sequence[Float[Tensor, "b h q d"] | GradTap],
    keys: Sequence[Float[Tensor, "b g k d"] | GradTap],
    rows: Index,
    columns: Index,
    scale: float,
    visible: Bool[Tensor, "b #s r"] | None,
    target: Float[Tensor, "b s r"],
    log_eps: float,
) -> Float[Tensor, "l b h s"]:
    """Compute `-sum_r target log_softmax` of each row without materializing the log-softmax.

    Needs `can_fuse`. The log-softmax of a hidden column is `log_eps`, without gradient; `target`
    has no gradient either. The backward pass recomputes the softmax from queries and keys.
    """
    tensors, taps = _unpack_taps(queries, keys)
    hidden = None if visible is None or _hides_nothing(visible) else ~visible[:, None]
    found: Tensor = _BlockCrossEntropy.apply(
        rows, columns, scale, (hidden,), target, log_eps, taps, *tensors
    )
    return found


def _unpack_taps(
    queries: Sequence[Any], keys: Sequence[Any]
) -> tuple[list[Tensor], list[GradTap | None]]:
    given = [*queries, *keys]
    taps = [one if isinstance(one, GradTap) else None for one in given]
    return [one.tensor if isinstance(one, GradTap) else one for one in given], taps


def _hides_nothing(visible: Tensor) -> bool:
    """Return whether a mask hides nothing, if that can be read without synchronizing a GPU."""
    known = visible.device.type == "cpu" and not torch.compiler.is_compiling()
    return known and bool(visible.all())


class _BlockScores(torch.autograd.Function):
    """Scores of many layers at once; the gradient goes to the selected rows and keys."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Index,
        columns: Index,
        scale: float,
        softmax: tuple[Tensor | None] | None,
        taps: list[GradTap | None],
        *tensors: Tensor,
    ) -> Tensor:
        """Return the scores, or their log-softmax if `softmax` holds the (optional) mask."""
        ctx.rows, ctx.columns, ctx.scale, ctx.taps = rows, columns, scale, taps
        ctx.softmax = softmax
        if softmax is None:
            ctx.save_for_backward(*tensors)
            return _score_layers(tensors, rows, columns, scale)
        launcher = _triton_launcher(tensors, ctx)
        if launcher is not None:
            found = launcher.log_softmax()
        else:
            found = _masked_log_softmax(_score_layers(tensors, rows, columns, scale), softmax[0])
        # The gradient of a log-softmax needs its result only, so the scores are freed.
        ctx.save_for_backward(*tensors, found)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Defer each layer's gradient to its tap, or return it."""
        gradient, tensors = gradients[0], list(ctx.saved_tensors)
        logs = None if ctx.softmax is None else tensors.pop()
        # double backward needs plain operations
        launcher = (
            None if torch.is_grad_enabled() or logs is None else _triton_launcher(tensors, ctx)
        )
        if launcher is not None and logs is not None:
            slopes = gradient.float().contiguous()
            # The row sums of the gradient appear in the gradient of rows and of keys: computed
            # once.
            rows, sums = launcher.row_gradient(slopes, logs, once=True)
            given = slopes, logs, sums
            # Without taps, one launch writes the gradients of the keys of all layers; with taps,
            # each layer is added when the backward pass reaches it.
            if _returns_whole_gradients(ctx, tensors):
                put = partial(launcher.write_key_gradient, given)
                return (None,) * 5 + _whole_gradients(launcher, rows, put, tensors)
            parts = _triton_gradients(launcher, rows, partial(launcher.add_key_gradient, given))
        else:
            if logs is not None:
                gradient = _masked_log_softmax_backward(gradient, logs, ctx.softmax[0])
            parts = _score_gradients(gradient, tensors, ctx)
        return (None,) * 5 + _deliver_all(parts, tensors, ctx)


class _BlockCrossEntropy(torch.autograd.Function):
    """Cross-entropy of the rows of many layers with their targets, by Triton kernels."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Index,
        columns: Index,
        scale: float,
        softmax: tuple[Tensor | None],
        target: Tensor,
        log_eps: float,
        taps: list[GradTap | None],
        *tensors: Tensor,
    ) -> Tensor:
        """Return the cross-entropy; saves two numbers per row, and the targets."""
        ctx.rows, ctx.columns, ctx.scale, ctx.taps = rows, columns, scale, taps
        ctx.softmax, ctx.log_eps = softmax, log_eps
        launcher = _triton_launcher(tensors, ctx)
        assert launcher is not None
        made = launcher.cross_entropy(target, log_eps)
        ctx.save_for_backward(*tensors, *made.saved)
        return made.values

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Defer each layer's gradient to its tap, or return it."""
        *tensors, log_sums, target_masses, target = ctx.saved_tensors
        launcher = None if torch.is_grad_enabled() else _triton_launcher(tensors, ctx)
        if launcher is None:
            parts = _cross_entropy_gradients(gradients[0], tensors, target, ctx)
        else:
            slopes, kept = gradients[0].float().contiguous(), (log_sums, target_masses, target)
            given, whole = (slopes, *kept), _returns_whole_gradients(ctx, tensors)
            # Each head has keys of its own, so one program per head can write both gradients.
            if whole and launcher.groups == launcher.sizes[2]:
                return (None,) * 7 + _whole_gradients_at_once(
                    partial(launcher.write_cross_entropy_gradients, given), tensors
                )
            rows = launcher.cross_entropy_row_gradient(slopes, kept)
            if whole:
                put = partial(launcher.write_cross_entropy_key_gradient, given)
                return (None,) * 7 + _whole_gradients(launcher, rows, put, tensors)
            parts = _triton_gradients(
                launcher, rows, partial(launcher.add_cross_entropy_key_gradient, given)
            )
        return (None,) * 7 + _deliver_all(parts, tensors, ctx)


def _cross_entropy_gradients(
    gradient: Tensor, tensors: Sequence[Tensor], target: Tensor, ctx: Any
) -> list[AddGradient]:
    """Return the same gradients by plain operations, which can be differentiated again."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # torch.autograd.grad refuses inputs without gradient; theirs is dropped afterwards
        given = [one if one.requires_grad else one.detach().requires_grad_() for one in tensors]
        logs = _masked_log_softmax(
            _score_layers(given, ctx.rows, ctx.columns, ctx.scale), ctx.softmax[0]
        )
        # As in the kernel: a hidden column costs `log_eps` and has no gradient.
        logs = torch.where(logs.isneginf(), ctx.log_eps, logs)
        found = -(target[:, None] * logs).sum(dim=-1)
        slopes = torch.autograd.grad(found, given, gradient, create_graph=again)
    return [partial(_add, one) for one in slopes]


def _add(part: Tensor, whole: Tensor) -> None:
    whole += part


def _deliver_all(
    parts: Sequence[AddGradient], tensors: Sequence[Tensor], ctx: Any
) -> tuple[Any, ...]:
    needs = ctx.needs_input_grad[-len(tensors) :]
    return tuple(
        _deliver(part, like, tap) if needs_gradient else None
        for part, like, tap, needs_gradient in zip(parts, tensors, ctx.taps, needs, strict=True)
    )


# --- gradients by Triton kernels


def _supported(tensors: Sequence[Tensor], rows: Index, columns: Index) -> bool:
    """Return whether the kernels support this call."""
    half = len(tensors) // 2
    queries, keys = tensors[:half], tensors[half:]
    if not isinstance(columns, slice) or columns.step not in (None, 1):
        return False
    few = triton_launch.supports(queries, keys, _length(queries[0], rows))
    return few and _length(keys[0], columns) > 0


def _triton_launcher(tensors: Sequence[Tensor], ctx: Any) -> "triton_launch.BlockLauncher | None":
    """Return the kernel launcher for a call, None if the kernels do not support it."""
    half = len(tensors) // 2
    queries, keys = tensors[:half], tensors[half:]
    if not _supported(tensors, ctx.rows, ctx.columns):
        return None
    rows = _row_indices(ctx.rows, queries[0])
    return triton_launch.BlockLauncher(queries, keys, rows, ctx.columns, ctx.scale, ctx.softmax[0])


def _row_indices(rows: Index, query: Tensor) -> Int[Tensor, "b s"]:
    """Return positions as an index tensor on the device of the queries."""
    if isinstance(rows, slice):
        places = range(query.shape[2])[rows]
        at = torch.arange(places.start, places.stop, places.step, device=query.device)
        return at.expand(len(query), -1)
    return rows.to(query.device)


def _triton_gradients(
    layers: "triton_launch.BlockLauncher",
    rows: Float[Tensor, "l b h s d"],
    add: Callable[[int, Tensor], None],
) -> list[AddGradient]:
    """Return functions that add the gradient of each layer's rows, then of each layer's keys."""
    # Absent rows (-1) are masked by the callers, so what they add to position 0 is zero.
    at = layers.rows.clamp_min(0)
    of_rows = [partial(_scatter_add, one, at) for one in rows]
    return [*of_rows, *(partial(add, layer) for layer in range(len(rows)))]


def _returns_whole_gradients(ctx: Any, tensors: Sequence[Tensor]) -> bool:
    """Return whether all gradients are returned whole: there are no taps."""
    none = all(one is None for one in ctx.taps)
    return none and all(ctx.needs_input_grad[-len(tensors) :])


def _whole_gradients_at_once(
    put: Callable[[Tensor, Tensor], None], tensors: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Return whole gradients of queries and keys, written by one kernel."""
    half = len(tensors) // 2
    queries, keys = _empty_gradients(tensors[:half]), _empty_gradients(tensors[half:])
    put(queries, keys)
    return *queries.unbind(), *keys.unbind()


def _whole_gradients(
    layers: "triton_launch.BlockLauncher",
    rows: Float[Tensor, "l b h s d"],
    put: Callable[[Tensor, int], None],
    tensors: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    """Return whole gradients of queries and keys, for all layers at once."""
    half = len(tensors) // 2
    queries, keys = _empty_gradients(tensors[:half]).zero_(), _empty_gradients(tensors[half:])
    at = layers.rows.clamp_min(0)[:, None, :, None].expand(rows.shape)
    # Deterministic although atomic on a GPU: of several rows at one position, only the first is not
    # zero (`_sum_equal_rows`).
    queries.scatter_add_(3, at, rows)
    start, count = layers.start, layers.sizes[-1]
    # The kernel writes the selected keys only.
    for outside in (keys[:, :, :, :start], keys[:, :, :, start + count :]):
        _fill_zeros(outside)
    put(keys, start)
    return *queries.unbind(), *keys.unbind()


def _fill_zeros(some: Float[Tensor, "l b h n d"]) -> None:
    """Fill with zeros, eight bytes at a time where possible: slices are filled entry by entry."""
    each = 8 // some.element_size()
    # A view as a wider dtype needs a contiguous last axis, and all other strides divisible.
    wide = some.stride(-1) == 1 and all(
        one % each == 0 for one in (*some.stride()[:-1], some.shape[-1])
    )
    (some.view(torch.int64) if wide else some).zero_()


def _empty_gradients(likes: Sequence[Tensor]) -> Float[Tensor, "l b h n d"]:
    """Allocate gradients with the strides that a compiled graph expects, or it would copy them.

    It expects contiguous gradients or, in PyTorch after 2.11, the strides of its outputs.
    """
    like, as_outputs = likes[0], _torch_compat.gradients_follow_outputs()
    layout = torch.preserve_format if as_outputs else torch.contiguous_format
    strides = torch.empty_like(like, device="meta", memory_format=layout).stride()
    sizes = len(likes), *like.shape
    return torch.empty_strided(
        sizes, (like.numel(), *strides), dtype=like.dtype, device=like.device
    )


# --- gradients by plain operations


def _score_gradients(gradient: Tensor, tensors: Sequence[Tensor], ctx: Any) -> list[AddGradient]:
    """Return functions that add the gradient of each layer's rows, then of each layer's keys.

    The rows are few: their gradients are computed for many layers at once. The keys are many: the
    gradient of each layer is computed when the backward pass reaches it.
    """
    count = len(tensors) // 2
    queries, keys = tensors[:count], tensors[count:]
    rows, columns = (
        _gather_index(ctx.rows, gradient.device),
        _gather_index(ctx.columns, gradient.device),
    )
    g, s = keys[0].shape[1], gradient.shape[3]
    of_rows, of_keys = list[AddGradient](), list[AddGradient]()
    with no_autocast(gradient.device):
        for some in _layer_chunks(queries, keys, rows, columns):
            # d score / d query = scale * key, summed over the keys of the block.
            slopes = _by_group(gradient[some], g)
            if _multiplies_without_copy(keys, columns):
                made = _multiply_each(slopes, [one[:, :, columns] for one in keys[some]])
            else:
                made = slopes @ _stack_rows(keys[some], columns)
            made = _by_head(made.mul_(ctx.scale), s)
            of_rows += [partial(_add_at, one, rows) for one in made.to(queries[0].dtype)]
            # d score / d key = scale * query: the product with the slopes is made later, per layer.
            at = _by_group(_stack_rows(queries[some], rows).mul_(ctx.scale), g)
            of_keys += [
                partial(_add_key_gradient, *pair, columns) for pair in zip(slopes, at, strict=True)
            ]
    return of_rows + of_keys


def _add_key_gradient(
    slopes: Float[Tensor, "b g s r"], rows: Float[Tensor, "b g s d"], index: Index, whole: Tensor
) -> None:
    with no_autocast(rows.device):
        _add_at(slopes.transpose(-1, -2) @ rows, index, whole)


def _deliver(part: AddGradient, like: Tensor, tap: GradTap | None) -> Any:
    """Defer a gradient to its tap and return None; without a tap, return it whole."""
    if tap is not None:
        tap.defer(part)
        return None
    whole = torch.zeros_like(like)
    part(whole)
    return whole


# --- arithmetic on all layers


def no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context that disables autocast."""
    known = device.type in ("cpu", "cuda") or torch.amp.is_autocast_available(device.type)
    if not known or not torch.is_autocast_enabled(
        device.type
    ):  # entering autocast costs more than this check
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def _score_layers(
    tensors: Sequence[Tensor], rows: Index, columns: Index, scale: float
) -> Float[Tensor, "l b h s r"]:
    count = len(tensors) // 2
    queries, keys = tensors[:count], tensors[count:]
    rows, columns = _gather_index(rows, keys[0].device), _gather_index(columns, keys[0].device)
    g = keys[0].shape[1]
    with no_autocast(tensors[0].device):
        found = []
        for some in _layer_chunks(queries, keys, rows, columns):
            at = _stack_rows(queries[some], rows)
            grouped = _by_group(at.mul_(scale), g)
            # Stacking copies the keys of a chunk of layers; on a CPU many small products are
            # cheaper.
            if _multiplies_without_copy(keys, columns):
                turned = [one[:, :, columns].transpose(-1, -2) for one in keys[some]]
                scores = _multiply_each(grouped, turned)
            else:
                scores = grouped @ _stack_rows(keys[some], columns).transpose(-1, -2)
            found.append(_by_head(scores, at.shape[3]))
        return found[0] if len(found) == 1 else torch.cat(found)


def _multiplies_without_copy(keys: Sequence[Tensor], columns: Index) -> bool:
    """Whether keys can be multiplied in place: on a CPU, in full precision, without autograd."""
    # `bmm(out=)` has no gradient, and keys of 16 bits have to be copied to float32 in any case.
    precise = keys[0].dtype in (torch.float32, torch.float64)
    known = not torch.is_grad_enabled() and not torch.compiler.is_compiling()
    return isinstance(columns, slice) and keys[0].device.type == "cpu" and precise and known


def _multiply_each(
    values: Float[Tensor, "l b g m x"], keys: Sequence[Float[Tensor, "b g x y"]]
) -> Float[Tensor, "l b g m y"]:
    """Multiply sample by sample: the heads of all samples cannot be viewed as one batch."""
    found = values.new_empty(*values.shape[:-1], keys[0].shape[-1])
    for layer, key in enumerate(keys):
        for sample, one in enumerate(key):
            torch.bmm(values[layer, sample], one, out=found[layer, sample])
    return found


def _masked_log_softmax(scores: Float[Tensor, "l b h s r"], hidden: Tensor | None) -> Tensor:
    """Log-softmax of finite scores; empty rows are found in the mask, which is small."""
    if hidden is None:
        return scores.log_softmax(dim=-1)
    empty = hidden.all(dim=-1, keepdim=True)
    # the gradient of an empty softmax is NaN even where it is masked afterwards
    # In place: the scores are a fresh product that nobody else has.
    logs = scores.masked_fill_(hidden & ~empty, -torch.inf).log_softmax(dim=-1)
    return logs.masked_fill(empty, -torch.inf)


def _masked_log_softmax_backward(gradient: Tensor, logs: Tensor, hidden: Tensor | None) -> Tensor:
    """Gradient of the scores from that of their log-softmax."""
    if hidden is not None:
        gradient = gradient.masked_fill(hidden, 0)
    return _torch_compat.log_softmax_backward(gradient, logs)


def _layer_chunks(
    queries: Sequence[Tensor], keys: Sequence[Tensor], rows: Index, columns: Index
) -> Iterator[slice]:
    """Yield slices of layers that are multiplied at once, bounded by MAX_CHUNK_BYTES."""
    query, key = queries[0], keys[0]
    # The bound counts the float32 copies of rows and keys; the scores are the result itself.
    width = torch.promote_types(query.dtype, torch.float32).itemsize * query.shape[-1]
    held = _length(query, rows) * query.shape[1] + _length(key, columns) * key.shape[1]
    most = MAX_CHUNK_BYTES.get(query.device.type, MAX_CHUNK_BYTES_GPU)
    step = max(1, most // max(1, width * held * len(query)))
    for start in range(0, len(queries), step):
        yield slice(start, min(start + step, len(queries)))


def _length(tensor: Tensor, index: Index) -> int:
    return len(range(tensor.shape[2])[index]) if isinstance(index, slice) else index.shape[1]


def _gather_index(index: Index, device: torch.device) -> Index:
    """Return positions on the device; -1 (absent, masked elsewhere) becomes 0."""
    return index if isinstance(index, slice) else index.to(device).clamp_min(0)


def _stack_rows(tensors: Sequence[Tensor], index: Index) -> Float[Tensor, "l b h s d"]:
    """Copy rows of many layers into one tensor of at least float32."""
    if isinstance(index, slice):
        found = torch.stack([one[:, :, index] for one in tensors])
    else:
        b, h, _, d = tensors[0].shape
        places = index[:, None, :, None].expand(b, h, -1, d)
        found = torch.stack([one.gather(2, places) for one in tensors])
    return found.to(torch.promote_types(found.dtype, torch.float32))


def _by_group(values: Float[Tensor, "l b h s d"], g: int) -> Float[Tensor, "l b g m d"]:
    # Heads that share keys are adjacent (head i has keys i // (h / g)), so a reshape joins them.
    l, b, h, s, d = values.shape
    return values.reshape(l, b, g, h // g * s, d)


def _by_head(values: Float[Tensor, "l b g m d"], s: int) -> Float[Tensor, "l b h s d"]:
    l, b, g, m, d = values.shape
    return values.reshape(l, b, g * m // max(1, s), s, d)


def _add_at(part: Tensor, index: Index, whole: Tensor) -> None:
    """Add rows into `whole` at their positions; rows at equal positions are summed.

    Deterministic: on a GPU `scatter_add_` sums in any order, `index_put_` does not.
    """
    if isinstance(index, slice):
        whole[:, :, index] += part
    elif whole.is_cuda:
        # Indices on adjacent axes (sample, position) leave (h, d) behind them: values are (b, s, h,
        # d).
        samples = torch.arange(len(index), device=index.device)[:, None]
        values = part.to(whole.dtype).transpose(1, 2)
        whole.transpose(1, 2).index_put_((samples, index), values, accumulate=True)
    else:
        _scatter_add(part, index, whole)


def _scatter_add(part: Tensor, index: Int[Tensor, "b s"], whole: Tensor) -> None:
    """Add rows at their positions; on a GPU, all but one row per position must be zero."""
    whole.scatter_add_(2, index[:, None, :, None].expand_as(part), part.to(whole.dtype))


def take_positions(values: Tensor, index: Index | None, dim: int) -> Tensor:
    """Select the positions `index` along one axis of (b, h, n, m); -1 selects the first."""
    if not isinstance(index, Tensor):
        if index is None or index == ALL:
            return values
        return values[:, :, index] if dim == 2 else values[..., index]
    at = index.to(values.device).clamp_min(0)
    at = at[:, None, :, None] if dim == 2 else at[:, None, None, :]
    sizes = [len(index), *values.shape[1:]]
    sizes[dim] = at.shape[dim]
    # Values that all samples share, with positions per sample.
    if values.shape[0] != len(index):
        values = values.expand(len(index), *values.shape[1:])
    return values.gather(dim, at.expand(sizes))
