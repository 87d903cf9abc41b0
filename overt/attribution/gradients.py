"""Gradient-weighted attention, without a stored matrix of gradients.

The output of an attention call is O = A V, so the gradient of a target with respect to the weight
of query i and key j is the product of the gradient of O at i and the value at j. One backward pass
computes the former, the call has the latter, and any rows of the gradient are their product,
computed on demand. The model runs on its fused kernel. Dropout of weights is ignored: use
evaluation mode.

Chefer, Gur and Wolf, "Generic Attention-model Explainability for Interpreting Bi-Modal and
Encoder-Decoder Transformers", ICCV 2021, https://arxiv.org/abs/2103.15679.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from overt.attention import AttentionMap, Kind
from overt.attribution.attention_rollout import reachable_inputs
from overt.attribution.raw_attention import (
    check_self_attention,
    compute_dtype,
    default_chunk,
    device_of,
    hide_missing_rows,
    one_hot_rows,
    resolve_rows,
    row_chunks,
    row_positions,
    union_mask,
    without_autocast,
)
from overt.capture.axes import to_bhnm
from overt.capture.block_scores import ALL, Index, take_positions
from overt.capture.call import Call, MaterializedCall
from overt.capture.stacked_calls import stack_layers
from overt.capture.trace import AttentionTrace, Where


@dataclass(frozen=True, eq=False)
class AttentionGradient:
    """The gradient of a target with respect to the weights of one call, computed by rows.

    It stores the gradient of the output and the value, or the gradient of the weights if the model
    computes them explicitly.

    Args:
        call: The captured call.
        output: The gradient of the output of the call.
        value: The value of the call.
        weights: The gradient of explicit weights.
    """

    call: Call
    output: Float[Tensor, "b h q d"] | None = None
    value: Float[Tensor, "b g k d"] | None = None
    weights: Float[Tensor, "b h q k"] | None = None

    def __call__(self, rows: Index = ALL) -> Float[Tensor, "b h s k"]:
        """Return the gradient of some rows of the weights."""
        if self.weights is not None:
            return take_positions(self.weights, rows, 2).to(compute_dtype(self.call))
        assert self.output is not None and self.value is not None
        with torch.autocast(self.value.device.type, enabled=False):
            precise = torch.promote_types(self.value.dtype, torch.float32)
            value = self.value.to(precise)
            output = take_positions(self.output, rows, 2).to(precise)
            # d A = d O @ V^T; heads that share values form a group.
            grouped = output.unflatten(1, (value.shape[1], -1))
            return (grouped @ value.mT.unsqueeze(2)).flatten(1, 2)


def attention_gradients(
    trace: AttentionTrace, target: Tensor, *, create_graph: bool = False
) -> list[AttentionGradient]:
    """Compute the gradient of a target with respect to the weights of each call.

    One backward pass. The graph is kept, and no `.grad` is changed.

    Args:
        trace: A trace of `overt.watch`.
        target: What to explain: one score per sample, or a loss. It is summed.
        create_graph: As in `torch.autograd.grad`: allow a gradient of the result. The fused kernels
            of PyTorch have no second derivative; run the model under
            `torch.nn.attention.sdpa_kernel(SDPBackend.MATH)` or with eager attention.

    Returns:
        One gradient per call.

    Raises:
        ValueError: The target has more than one axis or no gradient, or a call has none.

    Example:
        >>> from torch import nn
        >>> from overt import watch
        >>> layer = nn.MultiheadAttention(8, 2, batch_first=True)
        >>> x = torch.randn(1, 5, 8)
        >>> with watch(layer) as trace:
        ...     out, _ = layer(x, x, x, need_weights=False)
        >>> len(attention_gradients(trace, out.sum()))  # one per layer
        1
    """
    trace.check_stackable()
    if target.ndim > 1:
        raise ValueError(
            f"target must be one score per sample, got the shape {tuple(target.shape)}; choose a "
            "class, such as logits[:, 2]"
        )
    if not target.requires_grad:
        raise ValueError(
            "target does not require a gradient: run the model without no_grad, with a parameter "
            "or an input that requires one"
        )
    tensors: list[Tensor] = []
    for call in trace.calls:
        tensors += [tensor for tensor in _differentiable_tensors(call) if tensor is not None]
    found = torch.autograd.grad(
        target.sum(), tensors, retain_graph=True, create_graph=create_graph, allow_unused=True
    )
    # By id, because tensors compare elementwise.
    by_tensor = {id(tensor): gradient for tensor, gradient in zip(tensors, found, strict=True)}
    return [_attention_gradient(call, by_tensor) for call in trace.calls]


@without_autocast
def gradient_attention(
    trace: AttentionTrace, target: Tensor, rows: Where | None = None, *, create_graph: bool = False
) -> AttentionMap:
    """Compute gradient times attention of every layer and head.

    To first order this is what each weight adds to the target; it is positive where more attention
    would raise the target.

    Args:
        trace: A trace of `overt.watch`.
        target: What to explain: one score per sample, or a loss.
        rows: The name of a span or positions per sample; None computes all queries.
        create_graph: See `attention_gradients`.

    Returns:
        A signed map.

    Raises:
        ValueError: See `attention_gradients`.

    Example:
        >>> from torch import nn
        >>> from overt import watch
        >>> layer = nn.MultiheadAttention(8, 2, batch_first=True)
        >>> x = torch.randn(1, 5, 8)
        >>> with watch(layer) as trace:
        ...     out, _ = layer(x, x, x, need_weights=False)
        >>> gradient_attention(trace, out[:, 0].sum()).shape
        (1, 1, 2, 5, 5)
    """
    found = attention_gradients(trace, target, create_graph=create_graph)
    at, queries, keys = resolve_rows(trace, rows)
    mask = union_mask(trace, at)
    with torch.set_grad_enabled(create_graph):
        values = stack_layers(gradient.call.weights(at) * gradient(at) for gradient in found)
        if isinstance(at, Tensor):
            present = (at >= 0).to(values.device)
            values = values * present[:, None, None, :, None]
            mask = hide_missing_rows(mask, present, len(keys))
        elif mask is not None:
            mask = mask.expand(len(values), -1, -1)
    return AttentionMap(values, keys, queries, mask, Kind.SIGNED)


@without_autocast
def relevance(
    trace: AttentionTrace,
    target: Tensor,
    rows: Where | None = None,
    *,
    create_graph: bool = False,
    chunk: int | None = None,
) -> AttentionMap:
    """Compute how relevant each input is to each position for the target (Chefer et al. 2021).

    Equations 5 and 6: in every layer the positive part of gradient times attention, averaged over
    heads, is added to the identity, and the layers are multiplied. For a prediction, request the
    row it is computed from, such as the class token. The matrix of a layer is computed in chunks of
    rows and never stored: memory grows with rows x keys.

    Args:
        trace: A trace of `overt.watch`.
        target: What to explain: one score per sample, or a loss.
        rows: The name of a span or positions per sample; None computes all queries.
        create_graph: See `attention_gradients`.
        chunk: How many rows of a layer are computed at a time; None chooses by size.

    Returns:
        A map of amounts with one layer and one head.

    Raises:
        ValueError: The trace is not self-attention of one forward pass; see also
            `attention_gradients`.

    Example:
        >>> from torch import nn
        >>> from overt import watch
        >>> layer = nn.MultiheadAttention(8, 2, batch_first=True)
        >>> x = torch.randn(1, 5, 8)
        >>> with watch(layer) as trace:
        ...     out, _ = layer(x, x, x, need_weights=False)
        >>> relevance(trace, out[:, 0].sum()).shape
        (1, 1, 1, 5, 5)
    """
    check_self_attention(trace, "relevance")
    found = attention_gradients(trace, target, create_graph=create_graph)
    at, queries, keys = resolve_rows(trace, rows)
    b, _, q, _ = trace.calls[0].shape
    mask = union_mask(trace)
    with torch.set_grad_enabled(create_graph):
        first = row_positions(at, b, q, device_of(trace.calls[-1]))
        # R <- R + A' R of eq. 6, for some rows only: from the last layer to the first, the rows of
        # R are multiplied from the right.
        state = one_hot_rows(first, q, compute_dtype(trace.calls[-1]))
        for gradient in reversed(found):
            state = state.to(device_of(gradient.call))  # layers may be on several devices
            more = torch.zeros_like(state)
            for part in row_chunks(q, chunk or default_chunk(gradient.call)):
                # Eq. 5: the mean over heads of the positive part of gradient times attention.
                layer = (gradient.call.weights(part) * gradient(part)).clamp_min(0).mean(dim=1)
                more = more + state[..., part] @ layer
            state = state + more
    shown = None if mask is None else reachable_inputs(mask.expand(b, q, q), at, True, len(trace))
    if shown is not None:  # rows without a visible key are padding
        state = state * shown.any(dim=-1, keepdim=True)
    if isinstance(at, Tensor):
        shown = hide_missing_rows(shown, first >= 0, len(keys))
    return AttentionMap(state[:, None, None], keys, queries, shown, Kind.AMOUNT)


def _differentiable_tensors(call: Call) -> tuple[Tensor | None, Tensor | None]:
    """Return the tensors whose gradients determine the gradient of the weights of a call."""
    weights = call.source.used if isinstance(call.source, MaterializedCall) else None
    tensors = (call.output, weights)
    if not any(tensor is not None and tensor.requires_grad for tensor in tensors):
        raise ValueError(
            f"{call.name or 'the model'} ran without a gradient, or its output was not captured "
            "(print the trace for the reason); run it without no_grad, with a parameter or an "
            "input that requires a gradient"
        )
    # Explicit weights have a gradient of their own; of a fused call only the output has one.
    output, weights = (
        tensor if tensor is not None and tensor.requires_grad else None for tensor in tensors
    )
    return output, weights


def _attention_gradient(call: Call, found: Mapping[int, Tensor | None]) -> AttentionGradient:
    output, weights = (
        None if tensor is None else found[id(tensor)] for tensor in _differentiable_tensors(call)
    )
    if call.head_indices is not None:
        raise ValueError(
            f"heads {list(call.head_indices)} of {call.name or 'the model'} have no separate "
            "gradient; select heads of the resulting map, not of the trace"
        )
    if weights is not None:
        return AttentionGradient(call, weights=weights)
    if output is None:
        raise ValueError(
            f"the target does not depend on the output of {call.name or 'the model'}; choose calls "
            "with where(...), and run the model without torch.compile"
        )
    b, h, q, k = call.shape
    value = call.value
    if value is None or value.shape[-2] != k or value.numel() % (b * k * value.shape[-1]):
        raise ValueError(f"{call.name or 'the model'} has no values of its keys")
    size = value.shape[-1]
    if output.numel() != b * h * q * size or output.shape[-2] != q:
        raise ValueError(
            f"the output of {call.name or 'the model'} has the shape {tuple(output.shape)} for "
            f"weights {call.shape}; select heads of the resulting map, not of the trace"
        )
    # The output has the axes of the model, such as heads folded into the batch.
    arranged = (
        to_bhnm(output, h) if call.leading_axes is None else call.leading_axes.to_bhnm(output)
    )
    return AttentionGradient(call, arranged.reshape(b, h, q, size), value.reshape(b, -1, k, size))
